"""The scheduler half against a scripted sidecar: leases never leak, pins always go, the scheduler is never held up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.support.connector_peer import Peer, PeerSession
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from maru_connector.link import SidecarLink
from maru_connector.metadata import StepMetadata, WorkerReport
from maru_connector.options import parse_options
from maru_connector.scheduler_half import SchedulerHalf
from maru_connector.session import Session
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.records import Request as RingRequest

CHUNK, BLOCK, NUM_BLOCKS = 64, 16, 64


class Blocks:
    """KVCacheBlocks as far as the connector reads it."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._ids,)


class World:
    """A scheduler half on a peer whose pool holds the first ``hits`` chunks of every prompt."""

    def __init__(self, directory: Path) -> None:
        self.hits = 100
        self.lease_s = 60.0
        self.silent = False
        self.unanswered: list[tuple[PeerSession, RingRequest]] = []
        self.granted: set[int] = set()
        self.peer = Peer(str(directory / "control.sock"), self._answer)
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.half: SchedulerHalf
        self.open()

    def _lost(self, session: Session) -> None:
        self.half.on_lost(session)

    def open(self, *, deferred: bool = True, **options: object) -> None:
        options = {"lookup_patience_ms": 10_000, **options}
        link = SidecarLink(
            self.peer.path,
            lambda: (M.Attach(L.Role.SCHEDULER, "engine", 0, 1, b"r" * 16, CHUNK, 64, 64, 1024), []),
            on_lost=self._lost,
        )
        self.half = SchedulerHalf(
            parse_options({"maru.chunk_tokens": CHUNK, **{f"maru.{k}": v for k, v in options.items()}}),
            link, b"r" * 16, block_tokens=BLOCK, num_blocks=NUM_BLOCKS, ranks=2, deferred=deferred,
        )  # fmt: skip
        self.half.bind_block_pool(self.pool)
        assert link.wait_attached(10)

    def _answer(self, session: PeerSession, request: RingRequest) -> None:
        if self.silent:
            self.unanswered.append((session, request))
            return
        n = min(self.hits, request.n_keys)
        deadline = time.monotonic_ns() + int(self.lease_s * 1e9) if n else 0
        if n:
            self.granted.add(request.ticket)
        session.records.complete(request.ticket, L.State.DONE, n_done=n, deadline=deadline)

    def ask(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        """Ask as the scheduler does, step after step, until there is an answer."""
        end = time.monotonic() + 10
        while True:
            answer = self.half.get_num_new_matched_tokens(request, local)
            if answer[0] is not None:
                return answer
            assert time.monotonic() < end, "no answer"
            self.step()

    def step(self, scheduled: dict[str, int] | None = None, *, new: dict[str, list[int]] | None = None,
             more: dict[str, list[int]] | None = None, preempted: set[str] | None = None) -> StepMetadata:  # fmt: skip
        """Build one step. ``new``: block tables of requests that start; ``more``: blocks added to running ones."""
        more = more or {}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled or {},
            preempted_req_ids=preempted or set(),
            scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=(ids,)) for r, ids in (new or {}).items()],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(more), new_block_ids=[(ids,) for ids in more.values()], resumed_req_ids=set()
            ),
        )
        return self.half.build_connector_meta(output)

    def report(self, *, finished: set[str] | None = None, report: WorkerReport | None = None) -> None:
        self.half.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=finished))

    def stored(self, job: int, ranks: int = 2) -> None:
        self.report(report=WorkerReport(stores_done={job: ranks}))

    def no_lease_is_left(self) -> bool:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            self.step()
            if set(self.peer.released) == self.granted and len(self.peer.released) == len(self.granted):
                return True
            time.sleep(0.001)
        return False


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.half.shutdown()
    world.peer.close()


def request(n_tokens: int, name: str = "a", *, seed: int = 0) -> Request:
    tokens = random.Random(seed).choices(range(1000), k=n_tokens)
    parameters = SamplingParams(max_tokens=50)
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=parameters, pooling_params=None)


def ids_of(job: Any) -> list[int]:
    return np.frombuffer(job.blocks, "<i4").tolist()


# --- hits -----------------------------------------------------------------------------------------------------------------
def test_a_hit_is_whole_chunks_and_its_load_names_the_external_blocks_alone(world: World) -> None:
    one = request(200)
    world.half.on_new_request(one)
    assert world.ask(one, 80) == (192 - 80, True)
    world.half.update_state_after_alloc(one, Blocks(list(range(1, 14))), 192 - 80)
    (job,) = world.step().loads
    assert job.depth == 1
    assert len(job.keys) == 2 * 16
    assert ids_of(job) == [-1, 6, 7, 8, 9, 10, 11, 12]  # the chunk's first block is local
    assert job.lease in world.granted
    assert world.peer.released == []
    world.report(finished={"a"})
    assert world.no_lease_is_left()


