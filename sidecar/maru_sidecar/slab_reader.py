"""Whether a slab is still what it is taken for: the one check before, and the one after, every copy out of the pool.

*Before*: its state word is the one it was found with and says COMMITTED, its region's header is sound and puts it where it is
read, its own header passes its CRC and names this chunk, this rank, this length. *After*: the same word still. A writer changes
the word before the first new byte, and formats a region by clearing every word before it stores the new region header: a word
that has not changed means that offset, header and bytes belong together.

In a shared pool another node may reuse the slab at any time. In one of our own nobody may, but memory that was punched out,
zeroed or overwritten must not pass for a slab either: neither the index nor a checksum flag found there vouches for it.

Both together cost 1.5 µs a slab and 2 µs a call (numpy: no less for 64 of them, and 35 µs for one).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from maru_shm import poolformat as F
from maru_shm.atomics import order_fence
from maru_shm.layout import KEY_BYTES
from maru_sidecar.pool import PoolFile
from maru_sidecar.slab_handles import SlabRef
from maru_sidecar.slab_header import region_layout, slab_offset

_COMMITTED = int(F.SlabState.COMMITTED)
_REGION_RAW = F.REGION_HEADER.size + F.CRC.size


class Sound(NamedTuple):
    """``n`` leading slabs are sound; ``checksums`` are theirs, xxh3-64 of the data, None where none was taken."""

    n: int
    checksums: list[int | None]


class SlabReader:
    """Finds and checks slabs by place. Thread-safe: it reads the mapping only."""

    def __init__(self, pool: PoolFile) -> None:
        self._bytes, self._words = pool.bytes, pool.words
        self._region_bytes, self._n_regions = pool.region_bytes, pool.n_regions
        self._known: dict[int, tuple[bytes, tuple[int, int, int] | None]] = {}  #: regions' headers, and what they say

    def locate(self, region: int, number: int, generation: int, stride: int) -> SlabRef | None:
        """The slab at a place, if it is COMMITTED under ``generation`` in a region of ``stride`` bytes per slab."""
        if not 0 < region < self._n_regions:
            return None
        base = region * self._region_bytes
        header = slab_offset(base, number)
        if header + F.SLAB_HEADER_BYTES > base + self._region_bytes:
            return None
        word = generation << 8 | F.SlabState.COMMITTED
        if self._words[header >> 3] != word:
            return None
        order_fence()  # SYNC POINT: the word first; see the module
        layout = self._layout(region)
        if layout is None or layout[0] != stride or number >= layout[1]:
            return None
        return SlabRef(base + layout[2] + number * stride, word, header)

    def committed(self, region: int, number: int, generation: int) -> bool:
        """Whether a place holds what it was published for: one load, for lookups of many chunks."""
        if not 0 < region < self._n_regions or number >= (self._region_bytes >> 12):
            return False
        header = slab_offset(region * self._region_bytes, number)
        return bool(self._words[header >> 3] == generation << 8 | F.SlabState.COMMITTED)

    def leading_sound(self, refs: Sequence[SlabRef], namespace: bytes, keys: bytes, *, rank: int, nbytes: int) -> Sound:
        """Before a copy: how many leading slabs are what they are taken for. ``refs[i]`` is of the i-th key of ``keys``."""
        view, base, end, layout = self._bytes, 0, 0, None
        checksums: list[int | None] = []
        for i, ref in enumerate(refs):
            at = ref.header
            packed = bytes(view[at : at + F.SLAB_CRC_TO])  # a copy, looked at from here on
            (word, magic, version, crc, of_namespace, of_key, _, of_rank, _, data_bytes, checksum, flags,
             _) = F.SLAB_NAMED.unpack_from(packed)  # fmt: skip
            if not base <= at < end:
                base = at // self._region_bytes * self._region_bytes
                end, layout = base + self._region_bytes, self._layout(base // self._region_bytes)
            if (
                word != ref.state_word
                or word & 0xFF != _COMMITTED
                or magic != F.SLAB_MAGIC
                or version != F.FORMAT
                or crc != zlib.crc32(packed[F.SLAB_CRC_FROM :])
                or of_namespace != namespace
                or of_key != keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
                or of_rank != rank
                or data_bytes != nbytes
                or not _placed(ref, base, layout)
                or (ref.checksummed and not flags & F.FLAG_CHECKSUM)
            ):
                break
            checksums.append(checksum if flags & F.FLAG_CHECKSUM else None)
        n = self.leading_unchanged(refs[: len(checksums)])
        return Sound(n, checksums[:n])

    def _layout(self, region: int) -> tuple[int, int, int] | None:
        """(stride, slabs, data offset) as the region's header says now; None if it is not sound."""
        base = region * self._region_bytes
        raw = bytes(self._bytes[base : base + _REGION_RAW])
        known = self._known.get(region)
        if known is None or known[0] != raw:
            known = self._known[region] = raw, region_layout(raw, self._region_bytes)
        return known[1]

    def leading_unchanged(self, refs: Sequence[SlabRef]) -> int:
        """After a copy: how many leading slabs still are the ones that were found."""
        order_fence()  # SYNC POINT: after every byte that was read
        words = self._words
        for i, ref in enumerate(refs):
            if words[ref.header >> 3] != ref.state_word:
                return i
        return len(refs)


def _placed(ref: SlabRef, base: int, layout: tuple[int, int, int] | None) -> bool:
    """Whether a slab's data lies where the header of its region, at ``base``, says."""
    if layout is None:
        return False
    stride, n_slabs, data_offset = layout
    number = (ref.header - slab_offset(base, 0)) // F.SLAB_HEADER_BYTES
    return number < n_slabs and ref.offset == base + data_offset + number * stride
