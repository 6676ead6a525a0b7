"""What people and metrics see of the directory. Called under its lock, except :func:`page_names`'s sorting."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from maru_shm.layout import KEY_BYTES
from maru_shm.messages import ChunkInfo
from maru_sidecar.chunk_index import Chunk
from maru_sidecar.holdings import Holdings
from maru_sidecar.recovery import RebuildReport
from maru_sidecar.room import RoomMaker


@dataclass(slots=True)
class Counts:
    """What the directory did since the sidecar's start; ``copying`` is what it does now."""

    lookups: int = 0
    chunks_asked: int = 0
    chunks_hit: int = 0
    stored: int = 0  #: slabs
    aborted: int = 0  #: slabs
    cleared: int = 0
    dropped_bad: int = 0
    full: int = 0  #: reservations refused for want of room
    declined: int = 0
    leases_expired: int = 0
    copying: int = 0  #: slabs of all Acquired not yet released
    rebuild: RebuildReport = field(default_factory=RebuildReport)

    def totals(self) -> dict[str, int]:
        """Those that only grow, by their names in status and metrics."""
        names = [f.name for f in fields(self) if f.name not in ("copying", "rebuild")]
        return {f"{name}_total": getattr(self, name) for name in names}


def all_names(holdings: Holdings, namespace: bytes | None) -> list[bytes]:
    """Key followed by namespace (32 bytes) of every chunk, unordered; of one namespace, or all."""
    if namespace is None:
        return [key + ns.id for ns in holdings.namespaces.values() for key in ns.chunks]
    ns = holdings.namespaces.get(namespace)
    return [key + namespace for key in ns.chunks] if ns is not None else []


def page_names(names: Iterable[bytes], after: bytes, limit: int) -> tuple[list[bytes], bool]:
    """The ``limit`` smallest names beyond ``after``, and whether there are more."""
    chosen = heapq.nsmallest(limit + 1, (n for n in names if n > after))
    return chosen[:limit], len(chosen) > limit


def chunk_infos(holdings: Holdings, names: list[bytes], now_ns: int) -> list[ChunkInfo]:
    """Those of ``names`` that are still there."""
    infos = []
    for name in names:
        ns = holdings.namespaces.get(name[KEY_BYTES:])
        chunk = ns.chunks.get(name[:KEY_BYTES]) if ns is not None else None
        if chunk is not None:
            infos.append(_info(holdings, chunk, now_ns))
    return infos


def _info(holdings: Holdings, chunk: Chunk, now_ns: int) -> ChunkInfo:
    # A header is bytes in shared memory, and may be damaged: no size in it is believed beyond what the region has room for.
    headers = [
        (holdings.regions.slabs.read_header(slab), holdings.regions.region_of(slab).stride) for slab in chunk.slabs if slab
    ]
    return ChunkInfo(
        namespace=chunk.namespace.id.hex(),
        key=chunk.key.hex(),
        ranks=len(headers),
        world=chunk.namespace.world,
        bytes=sum(min(header.data_bytes, stride) for header, stride in headers),
        tokens=headers[0][0].tokens,
        leases=chunk.pins - chunk.admin_pins,
        pinned=chunk.admin_pins > 0,
        age_s=max(0, now_ns - chunk.used) / 1e9,
    )


def usage(holdings: Holdings, room: RoomMaker) -> dict[str, object]:
    """Slabs, bytes and regions now. Bytes are whole slabs; ``largest_free_extent`` is a run of empty regions."""
    regions = holdings.regions
    classes = regions.classes()
    used = sum(c.used for c in classes)
    slabs = sum(c.slabs for c in classes)
    namespaces = holdings.namespaces.values()
    return {
        "chunks": sum(len(ns.chunks) for ns in namespaces),
        "chunks_incomplete": sum(ns.incomplete for ns in namespaces),
        "chunks_pinned": holdings.pinned,
        "slabs_free": slabs - used,
        "slabs_writing": holdings.writing,
        "slabs_committed": used - holdings.writing - holdings.evicting,
        "slabs_evicting": holdings.evicting,
        "bytes_total": regions.n_regions * regions.region_bytes,
        "bytes_used": sum(c.used * c.stride for c in classes),
        "bytes_free": sum((c.slabs - c.used) * c.stride for c in classes) + regions.free_regions * regions.region_bytes,
        "largest_free_extent": regions.largest_free_run() * regions.region_bytes,
        "regions": regions.n_regions,
        "regions_free": regions.free_regions,
        "pins": holdings.admin_pins,
        "size_classes": [{"stride": c.stride, "regions": len(c.regions), "slabs": c.slabs, "used": c.used} for c in classes],
        "namespaces": {
            ns.id.hex(): {
                "chunks": len(ns.chunks),
                "bytes": ns.bytes,
                "quota": room.quota(ns),
                "world": ns.world,
                "incomplete": ns.incomplete,
            }
            for ns in namespaces
        },
    }
