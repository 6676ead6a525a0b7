"""A real vLLM engine and a real sidecar: restored KV is right on both load paths, and deaths on either side cost no answer.

An answer from restored KV is compared with the one the engine's own prefix cache gives for the same prompt: both compute the
same tokens in the same shapes. A recomputed one is compared with the prompt's first, cold answer. KV bytes are compared
directly; before each hit the engine's whole cache is overwritten.

Engines take half a minute to start, so all tests share one (with CUDA graphs), and one that starts beside it (eager, model
runner V1) is its heir. The tests run in file order; the last one kills the engine. ``MARU_GPU_MODEL``: a directory with the
``config.json`` of another Llama than the small one made here. ``MARU_ENGINE_DEVICE=cpu`` rehearses all of it on a CPU engine.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from maru_shm import messages as M
from tests.gpu.vllm_process import Answer, Shape, VllmProcess
from tests.gpu.vram import used_mib, wait_until_used
from tests.support.sidecar_process import SidecarProcess
from tests.support.waiting import until

DOCUMENTS, CHUNKS = 20, 12
ON_CPU = os.environ.get("MARU_ENGINE_DEVICE") == "cpu"
GPU_SHAPE = Shape(
    dtype="bfloat16", hidden=1024, intermediate=2048, layers=8, heads=8, kv_heads=8, head_dim=128, vocabulary=32000,
    block_tokens=16, chunk_tokens=256, kv_bytes=1 << 30, max_model_len=4096, max_batched_tokens=4096,
    graph_sizes=(1, 2, 4, 8, 16, 256),
)  # fmt: skip
CPU_SHAPE = Shape(
    dtype="float32", hidden=256, intermediate=512, layers=4, heads=4, kv_heads=2, head_dim=64, vocabulary=1024, block_tokens=32,
    chunk_tokens=128, kv_bytes=64 << 20, max_model_len=2048, max_batched_tokens=2048,
)  # fmt: skip
SHAPE = CPU_SHAPE if ON_CPU else GPU_SHAPE
if "MARU_GPU_MODEL" in os.environ:
    SHAPE = SHAPE.like(Path(os.environ["MARU_GPU_MODEL"]))
CACHED = CHUNKS * SHAPE.chunk_tokens
SHORT = SHAPE.block_tokens  #: computed beside a hit that the sidecar is to load: see :meth:`Stage.attach`
FRESH = SHAPE.chunk_tokens - 32  #: beside one that is to be overlapped; no chunk, so nothing more is stored

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@dataclass
class Document:
    """A prompt in two forms, and what the engine says to them without the sidecar."""

    short: list[int]  #: ``CACHED`` tokens, then ``SHORT``
    fresh: list[int]  #: ``CACHED`` tokens, then ``FRESH`` that nobody has seen
    cold: Answer
    own_short: Answer  #: from the engine's own prefix cache
    own_fresh: Answer
    digest: str  #: of the KV bytes of the ``CACHED`` tokens, as they were computed


class Stage:
    """One sidecar, the engine under test, and its heir."""

    def __init__(self, directory: Path) -> None:
        model = directory / "model"
        model.mkdir()
        SHAPE.write(model)
        pool = (DOCUMENTS + 10) * (CHUNKS + 1) * SHAPE.chunk_bytes
        # Several slices per document, so that a sidecar can be killed between two.
        flags = ("--set", f"transfer.slice_bytes={max(1 << 16, 4 * SHAPE.chunk_bytes)}")
        self.sidecar = SidecarProcess(pool_bytes=pool + (64 << 20), flags=flags)
        self.engine = VllmProcess(directory / "engine.log", {} if ON_CPU else {"VLLM_USE_V2_MODEL_RUNNER": "1"})
        self.heir = VllmProcess(directory / "heir.log", {"VLLM_USE_V2_MODEL_RUNNER": "0"})
        self.documents: list[Document] = []
        self._generation = 0
        try:
            self.sidecar.start()
            # A lookup that a busy machine answers late is a miss by design, and no subject here.
            options = {"maru.layerwise_overlap": True, "maru.lookup_patience_ms": 5000, "maru.min_hit_tokens": 128}
            self.engine.build(SHAPE, model, self.sidecar.socket, **options)
            # V1 would keep a block's layers together (``test_engine_layout.py``), and share nothing with V2.
            alike = {**options, "maru.block_outermost": False}
            self.heir.build(replace(SHAPE, graph_sizes=()), model, self.sidecar.socket, **alike)
            self.about = self._built(self.engine, directory / "engine.log")
            self.about_heir = self._built(self.heir, directory / "heir.log")
            self.attach()
            self.heir.call("attach", 0)
            self.engine.call("overlap_from", FRESH)
            self.heir.call("overlap_from", FRESH)
            self.documents = [self._populate(seed) for seed in range(DOCUMENTS)]
            self.engine.call("flush")
        except BaseException:
            self.close()
            raise

    def _built(self, engine: VllmProcess, log: Path) -> dict[str, Any]:
        try:
            about: dict[str, Any] = engine.result(240)
        except (AssertionError, EOFError) as e:
            raise AssertionError(f"the engine did not start ({e}); its log ends:\n{log.read_text()[-4000:]}") from e
        return about

    def _populate(self, seed: int) -> Document:
        rng = random.Random(seed)
        head, short, fresh = (
            [rng.randrange(10, SHAPE.vocabulary - 10) for _ in range(n)] for n in (CACHED, SHORT, FRESH)
        )  # fmt: skip
        cold, own_short, own_fresh = (self.engine.ask_one(p) for p in (head + short, head + short, head + fresh))
        return Document(
            head + short, head + fresh, cold, own_short, own_fresh, self.engine.call("digest", head + short, CACHED)
        )  # fmt: skip

    def attach(self) -> None:
        """Wait until the engine is attached to the sidecar that runs now, and ready for overlap of what leaves ``FRESH``."""
        self._generation = self.engine.call("attach", self._generation)

    def restart(self, failpoint: str = "") -> None:
        """Another sidecar on the same pool; ``failpoint``: where it is to die."""
        self.sidecar.start({"MARU_FAILPOINT": failpoint})
        self.attach()

    def loads(self) -> int:
        """Hits the sidecar itself has loaded since it was started."""
        status = self.sidecar.ask(M.GetStatus())
        assert isinstance(status, M.Status)
        transfers: Any = status.sections["transfers"]
        return int(next(t["tickets"] for t in transfers if t["op"] == "load"))

    def stopped(self) -> bool:
        return not self.sidecar.state()

    def close(self) -> None:
        for process in (self.engine, self.heir):
            process.kill()
            process.close()
        self.sidecar.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("engine"))
    yield stage
    stage.close()


def test_the_references_are_worth_comparing_with(stage: Stage) -> None:
    documents = stage.documents
    assert (stage.about["device"], stage.about["runner"]) == (("cpu", "V1") if ON_CPU else ("cuda", "V2"))
    assert stage.about_heir["runner"] == "V1"
    assert [d.cold.hit_tokens for d in documents] == [0] * DOCUMENTS
    assert [(d.own_short.hit_tokens, d.own_fresh.hit_tokens) for d in documents] == [(CACHED, CACHED)] * DOCUMENTS
    for answers in ([d.own_short for d in documents], [d.own_fresh for d in documents]):
        assert len({tuple(a.tokens) for a in answers}) == DOCUMENTS, "answers are alike: they prove nothing"
    assert len({d.digest for d in documents}) == DOCUMENTS
    assert len(stage.sidecar.chunks()) == DOCUMENTS * CHUNKS
    last = documents[-3:]  # still in the engine's own cache
    assert [stage.engine.ask_one(d.short) for d in last] == [d.own_short for d in last]
    stage.engine.call("poison")
    for document in last:
        answer = stage.engine.ask_one(document.short)
        assert answer.hit_tokens == CACHED
        assert answer.tokens != document.own_short.tokens, "answers do not depend on the KV cache"


def test_deferred_hits_answer_as_the_engine_s_own_prefix_cache_from_equal_bytes(stage: Stage) -> None:
    before = stage.loads()
    check_hits(stage, [(d.short, d.own_short) for d in stage.documents])
    assert stage.loads() - before == DOCUMENTS
    assert stage.engine.call("take_overlaps") == []


def test_overlapped_hits_answer_as_the_engine_s_own_prefix_cache_from_equal_bytes(stage: Stage) -> None:
    before = stage.loads()
    stage.engine.call("take_overlaps")
    check_hits(stage, [(d.fresh, d.own_fresh) for d in stage.documents])
    assert stage.loads() == before, "the sidecar loaded some of them"
    graphs = "PIECEWISE" if SHAPE.graph_sizes else "NONE"
    as_planned = {"begun": True, "layered": True, "graphs": graphs, "arrived": True}
    assert stage.engine.call("take_overlaps") == [as_planned] * DOCUMENTS


def test_the_same_hits_loaded_by_the_sidecar_answer_the_same(stage: Stage) -> None:
    before = stage.loads()
    stage.engine.call("take_overlaps")
    stage.engine.call("overlap_from", FRESH + 2 * SHAPE.block_tokens)
    check_hits(stage, [(d.fresh, d.own_fresh) for d in stage.documents])
    assert stage.loads() - before == DOCUMENTS
    stage.engine.call("overlap_from", FRESH)
    assert stage.engine.call("take_overlaps") == []


def check_hits(stage: Stage, asked: list[tuple[list[int], Answer]]) -> None:
    """Each prompt answered as before, all of it that is cached from the sidecar, and the engine's KV bytes as computed once."""
    stage.engine.call("forget")
    answers, digests = [], []
    for prompt, _ in asked:
        answers.append(stage.engine.ask_one(prompt))
        digests.append(stage.engine.call("digest", prompt, CACHED))
    others = [(i, have, own) for i, (have, (_, own)) in enumerate(zip(answers, asked, strict=True)) if have != own]
    assert not others, f"{len(others)} of {len(asked)} answers differ from the engine's own: {others[:2]}"
    assert digests == [d.digest for d in stage.documents]


