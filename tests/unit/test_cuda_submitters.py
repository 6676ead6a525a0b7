"""Several threads that submit one request's copies, on an emulated driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.support.cuda_emulator import GPU
from tests.support.cuda_world import REGION, stand_in
from tests.support.cuda_world import CudaWorld as World
from tests.support.kv_cases import Bytes, KvCase

from maru_shm.cuda import driver as D
from maru_shm.geometry import Direction, KvPlane
from maru_sidecar.transfer import cuda_device
from maru_sidecar.transfer.base import Peer
from maru_sidecar.transfer.cuda import CudaCopy, CudaTarget


@pytest.fixture
def peer() -> Iterator[Peer]:
    with stand_in() as peer:
        yield peer


@pytest.fixture
def world() -> Iterator[World]:
    w = World()
    yield w
    w.driver.hold.set()
    w.engine.close()


#: 16 layers with an allocation each: a request for half of its blocks, scattered, is 1,536 flat rows.
MANY = KvCase("many-rows", 192, (192 * 1024,) * 16, tuple(KvPlane(i, 0, 1024, 1024, i) for i in range(16)))
#: Beside those, eight layers in one allocation, which are pitched copies.
MIXED = KvCase(
    "many-rows-and-others",
    192,
    (*MANY.allocations[:8], 8 * 192 * 1024, *MANY.allocations[8:]),
    tuple(KvPlane(*((8, (i - 8) * 192 * 1024) if 8 <= i < 16 else (i - 7 * (i >= 16), 0)), 1024, 1024, i) for i in range(24)),
)
MANY_OFFSETS = np.array([REGION, 4 * REGION, 2 * REGION], np.uint64)


def submitting_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("maru-cuda0-")}


class Many:
    """A target whose requests have many flat rows."""

    def __init__(self, w: World, peer: Peer, case: KvCase = MANY, *, submitters: int = 2) -> None:
        w.engine.submitters = submitters
        self.world = w
        self.case = case
        self.layout, self.memory = w.cache(case)
        self.target: CudaTarget = w.engine.attach(self.layout, peer)
        self.device = self.target.device
        self.table = w.rng.permutation(192)[:96].astype(np.int32).reshape(3, 32)

    def submit(self, direction: Direction = Direction.LOAD, table: np.ndarray | None = None) -> CudaCopy:
        return self.target.submit(direction, MANY_OFFSETS, self.table if table is None else table)

    def streams(self, direction: Direction = Direction.LOAD) -> tuple[int, int]:
        """The caller's and the other thread's."""
        lane = self.device._lanes[direction]
        (other,) = lane.submitters
        return lane.stream, other.stream

    def slabs(self) -> list[Bytes]:
        size = 32 * self.case.block_bytes
        return [self.world.pool[int(offset) : int(offset) + size] for offset in MANY_OFFSETS]

    def loaded(self) -> bool:
        """Whether the cache holds in the table's blocks what the slabs hold."""
        return all(
            np.array_equal(MANY.slab(self.memory, blocks), slab) for blocks, slab in zip(self.table, self.slabs(), strict=True)
        )


@pytest.fixture
def many(world: World, peer: Peer) -> Iterator[Many]:
    yield Many(world, peer)
    world.driver.held.clear()


