"""Every ticket gets one terminal answer, whoever gives it and however many try."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator

import pytest

from maru_shm import layout as L
from maru_shm import segment as segments
from maru_shm.errors import ProtocolViolation
from maru_shm.records import ClientRecords, SidecarRecords
from maru_shm.ring import SubmissionConsumer, SubmissionProducer
from maru_sidecar.tickets import Counters, Ticket, TicketTable


class Pair:
    """Both ends of one segment."""

    def __init__(self) -> None:
        shape = L.SegmentShape.for_limits(8, 4, 16)
        info = segments.SegmentInfo(time.time_ns(), 1, shape, os.getpid(), os.getpid(), 1, 1, "0badcafe", L.Role.WORKER)
        self.segment = segments.create(info)
        segments.unlink(info.name)
        self.ring = SubmissionProducer(self.segment)
        self.client = ClientRecords(self.segment, self.ring)
        self.consumer = SubmissionConsumer(self.segment)
        self.emptied = 0
        self.counters = Counters()
        self.table = TicketTable(SidecarRecords(self.segment), self.counters, self._count)

    def _count(self) -> None:
        self.emptied += 1

    def open(self, op: L.Op = L.Op.LOAD) -> Ticket:
        number = self.client.post(op, b"k" * 16, b"\0" * 4)
        self.ring.publish()
        assert self.consumer.ready() == 1
        assert self.consumer.pop() == (number, L.Verb.SUBMIT)
        self.consumer.release()
        return self.table.open(self.table.records.accept(number))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.segment.close()


def test_only_the_first_of_many_answers_counts(pair: Pair) -> None:
    for _ in range(200):
        ticket = pair.open()
        barrier = threading.Barrier(4)
        wins: list[L.State] = []

        def answer(
            state: L.State, ticket: Ticket = ticket, barrier: threading.Barrier = barrier, wins: list[L.State] = wins
        ) -> None:
            barrier.wait()
            if ticket.finish(state):
                wins.append(state)

        threads = [
            threading.Thread(target=answer, args=(s,))
            for s in (L.State.DONE, L.State.FAILED, L.State.CANCELLED, L.State.FAILED)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert wins == [pair.client.state(ticket.request.ticket)]
        pair.client.free(ticket.request.ticket)
    assert pair.counters.ops[L.Op.LOAD].tickets == 200
    assert not pair.table.outstanding


def test_a_ticket_in_use_cannot_be_submitted_again(pair: Pair) -> None:
    ticket = pair.open()
    with pytest.raises(ProtocolViolation, match="twice"):
        pair.table.open(ticket.request)
    assert ticket.finish(L.State.DONE)


def test_a_drain_ends_with_the_last_ticket_before_it_and_not_with_later_ones(pair: Pair) -> None:
    first, second = pair.open(), pair.open()
    drain = pair.open(L.Op.DRAIN)
    pair.table.drain(drain)
    later = pair.open()
    first.finish(L.State.DONE)
    assert not drain.answered
    later.finish(L.State.DONE)
    assert not drain.answered
    second.finish(L.State.FAILED, L.Code.COPY_FAILED)
    assert drain.answered
    nothing_before = pair.open(L.Op.DRAIN)
    pair.table.drain(nothing_before)
    assert nothing_before.answered


def test_drains_end_in_order_whatever_the_order_of_answers(pair: Pair) -> None:
    first = pair.open()
    drains = []
    for _ in range(2):
        drain = pair.open(L.Op.DRAIN)
        pair.table.drain(drain)
        drains.append(drain)
    second = pair.open()
    last = pair.open(L.Op.DRAIN)
    pair.table.drain(last)
    second.finish(L.State.DONE)
    assert not any(drain.answered for drain in (*drains, last))
    first.finish(L.State.DONE)
    assert all(drain.answered for drain in (*drains, last))


def test_a_record_without_an_answer_cannot_carry_another_ticket(pair: Pair) -> None:
    """Else one record would do for any number of open tickets, each with its keys in the daemon's memory."""
    ticket = pair.open()
    again = dataclasses.replace(ticket.request, ticket=ticket.request.ticket + (1 << L.TICKET_INDEX_BITS))
    with pytest.raises(ProtocolViolation, match="without an answer"):
        pair.table.open(again)
    ticket.finish(L.State.DONE)
    assert pair.table.open(again).finish(L.State.DONE)


def test_a_closing_table_lets_no_copy_begin_and_tells_when_it_is_empty(pair: Pair) -> None:
    ticket, drain = pair.open(), pair.open(L.Op.DRAIN)
    pair.table.drain(drain)
    assert ticket.begin_copy()
    ticket.end_copy()
    assert pair.table.close() == [ticket]
    assert drain.answered
    assert not ticket.begin_copy()
    assert ticket.withdrawn
    assert pair.emptied == 0
    assert ticket.withdraw()
    assert pair.client.reply(ticket.request.ticket).code is L.Code.ENGINE_GONE
    assert pair.emptied == 1


def test_a_ticket_is_given_up_unless_a_copy_for_it_runs(pair: Pair) -> None:
    copying, waiting = pair.open(), pair.open()
    assert copying.begin_copy()
    pair.table.close()
    assert not copying.give_up()
    assert waiting.give_up()
    assert pair.client.reply(waiting.request.ticket).code is L.Code.ENGINE_GONE
    assert not waiting.begin_copy()
    assert pair.client.state(copying.request.ticket) is L.State.ACCEPTED
    copying.end_copy()
    assert copying.withdraw()
    assert pair.emptied == 1


def test_a_cancelled_ticket_is_answered_cancelled_and_copies_nothing_more(pair: Pair) -> None:
    ticket = pair.open()
    assert ticket.begin_copy()
    assert not pair.client.set_cancel(ticket.request.ticket)  # a copy runs: the client waits
    ticket.end_copy()
    assert pair.client.set_cancel(ticket.request.ticket)
    assert not ticket.begin_copy()
    assert ticket.withdraw(1)
    assert pair.client.state(ticket.request.ticket) is L.State.CANCELLED
    assert pair.client.reply(ticket.request.ticket).n_done == 1
