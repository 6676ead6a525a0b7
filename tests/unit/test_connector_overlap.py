"""The overlap path in host memory, both halves on a real sidecar: the bytes are right layer by layer, whoever dies."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("vllm")

from tests.support.client import ROOT, Client, KvCache
from tests.support.pool_damage import flip_slabs
from tests.support.sidecar_process import SidecarProcess
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from maru_connector.fence import HostFence
from maru_connector.link import SidecarLink
from maru_connector.metadata import LoadJob, StepMetadata
from maru_connector.options import parse_options
from maru_connector.overlap import Overlap, distinct
from maru_connector.overlap_host import HostCopier
from maru_connector.overlap_policy import OverlapPolicy
from maru_connector.scheduler_half import SchedulerHalf
from maru_connector.session import Session
from maru_connector.worker_half import WorkerHalf
from maru_shm import keys as K
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import poolformat as P
from maru_shm.errors import TransferError
from maru_shm.placed_planes import PlacedPlane

CHUNK, BLOCK, LAYERS, PIECE = 64, 16, 3, 4096
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]
SIZE = {"num_blocks": 64, "layers": LAYERS, "piece": PIECE, "block_tokens": BLOCK}
PREFIX = 3  #: chunks that are cached


class Blocks:
    """KVCacheBlocks as far as the connector reads it."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._ids,)


def request(rest: int = 2 * CHUNK, name: str = "a") -> Request:
    """A prompt whose first chunks are in the pool, and ``rest`` tokens more."""
    tokens = random.Random(0).choices(range(1000), k=PREFIX * CHUNK) + random.Random(1).choices(range(1000), k=rest)
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=9), pooling_params=None)


