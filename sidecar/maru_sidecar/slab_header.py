"""One slab's header and one region's, between bytes and values (``maru_shm.poolformat``). No mapping, no state."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np

from maru_shm import poolformat as F


class SlabHeader(NamedTuple):
    """What a slab says of itself, apart from its state. Keys are 16 bytes; ``created_ns`` is ns since the epoch."""

    namespace: bytes
    key: bytes
    parent: bytes
    rank: int
    world: int
    data_bytes: int
    checksum: int | None  #: xxh3-64 of the data, None if not taken
    tokens: int
    created_ns: int
    depth: int
    pins: int = 0  #: operators' pins of the chunk, kept for the next sidecar; a new slab has none


def slab_offset(base: int, number: int) -> int:
    """Offset of the header of a region's slab ``number``: the same for every slab size. ``base``: the region's offset."""
    return base + F.HEADER_BYTES + number * F.SLAB_HEADER_BYTES


def region_layout(raw: bytes, region_bytes: int) -> tuple[int, int, int] | None:
    """``(stride, n_slabs, data_offset)`` of a packed region header with its CRC; None for a damaged or missing one."""
    magic, version, _, slab_bytes, stride, n, data_offset = F.REGION_HEADER.unpack_from(raw)
    good = (
        magic == F.REGION_MAGIC
        and version == F.FORMAT
        and F.crc_matches(raw, F.REGION_HEADER.size)
        and 0 < slab_bytes <= region_bytes
        and stride == F.slab_stride(slab_bytes)
        and n > 0
        and (n, data_offset) == F.region_plan(region_bytes, slab_bytes)
    )
    return (stride, n, data_offset) if good else None


def encode(h: SlabHeader) -> bytes:
    """256 bytes, CRC included, state word 0."""
    flags = 0 if h.checksum is None else F.FLAG_CHECKSUM
    record = np.zeros(1, F.SLAB_HEADER)
    record[0] = (
        0, F.SLAB_MAGIC, F.FORMAT, 0, h.namespace, h.key, h.parent, h.rank, h.world, h.data_bytes, h.checksum or 0, flags,
        h.tokens, h.created_ns, h.depth, b"", F.pins_word(h.pins), b"",
    )  # fmt: skip
    raw = bytearray(record.tobytes())
    struct.pack_into("<I", raw, 20, zlib.crc32(raw[F.SLAB_CRC_FROM : F.SLAB_CRC_TO]))
    return bytes(raw)


def decode(packed: bytes) -> SlabHeader:
    """Of 256 bytes, unchecked."""
    r = np.frombuffer(packed, F.SLAB_HEADER, 1)[0]
    return SlabHeader(
        namespace=r["namespace"].tobytes(),
        key=r["key"].tobytes(),
        parent=r["parent"].tobytes(),
        rank=int(r["rank"]),
        world=int(r["world"]),
        data_bytes=int(r["data_bytes"]),
        checksum=int(r["checksum"]) if int(r["flags"]) & F.FLAG_CHECKSUM else None,
        tokens=int(r["tokens"]),
        created_ns=int(r["created_ns"]),
        depth=int(r["depth"]),
        pins=F.pins_of(int(r["pins"])),
    )
