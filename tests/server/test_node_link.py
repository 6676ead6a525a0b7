"""A node's standing link through restarts, deaths and namesakes of the server and itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from servers import Node, ServerProcess, free_port, keys_of, until

from maru_server import protocol as P
from maru_server.announce import Slabs
from maru_server.client import DirectoryClient
from maru_server.errors import ServerRefused
from maru_server.lease import RegionLease
from maru_server.link_types import LinkConfig, LinkState
from maru_server.node import NodeLink
from maru_shm.errors import MaruError


class Pool:
    """The slabs a node would find in its memory, by region index."""

    def __init__(self) -> None:
        self.namespace = os.urandom(16)
        self.keys: dict[int, bytes] = {}

    def source(self, region: RegionLease) -> Iterator[Slabs]:
        if keys := self.keys.get(region.region):
            n = len(keys) // 16
            yield Slabs(self.namespace, 0, keys, np.arange(n, dtype=np.uint32), np.ones(n, np.uint64))


class LinkedNode:
    def __init__(self, endpoint: str, name: str = "n1", **config: object) -> None:
        self.pool = Pool()
        self.link = NodeLink(LinkConfig(endpoint, name, timeout_ms=1000, **config), self.pool.source)  # type: ignore[arg-type]
        self.device = os.urandom(16)
        self.link.add_device(self.device, 5, 1 << 20)
        self.link.start()

    def ready(self) -> None:
        until("the link is ready", lambda: self.link.state is LinkState.READY)

    def region(self, device: bytes = b"") -> RegionLease:
        got: list[list[RegionLease] | MaruError] = []
        self.link.request_regions(1, got.append, device=device or self.device, slab_bytes=100, timeout_ms=20_000)
        until("a region is granted", lambda: got)
        assert isinstance(got[0], list), got[0]
        return got[0][0]

    def store(self, region: RegionLease, n: int) -> bytes:
        """Put n slabs into the region and publish them."""
        before = self.link.stats().keys_announced
        self.pool.keys[region.region] = keys = keys_of(n)
        assert self.link.publish(region, next(self.pool.source(region)))
        until("the slabs are published", lambda: self.link.stats().keys_announced == before + n)
        return keys


@pytest.fixture
def node(memory_server: ServerProcess) -> Iterator[LinkedNode]:
    node = LinkedNode(memory_server.endpoint)
    node.ready()
    yield node
    node.link.close()


def found(endpoint: str, namespace: bytes, keys: bytes) -> int:
    with DirectoryClient(endpoint) as client:
        return sum(sum(client.exists(namespace, 0, keys[i : i + 131_072])) for i in range(0, len(keys), 131_072))


def test_published_slabs_are_found_and_withdrawn_ones_are_not(memory_server: ServerProcess, node: LinkedNode) -> None:
    region = node.region()
    region.check()
    keys = node.store(region, 10)
    assert found(memory_server.endpoint, node.pool.namespace, keys) == 10
    answers: list[object] = []
    node.link.withdraw(node.pool.namespace, 0, keys[:64], answers.append)
    until("the withdrawal is answered", lambda: answers)
    assert found(memory_server.endpoint, node.pool.namespace, keys) == 6


def test_questions_are_answered_by_callback(node: LinkedNode) -> None:
    region = node.region()
    keys = node.store(region, 3)
    answers: list[object] = []
    assert node.link.submit(P.Lookup(node.pool.namespace, 0, keys), answers.append)
    until("the answer is there", lambda: answers)
    assert isinstance(answers[0], P.Places)
    assert answers[0].grants[0].node == "n1"


def test_what_the_server_refuses_is_counted_logged_once_and_shown_until_it_is_refused_no_more(
    node: LinkedNode, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[object] = []

    def ask(message: P.Request) -> object:
        n = len(answers)
        assert node.link.submit(message, answers.append)
        until("it is answered", lambda: len(answers) > n)
        return answers[n]

    for _ in range(3):
        assert isinstance(ask(P.Pin(b"short", 0, keys_of(1), 100)), ServerRefused)
    stats = node.link.stats()
    assert (stats.state, stats.refused, stats.error_stands) == (LinkState.READY, 3, True)
    assert stats.last_error.startswith("the metadata server refused Pin: namespace of 5 bytes")
    assert isinstance(ask(P.Unpin(1)), P.Ok)
    assert node.link.stats().error_stands, "another verb proves nothing"
    assert isinstance(ask(P.Pin(node.pool.namespace, 0, keys_of(1), 100)), P.Places)
    stats = node.link.stats()
    assert (stats.refused, stats.error_stands) == (3, False)
    assert "refused Pin" in stats.last_error, "still told as what was wrong"
    assert [r.getMessage() for r in caplog.records].count(stats.last_error) == 1


def test_a_device_that_the_server_does_not_take_is_told_for_as_long_as_the_session_lasts(node: LinkedNode) -> None:
    node.link.add_device(node.device, 6, 1 << 20)
    until("the refusal is known", lambda: node.link.stats().error_stands)
    stats = node.link.stats()
    assert stats.last_error.startswith("the metadata server refused AddDevice: ")
    assert stats.refused == 1


def test_a_full_pool_is_no_error(node: LinkedNode) -> None:
    for _ in range(4):
        node.region()
    got: list[object] = []
    node.link.request_regions(1, got.append, device=node.device, timeout_ms=1)
    until("it is answered", lambda: got)
    assert isinstance(got[0], ServerRefused)
    stats = node.link.stats()
    assert (stats.refused, stats.error_stands, stats.last_error) == (0, False, "")
    assert "0 free" in stats.regions_refused


def test_the_lease_is_renewed_without_a_break_while_the_server_answers(node: LinkedNode) -> None:
    region = node.region()
    token = region.token
    start = node.link.lease.deadline_ns
    until("two lease times have passed", lambda: node.link.lease.deadline_ns > start + 4_000_000_000)
    region.check()
    assert (region.token, node.link.lease.term) == (token, 1)


@pytest.mark.parametrize("how", ["killed", "stopped in order"])
def test_a_restarted_server_learns_everything_again_and_writing_never_stops(how: str) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    server = ServerProcess(listen=endpoint)
    node = LinkedNode(endpoint)
    try:
        node.ready()
        region = node.region()
        keys = node.store(region, 100_000)
        epoch, token = node.link.stats().epoch, region.token
        server.kill() if how == "killed" else server.stop()
        server = ServerProcess(listen=endpoint)
        until("a new epoch is announced", lambda: node.link.stats().epoch > epoch and node.link.state is LinkState.READY)
        assert found(endpoint, node.pool.namespace, keys) == 100_000
        region.check()
        assert (region.token, node.link.lease.term) == (token, 1)
        with DirectoryClient(endpoint) as client:
            until("the hold is over", lambda: client.stats()["hold"] == 0)
        second = node.region()
        assert second.token > token
    finally:
        node.link.close()
        server.stop()


def test_while_the_server_is_away_nothing_waits_and_writing_ends_with_the_lease() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    server = ServerProcess(listen=endpoint)
    node = LinkedNode(endpoint)
    try:
        node.ready()
        region = node.region()
        server.kill()
        until("the lease ends", lambda: not region.writable())
        until("the link notices", lambda: node.link.state is LinkState.CONNECTING)
        assert not node.link.submit(P.GetStats(), lambda _: None)
        node.pool.keys[region.region] = keys = keys_of(5)
        assert node.link.publish(region, next(node.pool.source(region)))
        server = ServerProcess(listen=endpoint)
        until("the link is back", lambda: node.link.state is LinkState.READY)
        until("what was published meanwhile is found", lambda: found(endpoint, node.pool.namespace, keys) == 5)
        assert not region.writable() or node.link.lease.term == 2
        until("the claim is confirmed after the hold", region.writable)
    finally:
        node.link.close()
        server.stop()


def test_a_full_queue_is_said_at_once_and_made_up_for_later(memory_server: ServerProcess) -> None:
    node = LinkedNode(memory_server.endpoint, queue_max=4)
    try:
        node.ready()
        region = node.region()
        node.pool.keys[region.region] = keys = keys_of(500)
        [slabs] = node.pool.source(region)
        refused = False
        for i in range(500):
            one = Slabs(slabs.namespace, 0, keys[i * 16 : i * 16 + 16], slabs.slabs[i : i + 1], slabs.generations[i : i + 1])
            refused = not node.link.publish(region, one) or refused
        assert refused
        assert node.link.stats().dropped > 0
        until("all are found", lambda: found(memory_server.endpoint, node.pool.namespace, keys) == 500)
    finally:
        node.link.close()


def test_an_orderly_end_frees_the_name_and_leaves_the_chunks_readable(memory_server: ServerProcess, node: LinkedNode) -> None:
    region = node.region()
    keys = node.store(region, 3)
    node.link.close()
    assert not region.writable()
    assert node.link.state is LinkState.STOPPED
    with DirectoryClient(memory_server.endpoint) as client:
        assert client.nodes() == []
        assert client.exists(node.pool.namespace, 0, keys) == [True] * 3


def test_a_newer_process_under_the_same_name_ends_the_older_link(memory_server: ServerProcess, node: LinkedNode) -> None:
    region = node.region()
    successor = LinkedNode(memory_server.endpoint)
    try:
        until("the older link ends", lambda: node.link.state is LinkState.SUPERSEDED)
        assert not region.writable()
        assert not node.link.submit(P.GetStats(), lambda _: None)
        successor.ready()
    finally:
        successor.link.close()


def test_two_nodes_share_what_one_has_stored(memory_server: ServerProcess, node: LinkedNode) -> None:
    region = node.region()
    keys = node.store(region, 8)
    other = Node(memory_server.endpoint, "n2")
    pinned = other.client.pin(node.pool.namespace, 0, keys, 1000)
    assert len(pinned) == 8
    assert pinned.grants[region.grant].node == "n1"
    answers: list[object] = []
    node.link.withdraw(node.pool.namespace, 0, keys, answers.append)
    until("the withdrawal is answered", lambda: answers)
    assert isinstance(answers[0], P.Outcomes)
    assert set(answers[0].codes) == {P.Outcome.PINNED}
    other.client.close()


def test_a_given_back_region_is_not_written_and_its_slabs_are_not_found(memory_server: ServerProcess, node: LinkedNode) -> None:
    region = node.region()
    keys = node.store(region, 3)
    node.link.free_region(region)
    assert not region.writable()
    until("the slabs are not found", lambda: found(memory_server.endpoint, node.pool.namespace, keys) == 0)


def test_an_ended_link_refuses_everything_at_once(node: LinkedNode) -> None:
    region = node.region()
    node.pool.keys[region.region] = keys_of(1)
    node.link.close()
    node.link.close()
    assert not node.link.publish(region, next(node.pool.source(region)))
    assert not node.link.withdraw(node.pool.namespace, 0, keys_of(1))
    got: list[list[RegionLease] | MaruError] = []
    node.link.request_regions(1, got.append)
    assert isinstance(got[0], MaruError)
