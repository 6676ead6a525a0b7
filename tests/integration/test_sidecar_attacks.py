"""Clients of the sidecar's own users that do what no engine does: their sessions end, the pool and the others stay whole."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from tests.support.client import Client, blocks_table, prompt_keys
from tests.support.sidecar_process import SidecarProcess, running_sidecar
from tests.support.waiting import until

from maru_shm import control
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import poolformat as F


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarProcess]:
    with running_sidecar() as process:
        yield process


def section(sidecar: SidecarProcess, name: str) -> object:
    status = sidecar.ask(M.GetStatus())
    assert isinstance(status, M.Status), status
    return status.sections[name]


def directory(sidecar: SidecarProcess) -> dict[str, int]:
    values = section(sidecar, "directory")
    assert isinstance(values, dict)
    return values


def no_session_is_left(sidecar: SidecarProcess) -> None:
    until(lambda: section(sidecar, "sessions") == [], "every session has ended")


# --- tickets ------------------------------------------------------------------------------------------------------------------
def test_a_worker_that_locates_is_answered_and_its_session_can_end(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, engine_id="locating") as worker:
        held = prompt_keys("locating", 1)
        worker.store(held, blocks_table(0, 1))
        reply = worker.finish(worker.post(L.Op.LOCATE, held))
        assert (reply.state, reply.code) == (L.State.FAILED, L.Code.BAD_REQUEST)
        assert worker.hits(held) == 1
    no_session_is_left(sidecar)
    assert directory(sidecar)["leases"] == 0


@pytest.mark.parametrize("op", [L.Op.LOCATE, L.Op.LOOKUP])
def test_a_request_of_more_keys_than_agreed_ends_its_session(sidecar: SidecarProcess, op: L.Op) -> None:
    with Client(sidecar.socket, engine_id="many keys") as worker:
        held = prompt_keys("many keys", 8)
        worker.store(held, blocks_table(0, 8))
        with Client(sidecar.socket, L.Role.SCHEDULER, engine_id="many keys", max_keys=4, max_blocks=64) as scheduler:
            scheduler.post(op, held)
            until(scheduler.hung_up, "the scheduler is hung up on")
    no_session_is_left(sidecar)
    assert directory(sidecar)["leases"] == 0


def test_a_chunk_deeper_than_a_header_can_say_is_refused_and_takes_no_slab(sidecar: SidecarProcess) -> None:
    deep = prompt_keys("deep", 2)
    with Client(sidecar.socket, engine_id="deep") as worker:
        ticket = worker.post_store(deep, blocks_table(0, 2), depth=(1 << 32) - 1)
        until(lambda: worker.records.state(ticket).terminal, "the store is answered")
        assert worker.records.reply(ticket).code is L.Code.BAD_REQUEST
        until(worker.hung_up, "the worker is hung up on")
    no_session_is_left(sidecar)
    assert directory(sidecar)["slabs_writing"] == 0
    with Client(sidecar.socket, engine_id="after deep") as worker:
        assert worker.store(deep, blocks_table(0, 2)).n_done == 2


# --- descriptors and processes ------------------------------------------------------------------------------------------------
def test_the_sidecar_never_reads_a_doorbell_so_that_no_client_can_make_it_block(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, engine_id="bell") as worker:
        armed = worker.segment.words[L.WORD_ARMED : L.WORD_ARMED + 1]
        until(lambda: armed[0] == 1, "the sidecar sleeps")
        worker.lookup(prompt_keys("bell", 1))  # its answer comes after the wake-up
        assert os.eventfd_read(worker.doorbell) >= 1
        fcntl.fcntl(worker.doorbell, fcntl.F_SETFL, fcntl.fcntl(worker.doorbell, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        assert worker.store(prompt_keys("bell", 1), blocks_table(0, 1)).n_done == 1
        assert sidecar.state() == "READY"
        armed.release()


def test_every_ring_of_a_doorbell_nobody_reads_wakes_the_sidecar(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, engine_id="ringing") as worker:
        for i in range(50):
            until(lambda: worker.segment.words[L.WORD_ARMED] == 1, "the sidecar sleeps")
            assert worker.hits(prompt_keys(f"ringing {i}", 1)) == 0


def _engine_with_a_child(path: str, ready: Connection) -> None:
    client = Client(path, engine_id="parent")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    ready.send((child, client.attached.session))
    time.sleep(60)


def test_an_engine_whose_child_keeps_its_socket_open_is_known_to_be_dead(sidecar: SidecarProcess) -> None:
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.get_context("fork").Process(target=_engine_with_a_child, args=(sidecar.socket, theirs))
    engine.start()
    assert ours.poll(20)
    child, _ = ours.recv()
    try:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        engine.join()
        no_session_is_left(sidecar)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.fixture
def lingering() -> Iterator[socket.socket]:
    """A TCP socket whose last close waits two minutes: its peer reads nothing. Closed already when the test has sent it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    with listener, receiver:
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 120))
        yield sender


