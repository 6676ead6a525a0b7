"""What the metadata server costs over loopback: lookup latency, keys per second of one core, re-announcement, memory per key.

    python bench/server_rpc.py [--format table|json|csv]

The server is a process of its own (`python -m maru_server run`), the client another: both sides' costs are in the latency.
"One core" is keys answered per second of the *server's* CPU time (user + system, all its threads), taken while the client
keeps 8 batches in flight.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Self

import click
import numpy as np
import psutil

from maru_server import protocol as P
from maru_server.announce import Slabs
from maru_server.client import DirectoryClient, places_of
from maru_server.errors import ServerRefused
from maru_server.lease import RegionLease
from maru_server.link_types import LinkConfig, LinkState
from maru_server.node import NodeLink
from maru_server.protocol import GrantInfo
from maru_server.render import Format, Row, render
from maru_shm.errors import MaruError

BATCH = 256
WINDOW = 8
_TIMES = ("--lease-ms", "2000", "--grace-ms", "100", "--heartbeat-ms", "500")


class Server:
    """A server process; also a context manager."""

    def __init__(self, listen: str = "tcp://127.0.0.1:*") -> None:
        command = [sys.executable, "-m", "maru_server", "run", "--listen", listen, "--log-level", "error", *_TIMES]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().split()[-1]
        self.stats = psutil.Process(self.process.pid)

    def cpu_s(self) -> float:
        times = self.stats.cpu_times()
        return times.user + times.system

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


def node_with_region(endpoint: str) -> tuple[DirectoryClient, GrantInfo]:
    """A client that has joined and holds one region (after the hold of a new server)."""
    client = DirectoryClient(endpoint, node="bench", incarnation=time.time_ns())
    client.add_device(os.urandom(16), 2, 1 << 40, first=1)
    while True:
        try:
            return client, client.alloc("bench", slab_bytes=1 << 25)[0]
        except ServerRefused as e:
            time.sleep(e.retry_ms / 4000)
            client.heartbeat()


def fill(client: DirectoryClient, grant: GrantInfo, namespace: bytes, n: int) -> bytes:
    """Register n random keys; returns them."""
    keys = os.urandom(16 * n)
    for i in range(0, n, 4096):
        batch = keys[16 * i : 16 * (i + 4096)]
        m = len(batch) // 16
        client.heartbeat()
        client.register(namespace, 0, batch, places_of(grant.id, np.arange(i, i + m), np.ones(m)))
    return keys


def latency(client: DirectoryClient, namespace: bytes, keys: bytes, rounds: int) -> list[Row]:
    times = []
    for i in range(rounds):
        at = (i * BATCH * 16) % (len(keys) - BATCH * 16)
        start = time.perf_counter_ns()
        found = client.lookup(namespace, 0, keys[at : at + BATCH * 16])
        times.append(time.perf_counter_ns() - start)
        assert len(found) == BATCH
    p50, p99 = np.percentile(times, [50, 99]) / 1e6
    return [
        {"what": f"lookup of {BATCH} keys, p50", "value": round(p50, 3), "unit": "ms", "target": "≤ 1"},
        {"what": f"lookup of {BATCH} keys, p99", "value": round(p99, 3), "unit": "ms", "target": ""},
    ]


def throughput(server: Server, client: DirectoryClient, namespace: bytes, keys: bytes, seconds: float) -> list[Row]:
    connection, batches = client.connection, len(keys) // (BATCH * 16)
    messages = [P.Lookup(namespace, 0, keys[i * BATCH * 16 : (i + 1) * BATCH * 16]) for i in range(batches)]
    cpu, start, done, sent = server.cpu_s(), time.perf_counter(), 0, 0
    while time.perf_counter() - start < seconds:
        while sent - done < WINDOW:
            connection.send(messages[sent % batches])
            sent += 1
        assert connection.receive(5000) is not None
        done += 1
    wall, used = time.perf_counter() - start, server.cpu_s() - cpu
    while done < sent:
        connection.receive(5000)
        done += 1
    return [
        {
            "what": "keys looked up per CPU second of the server",
            "value": round(done * BATCH / used),
            "unit": "1/s",
            "target": "≥ 300000",
        },
        {"what": "keys looked up per second (wall)", "value": round(done * BATCH / wall), "unit": "1/s", "target": ""},
    ]


def announcement(n: int) -> list[Row]:
    """Restart the server under a linked node and take the time from its first answer to the last key announced."""
    namespace, keys = os.urandom(16), os.urandom(16 * n)

    def source(_region: RegionLease) -> Iterator[Slabs]:
        yield Slabs(namespace, 0, keys, np.arange(n, dtype=np.uint32), np.ones(n, np.uint64))

    with Server() as first:
        link = NodeLink(LinkConfig(first.endpoint, "bench"), source)
        link.add_device(os.urandom(16), 2, 1 << 40)
        link.start()
        granted: list[list[RegionLease] | MaruError] = []
        link.request_regions(1, granted.append)
        while not granted:
            time.sleep(0.01)
        epoch = link.stats().epoch
    with Server(first.endpoint):
        start = time.perf_counter()
        while link.stats().epoch == epoch or link.state is not LinkState.READY:
            time.sleep(0.001)
        took = time.perf_counter() - start
        assert link.stats().keys_announced == n
        link.close()
    return [{"what": f"re-announcement of {n} keys, with reconnection", "value": round(took, 3), "unit": "s", "target": "≤ 3"}]


@click.command()
@click.option("--keys", "n_keys", default=1_000_000, show_default=True, help="Keys in the directory.")
@click.option("--rounds", default=3000, show_default=True, help="Lookups timed one by one.")
@click.option("--seconds", default=5.0, show_default=True, help="Length of the throughput run.")
@click.option("--format", "form", type=click.Choice([f.value for f in Format]), default="table", show_default=True)
def main(n_keys: int, rounds: int, seconds: float, form: str) -> None:
    with Server() as server:
        client, grant = node_with_region(server.endpoint)
        namespace = os.urandom(16)
        fill(client, grant, os.urandom(16), 5000)  # code and buffers are there before memory is measured
        before = server.stats.memory_info().rss
        start = time.perf_counter()
        keys = fill(client, grant, namespace, n_keys)
        rate = n_keys / (time.perf_counter() - start)
        per_key = (server.stats.memory_info().rss - before) / n_keys
        rows = latency(client, namespace, keys[: 16 * 200_000], rounds)
        rows += throughput(server, client, namespace, keys[: 16 * 200_000], seconds)
        client.close()
    rows.append({"what": "keys registered per second (one client, wall)", "value": round(rate), "unit": "1/s", "target": ""})
    rows.append({"what": f"memory per key ({n_keys} keys)", "value": round(per_key, 1), "unit": "B", "target": "≤ 250"})
    rows += announcement(100_000)
    click.echo(render(rows, Format(form)))


if __name__ == "__main__":
    main()
