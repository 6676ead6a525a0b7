"""A pool, an emulated CUDA driver and the cuda engine on it, and a process that stands for the engine it serves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from maru_shm.geometry import CUDA_IPC_HANDLE, KvLayout, KvRegion, RegionKind
from maru_sidecar.transfer.base import Peer, PoolMapping
from maru_sidecar.transfer.cuda import CudaTransfer
from tests.support.cuda_emulator import GPU, EmulatedDriver
from tests.support.kv_cases import Bytes, KvCase, cases

REGION = 1 << 20


@contextlib.contextmanager
def stand_in() -> Iterator[Peer]:
    """A process that stands for the engine; its memory is the emulator's."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    try:
        yield Peer(child.pid, pidfd)
    finally:
        child.kill()
        child.wait()
        os.close(pidfd)


class CudaWorld:
    """A pool, an emulated driver and a transfer engine."""

    def __init__(self, batch: int = 2, *, pin: bool = True, nudge: bool = False) -> None:
        self.rng = np.random.default_rng(11)
        self.pool = self.rng.integers(0, 256, 8 * REGION, np.uint8)
        self.driver = EmulatedDriver(self.pool, batch=batch)
        mapping = PoolMapping(self.pool.ctypes.data, self.pool.nbytes, -1)
        self.engine = CudaTransfer(mapping, REGION, pin=pin, nudge=nudge, driver=self.driver)

    def cache(self, case: KvCase) -> tuple[KvLayout, list[Bytes]]:
        regions, memory = [], []
        for size in case.allocations:
            handle, allocation = self.driver.allocate(size + 512, self.rng.integers(0, 256, size + 512, np.uint8))
            memory.append(allocation[512:])
            regions.append(KvRegion(RegionKind.CUDA_IPC, 1 << 40, size, CUDA_IPC_HANDLE.pack(handle, 512), GPU))
        return case.layout(regions), memory

    def one(self) -> tuple[KvLayout, list[Bytes]]:
        return self.cache(SMALL)


SMALL = cases()[0]
OFFSETS = np.array([REGION, 3 * REGION, 2 * REGION], np.uint64)
TABLE = np.array([[5, 9, 1], [2, 3, 4], [40, 30, 20]], np.int32)
