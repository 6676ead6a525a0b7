"""A node's standing link to the server: one background thread that joins, keeps the lease, announces and asks.

Nothing here makes a caller wait: :meth:`NodeLink.publish`, :meth:`~NodeLink.withdraw` and :meth:`~NodeLink.submit` append to a
bounded queue and return; answers come as callbacks on the link's thread. A full queue, an absent server or a refused key only
means that other nodes do not find something for a while.

What happens when
- *the server restarts* (another epoch): Hello, claim the regions, then announce every slab again
(:data:`~maru_server.announce.SlabSource`). The node lease is renewed under the new epoch only after the claims were answered,
so it cannot outlive the hold that protects it.
- *the lease breaks* (paused, cut off): regions stop being writable by this node's clock; when the server answers again they
are claimed, and the ones that went to another node are revoked.
- *this incarnation was declared dead*: join as a new one and claim.
- *a newer process joined under this node's name*: the link ends as SUPERSEDED; two processes do not fight over a name.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator

import zmq

from maru_server import protocol as P
from maru_server.announce import Slabs, SlabSource, announcements, batches
from maru_server.answers import check_answer, expect
from maru_server.connection import Connection, checked
from maru_server.errors import ServerError, ServerRefused, ServerUnavailable
from maru_server.lease import NodeLease, RegionLease, boottime_ns
from maru_server.link_types import (
    Callback,
    Item,
    LinkConfig,
    LinkState,
    LinkStats,
    Pending,
    Publication,
    Question,
    Want,
)
from maru_server.protocol import ClaimVerdict, ErrorCode, Outcome
from maru_server.refusals import Refusals
from maru_shm.errors import MaruError, ProtocolViolation

log = logging.getLogger(__name__)

_MS = 1_000_000
_ANNOUNCE_WINDOW = 4  # batches in flight
_BACKOFF_MS = (50, 2000)
_VIOLATION_BACKOFF_MS = 500  # a server that breaks the protocol most likely does so again, at once
_RETRY_MS_MIN = 10
_REASONS_LOGGED = 4  # of one outage: what a network in trouble says may change with every attempt


def _nobody(_result: list[RegionLease] | MaruError) -> None:
    """Stands for a callback that was handed on."""


class NodeLink:
    """See the module. ``regions`` are those held from an earlier incarnation, to be claimed first."""

    def __init__(self, config: LinkConfig, source: SlabSource, regions: list[P.Region] | None = None) -> None:
        self.config = config
        self.lease = NodeLease()
        self.state = LinkState.CONNECTING
        self._source = source
        self._regions = {(r.device, r.index): RegionLease(self.lease, r.device, r.index, r.token) for r in regions or []}
        self._devices: dict[bytes, P.AddDevice] = {}
        self._connection = Connection(config.endpoint, config.token)
        self._incarnation = config.incarnation
        self._predecessor = config.predecessor
        self._queue: deque[Item] = deque()
        self._wants: list[Want] = []
        self._pending: dict[int, Pending] = {}
        self._epoch = 0
        self._lease_ms = self._heartbeat_ms = 0
        self._next_ns = 0  # next Hello, heartbeat or claim
        self._claim_term = -1
        self._claim_again_ns = 0
        self._announce: Iterator[tuple[RegionLease, Slabs]] | None = None
        self._announce_all = False
        self._announcing = 0
        self._backoff_ms = _BACKOFF_MS[0]
        self._keys_announced = self._keys_existing = self._dropped = self._reconnects = 0
        self._last_error, self._last_error_ns = "", 0
        self._refusals = Refusals()
        self._down_ns = 0  # since when there has been no session; 0 while there is one, or none was missed yet
        self._said: set[str] = set()  # reasons logged since then
        self._refused = ""  # why regions that are wanted were not granted when last asked for
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards _closing, _wants and _wake, held for a few instructions
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="maru-server-link", daemon=True)

    # --- any thread ------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop writing, tell the server, end the thread. Idempotent."""
        for region in list(self._regions.values()):
            region.revoked = True
        with self._lock:
            closed, self._closing = self._closing, True
        if closed:
            return
        if self._thread.is_alive():
            self._ring()
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._connection.close()
            with self._lock:
                os.close(self._wake)
                self._wake = -1

    def _ring(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    @property
    def _ended(self) -> bool:
        return self._closing or self.state in (LinkState.SUPERSEDED, LinkState.STOPPED)

    def add_device(self, device: bytes, n_regions: int, region_bytes: int, *, first: int = 1, label: str = "") -> None:
        """Make a shared device known now and after each restart of the server."""
        self._devices[device] = m = P.AddDevice(device, n_regions, region_bytes, first, label)
        self.submit(m)

    def publish(self, region: RegionLease, slabs: Slabs, done: Callback | None = None) -> bool:
        """Announce committed slabs. False: the queue is full (or the link has ended), they are announced with the next full
        announcement.
        """
        if self._ended or len(self._queue) >= self.config.queue_max:
            self._dropped += 1
            self._announce_all = True
            return False
        self._queue.extend(Publication(region, batch, done) for batch in batches(slabs))
        self._ring()
        return True

    def withdraw(self, namespace: bytes, rank: int, keys: bytes, done: Callback | None = None) -> bool:
        """Take keys back (their slabs are about to be reused). Readers check generations, so a lost withdrawal is a miss."""
        return self._put(Question(P.Delete(namespace, rank, keys), done, repeat=True))

    def submit(self, message: P.Request, done: Callback | None = None) -> bool:
        """Ask anything (lookup, pin, …). False at once when there is no session or the queue is full."""
        if self.state is LinkState.CONNECTING:
            return False
        return self._put(Question(message, done, repeat=False))

    def _put(self, item: Item) -> bool:
        if self._ended or len(self._queue) >= self.config.queue_max:
            self._dropped += 1
            return False
        self._queue.append(item)
        self._ring()
        return True

    def request_regions(
        self,
        count: int,
        done: Callable[[list[RegionLease] | MaruError], None],
        *,
        device: bytes = b"",
        slab_bytes: int = 0,
        timeout_ms: int = 60_000,
    ) -> None:
        """Ask for ``count`` regions, again and again until ``timeout_ms`` where that can help; ``done`` on the link's
        thread. A region that this node holds already comes as a revoked lease.
        """
        message = P.AllocRegions(uuid.uuid4().hex, count, device, slab_bytes)
        with self._lock:
            if not self._ended:
                self._wants.append(Want(message, boottime_ns() + timeout_ms * _MS, done))
                done = _nobody
        if done is not _nobody:
            done(ServerUnavailable("the link to the metadata server has ended", "open a new one"))
        self._ring()

    def free_region(self, region: RegionLease) -> None:
        """Give a region back. From this call on it may not be written."""
        region.revoked = True
        self._regions.pop((region.device, region.region), None)
        self._put(Question(P.FreeRegions([P.Region(region.device, region.region, region.token)]), None, repeat=True))

    @property
    def regions(self) -> list[RegionLease]:
        return list(self._regions.values())

    def stats(self) -> LinkStats:
        now = boottime_ns()
        left = max(0, (self.lease.deadline_ns - now) // _MS)
        error, error_ns, stands = self._last_error, self._last_error_ns, True
        if self.state not in (LinkState.CONNECTING, LinkState.SUPERSEDED):
            refused_ns, refused = self._refusals.standing
            stands = bool(refused)
            if refused:
                error, error_ns = refused, refused_ns
        age = max(0, now - error_ns) // _MS if error else 0
        return LinkStats(
            self.state, self._epoch, left, len(self._regions), len(self._queue), len(self._pending), self._keys_announced,
            self._keys_existing, self._dropped, self._reconnects, self._refusals.total, error, age, stands and bool(error),
            self._refused,
        )  # fmt: skip

    # --- the link's thread: loop -------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._closing and self.state is not LinkState.SUPERSEDED:
            try:
                self._turn()
            except ServerError as e:
                self._disconnect(e)
            except ProtocolViolation as e:
                self._backoff_ms = max(self._backoff_ms, _VIOLATION_BACKOFF_MS)
                self._disconnect(e)
            except Exception as e:
                log.exception("server link failed; it starts over")
                self._disconnect(ServerUnavailable(f"server link failed: {type(e).__name__}", "see the log"))
        self._end()

    def _turn(self) -> None:
        now = boottime_ns()
        oldest = next(iter(self._pending.values()), None)
        if oldest is not None and now - oldest.sent_ns > self.config.timeout_ms * _MS:
            raise self._connection.unavailable(self.config.timeout_ms)
        if now >= self._next_ns:
            self._hello() if self.state is LinkState.CONNECTING else self._heartbeat()
        if self.state is not LinkState.CONNECTING:
            if self.state is not LinkState.CLAIMING and now >= self._claim_again_ns > 0:
                self._claim()
            self._send_wants(now)
            self._send_announcements()
            self._send_queue()
        self._wait_for_work()
        while (got := self._connection.receive(0)) is not None:
            self._on_reply(*got)

    def _wait_for_work(self) -> None:
        now = boottime_ns()
        ends = [self._next_ns, *(w.next_ns for w in self._wants if not w.asked and self.state is not LinkState.CONNECTING)]
        if self._claim_again_ns:
            ends.append(self._claim_again_ns)
        if self._pending:
            ends.append(next(iter(self._pending.values())).sent_ns + self.config.timeout_ms * _MS)
        timeout_ms = min(max(0, (min(ends) - now) // _MS + 1), 1000)
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._connection.socket, zmq.POLLIN)
        poller.poll(timeout_ms)
        if select.select([self._wake], [], [], 0)[0]:
            os.eventfd_read(self._wake)

    def _send(self, message: P.Request, answer: Callback, item: Item | None = None, *, epoch: int | None = None) -> None:
        self._pending[self._connection.send(message, epoch=epoch)] = Pending(message, boottime_ns(), answer, item)

    def _on_reply(self, request_id: int, epoch: int, reply: P.Reply) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return  # an answer to a connection before
        verb = type(pending.request)
        result: P.Reply | MaruError
        try:
            result = checked(reply)
            check_answer(pending.request, result)
            self._refusals.answered(verb)
        except ProtocolViolation as e:
            self._pending[request_id] = pending  # goes with the others
            self._refusals.broken(verb, e)
            raise
        except ServerRefused as e:
            if e.code in (ErrorCode.NO_SESSION, ErrorCode.WRONG_EPOCH, ErrorCode.NODE_DEAD, ErrorCode.STALE_INCARNATION):
                self._pending[request_id] = pending  # goes with the others
                self._lose_session(e)
                return
            result = e
            if said := self._refusals.refused(verb, e):
                self._note_error(said)
        if isinstance(result, P.Welcome):
            self._epoch_seen = epoch
        pending.answer(result)

    # --- session ------------------------------------------------------------------------------------------------------------
    def _hello(self) -> None:
        c = self.config
        self._next_ns = boottime_ns() + c.timeout_ms * _MS
        sent = boottime_ns()
        m = P.Hello(P.PROTOCOL_MIN, P.PROTOCOL, "maru-node", c.node, self._incarnation, self._predecessor, c.label)
        self._send(m, lambda reply: self._on_welcome(reply, sent), epoch=0)

    _epoch_seen = 0

    def _on_welcome(self, reply: P.Reply | MaruError, sent_ns: int) -> None:
        if isinstance(reply, MaruError):
            raise reply
        welcome = expect(reply, P.Welcome)
        self._connection.epoch = self._epoch_seen
        self._connection.welcome = welcome
        self._lease_ms, self._heartbeat_ms = welcome.lease_ms, welcome.heartbeat_ms
        self._backoff_ms = _BACKOFF_MS[0]
        self._refusals.new_session()
        if self._down_ns:
            log.info(
                "linked to metadata server %s after %.1f s without", self.config.endpoint, (boottime_ns() - self._down_ns) / 1e9
            )
            self._down_ns = 0
        self._predecessor = P.Predecessor.UNKNOWN
        if self._epoch != self._epoch_seen:
            self._epoch = self._epoch_seen
            self._announce_all = True
        for m in self._devices.values():
            self._send(m, lambda _reply: None)
        self._next_ns = boottime_ns() + self._heartbeat_ms * _MS
        self._claim(sent_ns)

    def _heartbeat(self) -> None:
        self._next_ns = boottime_ns() + self._heartbeat_ms * _MS
        sent = boottime_ns()

        def answered(reply: P.Reply | MaruError) -> None:
            if isinstance(reply, MaruError):
                raise reply
            if self.state is LinkState.CLAIMING:
                return  # not before the claims are answered
            self.lease.renew(sent, self._lease_ms)
            if self.lease.term != self._claim_term:
                self._claim()

        self._send(P.Heartbeat(), answered)

    def _claim(self, hello_ns: int | None = None) -> None:
        """Claim every region; ``hello_ns``: when the Hello was sent that the lease is to be renewed from."""
        self.state = LinkState.CLAIMING
        self._claim_again_ns = 0
        sent = boottime_ns() if hello_ns is None else hello_ns
        held = list(self._regions.values())
        unbroken = {id(r) for r in held if r.unbroken}
        pieces = [held[i : i + P.MAX_GRANTS_PER_CALL] for i in range(0, len(held), P.MAX_GRANTS_PER_CALL)] or [[]]
        left = [len(pieces)]
        answers: list[tuple[RegionLease, P.ClaimResult]] = []

        def answered(piece: list[RegionLease], reply: P.Reply | MaruError) -> None:
            if isinstance(reply, MaruError):
                raise reply
            answers.extend(zip(piece, expect(reply, P.Claimed).results, strict=True))
            left[0] -= 1
            if left[0] == 0:
                self._claimed(answers, unbroken, sent)

        for piece in pieces:
            m = P.ClaimRegions([P.Region(r.device, r.region, r.token) for r in piece])
            self._send(m, lambda reply, piece=piece: answered(piece, reply))  # type: ignore[misc]

    def _claimed(self, answers: list[tuple[RegionLease, P.ClaimResult]], unbroken: set[int], sent_ns: int) -> None:
        self.lease.renew(sent_ns, self._lease_ms)
        self._claim_term = self.lease.term
        again = False
        for region, result in answers:
            if result.verdict is ClaimVerdict.LOST:
                region.revoked = True
                self._regions.pop((region.device, region.region), None)
                log.warning("region %d of device %s went to another node", region.region, region.device.hex())
                continue
            grant = result.grant
            if grant is not None:
                region.grant = grant.id
                if result.verdict is ClaimVerdict.GRANTED or (id(region) in unbroken and region.unbroken):
                    region.confirm(grant.token, grant.id)
            again = again or result.verdict is not ClaimVerdict.GRANTED
        self._claim_again_ns = boottime_ns() + self._heartbeat_ms * _MS if again else 0
        if self._announce_all:
            self._announce_all = False
            self._announce = announcements([r for r in self._regions.values() if r.grant], self._source)
        self.state = LinkState.READY if self._announce is None else LinkState.ANNOUNCING

    def _lose_session(self, why: ServerRefused) -> None:
        if why.code is ErrorCode.NODE_DEAD:
            self.lease.end()
            self._incarnation = max(self._incarnation + 1, time.time_ns())
        elif why.code is ErrorCode.STALE_INCARNATION:
            self.lease.end()
            log.error("%s", why)
            self._note_error(str(why))
            self.state = LinkState.SUPERSEDED
            return
        self._disconnect(why, backoff=False)

    def _disconnect(self, why: MaruError, *, backoff: bool = True) -> None:
        """Start over with a new socket. Publications and withdrawals are sent again, questions are answered with ``why``."""
        self._reconnects += 1
        self._note_error(str(why))
        self._tell_down(str(why))
        self.state = LinkState.CONNECTING
        self._connection.close()
        pending, self._pending = list(self._pending.values()), {}
        if self._announce is not None or self._announcing:
            self._announce, self._announcing, self._announce_all = None, 0, True
        repeat = []
        for p in pending:
            if isinstance(p.item, Publication) or (p.item is not None and p.item.repeat):
                repeat.append(p.item)
            elif p.item is not None and p.item.done is not None:
                p.item.done(why)
        self._queue.extendleft(reversed(repeat))
        for want in self._wants:
            want.asked = False
        self._claim_again_ns = 0
        self._next_ns = boottime_ns()
        if backoff:
            self._next_ns += self._backoff_ms * _MS
            self._backoff_ms = min(self._backoff_ms * 2, _BACKOFF_MS[1])

    def _note_error(self, text: str) -> None:
        self._last_error_ns = boottime_ns()  # before the text: a reader that sees it sees its time
        self._last_error = text

    def _tell_down(self, why: str) -> None:
        """Log a lost session once, and each further reason why there is none once."""
        if not self._down_ns:
            self._down_ns = boottime_ns()
            self._said.clear()
        if why not in self._said and len(self._said) < _REASONS_LOGGED:
            text = "metadata server %s stays away: %s" if self._said else "no session with metadata server %s: %s"
            log.warning(text, self.config.endpoint, why)
            self._said.add(why)

    def _end(self) -> None:
        if self._closing and self.state not in (LinkState.CONNECTING, LinkState.SUPERSEDED):
            try:
                self._connection.call(P.Leave(), 1000)
            except (ServerError, ProtocolViolation) as e:
                log.info("left without the server's answer: %s", e)
        self.lease.end()
        gone = ServerUnavailable("the link to the metadata server has ended", "")
        if self.state is not LinkState.SUPERSEDED:
            self.state = LinkState.STOPPED
        pending, self._pending = list(self._pending.values()), {}
        for item in [*(p.item for p in pending), *self._queue]:
            if item is not None and item.done is not None:
                item.done(gone)
        self._queue.clear()
        with self._lock:
            wants, self._wants = self._wants, []
        for want in wants:
            want.done(gone)

    # --- sending ------------------------------------------------------------------------------------------------------------
    def _send_wants(self, now: int) -> None:
        with self._lock:
            due = [w for w in self._wants if not w.asked and now >= w.next_ns]
        for want in due:
            want.asked = True
            self._send(want.message, lambda reply, want=want: self._on_granted(want, reply))  # type: ignore[misc]

    def _on_granted(self, want: Want, reply: P.Reply | MaruError) -> None:
        if isinstance(reply, ServerRefused) and reply.retry_ms:
            again_ns = boottime_ns() + max(reply.retry_ms, _RETRY_MS_MIN) * _MS
            if again_ns < want.end_ns:
                want.asked, want.next_ns = False, again_ns
                self._refused = str(reply)
                return
        self._refused = str(reply) if isinstance(reply, MaruError) else ""
        with self._lock:
            self._wants.remove(want)
        if isinstance(reply, MaruError):
            want.done(reply)
            return
        granted = []
        for g in expect(reply, P.Granted).grants:
            region = RegionLease(self.lease, g.device, g.region)
            region.confirm(g.token, g.id)
            held = self._regions.get((g.device, g.region))
            if held is None or held.revoked:
                self._regions[g.device, g.region] = region
            else:  # the server gave away what it had not got back: nothing is written by the second grant
                region.revoked = True
                log.warning("region %d of device %s was granted while it is held", g.region, g.device.hex())
            granted.append(region)
        want.done(granted)

    def _send_announcements(self) -> None:
        while self._announce is not None and self._announcing < _ANNOUNCE_WINDOW:
            batch = next(self._announce, None)
            if batch is None:
                self._announce = None
                break
            self._announcing += 1
            self._send(Publication(*batch, None).message(), self._on_announced)
        if self.state is LinkState.ANNOUNCING and self._announce is None and self._announcing == 0:
            self.state = LinkState.READY
        if self.state is LinkState.READY and self._announce_all:
            self._announce_all = False
            self._announce = announcements([r for r in self._regions.values() if r.grant], self._source)
            self.state = LinkState.ANNOUNCING

    def _on_announced(self, reply: P.Reply | MaruError) -> None:
        self._announcing -= 1
        self._count(reply)
        self._send_announcements()

    def _count(self, reply: P.Reply | MaruError) -> None:
        if isinstance(reply, P.Outcomes):
            self._keys_announced += reply.codes.count(Outcome.REGISTERED)
            self._keys_existing += reply.codes.count(Outcome.EXISTS)

    def _send_queue(self) -> None:
        if self.state is LinkState.CLAIMING:
            return  # grant ids are about to change
        while self._queue and len(self._pending) < 64:
            item = self._queue.popleft()

            def answered(reply: P.Reply | MaruError, item: Item = item) -> None:
                if isinstance(item, Publication):
                    self._count(reply)
                if item.done is not None:
                    item.done(reply)

            self._send(item.message(), answered, item)
