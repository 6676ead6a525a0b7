"""An engine in a process of its own, with a KV cache in its memory: something to attach, to watch and to kill.

The child runs :func:`_serve`: a :class:`~tests.support.client.Client` and its :class:`~tests.support.client.KvCache`, driven
over a pipe.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from maru_shm import layout as L
from tests.support.client import Client, KvCache

ROOT_DIRECTORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class EngineProcess:
    """``call(name, …)`` runs a method of :class:`_Engine` in the child and returns its result."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:  # no multiprocessing: its resource tracker would outlive the test
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT_DIRECTORY
            )
        self._pipe = Connection(ours.detach())
        self.pid = self.process.pid

    def call(self, command: str, *arguments: Any, timeout: float = 60) -> Any:
        self._pipe.send((command, arguments))
        assert self._pipe.poll(timeout), f"the engine process does not answer {command}"
        ok, value = self._pipe.recv()
        assert ok, value
        return value

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken it down."""
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        self._pipe.close()  # the child ends at end of file
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Engine:
    cache: KvCache
    worker: Client
    scheduler: Client

    def attach(self, socket: str, options: dict[str, Any], cache: dict[str, Any]) -> tuple[str, str]:
        """Attach both halves; returns the names of their segments."""
        self.cache = KvCache(**cache)
        self.worker = Client(socket, cache=self.cache, **options)
        self.scheduler = Client(socket, role=L.Role.SCHEDULER, **options)
        return self.worker.attached.segment, self.scheduler.attached.segment

    def fill(self, seed: int) -> None:
        self.cache.fill(seed)

    def read(self, blocks: list[int]) -> bytes:
        return self.cache.read(blocks).tobytes()

    def store(self, keys: bytes, blocks: Any) -> tuple[str, str, int]:
        reply = self.worker.store(keys, blocks)
        return reply.state.name, reply.code.name, reply.n_done

    def load(self, keys: bytes, blocks: Any) -> tuple[str, str, int]:
        reply = self.worker.load(keys, blocks)
        return reply.state.name, reply.code.name, reply.n_done

    def lease(self, keys: bytes) -> int:
        """Look up and keep the lease."""
        return self.scheduler.lookup(keys)[1].n_done

    def post_many(self, loads: list[tuple[bytes, Any]], stores: list[tuple[bytes, Any]], fence: int) -> int:
        """Post without waiting; returns how many tickets are out."""
        for keys, blocks in loads:
            self.worker.post_load(keys, blocks, fence=fence)
        for keys, blocks in stores:
            self.worker.post_store(keys, blocks, fence=fence)
        return len(loads) + len(stores)

    def set_fence(self, step: int) -> None:
        self.worker.set_fence(step)

    def pid(self) -> int:
        return os.getpid()


def _serve(pipe: Connection) -> None:
    engine = _Engine()
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(engine, command)(*arguments)))
        except Exception as e:  # noqa: BLE001 - told to the test, whatever it is
            pipe.send((False, f"{type(e).__name__}: {e}"))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
