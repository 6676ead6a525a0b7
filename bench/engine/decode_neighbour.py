"""What another process does on the GPU, and how long an engine's decode steps take from then on.

    python bench/engine/decode_neighbour.py --model DIR [--json OUT]

An engine without a connector answers one prompt again and again. A neighbour, whose context is made before the engine starts
as a sidecar's is, copies between two answers, records an event, runs an empty kernel, in this order and each once. At last
another neighbour makes a context while the engine serves. A row has the milliseconds per output token of the answers after that
(see ``maru_sidecar/transfer/cuda_nudge.py``). Further arguments are those of ``engine_bench.py``. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "shm")]

import engine_bench  # noqa: E402
import numpy as np  # noqa: E402

from maru_shm.copy_shapes import COPY  # noqa: E402
from maru_shm.cuda.driver import CudaDriver  # noqa: E402

ANSWERS = 3
ACTS = ("nothing", "copy", "event", "kernel", "another context")


class Neighbour:
    """What the other process can do."""

    def context(self) -> None:
        self.driver = CudaDriver()
        self.driver.retain(next(iter(self.driver.devices().values())))
        self.copies, self.idle = self.driver.create_stream(), self.driver.create_stream()
        self.mark = self.driver.create_event()

    def copy(self) -> None:
        address = ctypes.c_uint64()
        assert self.driver._lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20)) == 0
        row = np.zeros(1, COPY)
        host = ctypes.create_string_buffer(1 << 20)
        row["host"], row["device"], row["width"] = ctypes.addressof(host), address.value, 1 << 20
        row["height"] = row["depth"] = row["host_layer"] = row["device_layer"] = 1
        self.driver.load_staged(row, self.copies)
        self.driver.wait_stream(self.copies)

    def event(self) -> None:
        self.driver.record_event(self.mark, self.idle)
        self.driver.wait_event(self.mark)

    def kernel(self) -> None:
        _, kernel = self.driver.load_empty()
        self.driver.launch_empty(kernel, self.idle)
        self.driver.wait_stream(self.idle)


def serve() -> None:
    """The neighbour's program: the name of an act per line."""
    neighbour = Neighbour()
    for line in sys.stdin:
        getattr(neighbour, line.strip())()
        print("done", flush=True)


class Process:
    """A neighbour's, from here."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.do("context")

    def do(self, act: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(act, file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != "done\n":
            self.end()
            raise RuntimeError(f"the neighbour failed at {act!r}; see its error above")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


async def measure(bench: engine_bench.Bench, neighbours: list[Process]) -> None:
    rows: list[dict[str, object]] = []
    document = bench.documents(1)[0]
    await bench.ask(document)
    for act in ACTS:
        if act == "another context":
            neighbours.append(await asyncio.to_thread(Process))
        elif act != "nothing":
            await asyncio.to_thread(neighbours[0].do, act)
        rows.append({"neighbour": act, "tpot_ms": [round((await bench.ask(document)).tpot * 1e3, 3) for _ in range(ANSWERS)]})
        print(rows[-1], flush=True)
        if bench.args.json:
            Path(bench.args.json).write_text(json.dumps(rows))


async def run(args: argparse.Namespace) -> None:
    neighbours = [Process()]
    bench = engine_bench.Bench(args)
    try:
        bench.start()
        await measure(bench, neighbours)
    finally:
        for neighbour in neighbours:
            neighbour.end()
        if bench.engine is not None:
            bench.engine.shutdown()


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    args = engine_bench.arguments()
    engine_bench.seed_weights()
    if args.skip_inductor_init:
        engine_bench.skip_inductor_init()
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
