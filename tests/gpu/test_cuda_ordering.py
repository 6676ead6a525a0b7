"""The fence word, written by the engine's stream, orders the sidecar's copies; the same copies without it go wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from maru_shm import layout as L
from maru_shm import segment as segments
from maru_shm.geometry import Direction
from maru_shm.segment import Segment, SegmentInfo
from maru_sidecar.transfer import cuda_device
from maru_sidecar.transfer.cuda import CudaTarget, CudaTransfer
from tests.gpu.conftest import REGION
from tests.gpu.kv_process import KvProcess
from tests.gpu.test_cuda_conformance import ROWS
from tests.support.kv_cases import KvCase, cases
from tests.support.kv_process import random_bytes
from tests.support.shm_pool import ShmPool

CASE: KvCase = cases()[0]
LONG = 1_200_000_000  #: cycles: over half a second at 2 GHz
TABLE = np.array([[7, 3, 50, 51]], np.int32)
OFFSETS = np.array([REGION], np.uint64)
SIZE = 4 * CASE.block_bytes


@pytest.fixture
def segment() -> Iterator[Segment]:
    shape = L.SegmentShape.for_limits(4, 16, 64)
    info = SegmentInfo(os.getpid() << 16, 1, shape, os.getpid(), os.getpid(), 0, 0, "0fe0ce00", L.Role.WORKER)
    segment = segments.create(info)
    yield segment
    segment.close()
    segments.unlink(info.name)


@pytest.fixture
def target(transfer: CudaTransfer, engine_process: KvProcess) -> Iterator[CudaTarget]:
    target = transfer.attach(CASE.layout(engine_process.allocate(*CASE.allocations)), engine_process.peer)
    transfer.pinning.join(60)
    engine_process.call("set", 1)
    yield target
    target.close()


def wait_for(segment: Segment, step: int) -> None:
    """What the sidecar's poller does before a copy."""
    deadline = time.monotonic() + 30
    while segment.words[L.WORD_FENCE] < step:
        assert time.monotonic() < deadline, "the fence word never came"
        time.sleep(0)


def test_a_store_behind_the_fence_sees_the_step_and_one_without_it_does_not(
    target: CudaTarget, engine_process: KvProcess, pool: ShmPool, segment: Segment
) -> None:
    assert engine_process.call("open_stream_fence", segment.info.name) == "StreamFence"
    engine_process.call("step", 5, LONG, 77)
    assert segment.words[L.WORD_FENCE] < 5
    target.submit(Direction.STORE, OFFSETS, TABLE).wait()
    assert (pool.bytes[REGION : REGION + SIZE] == 1).all()  # no fence: the bytes of before the step
    wait_for(segment, 5)
    target.submit(Direction.STORE, OFFSETS, TABLE).wait()
    assert (pool.bytes[REGION : REGION + SIZE] == 77).all()
    engine_process.call("close_fence")


def test_a_load_behind_the_fence_stays_and_one_without_it_is_overwritten(
    target: CudaTarget, engine_process: KvProcess, pool: ShmPool, segment: Segment
) -> None:
    engine_process.call("open_stream_fence", segment.info.name)
    pool.bytes[REGION : REGION + SIZE] = 200
    engine_process.call("step", 8, LONG, 66)
    target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
    wait_for(segment, 8)
    assert (CASE.slab(engine_process.read(), TABLE[0]) == 66).all()  # no fence: the step wrote over it
    engine_process.call("step", 9, LONG, 67)
    wait_for(segment, 9)
    target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
    assert (CASE.slab(engine_process.read(), TABLE[0]) == 200).all()
    engine_process.call("close_fence")


def test_copies_overtake_a_long_kernel_that_does_not_concern_them(
    target: CudaTarget, engine_process: KvProcess, segment: Segment
) -> None:
    engine_process.call("open_stream_fence", segment.info.name)
    engine_process.call("step", 3, 2 * LONG, 1)
    for _ in range(20):
        target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
    assert segment.words[L.WORD_FENCE] < 3  # the kernel still runs
    wait_for(segment, 3)
    engine_process.call("close_fence")


def test_without_stream_memory_operations_events_carry_the_fence(
    target: CudaTarget, engine_process: KvProcess, segment: Segment
) -> None:
    assert engine_process.call("open_event_fence", segment.info.name) == "EventFence"
    engine_process.call("step", 1, LONG, 1)
    assert segment.words[L.WORD_FENCE] == 0
    engine_process.call("poll_fence")
    assert segment.words[L.WORD_FENCE] == 1
    engine_process.call("close_fence")


def test_submissions_of_many_rows_take_effect_in_their_order(
    transfer: CudaTransfer, engine_process: KvProcess, pool: ShmPool
) -> None:
    """All over the same blocks, none waited for but the last: small ones between those that several threads submit."""
    target = transfer.attach(ROWS.layout(engine_process.allocate(*ROWS.allocations)), engine_process.peer)
    target.device.submitters = 2
    transfer.pinning.join(60)
    size = 4 * ROWS.block_bytes
    rng = np.random.default_rng(7)
    pool.bytes[: 128 * size] = random_bytes(9000, 128 * size)
    for _ in range(3):
        table = rng.permutation(ROWS.num_blocks)[:128].astype(np.int32).reshape(32, 4)
        for last in (32, 3):  # chunks of the submission that comes last
            for at in range(3):
                offsets = (np.arange(32, dtype=np.uint64) + np.uint64(32 * at)) * np.uint64(size)
                assert target.submit(Direction.LOAD, offsets, table).operations > cuda_device.ALONE
                target.submit(Direction.LOAD, offsets[:3] + np.uint64(32 * size), table[:3])
            offsets = np.arange(127, 95, -1, dtype=np.uint64) * np.uint64(size)
            target.submit(Direction.LOAD, offsets[:last], table[:last]).wait()
            memory = engine_process.read()
            for chunk, blocks in enumerate(table):
                source = int(offsets[chunk]) if chunk < last else (64 + chunk) * size
                np.testing.assert_array_equal(ROWS.slab(memory, blocks), pool.bytes[source : source + size])
    target.device.submitters = 1
    target.close()