def test_hits_that_are_loaded_together_hold_the_right_bytes(stage: Stage) -> None:
    documents = stage.documents[:5]
    stage.engine.call("forget")
    answers = stage.engine.ask(*[d.short for d in documents])
    assert [a.hit_tokens for a in answers] == [CACHED] * 5
    assert [stage.engine.call("digest", d.short, CACHED) for d in documents] == [d.digest for d in documents]


def test_a_sidecar_killed_in_a_load_costs_a_recomputation(stage: Stage) -> None:
    document = stage.documents[0]
    stage.sidecar.stop()
    stage.restart("load.before_copy:2")  # its first slice is on its way
    stage.engine.call("forget")
    assert stage.engine.ask_one(document.short).tokens == document.cold.tokens
    until(stage.stopped, "the sidecar has died at its failpoint")
    assert stage.engine.call("digest", document.short, CACHED) == document.digest
    check_alone_and_served_again(stage)


def test_a_sidecar_killed_in_an_overlapped_load_costs_nothing(stage: Stage) -> None:
    document = stage.documents[1]
    stage.engine.call("forget")
    stage.engine.call("take_overlaps")
    stage.engine.call("kill_at_first_layer", stage.sidecar.pid)
    assert stage.engine.ask_one(document.fresh) == document.own_fresh
    assert stage.stopped()
    [overlap] = stage.engine.call("take_overlaps")
    assert (overlap["layered"], overlap["arrived"]) == (True, True)
    assert stage.engine.call("digest", document.short, CACHED) == document.digest
    check_alone_and_served_again(stage)


