"""The index of one namespace: chunks by key, linked to their children. Not thread-safe: the directory's lock covers it.

A pool of small chunks has millions of them, so a chunk is a slotted object that shares its parent's key, and one child (the
usual case in a chain) is a plain reference instead of a set. What is rarely asked (tokens, bytes) stays in the slab
header.
"""

from __future__ import annotations

from collections import Counter

from maru_sidecar.eviction import EvictionPolicy
from maru_sidecar.slab_header import SlabHeader

_NO_PARENT = b""  #: of a chunk whose parent claims to lie behind it


class Chunk:
    """A chunk with at least one committed slab.

    ``slabs[rank]`` is the slab's name (``regions.py``), 0 where that rank has none; ``missing`` counts those. ``summed``: a bit
    for each rank whose slab was stored with a checksum.
    """

    __slots__ = (
        "admin_pins",
        "children",
        "depth",
        "key",
        "live",
        "missing",
        "namespace",
        "parent",
        "pins",
        "queued",
        "slabs",
        "summed",
        "used",
    )

    def __init__(self, namespace: Namespace, header: SlabHeader, used: int) -> None:
        self.namespace = namespace
        self.key = header.key
        self.parent = header.parent
        self.depth = header.depth
        self.slabs: tuple[int, ...] = (0,) * namespace.world
        self.missing = namespace.world
        self.summed = 0
        self.children: Chunk | set[Chunk] | None = None
        self.pins = 0  #: references that forbid eviction: leases, copies, children in flight, and admin_pins
        self.admin_pins = 0  #: operators', kept in the slabs
        self.used = used  #: CLOCK_MONOTONIC ns
        self.queued = False
        self.live = True  #: in the index; a dropped chunk keeps its slabs until its last pin goes

    @property
    def evictable(self) -> bool:
        return self.live and self.pins == 0 and self.children is None

    def child_list(self) -> list[Chunk]:
        return _members(self.children)


class Namespace:
    """Chunks that may replace each other: same model, same layout, same number of ranks."""

    def __init__(self, identity: bytes, world: int, policy: EvictionPolicy) -> None:
        self.id = identity
        self.world = world
        self.policy = policy
        self.chunks: dict[bytes, Chunk] = {}
        self.pending: dict[tuple[bytes, int], object] = {}  #: (key, rank) being written
        self.strides: Counter[int] = Counter()  #: slabs held per stride (bytes)
        self.bytes = 0  #: sum of the strides of all slabs held, in flight included
        self.incomplete = 0  #: chunks that some rank has not stored
        #: chunks whose parent is not in the index, by the parent's key: roots' first chunks, and children of the dropped
        self._orphans: dict[bytes, Chunk | set[Chunk]] = {}

    def link(self, chunk: Chunk) -> None:
        """Add a chunk under its key, and join it to its parent and to children that came first.

        Keys come from clients. A parent must be shallower than its child, or two chunks could be each other's parent and
        neither would ever be evictable; a chunk that contradicts this has no parent.
        """
        parent = self.chunks.get(chunk.parent)
        if parent is not None and parent.depth < chunk.depth:
            chunk.parent = parent.key  # one bytes object for both: 64 bytes a chunk
            parent.children = _with(parent.children, chunk)
        else:
            if parent is not None:
                chunk.parent = _NO_PARENT
            self._orphan(chunk)
        for child in _members(self._orphans.pop(chunk.key, None)):
            if chunk.depth < child.depth:
                chunk.children = _with(chunk.children, child)
            else:
                child.parent = _NO_PARENT
                self._orphan(child)
        self.chunks[chunk.key] = chunk

    def _orphan(self, chunk: Chunk) -> None:
        self._orphans[chunk.parent] = _with(self._orphans.get(chunk.parent), chunk)

    def unlink(self, chunk: Chunk) -> Chunk | None:
        """Take a chunk out; returns its parent if that has now lost its last child."""
        del self.chunks[chunk.key]
        chunk.live = False
        if chunk.children is not None:
            self._orphans[chunk.key] = chunk.children
            chunk.children = None
        parent = self.chunks.get(chunk.parent)
        if parent is None:
            left = _without(self._orphans[chunk.parent], chunk)
            if left is None:
                del self._orphans[chunk.parent]
            else:
                self._orphans[chunk.parent] = left
            return None
        parent.children = _without(parent.children, chunk)
        return parent if parent.children is None else None


def _members(children: Chunk | set[Chunk] | None) -> list[Chunk]:
    if children is None:
        return []
    return [children] if isinstance(children, Chunk) else list(children)


def _with(children: Chunk | set[Chunk] | None, chunk: Chunk) -> Chunk | set[Chunk]:
    if children is None:
        return chunk
    if isinstance(children, Chunk):
        return {children, chunk}
    children.add(chunk)
    return children


def _without(children: Chunk | set[Chunk] | None, chunk: Chunk) -> Chunk | set[Chunk] | None:
    if not isinstance(children, set):
        return None
    children.discard(chunk)
    return children if children else None
