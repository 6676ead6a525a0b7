"""The owner record in a region's header page (``poolformat.REGION_OWNER``): what a restarted node may claim.

Only the node that may write the region writes it. It is a hint, never a right: the server decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from maru_shm import poolformat as F
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_header import boot_id

_BYTES = F.REGION_OWNER.size + F.CRC.size


@dataclass(frozen=True, slots=True)
class Owner:
    node: bytes  #: ``poolformat.node_id`` of its name
    token: int
    boot: bytes


def _offset(pool: PoolFile, region: int) -> int:
    return region * pool.region_bytes + F.REGION_OWNER_OFFSET


def parse(raw: bytes) -> Owner | None:
    """The record, or None if there is none or it is damaged."""
    magic, node, token, boot = F.REGION_OWNER.unpack_from(raw)
    if magic != F.OWNER_MAGIC or not F.crc_matches(raw, F.REGION_OWNER.size):
        return None
    return Owner(node, token, boot)


def read(pool: PoolFile, region: int) -> Owner | None:
    at = _offset(pool, region)
    return parse(bytes(pool.bytes[at : at + _BYTES]))


def write(pool: PoolFile, region: int, node: bytes, token: int) -> None:
    """Name the owner. The caller holds the region's lease."""
    at = _offset(pool, region)
    pool.bytes[at : at + _BYTES] = F.with_crc(F.REGION_OWNER.pack(F.OWNER_MAGIC, node, token, boot_id()))


def erase(pool: PoolFile, region: int) -> None:
    """The region is given back: claim it no more. The caller still holds its lease."""
    at = _offset(pool, region)
    pool.bytes[at : at + _BYTES] = bytes(_BYTES)


def of_node(pool: PoolFile, node: bytes) -> list[tuple[int, Owner]]:
    """Every region whose record names ``node``."""
    found = []
    for region in range(1, pool.n_regions):
        owner = read(pool, region)
        if owner is not None and owner.node == node:
            found.append((region, owner))
    return found
