"""Blocks that step evenly in the slabs and in the cache, gathered into runs; and what copies cost, which decides how.

- *rows*: neighbours within a chunk. Where a plane's blocks lie side by side in the cache, such a run is one flat row.
- *columns*: the i-th blocks of many chunks, where slabs and blocks step evenly and the same way from chunk to chunk. vLLM frees
  a request's blocks last first, so a later request gets them in falling order, and a pitch cannot be negative; but sidecars
  fill regions from the top, so the slabs of a prompt fall too, and 64 such chunks of 16 blocks are 16 columns. Worth it for
  pieces below 32 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: ``count`` blocks of a plane at offset 0: slab addresses step by ``host_step`` bytes, ids by ``id_step``, both upwards.
RUN = np.dtype([("host", "<u8"), ("id", "<u8"), ("count", "<u8"), ("host_step", "<u8"), ("id_step", "<u8")])
Runs = npt.NDArray[np.void]
Offsets = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

PITCHED_US = 3.0
FLAT_US = 0.25  #: the CPU's part overlaps with the copies, so it is not counted in full: pitched from 13 rows of 32 KiB on
SHORT_US = 1.0  #: a flat row below ``SHORT``
FAR_US = 0.4  #: a row of a pitched copy, megabytes away from its neighbours on the host
SHORT = 32 << 10


def flat_us(width: int) -> float:
    return FLAT_US if width >= SHORT else SHORT_US


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
        singles = count.astype(np.float64) * flat_us(self.piece)
        one = np.full(len(count), PITCHED_US)
        if self.adjacent:
            one = np.where(count * np.uint64(self.piece) >= SHORT, FLAT_US, SHORT_US)
        cheaper: npt.NDArray[np.float64] = np.minimum(singles, one)
        return cheaper


def find_runs(kind: Kind, slabs: Offsets, ids: Ids, max_pitch: int) -> Runs:
    """The runs of ``n`` chunks, whose slabs begin at ``slabs`` (n,) and hold blocks ``ids`` (n, blocks per chunk).

    Columns where they cost less than rows; no run at all takes a pitch beyond ``max_pitch``.
    """
    hosts = slabs[:, None] + np.arange(ids.shape[1], dtype=np.uint64) * np.uint64(kind.slab_step)
    wanted = ids >= 0
    pitchable = kind.slab_step <= max_pitch and kind.block_stride <= max_pitch
    rows, chunk = _rows(hosts, ids, wanted, kind.slab_step)
    if not pitchable:
        return singles(rows)
    row_us: npt.NDArray[np.float64] = np.bincount(chunk, kind.row_us(rows["count"]), len(ids)).astype(np.float64)
    columns = _columns(kind, slabs, ids, row_us, max_pitch)
    if not columns:
        return rows
    for first, last in columns:
        wanted[first : last + 1] = False
    rows, _ = _rows(hosts, ids, wanted, kind.slab_step)
    return np.concatenate([rows, *(_column_runs(hosts, ids, first, last) for first, last in columns)])


def _columns(kind: Kind, slabs: Offsets, ids: Ids, row_us: npt.NDArray[np.float64], max_pitch: int) -> list[tuple[int, int]]:
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
        & (np.abs(host_step) <= max_pitch)
        & (np.abs(step) <= max_pitch // kind.block_stride)
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
            column_us = ids.shape[1] * (PITCHED_US + (last + 1 - first) * FAR_US)
            if column_us < before[last + 1] - before[first]:
                found.append((first, last))
                free = last + 1
    return found


def _rows(hosts: npt.NDArray[np.uint64], ids: Ids, wanted: npt.NDArray[np.bool_], step: int) -> tuple[Runs, Ids]:
    """Maximal runs in which slab bytes and block ids both step to their next neighbour, and the chunk each begins in.

    Falling ids never make one: a pitch cannot be negative.
    """
    chunks = np.nonzero(wanted)[0]
    hosts, ids = hosts[wanted], ids[wanted]
    if not len(ids):
        return np.empty(0, RUN), chunks
    breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(hosts) != np.uint64(step))) + 1
    starts = np.concatenate([np.zeros(1, np.int64), breaks])
    runs = np.empty(len(starts), RUN)
    runs["host"], runs["id"] = hosts[starts], ids[starts]
    runs["count"] = np.diff(np.append(starts, len(ids)))
    runs["host_step"], runs["id_step"] = step, 1
    return runs, chunks[starts]


def _column_runs(hosts: npt.NDArray[np.uint64], ids: Ids, first: int, last: int) -> Runs:
    """One run per column of a span, from the end where both addresses are lowest."""
    low, high = (first, last) if hosts[first, 0] < hosts[last, 0] else (last, first)
    inner = first + 1 if low == first else last - 1
    runs = np.empty(ids.shape[1], RUN)
    runs["host"], runs["id"] = hosts[low], ids[low]
    runs["count"] = abs(high - low) + 1
    runs["host_step"] = hosts[inner, 0] - hosts[low, 0]
    runs["id_step"] = ids[inner, 0] - ids[low, 0]
    return runs


def singles(runs: Runs) -> Runs:
    """The same blocks, one per run."""
    counts = runs["count"].astype(np.int64)
    out = np.repeat(runs, counts)
    at = (np.arange(len(out)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    out["host"] += at * out["host_step"]
    out["id"] += at * out["id_step"]
    out["count"] = 1
    return out
