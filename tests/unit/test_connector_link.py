"""The link and its sessions against a peer with real sockets and real shared memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.connector_peer import INSTANCE, Peer, PeerSession

from maru_connector.link import LinkState, SidecarLink
from maru_connector.session import Ending, Session, SidecarProcess
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as segments
from maru_shm.errors import RingFull
from maru_shm.records import Request

KEYS = b"k" * 32


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.0005)


def done(session: PeerSession, request: Request) -> None:
    deadline = time.monotonic_ns() + 60 * 10**9 if request.op is L.Op.LOOKUP else 0
    session.records.complete(request.ticket, L.State.DONE, n_done=request.n_keys, deadline=deadline)


def nothing(session: PeerSession, request: Request) -> None:
    """Leave it in flight."""


def attach() -> tuple[M.Attach, list[int]]:
    return M.Attach(L.Role.WORKER, "engine", 0, 1, b"r" * 16, 256, 8, 64, 1024), []


class World:
    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "control.sock")
        self.attached: list[Session] = []
        self.lost: list[Session] = []
        self.link = SidecarLink(self.path, attach, on_attached=self.attached.append, on_lost=self.lost.append)
        self.peers: list[Peer] = []

    def peer(self, answer: Callable[[PeerSession, Request], None] = done, generation: int = 1) -> Peer:
        self.peers.append(Peer(self.path, answer, generation=generation))
        return self.peers[-1]

    def session(self) -> Session:
        assert self.link.wait_attached(10)
        assert self.link.session is not None
        return self.link.session


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.link.close()
    for peer in world.peers:
        peer.close()
    assert not list(segments.list_names(INSTANCE))


def test_without_a_sidecar_polling_returns_nothing_and_the_wait_is_bounded(world: World) -> None:
    assert world.link.poll() is None
    assert not world.link.wait_attached(0.05)
    assert world.link.state is LinkState.DISCONNECTED


def test_a_sidecar_that_appears_later_is_found(world: World) -> None:
    assert world.link.poll() is None
    world.peer()
    session = world.session()
    assert world.attached == [session]
    assert session.sidecar_state() is L.SidecarState.READY


def test_a_request_is_answered_through_shared_memory(world: World) -> None:
    world.peer()
    session = world.session()
    ticket = session.post(L.Op.LOAD, KEYS, b"\0" * 8)
    session.flush()
    until(lambda: session.peek(ticket) is not None)
    ended = session.ended(ticket)
    assert ended is not None
    assert ended.ending is Ending.DONE
    assert ended.reply is not None
    assert ended.reply.n_done == 2
    assert session.idle


def test_a_lease_is_held_by_its_record_until_it_is_released(world: World) -> None:
    peer = world.peer()
    session = world.session()
    ticket = session.post(L.Op.LOOKUP, KEYS)
    session.flush()
    until(lambda: session.peek(ticket) is not None)
    assert not peer.released
    session.release(ticket)
    session.flush()
    until(lambda: peer.released == [ticket])
    assert session.idle


def test_an_abandoned_lookup_gives_its_lease_back_when_the_answer_comes(world: World) -> None:
    held: list[tuple[PeerSession, Request]] = []
    peer = world.peer(lambda s, r: held.append((s, r)))
    session = world.session()
    ticket = session.post(L.Op.LOOKUP, KEYS)
    session.flush()
    session.abandon(ticket)
    session.sweep()
    assert session.abandoned == 1
    until(lambda: bool(held))
    done(*held[0])
    session.sweep()
    session.flush()
    until(lambda: peer.released == [ticket])
    assert session.idle


def test_a_refusal_is_taken_and_tried_again_later(world: World) -> None:
    peer = world.peer()
    peer.refuse = M.Refused(M.RefusalCode.BAD_GEOMETRY, "the layout is odd", "use another")
    assert not world.link.wait_attached(0.3)
    assert world.link.state is LinkState.DISCONNECTED


def test_full_records_are_refused_at_once(world: World) -> None:
    world.peer(nothing)
    session = world.session()
    for _ in range(8):
        session.post(L.Op.STORE, KEYS, b"\0" * 8)
    with pytest.raises(RingFull):
        session.post(L.Op.STORE, KEYS, b"\0" * 8)


def test_each_ticket_in_flight_is_reported_lost_exactly_once_when_the_sidecar_goes(world: World) -> None:
    peer = world.peer(nothing)
    session = world.session()
    tickets = [session.post(L.Op.LOAD, KEYS, b"\0" * 8) for _ in range(3)]
    session.flush()
    until(lambda: len(peer.requests) == 3)
    peer.close()
    until(lambda: world.link.poll() is None)
    assert world.lost == [session]
    endings = []
    for ticket in tickets:
        ended = session.ended(ticket)
        assert ended is not None
        endings.append(ended.ending)
    assert endings == [Ending.LOST] * 3
    assert session.idle
    with pytest.raises(RingFull):
        session.post(L.Op.LOAD, KEYS)


def test_what_the_sidecar_had_finished_before_it_went_counts_as_finished(world: World) -> None:
    peer = world.peer(done)
    session = world.session()
    ticket = session.post(L.Op.LOAD, KEYS, b"\0" * 8)
    session.flush()
    until(lambda: session.peek(ticket) is not None)
    peer.close()
    until(lambda: world.link.poll() is None)
    ended = session.ended(ticket)
    assert ended is not None
    assert ended.ending is Ending.DONE


def test_blocks_under_a_running_copy_are_not_given_back_before_it_ends(world: World) -> None:
    copying: list[PeerSession] = []

    def begin(session: PeerSession, request: Request) -> None:
        assert session.records.begin_copy(request.ticket)
        copying.append(session)

    peer = world.peer(begin)
    peer.lingers = True
    session = world.session()
    ticket = session.post(L.Op.LOAD, KEYS, b"\0" * 8)
    session.flush()
    until(lambda: bool(copying))
    assert not session.cancel(ticket)  # the sidecar is alive and copies
    records = copying[0].records
    copying[0].sock.shutdown(2)  # it drops the session, but this process, the "sidecar", lives on
    until(lambda: world.link.poll() is None)
    assert session.ended(ticket) is None
    records.end_copy(ticket)
    ended = session.ended(ticket)
    assert ended is not None
    assert ended.ending is Ending.LOST


def test_a_cancelled_load_is_over_at_once_where_no_copy_runs(world: World) -> None:
    held: list[tuple[PeerSession, Request]] = []
    world.peer(lambda s, r: held.append((s, r)))
    session = world.session()
    ticket = session.post(L.Op.LOAD, KEYS, b"\0" * 8)
    session.flush()
    until(lambda: bool(held))
    assert session.cancel(ticket)
    assert not held[0][0].records.begin_copy(ticket)
    held[0][0].records.complete(ticket, L.State.CANCELLED)
    session.sweep()
    assert session.idle


def test_a_new_generation_is_a_new_session_and_the_old_one_is_settled_apart(world: World) -> None:
    first_peer = world.peer(nothing)
    first = world.session()
    ticket = first.post(L.Op.LOAD, KEYS, b"\0" * 8)
    first.flush()
    first_peer.close(unlink=False)
    world.peer(done, generation=2)
    until(lambda: world.link.poll() is not None)
    second = world.link.session
    assert second is not None
    assert second is not first
    assert second.generation == 2
    assert world.link.has_lost_sessions  # its ticket is not settled yet
    ended = first.ended(ticket)
    assert ended is not None
    assert ended.ending is Ending.LOST
    world.link.poll()
    assert not world.link.has_lost_sessions


def test_an_engine_that_idled_through_a_restart_begins_to_attach_with_its_first_look(world: World) -> None:
    first_peer = world.peer()
    world.session()
    first_peer.close(unlink=False)
    world.peer(done, generation=2)
    assert world.link.poll() is None  # it is found to be gone only now
    world.link.poll()
    assert world.link.attaching_for() < 60  # so that a scheduler waits a moment rather than miss
    assert world.session().generation == 2


def test_a_process_is_gone_when_its_pidfd_says_so() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = SidecarProcess(child.pid)
    process.verify(segments.process_start_time(child.pid))
    assert not process.gone()
    child.send_signal(signal.SIGKILL)
    child.wait()
    until(process.gone)
    process.close()


def test_a_pid_of_another_time_is_not_believed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = SidecarProcess(child.pid)
    process.verify(1)
    child.kill()
    child.wait()
    assert not process.gone()  # it named somebody else: only another generation tells
    process.presume_gone()
    assert process.gone()
