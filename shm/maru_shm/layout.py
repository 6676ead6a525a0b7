"""The hot-path segment, byte by byte. Both sides and the debugging tools import this file; nothing else knows offsets.

One POSIX shared-memory segment per attached client (one per scheduler, one per worker)::

    0x0000  header            4 KiB   static block, then one mutable word per 128-byte line
    0x1000  fence page        4 KiB   the fence word, alone on a page that a GPU driver may register
    0x2000  submission ring   n_slots   × 32 B    client → sidecar, single producer, single consumer
    ......  record table      n_records × 256 B   the completion flags
    ......  request cells     n_records × cell_bytes    keys, then block ids
    ......  reply cells       n_records × reply_bytes   slab references (LOCATE only)

All integers are little-endian. Sections start on 4 KiB.

*Static block* (offset 8): written once by the sidecar; the magic at offset 0 is stored last. ``crc32`` covers it.

*Submission slot*: ``seq u64 = position + 1`` | ``ticket u64`` | ``verb u64`` | ``reserved u64``. The position-stamped sequence
makes a stale or half-written slot never look current. ``SUBMIT`` hands over the record the ticket names; ``RELEASE`` gives a
lease back; ``CANCEL`` wakes the sidecar after the record's cancel word was set.

*Ticket* (56 bits): ``serial << 16 | record index``. A ticket is never reused in a segment's life.

*Record state word*: ``ticket << 8 | state``; one aligned store publishes a step, and a word of an older ticket can never be
taken for the current one. Each step has one writer::

    FREE ──client──▶ POSTED ──sidecar──▶ ACCEPTED ──sidecar──▶ DONE | FAILED | CANCELLED ──client──▶ FREE

Exactly one terminal state per ticket. The state word is written last, after everything it announces.

*Cancel and copying words* (record offsets 56 and 136) let a client take its blocks back from a stalled sidecar without
asking it. The client sets *cancel*, fences, then reads *copying*: if 0, no copy runs and none will start, since the sidecar
sets *copying*, fences, then reads *cancel* before every copy it issues. If 1, the client waits for 0 or for the sidecar's
death (pidfd).
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from maru_shm.errors import SegmentCorrupt

SEGMENT_MAGIC = int.from_bytes(b"MARUSEG1", "little")
ENDIAN_MARK = 0x0102030405060708
ABI_MAJOR = 1  #: another major is refused
ABI_MINOR = 0  #: a larger minor only adds words in reserved space

HEADER_BYTES = 4096
FENCE_PAGE = 4096
FENCE_BYTES = 4096
RING_OFFSET = FENCE_PAGE + FENCE_BYTES
SECTION_ALIGN = 4096

# --- header: static block ----------------------------------------------------------------------------------------------
STATIC_OFFSET = 8
#: endian, abi major, abi minor, total bytes, generation, session, n_slots, n_records, cell bytes, reply bytes,
#: sidecar pid, client pid, 0, sidecar start time (clock ticks), created (ns since the epoch), instance, role, crc32
STATIC = struct.Struct("<QIIQQIIIIIIIIQQ16s16s")
STATIC_CRC_OFFSET = STATIC_OFFSET + STATIC.size
STATIC_CRC = struct.Struct("<I")

# --- header: mutable words, as u64 indices; each on its own 128 B (adjacent-line prefetch) ---------------------------------
WORD_MAGIC = 0
WORD_SQ_TAIL = 0x200 // 8  #: client: slots posted
WORD_SQ_HEAD = 0x280 // 8  #: sidecar: slots consumed
WORD_ARMED = 0x300 // 8  #: sidecar: 1 while its poller sleeps and wants the doorbell
WORD_CLIENT_BEAT = 0x380 // 8  #: client: monotonic ns of its last step (information only)
WORD_SIDECAR_BEAT = 0x400 // 8  #: sidecar: monotonic ns; stale raises suspicion, never frees memory
WORD_SIDECAR_STATE = 0x480 // 8  #: sidecar: SidecarState
WORD_CLIENT_STEP = 0x500 // 8  #: client: last engine step seen
#: sidecar: 16 bytes, the namespace this session's keys belong to; zero until all ranks of its engine are there. With the record
#: table it lets the next sidecar honour the leases of this one: (namespace, keys of a DONE lookup, its deadline).
NAMESPACE_OFFSET = 0x580
WORD_WORLD = 0x590 // 8  #: sidecar: ranks of the engine, stored after the namespace; 0: none yet
WORD_FENCE = FENCE_PAGE // 8  #: client (or its GPU stream): every launch up to this engine step has finished


class SidecarState(enum.IntEnum):
    """What the sidecar says of itself in every segment's header."""

    STARTING = 0  #: pool not yet mapped; every lookup misses
    READY = 1
    DRAINING = 2  #: no new work accepted; what is in flight finishes
    STOPPED = 3


