"""Several stateless servers in front of one store, and what happens when either is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from servers import FAST, Node, ServerProcess, free_port, keys_of, redis_process, server_process, until

from maru_server.announce import Slabs
from maru_server.client import DirectoryClient
from maru_server.errors import BackendUnavailable, ServerRefused
from maru_server.lease import RegionLease
from maru_server.link_types import LinkConfig, LinkState
from maru_server.node import NodeLink
from maru_server.protocol import ErrorCode, Outcome
from maru_server.redis_backend import RedisBackend
from maru_shm.errors import MaruError


@pytest.fixture
def fronts(redis_url: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    extra = ("--prefix", "fronts-" + os.urandom(4).hex())
    with server_process(store=redis_url, extra=extra) as one, server_process(store=redis_url, extra=extra) as two:
        yield one, two


def test_what_one_front_registers_the_other_finds_and_guards(fronts: tuple[ServerProcess, ServerProcess]) -> None:
    a, b = Node(fronts[0].endpoint, "a"), Node(fronts[1].endpoint, "b")
    device = a.device(3)
    [of_a] = a.alloc(device=device, others=(b,))
    [of_b] = b.alloc(device=device, others=(a,))
    namespace, keys = os.urandom(16), keys_of(64)
    a.register(namespace, keys[:512], of_a)
    assert b.register(namespace, keys, of_b) == [Outcome.EXISTS] * 32 + [Outcome.REGISTERED] * 32
    assert len(b.client.pin(namespace, 0, keys, 2000)) == 64
    assert set(a.client.delete(namespace, 0, keys[:512])) == {Outcome.PINNED}
    a.client.close()
    b.client.close()


def test_two_fronts_never_grant_one_region_twice(fronts: tuple[ServerProcess, ServerProcess]) -> None:
    a, b = Node(fronts[0].endpoint, "a"), Node(fronts[1].endpoint, "b")
    device = a.device(41)
    granted = []
    for _ in range(10):
        granted += a.alloc(2, device=device, others=(b,)) + b.alloc(2, device=device, others=(a,))
    assert sorted(g.region for g in granted) == list(range(1, 41))
    assert len({g.token for g in granted}) == 40
    a.client.close()
    b.client.close()


def test_a_node_dead_to_one_front_is_dead_to_the_other(fronts: tuple[ServerProcess, ServerProcess]) -> None:
    a = Node(fronts[0].endpoint, "a")
    with DirectoryClient(fronts[1].endpoint) as other:
        assert [n.node for n in other.nodes()] == ["a"]
        until("the node is dead", lambda: other.nodes() == [])
    with pytest.raises(ServerRefused) as error:
        a.client.heartbeat()
    assert error.value.code is ErrorCode.NODE_DEAD
    a.client.close()


def test_a_restarted_front_keeps_the_epoch_and_everything_in_it(redis_url: str) -> None:
    extra = ("--prefix", "restart-" + os.urandom(4).hex())
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    front = ServerProcess(store=redis_url, listen=endpoint, extra=extra)
    node = Node(endpoint, "a")
    [grant] = node.alloc(device=node.device())
    namespace, keys = os.urandom(16), keys_of(5)
    node.register(namespace, keys, grant)
    epoch = node.client.epoch
    front.kill()
    with server_process(store=redis_url, listen=endpoint, extra=extra), DirectoryClient(endpoint) as client:
        assert client.epoch == epoch
        assert client.exists(namespace, 0, keys) == [True] * 5
    node.client.close()


def test_an_emptied_store_is_a_new_epoch_and_is_filled_again(tmp_path: Path) -> None:
    port = str(free_port())
    options = ("--port", port, "--bind", "127.0.0.1")
    namespace, keys = os.urandom(16), keys_of(50)

    def source(_region: RegionLease) -> Iterator[Slabs]:
        yield Slabs(namespace, 0, keys, np.arange(50, dtype=np.uint32), np.ones(50, np.uint64))

    with redis_process(tmp_path, *options):
        until("redis listens", lambda: _reachable(port))
        front = ServerProcess(store=f"redis://127.0.0.1:{port}")
        link = NodeLink(LinkConfig(front.endpoint, "n", timeout_ms=3000), source)
        link.add_device(os.urandom(16), 3, 4096)
        link.start()
        until("the link is ready", lambda: link.state is LinkState.READY)
        got: list[list[RegionLease] | MaruError] = []
        link.request_regions(1, got.append)
        until("a region is granted", lambda: got)
        assert isinstance(got[0], list)
        [region] = got[0]
        epoch = link.stats().epoch
    try:
        with DirectoryClient(front.endpoint, timeout_ms=10_000) as client:
            with pytest.raises(ServerRefused) as error:
                client.stats()
            assert error.value.code is ErrorCode.BACKEND
            with redis_process(tmp_path, *options):
                until("redis listens", lambda: _reachable(port))
                until("a new epoch is announced", lambda: link.stats().epoch > epoch and link.state is LinkState.READY)
                until("everything is found again", lambda: client.exists(namespace, 0, keys) == [True] * 50)
                until("the region may be written", region.writable)
                link.close()
    finally:
        link.close()
        front.stop()


def _reachable(port: str) -> bool:
    try:
        RedisBackend(FAST, f"redis://127.0.0.1:{port}", prefix="probe").close()
    except BackendUnavailable:
        return False
    return True


def test_a_store_that_is_not_there_is_named_without_its_password() -> None:
    with pytest.raises(BackendUnavailable, match=r"store 127\.0\.0\.1:1/0") as error:
        RedisBackend(FAST, "redis://:secret@127.0.0.1:1/0", timeout_s=0.5)
    assert "secret" not in str(error.value)
