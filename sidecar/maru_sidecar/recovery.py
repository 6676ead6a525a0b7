"""What a restarted sidecar finds in its pool, and what of it may be believed.

Kept is a COMMITTED slab whose header passes its CRC and lies in a region whose header passes its own. A slab that was being
written or evicted is free again. After a reboot without an orderly stop a header may have reached the medium before the
data it vouches for, so slabs without a checksum are dropped and the others are read and compared: a wrong byte is worse than
a miss.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import xxhash

from maru_shm import poolformat as F
from maru_shm.errors import PoolCorrupt
from maru_sidecar.pool import PoolFile
from maru_sidecar.regions import RegionTable
from maru_sidecar.slab_header import SlabHeader


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """Slabs, unless said otherwise."""

    kept: int = 0
    bytes: int = 0  #: data bytes kept
    dropped_writing: int = 0  #: half-written when the sidecar died
    dropped_evicting: int = 0
    dropped_corrupt: int = 0  #: a damaged header, their own or their region's
    dropped_duplicate: int = 0  #: the same chunk and rank twice: the newest stays
    dropped_unverified: int = 0  #: after an unclean reboot: no checksum, or a wrong one
    corrupt_regions: int = 0  #: regions with a damaged header; formatted again when needed

    def as_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Recovered:
    """``slabs``: (slab, header), oldest first, at most one for each namespace, key and rank."""

    slabs: list[tuple[int, SlabHeader]]
    report: RebuildReport


def recover(pool: PoolFile, regions: RegionTable) -> Recovered:
    """Scan every region. On the mapping, all that is not returned is FREE afterwards."""
    writing = evicting = corrupt = duplicates = unverified = bad_regions = 0
    slabs: list[tuple[int, SlabHeader]] = []
    for region in regions.regions():
        try:
            scanned = regions.format.scan(region)
        except PoolCorrupt:
            bad_regions += 1
            corrupt += regions.format.count_committed(region)
            continue
        if scanned is None:
            continue
        writing += scanned.writing
        evicting += scanned.evicting
        corrupt += scanned.corrupt
        slabs += scanned.committed
    slabs.sort(key=lambda item: item[1].created_ns)
    newest: dict[tuple[bytes, bytes, int], tuple[int, SlabHeader]] = {}
    worlds: dict[bytes, int] = {}
    for slab, header in slabs:
        if worlds.setdefault(header.namespace, header.world) != header.world:
            regions.slabs.mark(slab, F.SlabState.FREE)
            corrupt += 1
            continue
        if pool.suspect and not _data_matches(pool, regions, slab, header):
            regions.slabs.mark(slab, F.SlabState.FREE)
            unverified += 1
            continue
        name = (header.namespace, header.key, header.rank)
        older = newest.pop(name, None)  # popped, so that the order of insertion stays the order of age
        if older is not None:
            regions.slabs.mark(older[0], F.SlabState.FREE)
            duplicates += 1
        newest[name] = (slab, header)
    kept = list(newest.values())
    report = RebuildReport(
        len(kept), sum(h.data_bytes for _, h in kept), writing, evicting, corrupt, duplicates, unverified, bad_regions
    )
    return Recovered(kept, report)


def _data_matches(pool: PoolFile, regions: RegionTable, slab: int, header: SlabHeader) -> bool:
    if header.checksum is None:
        return False
    at = regions.data_offset(slab)
    return xxhash.xxh3_64_intdigest(pool.bytes[at : at + header.data_bytes]) == header.checksum
