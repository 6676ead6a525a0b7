"""The planned copies, performed byte by byte, against a plain gather and scatter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.cuda_emulator import MAX_PITCH, execute
from tests.support.kv_cases import Bytes, KvCase, block_tables, cases

from maru_shm.copy_shapes import CopyPlanner
from maru_shm.geometry import KvPlane, KvRegion, RegionKind, Share
from maru_shm.layout import SKIP_BLOCK
from maru_shm.placed_planes import PlacedPlane, place, progressions

ALL = cases()
BY_NAME = {c.name: c for c in ALL}


class Bench:
    """A cache of one case and a pool of slabs, both random, both in this process."""

    def __init__(
        self, case: KvCase, chunks: int, per_chunk: int, rng: np.random.Generator, *, max_pitch: int = MAX_PITCH
    ) -> None:
        self.case = case
        self.memory = [rng.integers(0, 256, size, np.uint8) for size in case.allocations]
        slab_bytes = per_chunk * case.block_bytes
        self.pool = rng.integers(0, 256, (chunks + 2) * slab_bytes, np.uint8)
        self.offsets = (rng.permutation(chunks + 2)[:chunks] * slab_bytes).astype(np.uint64)
        self.slab_bytes = slab_bytes
        regions = [KvRegion(RegionKind.CUDA_IPC, m.ctypes.data, m.nbytes, bytes(64), "GPU-x") for m in self.memory]
        planes = place(case.layout(regions), [m.ctypes.data for m in self.memory], range(len(self.memory)))
        self.planner = CopyPlanner(planes, max_pitch)

    def check(self, side: str, address: int, size: int) -> None:
        spans = [self.pool] if side == "host" else self.memory
        assert any(s.ctypes.data <= address and address + size <= s.ctypes.data + s.nbytes for s in spans)

    def run(self, table: npt.NDArray[np.int32], *, to_device: bool) -> int:
        copies = self.planner.plan(self.offsets + np.uint64(self.pool.ctypes.data), table)
        for copy in copies:
            execute(copy, to_device=to_device, check=self.check)
        return len(copies)

    def slab(self, i: int) -> Bytes:
        return self.pool[int(self.offsets[i]) : int(self.offsets[i]) + self.slab_bytes]

    def load_is_right(self, table: npt.NDArray[np.int32]) -> None:
        wanted = [m.copy() for m in self.memory]
        for i, blocks in enumerate(table):
            self.case.scatter(wanted, blocks, self.slab(i))
        pool = self.pool.copy()
        self.run(table, to_device=True)
        for got, want in zip(self.memory, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(self.pool, pool)

    def store_is_right(self, table: npt.NDArray[np.int32]) -> None:
        wanted, memory = self.pool.copy(), [m.copy() for m in self.memory]
        for i, blocks in enumerate(table):
            at = int(self.offsets[i])
            keep = self.case.kept(blocks)
            wanted[at : at + self.slab_bytes][keep] = self.case.slab(self.memory, blocks)[keep]
        self.run(table, to_device=False)
        np.testing.assert_array_equal(self.pool, wanted)
        for got, want in zip(self.memory, memory, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("max_pitch", [MAX_PITCH, 65536], ids=["real-pitch-limit", "small-pitch-limit"])
@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_every_layout_and_table_moves_exactly_the_bytes_of_its_blocks(case: KvCase, max_pitch: int) -> None:
    rng = np.random.default_rng(7)
    for table in block_tables(rng, case.num_blocks, chunks=4, per_chunk=5).values():
        Bench(case, 4, 5, rng).load_is_right(table)
        Bench(case, 4, 5, rng, max_pitch=max_pitch).store_is_right(table)


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_slabs_and_blocks_that_fall_or_rise_together_are_copied_right_in_columns(case: KvCase) -> None:
    rng = np.random.default_rng(11)
    chunks, per_chunk = 4, 3
    n = chunks * per_chunk
    falling = np.arange(n)[::-1]
    tables = {
        "falling": falling,
        "rising": np.arange(n),
        "falling, one chunk out of step": np.concatenate([falling[:6], falling[6:9][::-1], falling[9:]]),
        "falling, then rising": np.concatenate([falling[:6], np.arange(6)]),
        "a block skipped": np.where(np.arange(n) == 7, SKIP_BLOCK, falling),
        "gaps": 2 * falling,
    }
    orders = {"rise": np.arange(chunks), "fall": np.arange(chunks)[::-1], "apart": np.array([5, 3, 1, 2])}
    for table in tables.values():
        for order in orders.values():
            bench = Bench(case, chunks, per_chunk, rng)
            bench.offsets = (order * bench.slab_bytes).astype(np.uint64)
            bench.load_is_right(table.astype(np.int32).reshape(chunks, per_chunk))
            bench.store_is_right(table.astype(np.int32).reshape(chunks, per_chunk))


@st.composite
def odd_caches(draw: st.DrawFn) -> KvCase:
    """Planes of random sizes, strides and gaps over a few allocations."""
    blocks = draw(st.integers(1, 12))
    planes: list[KvPlane] = []
    sizes = [0] * draw(st.integers(1, 3))
    pieces = draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
    pads = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
    for i in range(draw(st.integers(1, 9))):
        region = draw(st.integers(0, len(sizes) - 1))
        piece = pieces[i % len(pieces)]
        stride = piece + draw(st.sampled_from(pads))
        planes.append(KvPlane(region, sizes[region], stride, piece, i))
        sizes[region] += blocks * stride + draw(st.sampled_from(pads))
    return KvCase("odd", blocks, tuple(max(1, s) for s in sizes), tuple(draw(st.permutations(planes))))


@settings(max_examples=80, deadline=None)
@given(odd_caches(), st.data())
def test_random_layouts_and_tables_move_exactly_the_bytes_of_their_blocks(case: KvCase, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    per_chunk = data.draw(st.integers(1, 4))
    chunks = data.draw(st.integers(1, 4))
    ids = data.draw(
        st.lists(
            st.integers(0, case.num_blocks - 1), unique=True, max_size=chunks * per_chunk, min_size=min(1, chunks * per_chunk)
        )
    )
    table = np.full(chunks * per_chunk, SKIP_BLOCK, np.int32)
    table[: len(ids)] = ids
    pitch = data.draw(st.sampled_from([64, 200, MAX_PITCH]))
    bench = Bench(case, chunks, per_chunk, rng, max_pitch=pitch)
    bench.load_is_right(table.reshape(chunks, per_chunk))
    bench.store_is_right(table.reshape(chunks, per_chunk))


def copies_for(name: str, table: str, chunks: int = 4, per_chunk: int = 16, *, falling_slabs: bool = False) -> int:
    case = BY_NAME[name]
    rng = np.random.default_rng(3)
    bench = Bench(case, chunks, per_chunk, rng)
    places = np.arange(chunks)[::-1] if falling_slabs else np.arange(chunks)
    bench.offsets = (places * bench.slab_bytes).astype(np.uint64)
    return bench.run(block_tables(rng, case.num_blocks, chunks, per_chunk)[table], to_device=True)


def test_a_scattered_block_is_one_copy_of_all_its_layers() -> None:
    assert copies_for("packed-kv", "scattered") == pytest.approx(64, abs=2)


def test_consecutive_blocks_are_one_copy_per_chunk_and_layer() -> None:
    assert copies_for("packed-kv", "consecutive") == 4 * 6


def test_consecutive_blocks_of_a_block_outermost_cache_are_one_copy() -> None:
    assert copies_for("block-outermost", "consecutive") == 1
    assert copies_for("block-outermost-padded", "consecutive") == 1


def test_falling_block_ids_are_one_copy_per_block() -> None:
    assert copies_for("packed-kv", "falling") == 64


def test_layers_in_allocations_of_their_own_are_copied_one_by_one() -> None:
    assert copies_for("one-allocation-per-layer", "falling") == 64 * 6


def test_short_pieces_of_one_buffer_are_copied_by_block_unless_columns_are_long() -> None:
    pieces = [PlacedPlane(0, (1 << 40) + (i << 30), i * 16384, 16384, 16384) for i in range(32)]
    planner = CopyPlanner(pieces, MAX_PITCH)

    def planned(chunks: int) -> int:
        slabs = (np.arange(chunks)[::-1] * 16 * 32 * 16384 + 4096).astype(np.uint64)
        return len(planner.plan(slabs, np.arange(16 * chunks, dtype=np.int32)[::-1].reshape(chunks, 16)))

    assert planned(8) == 8 * 16  # 32 GB/s; columns of eight made 25 (H200)
    assert planned(64) == 16 * 32


def test_falling_slabs_take_falling_blocks_in_columns_and_rising_ones_in_rows() -> None:
    columns = copies_for("one-allocation-per-layer", "falling", chunks=8, per_chunk=4, falling_slabs=True)
    rows = copies_for("one-allocation-per-layer", "consecutive", chunks=8, per_chunk=4, falling_slabs=True)
    assert (columns, rows) == (4 * 6, 8 * 6)
    assert copies_for("one-allocation-per-layer", "falling", chunks=8, per_chunk=4) == 8 * 4 * 6


def test_nothing_is_planned_for_skipped_blocks() -> None:
    assert copies_for("packed-kv", "all skipped") == 0


def progressions_of(name: str) -> int:
    case = BY_NAME[name]
    bases = [1 << 40 for _ in case.allocations]
    regions = [KvRegion(RegionKind.CUDA_IPC, 1 << 40, size, bytes(64), "GPU-x") for size in case.allocations]
    return len(progressions(place(case.layout(regions), bases, range(len(bases))), 16))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("packed-kv", 1),
        ("leading-2", 1),
        ("k-and-v-unevenly-spaced", 2),
        ("two-kinds-of-layers", 2),
        ("latent-fp8-656", 1),
        ("block-outermost-by-layer", 1),
        ("layers-in-reverse", 6),
    ],
)
def test_planes_are_covered_by_the_fewest_progressions(name: str, expected: int) -> None:
    assert progressions_of(name) == expected


def test_a_plane_stride_above_the_pitch_limit_is_given_as_layers_of_short_rows() -> None:
    piece, step = 16384, 184_000 * 16384  # 2.8 GiB between layers
    planes = [PlacedPlane(0, (1 << 40) + i * step, i * piece, piece, piece) for i in range(32)]
    (copy,) = CopyPlanner(planes, MAX_PITCH).plan(np.array([4096], np.uint64), np.array([[5]], np.int32))
    assert (copy["width"], copy["height"], copy["depth"]) == (piece, 1, 32)
    assert (copy["device_row"], copy["device_layer"]) == (piece, 184_000)
    assert (copy["host_row"], copy["host_layer"]) == (piece, 1)
    assert copy["device"] == (1 << 40) + 5 * piece


def test_shares_of_two_requests_in_turn_are_what_each_is_alone() -> None:
    bases = [5 << 30, 3 << 30, 9 << 30, 1 << 30]  # a later layer may lie below an earlier one
    planes = [PlacedPlane(i, base, i * 4096, 4096, 4096) for i, base in enumerate(bases)]
    planner = CopyPlanner(planes, MAX_PITCH)
    slabs = np.array([1 << 20, 3 << 20], np.uint64)
    tables = [np.array(t, np.int32) for t in ([[7, 2], [5, 6]], [[1, 9], [0, 4]])]
    turns = [[planner.plan(slabs, table, Share(part, 2)) for table in tables] for part in range(2)]
    for table, parts in zip(tables, zip(*turns, strict=True), strict=True):
        wanted = {
            (int(slabs[chunk]) + 2 * i * 4096 + at * 4096, base + int(block) * 4096)
            for i, base in enumerate(bases)
            for (chunk, at), block in np.ndenumerate(table)
        }
        rows = [row for part in parts for copy in part for row in _rows_of_a_block(copy)]
        assert len(rows) == len(wanted)
        assert set(rows) == wanted


def _rows_of_a_block(copy: np.void) -> list[tuple[int, int]]:
    assert copy["height"] == copy["depth"] == 1
    return [(int(copy["host"]) + at, int(copy["device"]) + at) for at in range(0, int(copy["width"]), 4096)]


def test_a_flat_copy_never_exceeds_a_row_the_driver_takes() -> None:
    piece = 64 << 20
    planes = [PlacedPlane(0, 1 << 40, 0, piece, piece)]
    table = np.arange(64, dtype=np.int32).reshape(1, 64)  # 4 GiB in one run
    copies = CopyPlanner(planes, MAX_PITCH).plan(np.array([4096], np.uint64), table)
    assert len(copies) == 1
    assert copies[0]["width"] <= MAX_PITCH
    assert int(copies[0]["width"]) * int(copies[0]["height"]) == 64 * piece
