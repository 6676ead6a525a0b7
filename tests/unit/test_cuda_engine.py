"""The cuda engine on an emulated driver: the same code, descriptors and threads, the bytes moved by the CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.cuda_emulator import GPU, EmulatedDriver
from tests.support.cuda_world import OFFSETS, REGION, TABLE, stand_in
from tests.support.cuda_world import CudaWorld as World
from tests.support.kv_cases import KvCase, block_tables, cases

from maru_shm.cuda import driver as D
from maru_shm.cuda.descriptors import BATCH_OP, MEMCPY3D
from maru_shm.errors import AttachRefused, EngineGone, MaruError, TransferError
from maru_shm.geometry import CUDA_IPC_HANDLE, CUDA_VMM_HANDLE, Direction, KvLayout, KvPlane, KvRegion, RegionKind
from maru_sidecar.transfer.base import Peer, PoolMapping
from maru_sidecar.transfer.cuda import CudaTransfer
from maru_sidecar.transfer.cuda_pinning import PinState


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
    layout, _ = world.one()
    scattered = TABLE[:, ::-1].copy()  # no neighbours that would be flat rows, in a call of their own
    scattered[1] = [7, 30, 2]
    copy = world.engine.attach(layout, peer).submit(Direction.LOAD, OFFSETS, scattered)
    copy.wait()
    assert len(world.driver.batches) == 1
    assert copy.nbytes == TABLE.size * layout.block_bytes
    statistics = world.engine.statistics()
    assert (statistics.calls, statistics.copies, statistics.nbytes) == (1, copy.operations, copy.nbytes)


def test_a_copy_is_in_flight_until_its_event_and_a_close_waits_for_it(world: World, peer: Peer) -> None:
    layout, _ = world.one()
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
    layout, _ = world.one()
    target = world.engine.attach(layout, peer)
    before = len(world.driver.events)
    for _ in range(200):
        target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
    assert len(world.driver.events) == before


def test_nothing_of_cuda_happens_before_the_first_attach_and_all_of_it_goes_after_the_last(world: World, peer: Peer) -> None:
    assert (world.driver.contexts, world.driver.streams) == (0, {})
    layout, _ = world.one()
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
    layout, _ = world.one()
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
    layout, _ = w.one()
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
    layout, _ = world.one()
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
    layout, _ = w.one()
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
    layout, _ = w.one()
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


@pytest.mark.parametrize("call", ["cuEventDestroy_v2", "cuStreamDestroy_v2"])
def test_what_is_refused_at_the_end_does_not_keep_the_context(world: World, peer: Peer, call: str) -> None:
    target = world.engine.attach(world.one()[0], peer)
    world.driver.fail[call] = D.INVALID_VALUE
    target.close()
    world.engine.close()
    assert (world.driver.contexts, world.driver.current_context) == (0, 0)


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
