"""What operators do to the directory, and what they ask it: clearing, pins, listing, statistics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.pool_cases import KEY, NAMESPACE, NBYTES, MiB, chain, key, reserve, store, temporary_pool

from maru_shm import poolformat as F
from maru_sidecar import recovery
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.slab_handles import Reservation


@pytest.fixture
def pool() -> Iterator[PoolFile]:
    with temporary_pool(regions=4) as pool:
        yield pool


@pytest.fixture
def directory(pool: PoolFile) -> Directory:
    directory = Directory(pool)
    directory.rebuild()
    return directory


def test_clearing_keeps_a_parent_whose_child_is_in_use(pool: PoolFile, directory: Directory) -> None:
    keys = chain("a", 4)
    store(pool, directory, keys)
    with directory.acquire(NAMESPACE, keys[: 2 * KEY], rank=0):
        assert directory.admin.clear(NAMESPACE) == 2
        assert directory.lookup(NAMESPACE, keys, world=1) == 2
    assert directory.admin.clear(NAMESPACE) == 2


def test_chunks_that_name_each_other_as_parent_can_still_be_cleared(pool: PoolFile, directory: Directory) -> None:
    a, b, c = key("a"), key("b"), key("c")
    store(pool, directory, a, parent=b, start=1)
    store(pool, directory, b, parent=a, start=1)
    store(pool, directory, c, parent=c, start=0)
    assert directory.admin.clear() == 3
    assert directory.admin.stats()["bytes_used"] == 0


def test_operators_pins_are_counted_and_stop_at_the_first_absent_key(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, chain("a", 2))
    keys = chain("a", 3)
    assert directory.admin.pin(NAMESPACE, keys, pinned=True) == (2, 0)
    assert directory.admin.pin(NAMESPACE, keys[:KEY], pinned=True) == (1, 0)
    assert directory.admin.pin(NAMESPACE, keys, pinned=False) == (2, 0)
    assert directory.admin.pin(NAMESPACE, keys[KEY : 2 * KEY], pinned=False) == (1, 1)  # it had one pin
    assert directory.admin.clear() == 1  # the second chunk; the first still has one pin
    assert directory.admin.pin(NAMESPACE, keys, pinned=False) == (1, 0)
    assert directory.admin.pin(NAMESPACE, keys, pinned=False) == (1, 1)  # nothing left to undo
    assert directory.admin.clear() == 1
    assert directory.admin.pin(b"unknown.........", keys, pinned=True) == (0, 0)


def test_an_operators_pin_ends_with_a_dropped_chunk(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, key("a"))
    directory.admin.pin(NAMESPACE, key("a"), pinned=True)
    directory.drop(NAMESPACE, key("a"), 0)
    stats = directory.admin.stats()
    assert (stats["pins"], stats["chunks_pinned"], stats["bytes_used"]) == (0, 0, 0)


def test_operators_pins_are_found_again_by_the_next_sidecar(pool: PoolFile, directory: Directory) -> None:
    for rank in range(2):
        store(pool, directory, chain("a", 3), rank=rank, world=2)
        directory.admin.pin(NAMESPACE, key("a/0"), pinned=True)  # the second time in the slabs of both ranks
    directory.admin.pin(NAMESPACE, chain("a", 2), pinned=True)
    directory.admin.pin(NAMESPACE, chain("a", 3), pinned=True)
    directory.admin.pin(NAMESPACE, chain("a", 3)[2 * KEY :], pinned=False)
    following = Directory(pool)
    following.rebuild()
    stats = following.admin.stats()
    assert (stats["pins"], stats["chunks_pinned"]) == (4 + 2, 2)
    assert following.admin.clear() == 1
    assert following.admin.pin(NAMESPACE, chain("a", 2), pinned=False) == (2, 0)
    assert following.admin.pin(NAMESPACE, chain("a", 2), pinned=False) == (2, 0)
    assert following.admin.clear() == 1  # the first still has two
    assert following.admin.pin(NAMESPACE, key("a/0"), pinned=False) == (1, 0)
    assert following.admin.pin(NAMESPACE, key("a/0"), pinned=False) == (1, 0)
    assert following.admin.clear() == 1


def test_a_slab_that_is_stored_again_has_no_pins_and_stray_bits_are_none(pool: PoolFile, directory: Directory) -> None:
    store(pool, directory, key("a"))
    directory.admin.pin(NAMESPACE, key("a"), pinned=True)
    directory.drop(NAMESPACE, key("a"), 0)
    store(pool, directory, key("b"))
    [slab] = [slab for slab, _ in recovery.recover(pool, directory._regions).slabs]
    for word in (0, 1, 1 << 63, 0xFFFF_FFFF << 32, (1 << 64) - 1):
        pool.words[(slab + F.SLAB_PINS_OFFSET) >> 3] = word or pool.words[(slab + F.SLAB_PINS_OFFSET) >> 3]
        following = Directory(pool)
        following.rebuild()
        assert (following.admin.stats()["chunks"], following.admin.stats()["pins"]) == (1, 0)


def test_pages_list_every_chunk_once_in_key_order(pool: PoolFile, directory: Directory) -> None:
    for i in range(7):
        store(pool, directory, key(f"k{i}"))
    directory.admin.pin(NAMESPACE, key("k3"), pinned=True)
    seen, after, more = [], b"", True
    while more:
        infos, more = directory.admin.page(NAMESPACE, after, 3)
        seen += infos
        after = bytes.fromhex(infos[-1].key)
    assert [i.key for i in seen] == sorted(key(f"k{i}").hex() for i in range(7))
    assert {(i.ranks, i.world, i.bytes, i.tokens, i.leases) for i in seen} == {(1, 1, NBYTES, 256, 0)}
    assert [i.key for i in seen if i.pinned] == [key("k3").hex()]
    everything, more = directory.admin.page(None, b"", 100)
    assert (len(everything), more) == (7, False)
    assert directory.admin.page(b"unknown.........", b"", 10) == ([], False)


def test_statistics_account_for_every_slab_and_byte(pool: PoolFile, directory: Directory) -> None:
    stride = F.slab_stride(NBYTES)
    store(pool, directory, chain("a", 4))
    pending = reserve(directory, key("p"))
    assert isinstance(pending, Reservation)
    directory.lease(NAMESPACE, chain("a", 6), world=1, ttl_s=60, owner=0)
    stats = directory.admin.stats()
    assert stats["chunks"] == 4
    assert (stats["slabs_committed"], stats["slabs_writing"], stats["slabs_free"]) == (4, 1, 1)
    assert stats["bytes_used"] == 5 * stride
    assert stats["bytes_free"] == stride + 2 * MiB
    assert stats["largest_free_extent"] == 2 * MiB
    assert (stats["leases"], stats["chunks_pinned"]) == (1, 4)
    assert (stats["lookups_total"], stats["chunks_asked_total"], stats["chunks_hit_total"]) == (1, 6, 4)
    assert stats["namespaces"] == {
        NAMESPACE.hex(): {"chunks": 4, "bytes": 5 * stride, "quota": 0, "world": 1, "incomplete": 0}
    }  # fmt: skip
    pending.abort()
