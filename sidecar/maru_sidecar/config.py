"""The daemon's configuration: defaults < TOML file < environment < flags, each layer naming only what it changes.

A setting is addressed the same way everywhere: ``[pool] size`` in the file, ``MARU_POOL_SIZE`` in the environment,
``pool.size`` among the flags; the control socket has a short name too, ``MARU_SOCKET``, which engines and commands read as
well. Sizes are bytes and may be written ``"64GiB"``. An unknown key, a wrong type or a value out of bounds is a
:class:`~maru_shm.errors.ConfigError` that names the key, where it was read and what would be right.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from maru_shm.endpoint import is_local, normal_endpoint
from maru_shm.errors import ConfigError, MaruError
from maru_shm.socket_path import VARIABLES, default_socket_path, socket_variable
from maru_sidecar.pool_spec import PoolSpec

ENV_PREFIX = "MARU_"
_UNITS = {
    "": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The control socket and who may use it."""

    socket: str = msgspec.field(default_factory=default_socket_path)
    mode: int = 0o660  #: permission bits of the socket
    group: str = ""  #: group that owns the socket; empty: the daemon's own
    allowed_uids: tuple[int, ...] = ()  #: beside the daemon's uid and root; with ``allowed_gids`` it replaces the socket's mode
    allowed_gids: tuple[int, ...] = ()
    max_connections: int = 128
    handshake_timeout_s: float = 5.0  #: a peer that has not said Hello by then is dropped
    idle_timeout_s: float = 300.0  #: a peer that never attached and says nothing is dropped


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The directory's policy."""

    high_watermark: float = 0.98  #: a store evicts above this share of a size class's slabs
    low_watermark: float = 0.95  #: down to this one
    lease_ttl_s: float = 60.0  #: a lookup's hit stays pinned this long unless given back
    namespace_quota: int = 0  #: bytes of slabs one namespace (model and layout) may hold; 0: no limit


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How bytes move."""

    checksum: Literal["auto", "on", "off"] = "auto"  #: auto: where the CPU moves the bytes anyway
    bytes_in_flight: int = 256 << 20  #: per GPU, or worker in host memory, and direction
    slice_bytes: int = 64 << 20  #: a load or store is cut into copies of this size, so that others get their turn
    cpu_threads: int = 0  #: threads that share one large copy of the cpu engine; 0: by the number of cores, 2 to 4
    gpu_submitters: int = 1  #: threads that submit one request's copies to a GPU: more where single blocks make them CPU-bound
    gpu_nudge: bool = True  #: an empty kernel a second beside copies, which shortens the engines' decode steps (cuda_nudge.py)
    copy_timeout_s: float = 30.0  #: a worker in host memory whose copy takes longer loses its session; a GPU is unhealthy then
    fence_timeout_s: float = 60.0  #: a load or store whose fence has not arrived by then fails
    store_patience_s: float = 0.02  #: a store waits this long for loads to end before each of its slices


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What engines may ask for at attach. Together they bound the memory that clients can make the daemon spend.

    A session's requests and leases take at most three times its segment of the daemon's heap, its copies about 100 bytes a
    piece, its place in the tables 2 MiB.
    """

    max_records: int = 4096
    max_keys: int = 1 << 14  #: per request; a lookup of so many takes about 5 ms of the main thread
    max_blocks: int = 1 << 20  #: per request
    max_pieces: int = 1 << 16  #: blocks × planes of a chunk: each piece is a descriptor of its copy
    segment_bytes: int = 512 << 20  #: of one session, in /dev/shm
    total_segment_bytes: int = 8 << 30  #: of all sessions
    max_engines: int = 64
    max_sessions: int = 256


