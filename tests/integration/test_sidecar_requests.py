"""Requests of well-behaved engines: what is stored is found and comes back byte for byte, on every path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.client import Client, KvCache, admin, blocks_table, prompt_keys
from tests.support.engine_process import EngineProcess
from tests.support.sidecar_process import SidecarProcess, running_sidecar
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.errors import RingFull


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarProcess]:
    with running_sidecar() as process:
        yield process


@pytest.fixture(autouse=True)
def empty_cache(sidecar: SidecarProcess) -> None:
    admin(sidecar.socket, M.CacheClear())


@pytest.fixture
def worker(sidecar: SidecarProcess) -> Iterator[Client]:
    with Client(sidecar.socket) as client:
        yield client
        client.detach()


@pytest.fixture
def scheduler(sidecar: SidecarProcess, worker: Client) -> Iterator[Client]:
    with Client(sidecar.socket, role=L.Role.SCHEDULER) as client:
        yield client
        client.detach()


def section(sidecar: SidecarProcess, name: str) -> Any:
    answer = sidecar.ask(M.GetStatus())
    assert isinstance(answer, M.Status)
    return answer.sections[name]


def test_a_stored_prefix_is_found_and_loads_the_same_bytes_into_other_blocks(worker: Client, scheduler: Client) -> None:
    assert worker.cache is not None
    worker.cache.fill(1)
    keys, source, target = prompt_keys("a", 5), blocks_table(0, 5), blocks_table(32, 5)
    wanted = worker.cache.read(source)
    assert scheduler.hits(keys) == 0
    stored = worker.store(keys, source)
    assert (stored.state, stored.n_done, stored.bytes) == (L.State.DONE, 5, wanted.nbytes)
    assert scheduler.hits(keys) == 5
    worker.cache.fill(2)
    before = worker.cache.memory.copy()
    loaded = worker.load(keys, target)
    assert (loaded.state, loaded.n_done, loaded.bytes) == (L.State.DONE, 5, wanted.nbytes)
    np.testing.assert_array_equal(worker.cache.read(target), wanted)
    worker.cache.blocks[target.reshape(-1)] = 0
    before.reshape(3, 64, 4096)[:, target.reshape(-1)] = 0
    np.testing.assert_array_equal(worker.cache.memory, before)  # nothing else was touched


def test_times_of_an_answer_are_in_order(worker: Client) -> None:
    reply = worker.store(prompt_keys("times", 2), blocks_table(0, 2))
    assert 0 < reply.t_accepted <= reply.t_first_copy <= reply.t_done


def test_a_lookup_counts_leading_chunks_only(worker: Client, scheduler: Client) -> None:
    keys = prompt_keys("lead", 4)
    worker.store(keys[:32], blocks_table(0, 2))
    worker.store(keys[48:], blocks_table(8, 1), depth=3, parent=keys[32:48])
    assert scheduler.hits(keys) == 2
    assert scheduler.hits(keys[48:]) == 1


def test_a_chunk_that_is_present_is_not_stored_again(worker: Client) -> None:
    keys = prompt_keys("twice", 4)
    assert worker.store(keys[:32], blocks_table(0, 2)).n_done == 2
    again = worker.store(keys, blocks_table(0, 4))
    assert (again.state, again.n_done) == (L.State.DONE, 2)


def test_a_load_of_absent_chunks_fails_and_says_how_many_came(worker: Client) -> None:
    keys = prompt_keys("part", 3)
    worker.store(keys[:32], blocks_table(0, 2))
    reply = worker.load(keys, blocks_table(20, 3))
    assert (reply.state, reply.code, reply.n_done) == (L.State.FAILED, L.Code.NOT_FOUND, 2)
    none = worker.load(prompt_keys("nothing", 1), blocks_table(20, 1))
    assert (none.state, none.code, none.n_done) == (L.State.FAILED, L.Code.NOT_FOUND, 0)


def test_blocks_marked_skip_are_left_alone(worker: Client) -> None:
    assert worker.cache is not None
    worker.cache.fill(3)
    keys, source = prompt_keys("skip", 1), blocks_table(0, 1)
    wanted = worker.cache.read(source)
    worker.store(keys, source)
    worker.cache.memory[:] = 7
    target = np.array([[40, L.SKIP_BLOCK, 42, L.SKIP_BLOCK]], np.int32)
    reply = worker.load(keys, target)
    assert (reply.state, reply.n_done, reply.bytes) == (L.State.DONE, 1, wanted.nbytes // 2)
    np.testing.assert_array_equal(worker.cache.read([40, 42]), wanted[[0, 2]])
    assert (worker.cache.read([41, 43]) == 7).all()


def test_transfers_wait_for_their_fence_without_holding_others_up(worker: Client) -> None:
    assert worker.cache is not None
    worker.cache.fill(4)
    late, early = prompt_keys("late", 2), prompt_keys("early", 2)
    waiting = worker.post_store(late, blocks_table(0, 2), fence=5)
    assert worker.store(early, blocks_table(8, 2), fence=0).n_done == 2
    blocked = worker.post_load(early, blocks_table(16, 2), fence=6)
    assert worker.load(early, blocks_table(24, 2)).state is L.State.DONE
    assert worker.records.state(waiting) is L.State.ACCEPTED
    worker.cache.fill(5)
    wanted = worker.cache.read(blocks_table(0, 2))
    worker.set_fence(5)
    assert worker.finish(waiting).n_done == 2
    assert worker.records.state(blocked) is L.State.ACCEPTED
    worker.set_fence(6)
    assert worker.finish(blocked).state is L.State.DONE
    worker.load(late, blocks_table(32, 2))
    np.testing.assert_array_equal(worker.cache.read(blocks_table(32, 2)), wanted)  # what was there when the fence opened


def test_two_engines_share_what_either_has_stored(sidecar: SidecarProcess, worker: Client) -> None:
    assert worker.cache is not None
    worker.cache.fill(6)
    keys, source = prompt_keys("shared", 4), blocks_table(0, 4)
    worker.store(keys, source)
    with EngineProcess() as other:
        other.call("attach", sidecar.socket, {"engine_id": "other"}, {})
        assert other.call("lease", keys) == 4
        assert other.call("load", keys, blocks_table(12, 4)) == ("DONE", "OK", 4)
        assert other.call("read", list(range(12, 28))) == worker.cache.read(source).tobytes()


def test_engines_whose_pieces_differ_share_nothing(sidecar: SidecarProcess, worker: Client) -> None:
    keys = prompt_keys("differs", 2)
    worker.store(keys, blocks_table(0, 2))
    with (
        Client(sidecar.socket, engine_id="b", cache=KvCache(signature="another dtype")),
        Client(sidecar.socket, engine_id="b", role=L.Role.SCHEDULER) as scheduler,
    ):
        assert scheduler.hits(keys) == 0


def test_engines_with_other_strides_share_what_they_hold(sidecar: SidecarProcess, worker: Client) -> None:
    assert worker.cache is not None
    worker.cache.fill(7)
    keys = prompt_keys("strides", 2)
    worker.store(keys, blocks_table(0, 2))
    bigger = KvCache(num_blocks=200)
    with Client(sidecar.socket, engine_id="big", cache=bigger) as other:
        assert other.load(keys, blocks_table(150, 2)).state is L.State.DONE
        np.testing.assert_array_equal(bigger.read(blocks_table(150, 2)), worker.cache.read(blocks_table(0, 2)))


def test_a_chunk_counts_only_when_every_rank_has_stored_it(sidecar: SidecarProcess) -> None:
    keys = prompt_keys("tp", 3)
    with (
        Client(sidecar.socket, engine_id="tp", role=L.Role.SCHEDULER, world=2) as scheduler,
        Client(sidecar.socket, engine_id="tp", rank=0, world=2) as first,
    ):
        ticket, reply = scheduler.lookup(keys)
        assert (reply.state, reply.code, reply.n_done) == (L.State.DONE, L.Code.NOT_REGISTERED, 0)
        scheduler.records.free(ticket)
        with Client(sidecar.socket, engine_id="tp", rank=1, world=2) as second:
            first.store(keys, blocks_table(0, 3))
            assert scheduler.hits(keys) == 0
            second.store(keys[:32], blocks_table(0, 2))
            assert scheduler.hits(keys) == 2
            assert second.load(keys[:32], blocks_table(20, 2)).state is L.State.DONE
        until(lambda: scheduler.hits(keys) == 0, "a rank is gone, so lookups miss")
        assert first.load(keys, blocks_table(20, 3)).state is L.State.DONE  # a sibling's end disturbs nobody's copies


def test_a_lease_outlives_pressure_and_ends_with_its_release(sidecar: SidecarProcess) -> None:
    big = KvCache(num_blocks=64, piece=65536)  # 768 KiB a chunk, about 80 in the pool
    with (
        Client(sidecar.socket, engine_id="big", cache=big) as worker,
        Client(sidecar.socket, engine_id="big", role=L.Role.SCHEDULER) as scheduler,
    ):
        held = prompt_keys("held", 4)
        worker.store(held, blocks_table(0, 4))
        ticket, reply = scheduler.lookup(held)
        assert reply.n_done == 4
        assert reply.deadline > reply.t_done
        for i in range(30):
            assert worker.store(prompt_keys(f"press{i}", 4), blocks_table(0, 4)).state is L.State.DONE
        assert scheduler.hits(held) == 4
        scheduler.release(ticket)
        until(lambda: section(sidecar, "directory")["leases"] == 0, "no lease is left")


def test_a_pool_full_of_leases_refuses_stores_and_says_how_far_it_came(sidecar: SidecarProcess) -> None:
    big = KvCache(num_blocks=64, piece=65536)
    with (
        Client(sidecar.socket, engine_id="big", cache=big) as worker,
        Client(sidecar.socket, engine_id="big", role=L.Role.SCHEDULER, max_records=64) as scheduler,
    ):
        reply, total = worker.store(prompt_keys("fill0", 8), blocks_table(0, 8)), 0
        for i in range(1, 40):
            scheduler.lookup(prompt_keys(f"fill{i - 1}", 8))
            total += reply.n_done
            reply = worker.store(prompt_keys(f"fill{i}", 8), blocks_table(0, 8))
            if reply.state is L.State.FAILED:
                break
        assert (reply.state, reply.code) == (L.State.FAILED, L.Code.POOL_FULL)
        assert 0 <= reply.n_done < 8
        assert scheduler.hits(prompt_keys(f"fill{i}", 8)) == reply.n_done  # what was reported is there


def test_locate_answers_with_slabs_that_hold_the_bytes(sidecar: SidecarProcess, worker: Client, scheduler: Client) -> None:
    import mmap

    assert worker.cache is not None
    worker.cache.fill(8)
    keys, source = prompt_keys("locate", 3), blocks_table(0, 3)
    worker.store(keys, source)
    ticket = scheduler.post(L.Op.LOCATE, keys)
    reply = scheduler.wait(ticket)
    assert (reply.state, reply.n_done) == (L.State.DONE, 3)
    with mmap.mmap(worker.pool_fd, worker.attached.pool_bytes, prot=mmap.PROT_READ) as pool:
        for (offset, _), chunk in zip(scheduler.records.slab_refs(ticket, 3).tolist(), source, strict=True):
            wanted = worker.cache.read(chunk).swapaxes(0, 1).tobytes()
            assert pool[offset : offset + len(wanted)] == wanted
    assert section(sidecar, "directory")["leases"] == 1
    scheduler.release(ticket)
    until(lambda: section(sidecar, "directory")["leases"] == 0, "the lease of LOCATE is back")


def test_the_pool_handed_to_a_client_cannot_be_written(worker: Client) -> None:
    import mmap

    with pytest.raises(PermissionError):
        mmap.mmap(worker.pool_fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_drain_answers_when_every_earlier_transfer_has_ended(worker: Client) -> None:
    store = worker.post_store(prompt_keys("drained", 2), blocks_table(0, 2), fence=9)
    drain = worker.post(L.Op.DRAIN, b"")
    other = worker.post(L.Op.DRAIN, b"")
    assert worker.load(prompt_keys("no such", 1), blocks_table(30, 1)).state is L.State.FAILED
    assert worker.records.state(drain) is L.State.ACCEPTED
    worker.set_fence(9)
    assert worker.finish(drain).state is L.State.DONE
    assert worker.records.state(store) is L.State.DONE
    assert worker.finish(other).state is L.State.DONE
    worker.records.free(store)


def test_a_cancelled_ticket_that_waits_is_answered_cancelled(worker: Client) -> None:
    for ticket in (
        worker.post_store(prompt_keys("cancel", 2), blocks_table(0, 2), fence=100),
        worker.post_load(prompt_keys("cancel", 2), blocks_table(0, 2), fence=100),
    ):
        assert worker.records.set_cancel(ticket)  # no copy runs: the blocks are ours at once
        worker.ring.push(ticket, L.Verb.CANCEL)
        worker.publish()
        assert worker.finish(ticket).state is L.State.CANCELLED
    assert worker.store(prompt_keys("cancel", 2), blocks_table(0, 2)).n_done == 2  # nothing of it was left pending


def test_a_prefix_stored_by_two_at_once_is_copied_once(sidecar: SidecarProcess) -> None:
    keys = prompt_keys("both", 8)
    with Client(sidecar.socket, engine_id="one") as one, Client(sidecar.socket, engine_id="two") as two:
        for _ in range(20):
            tickets = one.post_store(keys, blocks_table(0, 8)), two.post_store(keys, blocks_table(0, 8))
            replies = one.finish(tickets[0]), two.finish(tickets[1])
            assert [r.state for r in replies] == [L.State.DONE] * 2
            assert sum(r.n_done for r in replies) == 8
            admin(sidecar.socket, M.CacheClear())


def test_a_full_record_table_is_refused_to_the_client_and_recovers(worker: Client) -> None:
    tickets = [
        worker.post_load(prompt_keys("full", 1), blocks_table(0, 1), fence=1000) for _ in range(worker.records.free_records)
    ]
    with pytest.raises(RingFull):
        worker.post_load(prompt_keys("full", 1), blocks_table(0, 1))
    worker.set_fence(1000)
    for ticket in tickets:
        assert worker.finish(ticket).code is L.Code.NOT_FOUND
    assert worker.store(prompt_keys("full", 1), blocks_table(0, 1)).n_done == 1


def test_a_request_that_fits_no_chunk_is_answered_as_bad(worker: Client) -> None:
    wrong_width = worker.post_load(prompt_keys("bad", 2), np.zeros((2, 3), np.int32))
    assert worker.finish(wrong_width).code is L.Code.BAD_REQUEST
    empty = worker.post(L.Op.LOAD, b"")
    assert worker.finish(empty).code is L.Code.BAD_REQUEST
    parent_only = worker.post(L.Op.STORE, worker.root)
    assert worker.finish(parent_only).code is L.Code.BAD_REQUEST


def test_the_hit_ratio_has_one_denominator(sidecar: SidecarProcess, worker: Client, scheduler: Client) -> None:
    before = section(sidecar, "cache")
    worker.store(prompt_keys("ratio", 3), blocks_table(0, 3))
    scheduler.hits(prompt_keys("ratio", 3))
    scheduler.hits(prompt_keys("never", 9))
    after = section(sidecar, "cache")
    assert after["chunks_asked"] - before["chunks_asked"] == 12
    assert after["chunks_hit"] - before["chunks_hit"] == 3


def test_the_ratio_of_lookups_and_that_of_loads_are_told_apart(
    sidecar: SidecarProcess, worker: Client, scheduler: Client
) -> None:
    before = section(sidecar, "cache")
    keys = prompt_keys("told apart", 4)
    worker.store(keys, blocks_table(0, 4))
    for _ in range(3):
        scheduler.hits(keys)
    worker.load(keys, blocks_table(0, 4))
    assert worker.load(prompt_keys("absent", 2), blocks_table(0, 2)).state is L.State.FAILED
    after = section(sidecar, "cache")
    grown = {name: after[name] - before[name] for name in ("chunks_hit", "load_chunks_asked", "load_chunks_loaded")}
    assert grown == {"chunks_hit": 12, "load_chunks_asked": 6, "load_chunks_loaded": 4}
    assert after["lookup_hit_ratio"] == after["hit_ratio"] == round(after["chunks_hit"] / after["chunks_asked"], 4)
    assert after["load_success_ratio"] == round(after["load_chunks_loaded"] / after["load_chunks_asked"], 4)


def test_the_listing_misses_no_chunk_where_one_key_stands_in_two_namespaces(sidecar: SidecarProcess) -> None:
    from maru_sidecar.admin import AdminClient

    keys = prompt_keys("shared", 3)
    for engine in ("one", "two"):
        with Client(sidecar.socket, cache=KvCache(signature=f"layout {engine}"), engine_id=engine) as worker:
            worker.store(keys, np.arange(12).reshape(3, 4))
    with AdminClient.connect(sidecar.socket) as admin:
        seen, after = [], ""
        while True:  # pages of one: every page ends in the middle of a key's two namespaces or just behind them
            page = admin.cache_page(after=after, limit=1)
            seen += [(c.key, c.namespace) for c in page.chunks]
            if not page.more:
                break
            after = seen[-1][0] + seen[-1][1]
    assert len(set(seen)) == len(seen) == 6
