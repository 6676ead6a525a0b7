"""One shared pool, one maru-server, two sidecars: the set-up of the demos that share."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runs
from processes import Sidecar
from runs import DemoFailed, say

WAIT_S = 60.0
STOP_S = 20.0


@dataclass
class SharedPool:
    """``a`` and ``b`` see the same file; what one stores, engines of the other load."""

    a: Sidecar
    b: Sidecar
    server: subprocess.Popen[str]

    @property
    def pids(self) -> list[int]:
        return [self.a.pid, self.b.pid, self.server.pid]

    @staticmethod
    def sharing(sidecar: Sidecar) -> dict[str, Any]:
        """What a sidecar says of its sharing."""
        status = json.loads(sidecar.command("status", "--section", "sharing", "--format", "json"))
        section: dict[str, Any] = status["sharing"]
        return section

    def wait(self, what: str, sidecar: Sidecar, key: str, least: int) -> None:
        """Until a number of :meth:`sharing` is at least ``least``."""
        deadline = time.monotonic() + WAIT_S
        while int((section := self.sharing(sidecar))[key]) < least:
            if time.monotonic() > deadline:
                raise DemoFailed(f"not within {WAIT_S:.0f} s: {what}; {section}")
            time.sleep(0.1)


@contextlib.contextmanager
def shared_pool(directory: Path, pool: str) -> Iterator[SharedPool]:
    """Initialise the pool, start everything, stop everything. Raises :class:`DemoFailed` if a process ends badly."""
    made = subprocess.run(
        [sys.executable, "-m", "maru_sidecar", "pool", "init", pool, "--size", runs.POOL_SIZE, "--mode", "600"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    say(made.stdout.strip())
    with contextlib.ExitStack() as stack:
        server, endpoint = _start_server(stack, directory)
        say(f"maru-server listens on {endpoint}")
        a, b = (_start_sidecar(stack, directory, pool, endpoint, name) for name in ("a", "b"))
        shared = SharedPool(a, b, server)
        for sidecar in (a, b):
            runs.wait_until_ready(sidecar)
            shared.wait("the sidecar may store", sidecar, "can_store", 1)
        yield shared


def _start_server(stack: contextlib.ExitStack, directory: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "maru_server", "run", "--listen", "tcp://127.0.0.1:*"]
    # Short times, so that the demo need not wait for leases of a directory that never was: see docs/sharing.md.
    command += ["--lease-ms", "3000", "--grace-ms", "500", "--heartbeat-ms", "500"]
    with open(directory / "server.log", "ab") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
    stack.callback(_stop_server, server)
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.startswith("listening on "):
        raise DemoFailed(f"maru-server did not start: {line!r}")
    return server, line.split()[-1]


def _stop_server(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    assert server.stdout is not None
    server.stdout.close()


def _start_sidecar(stack: contextlib.ExitStack, directory: Path, pool: str, endpoint: str, name: str) -> Sidecar:
    settings = ("pool.shared=true", f"server.endpoint={endpoint}", f"server.node={name}")
    flags = [word for setting in settings for word in ("--set", setting)]
    sidecar = Sidecar(directory, pool, runs.POOL_SIZE, "--pool-backend", "file", *flags, name=name)

    def stop() -> None:
        if (status := sidecar.stop()) != 0:
            raise DemoFailed(f"sidecar {name} ended with status {status}")

    stack.callback(stop)
    return sidecar
