"""What must hold for the connector under vLLM's real schedulers, one function per case.

``test_scheduler.py`` runs this file once per vLLM release, in a process of its own::

    scheduler_cases.py RESULTS MODEL_DIR [CASE…]      one JSON line per (case, scheduler) in RESULTS

Imports of vLLM are left to :func:`main`, so that the list of cases can be read without it.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import no_accelerator
from tests.support.pool_damage import flip_slabs
from tests.support.sidecar_process import SidecarProcess
from tests.support.toy_model import continuation, prompt

if TYPE_CHECKING:
    from tests.support.vllm_sched import Engine, Outcome

CASE_TIMEOUT_S = 90
SCHEDULERS = ("plain", "async")
Case = Callable[["World"], None]
CASES: dict[str, Case] = {}
PARKED = "WAITING_FOR_REMOTE_KVS"
FAST_LINK = {"maru.attach_timeout_s": 10.0}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class World:
    """One sidecar, and engines that come and go on it."""

    def __init__(self, model: Path, scheduler: str) -> None:
        self.model = model
        self.scheduler = scheduler
        self.sidecar = SidecarProcess(pool_bytes=32 << 20)
        self._engines: list[Engine] = []

    def engine(self, *, attached: bool = True, **settings: Any) -> Engine:
        """A new engine; ``attached``: once it has found the sidecar."""
        from tests.support.vllm_sched import Engine, Settings

        extra = {**FAST_LINK, **settings.pop("extra", {})}
        asynchronous = self.scheduler == "async"
        engine = Engine(Settings(self.sidecar.socket, async_scheduling=asynchronous, extra=extra, **settings), self.model)
        self._engines.append(engine)
        if attached:
            engine.warm_up()
        return engine

    def end(self, engine: Engine) -> None:
        engine.close()
        self._engines.remove(engine)

    def warm(self, *prompts: list[int], **settings: Any) -> None:
        """Let a cold engine compute these prompts, and end it."""
        engine = self.engine(**settings)
        for tokens in prompts:
            engine.generate(tokens)
        self.end(engine)

    def close(self) -> None:
        try:
            for engine in self._engines:
                engine.close()
        finally:
            self.sidecar.close()


def eventually(what: str, holds: Callable[[], bool], *, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(0.02)


# --- hits -------------------------------------------------------------------------------------------------------------------
@case
def a_prompt_of_whole_chunks_is_loaded_by_the_next_engine(world: World) -> None:
    world.warm(prompt(1, 256))
    assert len(world.sidecar.chunks()) == 4
    engine = world.engine()
    answer = engine.generate(prompt(1, 256), 4)
    assert answer.computed == 1 + 3, answer  # the last prompt token is always computed: it gives the first answer


@case
def the_rest_of_a_prompt_after_its_last_whole_chunk_is_computed(world: World) -> None:
    world.warm(prompt(1, 250))
    answer = world.engine().generate(prompt(1, 250))
    assert (answer.admissions, answer.computed) == ([192], 58)


@case
def a_prompt_hits_as_far_as_it_shares_a_prefix(world: World) -> None:
    world.warm(prompt(1, 300))
    answer = world.engine().generate(prompt(1, 200)[:140] + prompt(2, 100))
    assert (answer.admissions, answer.computed) == ([128], 112)


@case
def a_prompt_nobody_saw_misses(world: World) -> None:
    world.warm(prompt(1, 200))
    answer = world.engine().generate(prompt(2, 200))
    assert (answer.admissions, answer.computed) == ([0], 200)


@case
def a_hit_continues_a_local_prefix_that_ends_inside_a_chunk(world: World) -> None:
    world.warm(prompt(1, 320))
    engine = world.engine()
    engine.generate(prompt(1, 320)[:100])  # 64 loaded, 36 computed: six local blocks, the chunk's other two are not there
    answer = engine.generate(prompt(1, 320))
    assert answer.computed == 1, answer


@case
def the_suffix_after_a_partial_hit_is_stored_for_the_next_engine(world: World) -> None:
    world.warm(prompt(1, 130))
    world.warm(prompt(1, 130)[:128] + prompt(2, 200))
    assert len(world.sidecar.chunks()) == 5
    answer = world.engine().generate(prompt(1, 130)[:128] + prompt(2, 200))
    assert (answer.admissions, answer.computed) == ([320], 8)


@case
def a_generated_answer_is_a_hit_in_the_next_turn(world: World) -> None:
    engine = world.engine()
    first = engine.generate(prompt(1, 100), 100)
    world.end(engine)
    turn = prompt(1, 100) + first.tokens + prompt(3, 20)
    answer = world.engine().generate(turn)
    assert (answer.admissions, answer.computed) == ([192], len(turn) - 192)


@case
def another_cache_salt_misses(world: World) -> None:
    engine = world.engine()
    engine.generate(prompt(1, 200), salt="tenant a")
    world.end(engine)
    engine = world.engine()
    assert engine.generate(prompt(1, 200), salt="tenant b").admissions == [0]
    assert engine.generate(prompt(1, 200)).admissions == [0]
    engine.forget_local()
    assert engine.generate(prompt(1, 200), salt="tenant a").admissions == [192]


@case
def the_same_prompt_three_times_in_one_step_is_stored_once_and_loaded_three_times(world: World) -> None:
    for computed in (None, 8):
        engine = world.engine(max_batched_tokens=640)
        answers = [engine.submit(prompt(1, 200), 3) for _ in range(3)]
        engine.run()
        engine.check()
        assert len(world.sidecar.chunks()) == 3
        if computed is not None:
            assert [a.computed for a in answers] == [computed + 2] * 3, answers
        world.end(engine)


@case
def chunked_prefill_at_odd_boundaries_stores_every_chunk(world: World) -> None:
    for i, budget in enumerate((37, 50, 61, 127)):
        tokens = prompt(10 + i, 390)
        world.warm(tokens, max_batched_tokens=budget)
        answer = world.engine(max_batched_tokens=budget).generate(tokens)
        assert (answer.admissions, answer.computed) == ([384], 6), (budget, answer)


@case
def every_layout_loads_what_it_stored(world: World) -> None:
    from tests.support.vllm_kv import LAYOUTS

    for i, layout in enumerate(LAYOUTS):
        tokens = prompt(20 + i, 200)
        world.warm(tokens, layout=layout)
        answer = world.engine(layout=layout).generate(tokens)
        assert answer.admissions == [192], (layout, answer)


@case
def another_layout_is_served_right_bytes_or_none(world: World) -> None:
    from tests.support.vllm_kv import LAYOUTS

    for layout in LAYOUTS:
        world.warm(prompt(1, 200), layout=layout)  # a wrong byte raises


@case
def views_at_kernel_block_granularity_are_addressed_by_manager_blocks(world: World) -> None:
    shape = {"block_tokens": 64, "kernel_tokens": 16, "num_blocks": 40, "chunk_tokens": 128}
    world.warm(prompt(1, 300), **shape)
    answer = world.engine(**shape).generate(prompt(1, 300))
    assert (answer.admissions, answer.computed) == ([256], 44)


# --- two ranks ------------------------------------------------------------------------------------------------------
@case
def two_ranks_store_and_load_their_own_halves(world: World) -> None:
    world.warm(prompt(1, 200), world_size=2)
    assert {(c.ranks, c.world) for c in world.sidecar.chunks()} == {(2, 2)}
    answer = world.engine(world_size=2).generate(prompt(1, 200), 3)
    assert answer.admissions == [192]


@case
def a_load_that_fails_on_one_rank_is_recomputed_on_both(world: World) -> None:
    world.warm(prompt(1, 200), world_size=2)
    assert flip_slabs(world.sidecar.pool, depth=1, rank=1) == 1
    engine = world.engine(world_size=2)
    engine.generate(prompt(1, 200), 3)
    engine.forget_local()
    assert engine.generate(prompt(1, 200)).admissions == [192]


# --- failures ----------------------------------------------------------------------------------------------------------------
def _damaged_chunk(world: World, depth: int) -> None:
    world.warm(prompt(1, 320))
    assert flip_slabs(world.sidecar.pool, depth=depth) == 1
    engine = world.engine()
    answer = engine.generate(prompt(1, 320), 4)
    assert answer.computed >= 320 - 64 * depth - 1, answer
    engine.forget_local()
    again = engine.generate(prompt(1, 320))
    assert again.computed == 1, f"the damaged chunk was not stored again: {again}"


@case
def a_load_that_fails_at_its_first_block_is_recomputed(world: World) -> None:
    _damaged_chunk(world, 0)


@case
def a_load_that_fails_at_a_later_block_is_recomputed_from_there(world: World) -> None:
    _damaged_chunk(world, 2)


@case
def two_requests_on_one_damaged_chunk_are_both_recomputed(world: World) -> None:
    world.warm(prompt(1, 320))
    assert flip_slabs(world.sidecar.pool, depth=1) == 1
    engine = world.engine(max_batched_tokens=640)
    for _ in range(2):
        engine.submit(prompt(1, 320), 3)
    engine.run()
    engine.check()


def _park(world: World, engine: Engine, tokens: list[int], n: int = 4) -> Outcome:
    """Submit a hit whose load cannot proceed: the sidecar stands still just before the load is posted."""
    for worker in engine.workers:
        start = worker.connector.start_load_kv

        def stopped(context: Any, *, _start: Any = start, **kwargs: Any) -> None:
            if engine.status(outcome) == PARKED and not stopped_once:
                stopped_once.append(True)
                world.sidecar.pause()
            _start(context, **kwargs)

        worker.connector.start_load_kv = stopped
    stopped_once: list[bool] = []
    outcome = engine.submit(tokens, n)
    engine.run(lambda: engine.status(outcome) == PARKED, timeout=10)
    return outcome


@case
def an_abort_while_loading_frees_the_blocks_and_disturbs_nobody(world: World) -> None:
    world.warm(prompt(1, 320), prompt(2, 200))
    engine = world.engine(num_blocks=40)
    parked = _park(world, engine, prompt(1, 320))
    engine.abort(parked)
    other = engine.submit(prompt(3, 400), 20)  # takes the freed blocks, if they are free
    for _ in range(20):
        engine.step()
    world.sidecar.resume()
    engine.run()
    engine.check()
    assert other.finished


@case
def aborts_at_every_step_of_a_load_leave_a_working_engine(world: World) -> None:
    world.warm(prompt(1, 320))
    engine = world.engine()
    for steps in range(8):
        outcome = engine.submit(prompt(1, 320), 5)
        for _ in range(steps):
            engine.step()
        engine.abort(outcome)
        if steps % 2:
            engine.submit(prompt(1, 320), 2)
        engine.run()
        engine.check()
        engine.forget_local()


@case
def a_sidecar_that_stands_still_costs_a_recomputation(world: World) -> None:
    world.warm(prompt(1, 320))
    engine = world.engine(extra={"maru.load_timeout_s": 1.0, "maru.store_timeout_s": 1.0})
    try:
        _park(world, engine, prompt(1, 320))
        engine.run()
        engine.check()
    finally:
        world.sidecar.resume()


@case
def no_sidecar_means_no_hits_and_right_answers(world: World) -> None:
    world.sidecar.stop()
    engine = world.engine(attached=False, extra={"maru.attach_timeout_s": 0.1})
    assert engine.generate(prompt(1, 200), 5).admissions == [0]
    engine.forget_local()
    assert engine.generate(prompt(1, 200), 5).admissions == [0]


@case
def a_sidecar_that_comes_later_is_found(world: World) -> None:
    world.sidecar.stop()
    engine = world.engine(attached=False, extra={"maru.attach_timeout_s": 0.1})
    engine.generate(prompt(1, 200))
    world.sidecar.start()
    _hits_again(engine, prompt(1, 200))


def _hits_again(engine: Engine, tokens: list[int]) -> None:
    """The engine re-attaches by itself, stores, and then hits."""

    def hit() -> bool:
        engine.forget_local()
        return engine.generate(tokens).admissions == [min(len(tokens) // 64 * 64, len(tokens) - 1)]

    eventually("a hit after the sidecar came back", hit)


@case
def a_sidecar_killed_while_a_load_runs_costs_a_recomputation(world: World) -> None:
    world.warm(prompt(1, 320))
    engine = world.engine()
    _park(world, engine, prompt(1, 320))
    world.sidecar.kill()
    engine.run()
    engine.check()
    world.sidecar.start()
    _hits_again(engine, prompt(1, 320))


@case
def a_sidecar_killed_between_requests_keeps_its_chunks(world: World) -> None:
    engine = world.engine()
    engine.generate(prompt(1, 320))
    world.sidecar.kill()
    engine.forget_local()
    engine.generate(prompt(2, 200), 10)
    world.sidecar.start()
    assert len(world.sidecar.chunks()) >= 5
    _hits_again(engine, prompt(1, 320))


@case
def a_sidecar_killed_again_and_again_under_load_never_serves_a_wrong_byte(world: World) -> None:
    engine = world.engine(num_blocks=64)
    rng = random.Random(7)
    for _ in range(4):
        for i in range(6):
            engine.submit(prompt(i % 3, 150 + 30 * i), rng.randint(1, 20))
        for _ in range(rng.randint(1, 12)):
            engine.step()
        world.sidecar.kill()
        for _ in range(rng.randint(0, 6)):
            engine.step()
        world.sidecar.start()
        engine.run()
        engine.check()
        engine.forget_local()
    _hits_again(engine, prompt(0, 200))


# --- preemption, pressure, modes --------------------------------------------------------------------------------
@case
def preempted_requests_resume_with_right_bytes(world: World) -> None:
    engine = world.engine(num_blocks=40)
    answers = [engine.submit(prompt(i, 150), 60) for i in range(5)]
    engine.run()
    engine.check()
    assert any(len(a.admissions) > 1 for a in answers), "nothing was preempted: the case shows nothing"


@case
def a_preempted_request_reloads_prompt_and_generated_chunks(world: World) -> None:
    engine = world.engine(num_blocks=40)  # two prompts fit, their answers do not: the second is preempted while it generates
    answers = [engine.submit(prompt(i, 250), 150) for i in range(2)]
    engine.run()
    engine.check()
    preempted = answers[1]
    assert len(preempted.admissions) == 2, preempted
    assert preempted.admissions[1] >= 256, "the chunk that its first generated tokens completed did not come back"


@case
def a_request_preempted_by_a_cache_reset_reloads_what_was_stored(world: World) -> None:
    engine = world.engine()
    answer = engine.submit(prompt(1, 100), 150)
    engine.run(lambda: len(answer.tokens) >= 110)
    engine.run(lambda: len(world.sidecar.chunks()) >= 3, timeout=10)
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


# --- running them ------------------------------------------------------------------------------------------------------------
@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def expired(*_: object) -> None:
        raise TimeoutError(f"the case ran longer than {seconds} s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run_case(function: Case, model: Path, scheduler: str) -> str:
    """Empty if it passed, else what went wrong."""
    world = World(model, scheduler)
    error = ""
    try:
        with time_limit(CASE_TIMEOUT_S):
            world.sidecar.start()
            function(world)
    except (Exception, SystemExit):  # noqa: BLE001 — the whole matrix is reported, whatever one case does
        error = traceback.format_exc()
        if world.sidecar.log.exists():
            error += "\n--- the sidecar's log\n" + world.sidecar.log.read_text()[-4000:]
    try:
        with time_limit(CASE_TIMEOUT_S):
            world.close()
    except Exception:  # noqa: BLE001
        error += "\n--- at the end\n" + traceback.format_exc()
    return error


def main() -> None:
    results, model, *chosen = sys.argv[1:]
    no_accelerator.pretend()
    import vllm
    from tests.support.vllm_sched import write_model

    write_model(Path(model))
    with open(results, "a") as out:

        def report(**fields: object) -> None:
            out.write(json.dumps(fields) + "\n")
            out.flush()

        report(vllm=vllm.__version__)
        for name, function in CASES.items():
            if chosen and name not in chosen:
                continue
            for scheduler in SCHEDULERS:
                started = time.monotonic()
                error = run_case(function, Path(model), scheduler)
                report(case=name, scheduler=scheduler, error=error, seconds=round(time.monotonic() - started, 2))
        report(complete=True)


if __name__ == "__main__":
    main()
