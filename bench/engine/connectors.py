"""The connectors under comparison, as vLLM's ``kv_transfer_config``. Servers they need are started by ``run_table.sh``."""

from __future__ import annotations

import math
from typing import Any

GIB = 1 << 30


def kv_config(name: str, host_gib: float, chunk_tokens: int, options: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration named ``name``; None for no connector. ``options`` overrides ``kv_connector_extra_config``."""
    extra: dict[str, Any]
    match name:
        case "none":
            return None
        case "maru":
            base = {"kv_connector": "MaruSidecarConnector", "kv_connector_module_path": "maru_connector.connector"}
            extra = {"maru.chunk_tokens": chunk_tokens, "maru.weights_identity": "dummy, seed 0"}
        case "engine_only":
            base = {"kv_connector": "EngineOnlyConnector", "kv_connector_module_path": "engine_only"}
            extra = {"chunk_tokens": chunk_tokens}
        case "lmcache_mp":
            base = {"kv_connector": "LMCacheMPConnector"}
            extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 6555}
        case "lmcache":
            base, extra = {"kv_connector": "LMCacheConnectorV1"}, {}
        case "offloading":
            # A pinned tensor per layer, and torch rounds each up to a power of two: 70 GiB in 32 of them took 128.
            room = 2 ** math.floor(math.log2(host_gib * GIB))
            base, extra = {"kv_connector": "OffloadingConnector"}, {"cpu_bytes_to_use": room}
        case "simple":
            base, extra = {"kv_connector": "SimpleCPUOffloadConnector"}, {"cpu_bytes_to_use": int(host_gib * GIB)}
        case "pegaflow":
            base = {"kv_connector": "PegaKVConnector", "kv_connector_module_path": "pegaflow.connector"}
            extra = {"pegaflow.host": "http://127.0.0.1", "pegaflow.port": 50055}
        case _:
            raise ValueError(f"unknown connector {name!r}")
    config: dict[str, Any] = {**base, "kv_role": "kv_both", "kv_connector_extra_config": {**extra, **options}}
    if name in ("maru", "engine_only"):
        config["kv_load_failure_policy"] = "recompute"
    return config
