"""SIGKILL at every named point of a commit, an eviction and a reformat; then a restart on the same pool.

Whatever the point: what was committed before is there, byte for byte; nothing half-written is visible; no slab is lost.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.pool_cases import NAMESPACE, MiB, chain, check_contents, key, store

from maru_shm import failpoints
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec

pytestmark = pytest.mark.chaos

SLABS = 12  #: four regions of three
OTHER = b"other namespace."
POOL_POINTS = [name for name in failpoints.POINTS if name.startswith(("commit.", "evict.", "region."))]

#: Fills the pool with prefixes p0, p1, … of four chunks, prints each chunk once it is committed, and goes on evicting; every
#: seventh prefix is of another slab size, so that regions are reformatted.
WORKER = """
import sys
from tests.support.pool_cases import *
pool = PoolFile.open(PoolSpec(path=sys.argv[1], size=int(sys.argv[2]), region_size=MiB))
directory = Directory(pool)
directory.rebuild()
for i in range(int(sys.argv[3]), 100000):
    keys = chain(f"p{i}", 4)
    small = i % 7 == 6
    for d in range(4):
        k = keys[d * KEY : (d + 1) * KEY]
        parent = keys[(d - 1) * KEY : d * KEY] if d else ROOT
        store(pool, directory, k, start=d, parent=parent, nbytes=30_000 if small else NBYTES,
              namespace=b"other namespace." if small else NAMESPACE)
        print(i, d, directory.admin.stats()["evicted_total"], flush=True)
"""


@pytest.fixture
def spec() -> Iterator[PoolSpec]:
    name = f"maru-test-pool-{os.getpid()}-{uuid.uuid4().hex}"
    spec = PoolSpec(path=name, size=5 * MiB, region_size=MiB)
    yield spec
    Path(spec.file_path).unlink(missing_ok=True)


def start_worker(spec: PoolSpec, first: int, failpoint: str = "") -> subprocess.Popen[str]:
    env = {**os.environ, "MARU_FAILPOINT": failpoint, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, spec.path, str(spec.size), str(first)], env=env, stdout=subprocess.PIPE, text=True
    )


def restart_and_check(spec: PoolSpec, reported: list[tuple[int, int, int]]) -> int:
    """Open the pool as the next sidecar does and check every claim; returns the chunks present."""
    pool = PoolFile.open(spec)
    directory = Directory(pool)
    report = directory.rebuild()
    assert (report.dropped_corrupt, report.dropped_duplicate, report.dropped_unverified) == (0, 0, 0)
    assert report.corrupt_regions == 0
    assert report.dropped_writing <= 1
    assert report.dropped_evicting <= 1
    stats = directory.admin.stats()
    assert (stats["slabs_writing"], stats["slabs_evicting"]) == (0, 0)
    last = max((i for i, _, _ in reported), default=0) + 1
    present = 0
    for i in range(last + 2):
        keys = chain(f"p{i}", 4)
        found = check_contents(pool, directory, keys, namespace=OTHER if i % 7 == 6 else NAMESPACE)
        present += found
    assert present == stats["chunks"], "a chunk lies outside its prefix: its parent was evicted before it"
    evicted = reported[-1][2] if reported else 0
    lost = len(reported) - evicted - present
    assert lost <= 4, f"{len(reported)} committed, {evicted} evicted, {present} left"  # evicted after the last report
    for i, d, _ in reported[-2:-1]:  # the one before the last is never the next victim
        assert check_contents(pool, directory, chain(f"p{i}", 4), namespace=OTHER if i % 7 == 6 else NAMESPACE) > d

    assert directory.admin.clear() == present
    assert directory.admin.stats()["regions_free"] == 4
    assert store(pool, directory, chain("fresh", SLABS)) == SLABS, "a slab is lost"
    assert check_contents(pool, directory, chain("fresh", SLABS)) == SLABS
    pool.close(clean=False)
    return present


def read_reports(worker: subprocess.Popen[str]) -> list[tuple[int, int, int]]:
    out, _ = worker.communicate(timeout=60)
    lines = [line.split() for line in out.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(i), int(d), int(evicted)) for i, d, evicted in lines]


@pytest.mark.parametrize("nth", [1, 2, 9, 40])
@pytest.mark.parametrize("point", POOL_POINTS)
def test_a_kill_at_any_point_loses_nothing_committed_and_shows_nothing_half_written(
    spec: PoolSpec, point: str, nth: int
) -> None:
    worker = start_worker(spec, 0, f"{point}:{nth}")
    reported = read_reports(worker)
    assert worker.returncode == -signal.SIGKILL, "the point was never reached"
    restart_and_check(spec, reported)


def test_kills_at_random_moments_on_one_pool_are_survived_every_time(spec: PoolSpec) -> None:
    rng = random.Random(11)
    first = 0
    for _ in range(12):
        worker = start_worker(spec, first)
        assert worker.stdout is not None
        for _ in range(rng.randrange(1, 60)):
            assert worker.stdout.readline()
        time.sleep(rng.random() * 0.003)  # not to wait for anything: to die anywhere between two reports
        worker.kill()
        out, _ = worker.communicate(timeout=60)
        done = [line.split()[0] for line in out.splitlines(keepends=True) if line.endswith("\n")]
        first = int(done[-1]) + 1 if done else first + 20
        pool = PoolFile.open(spec)
        directory = Directory(pool)
        report = directory.rebuild()
        assert (report.dropped_corrupt, report.corrupt_regions, report.dropped_duplicate) == (0, 0, 0)
        present = sum(
            check_contents(pool, directory, chain(f"p{i}", 4), namespace=OTHER if i % 7 == 6 else NAMESPACE)
            for i in range(first + 20)
        )
        assert present == directory.admin.stats()["chunks"]
        pool.close(clean=False)
        first += 20
    restart = Directory(pool := PoolFile.open(spec))
    restart.rebuild()
    restart.admin.clear()
    assert store(pool, restart, chain("fresh", SLABS)) == SLABS
    assert restart.lookup(NAMESPACE, key("fresh/0"), world=1) == 1
    pool.close(clean=False)
