"""An engine that is killed while its KV cache is being copied takes nothing with it, and its GPU memory comes back."""

from __future__ import annotations

import numpy as np
import pytest

from maru_shm.errors import EngineGone
from maru_shm.geometry import Direction, KvLayout, KvPlane
from maru_sidecar.transfer.cuda import CudaTransfer
from tests.gpu.conftest import REGION
from tests.gpu.kv_process import KvProcess
from tests.gpu.vram import used_mib, wait_until_used
from tests.support.shm_pool import ShmPool

PIECE, LAYERS, BLOCKS = 65536, 32, 2048
CACHE = PIECE * LAYERS * BLOCKS  # 4 GiB


def layout_in(process: KvProcess) -> KvLayout:
    planes = tuple(KvPlane(0, i * BLOCKS * PIECE, PIECE, PIECE, i) for i in range(LAYERS))
    return KvLayout(BLOCKS, 16, planes, tuple(process.allocate(CACHE)), "death")


@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_a_killed_engine_is_noticed_its_memory_returns_and_the_next_one_is_served(direction: Direction, pool: ShmPool) -> None:
    before = used_mib()
    transfer = CudaTransfer(pool.mapping, REGION)
    doomed, survivor = KvProcess(), KvProcess()
    target = transfer.attach(layout_in(doomed), doomed.peer)
    other = transfer.attach(layout_in(survivor), survivor.peer)
    transfer.pinning.join(60)
    rng = np.random.default_rng(1)
    offsets = (np.arange(96, dtype=np.uint64) + 1) * np.uint64(2 * PIECE * LAYERS)  # 2-block slabs: 4 MiB each
    tables = [rng.permutation(BLOCKS)[:192].astype(np.int32).reshape(96, 2) for _ in range(8)]
    copies = [target.submit(direction, offsets, t) for t in tables]  # 3 GiB: about 60 ms
    doomed.kill()
    with pytest.raises(EngineGone):
        copies[-1].wait()
    with pytest.raises(EngineGone):
        target.submit(direction, offsets, tables[0])
    with_both = used_mib()
    target.close()
    assert all(c.done() for c in copies)
    wait_until_used(with_both - CACHE // (1 << 20) + 64)
    assert transfer.statistics().lost == ()
    other.submit(direction, offsets, tables[0]).wait()
    replacement = KvProcess()
    third = transfer.attach(layout_in(replacement), replacement.peer)
    third.submit(direction, offsets, tables[0]).wait()
    for process in (survivor, replacement):
        process.close()
    doomed.close()
    transfer.close()
    wait_until_used(before + 64)  # and a sidecar without engines holds no GPU memory