def test_a_sidecar_killed_in_a_store_costs_what_was_not_stored(stage: Stage) -> None:
    kept = len(stage.sidecar.chunks())
    stage.sidecar.stop()
    stage.restart("commit.after_data:3")  # two chunks are committed, others of the same store copied or on their way
    rng = random.Random(1000)
    prompt = [rng.randrange(10, SHAPE.vocabulary - 10) for _ in range(CACHED + SHORT)]
    cold = stage.engine.ask_one(prompt, n=32)
    assert (len(cold.tokens), cold.hit_tokens) == (32, 0)
    until(stage.stopped, "the sidecar has died at its failpoint")
    own = stage.engine.ask_one(prompt)
    assert own.hit_tokens == CACHED
    digest = stage.engine.call("digest", prompt, 2 * SHAPE.chunk_tokens)
    check_alone_and_served_again(stage)
    assert len(stage.sidecar.chunks()) == kept + 2
    stage.engine.call("forget")
    partly = stage.engine.ask_one(prompt, n=32)
    assert (partly.hit_tokens, len(partly.tokens)) == (2 * SHAPE.chunk_tokens, 32)
    assert stage.engine.call("digest", prompt, 2 * SHAPE.chunk_tokens) == digest
    stage.engine.call("flush")
    assert len(stage.sidecar.chunks()) == kept + CHUNKS  # the rest was computed, and stored this time


def check_alone_and_served_again(stage: Stage) -> None:
    """Without a sidecar the engine computes; the next sidecar's chunks are loaded by both paths."""
    alone, deferred, overlapped = stage.documents[-3:]
    stage.engine.call("forget")
    assert stage.engine.ask_one(alone.short) == Answer(alone.cold.tokens, 0)
    stage.restart()
    stage.engine.call("forget")
    stage.engine.call("take_overlaps")
    assert stage.engine.ask_one(deferred.short) == deferred.own_short
    assert stage.loads() == 1
    assert stage.engine.ask_one(overlapped.fresh) == overlapped.own_fresh
    assert stage.loads() == 1
    assert [one["arrived"] for one in stage.engine.call("take_overlaps")] == [True]


def test_an_engine_killed_while_its_loads_are_copied_leaves_a_sidecar_that_serves_the_next(stage: Stage) -> None:
    used = 0 if ON_CPU else used_mib()
    stage.engine.call("forget")
    stage.engine.start("die_while_loading", [d.short for d in stage.documents[:8]])
    assert stage.engine.process.wait(60) == -9
    if not ON_CPU:
        wait_until_used(used - SHAPE.kv_bytes // (1 << 20))  # and the weights: the sidecar held on to neither
    assert stage.sidecar.state() == "READY"

    heir = stage.heir  # it idled through every restart: its first request attaches, waits for that, and hits
    for document in stage.documents:
        answer = heir.ask_one(document.short)
        assert answer.hit_tokens == CACHED
        assert heir.call("digest", document.short, CACHED) == document.digest
        assert heir.ask_one(document.short) == answer  # its own prefix cache now
    heir.call("forget")
    heir.call("take_overlaps")
    for document in stage.documents:
        assert heir.ask_one(document.fresh).hit_tokens == CACHED
        assert heir.call("digest", document.short, CACHED) == document.digest
    assert [one["arrived"] for one in heir.call("take_overlaps")] == [True] * DOCUMENTS
    heir.call("stop")
