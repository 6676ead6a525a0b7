"""The daemon's configuration: defaults < TOML file < environment < flags, each layer naming only what it changes.

A setting is addressed the same way everywhere: ``[pool] size`` in the file, ``MARU_POOL_SIZE`` in the environment,
``pool.size`` among the flags; the control socket has a short name too, ``MARU_SOCKET``, which engines and commands read as
well. Sizes are bytes and may be written ``"64GiB"``, permission bits are octal (``config_values.py``). An unknown key, a wrong
type or a value out of bounds (``config_rules.py``) is a :class:`~maru_shm.errors.ConfigError` that names the key, where it was
read and what would be right.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from maru_shm.endpoint import normal_endpoint
from maru_shm.errors import ConfigError
from maru_shm.socket_path import VARIABLES, default_socket_path, socket_variable
from maru_sidecar.config_rules import rules
from maru_sidecar.config_values import MODES, value_of, wanted
from maru_sidecar.pool_spec import PoolSpec

ENV_PREFIX = "MARU_"


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
    pin_ttl_s: float = 30.0  #: chunks of others stay pinned this long; the server grants its ``--max-pin-ms`` at most
    write_margin_ms: int = 500  #: a slab's write begins only while the region's lease lasts that much longer
    spare_regions: int = 1  #: empty regions kept in stock; twice as many are given back


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
        if section not in SECTIONS:
            raise ConfigError(f"unknown section [{section}] in {path}", _nearest(section, SECTIONS))
        if not isinstance(body, dict):
            raise ConfigError(f"{section} is {body!r} in {path}", f"it must be a table: [{section}] on a line, its keys below")
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


def _coerced(key: str, value: object, where: str) -> object:
    """``value`` as its field's type wants it. Raises :class:`ConfigError` that names key, value, origin and what is wanted."""
    kind = _field_type(key)
    if kind is None:
        section = key.partition(".")[0]
        known = {f"{s}.{f.name}": None for s, t in SECTIONS.items() for f in msgspec.structs.fields(t)}
        in_section = [k for k in known if k.startswith(f"{section}.")]
        remedy = _nearest(key, in_section or known)
        raise ConfigError(f"unknown key {key!r} in {where}", remedy)
    try:
        read = value_of(key, kind, value)
    except ValueError as e:
        raise ConfigError(f"{key} is {value!r} in {where}", f"expected {wanted(key, kind)}") from e
    if key == "server.endpoint" and read:
        try:
            return normal_endpoint(str(read))
        except ConfigError as e:
            raise ConfigError(f"{key} is {value!r} in {where}", e.remedy) from e
    return read


def _checked(values: dict[str, dict[str, Any]], origin: Mapping[str, str]) -> Config:
    built: dict[str, Any] = {section: msgspec.convert(values[section], kind) for section, kind in SECTIONS.items()}
    config = Config(**built)

    def told(key: str) -> str:
        section, _, field = key.partition(".")
        return f"{getattr(getattr(config, section), field)!r} in {origin.get(key, 'the defaults')}"

    for key, value, holds, expected in rules(config, told):
        if not holds:
            raise ConfigError(f"{key} is {value!r} in {origin.get(key, 'the defaults')}", f"expected {expected}")
    return config


def printable(config: Config) -> dict[str, dict[str, Any]]:
    """Sections of plain values, as each may be given again: permission bits are octal text."""
    values: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    for section, _, field in (key.partition(".") for key in MODES):
        values[section][field] = f"0o{values[section][field]:o}"
    return values
