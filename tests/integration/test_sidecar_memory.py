"""What a hostile client can make the daemon spend, watched from outside."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
from tests.support.client import ROOT, Client, KvCache, blocks_table, prompt_keys
from tests.support.sidecar_process import SidecarProcess, running_sidecar
from tests.support.waiting import until

from maru_shm import control
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.errors import AttachRefused, MaruError
from maru_shm.geometry import KvLayout, KvPlane, KvRegion, RegionKind

MiB = 1 << 20
#: The heap that one client of small requests may cost, whatever it does and for how long: three times its segment, the
#: descriptors of four copies, and what the allocator keeps.
BOUND = 32 * MiB
ROUNDS = 3


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarProcess]:
    with running_sidecar(flags=("--set", "limits.total_segment_bytes=32MiB")) as process:
        yield process


def tiny_pieces(planes: int, blocks: int) -> KvCache:
    """A cache of one-byte pieces, ``planes`` of them a block of one token."""
    cache = KvCache(num_blocks=1)
    cache.memory = np.zeros(blocks * planes * 2, np.uint8)
    region = KvRegion(RegionKind.PROCESS_VM, cache.memory.ctypes.data, cache.memory.nbytes)
    shapes = tuple(KvPlane(0, i * 2, planes * 2, 1, i) for i in range(planes))
    cache.layout = KvLayout(blocks, 1, shapes, (region,), "tiny")
    return cache


# --- what hostile clients do ------------------------------------------------------------------------------------------------
def looks_up_and_releases(sidecar: SidecarProcess) -> None:
    """Ended leases, tens of thousands within one lease's time."""
    with Client(sidecar.socket, engine_id="leases", max_records=64) as client:
        held = prompt_keys("leases", 1)
        client.store(held, blocks_table(0, 1))
        for _ in range(450):
            tickets = [client.records.post(L.Op.LOOKUP, held) for _ in range(40)]  # with the releases before them, 120 slots
            client.publish()
            for ticket in tickets:
                client.wait(ticket)
                client.records.release(ticket)
            client.publish()


def drains_behind_loads_that_never_begin(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, engine_id="drains", max_keys=4, max_blocks=64, max_records=4096) as client:
        for _ in range(2040):
            client.records.post(L.Op.LOAD, prompt_keys("drains", 1), blocks_table(0, 1).tobytes(), fence=1 << 40)
        client.publish()
        drains = [client.records.post(L.Op.DRAIN, b"") for _ in range(2040)]
        client.publish()
        until(lambda: client.records.state(drains[-1]) is L.State.ACCEPTED, "the drains are accepted")


def posts_over_records_that_have_no_answer(sidecar: SidecarProcess) -> None:
    """Each round the same records with new tickets, without waiting for the old ones."""
    with Client(sidecar.socket, engine_id="reuse", max_keys=256, max_blocks=1024, max_records=64) as client:
        for _ in range(2000):
            if client.hung_up():
                break
            with contextlib.suppress(MaruError):
                for _ in range(64):
                    client.post_load(prompt_keys("reuse", 1) * 256, np.zeros((256, 4), np.int32), fence=1 << 40)
            client.records._free = list(range(64))
        until(client.hung_up, "the session has ended")


def moves_tiny_pieces(sidecar: SidecarProcess) -> None:
    """As many as are allowed, many chunks at once."""
    with Client(sidecar.socket, engine_id="tiny", cache=tiny_pieces(1024, 1024), chunk_tokens=64, max_blocks=1100) as client:
        for i in range(3):
            chunks = prompt_keys(f"tiny {i}", 16)
            client.store(chunks, np.arange(1024).reshape(16, 64))
            assert client.load(chunks, np.arange(1024).reshape(16, 64)).state is L.State.DONE


def asks_for_more_than_is_allowed(sidecar: SidecarProcess) -> None:
    """Every kind of attach that would cost more than its engine is worth is refused, with the limit."""
    small = KvCache(num_blocks=64, layers=1, piece=64)
    for words, options in (
        ("limits.max_pieces", {"cache": tiny_pieces(1024, 2048), "chunk_tokens": 2048}),
        ("a quarter of the slab", {"cache": small, "chunk_tokens": 16, "world": 4096}),
        ("limits.segment_bytes", {"max_records": 4096, "max_keys": 1 << 14}),
        ("limits.total_segment_bytes", {"max_records": 4096, "max_keys": 1 << 9}),
    ):
        with pytest.raises(AttachRefused, match=words):
            Client(sidecar.socket, engine_id="greedy", **options)  # type: ignore[arg-type]


def never_reads_its_answers(sidecar: SidecarProcess) -> None:
    with contextlib.closing(control.connect(sidecar.socket, 10.0)) as sock, contextlib.suppress(OSError):
        control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "unread"))
        for _ in range(10_000):
            control.send(sock, M.GetStatus())


def sends_garbage_and_descriptors(sidecar: SidecarProcess) -> None:
    with open(os.devnull) as null:
        for _ in range(50):
            with contextlib.closing(control.connect(sidecar.socket, 10.0)) as sock, contextlib.suppress(OSError):
                socket.send_fds(sock, [os.urandom(M.MAX_MESSAGE // 2)], [null.fileno()] * 253)
                control.receive(sock, control.to_client)


def attaches_and_goes_away(sidecar: SidecarProcess) -> None:
    for i in range(50):
        with contextlib.closing(control.connect(sidecar.socket, 10.0)) as sock:
            control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "fleeting"))
            control.send(sock, M.Attach(L.Role.SCHEDULER, f"fleeting {i}", 0, 1, ROOT, 64, 1024, 256, 1024))
            if i % 2:
                control.receive(sock, control.to_client)


HOSTILE: tuple[Callable[[SidecarProcess], None], ...] = (
    looks_up_and_releases, drains_behind_loads_that_never_begin, posts_over_records_that_have_no_answer, moves_tiny_pieces,
    asks_for_more_than_is_allowed, never_reads_its_answers, sends_garbage_and_descriptors, attaches_and_goes_away,
)  # fmt: skip


def test_the_daemon_s_memory_stays_in_bounds_whatever_its_clients_do(sidecar: SidecarProcess) -> None:
    def private() -> int:
        info = process.memory_info()
        return int(info.rss - info.shared)  # the pool and the segments are shared

    process = psutil.Process(sidecar.pid)
    with Client(sidecar.socket, engine_id="warm"):
        before, highest = private(), {}
        for _ in range(ROUNDS):
            for hostile in HOSTILE:
                hostile(sidecar)
                highest[hostile.__name__] = max(highest.get(hostile.__name__, 0), private() - before)
        until(lambda: private() - before < BOUND, f"the memory is given back; it was {highest}")
        assert max(highest.values()) < BOUND, highest
        assert sidecar.state() == "READY"
