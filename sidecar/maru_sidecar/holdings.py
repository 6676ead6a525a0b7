"""What the pool holds right now: namespaces, chunks, pins and the slabs behind them, changed together.

Not thread-safe: ``directory.py`` calls it under its lock. Every change of the index and its counterpart on the mapping is
made here, so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable

from maru_shm.errors import PoolError
from maru_sidecar.chunk_index import Chunk, Namespace
from maru_sidecar.eviction import EvictionPolicy
from maru_sidecar.regions import RegionTable
from maru_sidecar.slab_header import SlabHeader


class Holdings:
    """Chunks and slabs of one pool."""

    def __init__(
        self,
        regions: RegionTable,
        policy: Callable[[], EvictionPolicy],
        removed: Callable[[bytes, bytes, list[int]], None] | None = None,
    ) -> None:
        """``removed``: called with namespace, key and ranks before a chunk's slabs are reused."""
        self.regions = regions
        self.namespaces: dict[bytes, Namespace] = {}
        self.admin_pins = 0  #: references
        self.pinned = 0  #: chunks with a pin of any kind
        self.writing = 0  #: slabs
        self.evicting = 0  #: slabs of dropped chunks that still have a pin
        self.evicted = 0  #: chunks, since the start
        self._policy = policy
        self._removed = removed

    # --- namespaces and chunks --------------------------------------------------------------------------------------
    def namespace(self, name: bytes, world: int) -> Namespace:
        """Found or made. Raises :class:`PoolError` for another world size."""
        ns = self.namespaces.get(name)
        if ns is None:
            ns = self.namespaces[name] = Namespace(name, world, self._policy())
        elif ns.world != world:
            raise PoolError(
                f"namespace {name.hex()} has {ns.world} ranks, not {world}", "put the world size into the namespace"
            )
        return ns

    def prune(self, ns: Namespace) -> None:
        """Forget a namespace that holds nothing."""
        if not ns.chunks and not ns.pending:
            self.namespaces.pop(ns.id, None)

    def account(self, ns: Namespace, slab: int) -> None:
        """Charge a slab, just taken, to a namespace; :meth:`free_slab` undoes it."""
        stride = self.regions.region_of(slab).stride
        ns.strides[stride] += 1
        ns.bytes += stride

    def free_slab(self, ns: Namespace, slab: int) -> None:
        """Give a slab back, on the mapping too."""
        stride = self.regions.region_of(slab).stride
        ns.strides[stride] -= 1
        ns.bytes -= stride
        self.regions.free(slab)

    def index(self, ns: Namespace, header: SlabHeader, slab: int, *, used: int) -> Chunk:
        """Make a committed slab visible. ``used``: CLOCK_MONOTONIC ns."""
        chunk = ns.chunks.get(header.key)
        if chunk is None:
            chunk = Chunk(ns, header, used)
            ns.link(chunk)
            ns.incomplete += 1
        chunk.slabs = (*chunk.slabs[: header.rank], slab, *chunk.slabs[header.rank + 1 :])
        chunk.summed |= (header.checksum is not None) << header.rank
        chunk.missing -= 1
        chunk.used = max(chunk.used, used)
        if chunk.missing == 0:
            ns.incomplete -= 1
        return chunk

    def remove(self, chunk: Chunk) -> None:
        """Out of the index, EVICTING on the mapping; the slabs are free once no pin is left."""
        ns = chunk.namespace
        if self._removed is not None:
            self._removed(ns.id, chunk.key, [rank for rank, slab in enumerate(chunk.slabs) if slab])
        for slab in filter(None, chunk.slabs):
            self.regions.slabs.begin_evict(slab)
            self.evicting += 1
        parent = ns.unlink(chunk)
        ns.policy.gone(chunk)
        if chunk.missing:
            ns.incomplete -= 1
        self.admin_pins -= chunk.admin_pins
        chunk.pins -= chunk.admin_pins
        self.pinned -= chunk.admin_pins > 0 and chunk.pins == 0
        chunk.admin_pins = 0
        if parent is not None:
            self.offer(parent)
        if chunk.pins == 0:
            self._free_chunk(chunk)
        self.prune(ns)

    def evict(self, chunk: Chunk) -> None:
        self.remove(chunk)
        self.evicted += 1

    def _free_chunk(self, chunk: Chunk) -> None:
        for slab in filter(None, chunk.slabs):
            self.evicting -= 1
            self.free_slab(chunk.namespace, slab)
        chunk.slabs = (0,) * len(chunk.slabs)

    # --- pins and eviction order ------------------------------------------------------------------------------------
    def pin(self, chunk: Chunk) -> None:
        if chunk.pins == 0:
            self.pinned += 1
        chunk.pins += 1

    def unpin(self, chunk: Chunk) -> None:
        chunk.pins -= 1
        if chunk.pins == 0:
            self.pinned -= 1
            if chunk.live:
                self.offer(chunk)
            else:
                self._free_chunk(chunk)

    def keep_pins(self, chunk: Chunk, n: int) -> None:
        """Give a chunk ``n`` pins of operators, in its slabs too: they outlive the sidecar."""
        self.restore_pins(chunk, n)
        for slab in filter(None, chunk.slabs):
            self.regions.slabs.keep_pins(slab, n)
        self.offer(chunk)

    def restore_pins(self, chunk: Chunk, n: int) -> None:
        """Give a chunk the ``n`` pins that a slab of it says it has."""
        before, more = chunk.pins, n - chunk.admin_pins
        chunk.pins += more
        chunk.admin_pins = n
        self.admin_pins += more
        self.pinned += (chunk.pins > 0) - (before > 0)

    def offer(self, chunk: Chunk) -> None:
        """Tell the policy of a chunk that may go now; no effect on one that may not, or that it holds."""
        if chunk.evictable and not chunk.queued:
            chunk.namespace.policy.offer(chunk)

    def offer_all(self) -> None:
        """Offer every chunk that may go: after a rebuild, which indexes them in any order."""
        for ns in self.namespaces.values():
            for chunk in ns.chunks.values():
                self.offer(chunk)

    def coldest(self, ns: Namespace) -> Chunk | None:
        """The namespace's next victim. Raises :class:`PoolError` if the policy breaks its contract."""
        chunk = ns.policy.coldest()
        if chunk is None:
            return None
        if not isinstance(chunk, Chunk) or not chunk.evictable:
            raise PoolError(f"eviction policy {type(ns.policy).__name__} chose a chunk in use", "fix the policy")
        return chunk
