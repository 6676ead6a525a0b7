"""A small service manager for tests: a real notify socket, a real descriptor store, real child processes.

It speaks the protocol of ``sd_notify(3)`` and ``sd_listen_fds(3)`` and does nothing by itself: a test starts, kills and
restarts the service and reads what it said.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

#: Becomes the service: descriptors moved to 3, 4, …, LISTEN_PID and WATCHDOG_PID set to this process, then exec.
_LAUNCHER = """
import fcntl, os, sys
names, *argv = sys.argv[1:]
fds = [int(part) for part in os.environ.pop("TEST_FDS").split(",") if part]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
for fd in fds:
    os.close(fd)
for i, fd in enumerate(high):
    os.dup2(fd, 3 + i)
    os.close(fd)
if fds:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=names)
if "WATCHDOG_USEC" in os.environ:
    os.environ["WATCHDOG_PID"] = str(os.getpid())
os.execvpe(argv[0], argv, os.environ)
"""


class FakeManager:
    """Owns the notify socket ``directory/notify.sock`` and what services store. Close it at the end."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "notify.sock")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._sock.bind(self.path)
        self._children: list[subprocess.Popen[bytes]] = []
        self.store: dict[str, int] = {}
        self.said: list[dict[str, str]] = []  #: every message so far, in order

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        watchdog_s: float = 0.0,
        sockets: Mapping[str, int] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a service with the stored descriptors and ``sockets`` (name → fd) handed over."""
        given = {**(sockets or {}), **self.store}
        env = {**environment, "NOTIFY_SOCKET": self.path, "TEST_FDS": ",".join(map(str, given.values()))}
        if watchdog_s:
            env["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        child = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, ":".join(given), *argv], env=env, pass_fds=list(given.values()), close_fds=True
        )
        self._children.append(child)
        return child

    def receive(self, timeout_s: float = 20.0) -> dict[str, str]:
        """The next message; its stored descriptors are kept, FDSTOREREMOVE is obeyed. Fails after ``timeout_s``."""
        self._sock.settimeout(timeout_s)
        data, fds, _, _ = socket.recv_fds(self._sock, 8192, 16)
        message = dict(line.split("=", 1) for line in data.decode().splitlines())
        name = message.get("FDNAME", "stored")
        if "FDSTORE" in message:
            for fd in fds:
                if name in self.store:
                    os.close(self.store[name])
                self.store[name] = fd
        elif "FDSTOREREMOVE" in message and name in self.store:
            os.close(self.store.pop(name))
        self.said.append(message)
        return message

    def wait_for(self, wanted: Callable[[dict[str, str]], bool], timeout_s: float = 30.0) -> dict[str, str]:
        """Read messages until one is ``wanted``; fails after ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            message = self.receive(left)
            if wanted(message):
                return message
        raise TimeoutError(f"the service said only {self.said}")

    def close(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait(10)
        for fd in self.store.values():
            os.close(fd)
        self._sock.close()
        os.unlink(self.path)
