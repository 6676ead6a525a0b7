"""The file or device a pool lies in: opened, made if it may be, and refused with the remedy where no pool can lie."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from maru_shm.errors import PoolError
from maru_sidecar import devdax, hostmemory
from maru_sidecar.pool_spec import SHM_DIR, PoolSpec

DEVICES = "/dev"


def open_or_create(path: str, spec: PoolSpec) -> tuple[int, bool]:
    """``(fd, created)``. O_EXCL tells the two apart, so that only a file made here is ever removed on failure."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            fd, created = os.open(path, flags), False
        except FileNotFoundError:
            fd, created = os.open(path, flags | os.O_CREAT | os.O_EXCL, spec.mode & 0o600), True
            os.fchmod(fd, spec.mode)  # the umask has no say in it
    except FileExistsError:  # somebody was faster
        return open_or_create(path, spec)
    except OSError as e:
        raise unopenable(path, e) from e
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise PoolError(f"pool {path} is not a regular file", "name a file on tmpfs, hugetlbfs, fsdax or a filesystem")
    if spec.backend == "shm" and info.st_uid != os.geteuid():
        os.close(fd)
        raise PoolError(
            f"pool {path} belongs to uid {info.st_uid}, not to {os.geteuid()}",
            "anyone may create files in /dev/shm, so a stranger's pool is not trusted: remove it or choose another name",
        )
    return fd, created


def open_existing(path: str, access: int = os.O_RDWR) -> int:
    """A descriptor of a regular file or DAX device that is there. Raises :class:`PoolError`."""
    if devdax.is_device(path):
        return devdax.open_device(path, access)
    refuse_place(path)
    try:
        fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for its other end
    except FileNotFoundError as e:
        raise PoolError(f"pool {path}: {e.strerror}", f"initialise it first: {init_command(path)}") from e
    except OSError as e:
        raise unopenable(path, e) from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PoolError(f"pool {path} is no regular file and no DAX device", "name a file on tmpfs, fsdax or a filesystem")
    return fd


def reopen(fd: int, flags: int) -> int:
    """A new open file description of the same file (``dup`` would share the lock)."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    except OSError as e:
        raise PoolError(f"pool descriptor {fd} cannot be reopened: {e.strerror}", "mount /proc and check permissions") from e


def target_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError as e:
        raise PoolError(f"file descriptor {fd} for the pool: {e.strerror}", "hand over an open descriptor") from e


def close_quietly(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def refuse_place(path: str) -> None:
    """Raise :class:`PoolError` where no pool can lie: on a directory, in one that is not there, as a file among the devices."""
    refuse_among_devices(path)
    parent = os.path.dirname(os.path.abspath(path))
    code = errno.EISDIR if os.path.isdir(path) else 0 if os.path.isdir(parent) else errno.ENOENT
    if code:
        raise unopenable(path, OSError(code, os.strerror(code)))


def refuse_among_devices(path: str) -> None:
    """Raise :class:`PoolError` for whatever lies, or would lie, in /dev itself and is no character device.

    A file made there takes the place of a device that is missing, and its bytes are kernel memory without a limit. Filesystems
    mounted below it to hold data are another matter: /dev/shm, /dev/hugepages.
    """
    directory = os.path.realpath(path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path)))
    if devdax.is_device(path) or not _is_in(directory, DEVICES) or _is_in(directory, SHM_DIR) or _is_data_mount(directory):
        return
    elsewhere = f"a file in {SHM_DIR}, or in another tmpfs or hugetlbfs mounted below {DEVICES}"
    try:
        mode = os.lstat(path).st_mode
    except OSError as e:
        raise PoolError(
            f"pool {path}: no such device, and no file is made among the devices in {DEVICES}",
            f"name a DAX device (`daxctl list` shows them), or {elsewhere}",
        ) from e
    if stat.S_ISREG(mode):
        raise PoolError(
            f"pool {path} is a file among the devices in {DEVICES}",
            f"remove it, it may have been made in place of a device; name {elsewhere}",
        )
    what = "a block device" if stat.S_ISBLK(mode) else "a directory" if stat.S_ISDIR(mode) else "no DAX device"
    raise PoolError(f"pool {path} is {what}", f"name a DAX device (`daxctl list` shows them), or {elsewhere}")


def _is_in(directory: str, above: str) -> bool:
    return directory == above or directory.startswith(f"{above}/")


def _is_data_mount(directory: str) -> bool:
    """Whether a directory below /dev lies on a tmpfs or hugetlbfs of its own (/dev itself is a tmpfs in containers)."""
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        own = os.fstat(fd).st_dev != os.stat(DEVICES).st_dev
        return own and hostmemory.filesystem_of(fd).kind in ("tmpfs", "hugetlbfs")
    finally:
        os.close(fd)


def unopenable(path: str, error: OSError) -> PoolError:
    """The error for a pool's file that cannot be opened or made, with the remedy for its reason."""
    remedies = {
        errno.ENOENT: f"create the directory {os.path.dirname(os.path.abspath(path))}",
        errno.EISDIR: f"name a file in it, e.g. {path}/maru-pool",
        errno.ELOOP: "it is a symbolic link, and none is followed: name the file itself",
        errno.EACCES: "run as the user whose pool it is, or name another path",
        errno.EROFS: "name a path on a filesystem that can be written",
    }
    return PoolError(f"pool {path}: {error.strerror}", remedies.get(error.errno or 0, "name another path"))


def init_command(path: str, *options: str) -> str:
    """The command that makes a pool at ``path``."""
    size = () if devdax.is_device(path) else ("--size SIZE",)
    return " ".join(("maru-sidecar pool init", *options, path, *size))
