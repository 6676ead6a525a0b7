"""Scheduler cases: damaged chunks, aborts, and a sidecar that is absent, stands still, dies or comes back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.engine.scheduler_world import World, case
from tests.support.pool_damage import flip_slabs
from tests.support.toy_model import prompt
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.vllm_sched import Engine, Outcome

PARKED = "WAITING_FOR_REMOTE_KVS"


@case
def an_engine_with_no_kv_cache_at_all_runs_as_without_a_connector(world: World) -> None:
    """Encoders have none. vLLM asserts that there is one group when a request ends, unless a connector takes any number."""
    from tests.support.vllm_sched import Settings, vllm_config
    from vllm.sampling_params import SamplingParams
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    config = vllm_config(Settings(world.sidecar.socket), world.model)
    config.cache_config.enable_prefix_caching = False
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config, kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
        structured_output_manager=StructuredOutputManager(config), block_size=16, log_stats=True,
    )  # fmt: skip
    scheduler.add_request(
        Request(
            request_id="a", prompt_token_ids=prompt(1, 40), sampling_params=SamplingParams(max_tokens=1), pooling_params=None
        )
    )
    assert scheduler.schedule().num_scheduled_tokens == {"a": 40}
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert not scheduler.has_unfinished_requests()


@case
def beside_other_connectors_a_policy_that_fails_requests_is_warned_of(world: World) -> None:
    from unittest import mock

    from tests.support.vllm_sched import Settings, vllm_config
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from maru_connector import connector, namespace

    config = vllm_config(Settings(world.sidecar.socket), world.model)
    alone = config.kv_transfer_config
    child = {name: getattr(alone, name) for name in ("kv_connector", "kv_connector_module_path", "kv_role")}
    several = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both",
        kv_connector_extra_config={"connectors": [{**child, "kv_connector_extra_config": alone.kv_connector_extra_config}]},
    )  # fmt: skip
    cache = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[mock.Mock(kv_cache_spec=mock.Mock(block_size=16))]
    )
    for transfer, warned in ((alone, 0), (several, 1)):
        config.kv_transfer_config = transfer
        with (
            mock.patch.object(connector.logger, "warning") as warning,
            mock.patch.object(namespace, "declined", return_value=None),
            mock.patch.object(namespace, "model_facts", return_value={}),
        ):
            KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache).shutdown()
        assert sum("kv_load_failure_policy" in str(call) for call in warning.call_args_list) == warned, warning.call_args_list


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
def a_sidecar_that_stands_still_gives_the_blocks_of_its_stores_back(world: World) -> None:
    engine = world.engine(num_blocks=40, extra={"maru.store_timeout_s": 1.0})
    world.sidecar.pause()
    try:
        for i in range(3):
            engine.submit(prompt(i, 300), 5)
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

    until(hit, "a hit after the sidecar came back")


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