def test_a_full_prompt_hit_is_claimed_whole_where_the_scheduler_rewinds(world: World) -> None:
    one = request(192)
    world.half.on_new_request(one)
    assert world.ask(one) == (192, True)


def test_a_synchronous_hit_leaves_a_token_to_compute(world: World) -> None:
    world.half.shutdown()
    world.open(deferred=False)
    one = request(192)
    world.half.on_new_request(one)
    assert world.ask(one) == (176, False)
    world.half.update_state_after_alloc(one, Blocks(list(range(1, 13))), 176)
    (job,) = world.step().loads
    assert job.synchronous
    assert ids_of(job) == [*range(1, 12), -1]
    world.report(report=WorkerReport(loads_done={"a": 1}))
    assert world.peer.released == []
    world.report(report=WorkerReport(loads_done={"a": 1}))
    assert world.no_lease_is_left()


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


@pytest.mark.parametrize("local", [192, 200])
def test_what_is_local_already_gives_the_lease_back(world: World, local: int) -> None:
    one = request(210)
    world.half.on_new_request(one)
    assert world.ask(one, local) == (0, False)
    assert world.no_lease_is_left()


@pytest.mark.parametrize(("minimum", "claimed"), [(17, 0), (16, 16)])
def test_a_remainder_that_is_not_worth_parking_for_is_computed(world: World, minimum: int, claimed: int) -> None:
    world.half.shutdown()
    world.open(min_hit_tokens=minimum)
    one = request(192)  # whole chunks: vLLM's own cache stops one block short of the end
    world.half.on_new_request(one)
    assert world.ask(one, 176) == (claimed, claimed > 0)
    if not claimed:
        assert world.no_lease_is_left()


def test_an_allocation_without_external_tokens_gives_the_lease_back(world: World) -> None:
    one = request(200)
    world.half.on_new_request(one)
    assert world.ask(one)[0] == 192
    world.half.update_state_after_alloc(one, Blocks([1] * 13), 0)
    assert world.no_lease_is_left()


def test_asking_again_keeps_the_one_lease(world: World) -> None:
    one = request(200)
    world.half.on_new_request(one)
    assert [world.ask(one)[0] for _ in range(5)] == [192] * 5
    assert len(world.granted) == 1


def test_a_miss_is_asked_about_once_however_often_the_scheduler_comes(world: World) -> None:
    world.hits = 0
    one = request(200)
    world.half.on_new_request(one)
    assert [world.ask(one)[0] for _ in range(5)] == [0] * 5
    assert len(world.peer.requests) == 1


def test_a_request_whose_load_failed_never_claims_again(world: World) -> None:
    one = request(200)
    world.half.on_new_request(one)
    assert world.ask(one)[0] == 192
    world.half.update_state_after_alloc(one, Blocks(list(range(1, 14))), 192)
    world.step()
    world.report(finished={"a"}, report=WorkerReport(loads_failed={"a"}))
    assert world.ask(one) == (0, False)
    assert world.no_lease_is_left()


def test_a_preempted_request_is_looked_up_with_what_it_generated(world: World) -> None:
    world.hits = 0
    one = request(100)
    world.half.on_new_request(one)
    assert world.ask(one)[0] == 0
    world.hits = 100
    one.append_output_token_ids(list(range(40)))
    one.num_preemptions += 1
    assert world.ask(one) == (128, True)
    world.half.request_finished(one, [])
    assert world.no_lease_is_left()


def test_parked_loads_are_bounded_and_the_first_always_goes(world: World) -> None:
    world.half.shutdown()
    world.open(max_parked_share=0.1)
    for i in range(2):
        world.half.on_new_request(request(200, f"r{i}", seed=i))
    first, second = (world.half._requests[f"r{i}"].request for i in range(2))
    assert world.ask(first)[0] == 192
    world.half.update_state_after_alloc(first, Blocks(list(range(1, 14))), 192)
    end = time.monotonic() + 10
    while world.half._requests["r1"].known_hits < 0 and time.monotonic() < end:
        assert world.half.get_num_new_matched_tokens(second, 0) == (None, False)
        world.step()
    assert world.half.get_num_new_matched_tokens(second, 0) == (None, False)
    world.report(finished={"r0"})
    assert world.ask(second) == (192, True)


