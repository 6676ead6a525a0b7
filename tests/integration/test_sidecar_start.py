"""A start that fails says why and leaves nothing of its making behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import until

from maru_sidecar.config import Control
from maru_sidecar.control_server import ControlServer
from maru_sidecar.poller import Poller


@pytest.fixture
def pool() -> Iterator[str]:
    path = f"/dev/shm/maru-test-pool-{os.getpid()}-start"
    yield path
    assert not os.path.exists(path)


def start(directory: Path, pool: str, *flags: str) -> tuple[int, str, list[str]]:
    """Exit status, standard error, and what lies in the socket's directory afterwards (the instance's lock stays)."""
    command = [sys.executable, "-m", "maru_sidecar", "run", "--socket", str(directory / "control.sock")]
    ended = subprocess.run(
        [*command, "--pool-path", pool, "--pool-size", "16MiB", *flags], capture_output=True, timeout=60, check=False
    )
    return ended.returncode, ended.stderr.decode(), sorted(set(os.listdir(directory)) - {"control.sock.lock"})


def test_a_port_that_is_taken(tmp_path: Path, pool: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, error, left = start(tmp_path, pool, "--http", f"127.0.0.1:{other.getsockname()[1]}")
    assert (code, left) == (2, [])
    assert "Address already in use" in error


def test_an_http_host_that_is_a_name(tmp_path: Path, pool: str) -> None:
    assert start(tmp_path, pool, "--http", "host.example:80")[::2] == (2, [])


def test_a_group_that_does_not_exist(tmp_path: Path, pool: str) -> None:
    assert start(tmp_path, pool, "--socket-group", "no-such-group")[::2] == (2, [])


def test_a_pool_that_cannot_be_opened(tmp_path: Path, pool: str) -> None:
    stranger = tmp_path / "other" / "pool"
    stranger.parent.mkdir()
    stranger.write_bytes(b"no pool" * 1000)
    code, _, left = start(tmp_path, pool, "--pool-backend", "file", "--pool-path", str(stranger))
    assert (code, left) == (7, ["other"])


def test_a_socket_whose_permissions_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "staged")

    poller, path = Poller(), str(tmp_path / "control.sock")
    monkeypatch.setattr(os, "chmod", refuse)
    with pytest.raises(Exception, match="staged"):
        ControlServer(Control(socket=path), poller, None)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["control.sock.lock"]
    poller.close()


def test_a_stop_that_comes_before_the_start_has_ended(tmp_path: Path, pool: str) -> None:
    """The signal arrives between the making of the socket and the loop: it is kept until both can be undone."""
    script = (
        "import os, signal, sys\n"
        "from maru_sidecar import listener\n"
        "listen = listener._listen\n"
        "def stopped_meanwhile(config):\n"
        "    made = listen(config)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return made\n"
        "listener._listen = stopped_meanwhile\n"
        "from maru_sidecar.cli import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", script, "run", "--socket", str(tmp_path / "control.sock"), "--pool-path", pool]
    process = subprocess.Popen([*command, "--pool-size", "16MiB"], stderr=subprocess.PIPE)
    try:
        until(lambda: process.poll() is not None, "it has stopped")
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    assert sorted(os.listdir(tmp_path)) == ["control.sock.lock"]
    if os.path.exists(pool):
        os.unlink(pool)


def test_a_directory_of_the_socket_that_does_not_exist_is_not_made(tmp_path: Path, pool: str) -> None:
    socket_flag = ("--socket", str(tmp_path / "typing" / "error" / "control.sock"))
    code, error, left = start(tmp_path, pool, *socket_flag)
    assert (code, left) == (2, [])
    assert f"the directory {tmp_path}/typing/error does not exist; create it" in error


def test_a_file_in_the_socket_s_place_is_left_alone(tmp_path: Path, pool: str) -> None:
    (tmp_path / "control.sock").write_text("somebody's")
    code, error, _ = start(tmp_path, pool)
    assert (code, "what lies there is no socket; remove it" in error) == (2, True)
    assert (tmp_path / "control.sock").read_text() == "somebody's"
    assert os.listdir(tmp_path) == ["control.sock"]  # and no lock beside it
