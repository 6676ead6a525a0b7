"""A process that owns a KV cache in host memory: the far end of the ``cpu`` engine, driven over a pipe."""

from __future__ import annotations

import ctypes
import mmap
import os
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from maru_shm.geometry import KvRegion, RegionKind
from maru_sidecar.transfer.base import Peer
from tests.support.served_process import ServedProcess, serve

Bytes = npt.NDArray[np.uint8]


def random_bytes(seed: int, n: int) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(n), np.uint8).copy()


class AnyKvProcess(ServedProcess):
    """A process with a KV cache, wherever its memory is. Each method returns when its work in the child is done."""

    def __init__(self, module: str, *, timeout: float = 60.0) -> None:
        super().__init__(module, timeout=timeout)
        self.pidfd = os.pidfd_open(self.pid)
        self.peer = Peer(self.pid, self.pidfd)

    def allocate(self, *sizes: int) -> list[KvRegion]:
        """New allocations in place of the old ones."""
        regions: list[KvRegion] = self.call("allocate", *sizes)
        return regions

    def fill(self, seed: int) -> list[Bytes]:
        """Random bytes everywhere; the same ones, here."""
        return [random_bytes(seed + i, n) for i, n in enumerate(self.call("fill", seed))]

    def read(self) -> list[Bytes]:
        return [np.frombuffer(b, np.uint8) for b in self.call("read")]

    def close(self) -> None:
        super().close()
        os.close(self.pidfd)


class HostKvProcess(AnyKvProcess):
    def __init__(self) -> None:
        super().__init__(__name__)


class _Memory:
    """The child's side."""

    def __init__(self, pipe: Connection) -> None:
        self.memory: list[Bytes] = []

    def allocate(self, *sizes: int) -> list[KvRegion]:
        self.memory = [np.zeros(n, np.uint8) for n in sizes]
        return [KvRegion(RegionKind.PROCESS_VM, m.ctypes.data, m.nbytes) for m in self.memory]

    def fill(self, seed: int) -> list[int]:
        for i, m in enumerate(self.memory):
            m[:] = random_bytes(seed + i, m.nbytes)
        return [m.nbytes for m in self.memory]

    def read(self) -> list[bytes]:
        return [m.tobytes() for m in self.memory]

    def allocate_with_a_hole(self, size: int, hole: int) -> list[KvRegion]:
        """One region whose bytes from ``hole`` on, but for the last page, cannot be accessed; multiples of 4 KiB."""
        self.holed = mmap.mmap(-1, size)
        self.memory = [np.frombuffer(self.holed, np.uint8)[:hole]]
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.holed))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address + hole), ctypes.c_size_t(size - hole - 4096), 0) == 0
        return [KvRegion(RegionKind.PROCESS_VM, address, size)]


if __name__ == "__main__":
    serve(_Memory)
