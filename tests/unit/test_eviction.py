"""What goes when the pool is full, in which order, and what never goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.pool_cases import (
    KEY,
    NAMESPACE,
    NBYTES,
    MiB,
    chain,
    check_contents,
    key,
    reserve,
    store,
    temporary_pool,
)

from maru_shm import poolformat as F
from maru_shm.errors import PoolError, PoolFull
from maru_sidecar.directory import Directory
from maru_sidecar.eviction import Evictable, LeastRecentlyUsed, Watermarks
from maru_sidecar.pool import PoolFile
from maru_sidecar.slab_handles import Reservation

OTHER = b"other namespace."
STRIDE = F.slab_stride(NBYTES)


@pytest.fixture
def pool() -> Iterator[PoolFile]:
    """Twelve slabs of NBYTES."""
    with temporary_pool(regions=4) as pool:
        yield pool


def present(directory: Directory, *names: str, namespace: bytes = NAMESPACE) -> list[str]:
    """Those of the single chunks ``names`` that are still there, asked without touching them."""
    found = {info.key for info in directory.admin.page(namespace, b"", 1000)[0]}
    return [name for name in names if key(name).hex() in found]


# --- order ---
def test_the_least_recently_used_chunk_goes_first(pool: PoolFile) -> None:
    directory = Directory(pool)
    names = [f"k{i}" for i in range(12)]
    for name in names:
        store(pool, directory, key(name))
    directory.lookup(NAMESPACE, key("k0"), world=1)
    reserve(directory, key("k1"))  # a store of what is present counts as use
    store(pool, directory, key("new0") + key("new1"))
    assert present(directory, *names) == ["k0", "k1", *names[4:]]


def test_children_go_before_their_parents_whatever_was_used_last(pool: PoolFile) -> None:
    directory = Directory(pool)
    keys = chain("a", 12)
    store(pool, directory, keys)
    for i in range(11, -1, -1):  # the tail is the oldest in use, then the tail is the youngest
        directory.lookup(NAMESPACE, keys[i * KEY :], world=1)
    for new, left in (("x", 11), ("y", 10), ("z", 9)):
        store(pool, directory, key(new))
        directory.lookup(NAMESPACE, key(new), world=1)
        assert check_contents(pool, directory, keys) == left


def test_a_shared_parent_stays_until_its_last_child_is_gone(pool: PoolFile) -> None:
    directory = Directory(pool)
    store(pool, directory, key("parent"))
    for name in ("left", "right"):
        store(pool, directory, key(name), start=1, parent=key("parent"))
    for i in range(9):
        store(pool, directory, key(f"k{i}"))
    for i in range(9):
        directory.lookup(NAMESPACE, key(f"k{i}"), world=1)
    order = []
    for i in range(3):
        store(pool, directory, key(f"new{i}"))
        order.append(present(directory, "parent", "left", "right"))
    assert order == [["parent", "right"], ["parent"], []]


def test_leased_copied_pinned_and_half_written_chunks_never_go(pool: PoolFile) -> None:
    directory = Directory(pool)
    for name in ("leased", "copied", "pinned", "parent"):
        store(pool, directory, key(name))
    writing = [reserve(directory, key("child"), parent=key("parent"), depth=1), reserve(directory, key("half"))]
    lease = directory.lease(NAMESPACE, key("leased"), world=1, ttl_s=60, owner=0)
    directory.admin.pin(NAMESPACE, key("pinned"), pinned=True)
    with directory.acquire(NAMESPACE, key("copied"), rank=0):
        for i in range(30):
            store(pool, directory, key(f"k{i}"))
        assert present(directory, "leased", "copied", "pinned", "parent") == ["leased", "copied", "pinned", "parent"]
    for r in writing:
        assert isinstance(r, Reservation)
        r.commit(None)
    assert lease is not None
    directory.release(lease.id)
    directory.admin.pin(NAMESPACE, key("pinned"), pinned=False)
    for i in range(30):
        store(pool, directory, key(f"m{i}"))
    assert present(directory, "leased", "copied", "pinned", "parent", "child", "half") == []


def test_a_prefix_longer_than_the_pool_keeps_its_beginning(pool: PoolFile) -> None:
    directory = Directory(pool)
    keys = chain("long", 20)
    with pytest.raises(PoolFull):
        store(pool, directory, keys)
    assert check_contents(pool, directory, keys) == 12
    assert directory.admin.stats()["slabs_writing"] == 0


def test_storing_one_rank_does_not_evict_the_other_ranks_of_the_same_chunk(pool: PoolFile) -> None:
    directory = Directory(pool)
    keys = chain("a", 7)
    stored = 0
    for i in range(7):
        for rank in (0, 1):
            parent = keys[(i - 1) * KEY : i * KEY] if i else key("root")
            stored += store(
                pool, directory, keys[i * KEY : (i + 1) * KEY], start=i, parent=parent, rank=rank, world=2
            ) if i < 6 else 0  # fmt: skip
    assert stored == 12
    assert directory.lookup(NAMESPACE, keys, world=2) == 6
    store(pool, directory, key("b"), rank=0, world=2)
    store(pool, directory, key("b"), rank=1, world=2)
    assert directory.lookup(NAMESPACE, key("b"), world=2) == 1
    assert directory.lookup(NAMESPACE, keys, world=2) == 5


# --- how much ---
def test_above_the_high_watermark_a_store_evicts_down_to_the_low_one_in_one_batch(pool: PoolFile) -> None:
    directory = Directory(pool, watermarks=Watermarks(high=0.75, low=0.5))
    for i in range(9):
        store(pool, directory, key(f"k{i}"))
    assert directory.admin.stats()["evicted_total"] == 0
    store(pool, directory, key("one more"))
    assert directory.admin.stats()["evicted_total"] == 4
    assert directory.admin.stats()["chunks"] == 6


def test_watermarks_are_of_slabs_so_a_pool_may_be_full_while_a_quarter_of_its_bytes_is_left(pool: PoolFile) -> None:
    """Three slabs of 256 KiB lie in a region of 1 MiB; what is left of it can hold no fourth."""
    directory = Directory(pool)
    for i in range(12):
        store(pool, directory, key(f"k{i}"))
    stats = directory.admin.stats()
    assert (stats["evicted_total"], stats["slabs_free"], stats["regions_free"]) == (0, 0, 0)
    assert stats["size_classes"] == [{"stride": STRIDE, "regions": 4, "slabs": 12, "used": 12}]
    assert (stats["bytes_used"], stats["bytes_total"]) == (12 * STRIDE, 4 * MiB)
    assert 3 * MiB == 12 * STRIDE
    store(pool, directory, key("one more"))
    assert directory.admin.stats()["evicted_total"] == 1


def test_a_store_evicts_at_most_one_batch(pool: PoolFile) -> None:
    directory = Directory(pool, watermarks=Watermarks(high=0.75, low=0.25, batch=2))
    for i in range(10):
        store(pool, directory, key(f"k{i}"))
    assert directory.admin.stats()["evicted_total"] == 2


@pytest.mark.parametrize(("high", "low", "batch"), [(0.5, 0.9, 1), (1.1, 0.5, 1), (0.9, 0.0, 1), (0.9, 0.5, 0)])
def test_watermarks_that_make_no_sense_are_refused(high: float, low: float, batch: int) -> None:
    with pytest.raises(ValueError, match="need 0 < low"):
        Watermarks(high=high, low=low, batch=batch)


def test_a_namespace_stays_within_its_quota_and_evicts_its_own(pool: PoolFile) -> None:
    directory = Directory(pool, quotas={OTHER: 3 * STRIDE})
    store(pool, directory, chain("a", 4))
    for i in range(5):
        store(pool, directory, key(f"k{i}"), namespace=OTHER)
    assert present(directory, *(f"k{i}" for i in range(5)), namespace=OTHER) == ["k2", "k3", "k4"]
    assert directory.lookup(NAMESPACE, chain("a", 4), world=1) == 4
    directory.lease(OTHER, key("k2"), world=1, ttl_s=60, owner=0)
    directory.lease(OTHER, key("k3"), world=1, ttl_s=60, owner=0)
    directory.lease(OTHER, key("k4"), world=1, ttl_s=60, owner=0)
    with pytest.raises(PoolFull, match="quota"):
        reserve(directory, key("k5"), namespace=OTHER)


def test_a_default_quota_holds_for_namespaces_without_their_own(pool: PoolFile) -> None:
    directory = Directory(pool, quotas={OTHER: 0}, default_quota=2 * STRIDE)
    for i in range(4):
        store(pool, directory, key(f"k{i}"))
        store(pool, directory, key(f"k{i}"), namespace=OTHER)
    assert directory.admin.stats()["evicted_total"] == 2
    assert len(present(directory, *(f"k{i}" for i in range(4)), namespace=OTHER)) == 4


# --- across size classes ---
def test_a_cold_region_changes_over_to_a_size_that_needs_it(pool: PoolFile) -> None:
    directory = Directory(pool)
    for i in range(12):
        store(pool, directory, key(f"k{i}"))
    assert store(pool, directory, key("small"), nbytes=4096, namespace=OTHER) == 1
    stats = directory.admin.stats()
    assert stats["regions_taken_total"] == 1
    assert present(directory, *(f"k{i}" for i in range(12))) == [f"k{i}" for i in range(3, 12)]
    assert check_contents(pool, directory, key("small"), namespace=OTHER) == 1
    assert all(check_contents(pool, directory, key(f"k{i}")) == 1 for i in range(3, 12))


def test_a_region_with_a_pinned_chunk_does_not_change_over_the_next_one_does(pool: PoolFile) -> None:
    directory = Directory(pool)
    for i in range(12):
        store(pool, directory, key(f"k{i}"))
    directory.admin.pin(NAMESPACE, key("k1"), pinned=True)
    with pytest.raises(PoolFull):  # the coldest chunk's region is not to be had, and no other is tried for its sake
        reserve(directory, key("small"), nbytes=4096, namespace=OTHER)
    directory.lookup(NAMESPACE, key("k0"), world=1)
    directory.lookup(NAMESPACE, key("k2"), world=1)
    assert store(pool, directory, key("small"), nbytes=4096, namespace=OTHER) == 1
    assert present(directory, "k0", "k1", "k2", "k3", "k4", "k5") == ["k0", "k1", "k2"]


def test_a_class_in_use_gives_up_its_own_coldest_rather_than_a_warmer_region(pool: PoolFile) -> None:
    directory = Directory(pool)
    big = 3 * NBYTES
    for i in range(2):
        store(pool, directory, key(f"big{i}"), nbytes=big, namespace=OTHER)  # one slab a region
    for i in range(6):
        store(pool, directory, key(f"k{i}"))
    store(pool, directory, key("big2"), nbytes=big, namespace=OTHER)
    assert present(directory, "big0", "big1", "big2", namespace=OTHER) == ["big1", "big2"]
    assert directory.admin.stats()["regions_taken_total"] == 0


def test_descendants_in_other_regions_go_before_the_region_that_holds_their_parents(pool: PoolFile) -> None:
    directory = Directory(pool)
    keys = chain("a", 12)
    store(pool, directory, keys)
    directory.drop(NAMESPACE, keys[11 * KEY :], 0)  # the coldest leaf is now in the last region, with room beside it
    assert store(pool, directory, key("small"), nbytes=4096, namespace=OTHER) == 1
    left = check_contents(pool, directory, keys)
    assert left == directory.admin.stats()["chunks"] - 1  # type: ignore[operator]
    assert left == 9


# --- policies ---
class MostRecentlyUsed:
    """The opposite of the default, in the fewest lines the protocol allows."""

    def __init__(self) -> None:
        self.held: list[Evictable] = []

    def offer(self, chunk: Evictable) -> None:
        chunk.queued = True
        self.held.append(chunk)

    def coldest(self) -> Evictable | None:
        return max((c for c in self.held if c.evictable), key=lambda c: c.used, default=None)

    def gone(self, chunk: Evictable) -> None:
        self.held = [c for c in self.held if c is not chunk]


def test_the_policy_is_replaceable(pool: PoolFile) -> None:
    directory = Directory(pool, eviction=MostRecentlyUsed)
    for i in range(13):
        store(pool, directory, key(f"k{i}"))
    assert present(directory, "k0", "k10", "k11", "k12") == ["k0", "k10", "k12"]


def test_a_policy_that_picks_a_chunk_in_use_is_an_error_not_a_reuse(pool: PoolFile) -> None:
    class Reckless(MostRecentlyUsed):
        def coldest(self) -> Evictable | None:
            return self.held[0] if self.held else None

    directory = Directory(pool, eviction=Reckless)
    for i in range(12):
        store(pool, directory, key(f"k{i}"))
    directory.lease(NAMESPACE, key("k0"), world=1, ttl_s=60, owner=0)
    with pytest.raises(PoolError, match="Reckless"):
        reserve(directory, key("new"))
    with pytest.raises(PoolError, match="Reckless"):  # not PENDING: the failed attempt left nothing behind
        reserve(directory, key("new"))
    assert directory.admin.stats()["slabs_writing"] == 0
    assert check_contents(pool, directory, key("k0")) == 1


class Item:
    def __init__(self, used: int) -> None:
        self.used = used
        self.queued = False
        self.evictable = True


def test_lru_orders_by_last_use_even_if_that_changed_while_queued() -> None:
    policy = LeastRecentlyUsed()
    items = [Item(i) for i in range(10)]
    for item in items:
        policy.offer(item)
    items[0].used, items[3].used = 100, 50
    order = []
    while (item := policy.coldest()) is not None:
        order.append(item.used)
        item.evictable = False
        policy.gone(item)
    assert order == [1, 2, 4, 5, 6, 7, 8, 9, 50, 100]


def test_lru_forgets_items_that_are_in_use_until_they_are_offered_again() -> None:
    policy = LeastRecentlyUsed()
    item = Item(1)
    policy.offer(item)
    item.evictable = False
    assert policy.coldest() is None
    assert not item.queued
    item.evictable = True
    policy.offer(item)
    assert policy.coldest() is item


def test_one_lru_call_does_bounded_work_however_many_items_were_used() -> None:
    policy = LeastRecentlyUsed()
    items = [Item(i) for i in range(3 * LeastRecentlyUsed.MAX_REFRESH)]
    for item in items:
        policy.offer(item)
    for item in items:
        item.used += 1_000_000
    assert policy.coldest() is items[LeastRecentlyUsed.MAX_REFRESH]


def test_lru_does_not_grow_with_items_that_have_gone() -> None:
    policy = LeastRecentlyUsed()
    keep = Item(0)
    policy.offer(keep)
    for i in range(20_000):
        item = Item(i + 1)
        policy.offer(item)
        item.evictable = False
        policy.gone(item)
    assert len(policy._heap) < 3000
    assert policy.coldest() is keep


def test_storing_into_a_full_pool_of_small_chunks_stays_cheap_in_evictions() -> None:
    with temporary_pool(regions=3) as pool:
        directory = Directory(pool)
        stored = sum(store(pool, directory, chain(f"p{i}", 8), nbytes=4096) for i in range(150))
        stats = directory.admin.stats()
        assert stored == 1200
        assert stats["chunks"] == stored - int(str(stats["evicted_total"]))
        assert int(str(stats["bytes_used"])) > 0.94 * 3 * 240 * 4096
        assert 3 * MiB > int(str(stats["bytes_used"]))
