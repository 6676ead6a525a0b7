"""The hot path in numbers: posting, lookups, hashing, the idle daemon, and the cpu engine against plain memcpy.

    python bench/hotpath.py [--json FILE]

Runs a real sidecar on a pool in /dev/shm and a client of its own. Every figure stands beside its floor or its goal, taken in
the same run; times are medians, since machines are noisy. Figures count what they move: keys, bytes, messages.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.client import ROOT, Client, KvCache, prompt_keys
from tests.support.sidecar_process import SidecarProcess, running_sidecar

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.keys import ChunkKeys

MIB = 1 << 20
KEYS, BLOCKS = 64, 1024


def quantiles(samples: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(samples)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.99)]


def timed(action: Callable[[], object], n: int) -> list[float]:
    """Seconds of each of ``n`` calls."""
    out = []
    for _ in range(n):
        begin = time.perf_counter()
        action()
        out.append(time.perf_counter() - begin)
    return out


class Report:
    """Rows of (what, figure, unit, goal or floor)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, what: str, value: float, unit: str, goal: str) -> None:
        self.rows.append({"what": what, "value": value, "unit": unit, "goal": goal})
        print(f"{what:58} {value:10.2f} {unit:6} {goal}", flush=True)


def posting(report: Report, client: Client) -> None:
    """From the engine's thread: 64 keys and 1,024 block ids into the ring, doorbell check included."""
    keys, blocks = os.urandom(KEYS * L.KEY_BYTES), np.arange(BLOCKS, dtype="<i4").tobytes()
    post_only = []
    for _ in range(2000):
        begin = time.perf_counter()
        ticket = client.records.post(L.Op.LOAD, keys, blocks, label="bench")
        client.publish()
        post_only.append(time.perf_counter() - begin)
        client.finish(ticket)
    p50, p99 = quantiles(post_only)
    report.add(f"post {KEYS} keys + {BLOCKS} block ids, p50", p50 * 1e6, "µs", "goal ≤ 20")
    report.add(f"post {KEYS} keys + {BLOCKS} block ids, p99", p99 * 1e6, "µs", "")


def apart(pid: int) -> None:
    """The engine's thread and the sidecar on a core each, as on any node: with two cores in all, the kernel often wakes the
    sidecar on the core of the thread that rang, which then waits for its own answer's CPU."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:1])
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores[1:])


def lookups(report: Report, scheduler: Client, keys: bytes) -> None:
    """Posted and answered, from the engine's thread, against a sidecar that sleeps and one that still spins."""

    def once() -> None:
        ticket = scheduler.post(L.Op.LOOKUP, keys)
        while not scheduler.records.state(ticket).terminal:
            pass
        assert scheduler.records.reply(ticket).n_done == KEYS
        scheduler.release(ticket)

    warm = timed(once, 2000)
    asleep = []
    for _ in range(300):
        until = time.perf_counter() + 0.005
        while time.perf_counter() < until:  # the engine's thread is at work, the sidecar has gone to sleep
            pass
        asleep += timed(once, 1)
    for name, samples in (("back to back", warm), ("sidecar asleep before", asleep)):
        p50, p99 = quantiles(samples)
        report.add(f"lookup of {KEYS} keys, {name}, p50", p50 * 1e6, "µs", "goal ≤ 150")
        report.add(f"lookup of {KEYS} keys, {name}, p99", p99 * 1e6, "µs", "")


def hashing(report: Report) -> None:
    tokens = list(range(65536))
    previous = 0.0
    for n in (16384, 32768, 65536):
        p50, _ = quantiles(timed(lambda n=n: ChunkKeys(ROOT, 256).extend(tokens, n), 30))  # type: ignore[misc]
        goal = "goal ≤ 10 ms at 65,536" if n == 65536 else ""
        report.add(f"hash {n} tokens", p50 * 1e3, "ms", goal + (f" ×{p50 / previous:.2f}" if previous else ""))
        previous = p50


def wait_prefaulted(sidecar: SidecarProcess) -> None:
    """The pool's pages are touched in the background; measure after that."""
    while True:
        status = sidecar.ask(M.GetStatus())
        assert isinstance(status, M.Status)
        if status.sections["pool"]["prefault"] == "done":  # type: ignore[index]
            return
        time.sleep(0.1)


