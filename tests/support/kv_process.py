"""A process that owns a KV cache in host memory: the far end of the ``cpu`` engine, driven over a pipe."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from maru_shm.geometry import KvRegion, RegionKind
from maru_sidecar.transfer.base import Peer

Bytes = npt.NDArray[np.uint8]
ROOT_DIRECTORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def random_bytes(seed: int, n: int) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(n), np.uint8).copy()


class HostKvProcess:
    """Each method returns when its work in the child is done."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT_DIRECTORY
            )
        self._pipe = Connection(ours.detach())
        self.pidfd = os.pidfd_open(self.process.pid)
        self.peer = Peer(self.process.pid, self.pidfd)

    def call(self, command: str, *arguments: Any) -> Any:
        self._pipe.send((command, arguments))
        assert self._pipe.poll(60), "the KV process does not answer"
        ok, value = self._pipe.recv()
        assert ok, value
        return value

    def allocate(self, *sizes: int) -> list[KvRegion]:
        """New allocations in place of the old ones."""
        regions: list[KvRegion] = self.call("allocate", *sizes)
        return regions

    def fill(self, seed: int) -> list[Bytes]:
        """Random bytes everywhere; the same ones, here."""
        return [random_bytes(seed + i, n) for i, n in enumerate(self.call("fill", seed))]

    def read(self) -> list[Bytes]:
        return [np.frombuffer(b, np.uint8) for b in self.call("read")]

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken it down."""
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        self._pipe.close()  # the child ends at end of file
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        os.close(self.pidfd)


class _Memory:
    """The child's side."""

    def __init__(self) -> None:
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


def _serve(pipe: Connection) -> None:
    memory = _Memory()
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(memory, command)(*arguments)))
        except Exception as e:  # noqa: BLE001 - told to the test, whatever it is
            pipe.send((False, f"{type(e).__name__}: {e}"))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
