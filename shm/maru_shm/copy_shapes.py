"""Which strided copies move a request's KV between slabs and a paged cache: pure arithmetic, no driver.

On PCIe 5 x16 (H200) the copy engine takes about 3 µs per descriptor plus the bytes at 55 GB/s: the fewer descriptors the
better, and a piece should never be one of its own (a batch of 16 KiB pieces reached 5 GB/s). A slab is block-major::

    slab = block 0: plane 0 | plane 1 | … ; block 1: plane 0 | …

A descriptor has three levels, ``address = base + (z * layer + y) * row + x``, nested alike on both sides. The slab nests planes
inside blocks, the cache blocks inside planes, so one copy can span planes or blocks, not both:

- *block copy*: one block, all planes of a progression. One descriptor per block.
- *plane copy*: one plane, a run of blocks that are neighbours in slab and cache. One descriptor per plane and run.

A run of ``k`` blocks over ``n`` planes takes the smaller of ``k`` and ``n`` descriptors. A *progression* is a set of planes of
one allocation with equal piece and block stride whose places step evenly in the slab and in the cache: all layers of one
backing buffer, say, or all K planes where K and V alternate unevenly. Planes that fit in none are progressions of one. So are
layers with an allocation each: the driver refuses a copy that reaches from one allocation into another, adjacent or not.

In a block copy the stride from plane to plane is ``row * layer`` with a short row: a stride above 2 GiB given as a row pitch
fell to 18 GB/s, given as layers it made no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maru_shm.geometry import KvLayout

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

#: Longest run written as one flat row: far below the pitch limit of every device (2 GiB - 1).
_FLAT_LIMIT = 1 << 30
#: Interleaved progressions tried: K and V of a layer (2), and up to four kinds of planes that repeat per layer.
_PERIODS = (1, 2, 3, 4)
_ROW_SEARCH = 4096


class PlacedPlane(NamedTuple):
    """A plane where this process sees it. All in bytes; ``device`` is the address of block 0's piece."""

    allocation: int  #: which imported allocation; a copy never spans two
    device: int
    slab_offset: int  #: of the piece within a block's bytes
    block_stride: int
    piece: int


@dataclass(frozen=True, slots=True)
class Progression:
    """``count`` planes, the i-th at ``slab_offset + i * slab_stride`` in a block's bytes and ``device + i * device_stride``."""

    slab_offset: int
    slab_stride: int
    device: int
    device_stride: int
    count: int
    piece: int
    block_stride: int


def place(layout: KvLayout, bases: Sequence[int], allocations: Sequence[int]) -> list[PlacedPlane]:
    """The layout's planes in slab order. ``bases``: the address of each region in this process; ``allocations``: the same
    number for regions of one allocation.

    Neighbours that are contiguous in the cache too become one wider plane.
    """
    placed: list[PlacedPlane] = []
    slab_offset = 0
    for plane in layout.planes:
        address = bases[plane.region] + plane.offset
        last = placed[-1] if placed else None
        if (
            last is not None
            and last.allocation == allocations[plane.region]
            and last.block_stride == plane.block_stride
            and last.device + last.piece == address
            and last.piece + plane.piece_bytes <= plane.block_stride
        ):
            placed[-1] = last._replace(piece=last.piece + plane.piece_bytes)
        else:
            placed.append(PlacedPlane(allocations[plane.region], address, slab_offset, plane.block_stride, plane.piece_bytes))
        slab_offset += plane.piece_bytes
    return placed


def progressions(planes: Sequence[PlacedPlane]) -> list[Progression]:
    """Cover ``planes`` with few progressions."""
    alike: dict[tuple[int, int, int], list[PlacedPlane]] = {}
    for plane in planes:
        alike.setdefault((plane.allocation, plane.block_stride, plane.piece), []).append(plane)
    found: list[Progression] = []
    for kind in sorted(alike):  # by allocation first
        members = alike[kind]
        covers = [[p for start in range(period) for p in _steps(members[start::period])] for period in _PERIODS]
        fewest: list[Progression] = min(covers, key=len)
        found += fewest
    return found


