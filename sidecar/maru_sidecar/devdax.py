"""Device DAX: CXL or persistent memory offered as a character device, ``/dev/daxX.Y``, without a filesystem.

What differs from a file, and what follows from it:

- There is no read, write, truncate, fallocate or fsync, only mmap, in whole multiples of the device's alignment (usually
  2 MiB): the regions of its pool are such multiples, and its header is read and written through a mapping.
- It is never empty and never grows. sysfs tells size and alignment, only ``maru-sidecar pool init`` writes a pool header, and
  ``pool.size`` is not used.
- It cannot be flushed to its medium from here, so a pool on it is never marked clean: after a reboot only what a checksum
  vouches for is kept.
- The lock is a write lock on a byte of the device node (``pool_lock.py``). The kernel keeps it by the node's inode and the
  driver never sees it, so it works as on a file, and nobody without rights on the device can take it (unlike one on its sysfs
  entry) or remove it (unlike a lock file). Containers must be given the host's node by a bind mount: a node made with mknod
  has a lock of its own.
- In system-ram mode the node stays, and opening it fails with ENXIO: sysfs is asked first, to name the reason.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from maru_shm.errors import PoolError

SYS_CHAR = "/sys/dev/char"
KIND = "devdax"  #: as a filesystem's kind
_NAME_A_DEVICE = "name a /dev/daxX.Y (`daxctl list` shows them), or a file"


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """A device in devdax mode. ``size`` and ``align`` in bytes."""

    name: str  #: e.g. dax0.0
    size: int
    align: int


def number_of(info: os.stat_result) -> str | None:
    """``major:minor`` of a character device, None for anything else."""
    return f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}" if stat.S_ISCHR(info.st_mode) else None


def is_device(path: str) -> bool:
    """Whether a character device lies at ``path``, of whatever kind."""
    try:
        return number_of(os.stat(path, follow_symlinks=False)) is not None
    except OSError:
        return False  # opening it tells why


def of(fd: int) -> DaxDevice | None:
    """The device behind a descriptor; None for a file. Raises :class:`PoolError` for a device that cannot hold a pool."""
    number = number_of(os.fstat(fd))
    return None if number is None else _describe(number, os.readlink(f"/proc/self/fd/{fd}"))


def open_device(path: str, access: int) -> int:
    """A descriptor of the DAX device at ``path``. Raises :class:`PoolError`, naming what is wrong with it."""
    number = number_of(os.stat(path, follow_symlinks=False))
    if number is None:
        raise PoolError(f"{path} is no character device", _NAME_A_DEVICE)
    device = _describe(number, path)
    try:
        return os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EPERM):
            remedy = 'a udev rule opens it: SUBSYSTEM=="dax", GROUP="maru", MODE="0660"'
        elif e.errno in (errno.ENXIO, errno.ENODEV):
            remedy = f"daxctl enable-device {device.name}"
        else:
            remedy = "see `daxctl list`"
        raise PoolError(f"DAX device {path}: {e.strerror}", remedy) from e


def _describe(number: str, path: str) -> DaxDevice:
    at = f"{SYS_CHAR}/{number}"
    if not os.path.isdir(SYS_CHAR):
        raise PoolError(f"device {path}: {SYS_CHAR} is not there", "mount sysfs on /sys: it tells a device's size")
    if _link(f"{at}/subsystem") != "dax":
        raise PoolError(f"{path} is a character device ({number}) that is no DAX device", _NAME_A_DEVICE)
    name = os.path.basename(os.path.realpath(at))
    driver = _link(f"{at}/driver")
    if driver == "kmem":
        raise PoolError(
            f"DAX device {path} is in system-ram mode: the kernel uses it as ordinary memory",
            f"daxctl reconfigure-device --mode=devdax {name}, or a pool in /dev/shm with pool.numa_node",
        )
    if not driver:
        raise PoolError(f"DAX device {path} has no driver", f"daxctl enable-device {name}")
    size = _number(f"{at}/size")
    # The device's own entry since Linux 5.10, its region's before; reached from the device or, with the bus, from its parent.
    align = _number(f"{at}/align") or _number(f"{at}/dax_region/align") or _number(f"{at}/../dax_region/align")
    if not size:
        raise PoolError(f"DAX device {path} tells no size in {at}/size", f"daxctl create-device, or another than {name}")
    if not align or align % os.sysconf("SC_PAGE_SIZE"):
        raise PoolError(f"DAX device {path} has an alignment of {align} bytes by {at}", "a multiple of the page size is needed")
    return DaxDevice(name, size, align)


def _link(path: str) -> str:
    """The last part of what a link points to; empty if there is none."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def _number(path: str) -> int:
    """A sysfs attribute's number, 0 if there is none."""
    try:
        with open(path, encoding="ascii") as f:
            return int(f.read(), 0)
    except (OSError, ValueError):
        return 0
