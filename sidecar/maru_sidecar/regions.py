"""Regions and slabs: which there are, and who has them. What is on the mapping is ``region_format.py``'s and
``slab_states.py``'s matter.

Nothing here knows keys or policies. :class:`RegionTable` is driven by ``directory.py`` under its lock.

A *slab* is named by the offset of its header from the pool's start (one int: the index keeps one per chunk and rank).
Slabs of one stride form a *size class*. Allocation takes the lowest region of the class that has room, so that the others
run empty; an empty region belongs to no class and may be formatted for another. Within a region slabs are taken from the top,
so those of one prompt fall in address as its chunks go on: ``maru_shm/copy_shapes.py`` says why. Eviction frees the end of a
prompt first and what was freed last is taken first, so it stays so when slabs are taken again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from maru_shm import poolformat as F
from maru_shm.errors import PoolError
from maru_sidecar.pool import PoolFile
from maru_sidecar.region_format import Region, RegionFormat
from maru_sidecar.sharing.rights import WholePool, WriteRights
from maru_sidecar.slab_states import SlabStates


@dataclass(slots=True)
class SizeClass:
    """All regions formatted for one stride that hold at least one used slab."""

    stride: int
    per_region: int  #: slabs a region of this class has
    regions: set[int] = field(default_factory=set)
    open: list[int] = field(default_factory=list)  #: sorted; those with room
    slabs: int = 0
    used: int = 0


class RegionTable:
    """The regions of one pool that this sidecar may use, and who may take which slab.

    In a pool of its own these are all; in a shared pool those named by ``mine`` and added later (:meth:`add`). ``rights`` says
    which of them may be written now; while one may not, nothing of it changes on the mapping, and what the index says
    differently is made good when its slabs are written again.
    """

    def __init__(self, pool: PoolFile, rights: WriteRights | None = None, mine: Iterable[int] | None = None) -> None:
        self._rights: WriteRights = WholePool() if rights is None else rights
        self.slabs = SlabStates(pool, self._rights)
        self.format = RegionFormat(pool, self._rights, self.slabs)
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
        return region.base + region.data_offset + region.number(slab) * region.stride

    def set_owner(self, slab: int, owner: object) -> None:
        region = self.region_of(slab)
        region.owners[region.number(slab)] = owner

    def number(self, slab: int) -> int:
        """Index of the slab in its region."""
        return self.region_of(slab).number(slab)

    # --- allocation ---------------------------------------------------------------------------------------------------
    def allocate(self, stride: int, owner: object) -> int | None:
        """Take a free slab of the class, formatting an empty region if there is none; None if the pool has no room.

        Only this process knows it is taken until ``SlabStates.begin_write``.
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
        return region.slab(number)

    def _adopt_region(self, size_class: SizeClass) -> int | None:
        usable = [i for i in self._free if self._rights.may_start(i)]
        if not usable:
            return None
        index = next((i for i in usable if self._regions[i].stride == size_class.stride), usable[0])
        region = self._regions[index]
        if region.stride != size_class.stride:
            self.format.lay_out(region, size_class.stride)
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
        self.slabs.mark(slab, F.SlabState.FREE)
        region = self.region_of(slab)
        mine = region.index in self._mine
        size_class = self._classes[region.stride]
        number = region.number(slab)
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

    # --- regions of a shared pool come and go -------------------------------------------------------------------------------
    def add(self, index: int) -> bool:
        """Take over a region just granted; what lies in it is forgotten. False if slabs of an earlier grant are in use."""
        region = self._regions[index]
        if region.used or index in self._mine:
            return False
        self.format.forget(region)
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
        return [(region.slab(i), owner) for i, owner in enumerate(region.owners) if owner is not None]

    # --- after a restart ----------------------------------------------------------------------------------------------
    def adopt_scanned(self, region: Region, kept: list[tuple[int, object]]) -> None:
        """Take a scanned region into its class with ``kept`` (slab, owner) in use; every other slab becomes free."""
        if not kept:
            return
        region.owners = [None] * region.n_slabs
        for slab, owner in kept:
            region.owners[region.number(slab)] = owner
        region.used = len(kept)
        region.fresh = 0
        region.freed = [i for i in range(region.n_slabs) if region.owners[i] is None]
        self._free.remove(region.index)
        self._join(self.size_class(region.stride), region)

    def regions(self) -> list[Region]:
        """The regions of ours that can hold slabs, in order."""
        return [self._regions[i] for i in sorted(self._mine)]
