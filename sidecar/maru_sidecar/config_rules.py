"""What holds between a configuration's values, and the bounds of each. Whatever the machine decides is ``doctor``'s matter."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from maru_shm.endpoint import is_local
from maru_shm.errors import ConfigError
from maru_shm.http import parse_address
from maru_shm.layout import MAX_RECORDS
from maru_sidecar.config_values import MODE_FORM, MODE_MAX
from maru_sidecar.pool_spec import MAX_NODES, SHM_DIR, PoolSpec

if TYPE_CHECKING:
    from maru_sidecar.config import Config

#: key, value, whether it holds, what is expected
Rule = tuple[str, object, bool, str]
_SUN_PATH = 107  #: sun_path holds 108 bytes with its terminator
_DAY_S = 86_400.0
LEAST_LEASE_S = 3  #: an engine does not build upon a lease with under two seconds left
_BYTES = 1 << 62  #: what a file's offset can hold, with room to add two
_ID_MAX = (1 << 32) - 2  #: uid and gid; the last one means none
#: Above these a number is a slip: so large a request does not fit into a segment's cell (64 MiB), and no process has the
#: descriptors for so many sessions (five each).
_LIMITS = {
    "max_records": MAX_RECORDS, "max_keys": 1 << 22, "max_blocks": 1 << 24, "max_pieces": 1 << 24, "segment_bytes": 1 << 40,
    "total_segment_bytes": 1 << 50, "max_engines": 1 << 16, "max_sessions": 1 << 16,
}  # fmt: skip


def rules(c: Config, told: Callable[[str], str]) -> Iterator[Rule]:
    """Every rule. ``told(key)``: "value in origin", for those that concern another key too."""
    yield from _pool(c, told)
    yield from _control(c)
    yield from _server(c, told)
    yield from _policy(c, told)
    for name, most in _LIMITS.items():
        value = getattr(c.limits, name)
        yield f"limits.{name}", value, 0 < value <= most, f"1 to {most}"
    d = c.daemon
    yield "daemon.spin_us", d.spin_us, 0 <= d.spin_us <= 10_000, "0 to 10000 microseconds"
    yield "daemon.switch_interval_s", d.switch_interval_s, 1e-6 <= d.switch_interval_s <= 0.1, "1e-6 to 0.1 seconds"
    yield "daemon.heartbeat_s", d.heartbeat_s, 0.05 <= d.heartbeat_s <= 5, "0.05 to 5 seconds"
    yield "daemon.drain_timeout_s", d.drain_timeout_s, 0 <= d.drain_timeout_s <= 3600, "0 to 3600 seconds"
    yield from _http(c.http.address)


def _pool(c: Config, told: Callable[[str], str]) -> Iterator[Rule]:
    pool = c.pool
    yield "pool.size", pool.size, 1 << 20 <= pool.size <= _BYTES, "at least 1MiB, and below 4 EiB"
    region = pool.region_size
    yield "pool.region_size", region, 0 <= region <= _BYTES and region % 4096 == 0, "a multiple of 4KiB, or 0 to leave it open"
    clean = "\0" not in pool.path
    yield "pool.path", pool.path, clean and (_is_name(pool) or os.path.isabs(pool.path)), (
        "an absolute path, or a POSIX shared-memory name"
    )  # fmt: skip
    yield "pool.path", pool.path, not (other := _meant(pool)), other
    yield _mode("pool.mode", pool.mode)
    node = pool.numa_node
    yield "pool.numa_node", node, node is None or 0 <= node < MAX_NODES, f"a NUMA node, 0 to {MAX_NODES - 1}"
    sharing = bool(c.server.endpoint)
    both = f"pool.shared and server.endpoint go together, and server.endpoint is {told('server.endpoint')}"
    yield "pool.shared", pool.shared, pool.shared == sharing, f"{str(sharing).lower()}: {both}"
    yield (
        "pool.recreate", pool.recreate, not (pool.shared and pool.recreate),
        "false: a shared pool is emptied by maru-sidecar pool clear",
    )  # fmt: skip
    yield (
        "pool.coherence", pool.coherence, pool.coherence != "flush",
        "hardware: flushing caches takes native code that is not part of this",
    )  # fmt: skip


def _is_name(pool: PoolSpec) -> bool:
    """Whether the path is a POSIX shared-memory name: one component, with or without a slash before it."""
    return pool.backend == "shm" and "/" not in pool.path.removeprefix("/") and bool(pool.path.strip("/"))


def _meant(pool: PoolSpec) -> str:
    """What to write instead of a name with a slash at which something else lies. Empty if nothing does: it is a name."""
    if not (_is_name(pool) and pool.path.startswith("/")) or "\0" in pool.path:
        return ""
    try:
        mode = os.stat(pool.path).st_mode
    except OSError:
        return ""
    kind, instead = ("directory", f"{pool.path}/maru-pool") if stat.S_ISDIR(mode) else ("file", "pool.backend 'file' with it")
    shm = f"{SHM_DIR}/{pool.path.removeprefix('/')}"
    return f"{instead}, or {shm}: one component is a name in {SHM_DIR}, and {pool.path} is a {kind}"


def _mode(key: str, mode: int) -> Rule:
    return key, mode, 0 <= mode <= MODE_MAX, MODE_FORM


def _control(c: Config) -> Iterator[Rule]:
    control = c.control
    path = control.socket
    yield "control.socket", path, os.path.isabs(path) and "\0" not in path, "an absolute path"
    yield "control.socket", path, len(os.fsencode(path)) <= _SUN_PATH, f"at most {_SUN_PATH} bytes"
    yield _mode("control.mode", control.mode)
    for name in ("allowed_uids", "allowed_gids"):
        ids = getattr(control, name)
        yield f"control.{name}", list(ids), all(0 <= one <= _ID_MAX for one in ids), f"numbers from 0 to {_ID_MAX}"
    yield "control.max_connections", control.max_connections, 0 < control.max_connections <= 1 << 16, "1 to 65536"
    for name in ("handshake_timeout_s", "idle_timeout_s"):
        value = getattr(control, name)
        yield f"control.{name}", value, 0 < value <= _DAY_S, f"above 0, at most {_DAY_S:.0f} seconds"


def _server(c: Config, told: Callable[[str], str]) -> Iterator[Rule]:
    server = c.server
    guarded = not server.endpoint or is_local(server.endpoint) or bool(server.token_file)
    expected = f"the cluster's token: {server.endpoint} is not on loopback (server.endpoint is {told('server.endpoint')})"
    yield "server.token_file", server.token_file, guarded, expected
    yield "server.lookup_wait_ms", server.lookup_wait_ms, 0 < server.lookup_wait_ms <= 1000, "above 0, at most 1000 ms"
    yield "server.pin_ttl_s", server.pin_ttl_s, LEAST_LEASE_S <= server.pin_ttl_s <= 3600, f"{LEAST_LEASE_S} to 3600 seconds"
    yield "server.write_margin_ms", server.write_margin_ms, 0 <= server.write_margin_ms <= 60_000, "0 to 60000 ms"
    yield "server.spare_regions", server.spare_regions, 1 <= server.spare_regions <= 1024, "1 to 1024"


def _policy(c: Config, told: Callable[[str], str]) -> Iterator[Rule]:
    low, high = c.cache.low_watermark, c.cache.high_watermark
    yield "cache.high_watermark", high, 0 < high <= 1, "a share above 0, at most 1"
    yield (
        "cache.low_watermark",
        low,
        0 < low <= high,
        f"above 0, at most cache.high_watermark, which is {told('cache.high_watermark')}",
    )
    lease = c.cache.lease_ttl_s
    yield "cache.lease_ttl_s", lease, LEAST_LEASE_S <= lease <= _DAY_S, f"between {LEAST_LEASE_S} and 86400 seconds"
    yield "cache.namespace_quota", c.cache.namespace_quota, 0 <= c.cache.namespace_quota <= _BYTES, "bytes, or 0 for no limit"
    t = c.transfer
    yield "transfer.slice_bytes", t.slice_bytes, 1 << 16 <= t.slice_bytes <= _BYTES, "at least 64KiB"
    yield "transfer.gpu_submitters", t.gpu_submitters, 1 <= t.gpu_submitters <= 8, "1 to 8"
    expected = f"at least transfer.slice_bytes, which is {told('transfer.slice_bytes')}"
    yield "transfer.bytes_in_flight", t.bytes_in_flight, t.slice_bytes <= t.bytes_in_flight <= _BYTES, expected
    yield "transfer.cpu_threads", t.cpu_threads, 0 <= t.cpu_threads <= 64, "0 (by cores) to 64"
    for name in ("fence_timeout_s", "copy_timeout_s"):
        value = getattr(t, name)
        yield f"transfer.{name}", value, 0 < value <= _DAY_S, f"above 0, at most {_DAY_S:.0f} seconds"
    yield "transfer.store_patience_s", t.store_patience_s, 0 <= t.store_patience_s <= 10, "0 to 10 seconds"


def _http(address: str) -> Iterator[Rule]:
    port = address.rpartition(":")[2]
    formed = not address or (":" in address and port.isascii() and port.isdigit() and int(port) < 1 << 16)
    yield "http.address", address, formed, "host:port, e.g. 127.0.0.1:9464, or empty to switch it off"
    try:
        parse_address(address or ":0")
    except ConfigError:
        expected = "an IP address or localhost as its host: names are not looked up at start"
        yield "http.address", address, False, expected