class Daemon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process itself."""

    spin_us: float = 50.0  #: the poller looks at the rings this long after the last request before it sleeps
    switch_interval_s: float = 0.0005  #: the interpreter's: bounds how long a busy thread can hold up a lookup
    heartbeat_s: float = 0.25
    drain_timeout_s: float = 30.0  #: at SIGTERM, work still in flight after this is abandoned (its engines recompute)
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata server through which this sidecar shares its pool with others (``pool.shared``)."""

    endpoint: str = ""  #: ``tcp://host:port`` or ``host:port``, ``ipc:///path``; empty: off
    node: str = ""  #: this sidecar's name in the cluster; empty: host name and instance
    token_file: str = ""  #: the cluster's token; needed anywhere but on loopback
    lookup_wait_ms: float = 20.0  #: a lookup is answered without the server if that takes longer
    pin_ttl_s: float = 30.0  #: chunks of others stay pinned at the server this long, at most its ``--max-pin-ms``
    write_margin_ms: int = 500  #: a slab's write begins only while the region's lease lasts that much longer
    spare_regions: int = 1  #: empty regions kept in stock; twice as many are given back

    def __post_init__(self) -> None:
        if not self.endpoint:
            return
        try:
            msgspec.structs.force_setattr(self, "endpoint", normal_endpoint(self.endpoint))
        except ConfigError as e:
            raise ConfigError(f"server.endpoint is {self.endpoint!r}", e.remedy) from e


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP endpoint for health and metrics."""

    address: str = ""  #: ``host:port``; empty: off


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the daemon can be told. Immutable; made by :func:`load_config`."""

    pool: PoolSpec
    control: Control = msgspec.field(default_factory=Control)
    cache: Cache = Cache()
    transfer: Transfer = Transfer()
    limits: Limits = Limits()
    daemon: Daemon = Daemon()
    http: Http = Http()
    server: Server = Server()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "pool": PoolSpec, "control": Control, "cache": Cache, "transfer": Transfer, "limits": Limits, "daemon": Daemon,
    "http": Http, "server": Server,
}  # fmt: skip
_POOL_DEFAULTS: dict[str, Any] = {"backend": "shm", "size": 4 << 30}


def default_pool_path() -> str:
    """``/dev/shm/maru-pool`` for root and system services, one per user otherwise."""
    return "/dev/shm/maru-pool" if os.getuid() == 0 else f"/dev/shm/maru-pool-{os.getuid()}"


