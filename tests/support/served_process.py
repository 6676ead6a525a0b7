"""A child process that is told what to do over a pipe: a fresh interpreter, so nothing is inherited by a fork.

:class:`ServedProcess` is the test's end. The child's module ends in ``serve(Thing)``; ``call("name", …)`` then runs
``Thing().name(…)`` there and returns its result.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 30.0


class ServedProcess:
    """``module`` is run with ``-m``. ``log``: where its output goes, if not to the test's. ``timeout``: seconds per answer."""

    def __init__(
        self, module: str, *, environment: Mapping[str, str] | None = None, log: Path | None = None, timeout: float = 60.0
    ) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(part for part in sys.path if part)
        out: Any = open(log, "ab") if log is not None else contextlib.nullcontext()  # noqa: SIM115 - entered below
        environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        with theirs, out as output:  # no multiprocessing.Process: its resource tracker would outlive the test
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            )  # fmt: skip
        self.pipe = Connection(ours.detach())
        self.pid = self.process.pid
        self._timeout = timeout

    def start(self, command: str, *arguments: Any) -> None:
        """Send a command; :meth:`result` takes its answer."""
        self.pipe.send((command, arguments))

    def result(self, timeout: float | None = None) -> Any:
        assert self.pipe.poll(self._timeout if timeout is None else timeout), f"process {self.pid} does not answer"
        ok, value = self.pipe.recv()
        assert ok, value
        return value

    def call(self, command: str, *arguments: Any, timeout: float | None = None) -> Any:
        self.start(command, *arguments)
        return self.result(timeout)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken it down."""
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        """The child ends at the end of the pipe, or is killed."""
        self.pipe.close()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


def serve(make: Callable[[Connection], object]) -> None:
    """The child's main loop: ``make(pipe)``, then one call after another until the other end is closed."""
    pipe = Connection(int(sys.argv[1]))
    served = make(pipe)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(served, command)(*arguments)))
        except Exception as e:  # noqa: BLE001 - told to the test, whatever it is
            pipe.send((False, f"{type(e).__name__}: {e}"))