def idle(report: Report, pid: int) -> None:
    process = psutil.Process(pid)
    seconds = 5.0
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    busy = sum(process.cpu_times()[:2]) - before
    report.add("idle sidecar, two sessions attached", busy / seconds * 100, "% core", "goal ≤ 1")
    memory = process.memory_full_info()
    report.add("RSS of the sidecar, pool aside", (memory.rss - memory.shared) / MIB, "MiB", "goal ≤ 150")


def memcpy_rate(nbytes: int) -> float:
    """Bytes per second of one thread's memcpy in 2 MiB pieces."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    piece = 2 * MIB

    def copy() -> None:
        for at in range(0, nbytes, piece):
            ctypes.memmove(target.ctypes.data + at, source.ctypes.data + at, piece)

    return nbytes / statistics.median(timed(copy, 7))


def copies(report: Report, client: Client, cache: KvCache, keys: bytes, how: str) -> None:
    """Load and store through the ring against one memcpy thread over the same bytes in the same piece size."""
    n, chunk_blocks = len(keys) // L.KEY_BYTES, 4
    rng = np.random.default_rng(5)
    moved = n * chunk_blocks * cache.layout.block_bytes
    floor = memcpy_rate(moved)
    report.add("plain memcpy, one thread, 2 MiB pieces", floor / 1e9, "GB/s", "floor")
    rates: dict[str, list[float]] = {"load": [], "store": []}
    for turn in range(7):
        blocks = rng.permutation(cache.num_blocks)[: n * chunk_blocks].reshape(n, chunk_blocks)
        begin = time.perf_counter()
        reply = client.load(keys, blocks)
        rates["load"].append(moved / (time.perf_counter() - begin))
        assert reply.n_done == n
        fresh = prompt_keys(f"turn {turn}", n, chunk_tokens=client.chunk_tokens)
        begin = time.perf_counter()
        reply = client.store(fresh, blocks)
        rates["store"].append(moved / (time.perf_counter() - begin))
        assert reply.n_done == n
    for what, samples in rates.items():
        rate = statistics.median(samples)
        report.add(
            f"cpu engine {what}, 2 MiB pieces, {how}",
            rate / 1e9,
            "GB/s",
            f"{rate / floor:.2f} of memcpy" + (", goal ≥ 0.70" if how.endswith("off") else ""),
        )


def control_path(report: Report) -> None:
    """Small pieces: the same engine's scheduler looks up what its worker stored."""
    small = KvCache(BLOCKS, layers=1, piece=512, signature="bench-small")
    common = {"engine_id": "bench", "chunk_tokens": 256, "max_keys": 256, "max_blocks": 4096}
    with (
        running_sidecar(pool_bytes=256 * MIB) as sidecar,
        Client(sidecar.socket, cache=small, **common) as worker,  # type: ignore[arg-type]
        Client(sidecar.socket, role=L.Role.SCHEDULER, **common) as scheduler,  # type: ignore[arg-type]
    ):
        wait_prefaulted(sidecar)
        keys = prompt_keys("bench", KEYS, chunk_tokens=256)
        worker.store(keys, np.arange(BLOCKS).reshape(KEYS, -1))
        posting(report, worker)
        apart(sidecar.pid)
        lookups(report, scheduler, keys)
        idle(report, sidecar.pid)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def data_path(report: Report, checksum: str) -> None:
    """2 MiB pieces. ``checksum`` on: one more pass of the CPU over the bytes, to take or to verify it."""
    large = KvCache(160, layers=1, piece=2 * MIB, signature="bench-large")
    with (
        running_sidecar(pool_bytes=3 << 30, flags=("--checksum", checksum)) as sidecar,
        Client(sidecar.socket, cache=large, engine_id="bench-large", chunk_tokens=64) as worker,
    ):
        wait_prefaulted(sidecar)
        keys = prompt_keys("large", 32, chunk_tokens=64)
        worker.store(keys, np.arange(128).reshape(32, 4))
        copies(report, worker, large, keys, f"checksums {checksum}")
        worker.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    report = Report()
    control_path(report)
    hashing(report)
    for checksum in ("off", "on"):
        data_path(report, checksum)
    if args.json:
        Path(args.json).write_text(json.dumps({"cpus": os.cpu_count(), "rows": report.rows}, indent=1))


if __name__ == "__main__":
    main()
