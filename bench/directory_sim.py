"""What a directory for many nodes costs: the real service and memory backend, synthetic clients, no sockets.

    python bench/directory_sim.py [--nodes 10 --nodes 100 --nodes 1000] [--chunks 100000 --chunks 1000000] [--largest 10000000]
                                  [--csv FILE] [--json FILE] [--svg FILE]

    python bench/directory_sim.py --nodes 1000 --chunks 1000000 --chunks 10000000 --largest 100000000 --json FILE --svg FILE
                                  # 10⁸ chunks: 20 GiB of free memory and about six minutes

It needs no more than numpy, msgspec and click beside this repository's own sources (shm, server) on ``PYTHONPATH``.

Each cell (nodes × chunks) fills a directory through ``Service.answer`` with encoded messages (decode, check, look up, encode:
everything but the socket, which ``server_rpc.py`` measures), then takes the cost of each verb. A region holds 1,024 chunks, so
10⁷ chunks are 9,766 grants, and a lookup asks for 256 random chunks: up to 256 grants to explain, the worst case. The last
rows are *extrapolated*: memory is linear in chunks and CPU time per verb is fitted as ``a + b·log10(chunks)`` (a larger
dictionary misses caches more often) over the cells of the largest node count; they are marked so in the column ``how``.

A cell that does not fit into the memory that is available is left out, one that is not filled within ``--budget-s`` is measured
with what is in it by then; the largest wanted is extrapolated instead.

The load that a node offers is stated, not measured: a heartbeat every 2 s, 2 lookups of 256 keys and 64 new chunks per second.
"""

from __future__ import annotations

import csv
import gc
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

import click
import numpy as np
from svg_plot import Panel, Point, svg

from maru_server import protocol as P
from maru_server.cluster_state import Settings
from maru_server.memory import MemoryBackend
from maru_server.render import Format, render
from maru_server.service import Service

BATCH = 256
CHUNKS_PER_REGION = 1024
HEARTBEATS_PER_S, LOOKUPS_PER_S, NEW_CHUNKS_PER_S = 0.5, 2.0, 64.0  #: per node
MEMORY_PER_CHUNK = 190  #: bytes to have free per chunk: 170 to 181 are used, as dictionaries are fuller or emptier
MEMORY_ASIDE = 1 << 30
REPORT_S = 5.0
_NAMESPACE = b"directory-sim-ns"
_DEVICE = b"directory-sim-dv"


@dataclass(frozen=True)
class Cell:
    """Times are CPU µs of the server; percentiles over batches."""

    nodes: int
    chunks: int
    how: str  #: measured or extrapolated
    register_us_per_key: float
    lookup_us_p50: float  #: per batch of 256
    lookup_us_p99: float
    heartbeat_us: float
    tick_us: float
    death_us: float  #: the tick that declares one node dead
    worst_register_us: float  #: of a batch of 256: a dictionary that grows is rebuilt inside it
    bytes_per_key: float
    total_gib: float
    cores_for_stated_load: float  #: of one server process
    nodes_per_core: int

    def with_load(self) -> Cell:
        us = (
            HEARTBEATS_PER_S * self.heartbeat_us
            + LOOKUPS_PER_S * self.lookup_us_p50
            + NEW_CHUNKS_PER_S * self.register_us_per_key
        )
        ticks = self.tick_us * 10 / 1e6  # ten a second, whatever the load
        return replace(
            self,
            cores_for_stated_load=round(self.nodes * us / 1e6 + ticks, 4),
            nodes_per_core=int(max(0.0, 1 - ticks) * 1e6 / us),
        )


class Client:
    """One synthetic node: encodes requests, reads replies."""

    def __init__(self, service: Service, backend: MemoryBackend, index: int) -> None:
        self._service, self._backend = service, backend
        self._identity = index.to_bytes(5, "big")
        self.grants: list[int] = []
        self._ask(P.Hello(1, 1, "sim", f"node-{index}", 1))

    def frames(self, message: P.Request) -> list[bytes]:
        return [P.HEADER.pack(P.MAGIC, P.PROTOCOL, 0, 1, self._backend.epoch()), P.encoder.encode(message)]

    def answer(self, frames: list[bytes]) -> list[bytes]:
        reply = self._service.answer(self._identity, frames)
        assert reply is not None
        return reply

    def _ask(self, message: P.Request) -> P.Reply:
        reply = P.to_client.decode(self.answer(self.frames(message))[1])
        if isinstance(reply, P.Error):
            raise RuntimeError(reply.what)
        return reply

    def alloc(self, count: int) -> None:
        while count > 0:
            reply = self._ask(P.AllocRegions(os.urandom(8).hex(), min(count, P.MAX_GRANTS_PER_CALL)))
            assert isinstance(reply, P.Granted)
            self.grants += [g.id for g in reply.grants]
            count -= len(reply.grants)


def _rss() -> int:
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _timed_us(client: Client, message: P.Request) -> float:
    frames = client.frames(message)
    start = time.process_time_ns()
    client.answer(frames)
    return (time.process_time_ns() - start) / 1000


