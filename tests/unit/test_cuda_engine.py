"""The cuda engine on an emulated driver: the same code, descriptors and threads, the bytes moved by the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.support.cuda_emulator import GPU, EmulatedDriver
from tests.support.kv_cases import Bytes, KvCase, block_tables, cases

from maru_shm.cuda import driver as D
from maru_shm.cuda.descriptors import BATCH_OP, MEMCPY3D
from maru_shm.errors import AttachRefused, EngineGone, MaruError, TransferError
from maru_shm.geometry import CUDA_IPC_HANDLE, CUDA_VMM_HANDLE, Direction, KvLayout, KvPlane, KvRegion, RegionKind
from maru_sidecar.transfer import cuda_device
from maru_sidecar.transfer.base import Peer, PoolMapping
from maru_sidecar.transfer.cuda import CudaCopy, CudaTarget, CudaTransfer
from maru_sidecar.transfer.cuda_pinning import PinState

REGION = 1 << 20


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A process that stands for the engine; its memory is the emulator's."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    yield Peer(child.pid, pidfd)
    child.kill()
    child.wait()
    os.close(pidfd)


class World:
    """A pool, an emulated driver and a transfer engine."""

    def __init__(self, batch: int = 2, *, pin: bool = True) -> None:
        self.rng = np.random.default_rng(11)
        self.pool = self.rng.integers(0, 256, 8 * REGION, np.uint8)
        self.driver = EmulatedDriver(self.pool, batch=batch)
        mapping = PoolMapping(self.pool.ctypes.data, self.pool.nbytes, -1)
        self.engine = CudaTransfer(mapping, REGION, pin=pin, driver=self.driver)

    def cache(self, case: KvCase) -> tuple[KvLayout, list[Bytes]]:
        regions, memory = [], []
        for size in case.allocations:
            handle, allocation = self.driver.allocate(size + 512, self.rng.integers(0, 256, size + 512, np.uint8))
            memory.append(allocation[512:])
            regions.append(KvRegion(RegionKind.CUDA_IPC, 1 << 40, size, CUDA_IPC_HANDLE.pack(handle, 512), GPU))
        return case.layout(regions), memory

    def one(self, peer: Peer) -> tuple[KvLayout, list[Bytes]]:
        return self.cache(SMALL)


SMALL = cases()[0]
OFFSETS = np.array([REGION, 3 * REGION, 2 * REGION], np.uint64)
TABLE = np.array([[5, 9, 1], [2, 3, 4], [40, 30, 20]], np.int32)


@pytest.fixture
def world() -> Iterator[World]:
    w = World()
    yield w
    w.driver.hold.set()
    w.engine.close()


@pytest.mark.parametrize("batch", [0, 1, 2], ids=["cuda-12.0", "cuda-12.8", "cuda-13"])
@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_chunks_arrive_byte_for_byte_in_both_directions(case: KvCase, batch: int, peer: Peer) -> None:
    w = World(batch)
    layout, memory = w.cache(case)
    target = w.engine.attach(layout, peer)
    offsets = np.array([REGION, 4 * REGION, 2 * REGION, 5 * REGION], np.uint64)
    for table in block_tables(w.rng, case.num_blocks, 4, 5).values():
        wanted = [m.copy() for m in memory]
        size = 5 * case.block_bytes
        for offset, blocks in zip(offsets, table, strict=True):
            case.scatter(wanted, blocks, w.pool[int(offset) : int(offset) + size])
        target.submit(Direction.LOAD, offsets, table).wait()
        for got, want in zip(memory, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
        back = w.pool.copy()
        w.pool[REGION:] = w.rng.integers(0, 256, 7 * REGION, np.uint8)
        target.submit(Direction.STORE, offsets, table).wait()
        for offset, blocks in zip(offsets, table, strict=True):
            keep = case.kept(blocks)
            at = int(offset)
            np.testing.assert_array_equal(w.pool[at : at + size][keep], back[at : at + size][keep])
    w.engine.close()


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_no_copy_reaches_from_one_page_locked_piece_into_the_next(
    case: KvCase, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maru_sidecar.transfer.cuda_pinning.PIECE_BYTES", REGION)  # the driver refuses a copy that does
    w = World()
    layout, memory = w.cache(case)
    target = w.engine.attach(layout, peer)
    assert w.engine.pinning.join(10) is PinState.PINNED
    size = 4 * case.block_bytes
    falling = np.arange(11, -1, -1, dtype=np.int32).reshape(3, 4)
    for offsets in (np.array([3, 2, 1]) * REGION, np.array([2 * REGION, 2 * REGION - size, 2 * REGION - 2 * size])):
        wanted = [m.copy() for m in memory]
        for offset, blocks in zip(offsets, falling, strict=True):
            case.scatter(wanted, blocks, w.pool[int(offset) : int(offset) + size])
        target.submit(Direction.LOAD, offsets.astype(np.uint64), falling).wait()
        for got, want in zip(memory, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    w.engine.close()


def test_a_request_is_one_driver_call(world: World, peer: Peer) -> None:
    layout, _ = world.one(peer)
    scattered = TABLE[:, ::-1].copy()  # no neighbours that would be flat rows, in a call of their own
    scattered[1] = [7, 30, 2]
    copy = world.engine.attach(layout, peer).submit(Direction.LOAD, OFFSETS, scattered)
    copy.wait()
    assert len(world.driver.batches) == 1
    assert copy.nbytes == TABLE.size * layout.block_bytes
    statistics = world.engine.statistics()
    assert (statistics.calls, statistics.copies, statistics.nbytes) == (1, copy.operations, copy.nbytes)


def test_a_copy_is_in_flight_until_its_event_and_a_close_waits_for_it(world: World, peer: Peer) -> None:
    layout, _ = world.one(peer)
    target = world.engine.attach(layout, peer)
    world.driver.hold.clear()
    copy = target.submit(Direction.LOAD, OFFSETS, TABLE)
    assert not copy.done()
    closing = threading.Thread(target=target.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    assert sum(world.driver.opened.values()) == 1
    world.driver.hold.set()
    closing.join(10)
    assert copy.done()
    assert sum(world.driver.opened.values()) == 0
    with pytest.raises(TransferError, match="detached"):
        target.submit(Direction.LOAD, OFFSETS, TABLE)


def test_layers_in_allocations_of_their_own_go_as_single_rows_in_calls_of_256(world: World, peer: Peer) -> None:
    """A longer batch costs the driver four times as much a row (H200)."""
    layered = next(c for c in cases() if c.name == "one-allocation-per-layer")
    layout, _ = world.cache(layered)
    copy = world.engine.attach(layout, peer).submit(Direction.STORE, OFFSETS, TABLE[:, ::-1])
    copy.wait()
    assert (world.driver.batches, world.driver.flat_batches) == ([], [copy.operations])
    assert copy.operations == TABLE.size * len(layered.planes)
    many = np.tile(TABLE[:, ::-1], (1, 20))
    copy = world.engine.attach(layout, peer).submit(Direction.STORE, OFFSETS, many)
    assert sum(world.driver.flat_batches[1:]) == copy.operations == many.size * len(layered.planes) > 512
    assert max(world.driver.flat_batches) == 256


def test_events_are_reused_and_none_is_made_per_copy(world: World, peer: Peer) -> None:
    layout, _ = world.one(peer)
    target = world.engine.attach(layout, peer)
    before = len(world.driver.events)
    for _ in range(200):
        target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
    assert len(world.driver.events) == before


def test_nothing_of_cuda_happens_before_the_first_attach_and_all_of_it_goes_after_the_last(world: World, peer: Peer) -> None:
    assert (world.driver.contexts, world.driver.streams) == (0, {})
    layout, _ = world.one(peer)
    first, second = world.engine.attach(layout, peer), world.engine.attach(layout, peer)
    assert world.driver.contexts == 1
    assert world.engine.pinning.join(10) is PinState.PINNED
    assert sum(world.driver.registered.values()) == world.pool.nbytes
    first.close()
    assert sum(world.driver.opened.values()) == 1  # the second still maps it
    assert world.driver.contexts == 1
    second.close()
    world.engine.close()
    assert (world.driver.contexts, world.driver.streams, world.driver.registered) == (0, {}, {})
    assert sum(world.driver.opened.values()) == 0


def test_an_engine_may_attach_again_after_everything_was_released(world: World, peer: Peer) -> None:
    layout, _ = world.one(peer)
    for _ in range(3):
        target = world.engine.attach(layout, peer)
        target.submit(Direction.STORE, OFFSETS, TABLE).wait()
        target.close()


def test_the_pool_is_registered_in_whole_regions(peer: Peer) -> None:
    pool = np.zeros(5 * REGION, np.uint8)
    driver = EmulatedDriver(pool)
    engine = CudaTransfer(PoolMapping(pool.ctypes.data, (5 << 30) + REGION, -1), 3 << 29, driver=driver)
    handle, _ = driver.allocate(1 << 20)
    region = KvRegion(RegionKind.CUDA_IPC, 1 << 40, 1 << 20, CUDA_IPC_HANDLE.pack(handle, 0), GPU)
    engine.attach(KvLayout(1, 16, (KvPlane(0, 0, 4096, 4096),), (region,), "x"), peer)
    engine.pinning.join(10)
    assert list(driver.registered.values()) == [3 << 29, 3 << 29, 3 << 29, (1 << 29) + REGION]
    engine.close()


def test_a_pool_that_may_not_be_pinned_is_said_once_and_copied_all_the_same(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    w = World()
    w.driver.fail["cuMemHostRegister"] = 800
    layout, _ = w.one(peer)
    for _ in range(2):
        target = w.engine.attach(layout, peer)
        assert w.engine.pinning.join(10) is PinState.REFUSED
        target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
        assert "EMULATED_800" in w.engine.statistics().pin_refusal
        target.close()
        w.engine._reap_locked()
    w.engine.close()
    assert [r.message for r in caplog.records if "pinned up to" in r.message and "pageable" in r.message] == [
        r.message for r in caplog.records
    ]
    assert len(caplog.records) == 1


def test_a_dead_engine_is_noticed_at_submit_and_at_wait(world: World, peer: Peer) -> None:
    layout, _ = world.one(peer)
    target = world.engine.attach(layout, peer)
    world.driver.hold.clear()
    copy = target.submit(Direction.STORE, OFFSETS, TABLE)
    os.kill(peer.pid, 9)
    os.waitid(os.P_PIDFD, peer.pidfd, os.WEXITED | os.WNOWAIT)
    world.driver.hold.set()
    with pytest.raises(EngineGone):
        copy.wait()
    with pytest.raises(EngineGone):
        target.submit(Direction.STORE, OFFSETS, TABLE)
    target.close()
    assert sum(world.driver.opened.values()) == 0


def test_a_refused_submission_leaves_nothing_in_flight(peer: Peer) -> None:
    w = World()
    layout, _ = w.one(peer)
    target = w.engine.attach(layout, peer)
    w.driver.fail["cuEventRecord"] = D.INVALID_VALUE  # after the copies were accepted
    with pytest.raises(D.CudaError, match="EMULATED_1"):
        target.submit(Direction.LOAD, OFFSETS, TABLE)
    assert all(not s.pending for s in w.driver.streams.values())
    w.driver.fail.clear()
    target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
    w.engine.close()


def test_after_a_sticky_error_copies_fail_and_the_device_is_made_anew_once_its_engines_have_left(peer: Peer) -> None:
    w = World()
    layout, _ = w.one(peer)
    target = w.engine.attach(layout, peer)
    w.driver.fail["cuEventSynchronize"] = 700
    with pytest.raises(D.CudaError, match="EMULATED_700"):
        target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
    assert w.engine.statistics().lost == (GPU,)
    with pytest.raises(TransferError, match="lost"):
        target.submit(Direction.LOAD, OFFSETS, TABLE)
    with pytest.raises(AttachRefused, match="still attached"):
        w.engine.attach(layout, peer)
    target.close()
    again = w.engine.attach(layout, peer)
    assert w.driver.resets == 1
    again.submit(Direction.LOAD, OFFSETS, TABLE).wait()
    w.engine.close()
    assert w.driver.contexts == 0


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


def region(kind: RegionKind = RegionKind.CUDA_IPC, size: int = 4096, handle: bytes = b"", device: str = GPU) -> KvRegion:
    return KvRegion(kind, 1 << 40, size, handle, device)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (region(handle=CUDA_IPC_HANDLE.pack(b"\xff" * 64, 0)), "cannot be imported.*namespaces"),
        (region(handle=bytes(64)), "handle of 64 bytes"),
        (region(handle=b"", device="GPU-elsewhere"), "GPU-elsewhere is not visible here"),
        (region(device=""), "named by its UUID"),
        (region(RegionKind.PROCESS_VM), "not CUDA memory"),
        (region(RegionKind.CUDA_VMM, handle=CUDA_VMM_HANDLE.pack(0, 4096)), "without a file descriptor"),
    ],
    ids=["unknown handle", "short handle", "absent gpu", "no gpu named", "host memory", "no descriptor"],
)
def test_what_cannot_be_imported_is_refused_by_name(world: World, peer: Peer, wrong: KvRegion, says: str) -> None:
    layout = KvLayout(1, 16, (KvPlane(0, 0, 4096, 4096),), (wrong,), "x")
    with pytest.raises(AttachRefused, match=says):
        world.engine.attach(layout, peer)
    world.engine.close()
    assert world.driver.contexts == 0


def test_a_region_larger_than_its_allocation_is_refused_and_unmapped(world: World, peer: Peer) -> None:
    handle, _ = world.driver.allocate(8192)
    wrong = region(size=8192, handle=CUDA_IPC_HANDLE.pack(handle, 4096))
    with pytest.raises(AttachRefused, match="of an allocation of 8192"):
        world.engine.attach(KvLayout(1, 16, (KvPlane(0, 0, 8192, 8192),), (wrong,), "x"), peer)
    assert sum(world.driver.opened.values()) == 0


def test_a_vmm_allocation_is_mapped_from_its_descriptor_and_unmapped_at_close(world: World, peer: Peer) -> None:
    vmm = region(RegionKind.CUDA_VMM, size=4096, handle=CUDA_VMM_HANDLE.pack(4096, 1 << 16))
    layout = KvLayout(1, 16, (KvPlane(0, 0, 4096, 4096),), (vmm,), "x")
    target = world.engine.attach(layout, peer, [7])
    target.submit(Direction.LOAD, np.array([REGION], np.uint64), np.zeros((1, 1), np.int32)).wait()
    (mapped,) = (a for a, n in world.driver.opened.items() if n)
    np.testing.assert_array_equal(world.driver.allocations[mapped][4096:8192], world.pool[REGION : REGION + 4096])
    target.close()
    assert sum(world.driver.opened.values()) == 0


def test_without_a_driver_the_attach_is_refused_naming_it(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_sidecar.transfer.cuda.CudaDriver", lambda: D.CudaDriver("libcuda-absent.so.1"))
    engine = CudaTransfer(PoolMapping(1 << 20, 1 << 20, -1))
    layout = KvLayout(1, 16, (KvPlane(0, 0, 4096, 4096),), (region(handle=CUDA_IPC_HANDLE.pack(bytes(64), 0)),), "x")
    with pytest.raises(AttachRefused, match=r"libcuda-absent\.so\.1 cannot be loaded.*NVIDIA driver"):
        engine.attach(layout, peer)
    engine.close()


def test_descriptors_have_the_driver_s_layout() -> None:
    operand = BATCH_OP.fields["dst"][0].fields
    assert BATCH_OP.itemsize == 112
    assert {k: operand[k][1] for k in ("type", "ptr", "row", "layer", "location")} == {
        "type": 0, "ptr": 8, "row": 16, "layer": 24, "location": 32,
    }  # fmt: skip
    assert {k: BATCH_OP.fields[k][1] for k in ("src", "dst", "width", "order", "flags")} == {
        "src": 0, "dst": 40, "width": 80, "order": 104, "flags": 108,
    }  # fmt: skip
    side = MEMCPY3D.fields["dst"][0].fields
    assert MEMCPY3D.itemsize == 200
    assert MEMCPY3D.fields["dst"][1] == 88
    assert {k: side[k][1] for k in ("type", "host", "device", "pitch", "layer")} == {
        "type": 32, "host": 40, "device": 48, "pitch": 72, "layer": 80,
    }  # fmt: skip


def test_every_error_of_the_engine_is_a_named_one() -> None:
    assert issubclass(D.CudaError, TransferError)
    assert issubclass(D.CudaError, MaruError)
