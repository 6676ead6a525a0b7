"""Memory of this process whose pages nobody ever brings: a page fault in it takes for ever (userfaultfd).

For a sidecar that copies from or to it that is what a FUSE file or a dead network mount looks like.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct

import numpy as np

from maru_shm.geometry import KvLayout, KvPlane, KvRegion, RegionKind
from tests.support.client import KvCache

PAGE = 4096
_SYSCALL = {"x86_64": 323, "aarch64": 282}
_API = 0xC018AA3F
_REGISTER = 0xC020AA00
_MISSING = 1
_PROT_READ_WRITE, _PRIVATE_ANONYMOUS = 3, 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def userfaultfd() -> int:
    """A descriptor for faults that the kernel meets too. Raises ``PermissionError`` where only root may have one."""
    fd = int(_libc.syscall(_SYSCALL[platform.machine()], os.O_CLOEXEC))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    fcntl.ioctl(fd, _API, bytearray(struct.pack("<QQQ", 0xAA, 0, 0)))
    return fd


class FaultingCache(KvCache):
    """A cache of 64 blocks of a page. Blocks 0 and 63 are there (so that an attach can look at both ends) unless ``whole``;
    block ``i`` of the others is touched, by the test or the sidecar, and whoever touches it hangs."""

    def __init__(self, signature: str = "faulting", *, whole: bool = False) -> None:
        size = 64 * PAGE
        address = _libc.mmap(None, size, _PROT_READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        self.num_blocks = 64
        self.memory = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        missing, length = address, size
        if not whole:
            self.memory[:PAGE] = self.memory[-PAGE:] = 1
            missing, length = address + PAGE, size - 2 * PAGE
        self._fd = userfaultfd()
        fcntl.ioctl(self._fd, _REGISTER, bytearray(struct.pack("<QQQQ", missing, length, _MISSING, 0)))
        region = KvRegion(RegionKind.PROCESS_VM, address, size)
        self.layout = KvLayout(64, 16, (KvPlane(0, 0, PAGE, PAGE, 0),), (region,), signature)
