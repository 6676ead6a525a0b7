"""What a user may set in ``kv_connector_extra_config``, parsed and checked once.

Keys are ``maru.<field>``, e.g. ``{"maru.socket": "/run/maru/control.sock", "maru.chunk_tokens": 256}``. Any other that begins
with ``maru`` and ``.``, ``_`` or ``-``, in whatever case, and is none of the names below, is a
:class:`~maru_shm.errors.ConfigError` that names the nearest one; other keys are somebody else's.

The names of the in-engine connector this project descends from still work as aliases:

==================================================================  ========================
alias                                                               means
==================================================================  ========================
``maru_kv_chunk_tokens``                                            ``maru.chunk_tokens``
``maru_async_load``, ``maru_enable_deferred_loading``               ``maru.deferred_load``
``maru_async_store``, ``maru_enable_write_behind``                  ``maru.write_behind``
``maru_overlap_load_with_compute``, ``maru_enable_layerwise_overlap``  ``maru.layerwise_overlap``
==================================================================  ========================

Its settings for the pool and the server (``maru_pool_size``, ``maru_server_url``…) belong to the sidecar here; they are
listed in :attr:`Options.ignored` so that the connector can say so.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from maru_shm import control
from maru_shm.errors import ConfigError

PREFIX = "maru."
MIN_HIT_TOKENS = 128
ALIASES = {
    "maru_kv_chunk_tokens": "chunk_tokens",
    "maru_async_load": "deferred_load",
    "maru_enable_deferred_loading": "deferred_load",
    "maru_async_store": "write_behind",
    "maru_enable_write_behind": "write_behind",
    "maru_overlap_load_with_compute": "layerwise_overlap",
    "maru_enable_layerwise_overlap": "layerwise_overlap",
}
SIDECAR_OWNED = frozenset({
    "maru_server_url", "maru_pool_size", "maru_chunk_size", "maru_instance_id", "maru_eager_map", "maru_use_layerwise",
    "maru_load_admission_window", "maru_overlap_release_after_layers", "maru_log_timing", "maru_storage_backend",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Times in seconds or microseconds as the name says; token counts in tokens."""

    socket: str = field(default_factory=control.default_socket_path)
    chunk_tokens: int = 256  #: tokens per slab; a multiple of the engine's block size
    deferred_load: bool = True  #: park a hit while it loads; False loads inside the step
    write_behind: bool = True  #: store in the background; False waits for each store inside its step
    layerwise_overlap: bool = False  #: load a lone hit during its own pass, layer by layer
    #: ask vLLM for a cache in which a block's layers lie together; None: where backends say that they can (see its module)
    block_outermost: bool | None = None
    lookup_spin_us: float = 400.0  #: how long a step looks at an answer; waking a sidecar takes up to 330 µs
    lookup_patience_ms: float = 200.0  #: an answer later than this is a miss
    attach_patience_ms: float = 1000.0  #: how long requests wait for an attachment that has begun, e.g. after a restart
    load_timeout_s: float = 30.0  #: a load that takes longer is cancelled and recomputed
    store_timeout_s: float = 60.0  #: a store that takes longer is abandoned
    attach_timeout_s: float = 2.0  #: how long engine start waits for the sidecar; it goes on without
    max_records: int = 256  #: requests in flight on the ring
    #: a name for the weights, instead of a digest of their files; engines with equal names must have equal weights
    weights_identity: str | None = None
    min_hit_tokens: int | None = None  #: a shorter external hit is not worth a load; None: see :func:`for_device`
    max_parked_share: float = 0.5  #: of the GPU blocks, held by requests whose hit is loading
    max_pinned_share: float = 0.25  #: of the GPU blocks, pinned by stores in flight
    ignored: tuple[str, ...] = ()  #: settings of the in-engine connector that now belong to the sidecar


