"""The pool on memory, byte by byte. It describes itself: a directory is rebuilt by reading slab headers, there is no log.

::

    0                     pool header      4 KiB (a second copy at 2048 where it is stored through a mapping)
    4 KiB .. 1 region     unused           so that every region starts on a region boundary
    region_bytes × i      region i (i ≥ 1)
        0                 region header    4 KiB
        4 KiB             slab headers     n_slabs × 256 B
        data_offset       slab data        n_slabs × slab_stride (slab_bytes rounded up to 4 KiB; data_offset too)

In a shared pool, offset 1024 of a region's first page says whose it is (REGION_OWNER): a restarted node claims those.

A region is formatted for one slab size when its first slab is needed and may be formatted again once it is empty.
A slab is one chunk of one rank. All integers are little-endian. CRCs are zlib's CRC-32.

*Slab state word*: ``generation << 8 | SlabState``, stored last and aligned. The generation rises each time the slab is
reused, so a reader that sees the same word before and after its copy has read one slab, not two.

*Two-phase commit*: WRITING is stored before the first data byte, header fields and CRC before COMMITTED. After a crash a
WRITING slab is free again, and a COMMITTED slab whose header CRC fails is dropped and counted.

*Checksum*: xxh3-64 of the data, where FLAG_CHECKSUM is set. ECC guards memory; the checksum guards against everything else
and costs a pass of the CPU over the bytes, so it is taken where the CPU moves them anyway.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import zlib

import numpy as np

POOL_MAGIC = int.from_bytes(b"MARUPOOL", "little")
REGION_MAGIC = int.from_bytes(b"MARUREGN", "little")
SLAB_MAGIC = int.from_bytes(b"MARUSLAB", "little")
FORMAT = 1  #: another format is refused, never reinterpreted

HEADER_BYTES = 4096
POOL_HEADER_COPY_OFFSET = 2048  #: written before the header itself, read if that fails its CRC
DATA_ALIGN = 4096

#: magic, format, flags, uuid, pool bytes, region bytes, n_regions (including the header's), created (ns since the epoch),
#: boot id of the last writer, clean (1 after an orderly stop), owner epoch, crc32 of everything before
POOL_HEADER = struct.Struct("<QII16sQQQQ16sQQ")
#: magic, format, flags, slab bytes, slab stride, n_slabs, data offset, crc32 of everything before
REGION_HEADER = struct.Struct("<QIIQQQQ")
CRC = struct.Struct("<I")

#: pool header flags
FLAG_CREATING = 1  #: not yet sized
FLAG_SHARED = 2  #: several sidecars use it, each writes only the regions granted to it

OWNER_MAGIC = int.from_bytes(b"MARUOWNR", "little")
REGION_OWNER_OFFSET = 1024
#: magic, node id (16 bytes, see ``node_id``), fencing token of the grant, boot id of the owner's machine, then the CRC
REGION_OWNER = struct.Struct("<Q16sQ16s")

SLAB_HEADER_BYTES = 256
FLAG_CHECKSUM = 1


class SlabState(enum.IntEnum):
    """Low byte of a slab's state word."""

    FREE = 0
    WRITING = 1
    COMMITTED = 2
    EVICTING = 3


#: One slab header as a numpy record (256 bytes).
SLAB_HEADER = np.dtype(
    [
        ("state", "<u8"),
        ("magic", "<u8"),
        ("format", "<u4"),
        ("crc", "<u4"),  #: CRC-32 of bytes 24..119
        ("namespace", "V16"),
        ("key", "V16"),
        ("parent", "V16"),  #: the key before it in its prefix; the root for a first chunk
        ("rank", "<u4"),
        ("world", "<u4"),
        ("data_bytes", "<u8"),
        ("checksum", "<u8"),
        ("flags", "<u4"),
        ("tokens", "<u4"),  #: tokens of the chunk
        ("created_ns", "<u8"),  #: ns since the epoch
        ("depth", "<u4"),  #: chunks before it in its prefix
        ("pad", "V4"),
        ("pins", "<u8"),  #: operators' pins of the chunk, see ``pins_word``; not in the CRC, stored while COMMITTED
        ("reserved", "V128"),
    ]
)
assert SLAB_HEADER.itemsize == SLAB_HEADER_BYTES
SLAB_CRC_FROM, SLAB_CRC_TO = 24, 120
SLAB_PINS_OFFSET = 120
#: The fields of SLAB_HEADER from its state to its tokens: for one header at a time this takes 0.5 µs, the record 5 µs.
SLAB_NAMED = struct.Struct("<QQII16s16s16sIIQQII")
assert SLAB_NAMED.size == SLAB_HEADER.fields["created_ns"][1] <= SLAB_CRC_TO  # type: ignore[index]


def node_id(name: str) -> bytes:
    """16 bytes that stand for a node's name in the pool."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"maru-node").digest()


def with_crc(packed: bytes) -> bytes:
    """A packed pool or region header with its CRC appended."""
    return packed + CRC.pack(zlib.crc32(packed))


def crc_matches(raw: bytes | memoryview, size: int) -> bool:
    """Whether ``raw[:size]`` is followed by its own CRC."""
    (crc,) = CRC.unpack_from(raw, size)
    return bool(crc == zlib.crc32(raw[:size]))


def slab_crc_matches(packed: bytes) -> bool:
    """Whether a packed slab header passes its own CRC."""
    return int.from_bytes(packed[20:24], "little") == zlib.crc32(packed[SLAB_CRC_FROM:SLAB_CRC_TO])


def pins_word(n: int) -> int:
    """How ``n`` pins, below 2**32, are written: with their complement above them, so that no stray bits pass for pins."""
    return (n ^ 0xFFFF_FFFF) << 32 | n if n else 0


def pins_of(word: int) -> int:
    """The pins a word says; 0 if it is not one of :func:`pins_word`'s."""
    n = word & 0xFFFF_FFFF
    return n if word == pins_word(n) else 0


def slab_stride(slab_bytes: int) -> int:
    """Distance between the data of neighbouring slabs (bytes)."""
    return (slab_bytes + DATA_ALIGN - 1) // DATA_ALIGN * DATA_ALIGN


def region_plan(region_bytes: int, slab_bytes: int) -> tuple[int, int]:
    """``(n_slabs, data_offset)`` of a region formatted for ``slab_bytes``; ``n_slabs`` 0 if not even one fits."""
    stride = slab_stride(slab_bytes)
    n = (region_bytes - HEADER_BYTES) // (stride + SLAB_HEADER_BYTES)
    while n > 0:
        data = slab_stride(HEADER_BYTES + n * SLAB_HEADER_BYTES)
        if data + n * stride <= region_bytes:
            return n, data
        n -= 1
    return 0, 0
