"""Who may connect, attach and administer: the kernel says who asks. Needs root, to become somebody else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from tests.support.client import Client, admin
from tests.support.sidecar_process import SidecarProcess, running_sidecar

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.errors import MaruError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
NOBODY = 65534
STRANGER_GROUP = 54321


def as_user(uid: int, gid: int, groups: list[int], action: Callable[[], str]) -> str:
    """What ``action`` returns, or the error it raises, in a child that is somebody else."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "the child died"
        try:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            said = action()
        except (MaruError, OSError) as e:
            said = str(e)
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    said = os.read(reader, 8192).decode()
    os.close(reader)
    return said


def sidecar_with(*flags: str) -> Iterator[SidecarProcess]:
    with running_sidecar(flags=flags) as sidecar:
        os.chmod(os.path.dirname(sidecar.socket), 0o755)
        yield sidecar


@pytest.fixture
def open_sidecar() -> Iterator[SidecarProcess]:
    yield from sidecar_with("--socket-mode", "0666")


@pytest.fixture
def listed_sidecar() -> Iterator[SidecarProcess]:
    yield from sidecar_with("--socket-mode", "0666", "--allow-uid", "4242", "--allow-gid", str(STRANGER_GROUP))


@pytest.fixture
def group_sidecar() -> Iterator[SidecarProcess]:
    yield from sidecar_with("--socket-mode", "0660", "--socket-group", "nogroup")


def ask(sidecar: SidecarProcess, message: M.ClientMessage) -> Callable[[], str]:
    return lambda: repr(admin(sidecar.socket, message))


def test_the_socket_s_mode_decides_who_connects(group_sidecar: SidecarProcess) -> None:
    assert "Permission denied" in as_user(NOBODY, STRANGER_GROUP, [], ask(group_sidecar, M.Ping()))
    assert "READY" in as_user(NOBODY, STRANGER_GROUP, [os.stat(group_sidecar.socket).st_gid], ask(group_sidecar, M.Ping()))


def test_a_list_of_ids_replaces_the_mode(listed_sidecar: SidecarProcess) -> None:
    refused = as_user(NOBODY, NOBODY, [], lambda: str(Client(listed_sidecar.socket, role=L.Role.SCHEDULER)))
    assert "not_authorised: uid 65534 may not use" in refused
    assert "READY" in as_user(4242, NOBODY, [], ask(listed_sidecar, M.Ping()))
    assert "READY" in as_user(NOBODY, STRANGER_GROUP, [], ask(listed_sidecar, M.Ping()))
    assert "READY" in as_user(NOBODY, NOBODY, [STRANGER_GROUP], ask(listed_sidecar, M.Ping()))


@pytest.mark.parametrize(
    "message", [M.CacheClear(), M.CacheList(), M.Drain(), M.Pin("00" * 16, [])], ids=lambda m: type(m).__name__
)
def test_administration_is_for_the_daemon_s_user_and_root(open_sidecar: SidecarProcess, message: M.ClientMessage) -> None:
    assert "NOT_AUTHORISED" in as_user(NOBODY, NOBODY, [], ask(open_sidecar, message))
    assert open_sidecar.state() == "READY"


def test_anybody_admitted_may_ask_for_the_status(open_sidecar: SidecarProcess) -> None:
    assert "uptime_s" in as_user(NOBODY, NOBODY, [], ask(open_sidecar, M.GetStatus()))


def test_another_user_s_scheduler_may_attach_where_it_is_admitted(open_sidecar: SidecarProcess) -> None:
    def attach() -> str:
        with Client(open_sidecar.socket, role=L.Role.SCHEDULER) as client:
            return client.attached.segment

    assert as_user(NOBODY, NOBODY, [], attach).startswith("/maru.")
