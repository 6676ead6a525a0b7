"""An engine in a process of its own, with a KV cache in its memory: something to attach, to watch and to kill.

The child holds a :class:`~tests.support.client.Client` and its :class:`~tests.support.client.KvCache`.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from maru_shm import layout as L
from tests.support.client import Client, KvCache
from tests.support.served_process import ServedProcess, serve


class EngineProcess(ServedProcess):
    """``call(name, …)`` runs a method of :class:`_Engine` in the child and returns its result."""

    def __init__(self) -> None:
        super().__init__(__name__)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Engine:
    cache: KvCache
    worker: Client
    scheduler: Client

    def __init__(self, pipe: Connection) -> None:
        """Nothing is attached yet."""

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


if __name__ == "__main__":
    serve(_Engine)
