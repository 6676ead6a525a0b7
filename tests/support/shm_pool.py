"""A pool-like shared mapping without the pool's format, for tests and benchmarks of transfer engines."""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid

import numpy as np
import numpy.typing as npt

from maru_sidecar.transfer.base import PoolMapping


class ShmPool:
    """``size`` bytes of a tmpfs, without a name; ``bytes`` is all of it."""

    def __init__(self, size: int, directory: str = "/dev/shm") -> None:
        path = f"{directory}/maru-test-{uuid.uuid4().hex}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
        os.posix_fallocate(self._fd, 0, size)
        self._mmap = mmap.mmap(self._fd, size)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mmap, np.uint8)
        self.mapping = PoolMapping(self.bytes.ctypes.data, size, self._fd)

    def close(self) -> None:
        del self.bytes
        with contextlib.suppress(BufferError):  # a test still holds a view; the last one unmaps
            self._mmap.close()
        os.close(self._fd)
