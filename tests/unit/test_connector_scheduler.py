"""The scheduler half against a scripted sidecar: leases never leak, pins always go, the scheduler is never held up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.support.connector_peer import Peer, PeerSession
from tests.support.half_world import Blocks, World, ids_of, request, scripted, start
from vllm.v1.request import Request

from maru_connector.metadata import WorkerReport
from maru_shm import layout as L
from maru_shm.records import Request as RingRequest


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with scripted(tmp_path) as world:
        yield world


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


# --- ends, fences and resets ---
@pytest.fixture
def cold(world: World) -> World:
    world.hits = 0
    return world


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
