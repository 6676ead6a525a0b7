"""Scheduler cases: what hits, how far, and that it is right, on one rank and on two."""

from __future__ import annotations

from tests.engine.scheduler_world import World, case
from tests.support.pool_damage import flip_slabs
from tests.support.toy_model import prompt


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
