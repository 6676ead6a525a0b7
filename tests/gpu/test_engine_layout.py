"""A real engine whose KV cache keeps a block's layers together: one piece per block, and answers and bytes as without.

On a GPU the connector's preference is what makes vLLM 0.26 (model runner V1) and 0.32 and later allocate it so. On a CPU engine
vLLM is told to, and that its CPU kernels can do it (they go by strides).
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.test_engine import CACHED, FRESH, ON_CPU, SHAPE, SHORT
from tests.gpu.vllm_process import VllmProcess
from tests.support.sidecar_process import SidecarProcess

DOCUMENTS = 4

HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_LAYOUTS = HAS_VLLM and importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None
pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")


class Stage:
    """One sidecar, one engine; another is started on demand."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.model = directory / "model"
        self.model.mkdir()
        SHAPE.write(self.model)
        self.sidecar = SidecarProcess(pool_bytes=DOCUMENTS * 20 * SHAPE.chunk_bytes + (64 << 20))
        self._engines: list[VllmProcess] = []
        self.sidecar.start()

    def engine(self, **options: object) -> VllmProcess:
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        if ON_CPU and options.get("maru.block_outermost", True):
            environment |= {"VLLM_KV_CACHE_LAYOUT": "BLHNC", "MARU_TEST_CPU_LAYOUTS": "BLHNC"}
        engine = VllmProcess(self._directory / f"engine-{len(self._engines)}.log", environment)
        self._engines.append(engine)
        always = {"maru.layerwise_overlap": True, "maru.lookup_patience_ms": 5000, "maru.block_outermost": True}
        options = {**always, **options}
        engine.build(replace(SHAPE, graph_sizes=()), self.model, self.sidecar.socket, **options)
        engine.result(240)
        engine.call("attach", 0)
        engine.call("overlap_from", FRESH)
        return engine

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
            engine.close()
        self.sidecar.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


@pytest.mark.skipif(ON_CPU and not HAS_LAYOUTS, reason="vLLM 0.26 on a CPU")
def test_a_cache_with_blocks_outermost_is_one_plane_whose_hits_are_right(stage: Stage) -> None:
    rng = random.Random(5)
    draw = lambda n: [rng.randrange(10, SHAPE.vocabulary - 10) for _ in range(n)]
    documents = [(draw(CACHED), draw(SHORT), draw(FRESH)) for _ in range(DOCUMENTS)]
    engine = stage.engine()
    assert engine.call("planes") == [SHAPE.chunk_bytes * SHAPE.block_tokens // SHAPE.chunk_tokens]

    own = []
    for head, short, fresh in documents:
        cold = engine.ask_one(head + short)
        own.append((engine.ask_one(head + short), engine.ask_one(head + fresh), engine.call("digest", head + short, CACHED)))
        assert (cold.hit_tokens, own[-1][0].hit_tokens) == (0, CACHED)
    engine.call("forget")
    for (head, short, _), (answer, _, digest) in zip(documents, own, strict=True):
        assert engine.ask_one(head + short) == answer
        assert engine.call("digest", head + short, CACHED) == digest
    engine.call("forget")
    engine.call("take_overlaps")
    for (head, short, fresh), (_, answer, digest) in zip(documents, own, strict=True):
        assert engine.ask_one(head + fresh) == answer
        assert engine.call("digest", head + short, CACHED) == digest
    assert [one["arrived"] for one in engine.call("take_overlaps")] == [True] * DOCUMENTS

    # Slabs of another layout are nobody's hit: an engine with layers outermost computes, and says the same.
    other = stage.engine(**{"maru.block_outermost": False})
    assert len(other.call("planes")) == SHAPE.layers
    head, short, _ = documents[0]
    answer = other.ask_one(head + short)
    assert answer.hit_tokens == 0
    assert other.call("digest", head + short, CACHED) == own[0][2]
