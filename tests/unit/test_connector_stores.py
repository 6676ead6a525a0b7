"""What the scheduler half has stored, and when: behind the prompt, whole, once, and nothing that may be garbage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.support.half_world import Blocks, World, ids_of, request, scripted, start
from vllm.v1.request import Request, RequestStatus

from maru_connector.metadata import StepMetadata, WorkerReport


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with scripted(tmp_path) as world:
        yield world


@pytest.fixture
def cold(world: World) -> World:
    world.hits = 0
    return world


def inside(world: World, one: Request, n_blocks: int, tokens: int, **others: int) -> StepMetadata:
    """Admit a hit that is loaded inside its step, which computes ``tokens`` more; ``others`` are scheduled beside it."""
    n, deferred = world.ask(one)
    assert n
    assert not deferred
    blocks = list(range(1, 1 + n_blocks))
    world.half.update_state_after_alloc(one, Blocks(blocks), n)
    one.num_computed_tokens = n
    meta = world.step({one.request_id: tokens, **others}, new={one.request_id: blocks})
    one.num_computed_tokens += tokens
    return meta


@pytest.fixture
def synchronous(world: World) -> World:
    world.half.shutdown()
    world.open(deferred=False)
    world.hits = 1
    return world


def test_what_is_computed_on_a_load_inside_the_step_is_stored_when_that_has_arrived_on_all_ranks(synchronous: World) -> None:
    world = synchronous
    one = request(200)
    world.half.on_new_request(one)
    assert inside(world, one, 13, 136).stores == []
    world.report(report=WorkerReport(loads_done={"a": 1}))
    assert world.step({"a": 1}).stores == []  # one rank of two
    world.report(report=WorkerReport(loads_done={"a": 1}))
    (job,) = world.step({"a": 1}).stores
    assert (job.depth, len(job.keys)) == (1, 3 * 16)


def test_a_failed_load_inside_a_step_stores_nothing_before_it_was_computed_again(synchronous: World) -> None:
    world = synchronous
    world.hits = 0
    sharer = request(200, "sharer", seed=1)
    world.half.on_new_request(sharer)
    start(world, sharer, list(range(20, 33)), 64)
    world.hits = 1
    one = request(200)
    world.half.on_new_request(one)
    assert inside(world, one, 13, 136, sharer=136).stores == []
    sharer.num_computed_tokens = 200
    world.report(report=WorkerReport(loads_failed={"a"}, loads_done={"a": 2}))
    one.num_computed_tokens = 0  # as vLLM has it recomputed
    (beside,) = world.step({"a": 100, "sharer": 1}).stores
    assert beside.request_id == "sharer"
    world.stored(beside.job)
    one.num_computed_tokens = 100
    (job,) = world.step({"a": 100}).stores
    assert (job.request_id, job.depth, len(job.keys)) == ("a", 0, 4 * 16)


@pytest.mark.parametrize(
    ("status", "stored"),
    [(RequestStatus.FINISHED_LENGTH_CAPPED, 1), (RequestStatus.FINISHED_STOPPED, 1), (RequestStatus.FINISHED_ABORTED, 0)],
)
def test_a_request_that_ends_before_its_load_is_reported_is_stored_only_if_its_step_was_sound(
    synchronous: World, status: RequestStatus, stored: int
) -> None:
    world = synchronous
    one = request(200)
    world.half.on_new_request(one)
    inside(world, one, 13, 136)
    one.status = status  # vLLM tells of an end before it tells of loads
    world.half.request_finished(one, list(range(1, 14)))
    assert len(world.step().stores) == stored
    world.report(report=WorkerReport(loads_done={"a": 2}))
    assert world.no_lease_is_left()


# --- write-behind ---
def take_blocks(world: World, n: int) -> list[int]:
    return [b.block_id for b in world.pool.get_new_blocks(n)]


def test_nothing_is_stored_inside_a_chunked_prefill_then_the_whole_prefix_at_once(cold: World) -> None:
    one = request(200)
    cold.half.on_new_request(one)
    blocks = take_blocks(cold, 13)
    assert start(cold, one, blocks[:6], 96).stores == []
    meta = cold.step({"a": 104}, more={"a": blocks[6:]})
    (job,) = meta.stores
    assert (job.depth, job.fence) == (0, meta.step)
    assert len(job.keys) == 4 * 16
    assert ids_of(job) == [-1, -1, -1, -1, *blocks[:12]]


def test_generated_chunks_are_stored_as_they_fill_up_and_only_confirmed_tokens_count(cold: World) -> None:
    one = request(120)
    cold.half.on_new_request(one)
    blocks = take_blocks(cold, 8)
    assert len(start(cold, one, blocks, 120).stores[0].keys) == 2 * 16
    one.append_output_token_ids([1] * 7)
    one.num_computed_tokens = 127
    assert cold.step({"a": 1}).stores == []  # position 127 is computed, its token not confirmed yet
    one.num_computed_tokens = 128
    one.append_output_token_ids([1])
    (job,) = cold.step({"a": 1}).stores
    assert job.depth == 1
    assert ids_of(job)[4:] == blocks[4:8]


def test_chunks_that_are_in_the_pool_are_not_stored_again(world: World) -> None:
    world.hits = 2
    one = request(200)
    world.half.on_new_request(one)
    blocks = take_blocks(world, 13)
    assert world.ask(one)[0] == 128
    world.half.update_state_after_alloc(one, Blocks(blocks), 128)
    world.step()
    world.report(finished={"a"})
    one.num_computed_tokens = 128
    (job,) = world.step({"a": 72}, new={"a": blocks}).stores
    assert job.depth == 2
    assert len(job.keys) == 2 * 16


def test_blocks_stay_pinned_until_every_rank_has_stored_them(cold: World) -> None:
    one = request(128)
    cold.half.on_new_request(one)
    blocks = take_blocks(cold, 8)
    (job,) = start(cold, one, blocks, 128).stores
    free = cold.pool.get_num_free_blocks()
    cold.half.request_finished(one, blocks)
    cold.pool.free_blocks([cold.pool.blocks[b] for b in blocks])
    assert cold.pool.get_num_free_blocks() == free
    assert cold.half.has_pending_work()
    cold.stored(job.job, 1)
    assert cold.pool.get_num_free_blocks() == free
    cold.stored(job.job, 1)
    assert cold.pool.get_num_free_blocks() == free + 8
    cold.stored(job.job, 1)  # an unknown job changes nothing
    assert not cold.half.has_pending_work()


def test_a_backlog_of_stores_does_not_take_the_engines_blocks(cold: World) -> None:
    cold.half.shutdown()
    cold.open(max_pinned_share=0.25)  # 16 of 64 blocks
    first, second = request(256, "a"), request(256, "b", seed=1)
    for one in (first, second):
        cold.half.on_new_request(one)
    (job,) = start(cold, first, take_blocks(cold, 16), 256).stores
    assert start(cold, second, take_blocks(cold, 16), 256).stores == []
    cold.stored(job.job)
    (late,) = cold.step({"b": 1}).stores
    assert late.request_id == "b"


def test_what_is_left_is_stored_when_a_request_ends(cold: World) -> None:
    one = request(200)
    cold.half.on_new_request(one)
    blocks = take_blocks(cold, 13)
    assert start(cold, one, blocks[:9], 140).stores == []
    cold.half.request_finished(one, blocks[:9])  # aborted in the middle of its prefill
    (job,) = cold.step().stores
    assert len(job.keys) == 3 * 16


def test_a_request_that_is_preempted_after_a_reset_is_stored_again_and_one_that_is_not_is_not(cold: World) -> None:
    preempted, kept = request(70, "p"), request(70, "k", seed=1)
    for i, one in enumerate((preempted, kept)):
        cold.half.on_new_request(one)
        for job in start(cold, one, list(range(1 + 8 * i, 6 + 8 * i)), 70).stores:
            cold.stored(job.job)
    cold.half.reset_cache()
    for one in (preempted, kept):
        one.append_output_token_ids(list(range(60)))
        one.num_computed_tokens = 129
    preempted.num_computed_tokens = 0
    cold.step(preempted={"p"})
    meta = cold.step({"p": 130, "k": 1}, new={"p": list(range(20, 29))}, more={"k": [30, 31, 32]})
    assert {(job.request_id, job.depth) for job in meta.stores} == {("p", 0)}
    for one in (preempted, kept):
        cold.half.request_finished(one, [])
