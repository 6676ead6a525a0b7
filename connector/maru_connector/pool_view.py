"""The pool as a worker sees it: mapped read-only from the descriptor that came with the attachment.

The mapping is of a file, not of a process: it stays valid, and so do leased slabs in it, when the sidecar dies. Two attachments
to one pool file share a view.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt
import xxhash

from maru_shm import poolformat as P
from maru_shm.atomics import order_fence
from maru_shm.errors import PoolCorrupt
from maru_shm.layout import KEY_BYTES


class PoolView:
    """``fd`` stays the caller's; ``size`` in bytes. Raises :class:`PoolCorrupt` if it is no pool, ``OSError`` if it cannot be
    mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.file = file_identity(fd)
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._words = self._bytes[: size // 8 * 8].view("<u8")
        self.address = int(self._bytes.ctypes.data)
        header = P.POOL_HEADER.unpack_from(self._map)
        self._region_bytes = int(header[5])
        self.shared = bool(header[2] & P.FLAG_SHARED)  #: several nodes write it
        if header[0] != P.POOL_MAGIC or not 0 < self._region_bytes <= size:
            self.close()
            raise PoolCorrupt("the descriptor that came with the attachment is no pool", "run the same release on both sides")

    def holds(self, slabs: npt.NDArray[np.uint64], nbytes: int) -> bool:
        """Whether every slab is still the one that was located. ``slabs``: shape (n, 2), see ``layout.SLAB_REF``; ``nbytes``:
        of each.

        Asked before the first byte is read and again after the last: the same word twice means one slab was read, not two.
        """
        offsets, words = slabs[:, 0].astype(np.int64), slabs[:, 1]
        if (offsets < 0).any() or (offsets > self.size - nbytes).any() or (words & 0xFF != P.SlabState.COMMITTED).any():
            return False
        order_fence()  # SYNC POINT: the copies before this were made before the words are read
        regions = offsets // self._region_bytes
        for region in np.unique(regions):
            here = regions == region
            at = self._word_indices(int(region), offsets[here])
            if at is None or (self._words[at] != words[here]).any():
                return False
        return True

    def names(self, slabs: npt.NDArray[np.uint64], nbytes: int, *, namespace: bytes, keys: bytes, rank: int) -> bool:
        """Whether every slab's header is sound and names its chunk: ``slabs[i]`` is ``rank``'s part of the i-th of ``keys``.

        Where a slab lies says nothing of what it holds: the sidecar that located it may have been stopped while its region went
        to another node. Between two times that :meth:`holds` is true, what is true here is true of the bytes read. 2 µs a slab.
        """
        for i, offset in enumerate(slabs[:, 0].tolist()):
            packed = self._header(offset)
            if packed is None:
                return False
            (_, magic, version, _, of_namespace, of_key, _, of_rank, _, data_bytes, _, _, _) = P.SLAB_NAMED.unpack_from(packed)
            if (
                (magic, version) != (P.SLAB_MAGIC, P.FORMAT)
                or not P.slab_crc_matches(packed)
                or of_namespace != namespace
                or of_key != keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
                or (of_rank, data_bytes) != (rank, nbytes)
            ):
                return False
        return True

    def intact(self, slabs: npt.NDArray[np.uint64], nbytes: int) -> bool:
        """Whether the bytes of every slab match its checksum, if it carries one: one pass over them, about 10 GB/s.

        Asked of slabs that :meth:`names` found sound.
        """
        for offset in slabs[:, 0].tolist():
            packed = self._header(offset)
            if packed is None:
                return False
            *_, checksum, flags, _ = P.SLAB_NAMED.unpack_from(packed)
            if flags & P.FLAG_CHECKSUM and checksum != xxhash.xxh3_64_intdigest(self._bytes[offset : offset + nbytes].data):
                return False
        return True

    def _header(self, offset: int) -> bytes | None:
        """A copy of the header of the slab whose data starts at ``offset``; None if no slab's does."""
        base = offset // self._region_bytes * self._region_bytes
        magic, _, _, _, stride, n_slabs, data = P.REGION_HEADER.unpack_from(self._map, base)
        if magic != P.REGION_MAGIC or not stride:
            return None
        slot, rest = divmod(offset - base - data, stride)
        if rest or not 0 <= slot < n_slabs:
            return None
        start = base + P.HEADER_BYTES + slot * P.SLAB_HEADER_BYTES
        return self._map[start : start + P.SLAB_HEADER_BYTES]

    def _word_indices(self, region: int, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Where the slabs' state words are, as u64 indices; None if the region is not formatted for such slabs."""
        base = region * self._region_bytes
        magic, _, _, _, stride, n_slabs, data = P.REGION_HEADER.unpack_from(self._map, base)
        if magic != P.REGION_MAGIC or not stride:
            return None
        slots, rest = np.divmod(offsets - base - data, stride)
        if rest.any() or (slots < 0).any() or (slots >= n_slabs).any():
            return None
        indices: npt.NDArray[np.int64] = (base + P.HEADER_BYTES + slots * P.SLAB_HEADER_BYTES) // 8
        return indices

    def close(self) -> None:
        """Unmap. No copy out of it may run; idempotent."""
        del self._words, self._bytes
        self._words = self._bytes = np.empty(0, np.uint8)
        self._map.close()


def file_identity(fd: int) -> tuple[int, int, int]:
    """What makes two descriptors one file."""
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino, stat.st_size
