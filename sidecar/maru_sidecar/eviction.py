"""Which chunk goes next, and which chunks come in at all. Both are replaceable.

The directory offers a policy only chunks that may go *now*: no child in the pool and no pin. So children always leave before
their parents, whatever the policy prefers, and a policy never scans over chunks it cannot have.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Protocol


class Evictable(Protocol):
    """What a policy sees of a chunk."""

    used: int  #: CLOCK_MONOTONIC ns of its last lookup or store; changes while the policy holds the chunk
    queued: bool  #: the policy's own mark: it holds this chunk

    @property
    def evictable(self) -> bool:
        """Whether it may go now; may change while the policy holds it."""
        ...


class EvictionPolicy(Protocol):
    """Order of eviction within one namespace. Called under the directory's lock; each call about O(log n)."""

    def offer(self, chunk: Evictable) -> None:
        """``chunk`` has become evictable. Called with ``queued`` false; a policy that keeps it sets ``queued``."""
        ...

    def coldest(self) -> Evictable | None:
        """The chunk to evict next, still held; it must be evictable *now*. None only if nothing held is."""
        ...

    def gone(self, chunk: Evictable) -> None:
        """``chunk`` has left the pool."""
        ...


class LeastRecentlyUsed:
    """Exact LRU by a heap whose keys are refreshed when they reach the top.

    Using a chunk costs one attribute store (a lookup touches 64 chunks in a few µs); the heap hears of it when the chunk
    would be next. A refresh belongs to a use since the last one, so the cost is amortised; :attr:`MAX_REFRESH` bounds a single
    call, which then answers with the least recently queued chunk.
    """

    MAX_REFRESH = 1024
    _COMPACT_FROM = 1024

    __slots__ = ("_heap", "_order", "_stale")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Evictable]] = []
        self._order = itertools.count()
        self._stale = 0

    def offer(self, chunk: Evictable) -> None:
        chunk.queued = True
        heapq.heappush(self._heap, (chunk.used, next(self._order), chunk))

    def coldest(self) -> Evictable | None:
        heap = self._heap
        refreshed = 0
        while heap:
            used, _, chunk = heap[0]
            if not chunk.evictable:  # it will be offered again when it is
                heapq.heappop(heap)
                chunk.queued = False
            elif chunk.used == used or refreshed >= self.MAX_REFRESH:
                return chunk
            else:
                heapq.heapreplace(heap, (chunk.used, next(self._order), chunk))
                refreshed += 1
        self._stale = 0
        return None

    def gone(self, chunk: Evictable) -> None:
        if not chunk.queued:
            return
        self._stale += 1
        heap = self._heap
        if heap and heap[0][2] is chunk:
            heapq.heappop(heap)
            chunk.queued = False
            self._stale -= 1
        elif self._stale > self._COMPACT_FROM and self._stale * 2 > len(heap):
            for _, _, held in heap:
                held.queued = held.evictable
            self._heap = [item for item in heap if item[2].queued]
            heapq.heapify(self._heap)
            self._stale = 0


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Fractions of a size class's slabs (its own and those of empty regions). A store that would take the class above ``high``
    evicts down to ``low`` first; without a store they mean nothing.

    Slabs, not the pool's bytes: what a region has left beyond its last slab is nobody's, so with every slab taken a pool may
    say that 88 % of its bytes are used. The margin keeps freed slabs in stock; evicting costs a few µs, so it is small.
    """

    high: float = 0.98
    low: float = 0.95
    batch: int = 32  #: chunks one store may evict beyond the one it needs

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1 or self.batch < 1:
            raise ValueError(f"watermarks {self.low}..{self.high}, batch {self.batch}: need 0 < low <= high <= 1, batch >= 1")


class AdmissionPolicy(Protocol):
    """Whether a chunk is worth a slab. Called under the directory's lock."""

    def admit(self, namespace: bytes, key: bytes, *, depth: int, tokens: int, nbytes: int) -> bool: ...


class AdmitAll:
    """The default: every chunk is stored."""

    def admit(self, namespace: bytes, key: bytes, *, depth: int, tokens: int, nbytes: int) -> bool:
        del namespace, key, depth, tokens, nbytes
        return True
