"""The life of a lookup: from a request's arrival to the lease that is given back.

Nothing here waits for I/O. A lookup is posted when a request arrives and read when the scheduler asks; the answer is a
lease, held by the LOOKUP's own record until the load is over, the hit turns out useless, or the request goes. Every path
out of a request ends in :meth:`Lookups.drop`, which is how leases do not leak; a lease that a load was made of is the
load's, and ends in :meth:`Lookups.release` when that is over.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable

from maru_connector.link import SidecarLink
from maru_connector.log import OnceLogger, get_logger
from maru_connector.options import Options
from maru_connector.overlap_policy import OverlapPolicy
from maru_connector.request_state import Lookup, RequestState
from maru_connector.session import Session
from maru_connector.stats import MaruStats
from maru_shm import layout as L
from maru_shm.errors import RingFull

logger = get_logger("maru_connector")

MAX_UNANSWERED = 4  #: lookups without an answer; beyond, the sidecar is taken for stalled and everything misses at once
EARLY_LOOKUPS = 64  #: lookups posted at arrival; a longer queue looks up when its turn comes, before its lease runs out
RENEWALS = 3  #: lookups a request makes anew because its lease was about to end; then it misses


class NoAnswer(enum.Enum):
    """What :meth:`Lookups.ask` says when it has no answer to build upon."""

    LATER = "later"  #: ask again next step
    MISS = "miss"  #: do not hold the request up


class Lookups:
    """All lookups of one scheduler half. A request has one at a time at most, in ``RequestState.lookup``.

    ``stats`` is the half's: this counts ``lookups``, ``lookups_skipped`` and ``lookups_unanswered`` in it. Where a caller says
    ``alone``: whether one request is live in the engine, or none; such a lookup is a LOCATE if all workers can overlap.
    """

    def __init__(self, options: Options, link: SidecarLink, overlap: OverlapPolicy | None, stats: MaruStats) -> None:
        self._options = options
        self._link = link
        self._overlap = overlap
        self._stats = stats
        self._spin_per_step = options.lookup_spin_us / 1e6
        self._spin_left = self._spin_per_step
        self._open = 0  # lookups and leases not given back
        self._once = OnceLogger(logger)

    def new_step(self) -> None:
        """A step is built: the next one may spin anew."""
        self._spin_left = self._spin_per_step

    # --- posting ------------------------------------------------------------------------------------------------------------
    def post_early(self, state: RequestState, *, alone: bool) -> None:
        """Post the lookup of a request that has just arrived, unless too many are open."""
        if state.may_look_up and self._open < EARLY_LOOKUPS:
            session = self._link.poll()
            if session is not None and self._post(session, state, alone=alone):
                session.flush()

    def _post(self, session: Session, state: RequestState, *, alone: bool) -> bool:
        request = state.request
        if session.abandoned >= MAX_UNANSWERED:
            self._stats.add(lookups_skipped=1)
            return False
        chunks = state.keys.extend(request.all_token_ids)
        if not chunks:
            return False
        overlap = self._overlap is not None and self._overlap.generation == session.generation and alone
        try:
            op = L.Op.LOCATE if overlap else L.Op.LOOKUP
            ticket = session.post(op, bytes(state.keys.keys), label=request.request_id)
        except RingFull:
            self._stats.add(lookups_skipped=1)
            return False
        self._open += 1
        self._stats.add(lookups=1)
        state.lookup = Lookup(session, ticket, chunks, time.monotonic(), overlap)
        return True

    # --- asking -------------------------------------------------------------------------------------------------------------
    def ask(self, state: RequestState, *, alone: bool) -> Lookup | NoAnswer:
        """The request's lookup once it is answered; posts one if there is none. Its lease, if any, is not about to end."""
        if state.lookup is None:
            session = self._link.poll()
            if session is None:
                return self._while_attaching()
            if not self._post(session, state, alone=alone):
                return NoAnswer.MISS
            session.flush()
        lookup = state.lookup
        assert lookup is not None
        if lookup.hits is None and not self._answered(state, lookup):
            return self._not_answered(state, lookup)
        if lookup.too_early:
            self.drop(state)
            state.known_hits = -1
            return self._while_attaching()
        if lookup.hits and lookup.deadline - time.monotonic_ns() < L.LEASE_MARGIN_NS:
            return self._about_to_end(state)
        return lookup

    def _about_to_end(self, state: RequestState) -> NoAnswer:
        """It waited in the queue for longer than the lease lives: ask anew. A few times, as any wait may be longer."""
        self.drop(state)
        state.known_hits = -1
        state.renewals += 1
        if state.renewals <= RENEWALS:
            return NoAnswer.LATER
        state.may_look_up = False
        self._once.warning(
            "short leases",
            "maru: the lease of a hit was about to end %d times before it could be used: a miss. The sidecar's"
            " cache.lease_ttl_s, in a shared pool also server.pin_ttl_s and the server's --max-pin-ms, should be 10 s or more.",
            state.renewals,
        )
        return NoAnswer.MISS

    def _while_attaching(self) -> NoAnswer:
        """A sidecar has just come (back): its first requests are worth a moment, since a miss costs their whole prefill.

        Links advance with steps, so an idle engine attaches when a request arrives. Bounded by the attachment's age, not the
        request's: an engine whose workers are refused delays nothing for longer than that once.
        """
        if self._link.attaching_for() * 1e3 < self._options.attach_patience_ms:
            return NoAnswer.LATER
        return NoAnswer.MISS

    def _answered(self, state: RequestState, lookup: Lookup) -> bool:
        """Read the answer; look again for as long as this step's spin lasts."""
        session, ticket = lookup.session, lookup.ticket
        reply = session.peek(ticket)
        if reply is None and session.connected and self._spin_left > 0:
            start = now = time.perf_counter()
            until = start + self._spin_left
            while reply is None and now < until:
                time.sleep(0)  # gives up the GIL, about 1 µs: threads of this process get their turns
                reply = session.peek(ticket)
                now = time.perf_counter()
            self._spin_left -= now - start
        if reply is None:
            return False
        hits = min(reply.n_done, lookup.chunks) if reply.state is L.State.DONE else 0
        state.known_hits = hits
        state.stored = max(state.stored, hits)  # in the pool already, on every rank
        lookup.hits, lookup.deadline = hits, reply.deadline
        lookup.too_early = reply.code is L.Code.NOT_REGISTERED
        return True

    def _not_answered(self, state: RequestState, lookup: Lookup) -> NoAnswer:
        lookup.asks += 1
        late = (time.monotonic() - lookup.posted) * 1e3 > self._options.lookup_patience_ms
        if lookup.session.connected and (lookup.asks < 2 or not late):
            return NoAnswer.LATER
        state.may_look_up = False  # do not hold this request up again
        self.drop(state)
        self._stats.add(lookups_unanswered=1)
        self._once.warning(
            "unanswered",
            "maru: a lookup was not answered within %.0f ms (maru.lookup_patience_ms): a miss; is the host overloaded?",
            self._options.lookup_patience_ms,
        )
        return NoAnswer.MISS

    # --- letting go ---------------------------------------------------------------------------------------------------------
    def drop(self, state: RequestState) -> None:
        """Forget the request's lookup and give its lease back."""
        lookup, state.lookup = state.lookup, None
        if lookup is not None:
            self.release(lookup)

    def release(self, lookup: Lookup) -> None:
        """Give back a lookup's record, and its lease as soon as it is answered. Once per lookup: it is forgotten by then."""
        self._open -= 1
        lookup.session.release(lookup.ticket)
        lookup.session.flush()

    def on_lost(self, session: Session, states: Iterable[RequestState]) -> None:
        """The sidecar is gone: no lookup of ``session`` is worth anything."""
        for state in states:
            if state.lookup is not None and state.lookup.session is session:
                self.drop(state)
                state.known_hits = -1
