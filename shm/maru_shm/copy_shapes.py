"""Which strided copies move a request's KV between slabs and a paged cache: pure arithmetic, no driver.

A slab is plane-major (``maru_shm/geometry.py``)::

    slab = plane 0: block 0 | block 1 | … ; plane 1: block 0 | …

A descriptor has three levels, ``address = base + (z * layer + y) * row + x``, nested alike on both sides, or is one flat
row. What they cost on PCIe 5 x16 (H200, driver 580) beside their bytes at 55 GB/s decides which are used:

=====================  =======================================================================================
a pitched descriptor   about 3 µs of the copy engine, however many rows it has
a row of it that lies  0.4 µs more beside an engine that decodes: 39 GB/s for rows of 64 KiB that make 52 on an idle
far from the last one  GPU. Translations of host addresses miss; rows that follow each other on the host do not slow down
a flat row             0.05 µs of the copy engine, and 1 µs of CPU beside it: hidden behind rows of 64 KiB, below 28 KiB
                       1 µs in all or little more, in calls of 256 (``cuda/driver.py``)
=====================  =======================================================================================

The blocks to copy are first gathered into *runs* that step evenly in the slabs and in the cache:

- *rows*: neighbours within a chunk. Where a plane's blocks lie side by side in the cache, such a run is one flat row.
- *columns*: the i-th blocks of many chunks, where slabs and blocks step evenly and the same way from chunk to chunk. vLLM frees
  a request's blocks last first, so a later request gets them in falling order, and a pitch cannot be negative; but sidecars
  fill regions from the top, so the slabs of a prompt fall too, and 64 such chunks of 16 blocks are 16 columns. Worth it for
  pieces below 32 KiB.

A run of ``k`` blocks over a progression of ``n`` planes then becomes ``n`` *plane copies* (one per plane, rows are blocks),
``k`` *block copies* (one per block, layers are planes) or ``n * k`` single rows, whichever costs least. A *progression* is a
set of planes of one allocation with equal piece and block stride whose places step evenly in the slab and in the cache: all
layers of one backing buffer, say, or all K planes where K and V alternate unevenly. Planes that fit in none are progressions
of one. So are layers with an allocation each: the driver refuses a copy that reaches from one allocation into another,
adjacent or not.

In a block copy the stride from plane to plane is ``row * layer`` with a short row: a stride above 2 GiB given as a row pitch
fell to 18 GB/s, given as layers it made no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maru_shm.geometry import WHOLE, KvLayout, Share

#: One strided copy. ``host`` and ``device`` are start addresses, ``width`` is in bytes, ``*_row`` are row pitches in bytes,
#: ``*_layer`` the rows from one layer to the next. Whether host or device is the source is the direction's business.
COPY = np.dtype(
    [
        ("host", "<u8"),
        ("device", "<u8"),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
        ("host_row", "<u8"),
        ("host_layer", "<u8"),
        ("device_row", "<u8"),
        ("device_layer", "<u8"),
    ]
)
Copies = npt.NDArray[np.void]
#: ``count`` blocks of a plane at offset 0: slab addresses step by ``host_step`` bytes, ids by ``id_step``, both upwards.
_RUN = np.dtype([("host", "<u8"), ("id", "<u8"), ("count", "<u8"), ("host_step", "<u8"), ("id_step", "<u8")])
Runs = npt.NDArray[np.void]

_PITCHED_US = 3.0
_FLAT_US = 0.25  #: the CPU's part overlaps with the copies, so it is not counted in full: pitched from 13 rows of 32 KiB on
_SHORT_US = 1.0  #: a flat row below ``_SHORT``
_FAR_US = 0.4  #: a row of a pitched copy, megabytes away from its neighbours on the host
_SHORT = 32 << 10
#: Longest run written as one flat row: far below the pitch limit of every device (2 GiB - 1).
_FLAT_LIMIT = 1 << 30
#: Interleaved progressions tried: K and V of a layer (2), and up to four kinds of planes that repeat per layer.
_PERIODS = (1, 2, 3, 4)
_ROW_SEARCH = 4096


class PlacedPlane(NamedTuple):
    """A plane, or an even part of its pieces, where this process sees it. All in bytes."""

    allocation: int  #: which imported allocation; a copy never spans two
    device: int  #: address of block 0's piece
    slab_offset: int  #: of the whole plane in a slab, per block of the slab: the pieces of one block over the planes before it
    block_stride: int
    piece: int
    slab_step: int = 0  #: from block to block in the slab, if not ``piece``: the whole plane's piece
    within: int = 0  #: where this part begins in the whole plane's piece

    @property
    def step(self) -> int:
        return self.slab_step or self.piece


@dataclass(frozen=True, slots=True)
class Progression:
    """``count`` planes, the i-th at ``slab_offset + i * slab_stride`` in a slab and ``device + i * device_stride``."""

    slab_offset: int
    slab_stride: int
    slab_step: int
    device: int
    device_stride: int
    count: int
    piece: int
    block_stride: int


def place(layout: KvLayout, bases: Sequence[int], allocations: Sequence[int]) -> list[PlacedPlane]:
    """The layout's planes in slab order. ``bases``: the address of each region in this process; ``allocations``: the same
    number for regions of one allocation."""
    placed: list[PlacedPlane] = []
    slab_offset = 0
    for plane in layout.planes:
        address = bases[plane.region] + plane.offset
        placed.append(PlacedPlane(allocations[plane.region], address, slab_offset, plane.block_stride, plane.piece_bytes))
        slab_offset += plane.piece_bytes
    return placed


def progressions(planes: Sequence[PlacedPlane], per_chunk: int) -> list[Progression]:
    """Cover ``planes`` with few progressions, for slabs of ``per_chunk`` blocks."""
    alike: dict[tuple[int, int, int, int], list[PlacedPlane]] = {}
    for plane in planes:
        alike.setdefault((plane.allocation, plane.block_stride, plane.piece, plane.step), []).append(plane)
    found: list[Progression] = []
    for kind in sorted(alike):  # by allocation first
        members = alike[kind]
        covers = [[p for start in range(period) for p in _steps(members[start::period], per_chunk)] for period in _PERIODS]
        fewest: list[Progression] = min(covers, key=len)
        found += fewest
    return found


def _steps(planes: Sequence[PlacedPlane], per_chunk: int) -> list[Progression]:
    """Consecutive planes cut into maximal progressions."""
    places = [per_chunk * p.slab_offset + p.within for p in planes]
    out: list[Progression] = []
    at = 0
    while at < len(planes):
        first = planes[at]
        slab_stride = device_stride = 0
        end = at + 1
        if end < len(planes):
            slab_stride, device_stride = places[end] - places[at], planes[end].device - first.device
        if slab_stride >= first.piece and device_stride >= first.piece:
            while (
                end < len(planes)
                and places[end] - places[end - 1] == slab_stride
                and planes[end].device - planes[end - 1].device == device_stride
            ):
                end += 1
        else:
            slab_stride = device_stride = 0
        out.append(
            Progression(
                places[at], slab_stride, first.step, first.device, device_stride, end - at, first.piece, first.block_stride
            )
        )
        at = end
    return out


class _Axis(NamedTuple):
    """A stride written as rows per layer: ``row * layer == stride``."""

    row: int
    layer: int


def _as_layers(stride: int, width: int, prefer: int, max_pitch: int) -> _Axis | None:
    """Write ``stride`` as ``row * layer`` with ``width <= row <= max_pitch``, ``prefer`` if it divides. None: cannot."""
    for row in (prefer, width):
        if width <= row <= max_pitch and stride % row == 0:
            return _Axis(row, stride // row)
    if width <= stride <= max_pitch:
        return _Axis(stride, 1)
    least = -(-stride // max_pitch)
    for layer in range(least, min(stride // width, least + _ROW_SEARCH) + 1):
        if stride % layer == 0:
            return _Axis(stride // layer, layer)
    return None


def _flat_us(width: int) -> float:
    return _FLAT_US if width >= _SHORT else _SHORT_US


@dataclass(frozen=True, slots=True)
class Kind:
    """What the runs of a progression depend on: equal for most planes of a cache, so runs are found once."""

    slab_step: int
    block_stride: int
    piece: int

    @property
    def adjacent(self) -> bool:
        """Whether blocks that are neighbours on both sides make one flat row."""
        return self.slab_step == self.piece == self.block_stride

    def row_us(self, count: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
        """Of row runs of ``count`` blocks in one plane."""
        singles = count.astype(np.float64) * _flat_us(self.piece)
        one = np.full(len(count), _PITCHED_US)
        if self.adjacent:
            one = np.where(count * np.uint64(self.piece) >= _SHORT, _FLAT_US, _SHORT_US)
        cheaper: npt.NDArray[np.float64] = np.minimum(singles, one)
        return cheaper


@dataclass(frozen=True, slots=True)
class _Shape:
    """A progression with the pitches of its block copy worked out."""

    of: Progression
    kind: Kind
    block: tuple[_Axis, _Axis] | None  #: slab and cache, for the block copy; None: planes one by one


class HostPieces(NamedTuple):
    """Host memory page-locked in pieces: they begin at ``base`` and every ``size`` bytes from there; 0: in one."""

    base: int
    size: int


ONE_PIECE = HostPieces(0, 0)


class CopyPlanner:
    """Turns block tables into copies for one imported cache.

    ``max_pitch``: the device's limit on a row, in bytes. ``pieces``: no copy reaches from one into the next, which the driver
    refuses (CUDA_ERROR_INVALID_VALUE).
    """

    def __init__(self, planes: Sequence[PlacedPlane], max_pitch: int, pieces: HostPieces = ONE_PIECE) -> None:
        self._planes = list(planes)
        self._max_pitch = max_pitch
        self._pieces = pieces
        self._groups: dict[int, list[list[_Shape]]] = {}
        #: allocations the planes lie in; a request can be planned for some of them at a time
        self.allocations = len({p.allocation for p in planes})

    def _shapes(self, per_chunk: int) -> list[list[_Shape]]:
        """By allocation."""
        known = self._groups.get(per_chunk)
        if known is None:
            by_allocation: dict[int, list[PlacedPlane]] = {}
            for plane in self._planes:
                by_allocation.setdefault(plane.allocation, []).append(plane)
            known = [[self._shape(p) for p in progressions(planes, per_chunk)] for planes in by_allocation.values()]
            self._groups[per_chunk] = known
        return known

    def _shape(self, p: Progression) -> _Shape:
        block = None
        if p.count > 1:
            slab = _as_layers(p.slab_stride, p.piece, p.slab_stride, self._max_pitch)
            cache = _as_layers(p.device_stride, p.piece, p.block_stride, self._max_pitch)
            block = (slab, cache) if slab is not None and cache is not None else None
        return _Shape(p, Kind(p.slab_step, p.block_stride, p.piece), block)

    def plan(
        self,
        slabs: npt.NDArray[np.uint64],
        blocks: npt.NDArray[np.int32],
        share: Share = WHOLE,
        known: dict[Kind, Runs] | None = None,
    ) -> Copies:
        """Copies for ``n`` chunks; none overlaps another. Those of one allocation follow each other: the driver likes it so.

        ``slabs``: shape (n,), the address of each slab's data. ``blocks``: shape (n, blocks per chunk), block ids; a
        negative id copies nothing. ``share``: of the allocations. ``known``: runs found before for the same slabs and blocks,
        by a planner with the same limit; those found now are added.
        """
        groups = self._shapes(blocks.shape[1])
        runs = {} if known is None else known
        out: list[Copies] = []
        for shape in (shape for group in groups[share.of(len(groups))] for shape in group):
            if shape.kind not in runs:
                runs[shape.kind] = self._runs(shape.kind, slabs.astype(np.uint64), blocks.astype(np.int64))
            out += self._of(shape, runs[shape.kind])
        return _cut(np.concatenate(out), self._pieces) if out else np.empty(0, COPY)

    # --- runs -----------------------------------------------------------------------------------------------------------------
    def _runs(self, kind: Kind, slabs: npt.NDArray[np.uint64], ids: npt.NDArray[np.int64]) -> Runs:
        hosts = slabs[:, None] + np.arange(ids.shape[1], dtype=np.uint64) * np.uint64(kind.slab_step)
        wanted = ids >= 0
        pitchable = kind.slab_step <= self._max_pitch and kind.block_stride <= self._max_pitch
        rows, chunk = _rows(hosts, ids, wanted, kind.slab_step)
        if not pitchable:
            return _singles(rows)
        row_us: npt.NDArray[np.float64] = np.bincount(chunk, kind.row_us(rows["count"]), len(ids)).astype(np.float64)
        columns = self._columns(kind, slabs, ids, row_us)
        if not columns:
            return rows
        for first, last in columns:
            wanted[first : last + 1] = False
        rows, _ = _rows(hosts, ids, wanted, kind.slab_step)
        return np.concatenate([rows, *(_column_runs(hosts, ids, first, last) for first, last in columns)])

    def _columns(
        self, kind: Kind, slabs: npt.NDArray[np.uint64], ids: npt.NDArray[np.int64], row_us: npt.NDArray[np.float64]
    ) -> list[tuple[int, int]]:
        """Spans of chunks (first, last) that cost less in columns than in rows. They do not overlap."""
        if len(ids) < 2:
            return []
        id_steps = np.diff(ids, axis=0)
        host_step = np.diff(slabs.astype(np.int64))
        step = id_steps[:, 0]
        even = (
            (id_steps == step[:, None]).all(axis=1)
            & (ids[:-1] >= 0).all(axis=1)
            & (ids[1:] >= 0).all(axis=1)
            & (np.sign(step) * np.sign(host_step) > 0)
            & (np.abs(host_step) <= self._max_pitch)
            & (np.abs(step) <= self._max_pitch // kind.block_stride)
        )
        if not even.any():
            return []
        before = np.concatenate([[0.0], np.cumsum(row_us)])
        changes = np.flatnonzero((np.diff(step) != 0) | (np.diff(host_step) != 0) | (np.diff(even) != 0)) + 1
        found: list[tuple[int, int]] = []
        free = 0  # first chunk in no span
        for start, last in zip(np.append(0, changes).tolist(), np.append(changes, len(step)).tolist(), strict=True):
            first = max(start, free)
            if even[start] and first < last:
                column_us = ids.shape[1] * (_PITCHED_US + (last + 1 - first) * _FAR_US)
                if column_us < before[last + 1] - before[first]:
                    found.append((first, last))
                    free = last + 1
        return found

    # --- copies ---------------------------------------------------------------------------------------------------------------
    def _of(self, shape: _Shape, runs: Runs) -> list[Copies]:
        """The copies of one progression: each run in its cheapest form."""
        p, kind = shape.of, shape.kind
        count = runs["count"].astype(np.float64)
        contiguous = (runs["host_step"] == p.piece) & (runs["id_step"] * np.uint64(p.block_stride) == p.piece)
        contiguous &= count * p.piece <= _FLAT_LIMIT
        wide = np.where(count * p.piece >= _SHORT, _FLAT_US, _SHORT_US)
        far = np.where(runs["host_step"] == p.slab_step, 0.0, _FAR_US)
        plane_us = p.count * np.where(contiguous, wide, _PITCHED_US + count * far)
        single_us = p.count * count * _flat_us(kind.piece)
        block_us = count * (_PITCHED_US + p.count * _FAR_US) if shape.block is not None else np.full(len(runs), np.inf)
        as_blocks = (block_us < plane_us) & (block_us < single_us)
        as_singles = ~as_blocks & (single_us < plane_us)
        as_planes = ~as_blocks & ~as_singles
        parts: list[Copies] = []
        if as_planes.any():
            parts.append(_plane_copies(p, runs[as_planes], contiguous[as_planes]))
        if as_singles.any():
            singles = _singles(runs[as_singles])
            parts.append(_plane_copies(p, singles, np.ones(len(singles), bool)))
        if shape.block is not None and as_blocks.any():
            parts.append(_block_copies(p, *shape.block, _singles(runs[as_blocks])))
        return parts


def _rows(
    hosts: npt.NDArray[np.uint64], ids: npt.NDArray[np.int64], wanted: npt.NDArray[np.bool_], step: int
) -> tuple[Runs, npt.NDArray[np.int64]]:
    """Maximal runs in which slab bytes and block ids both step to their next neighbour, and the chunk each begins in.

    Falling ids never make one: a pitch cannot be negative.
    """
    chunks = np.nonzero(wanted)[0]
    hosts, ids = hosts[wanted], ids[wanted]
    if not len(ids):
        return np.empty(0, _RUN), chunks
    breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(hosts) != np.uint64(step))) + 1
    starts = np.concatenate([np.zeros(1, np.int64), breaks])
    runs = np.empty(len(starts), _RUN)
    runs["host"], runs["id"] = hosts[starts], ids[starts]
    runs["count"] = np.diff(np.append(starts, len(ids)))
    runs["host_step"], runs["id_step"] = step, 1
    return runs, chunks[starts]


def _column_runs(hosts: npt.NDArray[np.uint64], ids: npt.NDArray[np.int64], first: int, last: int) -> Runs:
    """One run per column of a span, from the end where both addresses are lowest."""
    low, high = (first, last) if hosts[first, 0] < hosts[last, 0] else (last, first)
    inner = first + 1 if low == first else last - 1
    runs = np.empty(ids.shape[1], _RUN)
    runs["host"], runs["id"] = hosts[low], ids[low]
    runs["count"] = abs(high - low) + 1
    runs["host_step"] = hosts[inner, 0] - hosts[low, 0]
    runs["id_step"] = ids[inner, 0] - ids[low, 0]
    return runs


def _singles(runs: Runs) -> Runs:
    """The same blocks, one per run."""
    counts = runs["count"].astype(np.int64)
    out = np.repeat(runs, counts)
    at = (np.arange(len(out)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    out["host"] += at * out["host_step"]
    out["id"] += at * out["id_step"]
    out["count"] = 1
    return out


def _plane_copies(p: Progression, runs: Runs, flat: npt.NDArray[np.bool_]) -> Copies:
    """Every plane × every run: rows are blocks, or all of a ``flat`` run is one row."""
    out = np.zeros((p.count, len(runs)), COPY)
    planes = np.arange(p.count, dtype=np.uint64)[:, None]
    out["host"] = runs["host"] + np.uint64(p.slab_offset) + planes * np.uint64(p.slab_stride)
    out["device"] = runs["id"] * np.uint64(p.block_stride) + np.uint64(p.device) + planes * np.uint64(p.device_stride)
    one, piece = np.uint64(1), np.uint64(p.piece)
    flat = flat | (runs["count"] == one)
    out["width"] = np.where(flat, runs["count"] * piece, piece)
    out["height"] = np.where(flat, one, runs["count"])
    out["depth"] = 1
    out["host_row"] = np.where(flat, out["width"], runs["host_step"])
    out["device_row"] = np.where(flat, out["width"], runs["id_step"] * np.uint64(p.block_stride))
    out["host_layer"] = out["device_layer"] = out["height"]
    return out.reshape(-1)


def _block_copies(p: Progression, slab: _Axis, cache: _Axis, runs: Runs) -> Copies:
    """One copy per block: layers are planes."""
    out = np.zeros(len(runs), COPY)
    out["host"] = runs["host"] + np.uint64(p.slab_offset)
    out["device"] = runs["id"] * np.uint64(p.block_stride) + np.uint64(p.device)
    out["width"] = p.piece
    out["height"] = 1
    out["depth"] = p.count
    out["host_row"], out["host_layer"] = slab
    out["device_row"], out["device_layer"] = cache
    return out


def _cut(copies: Copies, pieces: HostPieces) -> Copies:
    """The same copies, those that would reach from one piece of host memory into another as rows within one."""
    if not pieces.size:
        return copies
    base, size, one = np.uint64(pieces.base), np.uint64(pieces.size), np.uint64(1)
    layers = (copies["depth"] - one) * copies["host_layer"] + copies["height"] - one
    last = copies["host"] + layers * copies["host_row"] + copies["width"] - one
    crossing = (copies["host"] - base) // size != (last - base) // size
    if not crossing.any():
        return copies
    out, rows = [copies[~crossing]], as_rows(copies[crossing])
    while len(rows):
        room = size - (rows["host"] - base) % size
        head = rows.copy()
        head["width"] = head["host_row"] = head["device_row"] = np.minimum(rows["width"], room)
        out.append(head)
        more = rows["width"] > room
        rows, room = rows[more], room[more]
        for field in ("host", "device"):
            rows[field] += room
        rows["width"] -= room
    return np.concatenate(out)


def as_rows(copies: Copies) -> Copies:
    """Every row a copy of its own."""
    counts = (copies["depth"] * copies["height"]).astype(np.int64)
    out = np.repeat(copies, counts)
    at = (np.arange(len(out)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    z, y = at // out["height"], at % out["height"]
    for side in ("host", "device"):
        out[side] += (z * out[f"{side}_layer"] + y) * out[f"{side}_row"]
        out[f"{side}_row"], out[f"{side}_layer"] = out["width"], 1
    out["height"] = out["depth"] = 1
    return out
