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

The blocks to copy are first gathered into *runs* (``copy_runs.py``), the planes into *progressions* (``placed_planes.py``).

A run of ``k`` blocks over a progression of ``n`` planes then becomes ``n`` *plane copies* (one per plane, rows are blocks),
``k`` *block copies* (one per block, layers are planes) or ``n * k`` single rows, whichever costs least. Layers with an
allocation each are progressions of one: the driver refuses a copy that reaches from one allocation into another, adjacent or
not.

In a block copy the stride from plane to plane is ``row * layer`` with a short row: a stride above 2 GiB given as a row pitch
fell to 18 GB/s, given as layers it made no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maru_shm.copy_runs import (
    FAR_US,
    FLAT_US,
    PITCHED_US,
    SHORT,
    SHORT_US,
    Ids,
    Kind,
    Offsets,
    Runs,
    find_runs,
    flat_us,
    singles,
)
from maru_shm.geometry import WHOLE, Share
from maru_shm.placed_planes import PlacedPlane, Progression, progressions

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
_ROW_SEARCH = 4096


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


class _Stack(NamedTuple):
    """Progressions that differ only in where they begin: what is cheapest for the first is cheapest for all."""

    first: Progression
    kind: Kind
    block: tuple[_Axis, _Axis] | None  #: slab and cache, for the block copy; None: planes one by one
    slabs: Offsets  #: of each from the first, modulo 2 ** 64: some lie below it
    devices: Offsets


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
        self._stacks: dict[tuple[int, Share], list[_Stack]] = {}
        self._last: tuple[Offsets, Ids, dict[Kind, Runs]] = (np.empty(0, np.uint64), np.empty((0, 0), np.int64), {})
        #: allocations the planes lie in; a request can be planned for some of them at a time
        self.allocations = len({p.allocation for p in planes})

    def _stacked(self, per_chunk: int, share: Share) -> list[_Stack]:
        """A share's progressions, allocation after allocation; neighbours of one shape together."""
        known = self._stacks.get((per_chunk, share))
        if known is None:
            by_allocation: dict[int, list[PlacedPlane]] = {}
            for plane in self._planes:
                by_allocation.setdefault(plane.allocation, []).append(plane)
            groups = list(by_allocation.values())[share.of(len(by_allocation))]
            found = (p for planes in groups for p in progressions(planes, per_chunk))
            alike = groupby(found, lambda p: replace(p, slab_offset=0, device=0))
            known = self._stacks[per_chunk, share] = [self._stack(list(members)) for _, members in alike]
        return known

    def _stack(self, members: Sequence[Progression]) -> _Stack:
        p = members[0]
        block = None
        if p.count > 1:
            slab = _as_layers(p.slab_stride, p.piece, p.slab_stride, self._max_pitch)
            cache = _as_layers(p.device_stride, p.piece, p.block_stride, self._max_pitch)
            block = (slab, cache) if slab is not None and cache is not None else None
        slabs = np.array([m.slab_offset - p.slab_offset for m in members]).astype(np.uint64)
        devices = np.array([m.device - p.device for m in members]).astype(np.uint64)
        return _Stack(p, Kind(p.slab_step, p.block_stride, p.piece), block, slabs, devices)

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
        slabs, ids = slabs.astype(np.uint64), blocks.astype(np.int64)
        runs = self._runs_of(slabs, ids) if known is None else known
        out: list[Copies] = []
        for stack in self._stacked(blocks.shape[1], share):
            if stack.kind not in runs:
                runs[stack.kind] = find_runs(stack.kind, slabs, ids, self._max_pitch)
            out.append(_copies(stack, runs[stack.kind]))
        return _cut(_joined(out), self._pieces)

    # --- runs -----------------------------------------------------------------------------------------------------------------
    def _runs_of(self, slabs: npt.NDArray[np.uint64], ids: Ids) -> dict[Kind, Runs]:
        """Those found so far if this was the last request too: its shares follow each other."""
        last_slabs, last_ids, runs = self._last
        if not (np.array_equal(slabs, last_slabs) and np.array_equal(ids, last_ids)):
            runs = {}
            self._last = slabs, ids, runs  # at once: loads and stores are planned by threads of their own
        return runs