def parse_size(text: str) -> int:
    """Bytes of ``"64GiB"``, ``"512 MiB"``, ``"1.5GB"`` or ``"4096"``. Raises :class:`ValueError`."""
    match = _SIZE.match(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size")
    return int(float(match[1]) * _UNITS[match[2].upper()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].upper()]


def load_config(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """Merge the layers and check the result.

    ``path``: a TOML file (default: ``$MARU_CONFIG``, else none). ``flags``: dotted key → value; ``None`` values are ignored,
    so a command line can hand over all its options. Raises :class:`~maru_shm.errors.ConfigError`.
    """
    env = os.environ if environ is None else environ
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    origin: dict[str, str] = {}
    values["pool"] = {**_POOL_DEFAULTS, "path": default_pool_path()}
    if path is None:
        path = env.get("MARU_CONFIG") or None
    layers = [_from_environment(env), ((k, v, "the command line") for k, v in (flags or {}).items() if v is not None)]
    if path is not None:
        layers.insert(0, _from_file(path))
    for layer in layers:
        for key, value, where in layer:
            section, _, field = key.partition(".")
            values[section][field] = _coerced(key, value, where)
            origin[key] = where
    return _checked(values, origin)


def _from_file(path: str) -> Iterator[tuple[str, object, str]]:
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except OSError as e:
        raise ConfigError(f"configuration file {path}: {e.strerror}", "check the path, or run without --config") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"configuration file {path}: {e}", "correct the TOML syntax there") from e
    for section, body in data.items():
        if section not in SECTIONS or not isinstance(body, dict):
            raise ConfigError(f"unknown section [{section}] in {path}", _nearest(section, SECTIONS))
        for field, value in body.items():
            yield f"{section}.{field}", value, path


def _from_environment(env: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    """``MARU_SOCKET`` and ``MARU_<SECTION>_<KEY>``. Other MARU_ variables belong to other programs of this project."""
    if (socket := socket_variable(env)) is not None:
        name, path = socket
        yield "control.socket", path, name
    for name in sorted(env):
        if name in VARIABLES:
            continue
        section, _, field = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if section == "server" and _field_type(f"server.{field}") is None:
            continue  # MARU_SERVER_… are maru-server's too
        if name.startswith(ENV_PREFIX) and section in SECTIONS and field:
            yield f"{section}.{field}", env[name], name


def _nearest(word: str, known: Mapping[str, object] | list[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def _field_type(key: str) -> Any:
    """Annotated type of a dotted key, or None if there is no such key."""
    section, _, field = key.partition(".")
    if section not in SECTIONS:
        return None
    return next((f.type for f in msgspec.structs.fields(SECTIONS[section]) if f.name == field), None)


def _expected(kind: Any) -> str:
    """What a value of this type looks like, in the user's words."""
    if typing.get_origin(kind) is Literal:
        return "expected one of " + ", ".join(map(str, typing.get_args(kind)))
    kinds = set(typing.get_args(kind)) or {kind}
    if int in kinds:
        return "expected a whole number; sizes read as '64GiB'"
    if float in kinds:
        return "expected a number"
    return "expected true or false" if bool in kinds else f"expected {getattr(kind, '__name__', kind)}"


def _coerced(key: str, value: object, where: str) -> object:
    """``value`` as its field's type wants it: a size or number given as text, a list given as ``1,2``."""
    kind = _field_type(key)
    if kind is None:
        section = key.partition(".")[0]
        known = {f"{s}.{f.name}": None for s, t in SECTIONS.items() for f in msgspec.structs.fields(t)}
        in_section = [k for k in known if k.startswith(f"{section}.")]
        remedy = _nearest(key, in_section or known)
        raise ConfigError(f"unknown key {key!r} in {where}", remedy)
    text = value
    if not isinstance(value, str):
        return value
    if key == "control.mode":
        try:
            return int(value, 8)
        except ValueError as e:
            raise ConfigError(f"{key} is {value!r} in {where}", "expected octal permission bits, e.g. 0660") from e
    if kind is tuple or getattr(kind, "__origin__", None) is tuple:
        text = [part for part in value.replace(" ", "").split(",") if part]
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as e:
        try:
            return msgspec.convert(parse_size(value), kind)
        except (ValueError, msgspec.ValidationError):
            raise ConfigError(f"{key} is {value!r} in {where}", _expected(kind)) from e


def _checked(values: dict[str, dict[str, Any]], origin: Mapping[str, str]) -> Config:
    built: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        try:
            built[section] = msgspec.convert(values[section], kind)
        except msgspec.ValidationError as e:
            match = re.search(r"`\$\.(\w+)", str(e))
            key = f"{section}.{match[1]}" if match else section
            given = f" in {origin[key]}" if key in origin else ""
            raise ConfigError(f"{key} is {values[section].get(match[1] if match else '')!r}{given}", str(e)) from e
        except MaruError as e:  # a section that checks itself
            raise ConfigError(e.what, e.remedy) from e
    config = Config(**built)
    for key, value, holds, remedy in _bounds(config):
        if not holds:
            raise ConfigError(f"{key} is {value!r} in {origin.get(key, 'the defaults')}", f"expected {remedy}")
    return config


def _bounds(c: Config) -> Iterator[tuple[str, object, bool, str]]:
    """Every rule on a value: key, value, whether it holds, what is expected."""
    path_max = 107  # sun_path holds 108 bytes with its terminator
    yield "pool.size", c.pool.size, c.pool.size >= 1 << 20, "at least 1MiB"
    named = c.pool.backend == "shm" and "/" not in c.pool.path.removeprefix("/") and bool(c.pool.path.strip("/"))
    yield "pool.path", c.pool.path, named or os.path.isabs(c.pool.path), "an absolute path, or a POSIX shared-memory name"
    yield "control.socket", c.control.socket, os.path.isabs(c.control.socket), "an absolute path"
    yield "control.socket", c.control.socket, len(os.fsencode(c.control.socket)) <= path_max, f"at most {path_max} bytes"
    yield "control.mode", oct(c.control.mode), 0 <= c.control.mode <= 0o777, "permission bits between 0 and 0777"
    for name in ("max_connections", "handshake_timeout_s", "idle_timeout_s"):
        yield f"control.{name}", getattr(c.control, name), getattr(c.control, name) > 0, "above 0"
    shared, server = c.pool.shared, c.server
    yield (
        "pool.shared",
        shared,
        shared == bool(server.endpoint),
        f"{str(bool(server.endpoint)).lower()}: pool.shared and server.endpoint go together, set both or none",
    )
    yield (
        "pool.recreate",
        c.pool.recreate,
        not (shared and c.pool.recreate),
        "false: a shared pool is emptied by maru-sidecar pool clear",
    )
    flushes = c.pool.coherence == "flush"
    yield (
        "pool.coherence",
        c.pool.coherence,
        not flushes,
        "hardware: flushing caches takes native code that is not part of this",
    )
    guarded = not server.endpoint or is_local(server.endpoint) or bool(server.token_file)
    yield "server.token_file", server.token_file, guarded, f"the cluster's token: {server.endpoint} is not on loopback"
    yield "server.lookup_wait_ms", server.lookup_wait_ms, 0 < server.lookup_wait_ms <= 1000, "above 0, at most 1000 ms"
    yield "server.pin_ttl_s", server.pin_ttl_s, 1 <= server.pin_ttl_s <= 3600, "1 to 3600 seconds"
    yield "server.write_margin_ms", server.write_margin_ms, 0 <= server.write_margin_ms <= 60_000, "0 to 60000 ms"
    yield "server.spare_regions", server.spare_regions, 1 <= server.spare_regions <= 1024, "1 to 1024"
    low, high = c.cache.low_watermark, c.cache.high_watermark
    yield "cache.high_watermark", high, 0 < high <= 1, "a share above 0, at most 1"
    yield "cache.low_watermark", low, 0 < low <= high, f"above 0, at most cache.high_watermark ({high})"
    yield "cache.lease_ttl_s", c.cache.lease_ttl_s, 0.1 <= c.cache.lease_ttl_s <= 86_400, "between 0.1 and 86400 seconds"
    yield "cache.namespace_quota", c.cache.namespace_quota, c.cache.namespace_quota >= 0, "bytes, or 0 for no limit"
    t = c.transfer
    yield "transfer.slice_bytes", t.slice_bytes, t.slice_bytes >= 1 << 16, "at least 64KiB"
    yield "transfer.gpu_submitters", t.gpu_submitters, 1 <= t.gpu_submitters <= 8, "1 to 8"
    yield "transfer.bytes_in_flight", t.bytes_in_flight, t.bytes_in_flight >= t.slice_bytes, "at least transfer.slice_bytes"
    yield "transfer.cpu_threads", t.cpu_threads, 0 <= t.cpu_threads <= 64, "0 (by cores) to 64"
    yield "transfer.fence_timeout_s", t.fence_timeout_s, t.fence_timeout_s > 0, "above 0 seconds"
    yield "transfer.copy_timeout_s", t.copy_timeout_s, t.copy_timeout_s > 0, "above 0 seconds"
    yield "transfer.store_patience_s", t.store_patience_s, 0 <= t.store_patience_s <= 10, "0 to 10 seconds"
    yield "limits.max_records", c.limits.max_records, 0 < c.limits.max_records <= 1 << 16, "1 to 65536"
    for name in ("max_keys", "max_blocks", "max_pieces", "segment_bytes", "total_segment_bytes", "max_engines", "max_sessions"):
        yield f"limits.{name}", getattr(c.limits, name), getattr(c.limits, name) > 0, "above 0"
    d = c.daemon
    yield "daemon.spin_us", d.spin_us, 0 <= d.spin_us <= 10_000, "0 to 10000 microseconds"
    yield "daemon.switch_interval_s", d.switch_interval_s, 1e-6 <= d.switch_interval_s <= 0.1, "1e-6 to 0.1 seconds"
    yield "daemon.heartbeat_s", d.heartbeat_s, 0.05 <= d.heartbeat_s <= 5, "0.05 to 5 seconds"
    yield "daemon.drain_timeout_s", d.drain_timeout_s, 0 <= d.drain_timeout_s <= 3600, "0 to 3600 seconds"
    port = c.http.address.rpartition(":")[2]
    well_formed = not c.http.address or (":" in c.http.address and port.isascii() and port.isdigit() and int(port) < 1 << 16)
    yield "http.address", c.http.address, well_formed, "host:port, e.g. 127.0.0.1:9464, or empty to switch it off"
