"""One sidecar evicts and rewrites its slabs while another loads them: a load may miss, it never brings a wrong byte.

``MARU_RACE_LOADS`` sets the number of loads (default 10,000 with checksums, a quarter without). They are posted in volleys, so
that a load costs a copy and not the wake-ups of four processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.client import blocks_table, prompt_keys
from tests.support.shared_sidecars import SharedEngine, shared_pool, start_engine, start_server, start_sidecar

from maru_shm import layout as L
from maru_shm.records import Reply

LOADS = int(os.environ.get("MARU_RACE_LOADS", "10000"))
VOLLEY = 8
CHUNKS = 4
BLOCK_BYTES = 3 * 4096
SOURCE = blocks_table(0, CHUNKS)
TARGETS = [blocks_table(16 * (1 + i), CHUNKS) for i in range(VOLLEY)]
BLOCKS = 16 * (1 + VOLLEY)


@functools.lru_cache(64)
def content(prompt: int) -> npt.NDArray[np.uint8]:
    """What the blocks of a prompt hold, shape (blocks, layers, piece)."""
    words = np.random.default_rng(prompt).integers(0, 1 << 63, CHUNKS * 4 * BLOCK_BYTES // 8, np.uint64)
    return words.view(np.uint8).reshape(CHUNKS * 4, 3, 4096)


class Churn(threading.Thread):
    """An engine that stores one prompt after another in a pool that holds four of them."""

    def __init__(self, engine: SharedEngine) -> None:
        super().__init__(daemon=True)
        self.engine = engine
        self.latest = -1
        self.ended = threading.Event()
        self.stored = 0

    def run(self) -> None:
        prompt = 0
        while not self.ended.is_set():
            self.engine.cache.blocks[SOURCE.reshape(-1)] = content(prompt)
            self.stored += self.engine.store(prompt_keys(prompt, CHUNKS), SOURCE).n_done
            self.latest = prompt
            prompt += 1


class Reader:
    """An engine that loads what the other one stored a moment ago, ``VOLLEY`` loads at a time."""

    def __init__(self, engine: SharedEngine) -> None:
        self.engine = engine
        self.whole = self.cut_short = self.missed = 0

    def volley(self, prompts: list[int]) -> None:
        scheduler, worker = self.engine.scheduler, self.engine.worker
        keys = [prompt_keys(prompt, CHUNKS) for prompt in prompts]
        tickets = [scheduler.post(L.Op.LOOKUP, k) for k in keys]
        hits = [scheduler.wait(ticket).n_done for ticket in tickets]
        posted: dict[int, int] = {}
        for i, n in enumerate(hits):
            if n:
                self.engine.cache.blocks[TARGETS[i].reshape(-1)] = 0xEE
                posted[i] = worker.post(
                    L.Op.LOAD, keys[i][: n * L.KEY_BYTES], TARGETS[i][:n], lease=tickets[i],
                    lease_session=scheduler.attached.session,
                )  # fmt: skip
        loaded = {i: worker.finish(ticket) for i, ticket in posted.items()}
        for ticket in tickets:
            scheduler.release(ticket)
        self.missed += len(prompts) - len(loaded)
        for i, reply in loaded.items():
            self.check(reply, prompts[i], TARGETS[i])

    def check(self, reply: Reply, prompt: int, target: npt.NDArray[np.int32]) -> None:
        got = self.engine.cache.read(target[: reply.n_done])
        np.testing.assert_array_equal(got, content(prompt)[: reply.n_done * 4], f"prompt {prompt}")
        if reply.state is L.State.DONE:
            self.whole += 1
        else:
            assert reply.code is L.Code.NOT_FOUND, reply
            self.cut_short += 1


@pytest.mark.parametrize("checksum", ["on", "off"])
@pytest.mark.timeout(600)
def test_loads_racing_evictions_never_bring_a_wrong_byte(checksum: str) -> None:
    loads = LOADS if checksum == "on" else LOADS // 4
    with shared_pool(3 << 20, 1 << 20) as path, contextlib.ExitStack() as stack:  # a region each: 20 slabs
        server = start_server(stack)
        a = start_sidecar(stack, path, server.endpoint, "a", f"transfer.checksum={checksum}")
        b = start_sidecar(stack, path, server.endpoint, "b", f"transfer.checksum={checksum}")
        churn, reader = Churn(start_engine(stack, a)), Reader(SharedEngine(b, blocks=BLOCKS))
        stack.callback(reader.engine.close)
        churn.start()
        try:
            for _ in range(0, loads, VOLLEY):
                latest = churn.latest
                reader.volley([max(0, latest - i % 4) for i in range(VOLLEY)])
        finally:
            churn.ended.set()
            churn.join(30)
        assert reader.whole > 0, vars(reader)
        assert churn.stored > 20 * 2, "the region was rewritten again and again"
        assert reader.cut_short + b.sharing()["chunks_stale"] > 0, "some loads did race an eviction"
        print(f"{vars(reader)}, {churn.stored} slabs stored, {b.sharing()}")
