"""The directory of a shared pool, by regions: they come and go, and their contents are announced.

Every call takes the directory's lock; each costs O(slabs of the region) at most.
"""

from __future__ import annotations

import threading

from maru_sidecar.chunk_index import Chunk
from maru_sidecar.holdings import Holdings
from maru_sidecar.regions import RegionTable


class SharedRegions:
    """Made by the directory from its own parts, as ``Directory.shared``."""

    def __init__(self, lock: threading.Lock, regions: RegionTable, held: Holdings) -> None:
        self._lock = lock
        self._regions = regions
        self._held = held

    @property
    def n_free(self) -> int:
        return self._regions.free_regions

    def has(self, index: int) -> bool:
        """Whether a region is ours: its chunks are in this index or nowhere."""
        return self._regions.has(index)

    def stride_of(self, index: int) -> int:
        """Bytes from slab to slab in a region of ours; 0 before its first slab."""
        return self._regions.stride_of(index)

    def add(self, index: int) -> bool:
        """Use a region just granted. False: slabs of an earlier grant of it are still in use here."""
        with self._lock:
            return self._regions.add(index)

    def lose(self, index: int) -> int:
        """Forget the chunks of a region that is another node's now; returns how many. Nothing is written to it."""
        with self._lock:
            self._regions.lose(index)
            chunks = {owner for _, owner in self._regions.owners(index) if isinstance(owner, Chunk) and owner.live}
            for chunk in chunks:
                self._held.remove(chunk)
            return len(chunks)

    def give_back(self) -> int | None:
        """Part with an empty region; None if there is none."""
        with self._lock:
            return self._regions.give_back()

    def place_of(self, namespace: bytes, key: bytes, rank: int) -> tuple[int, int, int] | None:
        """(region, slab number, generation) of a committed slab; None if there is none."""
        with self._lock:
            ns = self._held.namespaces.get(namespace)
            chunk = ns.chunks.get(key) if ns is not None else None
            slab = chunk.slabs[rank] if chunk is not None and rank < len(chunk.slabs) else 0
            if not slab:
                return None
            regions = self._regions
            return regions.region_of(slab).index, regions.number(slab), regions.slabs.state_word(slab) >> 8

    def committed_in(self, region: int) -> list[tuple[bytes, int, bytes, int, int]]:
        """(namespace, rank, key, slab number, generation) of a region's indexed slabs, for an announcement."""
        with self._lock:
            regions = self._regions
            return [
                (c.namespace.id, c.slabs.index(slab), c.key, regions.number(slab), regions.slabs.state_word(slab) >> 8)
                for slab, c in regions.owners(region)
                if isinstance(c, Chunk) and c.live
            ]