# --- a sidecar that does not answer ----------------------------------------------------------------------------------------
def test_a_lookup_that_is_not_answered_becomes_a_miss_and_its_late_lease_is_given_back(world: World) -> None:
    world.half.shutdown()
    world.open(lookup_patience_ms=20)
    world.silent = True
    one = request(200)
    world.half.on_new_request(one)
    assert world.ask(one) == (0, False)
    end = time.monotonic() + 10
    while not world.unanswered and time.monotonic() < end:
        time.sleep(0.001)  # the miss does not wait for the peer to have seen the question
    session, posted = world.unanswered[0]
    world.granted.add(posted.ticket)
    session.records.complete(posted.ticket, L.State.DONE, n_done=3, deadline=time.monotonic_ns() + 10**10)
    assert world.no_lease_is_left()


@pytest.mark.parametrize("lease_s", [0.0, 1.0])
def test_leases_too_short_to_be_used_become_a_miss_and_are_given_back(world: World, lease_s: float) -> None:
    world.lease_s = lease_s
    one = request(200)
    world.half.on_new_request(one)
    assert world.ask(one) == (0, False)
    assert len(world.granted) <= 4
    assert world.no_lease_is_left()
    world.lease_s = 60.0
    other = request(200, "b", seed=1)
    world.half.on_new_request(other)
    assert world.ask(other) == (192, True)


def test_a_stalled_sidecar_is_not_asked_for_ever(world: World) -> None:
    world.half.shutdown()
    world.open(lookup_patience_ms=20)
    world.silent = True
    for i in range(12):
        one = request(200, f"r{i}", seed=i)
        world.half.on_new_request(one)
        assert world.ask(one) == (0, False)
    assert len(world.unanswered) <= 5


def test_without_a_sidecar_the_answer_is_a_miss_at_once(world: World) -> None:
    world.peer.close()
    while world.half.link.session is not None:
        world.step()
    one = request(200)
    world.half.on_new_request(one)
    assert world.half.get_num_new_matched_tokens(one, 0) == (0, False)


def test_a_sidecar_that_goes_between_the_claim_and_the_allocation_costs_a_load_that_fails_not_the_engine(world: World) -> None:
    one = request(200)
    world.half.on_new_request(one)
    assert world.ask(one)[0] == 192
    world.peer.close()
    while world.half.link.poll() is not None:
        pass
    world.half.update_state_after_alloc(one, Blocks(list(range(1, 14))), 192)
    (job,) = world.step().loads
    assert (job.lease, job.generation) == (0, 0)
    world.report(finished={"a"}, report=WorkerReport(loads_failed={"a"}))
    assert world.ask(one) == (0, False)


# --- stores ---------------------------------------------------------------------------------------------------------------
def start(world: World, one: Request, blocks: list[int], n_tokens: int) -> StepMetadata:
    """Admit a request that missed, and schedule its first ``n_tokens`` tokens."""
    assert world.ask(one)[0] == 0
    world.half.update_state_after_alloc(one, Blocks(blocks), 0)
    meta = world.step({one.request_id: n_tokens}, new={one.request_id: blocks})
    one.num_computed_tokens += n_tokens
    return meta


@pytest.fixture
def cold(world: World) -> World:
    world.hits = 0
    return world


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


def test_an_aborted_load_is_cancelled_stores_nothing_and_frees_its_lease_on_completion(world: World) -> None:
    one = request(200)
    world.half.on_new_request(one)
    assert world.ask(one)[0] == 192
    world.half.update_state_after_alloc(one, Blocks(list(range(1, 14))), 192)
    world.step()
    one.num_computed_tokens = 192  # as vLLM sets it while the load runs
    world.half.request_finished(one, list(range(1, 14)))
    meta = world.step()
    assert meta.cancel_loads == ["a"]
    assert meta.stores == []
    assert world.peer.released == []
    world.report(finished={"a"})
    assert world.no_lease_is_left()
    assert not world.half._requests


def test_a_load_waits_for_the_last_step_that_wrote_its_blocks_and_no_other(cold: World) -> None:
    writer, bystander = request(60, "w"), request(60, "b", seed=1)
    for one in (writer, bystander):
        cold.half.on_new_request(one)
    start(cold, writer, [1, 2, 3, 4], 60)
    wrote = cold.half._step
    cold.half.request_finished(writer, [1, 2, 3, 4])
    start(cold, bystander, [5, 6, 7, 8], 60)
    cold.hits = 100
    hit = request(100, "h", seed=2)
    cold.half.on_new_request(hit)
    assert cold.ask(hit)[0] == 64
    cold.half.update_state_after_alloc(hit, Blocks([1, 2, 3, 4, 9, 10, 11]), 64)
    (job,) = cold.step().loads
    assert job.fence == wrote