class World:
    """An engine without a model: one scheduler half, one worker half, a KV cache; and the sidecar they are attached to."""

    def __init__(self, *, lease_ttl: float = 60.0, recomputes: bool = False) -> None:
        self.sidecar = SidecarProcess(pool_bytes=32 << 20, flags=("--lease-ttl", str(lease_ttl)))
        self.sidecar.start()
        self.cache = KvCache(**SIZE)
        self.wanted = self._populate()
        base = self.cache.memory.ctypes.data
        self.layers = {
            name: (PlacedPlane(0, base + i * SIZE["num_blocks"] * PIECE, i * PIECE, PIECE, PIECE),)
            for i, name in enumerate(NAMES)
        }
        copier = HostCopier(distinct(self.layers))
        self.overlap = Overlap(self.layers, copier, block_bytes=self.cache.layout.block_bytes, rank=0, world=1)
        options = parse_options({"maru.chunk_tokens": CHUNK, "maru.lookup_patience_ms": 10_000})
        self.worker = WorkerHalf(options, HostFence, recomputes=recomputes)
        worker_link = SidecarLink(
            self.sidecar.socket,
            lambda: (self._attach(L.Role.WORKER), []),
            on_attached=self.worker.on_attached,
            on_lost=self.worker.on_lost,
        )
        assert self.worker.attach(worker_link, self.overlap)
        self.policy = OverlapPolicy(min_tokens=CHUNK, max_tokens=1024, ranks=1)
        link = SidecarLink(self.sidecar.socket, lambda: (self._attach(L.Role.SCHEDULER), []), on_lost=self._lost)
        self.scheduler = SchedulerHalf(
            options, link, ROOT, block_tokens=BLOCK, num_blocks=SIZE["num_blocks"], ranks=1, deferred=True, overlap=self.policy
        )
        self.scheduler.bind_block_pool(BlockPool(SIZE["num_blocks"], enable_caching=True, hash_block_size=BLOCK))
        assert link.wait_attached(10)
        self.stats: dict[str, float] = {}

    def _lost(self, session: Session) -> None:
        self.scheduler.on_lost(session)

    def _attach(self, role: L.Role) -> M.Attach:
        layout = self.cache.layout if role is L.Role.WORKER else None
        return M.Attach(role, "engine", 0, 1, ROOT, CHUNK, 64, 64, 1024, layout)

    def _populate(self) -> npt.NDArray[np.uint8]:
        """Another engine computes the prefix; its blocks' bytes, shape (blocks, layers, piece)."""
        keys = K.ChunkKeys(K.request_root(ROOT), CHUNK)
        keys.extend(request().prompt_token_ids)
        source = KvCache(**SIZE)
        source.fill(5)
        blocks = np.arange(1, 1 + PREFIX * CHUNK // BLOCK, dtype=np.int32)
        with Client(self.sidecar.socket, engine_id="other", root=ROOT, cache=source) as client:
            reply = client.store(bytes(keys.keys[: PREFIX * L.KEY_BYTES]), blocks.reshape(PREFIX, -1))
        assert reply.n_done == PREFIX
        return source.read(blocks)

    def meta(self, scheduled: dict[str, int] | None = None) -> StepMetadata:
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        return self.scheduler.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens=scheduled or {},
                preempted_req_ids=set(),
                scheduled_new_reqs=[],
                scheduled_cached_reqs=cached,
            )
        )

    def run(self, meta: StepMetadata, *, layered: bool = True, on_layer: Callable[[int], None] | None = None) -> set[int]:
        """Execute a step as vLLM does; the blocks it reported invalid."""
        self.worker.start_loads(meta, layered=layered)
        if meta.has_forward:
            for i, name in enumerate(NAMES):
                self.worker.wait_for_layer(name)
                if on_layer is not None:
                    on_layer(i)
            self.worker.finish_step(meta)
        finished = self.worker.get_finished(meta)
        invalid = self.worker.take_invalid_blocks()
        if (stats := self.worker.take_stats()) is not None:
            for name, n in stats.data.items():
                self.stats[name] = self.stats.get(name, 0) + n
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=self.worker.take_report(), finished_recving=finished)
        )
        return invalid

    def warm_up(self) -> None:
        """One step with every layer's hook, as any request makes it."""
        meta = self.meta()
        meta.has_forward = True
        self.run(meta)

    def ask(self, one: Request) -> tuple[int | None, bool]:
        """Add ``one`` and ask until there is an answer."""
        self.scheduler.on_new_request(one)
        end = time.monotonic() + 10
        while (answer := self.scheduler.get_num_new_matched_tokens(one, 0))[0] is None:
            assert time.monotonic() < end, "no answer"
            self.run(self.meta())
        return answer

    def claim(self, one: Request, first_block: int = 20) -> tuple[StepMetadata, npt.NDArray[np.int32]]:
        """Claim the hit for the overlap path and schedule it: the step, and the blocks to be filled, in reverse order."""
        assert self.ask(one) == (PREFIX * CHUNK, False)
        n = PREFIX * CHUNK // BLOCK
        blocks = np.arange(first_block + n - 1, first_block - 1, -1, dtype=np.int32)
        self.scheduler.update_state_after_alloc(one, Blocks([*blocks.tolist(), 60, 61]), PREFIX * CHUNK)
        return self.meta({one.request_id: one.num_tokens - PREFIX * CHUNK}), blocks

    def leases(self) -> int:
        answer = self.sidecar.ask(M.GetStatus())
        assert isinstance(answer, M.Status)
        directory: Any = answer.sections["directory"]
        return int(directory["leases"])

    def no_lease_is_left(self) -> None:
        end = time.monotonic() + 10
        while self.leases():
            assert time.monotonic() < end, "a lease is left"
            self.run(self.meta())
            time.sleep(0.005)

    def change_slabs(self) -> None:
        """Take the slabs away under their lease: what no correct sidecar does."""
        pool = np.memmap(self.sidecar.pool, np.uint8, mode="r+")
        region_bytes, n_regions = P.POOL_HEADER.unpack_from(pool.data)[5:7]
        for start in range(region_bytes, region_bytes * n_regions, region_bytes):
            fields = P.REGION_HEADER.unpack_from(pool.data, start)
            if fields[0] == P.REGION_MAGIC:
                at = start + P.HEADER_BYTES
                headers = pool[at : at + fields[5] * P.SLAB_HEADER_BYTES].view(P.SLAB_HEADER)
                headers["state"] += 1 << 8

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.detach()
        self.sidecar.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    try:
        made.warm_up()
        yield made
    finally:
        made.close()


