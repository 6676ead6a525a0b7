"""Where the planes of a KV cache lie in one process, and which of them step evenly, for :mod:`~maru_shm.copy_shapes`.

A *progression* is a set of planes of one allocation with equal piece and block stride whose places step evenly in the slab
and in the cache: all layers of one backing buffer, say, or all K planes where K and V alternate unevenly. Planes that fit in
none are progressions of one, as are layers with an allocation each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maru_shm.geometry import KvLayout

#: Interleaved progressions tried: K and V of a layer (2), and up to four kinds of planes that repeat per layer.
_PERIODS = (1, 2, 3, 4)


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
