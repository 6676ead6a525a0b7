"""The ring and the record table, both ends in one process on real shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_shm import layout as L
from maru_shm import segment as S
from maru_shm.errors import ProtocolViolation, RingFull
from maru_shm.records import ClientRecords, SidecarRecords
from maru_shm.ring import SubmissionConsumer, SubmissionProducer

SHAPE = L.SegmentShape.for_limits(4, max_keys=8, max_blocks=32, refs_per_key=2)


def make_info(shape: L.SegmentShape = SHAPE, session: int = 1, role: L.Role = L.Role.WORKER) -> S.SegmentInfo:
    pid = os.getpid()
    generation = time.time_ns()
    return S.SegmentInfo(generation, session, shape, pid, pid, S.process_start_time(pid), time.time_ns(), "0123abcd", role)


class Ends:
    """A segment with its client end (mapped a second time, as a client would) and its sidecar end."""

    def __init__(self, shape: L.SegmentShape = SHAPE) -> None:
        self.segment = S.create(make_info(shape))
        self.client_segment = S.map_fd(self.segment.fd, writable=True)
        S.unlink(self.segment.info.name)
        self.producer = SubmissionProducer(self.client_segment)
        self.client = ClientRecords(self.client_segment, self.producer)
        self.consumer = SubmissionConsumer(self.segment)
        self.sidecar = SidecarRecords(self.segment)

    def close(self) -> None:
        self.client_segment.close()
        self.segment.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    e = Ends()
    yield e
    e.close()


KEYS = bytes(range(32))  # two keys
BLOCKS = np.array([[5, 6], [7, L.SKIP_BLOCK]], dtype="<i4")


def test_a_posted_request_arrives_with_everything_it_said(ends: Ends) -> None:
    ticket = ends.client.post(L.Op.LOAD, KEYS, BLOCKS.tobytes(), fence=9, lease=77, lease_session=3, depth=4, label="req-ä")
    assert ends.consumer.ready() == 0, "nothing is visible before publish"
    ends.producer.publish()
    assert ends.consumer.ready() == 1
    assert ends.consumer.pop() == (ticket, L.Verb.SUBMIT)
    request = ends.sidecar.accept(ticket)
    assert (request.op, request.keys, request.fence, request.lease) == (L.Op.LOAD, KEYS, 9, 77)
    assert (request.lease_session, request.depth, request.label) == (3, 4, "req-ä")
    assert np.array_equal(request.blocks, BLOCKS)
    assert ends.client.state(ticket) is L.State.ACCEPTED


def test_a_completed_ticket_carries_its_answer_and_its_times(ends: Ends) -> None:
    ticket = ends.client.post(L.Op.LOOKUP, KEYS)
    ends.producer.publish()
    ends.sidecar.accept(ends.consumer.pop()[0])
    ends.sidecar.complete(ticket, L.State.DONE, n_done=2, n_bytes=99, deadline=123)
    reply = ends.client.reply(ticket)
    assert (reply.state, reply.code, reply.n_done, reply.bytes, reply.deadline) == (L.State.DONE, L.Code.OK, 2, 99, 123)
    assert 0 < reply.t_accepted <= reply.t_done


def test_located_slabs_come_back_as_they_were_written(ends: Ends) -> None:
    ticket = ends.client.post(L.Op.LOCATE, KEYS)
    ends.producer.publish()
    ends.sidecar.accept(ends.consumer.pop()[0])
    refs = np.array([(1 << 40, 0x1202), (4096, 0x302)], np.uint64)
    ends.sidecar.set_slab_refs(ticket, refs)
    ends.sidecar.complete(ticket, L.State.DONE, n_done=2)
    assert np.array_equal(ends.client.slab_refs(ticket, 2), refs)
    with pytest.raises(ProtocolViolation, match="exceed a reply"):
        ends.sidecar.set_slab_refs(ticket, np.zeros((100, 2), np.uint64))


def test_a_full_record_table_is_reported_at_once_and_nothing_is_lost(ends: Ends) -> None:
    tickets = [ends.client.post(L.Op.LOOKUP, KEYS) for _ in range(4)]
    with pytest.raises(RingFull, match="all 4 records"):
        ends.client.post(L.Op.LOOKUP, KEYS)
    ends.producer.publish()
    for ticket in tickets:
        ends.sidecar.accept(ends.consumer.pop()[0])
        ends.sidecar.complete(ticket, L.State.DONE)
    ends.consumer.release()
    for ticket in tickets:
        ends.client.free(ticket)
    assert ends.client.free_records == 4


def test_a_full_ring_is_reported_at_once_and_the_record_stays_free(ends: Ends) -> None:
    slots = ends.segment.shape.n_slots
    for _ in range(slots):
        ends.producer.push(0, L.Verb.CANCEL)
    with pytest.raises(RingFull, match="submission slots"):
        ends.client.post(L.Op.LOOKUP, KEYS)
    assert ends.client.free_records == 4
    ends.producer.publish()
    for _ in range(ends.consumer.ready()):
        ends.consumer.pop()
    ends.consumer.release()
    ends.client.post(L.Op.LOOKUP, KEYS)
    ends.producer.publish()
    assert ends.consumer.ready() == 1


def test_a_request_larger_than_a_cell_is_refused_before_anything_is_written(ends: Ends) -> None:
    with pytest.raises(RingFull, match="exceed a cell"):
        ends.client.post(L.Op.LOAD, bytes(16 * 9), np.zeros(33, "<i4").tobytes())
    assert ends.client.free_records == 4


def test_a_ticket_is_never_taken_for_an_older_one_of_the_same_record(ends: Ends) -> None:
    first = ends.client.post(L.Op.LOOKUP, KEYS)
    ends.producer.publish()
    ends.sidecar.accept(ends.consumer.pop()[0])
    ends.sidecar.complete(first, L.State.DONE)
    ends.client.free(first)
    second = ends.client.post(L.Op.LOOKUP, KEYS)
    assert first & L.TICKET_INDEX_MASK == second & L.TICKET_INDEX_MASK
    with pytest.raises(ProtocolViolation):
        ends.client.state(first)
    with pytest.raises(ProtocolViolation):
        ends.client.free(first)
    with pytest.raises(ProtocolViolation, match="not terminal"):
        ends.client.free(second)


def test_release_overtakes_no_later_use_of_its_record(ends: Ends) -> None:
    lookup = ends.client.post(L.Op.LOOKUP, KEYS)
    ends.producer.publish()
    ends.sidecar.accept(ends.consumer.pop()[0])
    ends.sidecar.complete(lookup, L.State.DONE, n_done=1)
    ends.client.release(lookup)
    again = ends.client.post(L.Op.LOOKUP, KEYS)
    ends.producer.publish()
    assert [ends.consumer.pop() for _ in range(ends.consumer.ready())] == [
        (lookup, L.Verb.RELEASE),
        (again, L.Verb.SUBMIT),
    ]


def test_cancel_before_a_copy_forbids_it(ends: Ends) -> None:
    ticket = ends.client.post(L.Op.LOAD, KEYS, BLOCKS.tobytes())
    ends.producer.publish()
    ends.sidecar.accept(ends.consumer.pop()[0])
    assert ends.client.set_cancel(ticket) is True
    assert ends.sidecar.begin_copy(ticket) is False
    assert ends.sidecar.cancelled(ticket)


def test_cancel_during_a_copy_waits_for_its_end(ends: Ends) -> None:
    ticket = ends.client.post(L.Op.LOAD, KEYS, BLOCKS.tobytes())
    ends.producer.publish()
    ends.sidecar.accept(ends.consumer.pop()[0])
    assert ends.sidecar.begin_copy(ticket) is True
    assert ends.client.set_cancel(ticket) is False
    ends.sidecar.end_copy(ticket)
    assert ends.client.set_cancel(ticket) is True


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [
        (L.WORD_SQ_TAIL, 1 << 40, "submission tail"),
        (L.WORD_SQ_TAIL, 0, "submission tail"),
    ],
)
def test_an_impossible_tail_is_a_violation(ends: Ends, word: int, value: int, why: str) -> None:
    ends.client.post(L.Op.LOOKUP, KEYS)
    ends.producer.publish()
    ends.consumer.pop()
    ends.client_segment.words[word] = value
    with pytest.raises(ProtocolViolation, match=why):
        ends.consumer.ready()


def test_a_slot_with_a_foreign_stamp_or_verb_is_a_violation(ends: Ends) -> None:
    at = L.RING_OFFSET // 8
    ends.producer.push(1, L.Verb.SUBMIT)
    ends.producer.publish()
    ends.client_segment.words[at + L.SLOT_SEQ] = 7
    with pytest.raises(ProtocolViolation, match="stamped 7"):
        ends.consumer.pop()
    ends.client_segment.words[at + L.SLOT_SEQ] = 1
    ends.client_segment.words[at + L.SLOT_VERB] = 99
    with pytest.raises(ProtocolViolation, match="verb 99"):
        ends.consumer.pop()


def test_tickets_and_lengths_that_lie_are_violations(ends: Ends) -> None:
    ticket = ends.client.post(L.Op.LOOKUP, KEYS)
    with pytest.raises(ProtocolViolation, match="names record"):
        ends.sidecar.accept(99)
    with pytest.raises(ProtocolViolation, match="expected ticket"):
        ends.sidecar.accept(ticket + (1 << 20))
    base = ends.segment.shape.records_offset + (ticket & L.TICKET_INDEX_MASK) * L.RECORD_BYTES
    good = bytes(ends.client_segment.bytes[base : base + L.REQUEST.size])
    fields = list(L.REQUEST.unpack(good))
    for change, why in (({7: 1 << 30}, "claims"), ({8: 1 << 30}, "claims"), ({8: 3}, "for 2 keys"), ({1: 42}, "operation 42")):
        lie = list(fields)
        for i, value in change.items():
            lie[i] = value
        L.REQUEST.pack_into(ends.client_segment.bytes, base, *lie)
        with pytest.raises(ProtocolViolation, match=why):
            ends.sidecar.accept(ticket)
    ends.client_segment.bytes[base : base + L.REQUEST.size] = good
    assert ends.sidecar.accept(ticket).keys == KEYS


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["post", "publish", "serve", "reap"]), max_size=120), st.randoms(use_true_random=False))
def test_every_ticket_gets_exactly_one_answer_in_any_order_of_steps(steps: list[str], rnd) -> None:  # type: ignore[no-untyped-def]
    ends = Ends()
    try:
        open_tickets: dict[int, bytes] = {}
        answered: list[int] = []
        served = 0
        for step in [*steps, "publish", "serve", "reap"]:
            if step == "post":
                keys = rnd.randbytes(16 * rnd.randint(1, 8))
                try:
                    open_tickets[ends.client.post(L.Op.LOOKUP, keys)] = keys
                except RingFull:
                    assert ends.client.free_records == 0
            elif step == "publish":
                ends.producer.publish()
            elif step == "serve":
                for _ in range(ends.consumer.ready()):
                    ticket, verb = ends.consumer.pop()
                    assert verb is L.Verb.SUBMIT
                    request = ends.sidecar.accept(ticket)
                    assert request.keys == open_tickets[ticket]
                    ends.sidecar.complete(ticket, L.State.DONE, n_done=request.n_keys)
                    served += 1
                ends.consumer.release()
            else:
                for ticket, keys in list(open_tickets.items()):
                    if ends.client.state(ticket).terminal:
                        assert ends.client.reply(ticket).n_done == len(keys) // L.KEY_BYTES
                        ends.client.free(ticket)
                        answered.append(ticket)
                        del open_tickets[ticket]
        assert not open_tickets
        assert len(answered) == len(set(answered)) == served
    finally:
        ends.close()


@pytest.mark.parametrize(("n_keys", "n_blocks"), [(3, 0), (2, 6)])
def test_a_request_beyond_what_the_attach_agreed_on_is_refused_though_it_fits_its_cell(
    ends: Ends, n_keys: int, n_blocks: int
) -> None:
    sidecar = SidecarRecords(ends.segment, max_keys=2, max_blocks=4)
    fits = ends.client.post(L.Op.LOAD, KEYS, BLOCKS.tobytes())
    assert sidecar.accept(fits).n_keys == 2
    ticket = ends.client.post(L.Op.LOAD, bytes(16 * n_keys), bytes(4 * n_blocks))
    with pytest.raises(ProtocolViolation, match="claims"):
        sidecar.accept(ticket)
