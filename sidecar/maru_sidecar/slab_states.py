"""The state word and header of a slab on the mapping: its two-phase commit, and its end.

State words go through a ``memoryview.cast("Q")`` of the whole pool: one aligned ``mov``, where a numpy structured assignment
may copy by bytes and tear. Everything else in a header is written while the state says WRITING.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from maru_shm import failpoints
from maru_shm import poolformat as F
from maru_shm.atomics import order_fence
from maru_shm.errors import RegionNotHeld
from maru_sidecar.pool import PoolFile
from maru_sidecar.sharing.rights import WholePool, WriteRights
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
        self._whole = isinstance(rights, WholePool)
        self._writing: dict[int, int] = {}  #: slab → the word that :meth:`begin_write` stored
        self._bytes = pool.bytes
        self._words = pool.words
        self._region_bytes = pool.region_bytes

    def state_word(self, slab: int) -> int:
        return self._words[slab >> 3]

    def read_header(self, slab: int) -> SlabHeader:
        return decode(bytes(self._bytes[slab : slab + F.SLAB_HEADER_BYTES]))

    def begin_write(self, slab: int) -> None:
        """WRITING under a new generation, and no header any more; after this the data may be written. Raises
        :class:`~maru_shm.errors.RegionNotHeld`.

        Without its magic the old header, whose CRC is still right, cannot come to describe the new data, whatever state word
        it is found with.
        """
        failpoints.hit("commit.before_writing")
        self._rights.check(slab // self._region_bytes)
        generation = (self._words[slab >> 3] >> STATE_BITS) + 1 & _GENERATION_MASK
        self._words[slab >> 3] = self._writing[slab] = generation << STATE_BITS | F.SlabState.WRITING
        order_fence()  # SYNC POINT: a reader that sees new data also sees that the slab changed
        self._words[(slab >> 3) + 1] = 0  # the magic
        order_fence()
        failpoints.hit("commit.after_writing")

    def may_write(self, slabs: Iterable[int]) -> bool:
        """Whether all of these lie in regions that may be written now."""
        return self._whole or all(map(self._rights.may_write, {slab // self._region_bytes for slab in slabs}))

    def guard(self, slabs: Iterable[int]) -> Callable[[], None] | None:
        """What raises :class:`~maru_shm.errors.RegionNotHeld` once the region of one of these may not be written any more; None
        where nobody else writes the pool.
        """
        if self._whole:
            return None
        check, regions = self._rights.check, {slab // self._region_bytes for slab in slabs}

        def may_go_on() -> None:
            for region in regions:
                check(region)

        return may_go_on

    def check_write(self, slab: int) -> int:
        """The word that :meth:`begin_write` stored. Raises :class:`~maru_shm.errors.RegionNotHeld` unless it still stands there
        and the slab's region may be written now.
        """
        region = slab // self._region_bytes
        self._rights.check(region)
        word = self._writing[slab]
        if self._words[slab >> 3] != word:
            raise RegionNotHeld(
                f"the slab at {slab:#x} says {self._words[slab >> 3]:#x}, not {word:#x}: region {region} has another writer",
                "nothing to do: the chunk is not stored",
            )
        return word

    def write_header(self, slab: int, header: SlabHeader) -> None:
        """Everything but the state word; the slab stays WRITING. Raises :class:`~maru_shm.errors.RegionNotHeld`."""
        self.check_write(slab)
        failpoints.hit("commit.after_data")
        self._bytes[slab + 8 : slab + F.SLAB_HEADER_BYTES] = encode(header)[8:]
        failpoints.hit("commit.before_state")

    def publish(self, slab: int) -> None:
        """COMMITTED, stored last. Raises :class:`~maru_shm.errors.RegionNotHeld`, and stores nothing, without the right to."""
        word = self.check_write(slab)
        order_fence()  # SYNC POINT: release
        self._words[slab >> 3] = word & ~0xFF | F.SlabState.COMMITTED
        del self._writing[slab]
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
        """Store a state under the slab's generation, if its region may be written. A slab that was being written is let alone
        if it is another's by now.
        """
        word = self._words[slab >> 3]
        if self._writing.pop(slab, word) == word and self._rights.may_write(slab // self._region_bytes):
            self._words[slab >> 3] = word & ~0xFF | state
