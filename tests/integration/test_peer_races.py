"""One sidecar evicts and rewrites its slabs while another loads them: a load may miss, it never brings a wrong byte.

``MARU_RACE_LOADS`` sets the number of loads (default 500 for each kind of check).
"""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
import pytest
from tests.support.client import blocks_table, prompt_keys
from tests.support.shared_sidecars import SharedEngine, shared_pool, start_engine, start_server, start_sidecar

from maru_shm import layout as L

LOADS = int(os.environ.get("MARU_RACE_LOADS", "500"))
CHUNKS = 4
BLOCK_BYTES = 3 * 4096
SOURCE, TARGET = blocks_table(0, CHUNKS), blocks_table(32, CHUNKS)


def content(prompt: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
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


@pytest.mark.parametrize("checksum", ["on", "off"])
@pytest.mark.timeout(600)
def test_loads_racing_evictions_never_bring_a_wrong_byte(checksum: str) -> None:
    with shared_pool(3 << 20, 1 << 20) as path, contextlib.ExitStack() as stack:  # a region each: 20 slabs
        server = start_server(stack)
        a = start_sidecar(stack, path, server.endpoint, "a", f"transfer.checksum={checksum}")
        b = start_sidecar(stack, path, server.endpoint, "b", f"transfer.checksum={checksum}")
        churn, reader = Churn(start_engine(stack, a)), start_engine(stack, b)
        churn.start()
        whole = cut_short = missed = 0
        try:
            for attempt in range(LOADS):
                prompt = max(0, churn.latest - attempt % 4)
                keys = prompt_keys(prompt, CHUNKS)
                ticket, reply = reader.lookup(keys)
                n = reply.n_done
                if n == 0:
                    missed += 1
                    reader.scheduler.release(ticket)
                    continue
                reader.cache.blocks[TARGET.reshape(-1)] = 0xEE
                loaded = reader.load(ticket, keys[: n * L.KEY_BYTES], TARGET[:n])
                reader.scheduler.release(ticket)
                got = reader.cache.read(TARGET[: loaded.n_done])
                np.testing.assert_array_equal(got, content(prompt)[: loaded.n_done * 4], f"prompt {prompt}")
                if loaded.state is L.State.DONE:
                    whole += 1
                else:
                    assert loaded.code is L.Code.NOT_FOUND, loaded
                    cut_short += 1
        finally:
            churn.ended.set()
            churn.join(30)
        assert whole > 0, (whole, cut_short, missed)
        assert churn.stored > 20 * 2, "the region was rewritten again and again"
        print(f"{whole} whole, {cut_short} cut short, {missed} missed, {churn.stored} slabs stored, {b.sharing()}")
