"""A sidecar dies at a named point of its work in a shared pool; the other one never sees half a chunk."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from tests.support.client import blocks_table, prompt_keys
from tests.support.shared_sidecars import SharedEngine, SharedSidecar, shared_pool, start_engine, start_server, start_sidecar
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.errors import MaruError

FIRST, SECOND = prompt_keys("first", 4), prompt_keys("second", 4)
SOURCE, MORE, TARGET = blocks_table(0, 4), blocks_table(16, 4), blocks_table(32, 4)

#: point and how often it is passed before the death: FIRST is stored, SECOND or the clearing is cut short
DEATHS = (
    ("commit.before_writing", 6), ("commit.after_writing", 6), ("commit.after_data", 6), ("commit.before_state", 6),
    ("commit.after_state", 6), ("evict.after_state", 2), ("region.before_format", 1), ("region.after_headers", 1),
)  # fmt: skip


def fetch_what_is_hit(engine: SharedEngine, keys: bytes, wanted: np.ndarray) -> int:
    """Look up and load; the leading chunks that came must be right. Returns how many came."""
    ticket, reply = engine.lookup(keys)
    n = reply.n_done
    loaded = engine.load(ticket, keys[: n * L.KEY_BYTES], TARGET[:n]).n_done if n else 0
    engine.scheduler.release(ticket)
    np.testing.assert_array_equal(engine.cache.read(TARGET[:loaded]), wanted[: loaded * 4])
    return loaded


@pytest.mark.chaos
@pytest.mark.parametrize(("point", "count"), DEATHS)
def test_a_death_at_any_point_leaves_whole_chunks_only(point: str, count: int) -> None:
    with shared_pool() as path, contextlib.ExitStack() as stack:
        server = start_server(stack, extra=("--reap-ms", "60000"))
        b = start_sidecar(stack, path, server.endpoint, "b")
        a = SharedSidecar(path, server.endpoint, "a")
        stack.callback(a.close)
        a.start({"MARU_FAILPOINT": f"{point}:{count}"})
        a.wait_until_it_can_store()
        engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
        engine_a.cache.fill(count)
        first, second = engine_a.cache.read(SOURCE), engine_a.cache.read(MORE)
        with contextlib.suppress(MaruError, OSError):
            engine_a.store(FIRST, SOURCE)
            a.wait_until_published(4)
            engine_a.store(SECOND, MORE)
            a.ask(M.CacheClear())
        until(a.ended, f"the sidecar died at {point}")
        assert fetch_what_is_hit(engine_b, FIRST, first) <= 4
        assert fetch_what_is_hit(engine_b, SECOND, second) <= 4
        a.start()
        a.wait_until_it_can_store()
        again = start_engine(stack, a)
        fetch_what_is_hit(again, FIRST, first)
        fetch_what_is_hit(again, SECOND, second)
        again.cache.fill(count)
        for keys, blocks in ((FIRST, SOURCE), (SECOND, MORE)):
            assert again.store(keys, blocks).state is L.State.DONE
        until(lambda: engine_b.hits(FIRST) == 4 and engine_b.hits(SECOND) == 4, "everything is found in the end")
        assert fetch_what_is_hit(engine_b, FIRST, first) == 4
        assert fetch_what_is_hit(engine_b, SECOND, second) == 4
