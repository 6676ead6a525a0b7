"""A running sidecar and engines with their KV cache on the GPU: ring, fence word, copy engines, pool, all of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.gpu.kv_process import KvProcess
from tests.gpu.test_cuda_ordering import LONG
from tests.gpu.vram import used_mib, wait_until_used
from tests.support.client import prompt_keys
from tests.support.kv_cases import cases
from tests.support.sidecar_process import SidecarProcess

CASE = cases()[0]
KEYS = prompt_keys("a prompt", 6)
OTHER = prompt_keys("another prompt", 6)


@pytest.fixture
def sidecar() -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(pool_bytes=256 << 20)
    sidecar.start()
    yield sidecar
    sidecar.close()


def table(seed: int) -> np.ndarray:
    """Six chunks of four scattered blocks."""
    return np.random.default_rng(seed).permutation(CASE.num_blocks)[:24].astype(np.int32).reshape(6, 4)


def test_kv_stored_by_one_engine_is_loaded_by_the_next_after_the_first_was_killed(sidecar: SidecarProcess) -> None:
    before = used_mib()
    first = KvProcess()
    assert first.call("attach_sidecar", sidecar.socket, CASE.name) == "cuda"
    memory = first.fill(1)
    wanted = [CASE.slab(memory, blocks) for blocks in table(1)]
    first.call("after_step", 1)
    assert first.call("store", KEYS, table(1), 1) == ("DONE", 6)

    first.call("set", 0xEE)
    first.call("after_step", 2)
    assert first.call("hits", KEYS) == 6
    assert first.call("load", KEYS, table(2), 2) == ("DONE", 6)
    loaded = first.read()
    for slab, blocks in zip(wanted, table(2), strict=True):
        np.testing.assert_array_equal(CASE.slab(loaded, blocks), slab)
    untouched = [b for b in range(CASE.num_blocks) if b not in table(2)]
    assert (CASE.slab(loaded, untouched) == 0xEE).all()

    first.call("step", 3, LONG, 99)  # the store is posted while its step still runs, and waits for its fence
    assert first.call("store", OTHER, table(3), 3) == ("DONE", 6)

    first.start("load_for_ever", KEYS, table(4), 3)
    first.kill()
    first.close()
    wait_until_used(before + 64)  # a sidecar without engines holds no GPU memory
    assert sidecar.state() == "READY"

    second = KvProcess()
    second.call("attach_sidecar", sidecar.socket, CASE.name)
    assert (second.call("hits", KEYS), second.call("hits", OTHER)) == (6, 6)
    assert second.call("load", KEYS, table(5), 0) == ("DONE", 6)
    assert second.call("load", OTHER, table(6), 0) == ("DONE", 6)
    loaded = second.read()
    late = set(table(6).reshape(-1).tolist())
    for slab, blocks in zip(wanted, table(5), strict=True):
        if not late & set(blocks.tolist()):
            np.testing.assert_array_equal(CASE.slab(loaded, blocks), slab)
    assert all((CASE.slab(loaded, blocks) == 99).all() for blocks in table(6))
    second.call("detach_sidecar")
    second.close()
