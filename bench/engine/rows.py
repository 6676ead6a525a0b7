"""The rows of the table: which connector, which options, which server beside it, and what its engine's process needs.

A rival's server command and its Python path come from the environment, since each is installed in its own way:
``LMCACHE_SERVER``, ``LMCACHE_PATH``, ``PEGAFLOW_SERVER``, ``PEGAFLOW_PATH``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from typing import Any

V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
LMCACHE_PORT, PEGAFLOW_PORT = 6555, 50055
SETTINGS = {
    "maru_submitters": ["--set", "transfer.gpu_submitters=2"],
    "maru_no_nudge": ["--set", "transfer.gpu_nudge=false"],
}  #: of the sidecar beside a row


@dataclass(frozen=True)
class Row:
    """``path``: put before the Python path of the engine's process."""

    name: str
    connector: str
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    path: str = ""
    server: str = ""  #: a key of :func:`server_command`


def make_row(name: str, *, gib: float, suffix: int) -> Row:
    """The row named ``name``. ``gib``: host memory for the cache. ``suffix``: fresh tokens of the pass that overlap is for."""
    with_suffix = ["--suffix", str(suffix), "--suffix-out", "16"] if suffix else []
    match name:
        case "none":  # a pass of hits at one in flight would only be another populate pass
            return Row(name, "none", ["--in-flight", "4,8"])
        case "offloading" | "simple":
            return Row(name, name)
        case "engine_only":
            return Row(name, name, with_suffix)
        case "maru":
            return _maru(name, with_suffix)
        case "maru_overlap":  # with several in flight it does what ``maru`` does
            return _maru(name, [*with_suffix, "--in-flight", "1", "--populate8", "0"], **{"maru.layerwise_overlap": True})
        case "maru_submitters" | "maru_no_nudge":
            row = _maru(name, with_suffix)
            return Row(name, row.connector, row.arguments, server=name)
        case "maru_v1" | "maru_v1_layers":  # vLLM 0.26 keeps a block's layers together on model runner V1 only, if asked
            row = _maru(name, ["--populate8", "0"], **{"maru.block_outermost": name == "maru_v1"})
            return Row(name, row.connector, row.arguments, V1_RUNNER, server=row.server)
        case "maru_sync_store":
            return _maru(name, [], **{"maru.write_behind": False})
        case "maru_sync_load":  # vLLM takes a synchronous hit back only here
            row = _maru(name, ["--no-async-scheduling"], **{"maru.deferred_load": False})
            return Row(name, row.connector, row.arguments, V1_RUNNER, server=row.server)
        case "lmcache":  # in the engine's process; model runner V2 never calls its loads
            settings = {"LMCACHE_CHUNK_SIZE": "256", "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": str(gib)}
            return Row(name, name, environment={**V1_RUNNER, **settings})
        case "lmcache_mp":
            return Row(name, name, path=os.environ.get("LMCACHE_PATH", ""), server="lmcache")
        case "pegaflow":
            return Row(name, name, path=os.environ.get("PEGAFLOW_PATH", ""), server="pegaflow")
        case _:
            raise ValueError(f"there is no row {name!r}")


def _maru(name: str, arguments: list[str], **options: Any) -> Row:
    return Row(name, "maru", [*arguments, "--options", json.dumps(options)], server="maru")


def server_command(kind: str, *, gib: float, socket: str, pool: str) -> tuple[list[str], int]:
    """The command of a server, and the TCP port it serves; 0: the sidecar's socket instead."""
    size = f"{gib:g}"
    match kind:
        case "maru" | "maru_submitters" | "maru_no_nudge":
            command = [sys.executable, "-m", "maru_sidecar", "run", "--socket", socket, "--pool-path", pool]
            command += ["--pool-size", str(int(gib * (1 << 30)))]
            return [*command, *SETTINGS.get(kind, [])], 0
        case "lmcache":
            command = shlex.split(os.environ.get("LMCACHE_SERVER", "lmcache server"))
            command += ["--host", "localhost", "--port", str(LMCACHE_PORT), "--http-port", "8091", "--l1-size-gb", size]
            command += ["--no-l1-use-lazy", "--shm-name", "", "--eviction-policy", "LRU"]
            return [*command, "--eviction-trigger-watermark", "0.99", "--eviction-ratio", "0.05"], LMCACHE_PORT
        case "pegaflow":
            command = shlex.split(os.environ.get("PEGAFLOW_SERVER", "pegaflow-server"))
            command += ["--addr", f"127.0.0.1:{PEGAFLOW_PORT}", "--devices", "0", "--pool-size", f"{size}gb"]
            return [*command, "--http-addr", "127.0.0.1:9091"], PEGAFLOW_PORT
        case _:
            raise ValueError(f"there is no server {kind!r}")
