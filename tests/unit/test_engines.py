"""The halves of an engine agree before they share a namespace, and leave one by one."""

from __future__ import annotations

import msgspec
import pytest

from maru_shm.geometry import KvLayout, KvPlane, KvRegion, RegionKind
from maru_shm.layout import Role
from maru_shm.messages import Attach, RefusalCode
from maru_sidecar.engines import EngineRegistry, Refusal
from maru_sidecar.pool_header import plan_regions

LAYOUT = KvLayout(64, 16, (KvPlane(0, 0, 4096, 4096),), (KvRegion(RegionKind.PROCESS_VM, 4096, 1 << 20),), "sig")


def worker(rank: int = 0, world: int = 2, **changes: object) -> Attach:
    base = Attach(Role.WORKER, "e", rank, world, b"r" * 16, 64, 8, 8, 8, LAYOUT)
    return msgspec.structs.replace(base, **changes)


def scheduler(**changes: object) -> Attach:
    return worker(role=Role.SCHEDULER, layout=None, **changes)


@pytest.fixture
def registry() -> EngineRegistry:
    return EngineRegistry(region_bytes=1 << 20, max_engines=3)


def test_an_engine_is_complete_when_every_rank_has_registered(registry: EngineRegistry) -> None:
    engine = registry.claim(scheduler(), 1)
    assert engine.namespace == b""
    assert registry.claim(worker(0), 2) is engine
    assert engine.namespace
    registry.claim(worker(1), 3)
    registry.registered(engine, 0)
    assert not engine.complete
    registry.registered(engine, 1)
    assert engine.complete
    assert engine.slab_bytes == 4 * 4096
    assert engine.blocks_per_chunk == 4


def test_a_rank_that_leaves_takes_only_itself_along(registry: EngineRegistry) -> None:
    engine = registry.claim(worker(0), 1)
    registry.claim(worker(1), 2)
    for rank in (0, 1):
        registry.registered(engine, rank)
    registry.leave(engine, Role.WORKER, 1, 2)
    registry.leave(engine, Role.WORKER, 1, 2)
    assert not engine.complete
    assert engine.registered == {0}
    assert registry.claim(worker(1), 3) is engine
    registry.leave(engine, Role.WORKER, 1, 2)  # a late goodbye of the session before
    assert (Role.WORKER, 1) in engine.claims


def test_an_engine_is_forgotten_with_its_last_session(registry: EngineRegistry) -> None:
    engine = registry.claim(worker(0), 1)
    registry.leave(engine, Role.WORKER, 0, 1)
    assert not registry.engines
    assert registry.claim(worker(0, world=1, chunk_tokens=128), 2).world == 1


def test_a_scheduler_that_stays_sees_its_workers_return_with_another_geometry(registry: EngineRegistry) -> None:
    engine = registry.claim(scheduler(world=1), 1)
    registry.claim(worker(0, world=1), 2)
    before = engine.namespace
    registry.leave(engine, Role.WORKER, 0, 2)
    registry.claim(worker(0, world=1, layout=msgspec.structs.replace(LAYOUT, signature="other")), 3)
    assert engine.namespace not in (b"", before)


@pytest.mark.parametrize(
    ("attach", "words"),
    [
        (worker(1, world=3), "world size is '2'.*'3'"),
        (worker(1, chunk_tokens=32), "chunk_tokens is '64'.*'32'"),
        (worker(1, root=b"s" * 16), "root is"),
        (worker(1, layout=msgspec.structs.replace(LAYOUT, signature="x")), "geometry is"),
        (worker(0), "worker 0 of engine 'e' is attached already"),
    ],
)
def test_a_half_that_disagrees_is_refused_and_changes_nothing(registry: EngineRegistry, attach: Attach, words: str) -> None:
    engine = registry.claim(worker(0), 1)
    with pytest.raises(Refusal, match=words) as caught:
        registry.claim(attach, 2)
    assert caught.value.code is RefusalCode.CONFLICT
    assert engine.claims == {(Role.WORKER, 0): 1}


def test_a_refused_first_half_leaves_no_engine_behind(registry: EngineRegistry) -> None:
    with pytest.raises(Refusal, match="40 tokens"):
        registry.claim(worker(0, chunk_tokens=40), 1)
    assert not registry.engines


def test_a_slab_that_fits_no_region_is_refused_with_both_sizes(registry: EngineRegistry) -> None:
    with pytest.raises(Refusal, match="1048576 bytes, a pool region 1048576"):
        registry.claim(worker(0, chunk_tokens=16 * 256), 1)


def large_chunk(mib: int) -> Attach:
    """A worker whose chunk has ``mib`` MiB, in blocks of 64 KiB."""
    layout = KvLayout(mib << 4, 16, (KvPlane(0, 0, 65536, 65536),), (KvRegion(RegionKind.PROCESS_VM, 4096, mib << 20),), "sig")
    return worker(0, chunk_tokens=mib << 8, layout=layout)


@pytest.mark.parametrize(("chunk_mib", "region_mib", "pool_mib"), [(2, 4, 64), (3, 4, 64), (600, 1024, 16384)])
def test_the_refusal_of_a_slab_says_which_region_and_which_pool_would_hold_it(
    registry: EngineRegistry, chunk_mib: int, region_mib: int, pool_mib: int
) -> None:
    with pytest.raises(Refusal) as caught:
        registry.claim(large_chunk(chunk_mib), 1)
    assert caught.value.remedy == (
        f"lower maru.chunk_tokens, or make the pool anew with pool.region_size = {region_mib}MiB or "
        f"pool.size = {pool_mib}MiB, or more"
    )
    assert plan_regions(pool_mib << 20, 0)[0] == region_mib << 20
    assert EngineRegistry(region_mib << 20, 1).claim(large_chunk(chunk_mib), 1)


def test_no_pool_size_is_promised_to_give_regions_above_1_gib(registry: EngineRegistry) -> None:
    with pytest.raises(Refusal) as caught:
        registry.claim(large_chunk(1024), 1)
    assert caught.value.remedy.endswith("make the pool anew with pool.region_size = 2048MiB, or more")


def test_engines_are_bounded(registry: EngineRegistry) -> None:
    for i in range(3):
        registry.claim(worker(0, engine_id=f"e{i}"), i)
    with pytest.raises(Refusal, match="3 engines"):
        registry.claim(worker(0, engine_id="one too many"), 9)


def test_a_chunk_of_too_many_pieces_is_refused_with_the_number_and_the_limit(registry: EngineRegistry) -> None:
    size = 2048 * 1024 * 2
    planes = tuple(KvPlane(0, i * 2, 2048, 1) for i in range(1024))
    layout = KvLayout(2048, 1, planes, (KvRegion(RegionKind.PROCESS_VM, 4096, size),), "tiny")
    with pytest.raises(Refusal, match=r"2048 blocks in 1024 planes is 2097152 pieces.*limits.max_pieces \(65536\)") as refused:
        registry.claim(worker(layout=layout, chunk_tokens=2048), 1)
    assert refused.value.code is RefusalCode.LIMIT
    assert registry.claim(worker(layout=layout, chunk_tokens=64), 1)


def test_a_world_whose_index_would_outweigh_its_slabs_is_refused_with_both_sizes(registry: EngineRegistry) -> None:
    with pytest.raises(Refusal, match=r"world of 4096 ranks takes 32768 bytes .* slab of 16384 bytes.*at most 4096") as refused:
        registry.claim(worker(world=4096), 1)
    assert refused.value.code is RefusalCode.LIMIT
    assert registry.claim(worker(world=512), 1)
