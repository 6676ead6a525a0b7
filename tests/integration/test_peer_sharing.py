"""Two sidecars on one shared pool: what either stored, engines of both load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from tests.server.servers import ServerProcess
from tests.support.client import Client, blocks_table, prompt_keys
from tests.support.shared_sidecars import (
    SharedEngine,
    SharedSidecar,
    shared_pool,
    start_engine,
    start_server,
    start_sidecar,
)
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import messages as M


@dataclass
class Pair:
    server: ServerProcess
    a: SharedSidecar
    b: SharedSidecar
    engine_a: SharedEngine
    engine_b: SharedEngine


@pytest.fixture
def pair() -> Iterator[Pair]:
    with shared_pool() as path, contextlib.ExitStack() as stack:
        server = start_server(stack)
        a = start_sidecar(stack, path, server.endpoint, "a")
        b = start_sidecar(stack, path, server.endpoint, "b")
        yield Pair(server, a, b, start_engine(stack, a), start_engine(stack, b))


def test_an_engine_loads_what_an_engine_of_another_sidecar_stored(pair: Pair) -> None:
    keys, source, target = prompt_keys("shared", 6), blocks_table(0, 6), blocks_table(32, 6)
    pair.engine_a.cache.fill(1)
    assert pair.engine_a.store(keys, source).n_done == 6
    pair.a.wait_until_published(6)
    loaded = pair.engine_b.fetch(keys, target)
    assert (loaded.state, loaded.n_done) == (L.State.DONE, 6)
    np.testing.assert_array_equal(pair.engine_b.cache.read(target), pair.engine_a.cache.read(source))
    assert pair.b.sharing()["chunks_found"] == 6


def test_a_prefix_made_of_chunks_of_both_sidecars_is_one_hit_on_either(pair: Pair) -> None:
    keys = prompt_keys("both", 6)
    for engine in (pair.engine_a, pair.engine_b):
        engine.cache.fill(7)  # the same prompt: the same bytes
    wanted = pair.engine_a.cache.read(blocks_table(0, 6))
    pair.engine_a.worker.store(keys[:32], blocks_table(0, 2))
    pair.engine_b.worker.store(keys[32:64], blocks_table(8, 2), depth=2, parent=keys[16:32])
    pair.engine_a.worker.store(keys[64:], blocks_table(16, 2), depth=4, parent=keys[48:64])
    pair.a.wait_until_published(4)
    pair.b.wait_until_published(2)
    for engine in (pair.engine_a, pair.engine_b):
        engine.cache.fill(8)
        assert engine.fetch(keys, blocks_table(32, 6)).n_done == 6
        np.testing.assert_array_equal(engine.cache.read(blocks_table(32, 6)), wanted)


def test_a_burst_larger_than_the_regions_in_stock_is_stored_whole() -> None:
    with shared_pool(16 << 20, 1 << 20) as path, contextlib.ExitStack() as stack:  # a region: 21 slabs; one spare at a time
        a = start_sidecar(stack, path, start_server(stack).endpoint, "a")
        engine = SharedEngine(a, blocks=400)
        stack.callback(engine.close)
        stored = engine.store(prompt_keys("burst", 100), blocks_table(0, 100))
        assert (stored.state, stored.n_done) == (L.State.DONE, 100), stored
        a.wait_until_published(100)
        assert engine.hits(prompt_keys("burst", 100)) == 100


def test_a_lookup_of_what_nobody_has_is_answered_by_the_server_as_a_miss(pair: Pair) -> None:
    assert pair.engine_b.hits(prompt_keys("unknown", 4)) == 0
    assert pair.b.sharing()["lookups_asked"] == 1


def test_a_chunk_that_its_sidecar_dropped_is_found_no_more(pair: Pair) -> None:
    keys = prompt_keys("dropped", 3)
    pair.engine_a.store(keys, blocks_table(0, 3))
    pair.a.wait_until_published(3)
    assert pair.engine_b.hits(keys) == 3
    pair.a.ask(M.CacheClear())
    until(lambda: pair.a.sharing()["slabs_withdrawn"] == 3, "the chunks were withdrawn")
    until(lambda: pair.engine_b.hits(keys) == 0, "the other sidecar misses")


def test_a_leased_slab_that_is_reused_before_the_load_is_a_miss_from_there_on(pair: Pair) -> None:
    keys, others = prompt_keys("reused", 3), prompt_keys("usurper", 3)
    pair.engine_a.cache.fill(3)
    pair.engine_a.store(keys, blocks_table(0, 3))
    pair.a.wait_until_published(3)
    ticket, reply = pair.engine_b.lookup(keys)
    assert reply.n_done == 3
    pair.a.ask(M.CacheClear())
    pair.engine_a.store(others, blocks_table(12, 3))
    before = pair.engine_b.cache.memory.copy()
    loaded = pair.engine_b.load(ticket, keys, blocks_table(0, 3))
    pair.engine_b.scheduler.release(ticket)
    assert (loaded.state, loaded.code, loaded.n_done) == (L.State.FAILED, L.Code.NOT_FOUND, 0)
    np.testing.assert_array_equal(pair.engine_b.cache.memory, before)


def test_a_key_withdrawn_while_pinned_is_published_where_it_lies_now_when_the_pin_ends(pair: Pair) -> None:
    keys = prompt_keys("stuck", 2)
    pair.engine_a.store(keys, blocks_table(0, 2))
    pair.a.wait_until_published(2)
    ticket, reply = pair.engine_b.lookup(keys)
    assert reply.n_done == 2
    pair.a.ask(M.CacheClear())
    until(lambda: pair.a.sharing()["slabs_withdrawn"] == 2, "the chunks were withdrawn")
    pair.engine_a.store(keys, blocks_table(4, 2))  # the server still names the old slabs: they are pinned
    pair.engine_b.scheduler.release(ticket)
    until(lambda: pair.engine_b.hits(keys) == 2, "the new slabs are found")


def test_a_load_without_the_lookups_lease_finds_nothing_of_other_sidecars(pair: Pair) -> None:
    keys = prompt_keys("lease", 2)
    pair.engine_a.store(keys, blocks_table(0, 2))
    pair.a.wait_until_published(2)
    assert pair.engine_b.worker.load(keys, blocks_table(0, 2)).code == L.Code.NOT_FOUND


def test_more_regions_are_granted_as_the_cache_grows_and_given_back_when_it_is_cleared(pair: Pair) -> None:
    stored = 0
    while pair.a.sharing()["regions"] < 4 and stored < 400:  # 15 slabs each time; a region of 4 MiB holds 84
        stored += pair.engine_a.store(prompt_keys(f"grow {stored}", 15), blocks_table(0, 15)).n_done
    assert pair.a.sharing()["regions"] >= 4
    assert len(pair.a.chunks()) > 84
    pair.a.ask(M.CacheClear())
    until(lambda: pair.a.sharing()["regions"] <= 2, "the empty ones are given back")


def test_the_ranks_of_an_engine_load_their_own_slabs(pair: Pair) -> None:
    keys, source, target = prompt_keys("ranks", 3), blocks_table(0, 3), blocks_table(20, 3)
    with contextlib.ExitStack() as stack:
        stored = []
        for rank in range(2):
            worker = stack.enter_context(Client(pair.a.socket, engine_id="two", rank=rank, world=2))
            assert worker.cache is not None
            worker.cache.fill(50 + rank)
            worker.store(keys, source)
            stored.append(worker.cache.read(source))
        pair.a.wait_until_published(6)
        readers = [stack.enter_context(Client(pair.b.socket, engine_id="two", rank=r, world=2)) for r in range(2)]
        scheduler = stack.enter_context(Client(pair.b.socket, role=L.Role.SCHEDULER, engine_id="two", world=2))
        ticket, reply = scheduler.lookup(keys)
        assert reply.n_done == 3
        for rank, reader in enumerate(readers):
            posted = reader.post(L.Op.LOAD, keys, target, lease=ticket, lease_session=scheduler.attached.session)
            assert reader.finish(posted).n_done == 3
            assert reader.cache is not None
            np.testing.assert_array_equal(reader.cache.read(target), stored[rank])
        scheduler.release(ticket)


def test_the_pins_of_an_engine_that_goes_away_are_given_back(pair: Pair) -> None:
    keys = prompt_keys("gone", 2)
    pair.engine_a.store(keys, blocks_table(0, 2))
    pair.a.wait_until_published(2)
    _, reply = pair.engine_b.lookup(keys)
    assert reply.n_done == 2
    assert pair.b.sharing()["foreign_leases"] == 1
    pair.engine_b.scheduler.close()
    until(lambda: pair.b.sharing()["foreign_leases"] == 0, "the lease has ended with its session")


def test_a_located_hit_with_slabs_of_another_sidecar_is_not_to_be_read_by_the_client_itself(pair: Pair) -> None:
    keys = prompt_keys("located", 3)
    pair.engine_a.store(keys, blocks_table(0, 3))
    pair.a.wait_until_published(3)
    for engine, own in ((pair.engine_a, True), (pair.engine_b, False)):
        ticket = engine.scheduler.post(L.Op.LOCATE, keys)
        reply = engine.scheduler.wait(ticket)
        refs = engine.scheduler.records.slab_refs(ticket, reply.n_done)
        engine.scheduler.release(ticket)
        assert reply.n_done == 3
        assert bool(refs.all()) is own
        assert bool(refs.any()) is own
