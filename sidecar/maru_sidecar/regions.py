"""Regions and slabs on the mapping: formatting, allocation, and the two-phase commit of one slab.

Nothing here knows keys or policies. :class:`RegionTable` is driven by ``directory.py`` under its lock, except for
:meth:`RegionTable.write_header`, which touches one slab that its writer owns alone.

A *slab* is named by the offset of its header from the pool's start (one int: the index keeps one per chunk and rank).
Slabs of one stride form a *size class*. Allocation takes the lowest region of the class that has room, so that the others
run empty; an empty region belongs to no class and may be formatted for another. Within a region slabs are taken from the top,
so those of one prompt fall in address as its chunks go on: ``maru_shm/copy_shapes.py`` says why. Eviction frees the end of a
prompt first and what was freed last is taken first, so it stays so when slabs are taken again.

State words go through a ``memoryview.cast("Q")`` of the whole pool: one aligned ``mov``, where a numpy structured assignment
may copy by bytes and tear. Everything else in a header is written while the state says WRITING.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from maru_shm import failpoints
from maru_shm import poolformat as F
from maru_shm.atomics import order_fence
from maru_shm.errors import PoolCorrupt, PoolError
from maru_sidecar.pool import PoolFile
from maru_sidecar.sharing.rights import WholePool, WriteRights
from maru_sidecar.slab_header import SlabHeader, decode, encode, region_layout, slab_offset

_STATE_BITS = 8
_GENERATION_MASK = (1 << 56) - 1
#: Generations of a newly formatted region start at epoch << 24: above anything an earlier sidecar reached in under 16 million
#: reuses of one slab, even where a damaged header hides what it had reached.
_EPOCH_SHIFT = 24


@dataclass(slots=True)
class Region:
    """One region. ``stride`` 0: never formatted (or its header was damaged)."""

    index: int
    base: int  #: offset from the pool's start
    stride: int = 0
    n_slabs: int = 0
    data_offset: int = 0  #: from the region's base
    used: int = 0  #: slabs not free
    fresh: int = 0  #: slabs below this one have not been taken since the region was last empty
    freed: list[int] = field(default_factory=list)  #: slabs from ``fresh`` on that are free
    #: who uses each slab: what :meth:`RegionTable.allocate` was given, later a chunk
    owners: list[object] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.n_slabs - self.used


@dataclass(slots=True)
class SizeClass:
    """All regions formatted for one stride that hold at least one used slab."""

    stride: int
    per_region: int  #: slabs a region of this class has
    regions: set[int] = field(default_factory=set)
    open: list[int] = field(default_factory=list)  #: sorted; those with room
    slabs: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class ScannedRegion:
    """What :meth:`RegionTable.scan` found in one region."""

    region: Region
    committed: list[tuple[int, SlabHeader]]  #: (slab, header), CRC good
    writing: int
    evicting: int
    corrupt: int  #: COMMITTED with a bad CRC, magic or size, or an unknown state


class RegionTable:
    """The regions of one pool that this sidecar may use, and who may take which slab.

    In a pool of its own these are all; in a shared pool those named by ``mine`` and added later (:meth:`add`). ``rights`` says
    which of them may be written now; while one may not, nothing of it changes on the mapping, and what the index says
    differently is made good when its slabs are written again.
    """

    def __init__(self, pool: PoolFile, rights: WriteRights | None = None, mine: Iterable[int] | None = None) -> None:
        self._pool = pool
        self._rights: WriteRights = WholePool() if rights is None else rights
        self._bytes = pool.bytes
        self._words = pool.words
        self.region_bytes = pool.region_bytes
        self._regions = [Region(i, i * pool.region_bytes) for i in range(pool.n_regions)]
        self._mine = set(range(1, pool.n_regions) if mine is None else mine)
        self._free = sorted(self._mine)  #: indices of empty regions
        self._classes: dict[int, SizeClass] = {}

    # --- looking -----------------------------------------------------------------------------------------------------
    @property
    def free_regions(self) -> int:
        return len(self._free)

    @property
    def n_regions(self) -> int:
        """Regions of ours that can hold slabs."""
        return len(self._mine)

    def largest_free_run(self) -> int:
        """Most neighbouring empty regions."""
        best = run = 0
        last = -1
        for index in self._free:
            run = run + 1 if index == last + 1 else 1
            best, last = max(best, run), index
        return best

    def classes(self) -> list[SizeClass]:
        return [c for c in self._classes.values() if c.regions]

    def size_class(self, stride: int) -> SizeClass:
        """The class of ``stride``. Raises :class:`PoolError` if no region can hold even one such slab."""
        found = self._classes.get(stride)
        if found is None:
            per_region, _ = F.region_plan(self.region_bytes, stride)
            if per_region == 0:
                raise PoolError(
                    f"a slab of {stride} bytes does not fit in a region of {self.region_bytes} bytes",
                    "recreate the pool with a larger region_size",
                )
            found = self._classes[stride] = SizeClass(stride, per_region)
        return found

    def capacity(self, size_class: SizeClass) -> int:
        """Slabs the class has, plus those it could have in empty regions."""
        return size_class.slabs + len(self._free) * size_class.per_region

    def region_of(self, slab: int) -> Region:
        return self._regions[slab // self.region_bytes]

    def stride_of(self, index: int) -> int:
        """Bytes from slab to slab in a region; 0 while it is not formatted."""
        return self._regions[index].stride

    def data_offset(self, slab: int) -> int:
        """Where the slab's data starts, bytes from the pool's start."""
        region = self._regions[slab // self.region_bytes]
        return region.base + region.data_offset + _number(region, slab) * region.stride

    def state_word(self, slab: int) -> int:
        return self._words[slab >> 3]

    def set_owner(self, slab: int, owner: object) -> None:
        region = self.region_of(slab)
        region.owners[_number(region, slab)] = owner

    def read_header(self, slab: int) -> SlabHeader:
        return decode(bytes(self._bytes[slab : slab + F.SLAB_HEADER_BYTES]))

    def number(self, slab: int) -> int:
        """Index of the slab in its region."""
        return _number(self.region_of(slab), slab)

    # --- allocation ---------------------------------------------------------------------------------------------------
    def allocate(self, stride: int, owner: object) -> int | None:
        """Take a free slab of the class, formatting an empty region if there is none; None if the pool has no room.

        Only this process knows it is taken until :meth:`begin_write`.
        """
        size_class = self.size_class(stride)
        index = next((i for i in size_class.open if self._rights.may_start(i)), None)
        if index is None and (index := self._adopt_region(size_class)) is None:
            return None
        region = self._regions[index]
        if region.freed:
            number = region.freed.pop()
        else:
            region.fresh -= 1
            number = region.fresh
        region.used += 1
        size_class.used += 1
        region.owners[number] = owner
        if region.room == 0:
            size_class.open.remove(index)
        return _slab(region, number)

    def _adopt_region(self, size_class: SizeClass) -> int | None:
        usable = [i for i in self._free if self._rights.may_start(i)]
        if not usable:
            return None
        index = next((i for i in usable if self._regions[i].stride == size_class.stride), usable[0])
        region = self._regions[index]
        if region.stride != size_class.stride:
            self._format(region, size_class.stride)
        self._free.remove(index)
        region.fresh = region.n_slabs
        region.used = 0
        region.freed = []
        region.owners = [None] * region.n_slabs
        self._join(size_class, region)
        return index

    def _join(self, size_class: SizeClass, region: Region) -> None:
        size_class.regions.add(region.index)
        size_class.slabs += region.n_slabs
        size_class.used += region.used
        if region.room:
            bisect.insort(size_class.open, region.index)

    def free(self, slab: int) -> None:
        """FREE in memory and here. The generation stays; it rises when the slab is taken again."""
        self._mark(slab, F.SlabState.FREE)
        region = self.region_of(slab)
        mine = region.index in self._mine
        size_class = self._classes[region.stride]
        number = _number(region, slab)
        region.owners[number] = None
        region.freed.append(number)
        region.used -= 1
        size_class.used -= 1
        if mine and region.room == 1:
            bisect.insort(size_class.open, region.index)
        if region.used == 0:
            size_class.regions.remove(region.index)
            size_class.slabs -= region.n_slabs
            region.owners = []
            if mine:
                size_class.open.remove(region.index)
                bisect.insort(self._free, region.index)

    def _mark(self, slab: int, state: F.SlabState) -> None:
        """Store a state under the slab's generation, if its region may be written."""
        if self._rights.may_write(slab // self.region_bytes):
            self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | state

    # --- regions of a shared pool come and go -------------------------------------------------------------------------------
    def add(self, index: int) -> bool:
        """Take over a region just granted; what lies in it is forgotten. False if slabs of an earlier grant are in use."""
        region = self._regions[index]
        if region.used or index in self._mine:
            return False
        raw = bytes(self._bytes[region.base : region.base + F.REGION_HEADER.size + F.CRC.size])
        _, region.n_slabs, region.data_offset = region_layout(raw, self.region_bytes) or (0, 0, 0)
        region.stride = 0  # formatted before its first slab; n_slabs says which generations are there to be exceeded
        self._rights.check(index)
        self._bytes[region.base : region.base + len(raw)] = bytes(len(raw))
        self._mine.add(index)
        bisect.insort(self._free, index)
        return True

    def lose(self, index: int) -> None:
        """The region is another's now. Its slabs in use stay accounted until the last is freed; nothing is written."""
        self._mine.discard(index)
        if index in self._free:
            self._free.remove(index)
        elif (size_class := self._classes.get(self._regions[index].stride)) is not None and index in size_class.open:
            size_class.open.remove(index)

    def give_back(self) -> int | None:
        """Part with the last empty region; None if there is none."""
        if not self._free:
            return None
        index = self._free.pop()
        self._mine.discard(index)
        return index

    def has(self, index: int) -> bool:
        return index in self._mine

    def owners(self, index: int) -> list[tuple[int, object]]:
        """(slab, owner) of a region's slabs in use."""
        region = self._regions[index]
        return [(_slab(region, i), owner) for i, owner in enumerate(region.owners) if owner is not None]

    def _format(self, region: Region, stride: int) -> None:
        """Lay an empty region out for another stride.

        Slab headers first, region header last. Killed in between, the old header still stands over slabs that are all
        FREE: headers lie at the same places in every format, and an empty region has no other contents.
        """
        self._rights.check(region.index)
        failpoints.hit("region.before_format")
        n, data_offset = F.region_plan(self.region_bytes, stride)
        generation = self._pool.epoch << _EPOCH_SHIFT
        if region.n_slabs:
            generation = max(generation, int(self._headers(region)["state"].max()) >> _STATE_BITS)
        region.stride, region.n_slabs, region.data_offset = stride, n, data_offset
        headers = self._headers(region)
        start = region.base + F.HEADER_BYTES
        np.frombuffer(self._bytes, np.uint8, n * F.SLAB_HEADER_BYTES, start)[:] = 0
        headers["state"] = generation << _STATE_BITS | F.SlabState.FREE
        failpoints.hit("region.after_headers")
        order_fence()
        self._write_region_header(region)

    def _write_region_header(self, region: Region) -> None:
        raw = F.with_crc(
            F.REGION_HEADER.pack(F.REGION_MAGIC, F.FORMAT, 0, region.stride, region.stride, region.n_slabs, region.data_offset)
        )
        self._bytes[region.base : region.base + len(raw)] = raw

    def mend(self, slab: int) -> None:
        """Store the header of a slab's region again if it was damaged: sound slabs in it, and later ones, are readable then."""
        region = self.region_of(slab)
        raw = bytes(self._bytes[region.base : region.base + F.REGION_HEADER.size + F.CRC.size])
        layout = region_layout(raw, self.region_bytes)
        if layout != (region.stride, region.n_slabs, region.data_offset) and self._rights.may_write(region.index):
            self._write_region_header(region)

    def _headers(self, region: Region) -> npt.NDArray[Any]:
        return np.frombuffer(self._bytes, F.SLAB_HEADER, region.n_slabs, region.base + F.HEADER_BYTES)

    # --- the two-phase commit of one slab ---------------------------------------------------------------------------------
    def begin_write(self, slab: int) -> None:
        """WRITING under a new generation, and no header any more; after this the data may be written.

        Without its magic the old header, whose CRC is still right, cannot come to describe the new data, whatever state word
        it is found with.
        """
        failpoints.hit("commit.before_writing")
        generation = (self._words[slab >> 3] >> _STATE_BITS) + 1 & _GENERATION_MASK
        self._words[slab >> 3] = generation << _STATE_BITS | F.SlabState.WRITING
        order_fence()  # SYNC POINT: a reader that sees new data also sees that the slab changed
        self._words[(slab >> 3) + 1] = 0  # the magic
        order_fence()
        failpoints.hit("commit.after_writing")

    def check_right(self, slab: int) -> None:
        """Raise :class:`~maru_shm.errors.RegionNotHeld` unless the slab's region may be written now."""
        self._rights.check(slab // self.region_bytes)

    def write_header(self, slab: int, header: SlabHeader) -> None:
        """Everything but the state word; the slab stays WRITING. Raises :class:`~maru_shm.errors.RegionNotHeld`."""
        self.check_right(slab)
        failpoints.hit("commit.after_data")
        self._bytes[slab + 8 : slab + F.SLAB_HEADER_BYTES] = encode(header)[8:]
        failpoints.hit("commit.before_state")

    def publish(self, slab: int) -> None:
        """COMMITTED, stored last. Raises :class:`~maru_shm.errors.RegionNotHeld`, and stores nothing, without the right to."""
        self.check_right(slab)
        order_fence()  # SYNC POINT: release
        self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | F.SlabState.COMMITTED
        failpoints.hit("commit.after_state")

    def begin_evict(self, slab: int) -> None:
        """EVICTING: no reader may start on it, and a restart frees it."""
        self._mark(slab, F.SlabState.EVICTING)
        failpoints.hit("evict.after_state")

    # --- after a restart ----------------------------------------------------------------------------------------------
    def scan(self, region: Region) -> ScannedRegion | None:
        """Read a region's headers as a dead sidecar left them, freeing in memory whatever is not a sound COMMITTED slab.

        None for a region never formatted. Raises :class:`PoolCorrupt` if its header is damaged: the slabs cannot be found then,
        and the region counts as never formatted. Call :meth:`adopt_scanned` with what is to be kept.
        """
        raw = bytes(self._bytes[region.base : region.base + F.REGION_HEADER.size + F.CRC.size])
        if not any(raw):
            return None
        self._read_region_header(region, raw)
        headers = self._headers(region)
        words = headers["state"].copy()
        states = words & 0xFF
        writing = states == F.SlabState.WRITING
        evicting = states == F.SlabState.EVICTING
        candidates = states == F.SlabState.COMMITTED
        sound = (
            candidates
            & (headers["magic"] == F.SLAB_MAGIC)
            & (headers["format"] == F.FORMAT)
            & (headers["data_bytes"] > 0)
            & (headers["data_bytes"] <= region.stride)
            & (headers["rank"] < headers["world"])
        )
        committed = []
        for number in np.flatnonzero(sound).tolist():
            slab = _slab(region, number)
            packed = bytes(self._bytes[slab : slab + F.SLAB_HEADER_BYTES])
            if F.slab_crc_matches(packed):
                committed.append((slab, decode(packed)))
            else:
                sound[number] = False
        corrupt = ~sound & (candidates | (states > F.SlabState.EVICTING))
        for number in np.flatnonzero(writing | evicting | corrupt).tolist():
            self._mark(_slab(region, number), F.SlabState.FREE)
        return ScannedRegion(region, committed, int(writing.sum()), int(evicting.sum()), int(corrupt.sum()))

    def _read_region_header(self, region: Region, raw: bytes) -> None:
        found = region_layout(raw, self.region_bytes)
        region.stride, region.n_slabs, region.data_offset = found or (0, 0, 0)
        if found is None:
            raise PoolCorrupt(f"region {region.index} has a damaged header", "its slabs are dropped; nothing to do")

    def count_committed(self, region: Region) -> int:
        """How many slab headers of a region with a damaged header look COMMITTED: for the report only."""
        most = (self.region_bytes - F.HEADER_BYTES) // (F.SLAB_HEADER_BYTES + F.DATA_ALIGN)
        headers = np.frombuffer(self._bytes, F.SLAB_HEADER, most, region.base + F.HEADER_BYTES)
        return int(((headers["magic"] == F.SLAB_MAGIC) & (headers["state"] & 0xFF == F.SlabState.COMMITTED)).sum())

    def adopt_scanned(self, region: Region, kept: list[tuple[int, object]]) -> None:
        """Take a scanned region into its class with ``kept`` (slab, owner) in use; every other slab becomes free."""
        if not kept:
            return
        region.owners = [None] * region.n_slabs
        for slab, owner in kept:
            region.owners[_number(region, slab)] = owner
        region.used = len(kept)
        region.fresh = 0
        region.freed = [i for i in range(region.n_slabs) if region.owners[i] is None]
        self._free.remove(region.index)
        self._join(self.size_class(region.stride), region)

    def drop_scanned(self, slab: int) -> None:
        """Free, in memory, a slab that :meth:`scan` returned and the caller does not keep."""
        self._mark(slab, F.SlabState.FREE)

    def regions(self) -> list[Region]:
        """The regions of ours that can hold slabs, in order."""
        return [self._regions[i] for i in sorted(self._mine)]


def _slab(region: Region, number: int) -> int:
    return slab_offset(region.base, number)


def _number(region: Region, slab: int) -> int:
    return (slab - region.base - F.HEADER_BYTES) // F.SLAB_HEADER_BYTES
