"""The submission ring: single producer (the client), single consumer (the sidecar's poller), fixed slots.

Indices are free-running u64 counters with one writer each; the producer publishes a batch with one tail store. The
consumer never trusts the producer: the tail must lie within one ring of the head, and each slot must carry its own
position. What does not is a :class:`~maru_shm.errors.ProtocolViolation` and ends that session only.
"""

from __future__ import annotations

from maru_shm import layout as L
from maru_shm.atomics import full_fence, order_fence
from maru_shm.errors import ProtocolViolation, RingFull
from maru_shm.segment import Segment


class SubmissionProducer:
    """The client's end. Not thread-safe: one engine thread posts."""

    __slots__ = ("_base", "_head", "_mask", "_tail", "_words")

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._mask = segment.shape.n_slots - 1
        self._base = L.RING_OFFSET // 8
        self._tail = self._words[L.WORD_SQ_TAIL]
        self._head = self._words[L.WORD_SQ_HEAD]

    def push(self, ticket: int, verb: L.Verb) -> None:
        """Write one slot; visible after :meth:`publish`. Raises :class:`RingFull` at once."""
        tail, words = self._tail, self._words
        if tail - self._head > self._mask:
            self._head = words[L.WORD_SQ_HEAD]
            if tail - self._head > self._mask:
                raise RingFull(f"all {self._mask + 1} submission slots are taken", "the sidecar is stalled or gone")
        at = self._base + (tail & self._mask) * L.SLOT_WORDS
        words[at + L.SLOT_TICKET] = ticket
        words[at + L.SLOT_VERB] = verb
        words[at + L.SLOT_SEQ] = tail + 1
        self._tail = tail + 1

    def publish(self) -> bool:
        """Make pushed slots visible; True if the sidecar sleeps and wants the doorbell."""
        order_fence()
        self._words[L.WORD_SQ_TAIL] = self._tail  # SYNC POINT: release
        full_fence()  # SYNC POINT: the tail is visible before "armed" is read
        return self._words[L.WORD_ARMED] == 1


class SubmissionConsumer:
    """The sidecar's end."""

    __slots__ = ("_base", "_head", "_mask", "_words")

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._mask = segment.shape.n_slots - 1
        self._base = L.RING_OFFSET // 8
        self._head = 0

    def ready(self) -> int:
        """Slots waiting. Raises :class:`ProtocolViolation` if the client's tail is impossible."""
        n = self._words[L.WORD_SQ_TAIL] - self._head
        if not 0 <= n <= self._mask + 1:
            raise ProtocolViolation(f"submission tail is {self._head + n}, head {self._head}", "the client's ring is corrupt")
        order_fence()  # SYNC POINT: acquire
        return n

    def pop(self) -> tuple[int, L.Verb]:
        """Take one slot as ``(ticket, verb)``; call at most :meth:`ready` times, then :meth:`release`."""
        words, head = self._words, self._head
        at = self._base + (head & self._mask) * L.SLOT_WORDS
        seq, ticket, verb = words[at + L.SLOT_SEQ], words[at + L.SLOT_TICKET], words[at + L.SLOT_VERB]
        if seq != head + 1:
            raise ProtocolViolation(f"submission slot {head} is stamped {seq}", "the client's ring is corrupt")
        self._head = head + 1
        try:
            return ticket, L.Verb(verb)
        except ValueError as e:
            raise ProtocolViolation(f"submission slot {head} has verb {verb}", "the client's ring is corrupt") from e

    def release(self) -> None:
        """Give the popped slots back to the producer."""
        self._words[L.WORD_SQ_HEAD] = self._head

    def arm(self) -> None:
        """Ask for the doorbell. Then fence once for all rings and check :meth:`ready` again before sleeping."""
        self._words[L.WORD_ARMED] = 1

    def disarm(self) -> None:
        self._words[L.WORD_ARMED] = 0
