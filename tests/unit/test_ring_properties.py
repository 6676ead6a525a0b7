"""Ring and record table under arbitrary use and arbitrary bytes: they do what a plain model does, or say whose fault it is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from maru_shm import layout as L
from maru_shm import segment as segments
from maru_shm.errors import ProtocolViolation, RingFull
from maru_shm.records import ClientRecords, Request, SidecarRecords
from maru_shm.ring import SubmissionConsumer, SubmissionProducer

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
MAX_KEYS, MAX_BLOCKS, RECORDS = 4, 16, 4
BYTES_SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_segment() -> segments.Segment:
    shape = L.SegmentShape.for_limits(RECORDS, MAX_KEYS, MAX_BLOCKS)
    info = segments.SegmentInfo(time.time_ns(), 1, shape, os.getpid(), os.getpid(), 1, 1, "0badcafe", L.Role.WORKER)
    segment = segments.create(info)
    segments.unlink(info.name)
    return segment


@pytest.fixture
def segment() -> Iterator[segments.Segment]:
    made = make_segment()
    yield made
    made.close()


@given(tail=U64, head_start=st.integers(0, 40), slot=st.tuples(U64, U64, U64))
@BYTES_SETTINGS
def test_whatever_a_client_writes_into_the_ring_is_a_slot_or_a_violation(
    segment: segments.Segment, tail: int, head_start: int, slot: tuple[int, int, int]
) -> None:
    consumer = SubmissionConsumer(segment)
    consumer._head = head_start
    segment.words[L.WORD_SQ_TAIL] = tail
    at = L.RING_OFFSET // 8 + (head_start & (segment.shape.n_slots - 1)) * L.SLOT_WORDS
    for i, word in enumerate(slot):
        segment.words[at + i] = word
    try:
        ready = consumer.ready()
    except ProtocolViolation:
        assert not head_start <= tail <= head_start + segment.shape.n_slots
        return
    assert ready == tail - head_start
    try:
        ticket, verb = consumer.pop()
    except ProtocolViolation:
        assert slot[0] != head_start + 1 or slot[2] not in list(L.Verb)
    else:
        assert (head_start + 1, ticket, verb) == slot


@given(
    number=st.one_of(U64.map(lambda n: n >> 8), st.integers(0, 5 << 16)),
    state=st.one_of(U64, st.none()),
    fields=st.tuples(st.one_of(U64, st.none()), st.integers(0, 9), U32, U64, U64, U32, U32,
                     st.one_of(U32, st.integers(0, 8)), st.one_of(U32, st.integers(0, 40)), U64),
    cell=st.binary(min_size=128, max_size=128),
)  # fmt: skip
@BYTES_SETTINGS
def test_whatever_a_client_writes_into_a_record_is_a_request_in_bounds_or_a_violation(
    segment: segments.Segment, number: int, state: int | None, fields: tuple[int | None, ...], cell: bytes
) -> None:
    shape = segment.shape
    index = number & L.TICKET_INDEX_MASK
    if index < shape.n_records:
        base = shape.records_offset + index * L.RECORD_BYTES
        own, *rest = fields
        L.REQUEST.pack_into(segment.bytes, base, number if own is None else own, *rest)
        segment.words[base // 8 + L.STATE_WORD] = number << 8 | L.State.POSTED if state is None else state
        at = shape.cells_offset + index * shape.cell_bytes
        segment.bytes[at : at + shape.cell_bytes] = cell[: shape.cell_bytes]
    try:
        request = SidecarRecords(segment).accept(number)
    except ProtocolViolation:
        return
    assert isinstance(request, Request)
    assert request.ticket == number
    assert len(request.keys) + request.blocks.nbytes <= shape.cell_bytes
    assert request.keys == cell[: len(request.keys)]
    assert request.blocks.shape[0] in (0, request.n_keys)


class Conversation(RuleBasedStateMachine):
    """A client and a sidecar take turns in any order; a dict per side says what each may see."""

    posted = Bundle("posted")  #: tickets pushed by the client, in order
    accepted = Bundle("accepted")  #: taken by the sidecar, not answered

    def __init__(self) -> None:
        super().__init__()
        self.segment = make_segment()
        self.producer = SubmissionProducer(self.segment)
        self.consumer = SubmissionConsumer(self.segment)
        self.client = ClientRecords(self.segment, self.producer)
        self.sidecar = SidecarRecords(self.segment)
        self.pushed: list[tuple[int, L.Verb]] = []  #: not published
        self.visible: list[tuple[int, L.Verb]] = []  #: published, not consumed
        self.requests: dict[int, tuple[bytes, bytes]] = {}
        self.model: dict[int, L.State] = {}
        self.copying: set[int] = set()
        self.cancelled: set[int] = set()
        self.answers: dict[int, tuple[L.Code, int]] = {}

    def teardown(self) -> None:
        self.segment.close()

    @rule(n_keys=st.integers(1, MAX_KEYS), per_key=st.integers(0, 4), data=st.data())
    def post(self, n_keys: int, per_key: int, data: st.DataObject) -> None:
        keys = data.draw(st.binary(min_size=n_keys * 16, max_size=n_keys * 16))
        blocks = data.draw(st.binary(min_size=n_keys * per_key * 4, max_size=n_keys * per_key * 4))
        live = len(self.model)
        waiting = len(self.pushed) + len(self.visible)
        try:
            ticket = self.client.post(L.Op.LOAD, keys, blocks)
        except RingFull:
            assert live == RECORDS or waiting == self.segment.shape.n_slots
            return
        assert ticket not in self.requests, "a ticket was used twice"
        self.requests[ticket] = (keys, blocks)
        self.model[ticket] = L.State.POSTED
        self.pushed.append((ticket, L.Verb.SUBMIT))

    @rule()
    def publish(self) -> None:
        armed = self.producer.publish()
        assert armed == (self.segment.words[L.WORD_ARMED] == 1)
        self.visible += self.pushed
        self.pushed.clear()

    @rule(arm=st.booleans())
    def sleep_or_wake(self, *, arm: bool) -> None:
        (self.consumer.arm if arm else self.consumer.disarm)()

    @rule(target=accepted, n=st.integers(1, 3))
    def consume(self, n: int):  # type: ignore[no-untyped-def]
        ready = self.consumer.ready()
        assert ready == len(self.visible)
        taken = []
        for _ in range(min(n, ready)):
            got = self.consumer.pop()
            assert got == self.visible.pop(0)
            if got[1] is L.Verb.SUBMIT:
                request = self.sidecar.accept(got[0])
                assert (request.keys, request.blocks.tobytes()) == self.requests[got[0]]
                self.model[got[0]] = L.State.ACCEPTED
                taken.append(got[0])
        self.consumer.release()
        return multiple(*taken)

    @rule(ticket=accepted)
    def copy(self, ticket: int) -> None:
        if self.model.get(ticket) is not L.State.ACCEPTED:
            return
        if ticket in self.copying:
            self.sidecar.end_copy(ticket)
            self.copying.discard(ticket)
        else:
            assert self.sidecar.begin_copy(ticket) == (ticket not in self.cancelled)
            if ticket not in self.cancelled:
                self.copying.add(ticket)

    @rule(ticket=accepted)
    def cancel(self, ticket: int) -> None:
        if self.model.get(ticket) is not L.State.ACCEPTED:
            return
        assert self.client.set_cancel(ticket) == (ticket not in self.copying)
        self.cancelled.add(ticket)

    @rule(
        ticket=consumes(accepted),
        state=st.sampled_from([L.State.DONE, L.State.FAILED, L.State.CANCELLED]),
        code=st.sampled_from(list(L.Code)),
        n_done=st.integers(0, 99),
    )
    def complete(self, ticket: int, state: L.State, code: L.Code, n_done: int) -> None:
        self.sidecar.end_copy(ticket)
        self.copying.discard(ticket)
        self.sidecar.complete(ticket, state, code, n_done=n_done)
        self.model[ticket] = state
        self.answers[ticket] = (code, n_done)

    @rule(release=st.booleans())
    def free(self, *, release: bool) -> None:
        for ticket in [t for t, s in self.model.items() if s.terminal][:1]:
            reply = self.client.reply(ticket)
            assert (reply.code, reply.n_done) == self.answers[ticket]
            assert 0 < reply.t_accepted <= reply.t_done
            if release:
                try:
                    self.client.release(ticket)
                except RingFull:
                    return
                self.pushed.append((ticket, L.Verb.RELEASE))
            else:
                self.client.free(ticket)
            del self.model[ticket]
            with pytest.raises(ProtocolViolation):
                self.client.free(ticket)

    @precondition(lambda self: self.model)
    @invariant()
    def the_client_sees_the_state_of_every_ticket(self) -> None:
        for ticket, state in self.model.items():
            assert self.client.state(ticket) is state

    @invariant()
    def records_are_neither_lost_nor_made(self) -> None:
        assert self.client.free_records == RECORDS - len(self.model)


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
