"""A ticket in the sidecar's hands: from ACCEPTED to its one terminal answer.

Why every ticket gets exactly one: a :class:`Ticket` enters its session's ``outstanding`` table when it is accepted and leaves
it only in :meth:`Ticket.finish`, which writes the terminal state under the session's lock and answers False ever after. A
session's segment is unmapped only when its table is empty, so an answer always has somewhere to go.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from maru_shm import layout as L
from maru_shm.errors import ProtocolViolation
from maru_shm.records import Request, SidecarRecords


@dataclass(slots=True)
class OpCounts:
    """What one operation came to, since start."""

    tickets: int = 0  #: terminal answers
    failed: int = 0
    cancelled: int = 0
    chunks: int = 0  #: n_done of all answers
    asked: int = 0  #: chunks asked for
    bytes: int = 0
    seconds: float = 0.0  #: posted to answered, summed


@dataclass(slots=True)
class Counters:
    """Counts of all sessions by operation; one lock, held for a few additions."""

    ops: dict[L.Op, OpCounts] = field(default_factory=lambda: {op: OpCounts() for op in L.Op})
    codes: dict[L.Code, int] = field(default_factory=lambda: dict.fromkeys(L.Code, 0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, request: Request, state: L.State, code: L.Code, n_done: int, n_bytes: int) -> None:
        seconds = max(0.0, (time.monotonic_ns() - request.t_posted) / 1e9)
        asked = max(0, request.n_keys - (request.op is L.Op.STORE))
        with self.lock:
            one = self.ops[request.op]
            one.tickets += 1
            one.failed += state is L.State.FAILED
            one.cancelled += state is L.State.CANCELLED
            one.chunks += n_done
            one.asked += asked
            one.bytes += n_bytes
            one.seconds += min(seconds, 86_400.0)  # t_posted is the client's word
            self.codes[code] += 1


@dataclass(slots=True, eq=False)
class _Epoch:
    """The transfers opened between two DRAINs: how many are not terminal, and the DRAIN that closed it."""

    open: int = 0
    drain: Ticket | None = None


class TicketTable:
    """The tickets of one session that have no terminal answer yet, and the DRAINs that wait for them.

    A DRAIN ends when its epoch and all before it are empty; each costs a few words, however many tickets it waits for.
    """

    def __init__(self, records: SidecarRecords, counters: Counters, emptied: Callable[[], None]) -> None:
        self.records = records
        self.counters = counters
        self.lock = threading.Lock()
        self.outstanding: dict[int, Ticket] = {}
        self.closing = False  #: the session is being torn down: no copy for it may begin
        self._in_use: set[int] = set()  #: record indices of those
        self._epochs: deque[_Epoch] = deque([_Epoch()])
        self._emptied = emptied  #: called from any thread whenever a closing table becomes empty

    def open(self, request: Request) -> Ticket:
        """Take responsibility for an accepted request.

        Raises :class:`~maru_shm.errors.ProtocolViolation` for a record whose ticket before has no answer yet: there would be
        no bound on how many are open.
        """
        index = request.ticket & L.TICKET_INDEX_MASK
        with self.lock:
            if index in self._in_use:
                raise ProtocolViolation(
                    f"ticket {request.ticket:#x} was submitted twice, or over a ticket without an answer",
                    "a ticket is never reused, a record when it has been answered",
                )
            epoch = self._epochs[-1] if request.op is not L.Op.DRAIN else None
            ticket = Ticket(self, request, epoch)
            if epoch is not None:
                epoch.open += 1
            self._in_use.add(index)
            self.outstanding[request.ticket] = ticket
        return ticket

    def drain(self, ticket: Ticket) -> None:
        """Finish ``ticket`` (a DRAIN) when every ticket opened before it is terminal."""
        with self.lock:
            self._epochs[-1].drain = ticket
            self._epochs.append(_Epoch())
            ended = self._drained()
        for drain in ended:
            drain.finish(L.State.DONE)

    def _drained(self) -> list[Ticket]:
        """The DRAINs that nothing is before any more; they are the caller's to finish, without the lock."""
        ended = []
        while not self._epochs[0].open and (drain := self._epochs[0].drain) is not None:
            self._epochs.popleft()
            ended.append(drain)
        return ended

    def close(self) -> list[Ticket]:
        """Let no further copy begin and give up the DRAINs; returns what is still outstanding."""
        with self.lock:
            self.closing = True
            drains = [epoch.drain for epoch in self._epochs if epoch.drain is not None]
            self._epochs = deque([_Epoch()])
        for ticket in drains:
            ticket.finish(L.State.FAILED, L.Code.ENGINE_GONE)
        with self.lock:
            return list(self.outstanding.values())

    def forget(self, ticket: Ticket) -> None:
        """``ticket`` is terminal; with the lock held."""
        del self.outstanding[ticket.request.ticket]
        self._in_use.discard(ticket.request.ticket & L.TICKET_INDEX_MASK)
        if ticket.epoch is not None:
            ticket.epoch.open -= 1

    def answered(self) -> None:
        """A ticket has left the table: see whose DRAIN this ends."""
        with self.lock:
            ended = self._drained()
            empty = self.closing and not self.outstanding
        for drain in ended:
            drain.finish(L.State.DONE)
        if empty:
            self._emptied()


class Ticket:
    """One accepted request. Any thread may finish it; only the first finish counts."""

    __slots__ = ("_answered", "_first_copy", "epoch", "n_bytes", "request", "table")

    def __init__(self, table: TicketTable, request: Request, epoch: _Epoch | None = None) -> None:
        self.table = table
        self.epoch = epoch
        self.request = request
        self.n_bytes = 0
        self._first_copy = 0
        self._answered = False

    @property
    def answered(self) -> bool:
        return self._answered

    @property
    def withdrawn(self) -> bool:
        """Whether no further copy may begin for it: cancelled by its client, or its session is closing."""
        return self._answered or self.table.closing or self.table.records.cancelled(self.request.ticket)

    def begin_copy(self) -> bool:
        """Announce a copy touching the client's memory; False if it may not start. Pair with :meth:`end_copy`."""
        if self.table.closing or not self.table.records.begin_copy(self.request.ticket):
            return False
        if not self._first_copy:
            self._first_copy = time.monotonic_ns()
        return True

    def end_copy(self) -> None:
        self.table.records.end_copy(self.request.ticket)

    def withdraw(self, n_done: int = 0) -> bool:
        """The terminal answer of a withdrawn ticket: CANCELLED, or FAILED where the session is closing."""
        if self.table.closing:
            return self.finish(L.State.FAILED, L.Code.ENGINE_GONE, n_done=n_done)
        return self.finish(L.State.CANCELLED, n_done=n_done)

    def give_up(self) -> bool:
        """FAILED, unless a copy for it runs: then it is answered when that ends. The session is closing."""
        return self.table.records.forbid(self.request.ticket) and self.finish(L.State.FAILED, L.Code.ENGINE_GONE)

    def finish(self, state: L.State, code: L.Code = L.Code.OK, *, n_done: int = 0, deadline: int = 0) -> bool:
        """Write the terminal answer; False (and nothing written) if there was one already. Thread-safe.

        The caller has fenced every copy of this ticket.
        """
        table, request = self.table, self.request
        with table.lock:
            if self._answered:
                return False
            self._answered = True
            table.records.complete(
                request.ticket, state, code,
                n_done=n_done, n_bytes=self.n_bytes, t_first_copy=self._first_copy, deadline=deadline,
            )  # fmt: skip
            table.forget(self)
        table.counters.count(request, state, code, n_done, self.n_bytes)
        table.answered()
        return True
