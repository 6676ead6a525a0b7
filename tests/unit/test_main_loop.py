"""What must not stop the main thread: a callback that raises, a peer's descriptor, more keys than a turn has time for."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from tests.support.client import ROOT
from tests.support.waiting import until

from maru_shm import control
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as segments
from maru_shm.errors import SocketBusy
from maru_shm.records import ClientRecords, SidecarRecords
from maru_shm.ring import SubmissionConsumer, SubmissionProducer
from maru_sidecar import descriptors
from maru_sidecar.attaching import Opening
from maru_sidecar.config import Control
from maru_sidecar.connection import Connection
from maru_sidecar.control_server import ControlServer
from maru_sidecar.descriptors import close_later
from maru_sidecar.dispatch import Dispatcher
from maru_sidecar.engines import EngineRegistry
from maru_sidecar.poller import Poller
from maru_sidecar.service import ControlService
from maru_sidecar.sessions import Session, Sessions
from maru_sidecar.tickets import Counters, TicketTable


def test_a_deferred_call_that_raises_is_counted_and_the_next_one_runs() -> None:
    poller, ran = Poller(), []
    try:
        poller.call_soon(lambda: ran.append(1 // 0))
        poller.call_soon(lambda: ran.append(2))
        poller.poll(0)
    finally:
        poller.close()
    assert (ran, poller.failed) == ([2], 1)


def test_an_event_handler_that_raises_ends_its_owner_alone() -> None:
    poller, events = Poller(), []
    broken, sound = os.eventfd(1, os.EFD_NONBLOCK), os.eventfd(1, os.EFD_NONBLOCK)

    def fails(_mask: int) -> None:
        raise ZeroDivisionError("staged")

    def ended(error: Exception) -> None:
        events.append(repr(error))
        raise RuntimeError("its end fails too")

    try:
        poller.register(broken, fails, failed=ended)
        poller.register(sound, lambda _mask: events.append("sound"))
        assert poller.poll(0) == 2
        assert sorted(events) == ["ZeroDivisionError('staged')", "sound"]
        assert poller.poll(0) == 1  # not asked again
        assert poller.failed_handlers == 1
    finally:
        poller.close()
        os.close(broken)
        os.close(sound)


def test_a_connection_whose_event_raises_is_hung_up_and_the_next_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, poller = str(tmp_path / "control.sock"), Poller()
    server = ControlServer(Control(socket=path), poller, Unencodable())
    receive = control.receive
    monkeypatch.setattr(control, "receive", lambda *_: 1 // 0)
    with contextlib.closing(control.connect(path, 5.0)) as sock:
        control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "tests"))
        while poller.poll(0.2):
            pass
        with contextlib.suppress(ConnectionResetError):
            assert receive(sock, control.to_client) is None
    assert (server.connections, poller.failed_handlers) == ({}, 1)
    assert caplog.text.count("ZeroDivisionError") == 1
    monkeypatch.setattr(control, "receive", receive)
    with contextlib.closing(control.connect(path, 5.0)) as sock:
        control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "tests"))
        while poller.poll(0.2):
            pass
        assert receive(sock, control.to_client) is not None
    server.close()
    poller.close()


def test_descriptors_are_closed_though_others_hang() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    fds = []
    with listener:
        for _ in range(6):
            sender = socket.create_connection(listener.getsockname())
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(1 << 16))
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 120))
            fds.append(sender.detach())
        reading, writing = os.pipe()
        received = [*fds, writing]
        close_later(received)
        assert received == []
        os.set_blocking(reading, False)
        until(lambda: _ended(reading), "the last of them is closed")
    os.close(reading)


def _ended(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def test_while_closes_hang_no_more_descriptors_are_taken_in_and_everything_else_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, poller = str(tmp_path / "control.sock"), Poller()
    server = ControlServer(Control(socket=path), poller, Ponging())
    monkeypatch.setattr(descriptors, "CLOGGED", -1)

    def answer(sock: socket.socket) -> M.SidecarMessage | None:
        while poller.poll(0.2):
            pass
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            received = control.receive(sock, control.to_client)
            return received[0] if received is not None else None
        return None

    with contextlib.closing(control.connect(path, 5.0)) as sender, contextlib.closing(control.connect(path, 5.0)) as other:
        for sock in (sender, other):
            control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "tests"))
            assert isinstance(answer(sock), M.Welcome)
        reading, writing = os.pipe()
        control.send(sender, M.Ping(), [writing])
        os.close(writing)
        assert answer(sender) is None
        control.send(other, M.Ping())
        assert isinstance(answer(other), M.Pong)
        server.tick()
        assert answer(sender) is None
        monkeypatch.undo()
        server.tick()
        assert isinstance(answer(sender), M.Pong)
        os.set_blocking(reading, False)
        until(lambda: _ended(reading), "the descriptor was taken in and closed")
        os.close(reading)
    server.close()
    poller.close()


class Ponging:
    """A service that answers every request at once and asks for no descriptors."""

    def welcome(self) -> M.Welcome:
        return M.Welcome(M.PROTOCOL, "test", 1, 1, "0badcafe")

    def request(self, connection: Connection, message: M.ClientMessage, fds: list[int]) -> M.SidecarMessage:
        close_later(fds)
        return M.Pong("READY")

    def disconnected(self, connection: Connection) -> None: ...


class Unencodable:
    """A service whose answer has an integer of more than 64 bits."""

    def welcome(self) -> M.Welcome:
        return M.Welcome(M.PROTOCOL, "test", 1, 1, "0badcafe")

    def request(self, connection: Connection, message: M.ClientMessage, fds: list[int]) -> M.SidecarMessage:
        return M.Done(1 << 70)

    def disconnected(self, connection: Connection) -> None: ...


def test_an_answer_that_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    path, poller = str(tmp_path / "control.sock"), Poller()
    server = ControlServer(Control(socket=path), poller, Unencodable())
    with contextlib.closing(control.connect(path, 5.0)) as sock:
        control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "tests"))
        control.send(sock, M.Ping())
        while poller.poll(0.2):
            pass
        assert control.receive(sock, control.to_client) is not None
        received = control.receive(sock, control.to_client)
        assert received is not None
        assert isinstance(received[0], M.Refused)
        assert received[0].code is M.RefusalCode.FAILED
    server.close()
    poller.close()


def test_a_lock_on_a_file_that_was_replaced_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, poller, locked = str(tmp_path / "control.sock"), Poller(), []
    flock = fcntl.flock

    def replaced_meanwhile(fd: int, how: int) -> None:
        flock(fd, how)
        if not locked:
            os.unlink(path + ".lock")
        locked.append(fd)

    monkeypatch.setattr(fcntl, "flock", replaced_meanwhile)
    server = ControlServer(Control(socket=path), poller, Unencodable())
    monkeypatch.undo()
    with pytest.raises(SocketBusy):
        ControlServer(Control(socket=path), poller, Unencodable())
    server.close()
    assert not os.path.exists(path)
    poller.close()


def test_a_stopping_server_leaves_a_socket_that_is_not_its_own(tmp_path: Path) -> None:
    path, poller = str(tmp_path / "control.sock"), Poller()
    server = ControlServer(Control(socket=path), poller, Unencodable())
    os.rename(path, path + ".old")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(path)
        server.close()
        assert os.path.exists(path)
    poller.close()


def test_a_turn_ends_with_its_keys_and_the_rest_is_served_in_the_next() -> None:
    shape = L.SegmentShape.for_limits(8, 8, 0)
    info = segments.SegmentInfo(time.time_ns(), 1, shape, os.getpid(), os.getpid(), 1, 1, "0badcafe", L.Role.SCHEDULER)
    segment = segments.create(info)
    segments.unlink(info.name)
    attach = M.Attach(L.Role.SCHEDULER, "engine", 0, 1, ROOT, 64, 8, 8, 0)
    engine = EngineRegistry(1 << 20, 8).claim(attach, 1)
    table = TicketTable(SidecarRecords(segment), Counters(), lambda: None)
    session = Session(1, attach, engine, None, segment, SubmissionConsumer(segment), table, -1, -1)  # type: ignore[arg-type]
    dispatcher = Dispatcher(None, 60.0)  # type: ignore[arg-type] - no worker is there yet, so nothing is looked up
    ring = SubmissionProducer(segment)
    records = ClientRecords(segment, ring)
    tickets = [records.post(L.Op.LOOKUP, bytes(16 * 8)) for _ in range(5)]
    ring.publish()
    assert dispatcher.serve(session, n_keys=20) == 3
    assert [records.state(t).terminal for t in tickets] == [True, True, True, False, False]
    assert dispatcher.serve(session, n_keys=20) == 2
    assert all(records.state(t).terminal for t in tickets)
    segment.close()


def test_an_attach_whose_end_raises_is_hung_up_and_its_rank_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, hung_up = Sessions.__new__(Sessions), []
    sessions.registry = EngineRegistry(1 << 20, 8)
    sessions._hang_up = hung_up.append
    monkeypatch.setattr(Sessions, "_opened", lambda *_: 1 // 0)
    attach = M.Attach(L.Role.SCHEDULER, "engine", 0, 1, ROOT, 64, 8, 8, 0)
    opening = Opening(1, "its connection", attach, sessions.registry.claim(attach, 1), -1)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        sessions._try_opened(opening, Future())
    assert hung_up == ["its connection"]
    assert sessions.registry.holder(attach) is None


_HANGS_AT_THE_END = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from maru_sidecar import foreground
from maru_sidecar.config import Config, Control, PoolSpec

class Hanging(foreground.Sidecar):
    def run(self):
        ThreadPoolExecutor().submit(threading.Event().wait)
        self.settled = False

foreground.Sidecar = Hanging
sys.exit(foreground.run(Config(PoolSpec(path=sys.argv[1] + ".pool", size=16 << 20), control=Control(socket=sys.argv[1]))))
"""


