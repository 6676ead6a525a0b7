"""Finding a slab when the pool is (nearly) full: quota, watermarks, and regions that change their size class.

Bounded work per call: one batch of evictions, and at most four attempts to empty a region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from maru_shm.errors import PoolFull
from maru_sidecar.chunk_index import Chunk, Namespace
from maru_sidecar.eviction import Watermarks
from maru_sidecar.holdings import Holdings
from maru_sidecar.regions import SizeClass

_CLOSURE_MAX = 4096  #: most chunks evicted to empty one region for another size class: about 20 ms
_BACKOFF = 64  #: stores of a size class between two failed attempts to take a region from another
_ATTEMPTS = 4


class RoomMaker:
    """Takes slabs, evicting as needed. ``quotas``: bytes of slabs per namespace, ``default_quota`` for the others, 0 = none."""

    def __init__(self, holdings: Holdings, watermarks: Watermarks, quotas: Mapping[bytes, int], default_quota: int) -> None:
        self._holdings = holdings
        self._regions = holdings.regions
        self._watermarks = watermarks
        self._quotas = dict(quotas)
        self._default_quota = default_quota
        self._wait: dict[int, int] = {}  #: stride: stores left before the next attempt
        self.regions_taken = 0  #: regions emptied for another size class, since the start

    def quota(self, ns: Namespace) -> int:
        return self._quotas.get(ns.id, self._default_quota)

    def take(self, ns: Namespace, stride: int, *, evict: bool = True) -> int:
        """A free slab of ``stride`` for ``ns``; ``evict``: making room by the watermarks. Raises :class:`PoolFull`."""
        quota = self.quota(ns)
        while quota and ns.bytes + stride > quota:
            victim = self._holdings.coldest(ns)
            if victim is None:
                raise PoolFull(
                    f"namespace {ns.id.hex()} holds {ns.bytes} of its quota of {quota} bytes, all in use",
                    "raise its quota, or lower the number of requests in flight",
                )
            self._holdings.evict(victim)
        size_class = self._regions.size_class(stride)
        capacity = self._regions.capacity(size_class)
        if evict and size_class.used + 1 > math.ceil(self._watermarks.high * capacity):
            self._make_room(size_class, math.ceil(self._watermarks.low * capacity))
        slab = self._regions.allocate(stride, None)
        if slab is None:
            raise PoolFull(
                f"no slab of {stride} bytes is free and nothing may be evicted "
                f"({self._holdings.pinned} chunks pinned, {self._holdings.writing} slabs being written)",
                "enlarge the pool, or lower the number of requests in flight",
            )
        return slab

    def _make_room(self, size_class: SizeClass, target: int) -> None:
        """Evict until one more slab keeps the class within ``target``, at most a batch: least recently used first, wherever
        it lies. Where the coldest chunk belongs to another size class, its whole region changes over."""
        for _ in range(self._watermarks.batch):
            if size_class.used + 1 <= target:
                return
            own, others = self._victims(size_class.stride)
            if others and (own is None or others[0].used < own.used) and self._take_region(size_class.stride, own, others):
                return
            if own is None:
                return
            self._holdings.evict(own)

    def _victims(self, stride: int) -> tuple[Chunk | None, list[Chunk]]:
        """The coldest chunk of the namespaces with slabs of ``stride``, and those of the other namespaces, coldest first."""
        own: Chunk | None = None
        others = []
        for ns in self._holdings.namespaces.values():
            chunk = self._holdings.coldest(ns)
            if chunk is None:
                continue
            if not ns.strides[stride]:
                others.append(chunk)
            elif own is None or chunk.used < own.used:
                own = chunk
        others.sort(key=lambda c: c.used)
        return own, others

    def _take_region(self, stride: int, own: Chunk | None, others: list[Chunk]) -> bool:
        """Empty one region of another class: that of its coldest chunk, if all in it is colder than ``own``."""
        wait = self._wait.get(stride, 0)
        if wait and own is not None:
            self._wait[stride] = wait - 1
            return False
        for chunk in others[:_ATTEMPTS]:
            for slab in filter(None, chunk.slabs):
                doomed = self._closure(slab, own.used if own is not None else None)
                if doomed is not None:
                    self._evict_all(doomed)
                    self.regions_taken += 1
                    self._wait.pop(stride, None)
                    return True
        self._wait[stride] = _BACKOFF
        return False

    def _closure(self, slab: int, newest: int | None) -> set[Chunk] | None:
        """Everything that must go to empty ``slab``'s region: its chunks and their descendants. None if any may not."""
        region = self._regions.region_of(slab)
        limit = min(_CLOSURE_MAX, 4 * region.n_slabs + 64)
        doomed: set[Chunk] = set()
        stack = [owner for owner in region.owners if owner is not None]
        while stack:
            chunk = stack.pop()
            if not isinstance(chunk, Chunk) or chunk.pins or not chunk.live or (newest is not None and chunk.used > newest):
                return None
            if chunk not in doomed:
                doomed.add(chunk)
                if len(doomed) > limit:
                    return None
                stack.extend(chunk.child_list())
        return doomed

    def _evict_all(self, doomed: set[Chunk]) -> None:
        """Evict a set closed under descent, children before their parents."""
        leaves = [chunk for chunk in doomed if chunk.children is None]
        while leaves:
            leaf = leaves.pop()
            parent = leaf.namespace.chunks.get(leaf.parent)
            self._holdings.evict(leaf)
            if parent in doomed and parent.children is None:
                leaves.append(parent)