def test_each_layer_is_there_when_its_hook_returns_and_all_are_equal_at_the_end(world: World) -> None:
    meta, blocks = world.claim(request())
    here: list[bool] = []

    def look(layer: int) -> None:
        here.append(bool((world.cache.blocks[blocks, layer] == world.wanted[:, layer]).all()))

    assert not world.run(meta, on_layer=look)
    assert here == [True] * LAYERS
    assert (world.cache.read(blocks) == world.wanted).all()
    assert not world.cache.read([19, 32]).any()
    assert world.stats["loads_overlapped"] == 1
    assert world.stats["load_bytes"] == world.wanted.nbytes
    world.no_lease_is_left()


def test_a_claimed_hit_is_served_when_the_sidecar_is_killed_before_its_step(world: World) -> None:
    meta, blocks = world.claim(request())
    world.sidecar.kill()
    assert not world.run(meta)
    assert (world.cache.read(blocks) == world.wanted).all()


def test_a_claimed_hit_is_served_when_the_sidecar_is_killed_in_the_middle(world: World) -> None:
    meta, blocks = world.claim(request())
    assert not world.run(meta, on_layer=lambda layer: world.sidecar.kill() if layer == 0 else None)
    assert (world.cache.read(blocks) == world.wanted).all()
    world.run(world.meta())
    world.run(world.meta())
    assert world.policy.generation == 0  # nobody there: nothing more is claimed


def test_a_new_sidecar_on_the_same_pool_keeps_the_lease_and_is_used_again(world: World) -> None:
    meta, blocks = world.claim(request())
    world.sidecar.kill()
    world.sidecar.start()
    assert world.leases() == 1
    assert not world.run(meta)
    assert (world.cache.read(blocks) == world.wanted).all()
    world.scheduler.request_finished(request(), [])
    end = time.monotonic() + 20
    while not world.policy.generation or world.scheduler.link.session is None:
        assert time.monotonic() < end, "the engine did not attach again"
        world.run(world.meta())
        time.sleep(0.01)
    meta, blocks = world.claim(request(name="b"), first_block=40)
    assert not world.run(meta)
    assert (world.cache.read(blocks) == world.wanted).all()
    assert world.stats["loads_overlapped"] == 2


def test_where_vllm_does_not_say_that_hooks_come_everything_is_there_before_the_pass(world: World) -> None:
    meta, blocks = world.claim(request())
    world.worker.start_loads(meta, layered=False)
    assert (world.cache.read(blocks) == world.wanted).all()
    world.worker.finish_step(meta)
    report = world.worker.take_report()
    assert report is not None
    assert report.loads_done == {"a": 1}


def test_a_hit_is_loaded_deferred_while_another_request_is_live(world: World) -> None:
    world.scheduler.on_new_request(request(name="other"))
    assert world.ask(request()) == (PREFIX * CHUNK, True)


def test_a_hit_that_was_located_is_loaded_deferred_if_another_request_came_meanwhile(world: World) -> None:
    one = request()
    world.scheduler.on_new_request(one)
    world.scheduler.on_new_request(request(name="other"))
    assert world.ask(one) == (PREFIX * CHUNK, True)


def test_a_request_that_cannot_be_cached_is_live_too(world: World) -> None:
    stranger = request(name="stranger")
    stranger.prompt_token_ids = None
    stranger.prompt_embeds = np.zeros(1)
    world.scheduler.on_new_request(stranger)
    assert world.ask(request()) == (PREFIX * CHUNK, True)
    world.scheduler.request_finished(stranger, [])
    world.scheduler.request_finished(request(), [])
    assert world.ask(request(name="b")) == (PREFIX * CHUNK, False)


def test_a_hit_on_the_whole_prompt_is_loaded_deferred(world: World) -> None:
    assert world.ask(request(rest=0)) == (PREFIX * CHUNK, True)


def test_a_hit_that_leaves_little_to_compute_is_loaded_deferred(world: World) -> None:
    assert world.ask(request(rest=CHUNK - 1)) == (PREFIX * CHUNK, True)


def test_before_every_layers_hook_was_seen_hits_are_loaded_deferred() -> None:
    world = World()
    try:
        meta = world.meta()
        world.worker.start_loads(meta)
        for name in NAMES[:-1]:
            world.worker.wait_for_layer(name)
        world.worker.finish_step(meta)
        world.run(world.meta())
        assert world.policy.generation == 0
        assert world.ask(request()) == (PREFIX * CHUNK, True)
    finally:
        world.close()