def test_a_process_whose_copies_hang_ends_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HANGS_AT_THE_END, str(tmp_path / "control.sock")]
    ended = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert ended.returncode == 1, ended.stderr
    assert b"threads hang" in ended.stderr


def test_an_attach_that_came_before_the_pool_and_fails_costs_its_own_connection() -> None:
    """Descriptors may have run out meanwhile."""
    seen: list[tuple[str, object]] = []

    class Attaching:
        live: ClassVar[dict[int, Session]] = {}

        def attach(self, connection: object, message: object, fds: list[int]) -> None:
            seen.append(("attach", connection))
            if connection is first:
                raise OSError(24, "Too many open files")

    first, second = SimpleNamespace(hung_up=False), SimpleNamespace(hung_up=False)
    host = SimpleNamespace(state=L.SidecarState.STARTING, sessions=None, directory=None)
    poller = Poller()
    try:
        service = ControlService(host, poller)  # type: ignore[arg-type]
        service.server = SimpleNamespace(  # type: ignore[assignment]
            defer=lambda connection: None, close_connection=lambda connection: seen.append(("closed", connection))
        )
        message = M.Attach(L.Role.SCHEDULER, "e", 0, 1, ROOT, 64, 32, 256, 1024)
        for connection in (first, second):
            service.request(connection, message, [])  # type: ignore[arg-type]
        host.sessions = Attaching()
        service.pool_ready()
        poller.poll(0)
        assert poller.failed == 1
    finally:
        poller.close()
    assert seen == [("attach", first), ("closed", first), ("attach", second)]
