"""One attachment to one sidecar generation: its segment, its tickets, and how each ticket ends.

A ticket ends exactly once: :meth:`Session.ended` gives its ending and forgets it. While the control socket is open only the
sidecar ends tickets. Once it is closed the session is *lost*: a ticket still ends as the sidecar left it if it had got that
far, else as LOST as soon as no copy can touch its blocks any more, which is when its copying word is clear (the cancel
handshake of
``maru_shm.layout``) or the sidecar's process is gone. The process is watched by pidfd: end of file on the socket alone
could be a sidecar that dropped this session and still copies.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maru_shm import layout as L
from maru_shm import segment as segments
from maru_shm.errors import ProtocolViolation, RingFull
from maru_shm.records import ClientRecords, Reply
from maru_shm.ring import SubmissionProducer
from maru_shm.segment import Segment


class Ending(enum.Enum):
    """How a ticket ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  #: the sidecar went away; nothing is known of it but that no copy runs


_ENDINGS = {L.State.DONE: Ending.DONE, L.State.FAILED: Ending.FAILED, L.State.CANCELLED: Ending.CANCELLED}


class Ended(NamedTuple):
    ending: Ending
    reply: Reply | None  #: None if LOST


class SidecarProcess:
    """The sidecar's process, by pidfd. Where its pid means nothing here (another pid namespace) it counts as alive until
    told.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._gone = False
        self._pidfd = -1
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(pid)

    def verify(self, start_time: int) -> None:
        """Distrust the pidfd unless the process it names started at ``start_time`` (clock ticks since boot)."""
        if self._pidfd >= 0 and start_time and segments.process_start_time(self.pid) != start_time:
            self.close()

    def gone(self) -> bool:
        """Whether the process has exited: one poll, no wait."""
        if not self._gone and self._pidfd >= 0:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            self._gone = bool(poller.poll(0))
        return self._gone

    def presume_gone(self) -> None:
        """Another generation answers: the one that held this instance's lock before it has exited."""
        self._gone = True

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Session:
    """Made by :class:`~maru_connector.link.SidecarLink`. Used by one engine thread."""

    def __init__(
        self, segment: Segment, process: SidecarProcess, *, doorbell: int, pool_fd: int, pool_bytes: int, namespace: str
    ) -> None:
        self.segment = segment
        self.generation = segment.info.generation
        self.id = segment.info.session
        self.process = process
        self.doorbell = doorbell
        self.pool_fd = pool_fd
        self.pool_bytes = pool_bytes
        self.namespace = namespace  #: hex, as the sidecar computed it
        self.connected = True
        self._ring = SubmissionProducer(segment)
        self._records = ClientRecords(segment, self._ring)
        self._live: set[int] = set()
        self._abandoned: set[int] = set()
        self._dirty = False

    @property
    def idle(self) -> bool:
        """Whether no ticket is live or abandoned."""
        return not self._live and not self._abandoned

    @property
    def abandoned(self) -> int:
        """Tickets nobody waits for that the sidecar has not ended."""
        return len(self._abandoned)

    def sidecar_state(self) -> L.SidecarState:
        """What the sidecar says of itself; STOPPED if it says nonsense."""
        value = self.segment.words[L.WORD_SIDECAR_STATE]
        return L.SidecarState(value) if value <= L.SidecarState.STOPPED else L.SidecarState.STOPPED

    def post(
        self, op: L.Op, keys: bytes, blocks: bytes = b"", *, fence: int = 0, lease: int = 0, lease_session: int = 0,
        depth: int = 0, label: str = "",
    ) -> int:  # fmt: skip
        """Post a request (see :meth:`ClientRecords.post`); visible after :meth:`flush`. Raises :class:`RingFull` at once."""
        if not self.connected:
            raise RingFull("the sidecar is gone", "the link connects again by itself")
        ticket = self._records.post(
            op, keys, blocks, fence=fence, lease=lease, lease_session=lease_session, depth=depth, label=label
        )
        self._live.add(ticket)
        self._dirty = True
        return ticket

    def flush(self) -> None:
        """Publish what was posted and wake the sidecar if it sleeps: one tail store per batch."""
        if self._dirty:
            self._dirty = False
            if self._ring.publish() and self.connected:
                with contextlib.suppress(BlockingIOError):  # the counter is full: it is ringing already
                    os.eventfd_write(self.doorbell, 1)

    def peek(self, ticket: int) -> Reply | None:
        """The reply of a live ticket if it is terminal; the ticket stays (a lease is still held by it)."""
        try:
            return self._records.reply(ticket) if self._records.state(ticket).terminal else None
        except ProtocolViolation:
            self.connected = False
            return None

    def slab_refs(self, ticket: int, n: int) -> npt.NDArray[np.uint64] | None:
        """The first ``n`` slab references that answered a LOCATE, shape (n, 2); None if the reply cell cannot hold so many."""
        if n * L.SLAB_REF.size > self.segment.shape.reply_bytes:
            return None
        return self._records.slab_refs(ticket, n)

    def ended(self, ticket: int) -> Ended | None:
        """How ``ticket`` ended, once, or None while it is in flight. Its record is free again afterwards."""
        reply = self.peek(ticket)
        if reply is not None:
            self._live.discard(ticket)
            self._records.free(ticket)
            return Ended(_ENDINGS[reply.state], reply)
        if not self.connected and self.reclaimable(ticket):
            self._live.discard(ticket)
            return Ended(Ending.LOST, None)
        return None

    def reclaimable(self, ticket: int) -> bool:
        """Forbid further copies for ``ticket``; True once none runs: its blocks are ours again. May be asked repeatedly."""
        return self._records.set_cancel(ticket) or self.process.gone()

    def cancel(self, ticket: int) -> bool:
        """:meth:`reclaimable`, and tell the sidecar. True: the ticket is over for the caller, which must not ask for it
        again.
        """
        if not self.reclaimable(ticket):
            return False
        with contextlib.suppress(RingFull):  # the cancel word alone stops it; the slot only makes it quick
            self._ring.push(ticket, L.Verb.CANCEL)
            self._dirty = True
        self.abandon(ticket)
        return True

    def abandon(self, ticket: int) -> None:
        """Nobody waits for ``ticket`` any more; :meth:`sweep` frees its record, and its lease, when the sidecar ends it."""
        if ticket in self._live:
            self._live.discard(ticket)
            self._abandoned.add(ticket)

    def release(self, ticket: int) -> None:
        """Give back a terminal LOOKUP's lease and its record."""
        self.abandon(ticket)
        self._retire(ticket)

    def sweep(self) -> None:
        """Free the records of abandoned tickets that have ended. Costs nothing when there are none."""
        for ticket in [*self._abandoned] if self._abandoned else ():
            self._retire(ticket)

    def _retire(self, ticket: int) -> None:
        reply = self.peek(ticket)
        if not self.connected:
            if reply is not None:
                self._records.free(ticket)  # else the next sidecar would honour its lease
            self._abandoned.discard(ticket)
            return
        if reply is None:
            return
        try:
            if reply.deadline:
                self._records.release(ticket)
                self._dirty = True
            else:
                self._records.free(ticket)
        except RingFull:
            return  # the next sweep tries again
        self._abandoned.discard(ticket)

    def close(self) -> None:
        """Unmap and close everything. The segment's name stays: the next sidecar reads the leases in it, then removes it.

        Idempotent.
        """
        self.connected = False
        self._live.clear()
        self._abandoned.clear()
        for fd in (self.doorbell, self.pool_fd):
            if fd >= 0:
                os.close(fd)
        self.doorbell = self.pool_fd = -1
        self.segment.close()
        self.process.close()
