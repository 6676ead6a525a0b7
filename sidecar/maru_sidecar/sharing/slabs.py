"""Reading slabs that another sidecar may be reusing: a miss at worst, never a wrong byte.

A slab's state word (generation and state) is read, then its region's header, then its own, then the data is copied, then the
word is read again. A writer changes the word before the first new byte, and formats a region by clearing every word before it
stores the new region header: a word that has not changed means that offset, header and bytes belong together.

Where the CPU moves the bytes, a foreign slab's checksum is compared again *after* the copy: it also catches a writer that
was paused in mid-copy, lost its lease and went on.
"""

from __future__ import annotations

from collections.abc import Sequence

from maru_shm import poolformat as F
from maru_shm.atomics import order_fence
from maru_shm.layout import KEY_BYTES
from maru_shm.records import Request
from maru_sidecar.checksum import SlabChecker
from maru_sidecar.copy_thread import WorkerPort
from maru_sidecar.directory import Acquired, Directory, SlabRef
from maru_sidecar.pool import PoolFile
from maru_sidecar.sharing.foreign import ForeignLeases
from maru_sidecar.slab_header import crc_good, decode, region_layout, slab_offset

_REGION_RAW = F.REGION_HEADER.size + F.CRC.size


class SlabReader:
    """Finds and checks slabs by place. Thread-safe: it reads the mapping only."""

    def __init__(self, pool: PoolFile) -> None:
        self._bytes, self._words = pool.bytes, pool.words
        self._region_bytes, self._n_regions = pool.region_bytes, pool.n_regions

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
        layout = region_layout(bytes(self._bytes[base : base + _REGION_RAW]), self._region_bytes)
        if layout is None or layout[0] != stride or number >= layout[1]:
            return None
        return SlabRef(base + layout[2] + number * stride, word, header)

    def committed(self, region: int, number: int, generation: int) -> bool:
        """Whether a place holds what it was published for: one load, for lookups of many chunks."""
        if not 0 < region < self._n_regions or number >= (self._region_bytes >> 12):
            return False
        header = slab_offset(region * self._region_bytes, number)
        return bool(self._words[header >> 3] == generation << 8 | F.SlabState.COMMITTED)

    def names(self, ref: SlabRef, namespace: bytes, key: bytes, rank: int, nbytes: int) -> bool:
        """Whether the slab's header is sound and says that it is this chunk of this rank, of this length."""
        packed = bytes(self._bytes[ref.header : ref.header + F.SLAB_HEADER_BYTES])
        if int.from_bytes(packed[8:16], "little") != F.SLAB_MAGIC or not crc_good(packed):
            return False
        h = decode(packed)
        return (h.namespace, h.key, h.rank, h.data_bytes) == (namespace, key, rank, nbytes)

    def unchanged(self, ref: SlabRef) -> bool:
        """Whether the slab is still the one that was located."""
        order_fence()  # SYNC POINT: after every byte that was read
        return bool(self._words[ref.header >> 3] == ref.state_word)


class MixedSlabs:
    """Slabs for one load: our own, pinned until :meth:`release`, and foreign ones, which nothing here can pin."""

    def __init__(self) -> None:
        self.refs: list[SlabRef] = []
        self._held: list[Acquired] = []

    @property
    def n_found(self) -> int:
        return len(self.refs)

    def add(self, acquired: Acquired) -> None:
        self._held.append(acquired)
        self.refs += acquired.refs

    def release(self) -> None:
        """Unpin our own (idempotent)."""
        held, self._held = self._held, []
        for acquired in held:
            acquired.release()


class SharedSlabs:
    """Where a load's bytes come from when the pool is shared. Loaders of all devices use it."""

    def __init__(self, directory: Directory, reader: SlabReader, leases: ForeignLeases) -> None:
        self._directory = directory
        self._reader = reader
        self._leases = leases
        self.vanished = 0  #: slabs that were gone or reused when a load wanted them, or during its copy

    def acquire(self, port: WorkerPort, request: Request) -> MixedSlabs:
        """The leading slabs of a LOAD that are here or held by the foreign part of its lease."""
        found, keys = MixedSlabs(), request.keys
        foreign = self._leases.find(request.lease_session, request.lease)
        stride = F.slab_stride(port.slab_bytes)
        at = 0
        while at < request.n_keys:
            acquired = self._directory.acquire(port.namespace, keys[at * KEY_BYTES :], rank=port.rank)
            if acquired.n_found:
                found.add(acquired)
                at += acquired.n_found
                continue
            place = foreign.places.get((request.key(at), port.rank)) if foreign is not None else None
            ref = self._reader.locate(*place, stride) if place is not None else None
            if ref is None:
                self.vanished += place is not None
                break
            found.refs.append(ref)
            at += 1
        return found

    def leading_sound(self, refs: Sequence[SlabRef], first: int, port: WorkerPort, request: Request) -> int:
        """Before a copy: how many leading slabs are what their keys say. ``refs[0]`` belongs to key ``first``."""
        for i, ref in enumerate(refs):
            key = request.key(first + i)
            named = self._reader.names(ref, port.namespace, key, port.rank, port.slab_bytes)
            if not named or not self._reader.unchanged(ref):
                self.vanished += 1
                return i
        return len(refs)

    def leading_intact(self, refs: Sequence[SlabRef], nbytes: int, checker: SlabChecker | None) -> int:
        """After a copy: how many leading slabs were not touched meanwhile."""
        for i, ref in enumerate(refs):
            sound = checker is None or self._directory.shared.owns(ref.header) or checker.leading_good([ref], nbytes) == 1
            if not sound or not self._reader.unchanged(ref):
                self.vanished += 1
                return i
        return len(refs)