def test_a_lingering_socket_sent_along_does_not_hold_the_sidecar_up(sidecar: SidecarProcess, lingering: socket.socket) -> None:
    with contextlib.closing(control.connect(sidecar.socket, 10.0)) as sock:
        control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "lingering"), [lingering.fileno()])
        lingering.close()
        assert control.receive(sock, control.to_client) is not None
        assert sidecar.state() == "READY"


def test_a_lingering_socket_in_a_message_never_read_does_not_hold_the_sidecar_up(
    sidecar: SidecarProcess, lingering: socket.socket
) -> None:
    with contextlib.closing(control.connect(sidecar.socket, 10.0)) as sock:
        sidecar.pause()
        try:
            control.send(sock, M.Ping())  # without a Hello: the connection is closed with the next message unread
            control.send(sock, M.Ping(), [lingering.fileno()])
            lingering.close()
        finally:
            sidecar.resume()
        assert sidecar.state() == "READY"


@pytest.mark.parametrize("copies", [1, 253])
def test_a_lingering_socket_in_garbage_does_not_hold_the_sidecar_up(
    sidecar: SidecarProcess, lingering: socket.socket, copies: int
) -> None:
    """253 are more than a message may have, and what the kernel lets through."""
    with contextlib.closing(control.connect(sidecar.socket, 10.0)) as sock, open(os.devnull) as other:
        descriptors = [other.fileno()] * (copies - 1) + [lingering.fileno()]
        socket.send_fds(sock, [b"\xc1 no message"], descriptors)
        lingering.close()
        assert sidecar.state() == "READY"
        received = control.receive(sock, control.to_client)
        assert received is not None
        assert isinstance(received[0], M.Refused)


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_client_that_locks_the_pool_when_its_sidecar_dies_keeps_no_successor_out(kind: int) -> None:
    with running_sidecar() as sidecar, Client(sidecar.socket) as client:
        client.store(prompt_keys("kept", 1), blocks_table(0, 1))
        sidecar.kill()
        fcntl.flock(client.pool_fd, kind)
        sidecar.start()
        assert len(sidecar.chunks()) == 1


# --- what an operator sees ----------------------------------------------------------------------------------------------------
def test_scribbled_slab_headers_are_listed_with_their_true_sizes() -> None:
    with running_sidecar() as sidecar, contextlib.ExitStack() as clients:
        chunks = prompt_keys("scribbled", 2)
        for rank in (0, 1):
            worker = clients.enter_context(Client(sidecar.socket, rank=rank, world=2))
            assert worker.store(chunks, blocks_table(0, 2)).n_done == 2
        sizes = [chunk.bytes for chunk in sidecar.chunks()]
        with open(sidecar.pool, "r+b") as pool:
            raw, at, magic = pool.read(), -1, F.SLAB_MAGIC.to_bytes(8, "little")
            while (at := raw.find(magic, at + 1)) >= 0:
                pool.seek(at + 16)
                pool.write(b"\xff" * 104)
        assert [chunk.bytes for chunk in sidecar.chunks()] == sizes
        assert sidecar.state() == "READY"


def test_a_client_cannot_write_lines_of_its_own_into_the_log(sidecar: SidecarProcess) -> None:
    with contextlib.closing(control.connect(sidecar.socket, 10.0)) as sock:
        control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "x\nforged line\x1b[2J"))
        control.receive(sock, control.to_client)
        control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "x"))
        control.receive(sock, control.to_client)
        until(lambda: "forged line" in sidecar.log.read_text(), "the refusal is logged")
    assert not any(line.startswith("forged line") for line in sidecar.log.read_text().splitlines())
    assert "\x1b" not in sidecar.log.read_text()


def test_a_second_sidecar_leaves_a_live_socket_alone_though_its_lock_file_is_gone() -> None:
    with running_sidecar() as sidecar:
        os.unlink(sidecar.socket + ".lock")
        second = subprocess.run(
            [sys.executable, "-m", "maru_sidecar", "run", *sidecar._flags], capture_output=True, timeout=30, check=False
        )
        assert second.returncode != 0
        assert b"another sidecar serves" in second.stderr
        assert sidecar.state() == "READY"
