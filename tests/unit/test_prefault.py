"""Prefaulting touches every page, changes no byte, can be stopped, and says what went wrong."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_sidecar import hostmemory
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.prefault import Prefault, PrefaultState

MiB = 1 << 20
SIZE = 32 * MiB


@pytest.fixture
def pool() -> Iterator[PoolFile]:
    pool = PoolFile.open(PoolSpec(path=f"maru-test-pool-{os.getpid()}-{uuid.uuid4().hex}", size=SIZE))
    yield pool
    pool.close(clean=False)
    Path(pool.spec.file_path).unlink(missing_ok=True)


def resident_bytes(pool: PoolFile) -> int:
    """Bytes of the pool's mapping that have a page in this process."""
    name = pool.spec.file_path
    with open("/proc/self/smaps", encoding="ascii") as f:
        lines = f.read().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(name))
    rss = next(line for line in lines[at:] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024


def test_every_page_is_resident_afterwards_and_no_byte_has_changed(pool: PoolFile) -> None:
    pool.bytes[5 * MiB : 6 * MiB] = os.urandom(MiB)
    digest = hashlib.sha256(pool.bytes).digest()
    run = Prefault(pool, threads=2, slice_bytes=MiB)
    assert run.progress().state is PrefaultState.IDLE
    run.start()
    assert run.join(60)
    progress = run.progress()
    assert progress.state is PrefaultState.DONE
    assert progress.done_bytes == progress.total_bytes == SIZE
    assert progress.rate > 0
    assert resident_bytes(pool) == SIZE
    assert hashlib.sha256(pool.bytes).digest() == digest


def test_a_stopped_pass_ends_and_says_how_far_it_came(pool: PoolFile) -> None:
    run = Prefault(pool, threads=1, slice_bytes=4096)
    run.start()
    run.stop()
    progress = run.progress()
    assert progress.state in (PrefaultState.STOPPED, PrefaultState.DONE)
    assert 0 <= progress.done_bytes <= SIZE
    assert progress.error == ""


def test_stopping_before_the_start_is_harmless(pool: PoolFile) -> None:
    run = Prefault(pool)
    run.stop()
    assert run.progress().state is PrefaultState.IDLE


def test_memory_that_cannot_be_had_is_reported_not_fatal(pool: PoolFile) -> None:
    os.truncate(pool.spec.file_path, SIZE // 2)  # touching the second half is SIGBUS; MADV_POPULATE_WRITE answers EFAULT
    run = Prefault(pool, threads=2, slice_bytes=MiB)
    run.start()
    assert run.join(60)
    progress = run.progress()
    assert progress.state is PrefaultState.FAILED
    assert "EFAULT" in progress.error
    assert f"of {SIZE}" in progress.error


def test_a_kernel_without_populate_gets_its_pages_read(pool: PoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmemory, "MADV_POPULATE_WRITE", 9999)  # EINVAL, as kernels before 5.14 answer
    pool.bytes[MiB : MiB + 3] = b"abc"
    digest = hashlib.sha256(pool.bytes).digest()
    run = Prefault(pool, threads=1)
    run.start()
    assert run.join(60)
    assert run.progress().state is PrefaultState.DONE
    assert resident_bytes(pool) == SIZE
    assert hashlib.sha256(pool.bytes).digest() == digest
