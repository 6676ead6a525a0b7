"""The request-record table: what a ticket asks for and how far it is (the completion flags).

:class:`ClientRecords` posts and polls; :class:`SidecarRecords` accepts and completes. Who may write which state is in
``layout.py``. The client copies nothing it may not trust; the sidecar copies keys and ids out of the cell *before* it
checks them, so a client that changes them later changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maru_shm import layout as L
from maru_shm.atomics import full_fence, order_fence
from maru_shm.errors import ProtocolViolation, RingFull
from maru_shm.ring import SubmissionProducer
from maru_shm.segment import Segment


@dataclass(frozen=True, slots=True)
class Reply:
    """A record's answer as a client or a debugging tool reads it. Times are CLOCK_MONOTONIC ns, 0 = not yet."""

    state: L.State
    code: L.Code
    n_done: int  #: chunks hit (LOOKUP, LOCATE), loaded (LOAD) or newly stored (STORE)
    bytes: int  #: bytes copied
    t_accepted: int
    t_first_copy: int
    t_done: int
    deadline: int  #: end of the lease, 0 if none


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request as the sidecar reads it. ``keys`` is n × 16 bytes, ``blocks`` int32 (n, blocks per chunk)."""

    ticket: int
    op: L.Op
    lease: int
    lease_session: int
    fence: int
    depth: int  #: index, in its prefix, of the first chunk
    t_posted: int
    keys: bytes
    blocks: npt.NDArray[np.int32]
    label: str

    @property
    def n_keys(self) -> int:
        return len(self.keys) // L.KEY_BYTES

    def key(self, i: int) -> bytes:
        return self.keys[i * L.KEY_BYTES : (i + 1) * L.KEY_BYTES]


def read_reply(segment: Segment, index: int) -> Reply:
    """Decode the sidecar's line of record ``index`` without checking its ticket."""
    base = segment.shape.records_offset + index * L.RECORD_BYTES
    word = segment.words[base // 8 + L.STATE_WORD]
    order_fence()  # SYNC POINT: acquire, the fields below were written before the state
    code, n_done, n_bytes, t_acc, t_first, t_done, deadline, _, _ = L.REPLY.unpack_from(segment.bytes, base + L.REPLY_OFFSET)
    return Reply(L.State(word & 0xFF), L.Code(code), n_done, n_bytes, t_acc, t_first, t_done, deadline)


class ClientRecords:
    """The client's view: allocate a record, post it, poll it, free it. One engine thread uses it."""

    def __init__(self, segment: Segment, ring: SubmissionProducer) -> None:
        self._segment = segment
        self._ring = ring
        self._bytes = segment.bytes
        self._words = segment.words
        self._shape = segment.shape
        self._free = list(range(segment.shape.n_records - 1, -1, -1))
        self._serial = 0

    @property
    def free_records(self) -> int:
        return len(self._free)

    def fits(self, n_keys: int, n_blocks: int) -> bool:
        """Whether one record can carry this many keys and block ids."""
        return n_keys * L.KEY_BYTES + n_blocks * L.BLOCK_ID_BYTES <= self._shape.cell_bytes

    def post(
        self,
        op: L.Op,
        keys: bytes | bytearray | memoryview,
        blocks: bytes | memoryview = b"",
        *,
        fence: int = 0,
        lease: int = 0,
        lease_session: int = 0,
        depth: int = 0,
        label: str = "",
    ) -> int:
        """Fill a free record and push it on the ring; visible (and the doorbell due) after the ring's ``publish``.

        ``keys``: n × 16 bytes. ``blocks``: int32 little-endian, n × blocks per chunk, ``SKIP_BLOCK`` = no copy.
        Returns the ticket. Raises :class:`RingFull` at once if no record or slot is free, or the cell is too small.
        """
        n_keys, n_blocks = len(keys) // L.KEY_BYTES, len(blocks) // L.BLOCK_ID_BYTES
        if not self._free:
            raise RingFull(f"all {self._shape.n_records} records are in use", "fewer requests in flight, or raise max_records")
        if not self.fits(n_keys, n_blocks):
            raise RingFull(
                f"{n_keys} keys and {n_blocks} blocks exceed a cell of {self._shape.cell_bytes} bytes", "raise max_model_len"
            )
        index = self._free[-1]
        ticket = (self._serial + 1) << L.TICKET_INDEX_BITS | index
        cell = self._shape.cells_offset + index * self._shape.cell_bytes
        split = cell + n_keys * L.KEY_BYTES
        self._bytes[cell:split] = keys
        if n_blocks:
            self._bytes[split : split + n_blocks * L.BLOCK_ID_BYTES] = blocks
        base = self._shape.records_offset + index * L.RECORD_BYTES
        L.REQUEST.pack_into(
            self._bytes, base, ticket, op, 0, lease, fence, lease_session, depth, n_keys, n_blocks, time.monotonic_ns()
        )
        text = label.encode()[: L.LABEL_BYTES]
        self._bytes[base + L.LABEL_OFFSET : base + L.LABEL_OFFSET + L.LABEL_BYTES] = text.ljust(L.LABEL_BYTES, b"\0")
        word = base // 8
        self._words[word + L.CANCEL_WORD] = 0
        order_fence()
        self._words[word + L.STATE_WORD] = ticket << 8 | L.State.POSTED  # SYNC POINT: release
        try:
            self._ring.push(ticket, L.Verb.SUBMIT)
        except RingFull:
            self._words[word + L.STATE_WORD] = ticket << 8 | L.State.FREE
            raise
        self._free.pop()
        self._serial += 1
        return ticket

    def state(self, ticket: int) -> L.State:
        """Current state of a ticket of ours: one load."""
        index = ticket & L.TICKET_INDEX_MASK
        word = self._words[(self._shape.records_offset + index * L.RECORD_BYTES) // 8 + L.STATE_WORD]
        if word >> 8 != ticket:
            raise ProtocolViolation(f"record {index} holds ticket {word >> 8}, not {ticket}", "the sidecar broke the segment")
        try:
            return L.State(word & 0xFF)
        except ValueError as e:
            raise ProtocolViolation(f"record {index} is in state {word & 0xFF}", "the sidecar broke the segment") from e

    def reply(self, ticket: int) -> Reply:
        """The record of ``ticket`` in full; meaningful once :meth:`state` is terminal."""
        return read_reply(self._segment, ticket & L.TICKET_INDEX_MASK)

    def slab_refs(self, ticket: int, n: int) -> npt.NDArray[np.uint64]:
        """LOCATE's answer, ``n`` = chunks × ranks of them: shape (n, 2), see ``layout.SLAB_REF``."""
        index = ticket & L.TICKET_INDEX_MASK
        at = self._shape.replies_offset + index * self._shape.reply_bytes
        return np.frombuffer(bytes(self._bytes[at : at + n * L.SLAB_REF.size]), "<u8").reshape(n, 2)

    def set_cancel(self, ticket: int) -> bool:
        """Forbid further copies for ``ticket``; True if no copy runs or will run (its blocks are the client's again)."""
        base = (self._shape.records_offset + (ticket & L.TICKET_INDEX_MASK) * L.RECORD_BYTES) // 8
        self._words[base + L.CANCEL_WORD] = 1
        full_fence()  # SYNC POINT: pairs with SidecarRecords.begin_copy
        return self._words[base + L.COPYING_WORD] == 0

    def release(self, ticket: int) -> None:
        """Give a LOOKUP's or LOCATE's lease back (pushed; publish the ring) and free its record.

        Ring order makes this safe: the sidecar sees RELEASE before any later ticket of the same record.
        """
        self._ring.push(ticket, L.Verb.RELEASE)
        self.free(ticket)

    def free(self, ticket: int) -> None:
        """Return a terminal ticket's record for reuse. Freeing a ticket twice raises."""
        index = ticket & L.TICKET_INDEX_MASK
        at = (self._shape.records_offset + index * L.RECORD_BYTES) // 8 + L.STATE_WORD
        word = self._words[at]
        if word >> 8 != ticket or not L.State(word & 0xFF).terminal:
            raise ProtocolViolation(
                f"record {index} is not terminal for ticket {ticket}", "free each ticket once, when terminal"
            )
        self._words[at] = ticket << 8 | L.State.FREE
        self._free.append(index)


class SidecarRecords:
    """The sidecar's view of one session's table.

    ``max_keys``, ``max_blocks``: what one request may carry, None = whatever fits in a cell. A cell without block ids holds
    many times the keys that were asked for, and their cost is the sidecar's.
    """

    def __init__(self, segment: Segment, *, max_keys: int | None = None, max_blocks: int | None = None) -> None:
        cell = segment.shape.cell_bytes
        self._max_keys = cell // L.KEY_BYTES if max_keys is None else max_keys
        self._max_blocks = cell // L.BLOCK_ID_BYTES if max_blocks is None else max_blocks
        self._segment = segment
        self._bytes = segment.bytes
        self._words = segment.words
        self._shape = segment.shape

    def accept(self, ticket: int) -> Request:
        """Check a submitted ticket, copy its request out and mark it ACCEPTED.

        Raises :class:`ProtocolViolation` for an index, ticket, state, op or length no correct client sends.
        """
        index = ticket & L.TICKET_INDEX_MASK
        if index >= self._shape.n_records:
            raise ProtocolViolation(f"ticket {ticket:#x} names record {index} of {self._shape.n_records}", "")
        base = self._shape.records_offset + index * L.RECORD_BYTES
        word = self._words[base // 8 + L.STATE_WORD]
        if word != ticket << 8 | L.State.POSTED:
            raise ProtocolViolation(f"record {index} is {word:#x}, expected ticket {ticket:#x} POSTED", "")
        order_fence()  # SYNC POINT: acquire
        own, op, _, lease, fence, lease_session, depth, n_keys, n_blocks, t_posted = L.REQUEST.unpack_from(self._bytes, base)
        need = n_keys * L.KEY_BYTES + n_blocks * L.BLOCK_ID_BYTES
        too_many = n_keys > self._max_keys or n_blocks > self._max_blocks
        if own != ticket or need > self._shape.cell_bytes or too_many:
            raise ProtocolViolation(f"record {index} claims {n_keys} keys and {n_blocks} blocks for ticket {own:#x}", "")
        try:
            parsed_op = L.Op(op)
        except ValueError as e:
            raise ProtocolViolation(f"record {index} asks for operation {op}", "") from e
        cell = self._shape.cells_offset + index * self._shape.cell_bytes
        split = cell + n_keys * L.KEY_BYTES
        keys = bytes(self._bytes[cell:split])
        blocks = np.frombuffer(bytes(self._bytes[split : split + n_blocks * L.BLOCK_ID_BYTES]), dtype="<i4")
        if n_blocks and (n_keys == 0 or n_blocks % n_keys):
            raise ProtocolViolation(f"record {index} has {n_blocks} blocks for {n_keys} keys", "")
        label = bytes(self._bytes[base + L.LABEL_OFFSET : base + L.LABEL_OFFSET + L.LABEL_BYTES]).rstrip(b"\0")
        L.REPLY.pack_into(self._bytes, base + L.REPLY_OFFSET, 0, 0, 0, time.monotonic_ns(), 0, 0, 0, 0, 0)
        self._words[base // 8 + L.COPYING_WORD] = 0
        order_fence()
        self._words[base // 8 + L.STATE_WORD] = ticket << 8 | L.State.ACCEPTED  # SYNC POINT: release
        return Request(
            ticket, parsed_op, lease, lease_session, fence, depth, t_posted, keys,
            blocks.reshape(n_keys, -1) if n_blocks else blocks.reshape(0, 0), label.decode(errors="replace"),
        )  # fmt: skip

    def cancelled(self, ticket: int) -> bool:
        """Whether the client has set the cancel word of ``ticket``."""
        return self._words[self._base(ticket) // 8 + L.CANCEL_WORD] != 0

    def forbid(self, ticket: int) -> bool:
        """Set the cancel word in the client's stead: its session ends. True if no copy runs or will run."""
        at = self._base(ticket) // 8
        self._words[at + L.CANCEL_WORD] = 1
        full_fence()  # SYNC POINT: pairs with begin_copy
        return self._words[at + L.COPYING_WORD] == 0

    def begin_copy(self, ticket: int) -> bool:
        """Announce a copy that touches the client's memory; False (and nothing announced) if it was cancelled."""
        at = self._base(ticket) // 8
        self._words[at + L.COPYING_WORD] = 1
        full_fence()  # SYNC POINT: pairs with ClientRecords.set_cancel
        if self._words[at + L.CANCEL_WORD]:
            self._words[at + L.COPYING_WORD] = 0
            return False
        return True

    def end_copy(self, ticket: int) -> None:
        """No copy for ``ticket`` touches the client's memory any more."""
        order_fence()
        self._words[self._base(ticket) // 8 + L.COPYING_WORD] = 0

    def set_slab_refs(self, ticket: int, refs: npt.NDArray[np.uint64]) -> None:
        """Write LOCATE's answer, shape (n, 2), before :meth:`complete`. Raises ``ProtocolViolation`` if its cell is small."""
        index = ticket & L.TICKET_INDEX_MASK
        if len(refs) * L.SLAB_REF.size > self._shape.reply_bytes:
            raise ProtocolViolation(f"{len(refs)} slab references exceed a reply of {self._shape.reply_bytes} bytes", "")
        at = self._shape.replies_offset + index * self._shape.reply_bytes
        self._bytes[at : at + len(refs) * L.SLAB_REF.size] = refs.astype("<u8").tobytes()

    def complete(
        self,
        ticket: int,
        state: L.State,
        code: L.Code = L.Code.OK,
        *,
        n_done: int = 0,
        n_bytes: int = 0,
        t_first_copy: int = 0,
        deadline: int = 0,
    ) -> None:
        """Write the one terminal state of ``ticket``; the caller guarantees it does so once."""
        base = self._base(ticket)
        t_accepted = self._words[(base + L.REPLY_OFFSET + 16) // 8]
        L.REPLY.pack_into(
            self._bytes,
            base + L.REPLY_OFFSET,
            code,
            n_done,
            n_bytes,
            t_accepted,
            t_first_copy,
            time.monotonic_ns(),
            deadline,
            0,
            0,
        )
        order_fence()
        self._words[base // 8 + L.STATE_WORD] = ticket << 8 | state  # SYNC POINT: release, written last

    def _base(self, ticket: int) -> int:
        return self._shape.records_offset + (ticket & L.TICKET_INDEX_MASK) * L.RECORD_BYTES