_TYPES: dict[str, type] = {
    "socket": str, "chunk_tokens": int, "deferred_load": bool, "write_behind": bool, "layerwise_overlap": bool,
    "block_outermost": bool, "weights_identity": str,
    "lookup_spin_us": float, "lookup_patience_ms": float, "attach_patience_ms": float,
    "load_timeout_s": float, "store_timeout_s": float,
    "attach_timeout_s": float, "max_records": int, "min_hit_tokens": int, "max_parked_share": float, "max_pinned_share": float,
}  # fmt: skip
_OURS = ("maru.", "maru_", "maru-")  #: in any case; whoever else reads the same dictionary has other prefixes
_POSITIVE = ("chunk_tokens", "max_records", "load_timeout_s", "store_timeout_s")
_SHARES = ("max_parked_share", "max_pinned_share")
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def parse_options(extra: Mapping[str, object] | None) -> Options:
    """Options from ``kv_connector_extra_config``. Raises :class:`ConfigError` naming key, value and remedy."""
    values: dict[str, object] = {}
    ignored: list[str] = []
    for key, raw in (extra or {}).items():
        if key in SIDECAR_OWNED:
            ignored.append(key)
            continue
        if not key.lower().startswith(_OURS):
            continue
        name = ALIASES.get(key) or (key.removeprefix(PREFIX) if key.startswith(PREFIX) else "")
        if name not in _TYPES:
            raise ConfigError(f"kv_connector_extra_config has no option {key!r}", _nearest(key.lower()))
        if name in values:
            raise ConfigError(f"kv_connector_extra_config sets {PREFIX}{name} twice ({key!r} is an alias)", "keep one of them")
        values[name] = _convert(key, raw, _TYPES[name])
    options = Options(**values, ignored=tuple(ignored))  # type: ignore[arg-type]
    _check(options)
    return options


def _nearest(key: str) -> str:
    """The option that an unknown key was meant to be: by whole names first, then by what follows the prefix."""
    known = [*(PREFIX + name for name in _TYPES), *ALIASES, *SIDECAR_OWNED]
    bare = {name.partition("maru")[2][1:]: name for name in reversed(known)}
    if near := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
        return f"did you mean {near[0]}?"
    if near := difflib.get_close_matches(key.partition("maru")[2][1:], bare, n=1):
        return f"did you mean {bare[near[0]]}?"
    return f"options: {', '.join(PREFIX + name for name in _TYPES)}"


def _convert(key: str, raw: object, kind: type) -> object:
    if kind is bool and isinstance(raw, str) and raw.lower() in _BOOLS:
        return _BOOLS[raw.lower()]
    if kind is bool or isinstance(raw, bool):
        if kind is bool and isinstance(raw, bool):
            return raw
        raise ConfigError(f"{key} is {raw!r}", f"expected {kind.__name__}")
    try:
        if kind is str and isinstance(raw, str) and raw:
            return raw
        if kind in (int, float) and isinstance(raw, (int, float, str)):
            value = kind(raw)
            if kind is float or value == float(raw):
                return value
    except (ValueError, OverflowError) as e:  # JSON knows Infinity
        raise ConfigError(f"{key} is {raw!r}", f"expected {kind.__name__}") from e
    raise ConfigError(f"{key} is {raw!r}", f"expected {kind.__name__}")


def _check(options: Options) -> None:
    if not os.path.isabs(options.socket):  # relative, it names another socket in each process's working directory
        raise ConfigError(f"{PREFIX}socket is {options.socket!r}", "expected an absolute path")
    for f in fields(options):
        value = getattr(options, f.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if math.isnan(value) or value < 0 or (f.name in _POSITIVE and value == 0):
            raise ConfigError(f"{PREFIX}{f.name} is {value}", "expected a positive number")
        if f.name in _SHARES and value > 1:
            raise ConfigError(f"{PREFIX}{f.name} is {value}", "expected a share between 0 and 1")


def for_device(options: Options, device_type: str) -> Options:
    """``options`` with what depends on the device decided. ``device_type``: torch's.

    Parking a request for a load costs about 4 ms beside its bytes (H200), in which that GPU prefills 130 tokens of an 8B
    model. It happened for 16: a prompt of whole chunks that vLLM's own cache holds lacks its last block there. A CPU needs 80
    ms for those.
    """
    if options.min_hit_tokens is not None:
        return options
    return replace(options, min_hit_tokens=0 if device_type == "cpu" else MIN_HIT_TOKENS)


def check_chunk(options: Options, block_tokens: int) -> None:
    """Raise :class:`ConfigError` unless a chunk is a whole number of the engine's blocks."""
    if options.chunk_tokens % block_tokens:
        up = -(-options.chunk_tokens // block_tokens) * block_tokens
        raise ConfigError(
            f"maru.chunk_tokens is {options.chunk_tokens}, the engine's block has {block_tokens} tokens",
            f"use a multiple of it, e.g. {up}",
        )
