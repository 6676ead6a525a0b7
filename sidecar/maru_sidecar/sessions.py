"""Sessions: one per attached client, from Attach to the last copy that touches its memory.

*Attach*: the engine's agreement is checked and its rank claimed in the main thread; what may take long (importing GPU memory,
making the segment) runs in a thread (``attaching.py``); the answer goes out when that has ended. *End*, for whatever reason
(Detach, a closed socket, a broken ring): the rank is free at once, no further copy begins, leases are given back, the segment's
name disappears; at the sidecar's own stop, a client that holds leases keeps them and its segment, for the successor
(``harvest.py``). When every outstanding ticket has its answer (so no copy is in flight) the KV cache is forgotten and the
segment unmapped. A session whose copies hang keeps its memory and disturbs nobody.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as S
from maru_shm.errors import ProtocolViolation
from maru_shm.records import SidecarRecords
from maru_shm.ring import SubmissionConsumer
from maru_sidecar import attaching
from maru_sidecar.attaching import AttachThreads, Identity, Opened, Opening
from maru_sidecar.bus_guard import BUS_GUARD
from maru_sidecar.config import Limits
from maru_sidecar.connection import Connection
from maru_sidecar.copy_thread import WorkerPort
from maru_sidecar.descriptors import close_later
from maru_sidecar.directory import Directory
from maru_sidecar.engines import Engine, EngineRegistry, Refusal
from maru_sidecar.lanes import Lane, Lanes
from maru_sidecar.poller import Poller
from maru_sidecar.pool import PoolFile
from maru_sidecar.tickets import Counters, TicketTable
from maru_sidecar.transfer.base import KvTarget
from maru_sidecar.transfer.cpu import peer_exited

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Session:
    """One attached client."""

    id: int
    attach: M.Attach
    engine: Engine
    connection: Connection
    segment: S.Segment
    consumer: SubmissionConsumer
    table: TicketTable
    doorbell: int
    pidfd: int
    lane: Lane | None = None  #: workers only
    port: WorkerPort | None = None
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)  #: record index → (ticket of its LOOKUP, lease id)
    attached_s: float = field(default_factory=time.monotonic)
    detaching: bool = False  #: its client waits for the answer to Detach
    releasing: bool = False
    handed_over: bool = False  #: its segment, and the leases in it, are the successor's
    abandoned: bool = False  #: its memory did not answer; a thread hangs in a copy

    @property
    def name(self) -> str:
        return f"session {self.id} ({self.attach.role.value} {self.attach.rank} of {self.attach.engine_id!r})"


class Sessions:
    """All sessions; the main thread uses it alone. ``reply`` and ``hang_up`` are the control server's; ``broken`` ends
    a session whose client did what no correct one does."""

    def __init__(
        self,
        *,
        identity: Identity,
        pool: PoolFile,
        directory: Directory,
        lanes: Lanes,
        poller: Poller,
        limits: Limits,
        counters: Counters,
        reply: Callable[[Connection, M.SidecarMessage, list[int]], bool],
        hang_up: Callable[[Connection], None],
        broken: Callable[[Session, Exception], None],
    ) -> None:
        self._identity = identity
        self._pool = pool
        self._directory = directory
        self._lanes = lanes
        self._poller = poller
        self._limits = limits
        self._counters = counters
        self._reply = reply
        self._hang_up = hang_up
        self._broken = broken
        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="maru-release")
        self._attaches = AttachThreads()
        self._serial = 0
        self._opening: dict[int, Opening] = {}
        self.attaches_hanging = 0  #: given up, and their threads are not back
        self.abandoned = 0  #: sessions ended, ever, because their memory did not answer
        self.registry = EngineRegistry(pool.region_bytes, limits.max_engines, limits.max_pieces)
        self.live: dict[int, Session] = {}
        self.ending: dict[int, Session] = {}
        self.state = L.SidecarState.READY

    def __len__(self) -> int:
        return len(self.live)

    @property
    def settled(self) -> bool:
        """Whether nothing is being opened and no session is ending."""
        return not self._opening and not self.ending

    @property
    def only_hanging(self) -> bool:
        """Whether nothing is left but what does not answer."""
        return not self._opening and all(s.abandoned for s in self.ending.values())

    @property
    def hanging(self) -> int:
        """Ended sessions and attaches whose engine's memory still holds up a thread."""
        return self.attaches_hanging + sum(s.abandoned for s in tuple(self.ending.values()))

    def in_flight(self) -> int:
        """Tickets that will get a terminal answer: not those of engines whose memory does not answer."""
        return sum(len(s.table.outstanding) for s in (*self.live.values(), *self.ending.values()) if not s.abandoned)

    # --- attach -----------------------------------------------------------------------------------------------------------
    def attach(self, connection: Connection, message: M.Attach, fds: list[int]) -> None:
        """Begin an attach; the answer follows by ``reply``. ``fds`` are closed here, whatever happens.

        Raises :class:`~maru_sidecar.engines.Refusal` for what can be seen at once.
        """
        try:
            self._check_limits(connection, message)
            self._evict_dead_holder(message)
            pidfd = os.dup(connection.pidfd)
            try:
                self._serial += 1
                engine = self.registry.claim(message, self._serial)
            except BaseException:
                os.close(pidfd)
                raise
        except BaseException:
            close_later(fds)
            raise
        opening = Opening(self._serial, connection, message, engine, pidfd)
        try:
            self._attaches.submit(
                lambda: attaching.make(opening, fds, self._identity, self._pool, self._lanes),
                lambda future: self._poller.call_soon(lambda: self._try_opened(opening, future)),
            )
        except BaseException:
            self.registry.leave(engine, message.role, message.rank, opening.session_id)
            os.close(pidfd)
            close_later(fds)
            raise
        self._opening[opening.session_id] = opening
        connection.session = opening.session_id

    def _check_limits(self, connection: Connection, m: M.Attach) -> None:
        if connection.session is not None:
            raise Refusal(M.RefusalCode.BAD_MESSAGE, "this connection is attached already", "one session per connection")
        if len(self.live) + len(self.ending) + len(self._opening) >= self._limits.max_sessions:
            raise Refusal(M.RefusalCode.LIMIT, f"{self._limits.max_sessions} sessions are open", "raise limits.max_sessions")
        held = sum(s.segment.shape.total_bytes for s in (*self.live.values(), *self.ending.values()))
        held += sum(attaching.shape_of(o.message).total_bytes for o in self._opening.values())
        attaching.check_limits(m, self._limits, held)

    def _evict_dead_holder(self, m: M.Attach) -> None:
        """A restarted engine may be faster than the news of its predecessor's death, or than its attach."""
        holder = self.registry.holder(m) or 0
        session, opening = self.live.get(holder), self._opening.get(holder)
        if session is not None and _gone(session.connection, session.pidfd):
            self.end(session, "its process has ended")
        elif opening is not None and _gone(opening.connection, opening.pidfd):
            self.registry.leave(opening.engine, m.role, m.rank, holder)

    def _try_opened(self, opening: Opening, future: Future[Opened]) -> None:
        try:
            self._opened(opening, future)
        except BaseException:  # counted and logged by the poller; this client would wait for its answer for ever
            m = opening.message
            self._hang_up(opening.connection)
            self.registry.leave(opening.engine, m.role, m.rank, opening.session_id)
            raise

    def _opened(self, opening: Opening, future: Future[Opened]) -> None:
        """Back in the main thread: the session lives, or the attach is refused."""
        given_up = self._opening.pop(opening.session_id, None) is None
        self.attaches_hanging -= given_up
        m, engine, connection = opening.message, opening.engine, opening.connection
        error = future.exception()
        if error is not None:
            os.close(opening.pidfd)
            if not given_up:
                self._refuse(opening, attaching.refused(error))
            return
        opened = future.result()
        if given_up:
            self._discard(opening, opened)
            return
        if self.registry.holder(m) != opening.session_id:  # its client went away, and another one took its place meanwhile
            self._discard(opening, opened)
            opening.connection.session = None
            self._hang_up(opening.connection)
            return
        segment = opened.segment
        records = SidecarRecords(segment, max_keys=m.max_keys, max_blocks=m.max_blocks)
        table = TicketTable(records, self._counters, lambda: self._poller.call_soon(self._reap))
        session = Session(
            opening.session_id, m, engine, connection, segment, SubmissionConsumer(segment), table, opened.doorbell,
            opening.pidfd, opened.lane,
        )  # fmt: skip
        if opened.target is not None:
            session.port = WorkerPort(
                opened.target, engine.namespace, m.rank, m.world_size, m.chunk_tokens, engine.slab_bytes, segment.words
            )
            self.registry.registered(engine, m.rank)
        BUS_GUARD.add(segment, lambda: self._poller.call_soon(lambda: self._torn(session)))
        segment.words[L.WORD_SIDECAR_STATE] = self.state
        self.live[session.id] = session

        # Edge-triggered and never read: every ring is an edge, and a client that shares the descriptor's flags could make a
        # read block.
        def ended(error: Exception) -> None:
            self.end(session, f"an event of it could not be handled: {error}")

        self._poller.register(session.doorbell, lambda _events: None, select.EPOLLIN | select.EPOLLET, failed=ended)
        # A client's socket may outlive it in a process that it forked.
        self._poller.register(session.pidfd, lambda _events: self.end(session, "its process has ended"), failed=ended)
        self._announce_namespace(engine)
        log.info("%s attached: %s", session.name, connection)
        transfer = opened.lane.transfer.name if opened.lane else ""
        answer = M.Attached(session.id, segment.info.name, engine.namespace.hex(), self._pool.size, transfer)
        sent = self._reply(connection, answer, [segment.fd, opened.doorbell, opened.pool_fd])
        os.close(opened.pool_fd)
        if not sent:
            self.end(session, "its client went away during the attach")
        elif segment.fd >= 0:
            os.close(segment.fd)
            segment.fd = -1

    def _torn(self, session: Session) -> None:
        """Its segment was cut short: what this process sees of it is zeros from now on."""
        if session.id in self.live:
            name = session.segment.info.name
            self._broken(session, ProtocolViolation(f"segment {name} was cut short", "see who else may write to it"))

    def _refuse(self, opening: Opening, why: M.Refused) -> None:
        m = opening.message
        self.registry.leave(opening.engine, m.role, m.rank, opening.session_id)
        opening.connection.session = None
        self._reply(opening.connection, why, [])

    def _discard(self, opening: Opening, opened: Opened) -> None:
        """Undo an attach whose client is gone."""
        S.unlink(opened.segment.info.name)
        opened.segment.close()
        for fd in (opened.doorbell, opened.pool_fd, opening.pidfd):
            os.close(fd)
        if opened.target is not None and opened.lane is not None:
            self._workers.submit(self._forget_memory, opened.target, opened.lane)

    def _announce_namespace(self, engine: Engine) -> None:
        """Once all ranks are there, write the namespace into the engine's segments: the next generation needs it for leases."""
        if not engine.complete:
            return
        at = L.NAMESPACE_OFFSET
        for session in self.live.values():
            segment = session.segment
            if session.engine is engine and segment.bytes[at : at + L.KEY_BYTES] != engine.namespace:
                segment.words[L.WORD_WORLD] = 0
                segment.bytes[at : at + L.KEY_BYTES] = engine.namespace
                segment.words[L.WORD_WORLD] = engine.world

    # --- memory that does not answer ------------------------------------------------------------------------------------------
    def give_up_hanging(self, limit_s: float) -> None:
        """End the sessions and refuse the attaches whose engine's memory has held up a thread of theirs for so long.

        What waits behind the copy that hangs is answered at once; its own ticket, and the memory it may still touch, when the
        copy ends: with the engine's process at the latest.
        """
        for session in tuple(self.live.values()):
            if session.lane is not None and session.lane.own and session.lane.hangs(limit_s):
                session.abandoned = True
                self.abandoned += 1
                self.end(session, f"its memory has not answered for {limit_s:.0f} s")
                for ticket in tuple(session.table.outstanding.values()):
                    ticket.give_up()
        for opening in tuple(self._opening.values()):
            if opening.overdue(limit_s):
                del self._opening[opening.session_id]
                self.attaches_hanging += 1
                what = f"the memory of process {opening.connection.pid} has not answered for {limit_s:.0f} s"
                self._refuse(opening, M.Refused(M.RefusalCode.UNREACHABLE_MEMORY, what, "see what serves its page faults"))

    # --- end --------------------------------------------------------------------------------------------------------------
    def detach(self, session: Session) -> None:
        """The client asked: ``Done`` follows when its copies are fenced."""
        session.detaching = True
        self.end(session, "it detached")
        if session.handed_over:  # the sidecar stops, and was faster
            session.handed_over = False
            self._forget_leases(session)

    def end(self, session: Session, why: str, *, hand_over: bool = False) -> None:
        """Tear a session down (idempotent); siblings are not touched.

        ``hand_over``: the leases of a client that still lives go to the next sidecar, with the segment that names them. They
        stay pinned here too, so that no store of another session, still to be finished, evicts what they hold.
        """
        if self.live.pop(session.id, None) is None:
            return
        log.info("%s ends: %s", session.name, why)
        session.segment.words[L.WORD_SIDECAR_STATE] = (
            L.SidecarState.STOPPED
        )  # for this client; it need not wait for the hang-up
        self.ending[session.id] = session
        self._poller.unregister(session.doorbell)
        self._poller.unregister(session.pidfd)
        m = session.attach
        self.registry.leave(session.engine, m.role, m.rank, session.id)
        for ticket in session.table.close():
            if session.lane is None or ticket.request.op not in (L.Op.LOAD, L.Op.STORE):  # the lane's queues answer those
                ticket.finish(L.State.FAILED, L.Code.ENGINE_GONE)
        session.leases.clear()
        lives = hand_over and not _gone(session.connection, session.pidfd)
        session.handed_over = lives and self._directory.holds_leases(session.id)
        if not session.handed_over:
            self._forget_leases(session)
        if session.lane is not None:
            session.lane.nudge()
        self._reap()

    def _forget_leases(self, session: Session) -> None:
        self._directory.release_owner(session.id)
        S.unlink(session.segment.info.name)

    def _reap(self) -> None:
        """Release what sessions without outstanding tickets still hold."""
        for session in list(self.ending.values()):
            if session.releasing or session.table.outstanding:
                continue
            session.releasing = True
            if session.port is None:
                self._finish(session)
            else:
                self._release(session, session.port.target)

    def _release(self, session: Session, target: KvTarget) -> None:
        """Forget the KV cache, in a worker thread: unmapping GPU memory takes its time."""

        def released(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                log.error("%s: its KV cache could not be released: %s", session.name, error)
            self._poller.call_soon(lambda: self._finish(session))

        assert session.lane is not None
        self._workers.submit(self._forget_memory, target, session.lane).add_done_callback(released)

    def _forget_memory(self, target: KvTarget, lane: Lane) -> None:
        """In a worker thread."""
        target.close()
        self._lanes.release(lane)

    def _finish(self, session: Session) -> None:
        """No copy touches the client's memory any more: unmap, answer its Detach or hang up."""
        del self.ending[session.id]
        BUS_GUARD.close(session.segment)
        os.close(session.doorbell)
        os.close(session.pidfd)
        connection = session.connection
        connection.session = None
        if session.detaching:
            self._reply(connection, M.Done(), [])
        elif not connection.closed:
            self._hang_up(connection)

    def set_state(self, state: L.SidecarState) -> None:
        """What every segment says of the sidecar."""
        self.state = state
        for session in self.live.values():
            session.segment.words[L.WORD_SIDECAR_STATE] = state

    def close(self) -> None:
        """Stop the worker threads; sessions have ended before."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def _gone(connection: Connection, pidfd: int) -> bool:
    """Whether a client has hung up or ended, be it that nobody has looked at its socket yet."""
    if connection.closed or connection.hung_up or peer_exited(pidfd):
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLRDHUP)
    return bool(poll.poll(0))
