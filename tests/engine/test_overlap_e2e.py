"""A real vLLM CPU engine: a hit with a fresh suffix, loaded while the suffix is computed, answers as every other way does."""

from __future__ import annotations

import pytest
from tests.engine.test_engine_e2e import CHUNK, Stage, answer, prompts, stage

from maru_shm import layout as L
from maru_shm import messages as M

__all__ = ["stage"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

CACHED = 3 * CHUNK
SUFFIX = CHUNK - 28  #: less than a chunk: it is not stored, so every engine computes it


def tickets(stage: Stage, op: L.Op) -> int:
    status = stage.sidecar.ask(M.GetStatus())
    assert isinstance(status, M.Status)
    transfers = status.sections["transfers"]
    assert isinstance(transfers, list)
    return int(next(t["tickets"] for t in transfers if t["op"] == op.name.lower()))


def test_a_hit_with_a_fresh_suffix_is_loaded_while_the_suffix_is_computed(stage: Stage) -> None:
    cold = stage.engine()
    first, second, third = prompts(cold, 3, CACHED + 1)
    answer(cold, first, 1)
    asked = [first[:CACHED] + other[:SUFFIX] for other in (second, third)]
    reference = [answer(cold, prompt) for prompt in asked]  # the engine's own prefix cache: the same shapes as a hit's
    assert [one["hit_tokens"] for one in reference] == [CACHED] * 2
    assert reference[0]["tokens"] != reference[1]["tokens"]
    digest = cold.ask("digest", prompt=first)
    cold.stop()
    loaded = tickets(stage, L.Op.LOAD)

    overlapped = stage.engine("--option", "maru.layerwise_overlap=true")
    hit = answer(overlapped, asked[0])
    assert tickets(stage, L.Op.LOAD) == loaded, "the sidecar loaded it"
    assert (hit["tokens"], hit["hit_tokens"]) == (reference[0]["tokens"], CACHED)
    assert overlapped.ask("digest", prompt=first) == digest
    overlapped.stop()

    deferred = stage.engine("--option", "maru.layerwise_overlap=false")
    hit = answer(deferred, asked[1])
    assert tickets(stage, L.Op.LOAD) == loaded + 1
    assert (hit["tokens"], hit["hit_tokens"]) == (reference[1]["tokens"], CACHED)
    deferred.stop()
