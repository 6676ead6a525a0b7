"""Damage to a pool file from outside, as failing memory would do it: the directory is not told."""

from __future__ import annotations

import numpy as np

from maru_shm import poolformat as F


def flip_slabs(
    path: str, *, depth: int, rank: int | None = None, of_prefix: bytes | None = None, forget_checksum: bool = False
) -> int:
    """Flip one byte in the middle of every committed slab that is ``depth`` chunks into its prefix; how many there were.

    ``rank`` narrows it to one rank's slabs, ``of_prefix`` to one parent key. ``forget_checksum``: a second fault, in the
    header, makes the slab look as if it never had one.
    """
    pool = np.memmap(path, dtype=np.uint8, mode="r+")
    fields = F.POOL_HEADER.unpack_from(pool[: F.POOL_HEADER.size].tobytes())
    region_bytes, n_regions = fields[5], fields[6]
    hit = 0
    for start in range(region_bytes, region_bytes * n_regions, region_bytes):
        magic, _, _, slab_bytes, stride, n_slabs, data_offset = F.REGION_HEADER.unpack_from(
            pool[start : start + F.REGION_HEADER.size].tobytes()
        )
        if magic != F.REGION_MAGIC:
            continue
        at = start + F.HEADER_BYTES
        headers = pool[at : at + n_slabs * F.SLAB_HEADER_BYTES].view(F.SLAB_HEADER)
        for i in np.flatnonzero((headers["state"] & 0xFF) == F.SlabState.COMMITTED):
            header = headers[i]
            if header["depth"] != depth or (rank is not None and header["rank"] != rank):
                continue
            if of_prefix is not None and header["parent"].tobytes() != of_prefix:
                continue
            pool[start + data_offset + int(i) * stride + slab_bytes // 2] ^= 0xFF
            if forget_checksum:
                header["flags"] &= ~np.uint32(F.FLAG_CHECKSUM)
            hit += 1
    return hit
