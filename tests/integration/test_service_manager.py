"""The daemon under a service manager: what it says when, the watchdog, the drain, and its pool in the descriptor store.

The manager is a small one (``tests/support/service_manager.py``); the socket, the descriptors and the daemon are real.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.service_manager import FakeManager

from maru_sidecar.admin import AdminClient
from maru_sidecar.notify import CONTROL_FD, POOL_FD

POOL_BYTES = 32 << 20


class Service:
    """One daemon under one manager, with a pool and a socket of its own."""

    def __init__(self, directory: Path) -> None:
        self.manager = FakeManager(directory)
        self.socket = str(directory / "control.sock")
        self.pool = f"/dev/shm/maru-svc-{os.getpid()}-{directory.name}"

    def start(
        self, *flags: str, watchdog_s: float = 0.0, sockets: dict[str, int] | None = None, pool_bytes: int = POOL_BYTES
    ) -> subprocess.Popen[bytes]:
        argv = [
            sys.executable, "-m", "maru_sidecar", "run", "--pool-path", self.pool, "--pool-size", str(pool_bytes),
            "--socket", self.socket, *flags,
        ]  # fmt: skip
        return self.manager.start(argv, os.environ, watchdog_s=watchdog_s, sockets=sockets)

    def until_ready(self) -> None:
        """Until lookups would be answered from the pool."""
        self.manager.wait_for(lambda m: "READY" in m)
        self.manager.wait_for(lambda m: m.get("STATUS", "").startswith("ready"))

    def state(self) -> str:
        with AdminClient.connect(self.socket, 10.0) as client:
            return client.ping()

    def close(self) -> None:
        self.manager.close()
        for path in (self.pool, self.pool + ".lock", self.pool.removesuffix("-moved") + ".lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def test_ready_comes_when_the_control_socket_answers(service: Service) -> None:
    service.start()
    first = service.manager.receive(30.0)
    while "READY" not in first:  # status lines may come earlier, READY not before the socket
        first = service.manager.receive(30.0)
    assert service.state() in ("STARTING", "READY")


def test_no_ready_is_sent_by_a_daemon_that_cannot_start(service: Service) -> None:
    child = service.start("--set", "limits.max_keys=0")
    assert child.wait(30) == 2
    assert service.manager.said == []
    with pytest.raises(TimeoutError):
        service.manager.receive(0.1)


def test_a_pool_that_does_not_fit_ends_the_service_with_its_exit_code(service: Service) -> None:
    child = service.start(pool_bytes=1 << 50)
    assert child.wait(30) == 7


def test_watchdog_pings_go_on_while_the_loop_turns(service: Service) -> None:
    service.start(watchdog_s=1.0)
    for _ in range(3):
        service.manager.wait_for(lambda m: "WATCHDOG" in m)


def test_watchdog_pings_end_when_the_daemon_is_stopped_in_its_tracks(service: Service) -> None:
    child = service.start(watchdog_s=1.0)
    service.until_ready()
    service.manager.wait_for(lambda m: "WATCHDOG" in m)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    with contextlib.suppress(TimeoutError):
        while True:  # what was said before the stop
            service.manager.receive(0.05)
    with pytest.raises(TimeoutError):
        service.manager.receive(2.0)  # twice the limit: a manager would act by now
    child.send_signal(signal.SIGCONT)
    service.manager.wait_for(lambda m: "WATCHDOG" in m)


def test_without_a_watchdog_no_ping_is_sent(service: Service) -> None:
    child = service.start()
    service.until_ready()
    child.send_signal(signal.SIGTERM)
    service.manager.wait_for(lambda m: "STOPPING" in m)
    assert child.wait(30) == 0
    assert [m for m in service.manager.said if "WATCHDOG" in m] == []


def test_sigterm_says_stopping_and_ends_with_0(service: Service) -> None:
    child = service.start()
    service.until_ready()
    child.send_signal(signal.SIGTERM)
    assert service.manager.wait_for(lambda m: "STOPPING" in m)["STOPPING"] == "1"
    assert child.wait(30) == 0
    assert not os.path.exists(service.socket)


def test_a_pool_survives_sigkill_in_the_descriptor_store_even_without_its_file(service: Service) -> None:
    child = service.start()
    service.until_ready()
    assert POOL_FD in service.manager.store
    at = POOL_BYTES - 4096  # the end of the last region, which is not formatted
    os.pwrite(service.manager.store[POOL_FD], b"survivor", at)
    uuid = os.pread(service.manager.store[POOL_FD], 64, 0)[16:32]
    child.kill()
    child.wait(30)
    os.unlink(service.pool)
    service.start()
    service.until_ready()
    assert os.pread(service.manager.store[POOL_FD], 8, at) == b"survivor"
    assert os.pread(service.manager.store[POOL_FD], 64, 0)[16:32] == uuid
    assert not os.path.exists(service.pool)  # no second pool was made beside it


def test_a_restarted_daemon_stores_its_pool_no_second_time(service: Service) -> None:
    for _ in range(2):
        child = service.start()
        service.until_ready()
        child.kill()
        child.wait(30)
    assert sum(m.get("FDNAME") == POOL_FD for m in service.manager.said) == 1


def test_a_control_socket_of_the_manager_is_adopted_and_left_in_place(service: Service) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(service.socket)
        listener.listen()
        child = service.start(sockets={CONTROL_FD: listener.fileno()})
        service.until_ready()
        assert service.state() == "READY"
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        assert os.path.exists(service.socket)  # it is the manager's: clients wait there for the next daemon
        service.start(sockets={CONTROL_FD: listener.fileno()})
        assert service.state() in ("STARTING", "READY")  # asked before it was up, answered when it was


def test_a_pool_at_another_path_replaces_the_stored_one(service: Service) -> None:
    child = service.start()
    service.until_ready()
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0
    os.unlink(service.pool)
    service.pool += "-moved"
    service.start()
    service.until_ready()
    assert os.path.exists(service.pool)
    assert os.path.samestat(os.fstat(service.manager.store[POOL_FD]), os.stat(service.pool))
