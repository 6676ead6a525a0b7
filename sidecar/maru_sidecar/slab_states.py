"""The state word and header of a slab on the mapping: its two-phase commit, and its end.

State words go through a ``memoryview.cast("Q")`` of the whole pool: one aligned ``mov``, where a numpy structured assignment
may copy by bytes and tear. Everything else in a header is written while the state says WRITING.
"""

from __future__ import annotations

from maru_shm import failpoints
from maru_shm import poolformat as F
from maru_shm.atomics import order_fence
from maru_sidecar.pool import PoolFile
from maru_sidecar.sharing.rights import WriteRights
from maru_sidecar.slab_header import SlabHeader, decode, encode

STATE_BITS = 8  #: of a state word, low; the rest is the generation
_GENERATION_MASK = (1 << 56) - 1


class SlabStates:
    """The slabs of one pool, each named by the offset of its header. ``rights`` says which regions may be written now.

    Not thread-safe: under the directory's lock, except for :meth:`write_header`, which touches one slab that its writer owns
    alone.
    """

    def __init__(self, pool: PoolFile, rights: WriteRights) -> None:
        self._rights = rights
        self._bytes = pool.bytes
        self._words = pool.words
        self._region_bytes = pool.region_bytes

    def state_word(self, slab: int) -> int:
        return self._words[slab >> 3]

    def read_header(self, slab: int) -> SlabHeader:
        return decode(bytes(self._bytes[slab : slab + F.SLAB_HEADER_BYTES]))

    def begin_write(self, slab: int) -> None:
        """WRITING under a new generation, and no header any more; after this the data may be written.

        Without its magic the old header, whose CRC is still right, cannot come to describe the new data, whatever state word
        it is found with.
        """
        failpoints.hit("commit.before_writing")
        generation = (self._words[slab >> 3] >> STATE_BITS) + 1 & _GENERATION_MASK
        self._words[slab >> 3] = generation << STATE_BITS | F.SlabState.WRITING
        order_fence()  # SYNC POINT: a reader that sees new data also sees that the slab changed
        self._words[(slab >> 3) + 1] = 0  # the magic
        order_fence()
        failpoints.hit("commit.after_writing")

    def check_right(self, slab: int) -> None:
        """Raise :class:`~maru_shm.errors.RegionNotHeld` unless the slab's region may be written now."""
        self._rights.check(slab // self._region_bytes)

    def write_header(self, slab: int, header: SlabHeader) -> None:
        """Everything but the state word; the slab stays WRITING. Raises :class:`~maru_shm.errors.RegionNotHeld`."""
        self.check_right(slab)
        failpoints.hit("commit.after_data")
        self._bytes[slab + 8 : slab + F.SLAB_HEADER_BYTES] = encode(header)[8:]
        failpoints.hit("commit.before_state")

    def publish(self, slab: int) -> None:
        """COMMITTED, stored last. Raises :class:`~maru_shm.errors.RegionNotHeld`, and stores nothing, without the right to."""
        self.check_right(slab)
        order_fence()  # SYNC POINT: release
        self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | F.SlabState.COMMITTED
        failpoints.hit("commit.after_state")

    def keep_pins(self, slab: int, n: int) -> None:
        """Store operators' pins of a committed slab's chunk, if its region may be written."""
        if self._rights.may_write(slab // self._region_bytes):
            self._words[(slab + F.SLAB_PINS_OFFSET) >> 3] = F.pins_word(n)

    def begin_evict(self, slab: int) -> None:
        """EVICTING: no reader may start on it, and a restart frees it."""
        self.mark(slab, F.SlabState.EVICTING)
        failpoints.hit("evict.after_state")

    def mark(self, slab: int, state: F.SlabState) -> None:
        """Store a state under the slab's generation, if its region may be written."""
        if self._rights.may_write(slab // self._region_bytes):
            self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | state