def test_a_load_waits_for_the_last_writer_of_blocks_that_its_end_did_not_name(cold: World) -> None:
    writer = request(60, "w")
    cold.half.on_new_request(writer)
    start(cold, writer, [1, 2, 3, 4], 60)
    wrote = cold.half._step
    cold.half.request_finished(writer, [1, 2])  # vLLM names the blocks of computed tokens
    cold.step()
    cold.hits = 100
    hit = request(100, "h", seed=2)
    cold.half.on_new_request(hit)
    assert cold.ask(hit)[0] == 64
    cold.half.update_state_after_alloc(hit, Blocks([3, 4, 9, 10, 11]), 64)
    (job,) = cold.step().loads
    assert job.fence == wrote


def test_after_a_reset_nothing_stored_before_is_asked_for(world: World) -> None:
    one = request(200)
    world.half.on_new_request(one)
    assert world.ask(one)[0] == 192
    assert world.half.reset_cache() is True
    world.half.request_finished(one, [])
    two = request(200, "b")
    world.half.on_new_request(two)
    world.ask(two)
    first, second = (r.keys for r in world.peer.requests)
    assert first != second
    world.half.request_finished(two, [])
    assert world.no_lease_is_left()


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


# --- any order of events -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_events_leaks_a_lease_or_a_pin(world: World, seed: int) -> None:
    rng = random.Random(seed)
    live: dict[str, Request] = {}
    loading: dict[str, bool] = {}
    jobs: list[int] = []

    def arrive() -> None:
        one = request(rng.randint(1, 300), f"r{len(world.peer.requests)}-{rng.random()}", seed=rng.randint(0, 5))
        world.half.on_new_request(one)
        live[one.request_id] = one

    def admit() -> None:
        waiting = [r for r in live if r not in loading]
        if not waiting:
            return
        one = live[rng.choice(waiting)]
        n, _ = world.half.get_num_new_matched_tokens(one, rng.choice([0, 0, 16, 64]))
        if n is None:
            return
        n = rng.choice([n, n, 0])
        ids = list(range(1, 1 + 19))
        world.half.update_state_after_alloc(one, Blocks(ids), n)
        if n:
            loading[one.request_id] = True

    def settle() -> None:
        if loading:
            name = rng.choice(list(loading))
            del loading[name]
            failed = WorkerReport(loads_failed={name}) if rng.random() < 0.3 else None
            world.report(finished={name}, report=failed)
            if name not in live:
                return

    def leave() -> None:
        if live:
            one = live.pop(rng.choice(list(live)))
            world.half.request_finished(one, [])

    def step() -> None:
        jobs.extend(job.job for job in world.step().stores)

    events: list[Callable[[], None]] = [arrive, admit, admit, settle, leave, step]
    world.hits = rng.choice([0, 1, 100])
    for _ in range(300):
        rng.choice(events)()
    for one in list(live.values()):
        world.half.request_finished(one, [])
    for name in list(loading):
        world.report(finished={name})
    world.step()
    for job in jobs:
        world.stored(job)
    assert world.no_lease_is_left()
    assert not world.half._requests
    assert world.half._parked == 0
    assert not world.half.has_pending_work()


def make_engine_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> Request:
    """A sidecar restart as an idle engine meets it: the link is down until a request makes it look."""
    world.peer.close()
    world.half.link.poll()
    world.peer = Peer(world.peer.path, world._answer, generation=2)
    monkeypatch.setattr(world.half.link, "_next_try", 0.0)
    first = request(130, "first")
    world.half.on_new_request(first)
    return first


def test_the_first_request_after_a_restart_waits_for_the_attachment_and_hits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_engine_wait(world, monkeypatch)
    assert world.half.link.session is None
    assert world.ask(first)[0] == 128


def test_an_engine_whose_workers_are_not_attached_is_not_held_up_for_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.half.shutdown()
    world.open(attach_patience_ms=50)

    def not_registered(session: PeerSession, request: RingRequest) -> None:
        session.records.complete(request.ticket, L.State.DONE, L.Code.NOT_REGISTERED)

    monkeypatch.setattr(world.peer, "answer", not_registered)
    early = request(130, "early")
    world.half.on_new_request(early)
    assert world.ask(early)[0] == 0  # however long it waited: it was not for ever
    later = request(130, "later")
    world.half.on_new_request(later)
    assert world.ask(later)[0] == 0
    assert len([r for r in world.peer.requests if r.label == "later"]) == 1  # the attachment is old by now: it asked once
