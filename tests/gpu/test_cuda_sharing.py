"""Two sidecars on one shared pool, each with an engine on the GPU: what either stored, the other loads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.gpu.kv_process import KvProcess
from tests.support.client import prompt_keys
from tests.support.kv_cases import KvCase, cases
from tests.support.shared_sidecars import SharedSidecar, shared_pool, start_server, start_sidecar

CASES = [cases()[0], cases()[3]]  # one buffer; an allocation per layer
CHUNKS = 6


@pytest.fixture
def pair() -> Iterator[tuple[SharedSidecar, SharedSidecar]]:
    with shared_pool(256 << 20) as path, contextlib.ExitStack() as stack:
        server = start_server(stack)
        yield start_sidecar(stack, path, server.endpoint, "a"), start_sidecar(stack, path, server.endpoint, "b")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_what_one_gpu_engine_stored_an_engine_of_another_sidecar_loads_and_answers_in_kind(
    case: KvCase, pair: tuple[SharedSidecar, SharedSidecar]
) -> None:
    def table(seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(case.num_blocks)[: 4 * CHUNKS].astype(np.int32).reshape(CHUNKS, 4)

    engines = []
    with contextlib.ExitStack() as stack:
        for sidecar in pair:
            engine = KvProcess()
            stack.callback(engine.close)
            assert engine.call("attach_sidecar", sidecar.socket, case.name) == "cuda"
            engines.append(engine)
        for turn, (writer, reader) in enumerate([(0, 1), (1, 0)]):
            keys, source, target = prompt_keys(f"turn {turn}", CHUNKS), table(2 * turn), table(2 * turn + 1)
            memory = engines[writer].fill(turn + 1)
            announced = pair[writer].sharing()["keys_announced"]
            engines[writer].call("after_step", 1 + turn)
            assert engines[writer].call("store", keys, source, 1 + turn) == ("DONE", CHUNKS)
            pair[writer].wait_until_published(announced + CHUNKS)

            engines[reader].call("set", 0xEE)
            engines[reader].call("after_step", 2 + turn)
            assert engines[reader].call("fetch", keys, target, 2 + turn) == (CHUNKS, "DONE", CHUNKS)
            loaded = engines[reader].read()
            for wanted, blocks in zip(source, target, strict=True):
                np.testing.assert_array_equal(case.slab(loaded, blocks), case.slab(memory, wanted))
            untouched = [b for b in range(case.num_blocks) if b not in target]
            assert (case.slab(loaded, untouched) == 0xEE).all()
        for engine in engines:
            engine.call("detach_sidecar")
