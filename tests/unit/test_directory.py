"""The directory: hits, leases, pins, stores, and what a restart brings back."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

import pytest
from tests.support.pool_cases import (
    KEY,
    NAMESPACE,
    NBYTES,
    ROOT,
    MiB,
    chain,
    check_contents,
    contents,
    key,
    reopen,
    reserve,
    store,
    temporary_pool,
)

from maru_shm import poolformat as F
from maru_shm.errors import PoolError, PoolFull
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.recovery import RebuildReport
from maru_sidecar.slab_handles import Presence, Reservation
from maru_sidecar.slab_header import encode


@pytest.fixture
def pool() -> Iterator[PoolFile]:
    with temporary_pool(regions=4) as pool:
        yield pool


@pytest.fixture
def directory(pool: PoolFile) -> Directory:
    directory = Directory(pool)
    directory.rebuild()
    return directory


def lookup(directory: Directory, keys: bytes, world: int = 1) -> int:
    return directory.lookup(NAMESPACE, keys, world=world)


def slabs_on_mapping(pool: PoolFile) -> dict[F.SlabState, int]:
    """Slab states as another process would read them from the pool file."""
    counts = dict.fromkeys(F.SlabState, 0)
    for start in range(pool.region_bytes, pool.size, pool.region_bytes):
        magic, _, _, _, _, n, _ = F.REGION_HEADER.unpack_from(pool.bytes, start)
        if magic == F.REGION_MAGIC:
            for i in range(n):
                counts[F.SlabState(pool.bytes[start + F.HEADER_BYTES + i * F.SLAB_HEADER_BYTES])] += 1
    return counts


# --- hits ---
def test_a_stored_prefix_is_hit_up_to_its_first_gap(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 5)
    assert lookup(directory, keys) == 0
    store(pool, directory, keys[: 3 * KEY])
    assert lookup(directory, keys) == 3
    assert lookup(directory, keys[KEY:]) == 2
    assert lookup(directory, chain("b", 5)) == 0
    assert lookup(directory, b"") == 0
    assert check_contents(pool, directory, keys) == 3


def test_a_chunk_is_invisible_until_it_is_committed(pool: PoolFile, directory: Directory) -> None:
    r = reserve(directory, key("a"))
    assert isinstance(r, Reservation)
    assert lookup(directory, key("a")) == 0
    assert directory.acquire(NAMESPACE, key("a"), rank=0).n_found == 0
    assert slabs_on_mapping(pool)[F.SlabState.WRITING] == 1
    r.commit(None)
    assert lookup(directory, key("a")) == 1
    assert slabs_on_mapping(pool)[F.SlabState.COMMITTED] == 1


def test_a_chunk_is_hit_only_when_every_rank_has_stored_it(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 3)
    store(pool, directory, keys, rank=0, world=2)
    assert lookup(directory, keys, world=2) == 0
    store(pool, directory, keys[: 2 * KEY], rank=1, world=2)
    assert lookup(directory, keys, world=2) == 2
    assert directory.acquire(NAMESPACE, keys, rank=0).n_found == 3
    assert directory.acquire(NAMESPACE, keys, rank=1).n_found == 2
    assert directory.acquire(NAMESPACE, keys, rank=2).n_found == 0
    assert lookup(directory, keys, world=1) == 0
    assert check_contents(pool, directory, keys, rank=1) == 2


def test_namespaces_do_not_see_each_other(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 2)
    store(pool, directory, keys)
    other = b"other".ljust(16, b".")
    assert directory.lookup(other, keys, world=1) == 0
    store(pool, directory, keys, namespace=other)
    assert directory.admin.clear(other) == 2
    assert lookup(directory, keys) == 2


def test_a_namespace_has_one_world_size(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, key("a"))
    with pytest.raises(PoolError, match="1 ranks, not 2"):
        reserve(directory, key("b"), world=2)


@pytest.mark.parametrize("bad", [{"rank": 1}, {"nbytes": 0}, {"nbytes": 2 * MiB}, {"parent": b"short"}, {"namespace": b""}])
def test_impossible_chunks_are_named_errors(directory: Directory, bad: dict[str, object]) -> None:
    with pytest.raises(PoolError):
        reserve(directory, key("a"), **bad)  # type: ignore[arg-type]
    assert directory.admin.stats()["namespaces"] == {}


# --- storing ---
def test_present_and_pending_chunks_are_not_stored_twice(pool: PoolFile, directory: Directory) -> None:
    first = reserve(directory, key("a"))
    assert isinstance(first, Reservation)
    assert reserve(directory, key("a")) is Presence.PENDING
    first.commit(None)
    assert reserve(directory, key("a")) is Presence.PRESENT
    assert slabs_on_mapping(pool)[F.SlabState.WRITING] == 0


def test_an_aborted_store_leaves_nothing_and_may_be_tried_again(pool: PoolFile, directory: Directory) -> None:
    first = reserve(directory, key("a"))
    assert isinstance(first, Reservation)
    first.abort()
    first.abort()
    assert lookup(directory, key("a")) == 0
    assert directory.admin.stats()["bytes_used"] == 0
    assert slabs_on_mapping(pool)[F.SlabState.WRITING] == 0
    assert store(pool, directory, key("a")) == 1


def test_a_reservation_ends_once(directory: Directory) -> None:
    r = reserve(directory, key("a"))
    assert isinstance(r, Reservation)
    r.commit(None)
    r.abort()
    assert lookup(directory, key("a")) == 1
    with pytest.raises(PoolError, match="ended"):
        r.commit(None)


def test_a_store_that_is_declined_takes_no_slab(pool: PoolFile) -> None:
    class OnlyDeepPrefixes:
        def admit(self, namespace: bytes, key: bytes, *, depth: int, tokens: int, nbytes: int) -> bool:
            return depth >= 1 and tokens == 256 and nbytes == NBYTES and len(namespace) == len(key) == KEY

    directory = Directory(pool, admission=OnlyDeepPrefixes())
    assert reserve(directory, key("a"), depth=0) is Presence.DECLINED
    assert isinstance(reserve(directory, key("b"), depth=1), Reservation)
    assert directory.admin.stats()["declined_total"] == 1


def test_many_writers_at_once_store_each_chunk_exactly_once(pool: PoolFile, directory: Directory) -> None:
    names = [chain(f"p{i}", 2) for i in range(5)]
    stored: list[int] = []
    threads = [
        threading.Thread(target=lambda: stored.append(sum(store(pool, directory, keys) for keys in names))) for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert sum(stored) == 10
    assert all(check_contents(pool, directory, keys) == 2 for keys in names)


# --- leases and pins ---
def test_a_lease_pins_the_hit_until_it_is_released(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 4)
    store(pool, directory, keys[: 3 * KEY])
    before = time.monotonic_ns()
    lease = directory.lease(NAMESPACE, keys, world=1, ttl_s=60, owner="s")
    assert lease is not None
    assert lease.n == 3
    assert lease.deadline_ns >= before + 60 * 10**9
    assert directory.admin.clear() == 0
    directory.release(lease.id)
    directory.release(lease.id)
    directory.release(12345)
    assert directory.admin.clear() == 3


def test_no_hit_means_no_lease(directory: Directory) -> None:
    assert directory.lease(NAMESPACE, chain("a", 3), world=1, ttl_s=60, owner="s") is None
    assert directory.admin.stats()["leases"] == 0


def test_leases_on_the_same_chunks_are_counted(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, key("a"))
    first = directory.lease(NAMESPACE, key("a"), world=1, ttl_s=60, owner=1)
    second = directory.lease(NAMESPACE, key("a"), world=1, ttl_s=60, owner=1)
    assert first is not None
    assert second is not None
    assert first.id != second.id
    directory.release(first.id)
    directory.release(first.id)
    assert directory.admin.clear() == 0
    directory.release(second.id)
    assert directory.admin.clear() == 1


def test_a_lease_ends_at_its_deadline_and_not_before(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, key("a"))
    lease = directory.lease(NAMESPACE, key("a"), world=1, ttl_s=5, owner="s")
    assert lease is not None
    assert directory.expire(lease.deadline_ns - 1) == 0
    assert directory.expire(lease.deadline_ns) == 1
    assert directory.expire(lease.deadline_ns) == 0
    directory.release(lease.id)
    assert directory.admin.stats()["chunks_pinned"] == 0
    assert directory.admin.stats()["leases_expired_total"] == 1


def test_an_owner_that_dies_gives_back_its_leases_and_no_others(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, chain("a", 2))
    for owner in ("dead", "dead", "alive"):
        directory.lease(NAMESPACE, chain("a", 2), world=1, ttl_s=60, owner=owner)
    assert directory.release_owner("dead") == 2
    assert directory.release_owner("dead") == 0
    assert directory.admin.stats()["leases"] == 1
    assert directory.admin.clear() == 0
    assert directory.release_owner("alive") == 1
    assert directory.admin.clear() == 2


def test_a_copy_pins_its_slabs_even_when_the_lease_has_expired(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 2)
    store(pool, directory, keys)
    lease = directory.lease(NAMESPACE, keys, world=1, ttl_s=0, owner="s")
    acquired = directory.acquire(NAMESPACE, keys, rank=0)
    assert lease is not None
    assert directory.expire(lease.deadline_ns) == 1
    assert directory.admin.clear() == 0
    acquired.release()
    acquired.release()
    assert directory.admin.clear() == 2


def test_a_reference_says_where_the_slab_is_and_which_generation(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, key("a"))
    with directory.acquire(NAMESPACE, key("a"), rank=0) as acquired:
        (ref,) = acquired.refs
        assert bytes(pool.bytes[ref.offset : ref.offset + NBYTES]) == contents(key("a"), 0, NBYTES)
        assert ref.state_word & 0xFF == F.SlabState.COMMITTED
        assert directory._regions.slabs.read_header(ref.header).data_bytes == NBYTES
    directory.admin.clear()
    store(pool, directory, key("b"))
    with directory.acquire(NAMESPACE, key("b"), rank=0) as again:
        assert again.refs[0].offset == ref.offset
        assert again.refs[0].state_word != ref.state_word


# --- bad slabs ---
def test_a_dropped_chunk_misses_at_once_but_its_memory_waits_for_the_readers(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, key("a"))
    acquired = directory.acquire(NAMESPACE, key("a"), rank=0)
    assert directory.drop(NAMESPACE, key("a"), 0)
    assert not directory.drop(NAMESPACE, key("a"), 0)
    assert lookup(directory, key("a")) == 0
    assert slabs_on_mapping(pool)[F.SlabState.EVICTING] == 1
    assert directory.admin.stats()["slabs_evicting"] == 1
    store(pool, directory, key("a"))  # a new slab, not the one being read
    assert directory.acquire(NAMESPACE, key("a"), rank=0).refs[0].offset != acquired.refs[0].offset
    acquired.release()
    assert slabs_on_mapping(pool)[F.SlabState.EVICTING] == 0
    assert directory.admin.stats()["slabs_evicting"] == 0


def test_a_child_outlives_a_dropped_parent_and_is_found_again_when_it_is_back(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 3)
    store(pool, directory, keys)
    assert directory.drop(NAMESPACE, keys[KEY : 2 * KEY], 0)
    assert lookup(directory, keys) == 1
    store(pool, directory, keys[KEY : 2 * KEY], start=1, parent=keys[:KEY])
    assert lookup(directory, keys) == 3
    with directory.acquire(NAMESPACE, keys[2 * KEY :], rank=0):
        assert directory.admin.clear() == 0  # the chain is linked again: parents wait for the child


# --- restart ---
def test_a_restart_keeps_what_was_committed_and_drops_what_was_not(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 4)
    store(pool, directory, keys)
    reserve(directory, key("half"))
    pool = reopen(pool)
    again = Directory(pool)
    report = again.rebuild()
    assert report == RebuildReport(kept=4, bytes=4 * NBYTES, dropped_writing=1)
    assert check_contents(pool, again, keys) == 4
    assert again.admin.stats()["slabs_writing"] == 0
    with again.acquire(NAMESPACE, keys, rank=0):
        assert again.admin.clear() == 0
    assert again.admin.clear() == 4  # children before parents: the chain was linked again
    pool.close(clean=False)


def test_a_restart_puts_the_ranks_of_a_chunk_together_again(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 2)
    store(pool, directory, keys, rank=1, world=2)
    store(pool, directory, keys[:KEY], rank=0, world=2)
    pool = reopen(pool)
    again = Directory(pool)
    again.rebuild()
    assert lookup(again, keys, world=2) == 1
    assert again.admin.stats()["chunks_incomplete"] == 1
    assert store(pool, again, keys, rank=0, world=2) == 1
    assert lookup(again, keys, world=2) == 2
    pool.close(clean=False)


def test_a_damaged_slab_header_costs_that_chunk_only(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 5)
    store(pool, directory, keys)
    with directory.acquire(NAMESPACE, keys, rank=0) as acquired:
        slab = acquired.refs[2].header
    pool.bytes[slab + 60] ^= 0x10
    pool = reopen(pool)
    again = Directory(pool)
    report = again.rebuild()
    assert (report.kept, report.dropped_corrupt) == (4, 1)
    assert lookup(again, keys) == 2
    assert store(pool, again, keys) == 1
    assert check_contents(pool, again, keys) == 5
    pool.close(clean=False)


def test_a_damaged_region_header_costs_that_region_only_and_the_region_is_used_again(
    pool: PoolFile, directory: Directory
) -> None:
    keys = chain("a", 9)  # three regions of three
    store(pool, directory, keys)
    pool.bytes[2 * MiB + 30] ^= 1
    pool = reopen(pool)
    again = Directory(pool)
    report = again.rebuild()
    assert (report.kept, report.corrupt_regions, report.dropped_corrupt) == (6, 1, 3)
    assert store(pool, again, keys) == 3
    assert check_contents(pool, again, keys) == 9
    pool.close(clean=False)


def test_of_two_slabs_for_one_chunk_the_newest_stays(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, chain("a", 2))
    with directory.acquire(NAMESPACE, chain("a", 2), rank=0) as acquired:
        first, second = (ref.header for ref in acquired.refs)
        kept_at = acquired.refs[1].offset
    duplicate = directory._regions.slabs.read_header(first)._replace(
        created_ns=directory._regions.slabs.read_header(second).created_ns,
        checksum=directory._regions.slabs.read_header(second).checksum,
    )
    pool.bytes[kept_at : kept_at + NBYTES] = contents(key("a/0"), 0, NBYTES)
    pool.bytes[second + 8 : second + F.SLAB_HEADER_BYTES] = encode(duplicate)[8:]
    pool = reopen(pool)
    again = Directory(pool)
    report = again.rebuild()
    assert (report.kept, report.dropped_duplicate) == (1, 1)
    assert again.acquire(NAMESPACE, key("a/0"), rank=0).refs[0].offset == kept_at
    assert slabs_on_mapping(pool)[F.SlabState.COMMITTED] == 1
    pool.close(clean=False)


def test_after_an_unclean_reboot_only_what_matches_its_checksum_is_believed(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, chain("good", 2))
    store(pool, directory, key("torn"))
    unchecked = reserve(directory, key("unchecked"))
    assert isinstance(unchecked, Reservation)
    unchecked.commit(None)
    with directory.acquire(NAMESPACE, key("torn"), rank=0) as acquired:
        pool.bytes[acquired.refs[0].offset + 1000] ^= 1
    pool.close(clean=False)
    with open(pool.spec.file_path, "r+b") as f:
        fields = list(F.POOL_HEADER.unpack(f.read(F.POOL_HEADER.size)))
        fields[8] = os.urandom(16)  # boot id
        f.seek(0)
        f.write(F.with_crc(F.POOL_HEADER.pack(*fields)))
    pool = PoolFile.open(pool.spec)
    again = Directory(pool)
    report = again.rebuild()
    assert (report.kept, report.dropped_unverified) == (2, 2)
    assert check_contents(pool, again, chain("good", 2)) == 2
    assert lookup(again, key("torn")) == lookup(again, key("unchecked")) == 0
    assert not pool.suspect
    pool.close(clean=False)


def test_a_full_pool_says_so_and_works_again_once_something_is_free(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 12)
    store(pool, directory, keys)
    lease = directory.lease(NAMESPACE, keys, world=1, ttl_s=60, owner=0)
    assert lease is not None
    with pytest.raises(PoolFull, match="12 chunks pinned"):
        reserve(directory, key("b"))
    assert directory.admin.stats()["full_total"] == 1
    directory.release(lease.id)
    assert store(pool, directory, key("b")) == 1
    assert directory.lookup(NAMESPACE, key("b") + ROOT, world=1) == 1


@pytest.mark.parametrize("seed", range(25))
def test_random_damage_to_headers_never_stops_a_restart_and_never_serves_a_wrong_byte(pool: PoolFile, seed: int) -> None:
    rng = random.Random(seed)
    directory = Directory(pool)
    keys = chain("a", 11)
    store(pool, directory, keys)
    for _ in range(rng.randrange(1, 12)):
        region = rng.randrange(1, 5) * MiB
        at = region + (rng.randrange(64) if rng.random() < 0.3 else F.HEADER_BYTES + rng.randrange(3 * F.SLAB_HEADER_BYTES))
        pool.bytes[at] = rng.randrange(256)
    pool = reopen(pool)
    again = Directory(pool)
    report = again.rebuild()
    for i in range(11):  # every chunk for itself: whatever is found is right
        check_contents(pool, again, keys[i * KEY : (i + 1) * KEY])
    assert again.admin.stats()["slabs_committed"] == report.kept <= 11
    again.admin.clear()
    assert store(pool, again, chain("b", 12)) == 12
    assert check_contents(pool, again, chain("b", 12)) == 12
    pool.close(clean=False)


# --- what goes wrong in between ---
def test_a_commit_that_fails_gives_the_slab_back(directory: Directory) -> None:
    reservation = directory.reserve(
        NAMESPACE, key("deep"), parent=ROOT, rank=0, world=1, depth=1 << 32, tokens=256, nbytes=NBYTES
    )  # a depth that no header can say
    assert isinstance(reservation, Reservation)
    with pytest.raises(OverflowError):
        reservation.commit(None)
    reservation.abort()
    stats = directory.admin.stats()
    assert (stats["slabs_writing"], stats["bytes_used"], stats["chunks"]) == (0, 0, 0)
    assert isinstance(reserve(directory, key("deep")), Reservation)


def test_a_lease_says_where_its_slabs_are_while_others_drop_them(pool: PoolFile, directory: Directory) -> None:
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set():
            directory.drop(NAMESPACE, key("k"), 0)

    dropper = threading.Thread(target=drop)
    dropper.start()
    found = 0
    try:
        while found < 50:
            store(pool, directory, key("k"))
            lease, refs = directory.lease_located(NAMESPACE, key("k"), world=1, nbytes=NBYTES, ttl_s=60, owner="me")
            assert len(refs) == (lease.n if lease is not None else 0)
            if lease is not None:
                found += 1
                directory.release(lease.id)
    finally:
        stop.set()
        dropper.join()
