"""What every transfer engine must do (``maru_sidecar/transfer/base.py``), on real memory of another process."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.support.kv_cases import KvCase, block_tables, cases
from tests.support.kv_process import random_bytes
from tests.transfer.conftest import REGION, Rig

from maru_shm.errors import AttachRefused, EngineGone
from maru_shm.geometry import Direction, KvLayout, KvPlane, KvRegion, RegionKind, Share
from maru_shm.layout import SKIP_BLOCK
from maru_sidecar.transfer.base import Peer

CHUNKS, PER_CHUNK = 6, 4
USED = 9 * REGION
ALL = cases()


def slab_offsets(case: KvCase, rng: np.random.Generator) -> np.ndarray:
    """Places over several regions in no order, none across a region's end."""
    size = PER_CHUNK * case.block_bytes
    places = [r * REGION + 8192 + i * size for r in range(8) for i in range(min(2, (REGION - 8192) // size))]
    return np.array(places, np.uint64)[rng.permutation(len(places))[:CHUNKS]]


def _two_planes(num_blocks: int, piece: int) -> KvCase:
    planes = tuple(KvPlane(0, i * num_blocks * piece, piece, piece, i) for i in range(2))
    return KvCase("two-planes", num_blocks, (2 * num_blocks * piece,), planes)


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_a_load_writes_the_named_blocks_and_no_other_byte(rig: Rig, case: KvCase) -> None:
    target = rig.attach(case)
    rng = np.random.default_rng(5)
    size = PER_CHUNK * case.block_bytes
    for seed, table in enumerate(block_tables(rng, case.num_blocks, CHUNKS, PER_CHUNK).values()):
        offsets = slab_offsets(case, rng)
        rig.pool.bytes[:USED] = random_bytes(100 + seed, USED)
        wanted = rig.process.fill(200 + seed)
        for offset, blocks in zip(offsets, table, strict=True):
            case.scatter(wanted, blocks, rig.pool.bytes[int(offset) : int(offset) + size])
        copy = target.submit(Direction.LOAD, offsets, table)
        copy.wait()
        assert copy.done()
        assert copy.nbytes == int((table != SKIP_BLOCK).sum()) * case.block_bytes
        for got, want in zip(rig.process.read(), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    target.close()


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_the_parts_of_a_span_are_together_the_whole(rig: Rig, case: KvCase, parts: int) -> None:
    target = rig.attach(case)
    rng = np.random.default_rng(8)
    size = PER_CHUNK * case.block_bytes
    table, offsets = block_tables(rng, case.num_blocks, CHUNKS, PER_CHUNK)["skipping"], slab_offsets(case, rng)
    rig.pool.bytes[:USED] = random_bytes(500, USED)
    wanted = rig.process.fill(600)
    for offset, blocks in zip(offsets, table, strict=True):
        case.scatter(wanted, blocks, rig.pool.bytes[int(offset) : int(offset) + size])
    copies = [target.submit(Direction.LOAD, offsets, table, Share(i, parts)) for i in range(parts)]
    for copy in copies:
        copy.wait()
    assert sum(copy.nbytes for copy in copies) == int((table != SKIP_BLOCK).sum()) * case.block_bytes
    for got, want in zip(rig.process.read(), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    target.close()


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_a_store_writes_the_named_slabs_and_no_other_byte(rig: Rig, case: KvCase) -> None:
    target = rig.attach(case)
    rng = np.random.default_rng(6)
    size = PER_CHUNK * case.block_bytes
    for seed, table in enumerate(block_tables(rng, case.num_blocks, CHUNKS, PER_CHUNK).values()):
        offsets = slab_offsets(case, rng)
        memory = rig.process.fill(300 + seed)
        rig.pool.bytes[:USED] = random_bytes(400 + seed, USED)
        wanted = rig.pool.bytes[:USED].copy()
        for offset, blocks in zip(offsets, table, strict=True):
            keep = case.kept(blocks)
            wanted[int(offset) : int(offset) + size][keep] = case.slab(memory, blocks)[keep]
        target.submit(Direction.STORE, offsets, table).wait()
        np.testing.assert_array_equal(rig.pool.bytes[:USED], wanted)
    target.close()


def test_copies_in_both_directions_at_once_do_not_mix(rig: Rig) -> None:
    case = _two_planes(1024, 16384)
    target = rig.attach(case)
    memory = rig.process.fill(1)
    rig.pool.bytes[:] = random_bytes(2, rig.pool.bytes.nbytes)
    loads = np.arange(512, dtype=np.int32).reshape(8, 64)
    stores = np.arange(512, 1024, dtype=np.int32).reshape(8, 64)
    size = 64 * case.block_bytes
    load_at = np.arange(8, dtype=np.uint64) * np.uint64(size)
    store_at = load_at + np.uint64(8 * size)
    wanted = [m.copy() for m in memory]
    for offset, blocks in zip(load_at, loads, strict=True):
        case.scatter(wanted, blocks, rig.pool.bytes[int(offset) : int(offset) + size])
    slabs = [case.slab(memory, blocks) for blocks in stores]
    copies = [
        target.submit(direction, at[i : i + 2], table[i : i + 2])
        for i in range(0, 8, 2)
        for direction, at, table in ((Direction.LOAD, load_at, loads), (Direction.STORE, store_at, stores))
    ]
    for copy in reversed(copies):  # waited for in another order than they were submitted
        copy.wait()
    for offset, slab in zip(store_at, slabs, strict=True):
        np.testing.assert_array_equal(rig.pool.bytes[int(offset) : int(offset) + size], slab)
    for got, want in zip(rig.process.read(), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    target.close()


def test_close_waits_for_copies_in_flight_and_may_be_repeated(rig: Rig) -> None:
    case = _two_planes(1024, 16384)
    target = rig.attach(case)
    copy = target.submit(Direction.STORE, np.array([0], np.uint64), np.arange(1024, dtype=np.int32).reshape(1, 1024))
    closer = threading.Thread(target=target.close)
    closer.start()
    copy.wait()
    closer.join(30)
    assert not closer.is_alive()
    target.close()
    assert copy.done()


def test_a_dead_peer_ends_copies_with_engine_gone(mortal_rig: Rig) -> None:
    case = ALL[0]
    target = mortal_rig.attach(case)
    mortal_rig.process.kill()
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    for direction in Direction:
        with pytest.raises(EngineGone):
            target.submit(direction, np.array([0, 1 << 20], np.uint64), table).wait()
    target.close()


def test_a_peer_killed_during_copies_ends_them_and_the_engine_goes_on(mortal_rig: Rig) -> None:
    case = _two_planes(1024, 16384)
    target = mortal_rig.attach(case)
    table = np.arange(1024, dtype=np.int32).reshape(1, 1024)
    killer = threading.Timer(0.02, mortal_rig.process.kill)
    killer.start()

    def copy_until_it_fails() -> None:
        while True:
            target.submit(Direction.STORE, np.array([0], np.uint64), table).wait()

    with pytest.raises(EngineGone):
        copy_until_it_fails()
    killer.join()
    target.close()


def test_memory_that_cannot_be_reached_is_refused_at_attach(rig: Rig) -> None:
    case = ALL[0]
    (region,) = rig.process.allocate(*case.allocations)
    kind = region.kind
    handle = b"\xff" * len(region.handle)
    bogus = KvRegion(kind, 4096, region.size, handle, region.device)
    layout = KvLayout(case.num_blocks, 16, case.planes, (bogus,), "bogus")
    with pytest.raises(AttachRefused):
        rig.engine.attach(layout, rig.process.peer, ())


def test_a_region_of_another_kind_is_refused_by_name(rig: Rig) -> None:
    case = ALL[0]
    (region,) = rig.process.allocate(*case.allocations)
    other = RegionKind.CUDA_IPC if region.kind is RegionKind.PROCESS_VM else RegionKind.PROCESS_VM
    layout = KvLayout(case.num_blocks, 16, case.planes, (KvRegion(other, region.address, region.size),), "other")
    with pytest.raises(AttachRefused, match=other.value):
        rig.engine.attach(layout, Peer(rig.process.peer.pid, rig.process.peer.pidfd), ())
