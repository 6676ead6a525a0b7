"""What the cuda engine reaches against one flat pinned copy of the same bytes, and what that costs a decode loop beside it.

Run on a machine with an NVIDIA GPU and torch, from the repository root::

    python bench/copy_bandwidth.py [--quick] [--pieces 64,16] [--only-layouts] [--flat-per-call 256,4096] [--threads 1,2]

A second process owns the KV cache of 32 layers (layer-outermost in one buffer, a block's layers together, an allocation per
layer), this one is the sidecar. Each row is one prompt of 1,024 blocks: wall-clock GB/s, the share of the flat figure of the
same run, descriptors, CPU milliseconds: of planning and submitting in the calling thread, and of the whole process. Rows repeat
for each number of flat rows per driver call and of submitting threads. Slabs fall in address from chunk to chunk, as in a pool.
Tables: *scattered* ids, *runs* of 16 (one chunk each), *rising* and *falling* ids (vLLM hands blocks out in the order in which
an earlier request got them, or the reverse). *sliced*: as the daemon does, two slices in flight; *whole*: one submission.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] + [str(ROOT / part) for part in ("shm", "sidecar", "connector", "server")]

from tests.gpu.kv_process import KvProcess  # noqa: E402
from tests.support.shm_pool import ShmPool  # noqa: E402

from maru_shm.cuda import driver as cuda_driver  # noqa: E402
from maru_shm.geometry import (  # noqa: E402
    Direction,
    KvLayout,
    KvPlane,
    KvRegion,
    Share,
)
from maru_sidecar.transfer.cuda import CudaCopy, CudaTarget, CudaTransfer  # noqa: E402

LAYERS, BLOCKS, PER_CHUNK = 32, 1024, 16
SLICE = 64 << 20
BLOCK = LAYERS * 65536
POOL = 2 * BLOCKS * BLOCK + BLOCK
Table = npt.NDArray[np.int32]


def layout_of(regions: list[KvRegion], num_blocks: int, piece: int, *, together: bool = False) -> KvLayout:
    """All layers in one region, or one region each; ``together``: a block's layers side by side (``maru.block_outermost``)."""
    if together:
        return KvLayout(num_blocks, 16, (KvPlane(0, 0, LAYERS * piece, LAYERS * piece),), tuple(regions), "bench")
    step = num_blocks * piece if len(regions) == 1 else 0
    planes = tuple(KvPlane(min(i, len(regions) - 1), i * step, piece, piece, i) for i in range(LAYERS))
    return KvLayout(num_blocks, 16, planes, tuple(regions), "bench")


