"""What the sidecar does with each submission of a ring: answer it inline, or queue it.

Inline work is linear in the request's keys and touches no file, no copy and no lock held longer than that (a lookup of 256
keys takes about 100 µs). Whatever no correct client sends raises :class:`~maru_shm.errors.ProtocolViolation`, which ends that
session alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from maru_shm import layout as L
from maru_shm.errors import ProtocolViolation
from maru_shm.geometry import KvLayout
from maru_shm.records import Request
from maru_sidecar.copy_thread import WorkerPort
from maru_sidecar.directory import Directory
from maru_sidecar.leases import Lease
from maru_sidecar.loader import LoadJob
from maru_sidecar.sessions import Session
from maru_sidecar.sharing.foreign import Asker, Beyond
from maru_sidecar.store_queue import StoreJob
from maru_sidecar.tickets import Ticket

if TYPE_CHECKING:
    from maru_sidecar.sharing.lookups import PeerLookups  # imports the metadata server's client

#: Lease of a LOCATE whose hit includes slabs that another node may reuse: below the 10 s that the connector's overlap path
#: asks for.
UNPINNED_LOCATE_NS = 8_000_000_000
SLOTS_PER_TURN = 64  #: of one ring, before others get theirs
#: Of all rings together, before the loop looks at its sockets and its clock again: about 5 ms of lookups. Each ring may
#: exceed its share by one request.
KEYS_PER_TURN = 1 << 14
_DEPTHS = 1 << 32  #: a slab's header holds its depth as a u32
_Refs = npt.NDArray[np.uint64]
_NO_REFS: _Refs = np.zeros((0, 2), np.uint64)


class Dispatcher:
    """Consumes rings; the main thread uses it alone."""

    def __init__(self, directory: Directory, lease_ttl_s: float, peers: PeerLookups | None = None) -> None:
        self._directory = directory
        self._peers = peers
        self._lease_ttl_s = lease_ttl_s
        self.draining = False

    def serve(self, session: Session, n_keys: int = KEYS_PER_TURN) -> int:
        """Handle what waits in a session's ring until a turn's slots or ``n_keys`` keys are used up; returns how many slots.

        Raises ``ProtocolViolation``.
        """
        n = 0
        for _ in range(min(session.consumer.ready(), SLOTS_PER_TURN)):
            if n_keys <= 0:
                break
            ticket, verb = session.consumer.pop()
            n += 1
            if verb is L.Verb.SUBMIT:
                n_keys -= self._submit(session, ticket)
            elif verb is L.Verb.RELEASE:
                self._release(session, ticket)
            else:
                self._cancel(session, ticket)
        if n:
            session.consumer.release()
        return n

    def _submit(self, session: Session, number: int) -> int:
        """Accept a ticket and begin what it asks for; returns its number of keys."""
        request = session.table.records.accept(number)
        self._give_back(session, number & L.TICKET_INDEX_MASK)
        ticket = session.table.open(request)
        with self._answering(session, ticket):
            if request.op is L.Op.DRAIN:
                session.table.drain(ticket)
            elif self.draining:
                ticket.finish(L.State.FAILED, L.Code.DRAINING)
            elif request.op is L.Op.LOCATE and session.attach.role is not L.Role.SCHEDULER:
                ticket.finish(L.State.FAILED, L.Code.BAD_REQUEST)  # a worker's segment has no reply cells
            elif request.op in (L.Op.LOOKUP, L.Op.LOCATE):
                self._lookup(session, ticket)
            elif session.port is None or session.lane is None:
                raise ProtocolViolation(f"{session.name} posted {request.op.name}", "only workers transfer")
            else:
                self._transfer(session, session.port, ticket)
        return request.n_keys

    @contextlib.contextmanager
    def _answering(self, session: Session, ticket: Ticket) -> Iterator[None]:
        """Whatever is raised inside, the ticket gets an answer and holds no lease: its session could not end without."""
        try:
            yield
        except BaseException as e:
            self._give_back(session, ticket.request.ticket & L.TICKET_INDEX_MASK)
            code = L.Code.BAD_REQUEST if isinstance(e, ProtocolViolation) else L.Code.INTERNAL
            ticket.finish(L.State.FAILED, code)
            raise

    # --- leases ---------------------------------------------------------------------------------------------------------------
    def _lookup(self, session: Session, ticket: Ticket) -> None:
        """Lease the leading chunks; LOCATE also says where their slabs are."""
        request, engine = ticket.request, session.engine
        if not engine.complete:
            ticket.finish(L.State.DONE, L.Code.NOT_REGISTERED)
            return
        lease, refs = None, _NO_REFS
        if request.keys and request.op is L.Op.LOCATE:
            lease, refs = self._directory.lease_located(
                engine.namespace, request.keys, world=engine.world, nbytes=engine.slab_bytes, ttl_s=self._lease_ttl_s,
                owner=session.id,
            )  # fmt: skip
        elif request.keys:
            lease = self._directory.lease(
                engine.namespace, request.keys, world=engine.world, ttl_s=self._lease_ttl_s, owner=session.id
            )
        if lease is not None:
            session.leases[request.ticket & L.TICKET_INDEX_MASK] = (request.ticket, lease.id)
        if self._peers is None or not self._ask_peers(self._peers, session, ticket, lease, refs):
            self._answer_lookup(session, ticket, lease, refs, Beyond())

    def _ask_peers(self, peers: PeerLookups, session: Session, ticket: Ticket, lease: Lease | None, refs: _Refs) -> bool:
        """Look for the rest elsewhere; False if there is no rest or nobody to ask."""
        request, engine = ticket.request, session.engine
        rest = request.keys[(lease.n if lease is not None else 0) * L.KEY_BYTES :]
        if not rest:
            return False
        asker = Asker(engine.namespace, engine.world, session.id, session.id, request.ticket)

        def answer(beyond: Beyond) -> None:
            with self._answering(session, ticket):
                self._answer_lookup(session, ticket, lease, refs, beyond)

        return peers.ask(asker, rest, answer)

    def _answer_lookup(self, session: Session, ticket: Ticket, lease: Lease | None, refs: _Refs, beyond: Beyond) -> None:
        request = ticket.request
        n_local = lease.n if lease is not None else 0
        n = n_local + beyond.n
        deadlines = [d for d in (lease.deadline_ns if lease is not None else 0, beyond.deadline_ns) if d]
        if n:
            session.leases[request.ticket & L.TICKET_INDEX_MASK] = (request.ticket, lease.id if lease is not None else 0)
        if ticket.table.closing:  # its session ended while the server was asked
            self._give_back(session, request.ticket & L.TICKET_INDEX_MASK)
            ticket.finish(L.State.FAILED, L.Code.ENGINE_GONE)
            return
        if request.op is L.Op.LOCATE and n:
            if beyond.n:
                refs = np.zeros((n * session.engine.world, 2), np.uint64)
            if not refs[:, 0].all():
                # A client that reads slabs itself needs them pinned for good. Those of other nodes are not, nor those in a
                # region that may be another's by now. So a hit with any of them gets zeros for references and a lease too
                # short to overlap with: it is loaded by the sidecar, which checks.
                deadlines.append(time.monotonic_ns() + UNPINNED_LOCATE_NS)
            session.table.records.set_slab_refs(request.ticket, refs)
        ticket.finish(L.State.DONE, n_done=n, deadline=min(deadlines, default=0))

    def _release(self, session: Session, number: int) -> None:
        held = session.leases.get(number & L.TICKET_INDEX_MASK)
        if held is not None and held[0] == number:
            self._give_back(session, number & L.TICKET_INDEX_MASK)

    def _give_back(self, session: Session, index: int) -> None:
        """End the lease that record ``index`` holds. A record that is used again has given its lease up."""
        held = session.leases.pop(index, None)
        if held is not None:
            self._directory.release(held[1])
            if self._peers is not None:
                self._peers.leases.release(session.id, held[0])

    # --- transfers --------------------------------------------------------------------------------------------------------
    def _transfer(self, session: Session, port: WorkerPort, ticket: Ticket) -> None:
        request = ticket.request
        store = request.op is L.Op.STORE
        n_chunks = request.n_keys - 1 if store else request.n_keys
        if n_chunks < 1 or request.blocks.shape[1:] != (session.engine.blocks_per_chunk,):
            ticket.finish(L.State.FAILED, L.Code.BAD_REQUEST)
            return
        if request.depth + n_chunks >= _DEPTHS:
            raise ProtocolViolation(f"{n_chunks} chunks from depth {request.depth} on", "the client is broken")
        _check_blocks(request, port.target.layout)
        lane = session.lane
        assert lane is not None
        if store:
            lane.writer.put(StoreJob(ticket, port))
        else:
            lane.loader.put(LoadJob(ticket, port))

    def _cancel(self, session: Session, number: int) -> None:
        """The cancel word is set already: have whoever holds the ticket look at it."""
        if number in session.table.outstanding and session.lane is not None:
            session.lane.nudge()


def _check_blocks(request: Request, layout: KvLayout) -> None:
    """Raise unless every id is a block of the cache; a STORE may skip nothing but its parent's row, a slab has no holes."""
    blocks = request.blocks
    lowest = int(blocks.min())
    if request.op is L.Op.STORE:
        lowest = min(int(blocks[1:].min()), 0 if (blocks[0] == L.SKIP_BLOCK).all() else -1)
        lowest = lowest if lowest >= 0 else L.SKIP_BLOCK - 1
    if lowest < L.SKIP_BLOCK or int(blocks.max()) >= layout.num_blocks:
        raise ProtocolViolation(
            f"{request.op.name} names blocks {lowest} to {int(blocks.max())} of {layout.num_blocks}", "the client is broken"
        )
