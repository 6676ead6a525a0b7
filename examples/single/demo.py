#!/usr/bin/env python3
"""Cold engine, warm engine: what the cache saves, and proof that it changes no answer. `make demo` runs this.

1. A sidecar starts, with an empty pool.
2. An engine computes real prompts from nothing (cold) and then once more from its own prefix cache (reference). It ends.
3. A second engine gets the same prompts (warm). All it knows of them is in the sidecar's pool.
4. A table is printed. The demo fails unless every answer is identical, every hit is as long as it can be, the restored KV is
   equal to the computed KV byte for byte, and nothing is left behind.

The reference matters: a short prefill after a hit has another shape than the whole prompt's, and floating-point sums depend on
the shape. The prompts' lengths make the engine's own hit and the sidecar's end at the same token: both compute the same rest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import runs
from processes import EngineProcess, Sidecar
from runs import DemoFailed, say

TIME_LIMIT_S = 360
POOL = f"/dev/shm/maru-demo-{os.getpid()}"


def demo(model: Path, texts: dict[str, str], directory: Path) -> None:
    engines: list[EngineProcess] = []
    say(f"starting the sidecar with a pool of {runs.POOL_SIZE} at {POOL}")
    sidecar = Sidecar(directory, POOL, runs.POOL_SIZE)
    try:
        with runs.logs_on_failure(directory):
            runs.wait_until_ready(sidecar)
            engines.append(runs.start_engine(model, sidecar, directory, "cold"))
            rows = runs.run_cold(engines[0], texts)
            engines[0].stop()
            say("cold engine ended; its KV cache is gone")
            engines.append(runs.start_engine(model, sidecar, directory, "warm"))
            runs.run_warm(engines[1], rows)
            engines[1].stop()
            slab_bytes = runs.slab_bytes(sidecar)
    finally:
        for engine in engines:
            engine.kill()
        status = sidecar.stop()
    runs.print_table(rows, slab_bytes / runs.CHUNK_TOKENS)
    runs.check(rows)
    if status != 0:
        raise DemoFailed(f"the sidecar ended with status {status}")
    runs.check_nothing_left(sidecar.pid, [engine.pid for engine in engines])


if __name__ == "__main__":
    runs.run_demo("Cold engine, warm engine, the same prompts: times, hits, identical answers.", POOL, TIME_LIMIT_S, demo)