def tables(num_blocks: int) -> dict[str, Table]:
    rng = np.random.default_rng(1)
    starts = rng.permutation(num_blocks // PER_CHUNK)[: BLOCKS // PER_CHUNK] * PER_CHUNK
    return {
        name: ids.astype(np.int32).reshape(-1, PER_CHUNK)
        for name, ids in (
            ("scattered", rng.permutation(num_blocks)[:BLOCKS]),
            ("runs of 16", (starts[:, None] + np.arange(PER_CHUNK)).reshape(-1)),
            ("rising", np.arange(BLOCKS)),
            ("falling", np.arange(BLOCKS)[::-1]),
        )
    }


def _falling(slab_bytes: int) -> npt.NDArray[np.uint64]:
    """Where the slabs of the prompt lie, in chunk order."""
    return np.arange(BLOCKS // PER_CHUNK, dtype=np.uint64)[::-1] * np.uint64(slab_bytes)


def whole(target: CudaTarget, direction: Direction, offsets: npt.NDArray[np.uint64], table: Table) -> Callable[[], None]:
    return lambda: target.submit(direction, offsets, table).wait()


def sliced(target: CudaTarget, direction: Direction, offsets: npt.NDArray[np.uint64], table: Table) -> Callable[[], None]:
    """As the daemon cuts them: loads by layers where those have allocations of their own, else by chunks; two in flight."""
    size = max(SLICE, target.slice_hint)
    parts = target.parts if direction is Direction.LOAD else 1
    chunks = parts * max(1, size // (PER_CHUNK * target.layout.block_bytes))

    def run() -> None:
        flying: deque[CudaCopy] = deque()
        for at in range(0, len(table), chunks):
            span = slice(at, at + chunks)
            cut = min(parts, max(1, -(-len(table[span]) * parts // chunks)))
            for part in range(cut):
                if len(flying) == 2:
                    flying.popleft().wait()
                flying.append(target.submit(direction, offsets[span], table[span], Share(part, cut)))
        for copy in flying:
            copy.wait()

    return run


def best(run: Callable[[], None], repeats: int) -> float:
    """Seconds, the median after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Bench:
    def __init__(self, *, quick: bool, directory: str, per_call: list[int], threads: list[int]) -> None:
        self.ways = list(product(per_call or [cuda_driver.FLAT_PER_CALL], threads or [1]))
        self.repeats = 3 if quick else 7
        self.quick = quick
        self.process = KvProcess()
        self.pool = ShmPool(POOL, directory)
        self.pool.bytes[:: 1 << 12] = 1
        self.transfer = CudaTransfer(self.pool.mapping, POOL)  # one registration: slabs here are neighbours throughout
        self.rows: list[dict[str, object]] = []

    def flat(self, target: CudaTarget, direction: Direction, nbytes: int) -> float:
        """GB/s of plain cuMemcpyHtoDAsync/DtoHAsync over the same memory, in parts where an allocation is smaller."""
        device, driver = target.device, target.device.driver
        library = driver._lib
        lane = device._lanes[direction]
        gpu = ctypes.c_uint64(target.planner.plan(np.zeros(1, np.uint64), np.zeros((1, 1), np.int32))["device"][0])
        base, size = driver.allocation_range(gpu.value)
        part = min(nbytes, base + size - gpu.value)
        stream = ctypes.c_void_p(lane.stream)
        event = driver.create_event()

        def run() -> None:
            for at in range(0, nbytes, part):
                host = ctypes.c_void_p(self.pool.mapping.address + at)
                count = ctypes.c_size_t(min(part, nbytes - at))
                if direction is Direction.LOAD:
                    code = library.cuMemcpyHtoDAsync_v2(gpu, host, count, stream)
                else:
                    code = library.cuMemcpyDtoHAsync_v2(host, gpu, count, stream)
                assert code == 0, code
            driver.record_event(event, lane.stream)
            driver.wait_event(event)

        seconds = best(run, self.repeats)
        driver.destroy_event(event)
        return nbytes / seconds / 1e9

    def submitting(self, target: CudaTarget) -> Iterator[dict[str, object]]:
        """Set each way to submit in turn; how rows name it."""
        for per_call, threads in self.ways:
            cuda_driver.FLAT_PER_CALL, target.device.submitters = per_call, threads
            yield {"flat_per_call": per_call, "threads": threads}

    def row(self, **values: object) -> None:
        self.rows.append(values)
        print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()), flush=True)

    def attach(self, num_blocks: int, piece: int, *, allocations: int = 1, together: bool = False) -> CudaTarget:
        regions = self.process.allocate(*[LAYERS * num_blocks * piece // allocations] * allocations)
        target = self.transfer.attach(layout_of(regions, num_blocks, piece, together=together), self.process.peer)
        state = self.transfer.pinning.join(300)
        assert state.value == "pinned", state
        return target

    def measure(self, piece: int, num_blocks: int, note: str = "", *, allocations: int = 1, together: bool = False) -> None:
        target = self.attach(num_blocks, piece, allocations=allocations, together=together)
        nbytes = BLOCKS * LAYERS * piece
        offsets = _falling(PER_CHUNK * LAYERS * piece)
        for direction in Direction:
            flat = self.flat(target, direction, nbytes)
            for (name, table), way in product(tables(num_blocks).items(), (whole, sliced)):
                for submitting in self.submitting(target):
                    before, process = self.transfer.statistics(), time.process_time_ns()
                    seconds = best(way(target, direction, offsets, table), self.repeats)
                    after, process = self.transfer.statistics(), time.process_time_ns() - process
                    runs = self.repeats + 1
                    self.row(
                        piece_kib=piece >> 10, note=note or "-", direction=direction.value, table=name, way=way.__name__,
                        **submitting,
                        gbps=nbytes / seconds / 1e9, of_flat=100 * nbytes / seconds / 1e9 / flat, flat=flat,
                        copies=(after.copies - before.copies) // runs, cpu_ms=(after.cpu_ns - before.cpu_ns) / runs / 1e6,
                        process_cpu_ms=process / runs / 1e6,
                    )  # fmt: skip
        target.close()

    def layouts(self) -> None:
        """A block's layers side by side; every layer in an allocation of its own, by the batch calls and copy by copy, which
        knows no flat rows.
        """
        for kib in (64, 16):
            self.measure(kib << 10, 4685 * (64 // kib), "a block's layers together", together=True)
        for kib in (64, 16):
            self.measure(kib << 10, 4685 * (64 // kib), "an allocation per layer", allocations=LAYERS)
        batching, driver = self.transfer, cuda_driver.CudaDriver()
        batching.close()
        driver.limit_batch(0)
        ways, self.ways = self.ways, self.ways[:1]
        self.transfer = CudaTransfer(self.pool.mapping, POOL, driver=driver)
        self.measure(65536, 4685, "an allocation per layer, copy by copy", allocations=LAYERS)
        self.measure(65536, 4685, "copy by copy")
        self.transfer.close()
        self.transfer, self.ways = CudaTransfer(self.pool.mapping, POOL), ways

    def duplex(self, piece: int, num_blocks: int) -> None:
        """Loads and stores at once, each on half of the pool, two prompts each."""
        target = self.attach(num_blocks, piece)
        table = tables(num_blocks)["scattered"]
        nbytes = BLOCKS * LAYERS * piece
        rates: dict[str, float] = {}

        def loop(direction: Direction, base: int) -> None:
            run = sliced(target, direction, np.uint64(base) + _falling(PER_CHUNK * LAYERS * piece), table)
            start = time.perf_counter()
            for _ in range(8):
                run()
            rates[direction.value] = 8 * nbytes / (time.perf_counter() - start) / 1e9

        for submitting in self.submitting(target):
            threads = [threading.Thread(target=loop, args=(d, i * nbytes)) for i, d in enumerate(Direction)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.row(piece_kib=piece >> 10, **submitting, duplex_load_gbps=rates["load"], duplex_store_gbps=rates["store"])
        target.close()

    def interference(self, piece: int, num_blocks: int) -> None:
        """A memory-bound loop in the engine's process while this one copies without pause."""
        target = self.attach(num_blocks, piece)
        table = tables(num_blocks)["scattered"]
        seconds = 1.0 if self.quick else 2.0
        self.process.call("decode", 0.5)
        quiet = statistics.median(self.process.call("decode", seconds))
        directions: list[tuple[Direction, ...]] = [(Direction.LOAD,), (Direction.STORE,), tuple(Direction)]
        for what, submitting in ((what, submitting) for what in directions for submitting in self.submitting(target)):
            stop = threading.Event()
            moved = [0]

            def copy(direction: Direction, base: int, stop: threading.Event = stop, moved: list[int] = moved) -> None:
                run = sliced(target, direction, np.uint64(base) + _falling(PER_CHUNK * LAYERS * piece), table)
                while not stop.is_set():
                    run()
                    moved[0] += BLOCKS * LAYERS * piece

            threads = [threading.Thread(target=copy, args=(d, i * BLOCKS * LAYERS * piece)) for i, d in enumerate(what)]
            for thread in threads:
                thread.start()
            start = time.perf_counter()
            loaded = statistics.median(self.process.call("decode", seconds))
            rate = moved[0] / (time.perf_counter() - start) / 1e9
            stop.set()
            for thread in threads:
                thread.join()
            self.row(
                interference="+".join(d.value for d in what), **submitting, step_ms=round(loaded, 3), alone_ms=round(quiet, 3),
                slowdown_percent=100 * (loaded / quiet - 1), copying_gbps=rate,
            )  # fmt: skip
        target.close()

    def close(self) -> None:
        self.transfer.close()
        self.process.close()
        self.pool.close()


def shapes(pieces: list[int], *, far: bool) -> Iterator[tuple[int, int, str]]:
    for kib in pieces:
        yield kib << 10, 4685 * (64 // kib), ""
    if far:
        yield 65536, 46000, "layer stride 2.8 GiB"


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no cache of 96 GiB")
    parser.add_argument("--far", action="store_true", help="that cache, too")
    parser.add_argument("--pieces", type=numbers, default="64,32,16,8", help="piece sizes in KiB")
    parser.add_argument("--flat-per-call", type=numbers, default=[], help="flat rows per driver call, several to compare")
    parser.add_argument("--threads", type=numbers, default=[], help="threads that submit many flat rows, several to compare")
    parser.add_argument("--shm", default="/dev/shm", help="tmpfs that holds the pool (one mounted with huge=always, say)")
    parser.add_argument("--only-pieces", action="store_true", help="nothing but those rows")
    parser.add_argument(
        "--only-layouts", action="store_true", help="nothing but caches that are not one layer-outermost buffer"
    )
    parser.add_argument("--json", type=Path, help="write all rows there")
    options = parser.parse_args()
    bench = Bench(quick=options.quick, directory=options.shm, per_call=options.flat_per_call, threads=options.threads)
    try:
        if options.only_layouts:
            bench.layouts()
            return
        for shape in shapes(options.pieces, far=options.far or not options.quick):
            bench.measure(*shape)
        if not options.only_pieces:
            bench.layouts()
            bench.duplex(65536, 4685)
            bench.interference(65536, 4685)
    finally:
        bench.close()
        if options.json:
            options.json.write_text(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    main()
