"""A node that was cut off or stopped while its region went to another: what it still says, reads and writes of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.cuda_world import OFFSETS, TABLE, CudaWorld, stand_in
from tests.support.pool_cases import KEY, NAMESPACE, ROOT, chain, key, temporary_pool
from tests.support.switched_lease import SwitchedLease, granted

from maru_connector.pool_view import PoolView
from maru_shm import poolformat as F
from maru_shm.errors import RegionNotHeld
from maru_shm.geometry import Direction
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.slab_handles import Reservation
from maru_sidecar.slab_reader import SlabReader

NBYTES, REGION = 8192, 1 << 20


@pytest.fixture
def pool() -> Iterator[PoolFile]:
    with temporary_pool(regions=2) as pool:
        yield pool


def reserve(directory: Directory, of: bytes, *, rank: int = 0, world: int = 1, namespace: bytes = NAMESPACE) -> Reservation:
    got = directory.reserve(namespace, of, parent=ROOT, rank=rank, world=world, depth=0, tokens=64, nbytes=NBYTES)
    assert isinstance(got, Reservation)
    return got


def store(directory: Directory, keys: bytes, *, world: int = 1) -> None:
    for i in range(0, len(keys), KEY):
        for rank in range(world):
            reserve(directory, keys[i : i + KEY], rank=rank, world=world).commit(None)


def located(directory: Directory, keys: bytes, *, world: int = 1, nbytes: int = NBYTES) -> tuple[int, list[list[int]]]:
    """Chunks hit, and where their slabs lie."""
    lease, refs = directory.lease_located(NAMESPACE, keys, world=world, nbytes=nbytes, ttl_s=60, owner="me")
    assert refs.shape == ((lease.n if lease is not None else 0) * world, 2)
    return (lease.n if lease is not None else 0), refs.tolist()


# --- what it says -------------------------------------------------------------------------------------------------------------
def test_a_lease_says_where_every_ranks_slabs_are(pool: PoolFile) -> None:
    directory, keys = Directory(pool), chain("a", 3)
    store(directory, keys, world=2)
    n, refs = located(directory, keys + key("absent"), world=2)
    acquired = [directory.acquire(NAMESPACE, keys, rank=rank).refs for rank in range(2)]
    assert n == 3
    assert refs == [[ref.offset, ref.state_word] for pair in zip(*acquired, strict=True) for ref in pair]
    assert located(directory, b"") == (0, [])


@pytest.mark.parametrize("ends", [True, False], ids=["its-lease-is-over", "its-clock-is-wrong"])
def test_another_nodes_chunks_are_not_located_as_ones_own(pool: PoolFile, *, ends: bool) -> None:
    lease = SwitchedLease()
    stopped = granted(pool, lease, [1])
    store(stopped, chain("mine", 3))
    lease.held = not ends
    store(granted(pool, SwitchedLease(), [1]), chain("theirs", 3))
    before = bytes(pool.bytes)
    assert located(stopped, chain("mine", 3)) == (0, [])
    assert stopped.lookup(NAMESPACE, chain("mine", 1), world=1) == 0, "what is not there is not asked for again"
    if ends:
        assert bytes(pool.bytes) == before


@pytest.mark.parametrize("field", ["namespace", "key", "rank", "data_bytes", "magic", "format", "crc", "flags", "state"])
def test_a_hit_ends_before_the_first_slab_that_is_not_the_chunks(pool: PoolFile, field: str) -> None:
    directory, keys = Directory(pool), chain("a", 3)
    for i in range(3):
        for rank in range(2):
            reserve(directory, keys[i * KEY : (i + 1) * KEY], rank=rank, world=2).commit(7)
    with directory.acquire(NAMESPACE, keys, rank=1) as acquired:
        at = acquired.refs[1].header
    header = np.frombuffer(pool.bytes, F.SLAB_HEADER, 1, at)
    raw = header[field].view(np.uint8).copy()
    raw[0] ^= 1
    header[field] = raw.view(header[field].dtype)
    if field not in ("magic", "format", "crc", "state"):
        header["crc"] = zlib.crc32(header.tobytes()[F.SLAB_CRC_FROM : F.SLAB_CRC_TO])
    n, refs = located(directory, keys, world=2)
    assert (n, len(refs)) == (1, 2)
    assert located(directory, keys[KEY:], world=2) == (0, []), "the chunk is dropped"


def test_slabs_of_another_length_or_in_a_damaged_region_are_not_located(pool: PoolFile) -> None:
    directory = Directory(pool)
    store(directory, chain("a", 2))
    assert located(directory, chain("a", 2), nbytes=NBYTES // 2) == (0, [])
    store(directory, chain("b", 2))
    pool.bytes[REGION + 20] ^= 1
    assert located(directory, chain("b", 2)) == (0, [])
    assert located(directory, chain("b", 2)[KEY:])[0] == 1, "the header was mended when the first was dropped"


def test_no_slab_is_located_in_a_region_that_may_not_be_written_now(pool: PoolFile) -> None:
    lease = SwitchedLease()
    directory, keys = granted(pool, lease, [1]), chain("a", 3)
    store(directory, keys)
    assert all(offset for offset, _ in located(directory, keys)[1])
    lease.held = False
    assert located(directory, keys) == (3, [[0, 0]] * 3)


# --- what an engine reads of it -----------------------------------------------------------------------------------------------
def test_an_engine_reads_no_slab_that_names_another_chunk(pool: PoolFile) -> None:
    directory, keys = Directory(pool), chain("a", 2)
    for i in range(2):
        reservation = reserve(directory, keys[i * KEY : (i + 1) * KEY])
        pool.bytes[reservation.offset : reservation.offset + NBYTES] = bytes([i]) * NBYTES
        reservation.commit(None)
    _, slabs = directory.lease_located(NAMESPACE, keys, world=1, nbytes=NBYTES, ttl_s=60, owner="me")
    fd = os.open(pool.spec.file_path, os.O_RDONLY)
    view = PoolView(fd, pool.size)
    os.close(fd)
    try:
        assert view.holds(slabs, NBYTES)
        assert view.names(slabs, NBYTES, namespace=NAMESPACE, keys=keys, rank=0)
        swapped = slabs[::-1].copy()
        assert view.holds(swapped, NBYTES), "places alone do not tell"
        assert not view.names(swapped, NBYTES, namespace=NAMESPACE, keys=keys, rank=0)
        assert not view.names(slabs, NBYTES, namespace=b"m" * 16, keys=keys, rank=0)
        assert not view.names(slabs, NBYTES, namespace=NAMESPACE, keys=keys, rank=1)
        assert not view.names(slabs, NBYTES - 1, namespace=NAMESPACE, keys=keys, rank=0)
        beside = slabs + np.array([4096, 0], np.uint64)
        assert not view.names(beside, NBYTES, namespace=NAMESPACE, keys=keys, rank=0)
        pool.bytes[REGION + F.HEADER_BYTES : 2 * REGION] = bytes(REGION - F.HEADER_BYTES)
        assert not view.names(slabs, NBYTES, namespace=NAMESPACE, keys=keys, rank=0)
    finally:
        view.close()


# --- what it writes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ends", [True, False], ids=["its-lease-is-over", "its-clock-is-wrong"])
def test_a_slab_that_another_node_writes_by_now_is_neither_published_nor_freed(pool: PoolFile, *, ends: bool) -> None:
    lease = SwitchedLease()
    stopped = granted(pool, lease, [1])
    committed, aborted = reserve(stopped, key("a")), reserve(stopped, key("b"))
    lease.held = not ends
    other = granted(pool, SwitchedLease(), [1])
    theirs = [reserve(other, key("c")), reserve(other, key("d"))]
    assert [r.offset for r in theirs] == [committed.offset, aborted.offset]
    before = bytes(pool.bytes)
    with pytest.raises(RegionNotHeld):
        committed.commit(None)
    aborted.abort()
    assert bytes(pool.bytes) == before
    assert stopped.admin.stats()["slabs_writing"] == 0
    for reservation in theirs:
        reservation.commit(None)
    assert other.lookup(NAMESPACE, key("c"), world=1) == 1
    assert other.lookup(NAMESPACE, key("d"), world=1) == 1


def test_a_slabs_write_does_not_begin_after_the_lease(pool: PoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = SwitchedLease()
    directory = granted(pool, lease, [1])
    store(directory, key("a"))
    before = bytes(pool.bytes)
    room = directory._room
    take = room.take

    def stopped(*args: object, **kwargs: object) -> int:
        slab: int = take(*args, **kwargs)  # type: ignore[arg-type]
        lease.held = False
        return slab

    monkeypatch.setattr(room, "take", stopped)
    with pytest.raises(RegionNotHeld):
        reserve(directory, key("b"))
    assert bytes(pool.bytes) == before
    monkeypatch.undo()
    lease.held = True
    store(directory, key("b"))
    stats = directory.admin.stats()
    assert (stats["slabs_writing"], stats["slabs_committed"]) == (0, 2)


def test_a_layout_that_the_lease_did_not_last_for_is_made_again(pool: PoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = SwitchedLease()
    directory = granted(pool, lease, [1])

    def stop(name: str) -> None:
        lease.held = lease.held and name != "region.after_headers"

    monkeypatch.setattr("maru_shm.failpoints.hit", stop)
    with pytest.raises(RegionNotHeld):
        reserve(directory, key("a"))
    assert not any(pool.bytes[REGION : REGION + F.REGION_HEADER.size]), "no header after the lease"
    monkeypatch.undo()
    lease.held = True
    reserve(directory, key("a")).commit(None)
    [(_, _, _, number, generation)] = directory.shared.committed_in(1)
    assert SlabReader(pool).locate(1, number, generation, F.slab_stride(NBYTES)) is not None


def test_the_guard_of_ones_own_pool_costs_nothing_and_of_a_shared_one_names_the_region(pool: PoolFile) -> None:
    own = Directory(pool)
    assert own.guard([reserve(own, key("a"))]) is None
    lease = SwitchedLease()
    shared = granted(pool, lease, [2])
    may_go_on = shared.guard([reserve(shared, key("a"))])
    assert may_go_on is not None
    may_go_on()
    lease.revoked = True
    with pytest.raises(RegionNotHeld):
        may_go_on()


def test_nothing_is_submitted_to_a_gpu_once_the_right_to_write_is_lost() -> None:
    def refuse() -> None:
        raise RegionNotHeld("the lease is over", "")

    world = CudaWorld()
    with stand_in() as peer:
        layout, _ = world.one()
        target = world.engine.attach(layout, peer)
        before = world.pool.copy()
        with pytest.raises(RegionNotHeld):
            target.submit(Direction.STORE, OFFSETS, TABLE, may_go_on=refuse)
        world.driver.hold.set()
        target.submit(Direction.LOAD, OFFSETS, TABLE).wait()
        np.testing.assert_array_equal(world.pool, before)
        target.submit(Direction.STORE, OFFSETS, TABLE, may_go_on=lambda: None).wait()
        world.engine.close()