def test_a_lease_that_ends_soon_is_not_built_upon() -> None:
    world = World(lease_ttl=8.0)
    try:
        world.warm_up()
        assert world.ask(request()) == (PREFIX * CHUNK, True)
    finally:
        world.close()


def test_an_abort_while_the_step_runs_keeps_the_lease_until_the_copies_are_over(world: World) -> None:
    one = request()
    meta, _ = world.claim(one)
    world.worker.start_loads(meta, layered=True)
    world.scheduler.request_finished(one, [])
    world.meta()
    assert world.leases() == 1
    for name in NAMES:
        world.worker.wait_for_layer(name)
    world.worker.finish_step(meta)
    world.run(world.meta())
    world.no_lease_is_left()
    assert not world.scheduler._requests


def test_slabs_that_change_under_their_lease_end_an_engine_that_cannot_recompute(world: World) -> None:
    meta, _ = world.claim(request())
    with pytest.raises(TransferError, match="did not arrive"):
        world.run(meta, on_layer=lambda layer: world.change_slabs() if layer == 0 else None)


def test_slabs_that_change_under_their_lease_are_recomputed_where_that_is_right() -> None:
    world = World(recomputes=True)
    try:
        world.warm_up()
        meta, blocks = world.claim(request())
        assert world.run(meta, on_layer=lambda layer: world.change_slabs() if layer == 0 else None) == set(blocks.tolist())
        assert "loads_overlapped" not in world.stats
    finally:
        world.close()


def test_a_layer_that_ran_without_its_hook_is_not_believed() -> None:
    world = World(recomputes=True)
    try:
        world.warm_up()
        meta, blocks = world.claim(request())
        world.worker.start_loads(meta, layered=True)
        world.worker.wait_for_layer(NAMES[0])
        world.worker.finish_step(meta)
        assert world.worker.take_invalid_blocks() == set(blocks.tolist())
    finally:
        world.close()


@pytest.mark.parametrize("forget_checksum", [False, True])
def test_a_slab_that_does_not_match_its_checksum_is_left_to_the_sidecar_which_drops_it(forget_checksum: bool) -> None:  # noqa: FBT001
    world = World(recomputes=True)
    try:
        world.warm_up()
        meta, blocks = world.claim(request())
        assert flip_slabs(world.sidecar.pool, depth=1, forget_checksum=forget_checksum) == 1
        assert world.run(meta) == set(blocks.tolist()[CHUNK // BLOCK :])
        world.no_lease_is_left()
        assert len(world.sidecar.chunks()) == PREFIX - 1
    finally:
        world.close()


def test_slabs_that_hold_another_prompt_are_not_read_though_their_places_are_right(world: World) -> None:
    meta, blocks = world.claim(request())
    job: LoadJob = meta.loads[0]
    refs = np.frombuffer(job.slabs, "<u8").reshape(-1, 2)
    job.slabs = refs[::-1].tobytes()
    assert not world.run(meta)
    assert (world.cache.read(blocks) == world.wanted).all(), "the sidecar loaded it"
    assert "loads_overlapped" not in world.stats


def test_what_another_node_wrote_into_a_slab_during_the_copy_is_not_believed_in_a_shared_pool() -> None:
    world = World(recomputes=True)
    try:
        world.warm_up()
        meta, blocks = world.claim(request())
        [view] = world.overlap._views.values()
        view.shared = True

        def write(layer: int) -> None:
            assert layer or flip_slabs(world.sidecar.pool, depth=1) == 1

        assert world.run(meta, on_layer=write) == set(blocks.tolist())
        assert "loads_overlapped" not in world.stats
    finally:
        world.close()


def test_a_job_of_a_generation_without_a_mapping_is_loaded_by_the_sidecar(world: World) -> None:
    meta, blocks = world.claim(request())
    job: LoadJob = meta.loads[0]
    job.generation += 1
    assert not world.run(meta)
    assert (world.cache.read(blocks) == world.wanted).all()
    assert "loads_overlapped" not in world.stats


def test_sleep_takes_readiness_back(world: World) -> None:
    assert world.policy.generation
    world.worker.detach()
    world.run(world.meta())
    assert world.policy.generation == 0