@pytest.mark.parametrize("case", [MANY, MIXED], ids=lambda c: c.name)
@pytest.mark.parametrize(("submitters", "batch"), [(1, 2), (2, 0), (2, 1), (2, 2), (3, 2)])
def test_many_flat_rows_arrive_byte_for_byte_whoever_submits_them(
    case: KvCase, submitters: int, batch: int, peer: Peer
) -> None:
    w = World(batch)
    many = Many(w, peer, case, submitters=submitters)
    wanted = [m.copy() for m in many.memory]
    for blocks, slab in zip(many.table, many.slabs(), strict=True):
        case.scatter(wanted, blocks, slab)
    copy = many.submit()
    copy.wait()
    for got, want in zip(many.memory, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    before = w.pool.copy()
    w.pool[REGION:] = w.rng.integers(0, 256, 7 * REGION, np.uint8)
    expected = w.pool.copy()
    for offset, slab in zip(MANY_OFFSETS, many.slabs(), strict=True):
        at = int(offset)
        expected[at : at + slab.nbytes] = before[at : at + slab.nbytes]
    many.submit(Direction.STORE).wait()
    np.testing.assert_array_equal(w.pool, expected)
    if batch:
        assert sum(w.driver.batches) + sum(w.driver.flat_batches) == 2 * copy.operations
        assert bool(w.driver.batches) == (case is MIXED)
        assert len(w.driver.rows_taken) == 2 * submitters
        shares = list(w.driver.rows_taken.values())
        assert max(shares) - min(shares) <= 2 * 64
    assert len(submitting_threads()) == (2 * (submitters - 1) if batch else 0)
    w.engine.close()
    assert not submitting_threads()


def test_few_flat_rows_are_the_caller_s_alone(many: Many) -> None:
    copy = many.submit(table=np.where(np.arange(32) < 20, many.table, -1).astype(np.int32))
    copy.wait()
    assert 900 < copy.operations < cuda_device.ALONE
    assert len(many.world.driver.rows_taken) == 1
    assert not submitting_threads()


def test_a_copy_of_many_rows_is_in_flight_until_both_threads_rows_have_arrived(many: Many) -> None:
    many.submit().wait()
    for held in many.streams():
        for slab in many.slabs():
            slab[:] = many.world.rng.integers(0, 256, len(slab), np.uint8)
        many.world.driver.held = {held}
        copy = many.submit()
        assert not copy.done()
        assert not many.loaded()
        many.world.driver.held = set()
        assert copy.done()
        assert many.loaded()


def test_many_rows_follow_what_was_submitted_before_them_and_precede_what_comes_after(many: Many) -> None:
    many.submit().wait()
    driver = many.world.driver
    own, other = many.streams()
    last = MANY_OFFSETS[:1] + np.uint64(1024)
    for _ in range(2):  # all over the same blocks
        driver.held = {own}
        first = many.target.submit(Direction.LOAD, MANY_OFFSETS[:1], many.table[:1])  # few rows
        second = many.submit()
        driver.cuStreamSynchronize(other)  # as far as it may
        assert driver.streams[other].pending, "the other thread's rows overtook an earlier copy"
        driver.held = {other}
        assert first.done()
        assert not second.done()
        third = many.target.submit(Direction.LOAD, last, many.table[:1])
        assert not third.done(), "a later copy overtook the other thread's rows"
        driver.held = set()
        third.wait()
        assert second.done()
        wanted = many.world.pool[int(last[0]) :][: 32 * MANY.block_bytes]
        np.testing.assert_array_equal(MANY.slab(many.memory, many.table[0]), wanted)


@pytest.mark.parametrize("part", [0, 1], ids=["the caller's rows", "the other thread's rows"])
def test_when_rows_are_refused_neither_thread_s_are_in_flight_and_the_next_submission_works(many: Many, part: int) -> None:
    many.submit().wait()
    driver, threads = many.world.driver, submitting_threads()
    idle = len(many.device._events)
    for slab in many.slabs():
        slab[:] ^= 0xFF
    driver.refusals = {many.streams()[part]: [0, 0, D.INVALID_VALUE]}
    with pytest.raises(D.CudaError, match="EMULATED_1 "):
        many.submit()
    assert all(not stream.pending for stream in driver.streams.values())
    assert not many.loaded()
    assert many.world.engine.statistics().lost == ()
    many.submit().wait()
    assert many.loaded()
    assert submitting_threads() == threads
    assert len(many.device._events) == idle


def test_when_both_threads_are_refused_the_first_rows_error_is_told_and_a_sticky_one_of_either_loses_the_device(
    many: Many, peer: Peer
) -> None:
    many.submit().wait()
    own, other = many.streams()
    many.world.driver.refusals = {own: [D.INVALID_VALUE], other: [0, 719]}
    with pytest.raises(D.CudaError, match="EMULATED_1 "):
        many.submit()
    assert many.world.engine.statistics().lost == (GPU,)
    assert all(not stream.pending for stream in many.world.driver.streams.values())
    many.target.close()
    again = many.world.engine.attach(many.layout, peer)
    assert not submitting_threads()
    again.submit(Direction.LOAD, MANY_OFFSETS, many.table).wait()
    assert len(submitting_threads()) == 1
    assert many.loaded()


def test_after_a_thread_could_not_be_started_the_next_submission_waits_for_its_own_rows(world: World, peer: Peer) -> None:
    """What the other thread did for the submission that failed is not taken for its answer to the next."""
    many = Many(world, peer, submitters=3)
    many.submit().wait()
    third = many.device._lanes[Direction.LOAD].submitters[1]
    start, enqueue = third.start, world.driver.submit_flat
    gate, taken = threading.Event(), threading.Event()
    gate.set()

    def fails(job: Callable[[], int]) -> NoReturn:
        raise MemoryError

    def gated(*arguments: Any) -> int:
        if not threading.current_thread().name.endswith("-2"):
            return enqueue(*arguments)
        gate.wait(10)
        calls = enqueue(*arguments)
        taken.set()
        return calls

    world.driver.submit_flat = gated  # type: ignore[method-assign]
    third.start = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        many.submit()
    third.start = start  # type: ignore[method-assign]
    assert taken.wait(10)
    gate.clear()
    for slab in many.slabs():
        slab[:] ^= 0xFF
    caller = threading.Thread(target=lambda: many.submit().wait())
    caller.start()
    caller.join(0.3)
    assert caller.is_alive(), "it returned without the second thread's rows"
    gate.set()
    caller.join(10)
    assert many.loaded()


@pytest.mark.parametrize("call", ["cuEventCreate", "cuStreamCreateWithPriority"])
def test_where_no_second_stream_can_be_made_the_caller_submits_all_and_it_is_said_once(
    many: Many, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = many.world.driver
    driver.fail[call] = 2
    before = len(driver.streams), len(driver.events)
    for _ in range(2):
        many.submit().wait()
        assert many.loaded()
    assert len(driver.rows_taken) == 1
    assert (len(driver.streams), len(driver.events)) == before
    assert not submitting_threads()
    assert [r.args[-1].code for r in caplog.records if "which may be slower" in r.message] == [2]


def test_a_lost_gpu_refuses_to_make_a_second_stream_and_the_submission_with_it(many: Many) -> None:
    many.world.driver.fail["cuStreamCreateWithPriority"] = 719
    with pytest.raises(D.CudaError, match="EMULATED_719 "):
        many.submit()
    assert many.world.engine.statistics().lost == (GPU,)
    assert not submitting_threads()
