"""Slabs on the mapping: where they lie, what their state words say, and how regions change their size class."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_shm import poolformat as F
from maru_shm.errors import PoolCorrupt, PoolError
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.regions import RegionTable
from maru_sidecar.slab_header import SlabHeader

MiB = 1 << 20
STRIDE = 256 << 10


@pytest.fixture
def pool() -> Iterator[PoolFile]:
    pool = PoolFile.open(PoolSpec(path=f"maru-test-pool-{os.getpid()}-{uuid.uuid4().hex}", size=5 * MiB, region_size=MiB))
    yield pool
    pool.close(clean=False)
    Path(pool.spec.file_path).unlink(missing_ok=True)


@pytest.fixture
def table(pool: PoolFile) -> RegionTable:
    return RegionTable(pool)


def take(table: RegionTable, stride: int = STRIDE) -> int:
    slab = table.allocate(stride, "someone")
    assert slab is not None
    return slab


def state(table: RegionTable, slab: int) -> F.SlabState:
    return F.SlabState(table.slabs.state_word(slab) & 0xFF)


def header(key: bytes = b"k" * 16, **changes: object) -> SlabHeader:
    plain = SlabHeader(b"n" * 16, key, b"p" * 16, 0, 1, 1000, None, 256, 123, 0)
    return plain._replace(**changes)  # type: ignore[arg-type]


def commit(table: RegionTable, slab: int, what: SlabHeader) -> None:
    table.slabs.begin_write(slab)
    table.slabs.write_header(slab, what)
    table.slabs.publish(slab)


def test_slabs_are_page_aligned_disjoint_and_inside_their_region(table: RegionTable, pool: PoolFile) -> None:
    slabs = [take(table) for _ in range(12)]
    spans = sorted((table.data_offset(s), table.data_offset(s) + STRIDE) for s in slabs)
    assert all(start % F.DATA_ALIGN == 0 for start, _ in spans)
    assert all(a_end <= b_start for (_, a_end), (b_start, _) in itertools.pairwise(spans))
    for slab, (start, end) in zip(slabs, [(table.data_offset(s), table.data_offset(s) + STRIDE) for s in slabs], strict=True):
        assert start // pool.region_bytes == (end - 1) // pool.region_bytes == slab // pool.region_bytes
    assert table.allocate(STRIDE, None) is None


def test_a_commit_goes_through_writing_and_ends_in_a_header_with_a_good_crc(table: RegionTable, pool: PoolFile) -> None:
    slab = take(table)
    assert state(table, slab) is F.SlabState.FREE
    table.slabs.begin_write(slab)
    assert state(table, slab) is F.SlabState.WRITING
    table.slabs.write_header(slab, header(checksum=77))
    assert state(table, slab) is F.SlabState.WRITING
    table.slabs.publish(slab)
    assert state(table, slab) is F.SlabState.COMMITTED
    assert table.slabs.read_header(slab) == header(checksum=77)
    raw = bytes(pool.bytes[slab : slab + F.SLAB_HEADER_BYTES])
    assert int.from_bytes(raw[8:16], "little") == F.SLAB_MAGIC


def test_the_generation_rises_at_each_reuse_and_never_within_one(table: RegionTable) -> None:
    generations = []
    for _ in range(3):
        slab = take(table)
        commit(table, slab, header())
        word = table.slabs.state_word(slab)
        table.slabs.begin_evict(slab)
        assert state(table, slab) is F.SlabState.EVICTING
        assert table.slabs.state_word(slab) >> 8 == word >> 8
        table.free(slab)
        generations.append(word >> 8)
    assert generations == sorted(set(generations))


def test_the_generation_rises_over_reformatting_too(table: RegionTable) -> None:
    slab = take(table)
    for _ in range(5):
        commit(table, slab, header())
        before = table.slabs.state_word(slab) >> 8
        table.free(slab)
        slab = take(table)
    table.free(slab)
    other = take(table, STRIDE // 2)  # the same region, now for another size
    assert other // MiB == slab // MiB
    table.slabs.begin_write(other)
    assert table.slabs.state_word(other) >> 8 > before


def test_the_lowest_region_with_room_is_filled_first_so_that_others_run_empty(table: RegionTable) -> None:
    slabs = [take(table) for _ in range(9)]
    assert table.free_regions == 1
    for slab in (slabs[1], slabs[4], slabs[7]):
        table.free(slab)
    assert [take(table) // MiB for _ in range(3)] == sorted(s // MiB for s in (slabs[1], slabs[4], slabs[7]))


def test_an_empty_region_serves_another_size_and_a_used_one_does_not(table: RegionTable) -> None:
    slabs = [take(table) for _ in range(12)]
    assert table.allocate(4096, None) is None
    for slab in slabs[3:6]:
        table.free(slab)
    assert table.free_regions == 1
    small = take(table, 4096)
    assert small // MiB == slabs[3] // MiB
    assert table.allocate(STRIDE, None) is None


def test_a_slab_larger_than_a_region_is_refused_with_the_remedy(table: RegionTable) -> None:
    with pytest.raises(PoolError, match="region_size"):
        table.size_class(2 * MiB)


def test_the_largest_free_run_counts_neighbours_only(table: RegionTable) -> None:
    assert table.largest_free_run() == 4
    slabs = [take(table) for _ in range(6)]  # regions 1 and 2
    assert table.largest_free_run() == 2
    for slab in slabs[:3]:
        table.free(slab)  # region 1 is free again, 2 is not
    assert table.free_regions == 3
    assert table.largest_free_run() == 2


def test_a_scan_finds_what_was_committed_and_frees_the_rest(table: RegionTable, pool: PoolFile) -> None:
    kept, half, leaving, damaged = (take(table) for _ in range(4))
    commit(table, kept, header(b"a" * 16))
    table.slabs.begin_write(half)
    commit(table, leaving, header(b"b" * 16))
    table.slabs.begin_evict(leaving)
    commit(table, damaged, header(b"c" * 16))
    pool.bytes[damaged + 44] ^= 1
    again = RegionTable(pool)
    found = [again.format.scan(region) for region in again.regions()]
    scanned = [f for f in found if f is not None]
    assert [(s, h.key) for f in scanned for s, h in f.committed] == [(kept, b"a" * 16)]
    assert sum(f.writing for f in scanned) == 1
    assert sum(f.evicting for f in scanned) == 1
    assert sum(f.corrupt for f in scanned) == 1
    assert [state(again, s) for s in (half, leaving, damaged)] == [F.SlabState.FREE] * 3


@pytest.mark.parametrize("state_byte", [4, 99, 255])
def test_a_slab_in_an_unknown_state_is_corrupt(table: RegionTable, pool: PoolFile, state_byte: int) -> None:
    slab = take(table)
    commit(table, slab, header())
    pool.words[slab >> 3] = pool.words[slab >> 3] & ~0xFF | state_byte
    again = RegionTable(pool)
    found = again.format.scan(again.regions()[0])
    assert found is not None
    assert (found.corrupt, found.committed) == (1, [])


@pytest.mark.parametrize(
    "changes", [{"data_bytes": STRIDE + 1}, {"data_bytes": 0}, {"rank": 1}, {"world": 0}], ids=lambda c: next(iter(c))
)
def test_a_header_that_claims_the_impossible_is_corrupt_even_with_a_good_crc(
    table: RegionTable, pool: PoolFile, changes: dict[str, int]
) -> None:
    commit(table, take(table), header(**changes))
    again = RegionTable(pool)
    found = again.format.scan(again.regions()[0])
    assert found is not None
    assert (found.corrupt, found.committed) == (1, [])


def test_a_damaged_region_header_is_reported_and_the_region_can_be_used_again(table: RegionTable, pool: PoolFile) -> None:
    slab = take(table)
    commit(table, slab, header())
    generation = table.slabs.state_word(slab) >> 8
    pool.bytes[MiB + 20] ^= 1
    path = pool.spec
    pool.close(clean=False)
    pool = PoolFile.open(path)
    again = RegionTable(pool)
    region = again.regions()[0]
    with pytest.raises(PoolCorrupt, match="region 1"):
        again.format.scan(region)
    assert again.format.count_committed(region) == 1
    slab = take(again)
    assert slab // MiB == 1
    again.slabs.begin_write(slab)
    assert again.slabs.state_word(slab) >> 8 > generation
    pool.close(clean=False)


def test_a_slab_taken_again_has_no_header_until_its_data_is_there(table: RegionTable, pool: PoolFile) -> None:
    slab = take(table)
    commit(table, slab, header())
    table.free(slab)
    assert take(table) == slab
    table.slabs.begin_write(slab)
    # A state word that got lost, e.g. in a pool on a disk whose machine lost power, leaves no header that looks sound.
    pool.bytes[slab : slab + 8] = (table.slabs.state_word(slab) & ~0xFF | F.SlabState.COMMITTED).to_bytes(8, "little")
    found = table.format.scan(table.region_of(slab))
    assert found is not None
    assert found.committed == []
