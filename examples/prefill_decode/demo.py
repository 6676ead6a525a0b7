#!/usr/bin/env python3
"""Prefill on one engine, decode on another, through a shared pool. `make demo-pd` runs this.

Both engines live at once, each with a sidecar of its own on one shared pool. For every prompt:

1. engine A prefills it (``max_tokens=1``) and its chunks are stored,
2. engine B answers: it finds the prompt's chunks at the server, loads them from sidecar A's regions, computes only what is left
   of the prompt after its last whole chunk, and decodes.

The reference is engine A's own answer from its own prefix cache. The demo fails unless answers and restored KV are identical,
every hit is as long as it can be, and nothing is left behind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import runs
from processes import EngineProcess
from runs import Row, say
from shared import SharedPool, shared_pool

TIME_LIMIT_S = 480
POOL = f"/dev/shm/maru-demo-pd-{os.getpid()}"


def prefill_then_decode(shared: SharedPool, a: EngineProcess, b: EngineProcess, texts: dict[str, str]) -> list[Row]:
    for engine in (a, b):
        runs.warm_up(engine)
    rows = []
    for name, text in texts.items():
        row = Row(name, runs.trim(a.ask("tokenize", text=text)["tokens"], name))
        announced = shared.sharing(shared.a)["keys_announced"]
        [row.cold] = a.generate(row.prompt, max_tokens=1)
        row.cold_digest = a.ask("digest", prompt=row.prompt)["digest"]
        a.ask("flush")
        # Each of them: B would compute and publish what is missing, and the hit would not be as long as it can be.
        announced += row.possible // runs.CHUNK_TOKENS
        shared.wait("the prompt's chunks are announced", shared.a, "keys_announced", announced)
        [row.warm] = b.generate(row.prompt, max_tokens=runs.ANSWER_TOKENS)
        row.warm_digest = b.ask("digest", prompt=row.prompt)["digest"]
        [row.reference] = a.generate(row.prompt, max_tokens=runs.ANSWER_TOKENS)
        rows.append(row)
        say(f"{name}: prefilled on A in {row.cold['ttft_s']:.2f} s, decoding on B after {row.warm['ttft_s']:.2f} s")
    return rows


def demo(model: Path, texts: dict[str, str], directory: Path) -> None:
    engines: list[EngineProcess] = []
    with runs.logs_on_failure(directory), shared_pool(directory, POOL) as shared:
        try:
            engines.append(runs.start_engine(model, shared.a, directory, "prefill"))
            engines.append(runs.start_engine(model, shared.b, directory, "decode"))
            rows = prefill_then_decode(shared, *engines, texts)
            for engine in engines:
                engine.stop()
        finally:
            for engine in engines:
                engine.kill()
        bytes_per_token = runs.slab_bytes(shared.a) / runs.CHUNK_TOKENS
        pids = shared.pids
    runs.print_table(rows, bytes_per_token)
    runs.check(rows)
    for pid in pids:
        runs.check_nothing_left(pid, [engine.pid for engine in engines])


if __name__ == "__main__":
    runs.run_demo("Prefill on one engine, decode on another, through a shared pool.", POOL, TIME_LIMIT_S, demo)