def _steps(planes: Sequence[PlacedPlane]) -> list[Progression]:
    """Consecutive planes cut into maximal progressions."""
    out: list[Progression] = []
    at = 0
    while at < len(planes):
        first = planes[at]
        slab_step = device_step = 0
        end = at + 1
        if end < len(planes):
            slab_step = planes[end].slab_offset - first.slab_offset
            device_step = planes[end].device - first.device
        if slab_step >= first.piece and device_step >= first.piece:
            while (
                end < len(planes)
                and planes[end].slab_offset - planes[end - 1].slab_offset == slab_step
                and planes[end].device - planes[end - 1].device == device_step
            ):
                end += 1
        else:
            slab_step = device_step = 0
        out.append(
            Progression(first.slab_offset, slab_step, first.device, device_step, end - at, first.piece, first.block_stride)
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


@dataclass(frozen=True, slots=True)
class _Shape:
    """A progression with the pitches of both its copies worked out."""

    of: Progression
    block: tuple[_Axis, _Axis] | None  #: slab and cache, for the block copy; None: planes one by one
    rows: bool  #: plane copies may use rows (both pitches within the limit)


class CopyPlanner:
    """Turns block tables into copies for one imported cache.

    ``block_bytes``: bytes of a block in a slab; ``max_pitch``: the device's limit on a row, in bytes.
    """

    def __init__(self, planes: Sequence[PlacedPlane], block_bytes: int, max_pitch: int) -> None:
        self.block_bytes = block_bytes
        shapes: list[_Shape] = []
        for p in progressions(planes):
            slab = _as_layers(p.slab_stride, p.piece, p.slab_stride, max_pitch) if p.count > 1 else None
            cache = _as_layers(p.device_stride, p.piece, p.block_stride, max_pitch) if p.count > 1 else None
            block = (slab, cache) if slab is not None and cache is not None else None
            shapes.append(_Shape(p, block, rows=block_bytes <= max_pitch and p.block_stride <= max_pitch))
        self._shapes = shapes

    @property
    def progressions(self) -> int:
        return len(self._shapes)

    def plan(self, slabs: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int32]) -> Copies:
        """Copies for ``n`` chunks; none overlaps another. Those of one allocation follow each other: the driver likes it so.

        ``slabs``: shape (n,), the address of each slab's data. ``blocks``: shape (n, blocks per chunk), block ids; a
        negative id copies nothing.
        """
        per_chunk = blocks.shape[1]
        steps = np.arange(per_chunk, dtype=np.uint64) * np.uint64(self.block_bytes)
        hosts = (slabs.astype(np.uint64)[:, None] + steps).reshape(-1)
        ids = blocks.astype(np.int64).reshape(-1)
        wanted = ids >= 0
        if not wanted.all():
            hosts, ids = hosts[wanted], ids[wanted]
        if not len(ids):
            return np.empty(0, COPY)
        # A run: slab bytes and block ids both step to their next neighbour. Falling ids (a free list taken back in reverse)
        # never make one: a pitch cannot be negative.
        breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(hosts) != np.uint64(self.block_bytes))) + 1
        starts = np.concatenate([np.zeros(1, np.int64), breaks])
        lengths = np.diff(np.append(starts, len(ids)))
        parts = [part for shape in self._shapes for part in self._of(shape, hosts, ids, starts, lengths)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _of(
        self,
        shape: _Shape,
        hosts: npt.NDArray[np.uint64],
        ids: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> list[Copies]:
        p = shape.of
        if not shape.rows:
            lengths = np.ones(len(ids), np.int64)
            starts = np.arange(len(ids))
        as_planes = lengths >= p.count if shape.block is not None else np.ones(len(lengths), bool)
        parts: list[Copies] = []
        if as_planes.any():
            parts.append(self._plane_copies(p, hosts, ids, starts[as_planes], lengths[as_planes]))
        if shape.block is not None and not as_planes.all():
            chosen = np.repeat(~as_planes, lengths)
            parts.append(_block_copies(p, *shape.block, hosts[chosen], ids[chosen]))
        return parts

    def _plane_copies(
        self,
        p: Progression,
        hosts: npt.NDArray[np.uint64],
        ids: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> Copies:
        """Every plane × every run: rows are blocks."""
        out = np.zeros((len(starts), p.count), COPY)
        planes = np.arange(p.count, dtype=np.uint64)
        run = lengths.astype(np.uint64)[:, None]
        out["host"] = hosts[starts][:, None] + np.uint64(p.slab_offset) + planes * np.uint64(p.slab_stride)
        first = ids[starts].astype(np.uint64)[:, None] * np.uint64(p.block_stride)
        out["device"] = first + np.uint64(p.device) + planes * np.uint64(p.device_stride)
        out["depth"] = 1
        flat = (p.piece == self.block_bytes == p.block_stride) & (run * np.uint64(p.piece) <= np.uint64(_FLAT_LIMIT))
        out["width"] = np.where(flat, run * np.uint64(p.piece), np.uint64(p.piece))
        out["height"] = np.where(flat, np.uint64(1), run)
        one = out["height"] == 1
        out["host_row"] = np.where(one, out["width"], np.uint64(self.block_bytes))
        out["device_row"] = np.where(one, out["width"], np.uint64(p.block_stride))
        out["host_layer"] = out["device_layer"] = out["height"]
        return out.reshape(-1)


def _block_copies(
    p: Progression, slab: _Axis, cache: _Axis, hosts: npt.NDArray[np.uint64], ids: npt.NDArray[np.int64]
) -> Copies:
    """One copy per block: layers are planes."""
    out = np.zeros(len(ids), COPY)
    out["host"] = hosts + np.uint64(p.slab_offset)
    out["device"] = ids.astype(np.uint64) * np.uint64(p.block_stride) + np.uint64(p.device)
    out["width"] = p.piece
    out["height"] = 1
    out["depth"] = p.count
    out["host_row"], out["host_layer"] = slab
    out["device_row"], out["device_layer"] = cache
    return out
