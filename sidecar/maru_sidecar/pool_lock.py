"""Who has a pool: a lock on a file beside it, which nobody can hold who was only given a descriptor of the pool.

Every client gets a read-only descriptor of the pool, and the kernel's file locks do not ask how a file was opened (flock) or
let readers take read locks (fcntl): a client could keep a dead sidecar's successor from starting. So the lock is on
``<pool>.lock``, which only those may open who may write the pool. It is empty and stays when the pool is closed, so that nobody
else can put a file in its place meanwhile.

The pool itself is flocked as well, and that must succeed where the lock's file has just been made: another sidecar may be an
older release, or see the pool in another directory (a container with a bind mount of the file alone).

A device has no lock beside it: its directory is the kernel's. There the lock on the node decides, and a client that holds one
keeps a successor out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from types import TracebackType

from maru_shm.errors import PoolBusy, PoolError

_WRITABLE = ((stat.S_IWUSR, 0o600), (stat.S_IWGRP, 0o060), (stat.S_IWOTH, 0o006))


def lock_path(pool: str) -> str:
    """The lock's file of the pool at this path. Another path to the same directory names the same one."""
    directory, name = os.path.split(os.path.abspath(pool))
    return os.path.join(os.path.realpath(directory), name + ".lock")


class PoolLock:
    """The lock of one pool, held until :meth:`close`, or the end of a ``with`` unless :meth:`keep` was called."""

    def __init__(self, path: str, mode: int, kind: int = fcntl.LOCK_EX) -> None:
        """Lock the pool at ``path`` (there or not), ``kind`` LOCK_EX or LOCK_SH; ``mode`` is that of a pool to be made.

        Raises :class:`PoolBusy` naming the holder, :class:`PoolError` if the lock's file cannot be had.
        """
        self._path = path
        self._kind = kind
        self._kept = False
        self.fd = -1  #: open for writing
        at = lock_path(path)
        while self.fd < 0:
            fd, self._fresh = _open(at, path, mode)
            try:
                flock(fd, path, kind)
                if is_at(fd, at):
                    self.fd = fd
            finally:
                if self.fd < 0:  # busy, or replaced meanwhile: a lock on a file without a name keeps nobody out
                    os.close(fd)

    def confirm(self, pool_fd: int) -> None:
        """Lock the pool itself too, as far as that is possible. Raises :class:`PoolBusy` where it has to be."""
        try:
            flock(pool_fd, self._path, self._kind)
        except PoolBusy:
            if self._fresh:
                raise

    def keep(self) -> PoolLock:
        self._kept = True
        return self

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> PoolLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self._kept:
            if self._fresh and value is not None:
                self._remove()
            self.close()

    def _remove(self) -> None:
        """Unlink the file made for nothing, unless others hold it too."""
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(lock_path(self._path))


def flock(fd: int, name: str, kind: int) -> None:
    """Take a lock on an open file. Raises :class:`PoolBusy` naming the holder."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PoolBusy(f"pool {name} is held by {_holder(fd)}", "stop it, or give this sidecar another pool") from None
    except OSError as e:
        raise PoolError(f"lock of pool {name}: {e.strerror}", "the filesystem must support file locks") from e


def is_at(fd: int, path: str) -> bool:
    """Whether the open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _open(at: str, pool: str, mode: int) -> tuple[int, bool]:
    """The lock's file, and whether it was made: of the pool's owner and group, for those who may write the pool."""
    uid, gid = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError):
        info = os.stat(pool, follow_symlinks=False)
        uid, gid, mode = info.st_uid, info.st_gid, info.st_mode
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            fd = os.open(at, flags)
        except FileNotFoundError:
            try:
                fd = os.open(at, flags | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:  # somebody was faster
                return _open(at, pool, mode)
            with contextlib.suppress(PermissionError):
                os.fchown(fd, uid, gid)
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, 0o600 | sum(bits for writable, bits in _WRITABLE if mode & writable))
            return fd, True
    except OSError as e:
        remedy = "it must be writable for whoever may write the pool, or its directory where it is not there"
        raise PoolError(f"the pool's lock {at} cannot be opened: {e.strerror}", remedy) from e
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0, uid):
        os.close(fd)
        raise PoolError(
            f"the pool's lock {at} is of uid {info.st_uid}, not the pool's", "remove it, or choose another pool path"
        )
    return fd, False


def _holder(fd: int) -> str:
    """Who holds the flock, as ``/proc/locks`` tells it."""
    info = os.fstat(fd)
    wanted = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    with open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted and int(fields[4]) > 0:
                return f"process {fields[4]}"
    return "another process (its pid is not visible from here)"