def _available() -> int:
    """Bytes that this machine can still give."""
    with open("/proc/meminfo", encoding="ascii") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable:"))


class Progress:
    """A line on stderr every few seconds."""

    def __init__(self, n_nodes: int, n_chunks: int) -> None:
        self._name = f"{n_nodes} nodes, {n_chunks:,} chunks"
        self._n_chunks = n_chunks
        self._started = self._next = time.monotonic()

    def told(self, done: int) -> float:
        """Seconds since the start."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_S
            rate = done / max(now - self._started, 1e-6)
            left = f", {(self._n_chunks - done) / rate:.0f} s left" if done else ""
            gib = _rss() / 2**30
            print(
                f"{self._name}: {100 * done // self._n_chunks} %, {rate:,.0f}/s, {gib:.1f} GiB{left}",
                file=sys.stderr,
                flush=True,
            )
        return now - self._started

    def say(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)


def measure(n_nodes: int, n_chunks: int, budget_s: float) -> Cell:
    """Fill one directory and take its costs. Run in a process of its own: memory is this process's."""
    progress = Progress(n_nodes, n_chunks)
    settings = Settings(lease_ms=400, grace_ms=0, heartbeat_ms=100)
    backend = MemoryBackend(settings)
    service = Service(backend, settings)
    clients = [Client(service, backend, i) for i in range(n_nodes)]
    clients[0]._ask(P.AddDevice(_DEVICE, P.MAX_REGIONS, CHUNKS_PER_REGION << 25, 1))

    def all_alive() -> None:
        for c in clients:
            c._ask(P.Heartbeat())

    while backend.stats()["hold"]:
        all_alive()
        backend.tick()
        time.sleep(0.01)
    n_regions = -(-n_chunks // CHUNKS_PER_REGION)
    for i, c in enumerate(clients):
        c.alloc(n_regions // n_nodes + (i < n_regions % n_nodes))
    owners = [(c, g) for c in clients for g in c.grants]

    clients[0]._ask(P.Register(_NAMESPACE, 1, bytes(16), bytes(16)))  # the first batch pays 8 ms for numpy's own start
    gc.collect()
    before, sample, register = _rss(), bytearray(), []
    slabs = np.zeros(BATCH, P.PLACE)
    slabs["generation"] = 1
    wanted = n_chunks
    for at in range(0, wanted, BATCH):
        if progress.told(at) > budget_s and at:
            progress.say(f"{budget_s:.0f} s are over, measuring with {at:,} chunks")
            n_chunks = at
            break
        c, grant = owners[at // CHUNKS_PER_REGION]
        n = min(BATCH, wanted - at)
        keys = os.urandom(16 * n)
        slabs["grant"], slabs["slab"] = grant, np.arange(at % CHUNKS_PER_REGION, at % CHUNKS_PER_REGION + BATCH)
        register.append(_timed_us(c, P.Register(_NAMESPACE, 0, keys, slabs[:n].tobytes())) / n)
        if at % max(BATCH, wanted // 4000 // BATCH * BATCH) == 0:
            sample += keys
    used = _rss() - before - len(sample)
    progress.say("filled; lookups, heartbeats, ticks")

    rng = np.random.default_rng(1)
    keys_seen = np.frombuffer(bytes(sample), "V16")
    lookup = [
        _timed_us(clients[int(rng.integers(n_nodes))], P.Lookup(_NAMESPACE, 0, rng.choice(keys_seen, BATCH).tobytes()))
        for _ in range(2000)
    ]
    heartbeat = [_timed_us(c, P.Heartbeat()) for c in itertools.islice(itertools.cycle(clients), 2000)]
    tick = []
    for _ in range(30):
        all_alive()
        start = time.process_time_ns()
        backend.tick()
        tick.append((time.process_time_ns() - start) / 1000)
    death = _death_us(backend, clients)
    p50, p99 = np.percentile(lookup, [50, 99])
    return Cell(
        nodes=n_nodes,
        chunks=n_chunks,
        how="measured",
        register_us_per_key=round(float(np.mean(register)), 3),
        lookup_us_p50=round(float(p50), 1),
        lookup_us_p99=round(float(p99), 1),
        heartbeat_us=_median(heartbeat),
        tick_us=_median(tick),
        death_us=round(death, 1),
        worst_register_us=round(max(register) * BATCH, 1),
        bytes_per_key=round(used / n_chunks, 1),
        total_gib=round(used / 2**30, 3),
        cores_for_stated_load=0.0,
        nodes_per_core=0,
    ).with_load()


def _median(times: Sequence[float]) -> float:
    return round(float(np.median(times)), 1)


def _death_us(backend: MemoryBackend, clients: list[Client]) -> float:
    """Let the last node fall silent; CPU µs of the tick that ends it."""
    while True:
        for c in clients[:-1]:
            c._ask(P.Heartbeat())
        start = time.process_time_ns()
        backend.tick()
        took = (time.process_time_ns() - start) / 1000
        if backend.stats()["nodes_died_total"]:
            return took


def extrapolate(cells: list[Cell], n_chunks: int) -> Cell:
    """The cell for ``n_chunks`` at the largest node count, from the measured ones at that count."""
    nodes = max(c.nodes for c in cells)
    base = sorted((c for c in cells if c.nodes == nodes), key=lambda c: c.chunks)
    x = np.log10([c.chunks for c in base])

    def law(name: str, digits: int = 1) -> float:
        y = np.array([float(getattr(c, name)) for c in base])
        slope, offset = np.polyfit(x, y, 1) if len(base) > 1 else (0.0, y[0])
        return round(float(max(offset + max(slope, 0.0) * np.log10(n_chunks), y[-1])), digits)

    last = base[-1]
    return replace(
        last,
        chunks=n_chunks,
        how="extrapolated",
        register_us_per_key=law("register_us_per_key", 3),
        lookup_us_p50=law("lookup_us_p50"),
        lookup_us_p99=law("lookup_us_p99"),
        death_us=round(last.tick_us + max(0.0, last.death_us - last.tick_us) * n_chunks / last.chunks, 1),  # walks its grants
        worst_register_us=round(last.worst_register_us * n_chunks / last.chunks, 1),
        total_gib=round(last.bytes_per_key * n_chunks / 2**30, 3),
    ).with_load()


def plot(cells: list[Cell], path: str) -> None:
    """The scaling law as SVG: a lookup's cost, how many nodes one core serves, memory; each over the number of chunks."""

    def panel(title: str, name: str, level: tuple[float, str] | None = None) -> Panel:
        lines: dict[str, list[Point]] = {}
        for c in cells:
            if (value := float(getattr(c, name))) > 0:  # a tiny directory takes no page that was not there
                lines.setdefault(f"{c.nodes:,} nodes", []).append(Point(c.chunks, value, c.how == "measured"))
        return Panel(title, "chunks in the directory", lines, level)

    most = max(c.nodes for c in cells)
    panels = [
        panel(f"lookup of {BATCH} keys: CPU µs, p50", "lookup_us_p50"),
        panel("nodes that one core serves", "nodes_per_core", (most, f"{most:,} nodes: above, one maru-server; below, Redis")),
        panel("directory: GiB", "total_gib"),
    ]
    with open(path, "w", encoding="utf-8") as f:
        f.write(svg(panels))


def machine() -> dict[str, str | int]:
    """Where the figures come from."""
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        cpu = next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), platform.machine())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu, "cores": os.cpu_count() or 0, "memory_gib": round(pages / 2**30), "kernel": platform.release(),
        "python": platform.python_version(), "load_1m": round(os.getloadavg()[0], 2),
    }  # fmt: skip


@click.command()
@click.option("--nodes", "node_counts", multiple=True, type=int, default=(10, 100, 1000), show_default=True)
@click.option("--chunks", "chunk_counts", multiple=True, type=int, default=(100_000, 1_000_000), show_default=True)
@click.option("--largest", default=10_000_000, show_default=True, help="Measured at the largest node count only; 190 B each.")
@click.option("--extrapolate-to", default=100_000_000, show_default=True, help="Unless that many are measured.")
@click.option("--budget-s", default=400.0, show_default=True, help="For filling one directory.")
@click.option("--csv", "csv_path", type=click.Path(dir_okay=False))
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Rows, machine and command line.")
@click.option("--svg", "svg_path", type=click.Path(dir_okay=False), help="The scaling law.")
def main(
    *,
    node_counts: tuple[int, ...],
    chunk_counts: tuple[int, ...],
    largest: int,
    extrapolate_to: int,
    budget_s: float,
    csv_path: str | None,
    json_path: str | None,
    svg_path: str | None,
) -> None:
    """What a directory for many nodes costs."""
    told = machine()
    wanted = [(n, c) for n in node_counts for c in chunk_counts]
    if largest > max(chunk_counts):
        wanted.append((max(node_counts), largest))
    cells = []
    for n_nodes, n_chunks in wanted:
        need = n_chunks * MEMORY_PER_CHUNK + MEMORY_ASIDE
        if need > (available := _available()):
            click.echo(f"{n_chunks:,} chunks want {need >> 20:,} MiB, {available >> 20:,} are available: left out", err=True)
            continue
        with get_context("spawn").Pool(1) as pool:  # a fresh process per cell: memory is not returned
            cells.append(pool.apply(measure, (n_nodes, n_chunks, budget_s)))
    if not cells:
        raise click.ClickException("no cell fits into memory")
    if extrapolate_to > max(c.chunks for c in cells):
        cells.append(extrapolate(cells, extrapolate_to))
    rows = [dict(asdict(c)) for c in cells]
    if csv_path:
        with open(csv_path, "w", encoding="utf-8", newline="") as f:
            writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if json_path:
        with open(json_path, "w", encoding="utf-8") as f:
            json.dump({"machine": told, "command": sys.argv, "rows": rows}, f, indent=1)
    if svg_path:
        plot(cells, svg_path)
    click.echo(render([{k: row[k] for k in row} for row in rows], Format.TABLE))


if __name__ == "__main__":
    main()