def _copies(stack: _Stack, runs: Runs) -> Copies:
    """The copies of a stack, progression after progression."""
    p = stack.first
    steps = np.arange(p.count, dtype=np.uint64)
    slabs, devices = steps * np.uint64(p.slab_stride), steps * np.uint64(p.device_stride)
    by_plane, by_row, by_block = _by_form(stack, runs)
    parts: list[Copies] = []
    if len(by_plane):
        parts.append(_repeated(_plane_copies(p, by_plane), slabs, devices))
    if len(by_row):
        parts.append(_repeated(_plane_copies(p, singles(by_row)), slabs, devices))
    if stack.block is not None and len(by_block):
        parts.append(_block_copies(p, *stack.block, singles(by_block)))
    return _repeated(_joined(parts), stack.slabs, stack.devices)


def _by_form(stack: _Stack, runs: Runs) -> list[Runs]:
    """Each run in its cheapest form: those for plane copies, for single rows and for block copies."""
    p = stack.first
    sample = runs[:1] if (runs["count"] == 1).all() else runs  # single blocks cost alike
    count = sample["count"].astype(np.float64)
    wide = np.where(count * p.piece >= SHORT, FLAT_US, SHORT_US)
    far = np.where(sample["host_step"] == p.slab_step, 0.0, FAR_US)
    plane_us = p.count * np.where(_flat(p, sample), wide, PITCHED_US + count * far)
    single_us = p.count * count * flat_us(p.piece)
    block_us = count * (PITCHED_US + p.count * FAR_US) if stack.block is not None else np.full(len(sample), np.inf)
    as_blocks = (block_us < plane_us) & (block_us < single_us)
    as_singles = ~as_blocks & (single_us < plane_us)
    forms = (~as_blocks & ~as_singles, as_singles, as_blocks)
    return [runs if form.all() else runs[form] if form.any() else runs[:0] for form in forms]


def _flat(p: Progression, runs: Runs) -> npt.NDArray[np.bool_]:
    """Which runs are one row in a plane: single blocks, and those whose pieces lie side by side on both sides."""
    count, piece = runs["count"], np.uint64(p.piece)
    contiguous = (runs["host_step"] == piece) & (runs["id_step"] * np.uint64(p.block_stride) == piece)
    flat: npt.NDArray[np.bool_] = (count == 1) | (contiguous & (count * piece <= _FLAT_LIMIT))
    return flat


def _plane_copies(p: Progression, runs: Runs) -> Copies:
    """Every run in the first plane: rows are blocks, or all of a flat run is one row."""
    out = _at(p, runs)
    flat, one, piece = _flat(p, runs), np.uint64(1), np.uint64(p.piece)
    out["width"] = np.where(flat, runs["count"] * piece, piece)
    out["height"] = np.where(flat, one, runs["count"])
    out["depth"] = 1
    out["host_row"] = np.where(flat, out["width"], runs["host_step"])
    out["device_row"] = np.where(flat, out["width"], runs["id_step"] * np.uint64(p.block_stride))
    out["host_layer"] = out["device_layer"] = out["height"]
    return out


def _block_copies(p: Progression, slab: _Axis, cache: _Axis, runs: Runs) -> Copies:
    """One copy per block: layers are planes."""
    out = _at(p, runs)
    out["width"] = p.piece
    out["height"] = 1
    out["depth"] = p.count
    out["host_row"], out["host_layer"] = slab
    out["device_row"], out["device_layer"] = cache
    return out


def _at(p: Progression, runs: Runs) -> Copies:
    """Copies that begin where the runs do in the first plane, the rest of them to be filled in."""
    out = np.empty(len(runs), COPY)
    out["host"] = runs["host"] + np.uint64(p.slab_offset)
    out["device"] = runs["id"] * np.uint64(p.block_stride) + np.uint64(p.device)
    return out


def _repeated(copies: Copies, slabs: Offsets, devices: Offsets) -> Copies:
    """All copies at every offset. The first offset is 0."""
    if len(slabs) == 1:
        return copies
    out = np.empty((len(slabs), len(copies)), COPY)
    out.view(np.uint64)[:] = copies.view(np.uint64)  # whole rows: six times as fast as field by field
    out["host"] += slabs[:, None]
    out["device"] += devices[:, None]
    return out.reshape(-1)


def _joined(parts: list[Copies]) -> Copies:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, COPY), *parts])


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
