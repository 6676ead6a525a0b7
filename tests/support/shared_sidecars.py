"""Sidecars on one shared pool, their metadata server, and an engine on each."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as segments
from maru_shm.records import Reply
from maru_sidecar import pool_admin
from maru_sidecar.listener import instance_of
from tests.server.servers import ServerProcess
from tests.support.client import Client, KvCache
from tests.support.sidecar_process import SidecarProcess
from tests.support.waiting import until

_serial = itertools.count()


class SharedSidecar(SidecarProcess):
    """A sidecar named ``node`` on the shared pool at ``path``; the pool stays when it is closed."""

    def __init__(self, path: str, endpoint: str, node: str, *settings: str) -> None:
        # An answer of the server that a busy machine delays is a miss by design, and no subject of most tests.
        patient = ("server.lookup_wait_ms=1000", "server.pin_ttl_s=3")
        settings = (f"server.endpoint={endpoint}", f"server.node={node}", "pool.shared=true", *patient, *settings)
        flags = tuple(word for setting in settings for word in ("--set", setting))
        super().__init__(flags=("--pool-backend", "file", "--pool-path", path, *flags))

    def sharing(self) -> dict[str, Any]:
        """The section ``sharing`` of its status."""
        answer = self.ask(M.GetStatus())
        assert isinstance(answer, M.Status)
        section = answer.sections["sharing"]
        assert isinstance(section, dict)
        return section

    def health(self) -> str:
        answer = self.ask(M.GetStatus())
        assert isinstance(answer, M.Status)
        section = answer.sections["sidecar"]
        assert isinstance(section, dict)
        return str(section["health"])

    def ended(self) -> bool:
        """Whether its process is over."""
        return self._process is not None and self._process.poll() is not None

    def close(self) -> None:
        """Stop it; the segments of one that was killed go too."""
        super().close()
        for name, *_ in list(segments.list_names(instance_of(self.socket))):
            segments.unlink(name)

    def wait_until_it_can_store(self) -> None:
        until(lambda: bool(self.sharing()["can_store"]), f"the server granted a region: {self.sharing()}", 30)

    def wait_until_published(self, slabs: int) -> None:
        until(lambda: self.sharing()["keys_announced"] >= slabs, f"{slabs} keys announced: {self.sharing()}")


class SharedEngine:
    """A worker and a scheduler half on one sidecar; slabs of 48 KiB."""

    def __init__(self, sidecar: SidecarProcess, *, blocks: int = 64) -> None:
        self.cache = KvCache(blocks)
        self.worker = Client(sidecar.socket, cache=self.cache)
        self.scheduler = Client(sidecar.socket, role=L.Role.SCHEDULER)

    def store(self, keys: bytes, blocks: npt.ArrayLike) -> Reply:
        return self.worker.store(keys, blocks)

    def hits(self, keys: bytes) -> int:
        return self.scheduler.hits(keys)

    def lookup(self, keys: bytes) -> tuple[int, Reply]:
        return self.scheduler.lookup(keys)

    def load(self, ticket: int, keys: bytes, blocks: npt.ArrayLike) -> Reply:
        """Load under the lease that the lookup ``ticket`` holds."""
        session = self.scheduler.attached.session
        return self.worker.finish(self.worker.post(L.Op.LOAD, keys, blocks, lease=ticket, lease_session=session))

    def fetch(self, keys: bytes, blocks: npt.ArrayLike) -> Reply:
        """Look up, load what was hit, give the lease back."""
        ticket, reply = self.lookup(keys)
        assert reply.n_done * L.KEY_BYTES == len(keys), f"{reply.n_done} chunks hit of {len(keys) // L.KEY_BYTES}"
        loaded = self.load(ticket, keys, blocks)
        self.scheduler.release(ticket)
        return loaded

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


@contextlib.contextmanager
def shared_pool(size: int = 64 << 20, region_size: int = 4 << 20) -> Iterator[str]:
    """Path of an initialised shared pool, removed at the end."""
    path = f"/dev/shm/maru-test-pool-{os.getpid()}-shared-{next(_serial)}"
    pool_admin.initialise(path, size, region_size)
    try:
        yield path
    finally:
        os.unlink(path)


def start_sidecar(stack: contextlib.ExitStack, path: str, endpoint: str, node: str, *settings: str) -> SharedSidecar:
    """A started sidecar that can store, closed with ``stack``."""
    sidecar = SharedSidecar(path, endpoint, node, *settings)
    stack.callback(sidecar.close)
    sidecar.start()
    sidecar.wait_until_it_can_store()
    return sidecar


def start_server(
    stack: contextlib.ExitStack, *, listen: str = "tcp://127.0.0.1:*", extra: tuple[str, ...] = ()
) -> ServerProcess:
    server = ServerProcess(listen=listen, extra=extra)
    stack.callback(server.stop)
    return server


def start_engine(stack: contextlib.ExitStack, sidecar: SidecarProcess) -> SharedEngine:
    engine = SharedEngine(sidecar)
    stack.callback(engine.close)
    return engine