class Role(enum.StrEnum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


# --- submission slot ----------------------------------------------------------------------------------------------------
SLOT_BYTES = 32
SLOT_WORDS = SLOT_BYTES // 8
SLOT_SEQ, SLOT_TICKET, SLOT_VERB = 0, 1, 2


class Verb(enum.IntEnum):
    SUBMIT = 1
    RELEASE = 2
    CANCEL = 3


# --- ticket -------------------------------------------------------------------------------------------------------------
TICKET_INDEX_BITS = 16
TICKET_INDEX_MASK = (1 << TICKET_INDEX_BITS) - 1
MAX_RECORDS = 1 << TICKET_INDEX_BITS


class Op(enum.IntEnum):
    """What a record asks for. Keys are ``n_keys`` × 16 bytes, block ids ``n_blocks`` × int32, both in the request cell.

    Keys of one record follow each other in one prefix; ``depth`` is the index of the first *chunk* in it. A STORE's first key
    is the parent of its first chunk (the request's root where the chunk opens the prompt) and its block ids are SKIP_BLOCK:
    n chunks, n + 1 keys.
    """

    LOOKUP = 1  #: scheduler: how many leading keys are present on all ranks; the hit is leased
    LOAD = 2  #: worker: slabs → its KV blocks
    STORE = 3  #: worker: its KV blocks → slabs, chunks already present skipped
    LOCATE = 4  #: scheduler: LOOKUP, and the reply cell says where every rank's slabs lie (overlap path)
    DRAIN = 5  #: either: done when every earlier transfer of this session is terminal


class State(enum.IntEnum):
    """Low byte of a record's state word."""

    FREE = 0
    POSTED = 1
    ACCEPTED = 2
    DONE = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def terminal(self) -> bool:
        return self >= State.DONE


class Code(enum.IntEnum):
    """Why a record FAILED (or DONE with less than asked)."""

    OK = 0
    NOT_FOUND = 1  #: a chunk is no longer in the pool
    POOL_FULL = 2  #: no slab free and nothing evictable
    ENGINE_GONE = 3
    COPY_FAILED = 4
    CHECKSUM = 5  #: the slab's bytes did not match their checksum; the slab was dropped
    BAD_REQUEST = 6
    NOT_REGISTERED = 7  #: this engine's workers have not all registered a KV cache
    DRAINING = 8
    TIMED_OUT = 9  #: the fence did not arrive in time
    INTERNAL = 10


# --- record -------------------------------------------------------------------------------------------------------------
RECORD_BYTES = 256
RECORD_WORDS = RECORD_BYTES // 8
#: client's line: ticket, op, flags (0), lease ticket, fence, lease session, depth, n_keys, n_blocks, t_posted
REQUEST = struct.Struct("<QIIQQIIIIQ")
REQUEST_OFFSET = 0
CANCEL_WORD = 56 // 8  #: client: 1 asks for no further copy
LABEL_OFFSET = 64
LABEL_BYTES = 64  #: request id, UTF-8, zero-padded; for people only
#: sidecar's line
STATE_WORD = 128 // 8
COPYING_WORD = 136 // 8  #: sidecar: 1 while a copy may touch the client's memory
#: error code, n_done, bytes, t_accepted, t_first_copy, t_done, deadline (lease end), reply_count, reserved
REPLY = struct.Struct("<IIQQQQQII")
REPLY_OFFSET = 144

KEY_BYTES = 16
#: An engine does not build upon a lease with less left than this (CLOCK_MONOTONIC ns), and a sidecar tells of none.
LEASE_MARGIN_NS = 2_000_000_000
BLOCK_ID_BYTES = 4
#: block id that says "this block is already there": nothing is copied for it
SKIP_BLOCK = -1

#: reply cell of LOCATE: n_done × world of these, the ranks of a chunk side by side: byte offset of the slab's data in the pool,
#: slab state word (state and generation) at the time of the answer
SLAB_REF = struct.Struct("<QQ")


def align(n: int, to: int) -> int:
    return (n + to - 1) // to * to


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """The sizes a segment is built from, and the offsets that follow from them (bytes)."""

    n_slots: int  #: submission slots, a power of two
    n_records: int
    cell_bytes: int
    reply_bytes: int

    @staticmethod
    def for_limits(n_records: int, max_keys: int, max_blocks: int, *, refs_per_key: int = 0) -> SegmentShape:
        """Smallest shape whose cells hold ``max_keys`` keys, ``max_blocks`` block ids and ``refs_per_key`` SlabRefs a key."""
        slots = 1 << (2 * n_records - 1).bit_length()  # SUBMIT and RELEASE may both be queued for a record
        cell = align(max_keys * KEY_BYTES + max_blocks * BLOCK_ID_BYTES, 64)
        return SegmentShape(slots, n_records, cell, align(max_keys * refs_per_key * SLAB_REF.size, 64))

    def check(self) -> None:
        """Raise :class:`SegmentCorrupt` unless every size is in bounds."""
        slots, records = self.n_slots, self.n_records
        if not 0 < slots <= 1 << 20 or slots & (slots - 1):
            raise SegmentCorrupt(f"segment has {slots} submission slots", "expected a power of two up to 2^20")
        if not 0 < records <= MAX_RECORDS:
            raise SegmentCorrupt(f"segment has {records} records", f"expected 1 to {MAX_RECORDS}")
        if not 0 < self.cell_bytes <= 1 << 26 or not 0 <= self.reply_bytes <= 1 << 26:
            raise SegmentCorrupt(f"segment cells are {self.cell_bytes} and {self.reply_bytes} bytes", "expected at most 64 MiB")

    @property
    def records_offset(self) -> int:
        return align(RING_OFFSET + self.n_slots * SLOT_BYTES, SECTION_ALIGN)

    @property
    def cells_offset(self) -> int:
        return align(self.records_offset + self.n_records * RECORD_BYTES, SECTION_ALIGN)

    @property
    def replies_offset(self) -> int:
        return align(self.cells_offset + self.n_records * self.cell_bytes, SECTION_ALIGN)

    @property
    def total_bytes(self) -> int:
        return align(self.replies_offset + self.n_records * self.reply_bytes, SECTION_ALIGN)
