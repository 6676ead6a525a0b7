"""Lookups that go on at the server: which chunks beyond our own leading hit do other nodes have?

Nobody waits. The ticket stays ACCEPTED, the main thread goes on, and the server's answer comes back as a callback; after
``wait_s`` at the latest the lookup is answered with what is here. One message per rank both finds and pins (``Pin`` stops at
the first key that is absent).

A pin lasts as long as the server granted it, which may be shorter than asked. What cannot be used is a miss, counted by its
reason: the server was too slow, it answered with an error or with what is no answer (the link checks that, before it is seen
here), or the pins it grants are too short to build a lease upon.

Used by the main thread alone, but for the callbacks of the server's link.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from maru_server import protocol as P
from maru_shm.errors import MaruError
from maru_shm.layout import KEY_BYTES, LEASE_MARGIN_NS
from maru_sidecar.directory import Directory
from maru_sidecar.sharing.foreign import Asker, Beyond, ForeignLease, ForeignLeases, Place
from maru_sidecar.slab_reader import SlabReader

log = logging.getLogger(__name__)


class Server(Protocol):
    """What is asked of ``maru_server.node.NodeLink``."""

    def submit(self, message: P.Request, done: Callable[[P.Reply | MaruError], None] | None = None) -> bool: ...


@dataclass(slots=True, eq=False)
class _Question:
    asker: Asker
    keys: bytes
    answer: Callable[[Beyond], None]
    give_up_ns: int
    asked_ns: int
    pinned_until_ns: int  #: by the shortest pin granted so far
    left: int
    replies: dict[int, P.Places] = field(default_factory=dict)
    refused: bool = False
    over: bool = False


@dataclass(slots=True)
class LookupCounts:
    asked: int = 0  #: lookups that went to the server
    chunks: int = 0  #: chunks they found there
    late: int = 0  #: answered without the server, which was too slow
    refused: int = 0  #: that the server answered with an error or wrongly, or whose session ended
    short: int = 0  #: whose pins were granted for too short a time
    stale: int = 0  #: chunks the server knew and that were no longer in their slab


class PeerLookups:
    """``wait_s``: bound for the server's answer. ``pin_ttl_s``: for how long chunks of others are pinned there, at most."""

    def __init__(
        self,
        server: Server,
        device: bytes,
        directory: Directory,
        reader: SlabReader,
        call_soon: Callable[[Callable[[], None]], None],
        *,
        wait_s: float,
        pin_ttl_s: float,
        lease_ttl_s: float,
    ) -> None:
        self._server = server
        self._device = device
        self._directory = directory
        self._reader = reader
        self._call_soon = call_soon
        self._wait_ns = int(wait_s * 1e9)
        self._pin_ms = int(pin_ttl_s * 1e3)
        self._lease_ttl_s = lease_ttl_s
        self._open: list[_Question] = []  #: oldest first, so the first one's time is up first
        self.leases = ForeignLeases(self._end)
        self.counts = LookupCounts()
        self.too_short = ""  #: why the last hit of the server was of no use, empty if it was of use; any thread reads it

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` has something to do (CLOCK_MONOTONIC); None: nothing is open."""
        return self._open[0].give_up_ns if self._open else None

    def ask(self, asker: Asker, keys: bytes, answer: Callable[[Beyond], None]) -> bool:
        """Ask for ``keys``, the ones beyond the local hit; ``answer`` is called once, by the main thread. False: no server."""
        now = time.monotonic_ns()
        keys = keys[: P.MAX_BATCH * KEY_BYTES]
        q = _Question(asker, keys, answer, now + self._wait_ns, now, now + self._pin_ms * 1_000_000, asker.world)
        asked = 0
        for rank in range(asker.world):
            if self._server.submit(P.Pin(asker.namespace, rank, keys, self._pin_ms), self._callback(q, rank)):
                asked += 1
        if asked < asker.world:  # the session ended, or the link's queue is full: what was sent is unpinned when answered
            q.over = True
            return False
        self.counts.asked += 1
        self._open.append(q)
        return True

    def _callback(self, q: _Question, rank: int) -> Callable[[P.Reply | MaruError], None]:
        def replied(reply: P.Reply | MaruError) -> None:  # on the link's thread
            self._call_soon(lambda: self._replied(q, rank, reply))

        return replied

    def _replied(self, q: _Question, rank: int, reply: P.Reply | MaruError) -> None:
        if isinstance(reply, P.Places):
            if q.over:
                self._unpin([reply.pin])
                return
            q.replies[rank] = reply
            if reply.pin_ms:
                q.pinned_until_ns = min(q.pinned_until_ns, q.asked_ns + reply.pin_ms * 1_000_000)
        else:  # the link counts, logs and tells why
            q.refused = True
        q.left -= 1
        if not q.over and q.left == 0:
            self._open.remove(q)
            self._answer(q)

    def expire(self, now_ns: int) -> None:
        """Answer the questions whose time is up with nothing found."""
        while self._open and self._open[0].give_up_ns <= now_ns:
            q = self._open.pop(0)
            q.over = True
            self.counts.late += 1
            self._unpin([reply.pin for reply in q.replies.values()])
            q.answer(Beyond())

    def close(self) -> None:
        """Answer everything that is open."""
        self.expire(1 << 63)

    # --- answers ------------------------------------------------------------------------------------------------------------
    def _answer(self, q: _Question) -> None:
        q.over = True
        self.counts.refused += q.refused
        lease = ForeignLease(q.pinned_until_ns, pins=[reply.pin for reply in q.replies.values() if reply.pin])
        if lease.pins and not self._long_enough(q):
            self._end(lease)
            q.answer(Beyond())
            return
        beyond = Beyond()
        try:
            beyond = self._combine(q, lease)
        finally:  # whatever goes wrong, the ticket is answered and nothing stays leased for nobody
            if beyond.n:
                self.leases.add(q.asker.session, q.asker.ticket, lease)
                self.counts.chunks += len(lease.places) // q.asker.world
            else:
                self._end(lease)
            q.answer(beyond)

    def _long_enough(self, q: _Question) -> bool:
        """Whether a lease can be built upon the pins granted; says so once if not."""
        if q.pinned_until_ns - time.monotonic_ns() >= LEASE_MARGIN_NS:
            self.too_short = ""
            return True
        self.counts.short += 1
        granted_s = (q.pinned_until_ns - q.asked_ns) / 1e9
        self.too_short = (
            f"chunks of other nodes are not used: they are pinned for {granted_s:g} s, and a lease is to last at least"
            f" {LEASE_MARGIN_NS / 1e9:g} s more when the server has answered; raise server.pin_ttl_s and the server's"
            " --max-pin-ms"
        )
        if self.counts.short == 1:
            log.warning("%s", self.too_short)
        return False

    def _combine(self, q: _Question, lease: ForeignLease) -> Beyond:
        """Walk along the prefix: chunks of other nodes as the server placed them, chunks of ours by leases of our own."""
        rows = self._leading_places(q)
        n_keys, at = len(q.keys) // KEY_BYTES, 0
        deadline = q.pinned_until_ns
        while at < n_keys:
            row = rows[at] if at < len(rows) else None
            if row is not None and self._still_there(row):
                key = q.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                lease.places.update({(key, rank): place for rank, place in enumerate(row)})
                at += 1
                continue
            own = self._directory.lease(
                q.asker.namespace, q.keys[at * KEY_BYTES :], world=q.asker.world, ttl_s=self._lease_ttl_s, owner=q.asker.owner
            )
            if own is None:
                break
            lease.own.append(own.id)
            deadline = min(deadline, own.deadline_ns)
            at += own.n
        return Beyond(at, deadline if at else 0)

    def _leading_places(self, q: _Question) -> list[list[Place] | None]:
        """Per leading chunk the places of its ranks; None where one lies in a region of ours or not in this pool."""
        if len(q.replies) < q.asker.world:
            return []
        columns = []
        for rank in range(q.asker.world):
            reply = q.replies[rank]
            regions = {g.id: g.region for g in reply.grants if g.device == self._device}
            rows = np.frombuffer(reply.places, P.PLACE).tolist()
            columns.append([self._place(regions.get(grant), slab, generation) for grant, slab, generation in rows])
        chunks = zip(*columns, strict=False)  # as many as every rank has
        return [[p for p in row if p is not None] if None not in row else None for row in chunks]

    def _place(self, region: int | None, slab: int, generation: int) -> Place | None:
        if region is None or self._directory.shared.has(region):
            return None
        return Place(region, slab, generation)

    def _still_there(self, places: list[Place]) -> bool:
        there = all(self._reader.committed(*place) for place in places)
        self.counts.stale += not there
        return there

    def _end(self, lease: ForeignLease) -> None:
        self._unpin(lease.pins)
        for own in lease.own:
            self._directory.release(own)

    def _unpin(self, pins: list[int]) -> None:
        for pin in filter(None, pins):
            self._server.submit(P.Unpin(pin))
