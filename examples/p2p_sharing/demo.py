#!/usr/bin/env python3
"""Two sidecars, one shared pool: what engine A computed, engine B loads. `make demo-p2p` runs this.

1. A shared pool is initialised; a maru-server and two sidecars on that pool start, as on two hosts that see the same memory.
2. Engine A, on sidecar A, computes real prompts (cold), then answers once more from its own cache (reference). It ends.
3. Engine B, on sidecar B, gets the same prompts (warm). Sidecar B has stored nothing: it finds the chunks at the server
   and loads them straight out of the regions of sidecar A.
4. A table is printed. The demo fails unless every answer is identical, every hit is as long as it can be, all of it came from
   the other sidecar, the restored KV equals the computed KV byte for byte, and nothing is left behind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import runs
from processes import EngineProcess
from runs import DemoFailed, say
from shared import shared_pool

TIME_LIMIT_S = 420
POOL = f"/dev/shm/maru-demo-p2p-{os.getpid()}"


def demo(model: Path, texts: dict[str, str], directory: Path) -> None:
    engines: list[EngineProcess] = []
    with runs.logs_on_failure(directory), shared_pool(directory, POOL) as shared:
        try:
            engines.append(runs.start_engine(model, shared.a, directory, "cold"))
            rows = runs.run_cold(engines[0], texts)
            engines[0].stop()
            expected = sum(row.possible for row in rows) // runs.CHUNK_TOKENS
            shared.wait("everything stored is announced", shared.a, "keys_announced", expected)
            say(f"engine A ended; sidecar A has announced {expected} chunks")
            engines.append(runs.start_engine(model, shared.b, directory, "warm"))
            runs.run_warm(engines[1], rows)
            found = shared.sharing(shared.b)["chunks_found"]
            engines[1].stop()
        finally:
            for engine in engines:
                engine.kill()
        bytes_per_token = runs.slab_bytes(shared.a) / runs.CHUNK_TOKENS
        pids = shared.pids
    runs.print_table(rows, bytes_per_token)
    runs.check(rows)
    if found < expected:
        raise DemoFailed(f"sidecar B found {found} chunks at the server, {expected} were there")
    say(f"sidecar B loaded {expected} chunks out of regions of sidecar A")
    for pid in pids:
        runs.check_nothing_left(pid, [engine.pid for engine in engines])


if __name__ == "__main__":
    runs.run_demo("Two sidecars on one shared pool: engine B loads what engine A computed.", POOL, TIME_LIMIT_S, demo)
