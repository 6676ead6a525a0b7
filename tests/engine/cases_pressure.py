"""Scheduler cases: preemption, memory pressure, eviction, other modes, and everything at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.engine.scheduler_world import World, case
from tests.support.sidecar_process import SidecarProcess
from tests.support.toy_model import continuation, prompt
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.vllm_sched import Outcome


#: A sidecar that gets no turn for a while is waited for: what these cases show depends on its answers, not on their speed.
PATIENT = {"maru.lookup_patience_ms": 60_000.0}


@case
def preempted_requests_resume_with_right_bytes(world: World) -> None:
    engine = world.engine(num_blocks=40, extra=PATIENT)
    answers = [engine.submit(prompt(i, 150), 60) for i in range(5)]
    engine.await_lookups()  # so that all begin together, and do not fit
    engine.run()
    engine.check()
    assert any(len(a.admissions) > 1 for a in answers), "nothing was preempted: the case shows nothing"


@case
def a_preempted_request_reloads_prompt_and_generated_chunks(world: World) -> None:
    # Two prompts fit, their answers do not: the second is preempted while it generates, after some 60 tokens.
    engine = world.engine(num_blocks=40, extra=PATIENT)
    answers = [engine.submit(prompt(i, 250), 150) for i in range(2)]
    engine.await_lookups()
    preempted = answers[1]
    while len(world.sidecar.chunks()) < 8:  # the prompts', and for each the one that six generated tokens complete
        assert len(preempted.admissions) <= 1, "preempted before its chunks were stored: the case shows nothing"
        engine.step()
        until(world.sidecar_is_idle, "the sidecar has done what it was asked")
    engine.run()
    engine.check()
    assert len(preempted.admissions) == 2, preempted
    assert preempted.admissions[1] >= 256, "the chunk that its first generated tokens completed did not come back"


@case
def a_request_preempted_by_a_cache_reset_reloads_what_was_stored(world: World) -> None:
    engine = world.engine()
    answer = engine.submit(prompt(1, 100), 150)
    engine.run(lambda: len(answer.tokens) >= 110)
    engine.run(lambda: not engine.scheduler.connector.has_pending_push_work())  # blocks in a store cannot be reset
    assert len(world.sidecar.chunks()) == 3
    while engine.in_flight:
        engine.take_oldest()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    for worker in engine.workers:
        worker.kv.poison(range(engine.settings.num_blocks))
    engine.run()
    engine.check()
    assert len(answer.admissions) == 2, answer
    assert answer.admissions[1] >= 192, f"only {answer.admissions[1]} tokens came back from the cache"


@case
def hits_under_memory_pressure_all_finish(world: World) -> None:
    prompts = [prompt(i, 260) for i in range(6)]
    world.warm(*prompts)
    engine = world.engine(num_blocks=44)
    for tokens in prompts:
        engine.submit(tokens, 40)
    engine.run(timeout=60)
    engine.check()


@case
def a_reset_with_connector_forgets_the_chunks(world: World) -> None:
    engine = world.engine()
    engine.generate(prompt(1, 200))
    engine.forget_local(connector=True)
    assert engine.generate(prompt(1, 200)).admissions == [0]


@case
def a_small_pool_evicts_and_serves_right_bytes(world: World) -> None:
    world.sidecar.close()
    world.sidecar = SidecarProcess(pool_bytes=4 << 20)
    world.sidecar.start()
    engine = world.engine()
    for _ in range(2):
        for i in range(60):  # 240 chunks of 24 KiB in 4 MiB
            engine.submit(prompt(i, 256 + i % 7))
        engine.run(timeout=60)
        engine.check()
        engine.forget_local()
    assert engine.generate(prompt(59, 256)).computed <= 256


@case
def synchronous_stores_and_loads_work_too(world: World) -> None:
    extra = {"maru.write_behind": False, "maru.deferred_load": False}
    world.warm(prompt(1, 250), extra=extra)
    answer = world.engine(extra=extra).generate(prompt(1, 250), 4)
    assert answer.admissions == [192]
    answer = world.engine(extra=extra).generate(prompt(1, 250)[:192], 4)
    assert answer.tokens == continuation(prompt(1, 250)[:192], 4)


@case
def without_the_overlap_path_a_lone_hit_is_loaded_as_well(world: World) -> None:
    world.warm(prompt(1, 250))
    answer = world.engine(extra={"maru.layerwise_overlap": False}).generate(prompt(1, 250), 4)
    assert answer.admissions == [192]


@case
def a_hit_below_the_minimum_is_not_taken(world: World) -> None:
    world.warm(prompt(1, 250))
    engine = world.engine(extra={"maru.min_hit_tokens": 128})
    assert engine.generate(prompt(1, 250)[:100]).admissions == [0]
    engine.forget_local()
    assert engine.generate(prompt(1, 250)).admissions == [192]


@case
def a_random_mix_of_everything_never_reads_a_wrong_byte(world: World) -> None:
    rng = random.Random(11)
    for _ in range(3):
        engine = world.engine(num_blocks=56, max_batched_tokens=rng.choice([45, 96, 200]))
        live: list[Outcome] = []
        for turn in range(50):
            stem = prompt(rng.randint(0, 4), 300)[: rng.randint(1, 300)]
            live.append(engine.submit(stem + prompt(rng.randint(0, 9), rng.randint(1, 60)), rng.randint(1, 30)))
            for _ in range(turn % 7):
                engine.step()
            if rng.random() < 0.2:
                victim = rng.choice(live)
                if not victim.finished and not victim.aborted:
                    engine.abort(victim)
            if rng.random() < 0.05:
                engine.scheduler.reset_prefix_cache()
        engine.run(timeout=60)
        engine.check()
        world.end(engine)


@case
def a_wrong_byte_under_a_running_request_is_noticed(world: World) -> None:
    """The check that every other case relies on."""
    from tests.support.vllm_sched import WrongBytes

    engine = world.engine()
    answer = engine.submit(prompt(1, 100), 20)
    engine.run(lambda: len(answer.tokens) >= 3)
    engine.workers[0].kv.poison([engine.scheduler.kv_cache_manager.get_block_ids(engine.name_of(answer))[0][2]])
    with pytest.raises(WrongBytes):
        engine.run()
