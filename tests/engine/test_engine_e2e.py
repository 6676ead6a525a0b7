"""A real vLLM CPU engine with a real model: hits across engines, and deaths on either side, in real processes.

Each test starts two engines or three (8 s to 40 s each), so each tells a whole story. The engine program is the demo's.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.sidecar_process import SidecarProcess
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import segment as segments
from maru_shm.errors import MaruError

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "smollm2-135m"
CHUNK = 128
KV_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4  #: 30 layers, 3 heads of 64, K and V, float32

sys.path.insert(0, str(ROOT / "examples" / "single"))
from processes import EngineProcess  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


class Stage:
    """One sidecar, and engines on it."""

    def __init__(self, directory: Path) -> None:
        if not MODEL.is_dir():
            pytest.fail(f"{MODEL} is missing: make setup")
        self.sidecar = SidecarProcess(pool_bytes=512 << 20)
        self._directory = directory
        self._engines: list[EngineProcess] = []

    def engine(self, *flags: str) -> EngineProcess:
        log = self._directory / f"engine-{len(self._engines)}.log"
        flags = ("--chunk-tokens", str(CHUNK), "--max-model-len", "1024", *flags)
        engine = EngineProcess(MODEL, self.sidecar.socket, log, *flags)
        self._engines.append(engine)
        engine.generate([1, 2, 3], max_tokens=1)  # lazy initialisation, and the scheduler's half attaches
        return engine

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
        self.sidecar.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    try:
        made.sidecar.start()
        yield made
    finally:
        made.close()


def prompts(engine: EngineProcess, n: int, tokens: int) -> list[list[int]]:
    """``n`` different prompts of ``tokens`` tokens of real prose."""
    texts = [path.read_text() for path in sorted((ROOT / "examples" / "single" / "texts").glob("*.txt"))]
    found = []
    for i in range(n):
        text = texts[i % len(texts)]
        found.append(engine.ask("tokenize", text=text[400 * (i // len(texts)) :])["tokens"][:tokens])
    return found


def answer(engine: EngineProcess, prompt: list[int], n: int = 16) -> dict[str, Any]:
    [one] = engine.generate(prompt, max_tokens=n)
    return one


def test_a_second_engine_answers_the_same_from_restored_kv_that_is_equal_byte_for_byte(stage: Stage) -> None:
    # Three chunks and 16 tokens: the engine's own hit and the sidecar's end at the same token, so both compute the same rest.
    length = 3 * CHUNK + 16
    cold = stage.engine()
    asked = prompts(cold, 3, length)
    first = [answer(cold, prompt) for prompt in asked]
    reference = [answer(cold, prompt) for prompt in asked]
    digests = [cold.ask("digest", prompt=prompt) for prompt in asked]
    turn = asked[0] + reference[0]["tokens"] + asked[1][:CHUNK]
    assert [one["hit_tokens"] for one in (*first, *reference)] == [0] * 3 + [3 * CHUNK] * 3
    cold.stop()

    chunks = stage.sidecar.chunks()
    assert len(chunks) >= 9
    assert {chunk.bytes for chunk in chunks} == {CHUNK * KV_BYTES_PER_TOKEN}

    warm = stage.engine()
    together = warm.generate(*asked, max_tokens=16)  # three hits at once
    assert [one["hit_tokens"] for one in together] == [3 * CHUNK] * 3
    assert [warm.ask("digest", prompt=prompt) for prompt in asked] == digests
    assert [one["tokens"] for one in together] == [one["tokens"] for one in reference]
    assert len({tuple(one["tokens"]) for one in reference}) == 3, "all answers are alike: they prove nothing"
    follow_up = answer(warm, turn)
    assert follow_up["hit_tokens"] >= 3 * CHUNK
    warm.stop()


def test_an_engine_killed_in_mid_store_and_mid_load_leaves_a_cache_that_the_next_engine_uses(stage: Stage) -> None:
    victim = stage.engine()
    asked = prompts(victim, 4, 2 * CHUNK + 16)
    reference = [answer(victim, prompt) for prompt in asked]
    reference = [answer(victim, prompt) for prompt in asked]  # the same shapes as a hit's
    victim.post("generate", prompts=prompts(victim, 8, 3 * CHUNK)[4:], max_tokens=4)
    kill_during(stage, victim, L.Op.STORE)

    loader = stage.engine()
    loader.post("generate", prompts=asked, max_tokens=16)
    kill_during(stage, loader, L.Op.LOAD)

    heir = stage.engine()
    answers = [answer(heir, prompt) for prompt in asked]
    assert [one["tokens"] for one in answers] == [one["tokens"] for one in reference]
    assert [one["hit_tokens"] for one in answers] == [2 * CHUNK] * 4
    heir.stop()


def kill_during(stage: Stage, engine: EngineProcess, op: L.Op) -> None:
    """SIGKILL the engine while the sidecar works on a transfer of this kind, and wait until the sidecar has cleaned up."""
    deadline = time.monotonic() + 60
    while not in_flight(stage, op):  # without a pause: a load takes milliseconds
        assert time.monotonic() < deadline, f"no {op.name} in flight within 60 s"
    engine.kill()
    until(lambda: not list(attached_segments(stage)), "the sidecar has noticed the death")


def in_flight(stage: Stage, op: L.Op) -> bool:
    for segment in attached_segments(stage):
        shape = segment.shape
        for index in range(shape.n_records):
            base = shape.records_offset + index * L.RECORD_BYTES
            state = segment.words[base // 8 + L.STATE_WORD] & 0xFF
            if state in (L.State.POSTED, L.State.ACCEPTED) and L.REQUEST.unpack_from(segment.bytes, base)[1] == op:
                return True
    return False


def attached_segments(stage: Stage) -> Iterator[segments.Segment]:
    """The hot-path segments of this sidecar, read-only: one per attached half of an engine."""
    for name, *_ in segments.list_names():
        with contextlib.suppress(MaruError):  # being made or removed this moment
            segment = segments.open_readonly(name)
            try:
                if segment.info.sidecar_pid == stage.sidecar.pid:
                    yield segment
            finally:
                segment.close()


def test_an_engine_outlives_its_sidecar_and_hits_again_after_its_return(stage: Stage) -> None:
    engine = stage.engine()
    asked = prompts(engine, 3, 2 * CHUNK + 16)
    reference = {i: answer(engine, prompt)["tokens"] for i, prompt in enumerate(asked[:2])}
    engine.ask("flush")

    engine.post("generate", prompts=[asked[2]], max_tokens=40)  # its store will find nobody
    stage.sidecar.kill()
    alone = engine.wait()["answers"][0]
    assert len(alone["tokens"]) == 40
    assert [answer(engine, prompt)["tokens"] for prompt in asked[:2]] == list(reference.values())

    stage.sidecar.start()
    kept = len(stage.sidecar.chunks())
    assert kept >= 4, "the pool did not survive the sidecar"

    def stored_again() -> bool:
        fresh = prompts(engine, 9, CHUNK + 8)[6:]
        answer(engine, fresh[0] + [int(time.monotonic() * 1e3) % 1000], 1)
        engine.ask("flush")
        return len(stage.sidecar.chunks()) > kept

    until(stored_again, "the engine attached to the new sidecar and stored", 60)
    engine.stop()

    successor = stage.engine()
    answers = [answer(successor, prompt) for prompt in asked[:2]]
    assert [one["hit_tokens"] for one in answers] == [2 * CHUNK] * 2
    assert [one["tokens"] for one in answers] == list(reference.values())
    successor.stop()
