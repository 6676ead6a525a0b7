"""The few libc calls and kernel facts the pool needs and Python does not offer: madvise, NUMA policy, filesystem type.

``mmap.madvise`` holds the GIL for the whole call (over 1 s per GiB when it populates pages); ``madvise`` through ctypes does
not. NUMA policy has no wrapper in libc (libnuma is a separate library), so it goes through ``syscall``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

from maru_shm.poolformat import DATA_ALIGN
from maru_sidecar import devdax
from maru_sidecar.pool_spec import MAX_NODES

MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22  #: Linux 5.14
MADV_POPULATE_WRITE = 23  #: Linux 5.14

_MPOL_DEFAULT = 0
_MPOL_BIND = 2
_MPOL_MF_MOVE = 2
_SYSCALLS = {"x86_64": (237, 238), "aarch64": (235, 237)}  #: (mbind, set_mempolicy)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.syscall.restype = ctypes.c_long

#: filesystems whose pages are memory itself: writing a page costs no disk I/O
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "hugetlbfs", "devtmpfs", "ramfs"})


def madvise(address: int, length: int, advice: int) -> int:
    """``madvise(2)`` without the GIL. Returns 0 or the errno; ``address`` and ``length`` in bytes, page-aligned."""
    if _libc.madvise(address, length, advice) == 0:
        return 0
    return ctypes.get_errno()


def _node_mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (MAX_NODES // bits))()
    mask[node // bits] = 1 << node % bits
    return mask


def bind_to_node(address: int, length: int, node: int) -> str:
    """Ask that pages of ``[address, address + length)`` come from NUMA ``node``; returns "" or why the kernel refused."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return f"no mbind on {platform.machine()}"
    if not 0 <= node < MAX_NODES:
        return f"node {node} is outside 0..{MAX_NODES - 1}"
    mask = _node_mask(node)
    result = _libc.syscall(
        ctypes.c_long(numbers[0]), ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(_MPOL_BIND),
        ctypes.byref(mask), ctypes.c_ulong(MAX_NODES), ctypes.c_uint(_MPOL_MF_MOVE),
    )  # fmt: skip
    return "" if result == 0 else f"mbind: {os.strerror(ctypes.get_errno())}"


@contextlib.contextmanager
def allocating_on(node: int | None) -> Iterator[str]:
    """This thread allocates from NUMA ``node`` inside the block (``fallocate`` obeys the thread's policy, not a mapping's).

    Yields "" or why the kernel refused; the block runs either way.
    """
    numbers = _SYSCALLS.get(platform.machine())
    if node is None:
        yield ""
        return
    if numbers is None or not 0 <= node < MAX_NODES:
        yield f"no NUMA policy for node {node} on {platform.machine()}"
        return
    mask = _node_mask(node)
    refused = ""
    set_mempolicy = ctypes.c_long(numbers[1])
    if _libc.syscall(set_mempolicy, ctypes.c_int(_MPOL_BIND), ctypes.byref(mask), ctypes.c_ulong(MAX_NODES)):
        refused = f"set_mempolicy: {os.strerror(ctypes.get_errno())}"
    try:
        yield refused
    finally:
        if not refused:
            _libc.syscall(set_mempolicy, ctypes.c_int(_MPOL_DEFAULT), None, ctypes.c_ulong(0))


@dataclass(frozen=True, slots=True)
class Filesystem:
    """Where a pool lives. ``kind`` is empty for a memfd (its mount is internal to the kernel), ``devdax`` for a DAX device."""

    kind: str
    dax: bool
    huge: bool  #: a tmpfs mounted to give huge pages
    page_bytes: int  #: allocation unit; the huge page size on hugetlbfs, the alignment of a device

    @property
    def is_device(self) -> bool:
        """A DAX device: it has no size to change and can only be mapped."""
        return self.kind == devdax.KIND

    @property
    def region_unit(self) -> int:
        """Regions are multiples of this many bytes: mappings of part of the pool start and end at such."""
        return self.page_bytes if self.is_device or self.kind == "hugetlbfs" else DATA_ALIGN

    @property
    def in_memory(self) -> bool:
        """Whether its pages are the medium itself (tmpfs, hugetlbfs, memfd, DAX), so that dirtying one writes no disk."""
        return self.dax or not self.kind or self.kind in _MEMORY_FILESYSTEMS

    @property
    def uses_ram(self) -> bool:
        """Whether its pages are taken from the machine's ordinary memory."""
        return not self.kind or self.kind in ("tmpfs", "devtmpfs", "ramfs")


def filesystem_of(fd: int) -> Filesystem:
    """The filesystem an open file lives on, from ``/proc/self/mountinfo`` (the last mount of its device wins).

    Raises :class:`~maru_shm.errors.PoolError` for a device that can hold no pool.
    """
    if (character := devdax.of(fd)) is not None:
        return Filesystem(devdax.KIND, True, True, character.align)
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    page = os.fstatvfs(fd).f_bsize
    kind, options = "", ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            fields = left.split()
            if len(fields) > 5 and fields[2] == wanted:
                kind, _, options = right.split()[:3]
                options = f"{options},{fields[5]}"
    words = options.split(",")
    dax = "dax" in words or "dax=always" in words
    huge = any(w in words for w in ("huge=always", "huge=within_size", "huge=advise"))
    return Filesystem(kind, dax, huge, page)


def shmem_hugepages() -> bool:
    """Whether the kernel overrides tmpfs mounts to give huge pages."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled", encoding="ascii") as f:
            return "[force]" in f.read()
    except FileNotFoundError:
        return False


def available_ram() -> int:
    """Bytes that new pages could take without the machine running out: MemAvailable plus free swap."""
    total = 0
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            name, _, rest = line.partition(":")
            if name in ("MemAvailable", "SwapFree"):
                total += int(rest.split()[0]) * 1024
    return total


def free_bytes(fd: int, fs: Filesystem) -> int | None:
    """Bytes a file may still take on its filesystem; None if the filesystem sets no limit (a memfd's)."""
    vfs = os.fstatvfs(fd)
    if vfs.f_blocks:
        return vfs.f_bavail * vfs.f_frsize
    if fs.kind == "hugetlbfs":  # a mount without size= reports zeros; the limit is the kernel's pool of huge pages
        try:
            with open(f"/sys/kernel/mm/hugepages/hugepages-{fs.page_bytes // 1024}kB/free_hugepages", encoding="ascii") as f:
                return int(f.read()) * fs.page_bytes
        except FileNotFoundError:
            return None
    return None
