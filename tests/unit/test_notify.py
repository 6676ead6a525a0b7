"""What a service manager reads on its socket, and what the daemon reads from its environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.service_manager import FakeManager

from maru_shm.errors import ConfigError
from maru_sidecar.notify import POOL_FD, ServiceManager, listen_fds, stored_pool
from maru_sidecar.pool_spec import PoolSpec


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    fake = FakeManager(tmp_path)
    yield fake
    fake.close()


def service(fake: FakeManager, **variables: str) -> ServiceManager:
    return ServiceManager.from_environment({"NOTIFY_SOCKET": fake.path, **variables})


def test_each_call_is_one_message_of_the_protocol(manager: FakeManager) -> None:
    me = service(manager)
    assert me.active
    assert me.ready("serving")
    assert me.status("3 engines")
    assert me.watchdog()
    assert me.stopping("draining")
    assert [manager.receive() for _ in range(4)] == [
        {"READY": "1", "STATUS": "serving"},
        {"STATUS": "3 engines"},
        {"WATCHDOG": "1"},
        {"STOPPING": "1", "STATUS": "draining"},
    ]


def test_a_line_break_in_a_status_cannot_start_another_assignment(manager: FakeManager) -> None:
    service(manager).status("loading\nSTOPPING=1")
    assert manager.receive() == {"STATUS": "loading STOPPING=1"}


def test_an_abstract_socket_is_reached_by_its_at_sign() -> None:
    name = f"maru-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        assert ServiceManager("@" + name).ready()
        assert sock.recv(100) == b"READY=1"


def test_outside_a_manager_everything_is_a_no_op() -> None:
    me = ServiceManager.from_environment({})
    assert not me.active
    assert me.watchdog_interval_s is None
    assert me.fd_names == ()
    assert not any((me.ready("x"), me.status("x"), me.watchdog(), me.stopping(), me.store_fd("pool-0", 0)))
    assert me.failures == 0


def test_a_manager_that_went_away_is_counted_not_raised(tmp_path: Path) -> None:
    me = ServiceManager(str(tmp_path / "gone.sock"))
    assert not me.ready()
    assert not me.watchdog()
    assert me.failures == 2


def test_a_watchdog_ping_never_blocks_on_a_manager_that_does_not_read(manager: FakeManager) -> None:
    me = service(manager)
    sent = 0
    while sent < 100_000 and me.watchdog():
        sent += 1
    assert 0 < sent < 100_000  # the queue filled up and the call came back
    assert me.failures == 1


@pytest.mark.parametrize("path", ["relative/notify.sock", "vsock:2:1234"])
def test_a_notify_socket_that_cannot_be_one_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match="NOTIFY_SOCKET"):
        ServiceManager(path)


def test_the_watchdog_interval_is_half_the_limit_and_meant_for_this_process_only(manager: FakeManager) -> None:
    own, other = str(os.getpid()), str(os.getpid() + 1)
    assert service(manager, WATCHDOG_USEC="3000000").watchdog_interval_s == 1.5
    assert service(manager, WATCHDOG_USEC="3000000", WATCHDOG_PID=own).watchdog_interval_s == 1.5
    assert service(manager, WATCHDOG_USEC="3000000", WATCHDOG_PID=other).watchdog_interval_s is None
    with pytest.raises(ConfigError, match="WATCHDOG_USEC is 'soon'"):
        service(manager, WATCHDOG_USEC="soon")


def test_the_variables_are_gone_afterwards_so_that_no_child_believes_them(manager: FakeManager) -> None:
    env = {
        "NOTIFY_SOCKET": manager.path,
        "WATCHDOG_USEC": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDS": "1",
        "LISTEN_FDNAMES": "a",
        "HOME": "/",
    }
    ServiceManager.from_environment(env)
    assert env == {"HOME": "/"}


def test_descriptors_meant_for_another_process_are_left_alone() -> None:
    assert listen_fds({"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "2"}) == {}


def test_a_stored_descriptor_arrives_with_its_name_and_goes_when_removed(manager: FakeManager) -> None:
    me = service(manager)
    fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    os.write(fd, b"kv")
    assert me.store_fd("pool-0", fd)
    assert manager.receive() == {"FDSTORE": "1", "FDNAME": "pool-0", "FDPOLL": "0"}
    assert os.pread(manager.store["pool-0"], 2, 0) == b"kv"
    assert me.remove_fd("pool-0")
    manager.receive()
    assert manager.store == {}
    os.close(fd)


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "x" * 256])
def test_a_descriptor_name_the_protocol_cannot_carry_is_refused(manager: FakeManager, name: str) -> None:
    with pytest.raises(ConfigError, match="descriptor name"):
        service(manager).store_fd(name, 0)


RECEIVER = """
import fcntl, os, sys
from maru_sidecar.notify import ServiceManager
me = ServiceManager.from_environment()
names = ",".join(me.fd_names)
fds = [me.take_fd(name) for name in me.fd_names if name.startswith("pool")]
closed_on_exec = all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
text = b"".join(os.pread(fd, 8, 0) for fd in fds).decode()
unused = ",".join(me.close_unused())
me.ready(f"{names} {closed_on_exec} {text} unused={unused} {'LISTEN_FDS' in os.environ}")
"""


def test_a_restarted_service_gets_its_descriptors_back_by_name(manager: FakeManager) -> None:
    for name, text in (("pool-0", b"first"), ("pool-1", b"second"), ("other", b"unused")):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.write(fd, text)
        manager.store[name] = fd
    manager.start([sys.executable, "-c", RECEIVER], os.environ)
    status = manager.wait_for(lambda m: "READY" in m)["STATUS"]
    assert status == "pool-0,pool-1,other True firstsecond unused=other False"
    assert set(manager.store) == {"pool-0", "pool-1"}  # what nobody took was given up in the store, too


def test_descriptors_of_one_name_are_told_apart() -> None:
    script = (
        "import os; os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "from maru_sidecar.notify import listen_fds\n"
        "print(listen_fds(os.environ))"
    )
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(w, 1)
        for fd in (3, 4, 5):
            os.dup2(r, fd)
        os.environ.update(LISTEN_FDS="3", LISTEN_FDNAMES="control:control:")
        os.execv(sys.executable, [sys.executable, "-c", script])
    os.close(w)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(r, 200).decode().strip() == "{'control': 3, 'control.2': 4, 'unknown': 5}"
    os.close(r)


# --- the pool in the descriptor store ---------------------------------------------------------------------------------------
@pytest.fixture
def spec() -> Iterator[PoolSpec]:
    wanted = PoolSpec(path=f"/dev/shm/maru-notify-pool-{os.getpid()}", size=8 << 20)
    yield wanted
    Path(wanted.path).unlink(missing_ok=True)


def restarted_with(manager: FakeManager, fd: int) -> ServiceManager:
    """What the next process gets if ``fd`` was stored as the pool."""
    manager.store[POOL_FD] = fd
    return ServiceManager(manager.path, fds={POOL_FD: os.dup(fd)})


def kept(manager: FakeManager, me: ServiceManager, spec: PoolSpec) -> bool:
    """Whether the stored pool is used; if not, that it is given up in the store too."""
    fd = stored_pool(me, spec)
    me.status("asked")
    said = manager.receive()
    if fd is None:
        assert said == {"FDSTOREREMOVE": "1", "FDNAME": POOL_FD}
        return False
    os.close(fd)
    assert said == {"STATUS": "asked"}
    return True


def test_a_stored_pool_is_used_while_its_file_is_there_and_after_it_was_removed(manager: FakeManager, spec: PoolSpec) -> None:
    fd = os.open(spec.path, os.O_RDWR | os.O_CREAT, 0o600)
    assert kept(manager, restarted_with(manager, fd), spec)
    os.unlink(spec.path)
    assert kept(manager, restarted_with(manager, fd), spec)


def test_a_pool_that_never_had_a_file_is_used(manager: FakeManager, spec: PoolSpec) -> None:
    assert kept(manager, restarted_with(manager, os.memfd_create("pool")), spec)


def test_a_stored_pool_is_given_up_when_another_file_took_its_place(manager: FakeManager, spec: PoolSpec) -> None:
    fd = os.open(spec.path, os.O_RDWR | os.O_CREAT, 0o600)
    os.unlink(spec.path)
    Path(spec.path).touch()
    assert not kept(manager, restarted_with(manager, fd), spec)


def test_a_stored_pool_is_given_up_when_the_configuration_names_another_path(manager: FakeManager, spec: PoolSpec) -> None:
    fd = os.open(spec.path, os.O_RDWR | os.O_CREAT, 0o600)
    assert not kept(manager, restarted_with(manager, fd), PoolSpec(path=f"{spec.path}-other", size=spec.size))


def test_a_stored_pool_is_given_up_when_an_empty_one_is_asked_for(manager: FakeManager, spec: PoolSpec) -> None:
    fd = os.open(spec.path, os.O_RDWR | os.O_CREAT, 0o600)
    assert not kept(manager, restarted_with(manager, fd), PoolSpec(path=spec.path, size=spec.size, recreate=True))


def test_nothing_stored_is_nothing_given_up(manager: FakeManager, spec: PoolSpec) -> None:
    me = service(manager)
    assert stored_pool(me, spec) is None
    me.status("asked")
    assert manager.receive() == {"STATUS": "asked"}
