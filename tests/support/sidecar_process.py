"""A real sidecar in its own process, with a pool and a socket of its own that go away with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from maru_shm import control, messages
from maru_shm.errors import MaruError

READY_TIMEOUT_S = 30.0


class SidecarProcess:
    """``maru-sidecar run`` on a pool in ``/dev/shm``. The pool survives :meth:`kill` and :meth:`stop`, not :meth:`close`."""

    def __init__(self, *, pool_bytes: int = 64 << 20, flags: tuple[str, ...] = ()) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="maru-test-")
        self.socket = os.path.join(self._directory.name, "control.sock")
        self.log = Path(self._directory.name, "sidecar.log")
        self.pool = f"/dev/shm/maru-test-pool-{os.getpid()}-{os.path.basename(self._directory.name)}"
        self._flags = ("--pool-path", self.pool, "--pool-size", str(pool_bytes), "--socket", self.socket, *flags)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the sidecar was not started"
        return self._process.pid

    def start(self, environment: dict[str, str] | None = None) -> None:
        """Start it and wait until it is ready."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "maru_sidecar", "run", *self._flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(environment or {})},
            )  # fmt: skip
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self.state() != "READY":
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the sidecar did not become ready:\n{self.log.read_text()}")
            time.sleep(0.02)

    def ask(self, message: messages.ClientMessage) -> messages.SidecarMessage:
        """One administrative request on a connection of its own."""
        with contextlib.closing(control.connect(self.socket, 10.0)) as sock:
            _exchange(sock, messages.Hello(messages.PROTOCOL_MIN, messages.PROTOCOL, "maru-tests"))
            return _exchange(sock, message)

    def state(self) -> str:
        """The name of its state, empty while nothing answers."""
        with contextlib.suppress(OSError, MaruError):
            answer = self.ask(messages.Ping())
            if isinstance(answer, messages.Pong):
                return answer.state.upper()
        return ""

    def chunks(self) -> list[messages.ChunkInfo]:
        """Every chunk in the directory."""
        found: list[messages.ChunkInfo] = []
        while True:
            page = self.ask(messages.CacheList(after=found[-1].key + found[-1].namespace if found else ""))
            assert isinstance(page, messages.CachePage), page
            found += page.chunks
            if not page.more:
                return found

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken it down."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def pause(self) -> None:
        """SIGSTOP: it is there and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the sidecar ignored SIGTERM for 30 s:\n{self.log.read_text()[-4000:]}") from None

    def close(self) -> None:
        """Stop it if it runs, and remove the pool."""
        try:
            if self._process is not None and self._process.poll() is None:
                self.stop()
        finally:
            for path in (self.pool, self.pool + ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            self._directory.cleanup()


def _exchange(sock: socket.socket, message: messages.ClientMessage) -> messages.SidecarMessage:
    control.send(sock, message)
    received = control.receive(sock, control.to_client)
    if received is None:
        raise ConnectionResetError("the sidecar closed the connection")
    answer, fds = received
    for fd in fds:
        os.close(fd)
    return answer


@contextlib.contextmanager
def running_sidecar(*, pool_bytes: int = 64 << 20, flags: tuple[str, ...] = ()) -> Iterator[SidecarProcess]:
    """A started sidecar that is stopped, and whose pool is removed, at the end."""
    sidecar = SidecarProcess(pool_bytes=pool_bytes, flags=flags)
    try:
        sidecar.start()
        yield sidecar
    finally:
        sidecar.close()
