"""What every backend does, asked over the wire. One suite, each backend in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from servers import FAST, Node, ServerProcess, keys_of, until

from maru_server.client import DirectoryClient, places_of
from maru_server.errors import ServerRefused
from maru_server.protocol import NOWHERE, ClaimVerdict, ErrorCode, GrantState, Mode, Outcome, Predecessor, Region


@pytest.fixture
def a(server: ServerProcess) -> Iterator[Node]:
    node = Node(server.endpoint, "a-" + os.urandom(4).hex())
    yield node
    node.client.close()


@pytest.fixture
def b(server: ServerProcess) -> Iterator[Node]:
    node = Node(server.endpoint, "b-" + os.urandom(4).hex())
    yield node
    node.client.close()


@pytest.fixture
def namespace() -> bytes:
    return os.urandom(16)


def refusal(error: pytest.ExceptionInfo[ServerRefused]) -> ErrorCode:
    return error.value.code


# --- register and lookup ---------------------------------------------------------------------------------------------------
def test_a_registered_key_is_found_with_its_device_region_slab_generation_and_node(a: Node, namespace: bytes) -> None:
    device = a.device()
    [grant] = a.alloc(device=device)
    keys = keys_of(3)
    assert a.register(namespace, keys, grant, first_slab=7, generation=9) == [Outcome.REGISTERED] * 3
    found = a.client.lookup(namespace, 0, keys)
    assert [tuple(p) for p in found.places] == [(grant.id, 7, 9), (grant.id, 8, 9), (grant.id, 9, 9)]
    info = found.grants[grant.id]
    assert (info.device, info.region, info.node, info.token) == (device, 1, a.name, grant.token)


def test_the_first_writer_wins_and_the_second_learns_where_the_slab_is(a: Node, b: Node, namespace: bytes) -> None:
    device = a.device()
    [first] = a.alloc(device=device)
    [second] = b.alloc(device=device, others=(a,))
    keys = keys_of(2)
    a.register(namespace, keys[:16], first)
    result = b.client.register(namespace, 0, keys, places_of(second.id, [0, 1], [1, 1]))
    assert result.outcomes == [Outcome.EXISTS, Outcome.REGISTERED]
    assert result.winners.grants[first.id].node == a.name
    assert tuple(result.winners.places[0]) == (first.id, 0, 1)


def test_registering_again_changes_nothing(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(4)
    assert a.register(namespace, keys, grant) == a.register(namespace, keys, grant) == [Outcome.REGISTERED] * 4
    assert [n for ns, _, n in a.client.tables() if ns == namespace] == [4]


def test_a_reused_slab_replaces_its_own_entry_unless_pinned(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    key = keys_of(1)
    a.register(namespace, key, grant, generation=1)
    assert a.register(namespace, key, grant, generation=2) == [Outcome.REGISTERED]
    pin = a.client.pin(namespace, 0, key, 2000).pin
    assert a.register(namespace, key, grant, generation=3) == [Outcome.EXISTS]
    a.client.unpin(pin)
    assert a.client.lookup(namespace, 0, key).places[0]["generation"] == 2


def test_a_node_cannot_register_slabs_of_a_region_it_does_not_hold(a: Node, b: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    assert b.register(namespace, keys_of(1), grant) == [Outcome.NOT_OWNER]
    assert a.client.register(namespace, 0, keys_of(1), places_of(4_000_000_000, [0], [1])).outcomes == [Outcome.NOT_OWNER]


def test_leading_lookup_stops_at_the_first_miss(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(5)
    a.register(namespace, keys[:32] + keys[48:], grant)
    assert len(a.client.lookup(namespace, 0, keys, mode=Mode.LEADING)) == 2
    found = a.client.lookup(namespace, 0, keys)
    assert [p.tobytes() == NOWHERE for p in found.places] == [False, False, True, False, False]
    assert a.client.exists(namespace, 0, keys) == [True, True, False, True, True]


def test_a_chunk_counts_only_when_every_rank_has_it(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(4)
    a.register(namespace, keys, grant, rank=0)
    a.register(namespace, keys[:48], grant, rank=1, first_slab=10)
    assert a.client.leading(namespace, 1, keys) == 4
    assert a.client.leading(namespace, 2, keys) == 3
    assert a.client.leading(namespace, 3, keys) == 0


def test_namespaces_do_not_see_each_other(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(1)
    a.register(namespace, keys, grant)
    assert a.client.exists(os.urandom(16), 0, keys) == [False]


def test_every_verb_takes_a_single_key_and_a_batch(a: Node) -> None:
    """What Maru has as a verb for one and another for many is one here: a batch of one."""
    namespace = os.urandom(16)
    [grant] = a.alloc(device=a.device())
    for n in (1, 7):
        keys = keys_of(n)
        assert a.client.exists(namespace, 0, keys) == [False] * n
        assert a.register(namespace, keys, grant, first_slab=n) == [Outcome.REGISTERED] * n
        assert a.client.exists(namespace, 0, keys) == [True] * n
        assert len(a.client.lookup(namespace, 0, keys)) == n
        pinned = a.client.pin(namespace, 0, keys, 2000)
        assert len(pinned) == n
        assert a.client.delete(namespace, 0, keys) == [Outcome.PINNED] * n
        assert a.client.unpin(pinned.pin) == n
        assert a.client.delete(namespace, 0, keys) == [Outcome.DELETED] * n
        assert a.client.exists(namespace, 0, keys) == [False] * n
    more = a.alloc(3, device=grant.device)
    assert (a.client.free(more), a.client.free([grant])) == (3, 1)


def test_stats_count_what_there_is_and_what_was_asked(a: Node) -> None:
    before = a.client.stats()
    [grant] = a.alloc(device=a.device())
    namespace, keys = os.urandom(16), keys_of(5)
    a.register(namespace, keys, grant)
    a.client.lookup(namespace, 0, keys)
    after = a.client.stats()

    def rise(name: str) -> float:
        return float(after[name]) - float(before.get(name, 0))

    assert {n: rise(n) for n in ("keys", "tables", "devices", "keys_registered_total")} == {
        "keys": 5, "tables": 1, "devices": 1, "keys_registered_total": 5,
    }  # fmt: skip
    assert rise("keys_looked_up_total") == rise("keys_found_total") == 5
    assert rise("ops.Register.requests") == rise("ops.Lookup.requests") == 1
    assert after["nodes"] >= 1
    assert a.client.epoch == after["epoch"]


def test_keys_asked_for_and_found_are_counted_whichever_verb_asks(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(6)
    a.register(namespace, keys[: 3 * 16] + keys[4 * 16 :], grant)  # the fourth is absent

    def counted(ask: Callable[[], object]) -> tuple[float, float]:
        before = a.client.stats()
        ask()
        after = a.client.stats()
        asked, found = (float(after[name]) - float(before[name]) for name in ("keys_looked_up_total", "keys_found_total"))
        return asked, found

    assert counted(lambda: a.client.lookup(namespace, 0, keys)) == (6, 5)
    assert counted(lambda: a.client.exists(namespace, 0, keys)) == (6, 5)
    assert counted(lambda: a.client.pin(namespace, 0, keys, 1000)) == (6, 3)
    assert counted(lambda: a.client.pin(namespace, 0, keys[3 * 16 :], 1000)) == (3, 0)
    assert counted(lambda: a.client.page(namespace, 0)) == (0, 0), "a listing asks for nothing"


def test_an_empty_batch_is_answered(a: Node, namespace: bytes) -> None:
    assert len(a.client.lookup(namespace, 0, b"")) == 0
    assert a.client.delete(namespace, 0, b"") == []
    assert a.client.pin(namespace, 0, b"", 100).pin == 0
    assert a.client.register(namespace, 0, b"", b"").outcomes == []


# --- pins and deletes ------------------------------------------------------------------------------------------------------
def test_a_batch_pin_stops_at_the_first_miss(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(40)
    a.register(namespace, keys[: 16 * 20] + keys[16 * 21 :], grant)
    pinned = a.client.pin(namespace, 0, keys, 2000)
    assert len(pinned) == 20
    assert a.client.delete(namespace, 0, keys[16 * 21 :]) == [Outcome.DELETED] * 19


def test_delete_is_refused_while_pinned_and_works_after(a: Node, b: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(2)
    a.register(namespace, keys, grant)
    first, second = b.client.pin(namespace, 0, keys[:16], 3000), b.client.pin(namespace, 0, keys[:16], 3000)
    assert a.client.delete(namespace, 0, keys) == [Outcome.PINNED, Outcome.DELETED]
    assert b.client.unpin(first.pin) == 1
    assert b.client.unpin(first.pin) == 0
    assert a.client.delete(namespace, 0, keys) == [Outcome.PINNED, Outcome.ABSENT]
    b.client.unpin(second.pin)
    assert a.client.delete(namespace, 0, keys) == [Outcome.DELETED, Outcome.ABSENT]
    assert a.client.exists(namespace, 0, keys) == [False, False]


def test_a_pin_ends_by_itself(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    key = keys_of(1)
    a.register(namespace, key, grant)
    a.client.pin(namespace, 0, key, 1000)
    assert a.client.delete(namespace, 0, key) == [Outcome.PINNED]

    def deleted() -> bool:
        a.client.heartbeat()
        return a.client.delete(namespace, 0, key) == [Outcome.DELETED]

    until("the pin ends", deleted)


def test_a_pin_longer_than_the_servers_maximum_is_granted_for_the_maximum(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    key = keys_of(1)
    a.register(namespace, key, grant)
    assert a.client.pin(namespace, 0, key, FAST.max_pin_ms + 1).pin_ms == FAST.max_pin_ms
    assert a.client.pin(namespace, 0, key, 1 << 60).pin_ms == FAST.max_pin_ms
    assert a.client.pin(namespace, 0, key, 1500).pin_ms == 1500
    assert a.client.pin(namespace, 0, keys_of(1), 1500).pin_ms == 0, "nothing was pinned"

    def deleted() -> bool:
        a.client.heartbeat()
        return a.client.delete(namespace, 0, key) == [Outcome.DELETED]

    until("the pins end", deleted)


def test_a_pin_is_ended_by_nobody_but_who_holds_it(server: ServerProcess, a: Node, b: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    key = keys_of(1)
    a.register(namespace, key, grant)
    pin = b.client.pin(namespace, 0, key, 3000).pin
    assert a.client.unpin(pin) == 0
    with DirectoryClient(server.endpoint) as observer, pytest.raises(ServerRefused) as error:
        observer.unpin(pin)
    assert refusal(error) is ErrorCode.NOT_A_NODE
    assert a.client.delete(namespace, 0, key) == [Outcome.PINNED]
    assert b.client.unpin(pin) == 1
    assert a.client.delete(namespace, 0, key) == [Outcome.DELETED]


def test_a_node_deletes_only_its_own_keys_and_an_observer_none_but_by_a_reset(
    server: ServerProcess, a: Node, b: Node, namespace: bytes
) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(1)
    a.register(namespace, keys, grant)
    assert b.client.delete(namespace, 0, keys) == [Outcome.NOT_OWNER]
    with DirectoryClient(server.endpoint) as observer:
        with pytest.raises(ServerRefused) as error:
            observer.delete(namespace, 0, keys)
        assert refusal(error) is ErrorCode.NOT_A_NODE
        assert a.client.exists(namespace, 0, keys) == [True]
        assert observer.reset(namespace) == 1


# --- regions ----------------------------------------------------------------------------------------------------------------
def test_allocation_fills_the_first_device_before_the_next(a: Node) -> None:
    first, second = a.device(3), a.device(3)
    assert [(g.device == first, g.region) for g in a.alloc(2, device=first)] == [(True, 1), (True, 2)]
    with pytest.raises(ServerRefused) as error:
        a.client.alloc("too-many", 1, device=first)
    assert refusal(error) is ErrorCode.NO_SPACE
    assert [(g.device == second, g.region) for g in a.alloc(1, device=second)] == [(True, 1)]


def test_allocation_is_all_or_none_and_idempotent(a: Node) -> None:
    device = a.device(4)
    a.alloc(1, device=device)
    with pytest.raises(ServerRefused) as error:
        a.client.alloc("op-3", 3, device=device)
    assert refusal(error) is ErrorCode.NO_SPACE
    assert a.alloc(2, device=device, op="op-2") == a.alloc(2, device=device, op="op-2")


def test_tokens_rise_with_every_grant(a: Node) -> None:
    device = a.device(9)
    tokens = [a.alloc(device=device)[0].token for _ in range(4)]
    assert tokens == sorted(set(tokens))


def test_a_freed_region_takes_its_keys_along_and_an_old_free_does_not_touch_the_new_grant(
    a: Node, b: Node, namespace: bytes
) -> None:
    device = a.device(2)
    [old] = a.alloc(device=device)
    keys = keys_of(3)
    a.register(namespace, keys, old)
    assert a.client.free([old]) == 1
    assert a.client.exists(namespace, 0, keys) == [False] * 3
    [new] = b.alloc(device=device, others=(a,))
    assert (new.region, new.token > old.token) == (old.region, True)
    assert a.client.free([old]) == 0
    assert b.register(namespace, keys, new) == [Outcome.REGISTERED] * 3


def test_a_freed_region_is_not_reused_while_a_reader_holds_a_pin(a: Node, b: Node, namespace: bytes) -> None:
    device = a.device(2)
    [grant] = a.alloc(device=device)
    keys = keys_of(1)
    a.register(namespace, keys, grant)
    pin = b.client.pin(namespace, 0, keys, 3000).pin
    a.client.free([grant])
    with pytest.raises(ServerRefused) as error:
        b.client.alloc("early", device=device)
    assert refusal(error) is ErrorCode.NO_SPACE
    b.client.unpin(pin)
    assert b.alloc(device=device, others=(a,))[0].region == grant.region


def test_a_device_of_another_shape_is_refused(a: Node, b: Node) -> None:
    device = a.device(4, 1 << 20)
    b.client.add_device(device, 4, 1 << 20, first=1)
    with pytest.raises(ServerRefused) as error:
        b.client.add_device(device, 4, 1 << 21, first=1)
    assert refusal(error) is ErrorCode.DEVICE_MISMATCH
    with pytest.raises(ServerRefused) as error:
        a.client.alloc("op", device=os.urandom(16))
    assert refusal(error) is ErrorCode.UNKNOWN_DEVICE


# --- death and return ---------------------------------------------------------------------------------------------------------
def test_a_silent_node_dies_its_pins_end_its_chunks_stay_readable_then_its_region_is_reused(
    a: Node, b: Node, namespace: bytes
) -> None:
    device = a.device(3)
    [of_a] = a.alloc(device=device)
    [of_b] = b.alloc(device=device, others=(a,))
    keys = keys_of(2)
    a.register(namespace, keys[:16], of_a)
    b.register(namespace, keys[16:], of_b)
    a.client.pin(namespace, 0, keys[16:], 3000)

    def state(region: int) -> str:
        b.client.heartbeat()
        return next((r.state for r in b.client.regions() if r.device == device.hex() and r.region == region), "free")

    until("a's region is orphaned", lambda: state(of_a.region) == GrantState.ORPHANED)
    assert b.client.delete(namespace, 0, keys[16:]) == [Outcome.DELETED]
    with pytest.raises(ServerRefused) as error:
        a.client.heartbeat()
    assert refusal(error) is ErrorCode.NODE_DEAD
    [again] = b.alloc(device=device)
    assert again.region == of_a.region
    assert again.token > of_a.token
    assert b.client.exists(namespace, 0, keys) == [False, False]


def test_an_orphaned_region_can_still_be_read(a: Node, b: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(2)
    a.register(namespace, keys, grant)
    a.client.leave()
    assert b.client.exists(namespace, 0, keys) == [True, True]
    assert b.client.lookup(namespace, 0, keys).grants[grant.id].state is GrantState.ORPHANED


def test_a_restarted_node_that_is_sure_claims_its_region_at_once_with_a_higher_token(
    server: ServerProcess, a: Node, namespace: bytes
) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(2)
    a.register(namespace, keys, grant)
    with DirectoryClient(server.endpoint, node=a.name, incarnation=2, predecessor=Predecessor.ENDED) as successor:
        [claim] = successor.claim([Region(grant.device, grant.region, grant.token)])
        assert claim.verdict is ClaimVerdict.GRANTED
        assert claim.grant is not None
        assert (claim.grant.id, claim.grant.token > grant.token) == (grant.id, True)
        assert successor.exists(namespace, 0, keys) == [True, True]


def test_a_restarted_node_that_is_not_sure_waits_until_its_predecessors_lease_is_over(server: ServerProcess, a: Node) -> None:
    [grant] = a.alloc(device=a.device())
    with DirectoryClient(server.endpoint, node=a.name, incarnation=2) as successor:
        region = Region(grant.device, grant.region, grant.token)
        assert successor.claim([region])[0].verdict is ClaimVerdict.WAIT
        with pytest.raises(ServerRefused) as error:
            a.client.alloc("from-the-past")
        assert refusal(error) is ErrorCode.STALE_INCARNATION

        def claimed() -> bool:
            successor.heartbeat()
            return successor.claim([region])[0].verdict is ClaimVerdict.GRANTED

        until("the claim is granted", claimed)


def test_an_older_incarnation_cannot_join(server: ServerProcess, a: Node) -> None:
    with pytest.raises(ServerRefused) as error:
        DirectoryClient(server.endpoint, node=a.name, incarnation=0)
    assert refusal(error) is ErrorCode.STALE_INCARNATION


def test_a_region_that_went_to_another_node_is_lost_to_the_first(a: Node, b: Node) -> None:
    device = a.device(2)
    [old] = a.alloc(device=device)
    a.client.free([old])
    [new] = b.alloc(device=device, others=(a,))
    assert a.client.claim([Region(device, old.region, old.token)])[0].verdict is ClaimVerdict.LOST
    b.client.free([new])
    until("the region is free", lambda: not any(r.device == device.hex() for r in b.client.regions()))
    with DirectoryClient(a.client.connection.endpoint, node=a.name, incarnation=5) as later:
        assert later.claim([Region(device, old.region, old.token)])[0].verdict is ClaimVerdict.LOST


# --- views --------------------------------------------------------------------------------------------------------------------
def test_keys_are_listed_in_pages_that_together_are_the_table(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    keys = keys_of(500)
    a.register(namespace, keys, grant)
    listed, after = b"", b""
    while True:
        page = a.client.page(namespace, 0, after, 64)
        listed += page.keys
        after = page.keys[-16:]
        assert len(page.places) == len(page.keys)
        if not page.more:
            break
    assert [listed[i : i + 16] for i in range(0, len(listed), 16)] == sorted(keys[i : i + 16] for i in range(0, len(keys), 16))


def test_usage_counts_keys_and_bytes_by_node_device_and_namespace(a: Node, namespace: bytes) -> None:
    device = a.device(3, 1 << 20)
    [grant] = a.alloc(device=device)
    keys = keys_of(5)
    a.register(namespace, keys, grant)
    a.client.delete(namespace, 0, keys[:16])
    rows = {(r.kind, r.name): r for r in a.client.usage()}
    assert (rows["device", device.hex()].keys, rows["device", device.hex()].capacity_bytes) == (4, 2 << 20)
    assert (rows["node", a.name].regions, rows["node", a.name].bytes) == (1, 4000)
    assert rows["namespace", namespace.hex()].keys == 4


def test_bytes_are_known_from_the_first_publication_though_the_region_was_granted_before(a: Node, namespace: bytes) -> None:
    device = a.device()
    op = os.urandom(8).hex()
    a.alloc(device=device)  # waits out the hold
    [grant] = a.client.alloc(op, device=device)  # its slab size is not known yet

    def used() -> set[int]:
        [region] = [r.bytes for r in a.client.regions() if (r.device, r.region) == (device.hex(), grant.region)]
        [row] = [r.bytes for r in a.client.usage() if (r.kind, r.name) == ("device", device.hex())]
        return {region, row}

    keys = keys_of(3)
    a.client.register(namespace, 0, keys, places_of(grant.id, [0, 1, 2], [1, 1, 1]), slab_bytes=8192)
    assert used() == {3 * 8192}
    a.client.register(namespace, 0, keys, places_of(grant.id, [0, 1, 2], [2, 2, 2]), slab_bytes=4096)
    assert used() == {3 * 4096}, "the region was laid out anew"
    a.client.register(namespace, 0, keys[:16], places_of(grant.id, [0], [3]))
    assert used() == {3 * 4096}, "no size says nothing"
    assert a.client.lookup(namespace, 0, keys).grants[grant.id].slab_bytes == 4096


def test_reset_of_a_namespace_forgets_its_unpinned_keys_only(a: Node, namespace: bytes) -> None:
    other = os.urandom(16)
    [grant] = a.alloc(device=a.device())
    keys, others = keys_of(3), keys_of(1)
    a.register(namespace, keys, grant)
    a.register(other, others, grant, first_slab=10)
    a.client.pin(namespace, 0, keys[:16], 2000)
    assert a.client.reset(namespace) == 2
    assert a.client.exists(namespace, 0, keys) == [True, False, False]
    assert a.client.exists(other, 0, others) == [True]


def test_ended_regions_are_swept_out_of_the_tables(a: Node, namespace: bytes) -> None:
    [grant] = a.alloc(device=a.device())
    a.register(namespace, keys_of(300), grant)
    a.client.free([grant])

    def swept() -> bool:
        a.client.heartbeat()
        return not any(ns == namespace for ns, _, _ in a.client.tables())

    until("the keys are gone", swept)


def test_nodes_are_listed_with_their_regions(a: Node) -> None:
    a.alloc(2, device=a.device())
    [row] = [n for n in a.client.nodes() if n.node == a.name]
    assert (row.incarnation, row.regions, row.state) == (1, 2, "alive")
