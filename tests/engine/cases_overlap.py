"""Scheduler cases: a lone hit is loaded by the workers within its own step. vLLM plans such a hit as synchronous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.engine.scheduler_world import World, case
from tests.support.toy_model import prompt

from maru_shm import messages as M

if TYPE_CHECKING:
    from tests.support.vllm_sched import Engine

ON = {"extra": {"maru.layerwise_overlap": True}}  #: the toy engine says it runs model runner V2, in host memory: off by default


def loads(world: World) -> int:
    """Hits the sidecar itself has loaded."""
    answer = world.sidecar.ask(M.GetStatus())
    assert isinstance(answer, M.Status)
    transfers: Any = answer.sections["transfers"]
    return int(next(t["tickets"] for t in transfers if t["op"] == "load"))


def ready(world: World, **settings: Any) -> Engine:
    """An engine whose workers are ready for overlap, and have said so."""
    engine = world.engine(**ON, **settings)
    while not engine.scheduler.connector._scheduler._overlap.generation:  # the case's time limit ends it
        engine.generate([1, 2, 3])
    engine.outcomes.clear()
    return engine


@case
def a_lone_hit_is_loaded_within_its_step_without_the_sidecar(world: World) -> None:
    world.warm(prompt(1, 256))
    engine = ready(world)
    answer = engine.generate(prompt(1, 256) + prompt(2, 100), 4)
    assert (answer.admissions, answer.computed) == ([256], 103)
    assert loads(world) == 0
    answer = engine.generate(prompt(1, 256) + prompt(3, 300), 4)  # its own prefix cache now, and a suffix of several steps
    assert answer.tokens
    engine.forget_local()
    answer = engine.generate(prompt(1, 256) + prompt(4, 300), 4)
    assert answer.admissions == [256]
    assert loads(world) == 0


@case
def two_ranks_load_their_own_slabs_of_a_lone_hit(world: World) -> None:
    world.warm(prompt(1, 200), world_size=2)
    engine = ready(world, world_size=2)
    answer = engine.generate(prompt(1, 200)[:192] + prompt(2, 70), 2)
    assert (answer.admissions, loads(world)) == ([192], 0)


@case
def a_lone_hit_that_leaves_nearly_nothing_to_compute_is_loaded_by_the_sidecar(world: World) -> None:
    world.warm(prompt(1, 256))
    engine = ready(world)
    # vLLM computes the last token of a prompt that was loaded as a whole again
    for n, (extra, hit) in enumerate((([], 255), (prompt(2, 1), 256), (prompt(2, 20), 256)), 1):
        answer = engine.generate(prompt(1, 256) + extra, 4)
        assert (answer.admissions, loads(world)) == ([hit], n)
        engine.forget_local()


@case
def two_live_hits_are_loaded_by_the_sidecar(world: World) -> None:
    world.warm(prompt(1, 128), prompt(2, 128))
    engine = ready(world)
    both = [engine.submit(prompt(i, 128) + prompt(9, 100), 4) for i in (1, 2)]
    engine.run()
    engine.check()
    assert [one.admissions for one in both] == [[128], [128]]
    assert loads(world) == 2


@case
def a_lone_hit_is_right_when_the_sidecar_dies_in_its_step(world: World) -> None:
    world.warm(prompt(1, 256))
    engine = ready(world)
    connector = engine.workers[0].connector
    hook = connector.wait_for_layer_load

    def kill_first(name: str) -> None:
        connector.wait_for_layer_load = hook
        world.sidecar.kill()
        hook(name)

    outcome = engine.submit(prompt(1, 256) + prompt(2, 100), 4)
    connector.wait_for_layer_load = kill_first
    engine.run(lambda: outcome.finished)
    engine.run()
    engine.check()
    assert outcome.admissions == [256]
    assert engine.generate(prompt(3, 200)).admissions == [0]


@case
def an_abort_in_the_step_of_an_overlapped_load_leaves_nothing_behind(world: World) -> None:
    world.warm(prompt(1, 256))
    engine = ready(world)
    outcome = engine.submit(prompt(1, 256) + prompt(2, 300), 4)
    engine.run(lambda: bool(outcome.admissions))  # the lookup may need a second step
    engine.abort(outcome)
    engine.run()
    engine.check()
    assert outcome.admissions == [256]
    assert engine.generate(prompt(1, 256) + prompt(3, 80)).finished
    assert engine.scheduler.connector._scheduler._requests == {}
