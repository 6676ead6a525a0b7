"""Grants after the directory was lost, and other rules that need many steps of time: the state machine alone, its clock in
hand.
"""

from __future__ import annotations

import os

import pytest

from maru_server import protocol as P
from maru_server.cluster import Cluster, member_key
from maru_server.cluster_state import ClusterState, Observer, Settings
from maru_server.errors import ServerRefused
from maru_server.protocol import ClaimVerdict, ErrorCode, GrantState, Region

MS = 1_000_000
TIMES = Settings(lease_ms=1000, grace_ms=100, reap_ms=5000, max_pin_ms=2000)
DEVICE = os.urandom(16)


class World:
    """A cluster, its observer and a hand-driven clock."""

    def __init__(self, state: ClusterState | None = None) -> None:
        self.cluster = Cluster(state or ClusterState.new(), TIMES)
        self.observer = Observer()
        self.now = 0
        self.beats: dict[str, int] = {}
        self.readers: set[int] = set()

    def join(self, node: str, incarnation: int = 1) -> str:
        key = self.cluster.join(P.Hello(1, 1, "test", node, incarnation))
        self.cluster.add_device(P.AddDevice(DEVICE, 5, 1 << 20, 1))
        return key

    def run(self, ms: int, *alive: str) -> list[str]:
        ended = []
        for _ in range(ms // 10):
            self.now += 10 * MS
            for member in alive:
                self.beats[member] = self.beats.get(member, 0) + 1
            due = self.cluster.due(self.observer, self.beats, self.now, lambda g: g in self.readers)
            ended += self.cluster.apply(due)
        return ended

    def alloc(self, member: str, count: int = 1) -> list[P.GrantInfo]:
        return self.cluster.alloc(member, P.AllocRegions(os.urandom(4).hex(), count))

    def claim(self, member: str, region: int, token: int) -> P.ClaimResult:
        return self.cluster.claim(member, P.ClaimRegions([Region(DEVICE, region, token)]))[0]


def test_nothing_is_granted_until_leases_of_the_epoch_before_must_be_over() -> None:
    w = World()
    a = w.join("a")
    w.run(TIMES.silence_ms - 20, a)
    with pytest.raises(ServerRefused) as error:
        w.alloc(a)
    assert error.value.code is ErrorCode.HOLDING
    assert error.value.retry_ms > 0
    w.run(40, a)
    assert w.alloc(a)[0].state is GrantState.GRANTED


def test_of_two_claims_of_a_region_the_later_grant_wins_whatever_the_order() -> None:
    for order in ((100, 200), (200, 100)):
        w = World()
        nodes = {100: w.join("old"), 200: w.join("new")}
        verdicts = {token: w.claim(nodes[token], 2, token).verdict for token in order}
        assert verdicts[200] is ClaimVerdict.PROVISIONAL
        w.run(TIMES.silence_ms + 20, *nodes.values())
        assert w.claim(nodes[200], 2, 200).verdict is ClaimVerdict.GRANTED
        assert w.claim(nodes[100], 2, 100).verdict is ClaimVerdict.LOST


def test_a_claim_keeps_its_token_during_the_hold_and_new_grants_get_higher_ones() -> None:
    w = World()
    a = w.join("a")
    far = w.cluster.state.next_token + 10**6  # a token from a server whose clock was ahead
    claimed = w.claim(a, 1, far).grant
    assert claimed is not None
    assert claimed.token == far
    w.run(TIMES.silence_ms + 20, a)
    assert all(g.token > far for g in w.alloc(a, 2))


def test_tokens_and_epochs_rise_from_one_epoch_to_the_next_even_if_the_clock_went_back() -> None:
    first = ClusterState.new()
    later = ClusterState.new(after_epoch=first.epoch + 10_000)
    assert later.epoch > first.epoch + 10_000
    assert later.next_token > first.next_token + 1_000_000


def test_a_claim_of_a_free_region_after_the_hold_gets_a_new_token_unless_it_was_granted_since() -> None:
    w = World()
    a, b = w.join("a"), w.join("b")
    w.run(TIMES.silence_ms + 20, a, b)
    result = w.claim(a, 3, 7)
    assert result.verdict is ClaimVerdict.GRANTED
    assert result.grant is not None
    assert result.grant.token > 7
    w.cluster.free(a, [Region(DEVICE, 3, result.grant.token)])
    w.run(50, a, b)
    assert w.claim(b, 3, 7).verdict is ClaimVerdict.LOST


def test_a_member_dies_after_lease_and_grace_of_silence_and_not_before() -> None:
    w = World()
    a, b = w.join("a"), w.join("b")
    assert w.run(TIMES.silence_ms - 20, a) == []
    assert w.run(40, a) == [b]


def test_an_observer_that_starts_late_waits_the_whole_time() -> None:
    w = World()
    a = w.join("a")
    w.run(TIMES.silence_ms - 20)
    w.observer = Observer()
    assert w.run(TIMES.silence_ms - 20) == []
    assert w.run(40) == [a]


def test_a_region_goes_round_granted_orphaned_draining_free() -> None:
    w = World()
    a, b = w.join("a"), w.join("b")
    w.run(TIMES.silence_ms + 20, a, b)
    [grant] = w.alloc(a)

    def state() -> GrantState | None:
        g = w.cluster.state.grants.get(grant.id)
        return g.state if g else None

    w.readers = {grant.id}
    w.run(TIMES.silence_ms + 20, b)
    assert state() is GrantState.ORPHANED
    assert w.cluster.readable.has(grant.id)
    w.run(TIMES.reap_ms, b)
    assert state() is GrantState.DRAINING
    assert not w.cluster.readable.has(grant.id)
    w.run(1000, b)
    assert state() is GrantState.DRAINING
    w.readers = set()
    w.run(20, b)
    assert state() is None
    assert w.alloc(b)[0].region == grant.region


def test_a_reader_that_never_lets_go_holds_a_region_no_longer_than_the_longest_pin() -> None:
    w = World()
    a = w.join("a")
    w.run(TIMES.silence_ms + 20, a)
    [grant] = w.alloc(a)
    w.readers = {grant.id}
    w.cluster.free(a, [Region(DEVICE, grant.region, grant.token)])
    w.run(TIMES.max_pin_ms, a)
    assert grant.id in w.cluster.state.grants
    w.run(TIMES.grace_ms + 50, a)
    assert grant.id not in w.cluster.state.grants


def test_only_a_window_of_operations_is_remembered() -> None:
    w = World()
    a = w.join("a")
    w.run(TIMES.silence_ms + 20, a)
    for _ in range(30):
        [grant] = w.alloc(a)
        w.cluster.free(a, [Region(DEVICE, grant.region, grant.token)])
        w.run(20, a)
    assert len(w.cluster.state.members[member_key("a", 1)].ops) == 16


def test_a_node_name_cannot_be_joined_by_an_incarnation_that_was_declared_dead() -> None:
    w = World()
    w.join("a", 5)
    w.run(TIMES.silence_ms + 20)
    with pytest.raises(ServerRefused) as error:
        w.join("a", 5)
    assert error.value.code is ErrorCode.NODE_DEAD
    with pytest.raises(ServerRefused) as error:
        w.join("a", 4)
    assert error.value.code is ErrorCode.STALE_INCARNATION
    w.join("a", 6)
