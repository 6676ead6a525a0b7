"""Who has a pool: a lock on a file beside it, and one on the pool itself.

Every client gets a read-only descriptor of the pool, and the kernel's file locks do not ask how a file was opened (flock) or
let readers take read locks (fcntl): a client could keep a dead sidecar's successor from starting. So there is a flock on
``<pool>.lock``, which only those may open who may write the pool. It is empty and stays when the pool is closed, so that nobody
else can put a file in its place meanwhile. A device has none: its directory is the kernel's.

That file is a matter of names, and one pool may have two (a hard link, a bind mount of the file alone), or lose its lock's
file. So whoever has the pool also holds a *write* lock on a byte far behind its end, which takes a descriptor open for
writing. Asking for a read lock conflicts with those alone, whatever clients hold. Should a client's read lock keep the byte
itself from being taken, the file beside the pool decides alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
from types import TracebackType

from maru_shm.errors import PoolBusy, PoolError
from maru_sidecar.pool_path import refuse_place

FLOCK = struct.Struct("@hhqqi4x")  #: C's struct flock: type, whence, start, length, pid
_OWNER = 1 << 61
_SHARERS, _MOST_SHARERS = _OWNER + 1, 1024
_WRITABLE = ((stat.S_IWUSR, 0o600), (stat.S_IWGRP, 0o060), (stat.S_IWOTH, 0o006))

log = logging.getLogger(__name__)


def lock_path(pool: str) -> str:
    """The lock's file of the pool at this path. Another path to the same directory names the same one."""
    directory, name = os.path.split(os.path.abspath(pool))
    return os.path.join(os.path.realpath(directory), name + ".lock")


class PoolLock:
    """The lock of one pool, held until :meth:`close`, or the end of a ``with`` unless :meth:`keep` was called."""

    def __init__(self, path: str, mode: int, kind: int = fcntl.LOCK_EX, *, beside: bool = True) -> None:
        """Lock the pool at ``path`` (there or not), ``kind`` LOCK_EX or LOCK_SH; ``mode`` is that of a pool to be made.
        ``beside`` False, on a device: nothing is locked before :meth:`confirm`.

        Raises :class:`PoolBusy` naming the holders, :class:`PoolError` if no pool can lie there or the lock's file cannot be
        had.
        """
        self._path = path
        self._kind = kind
        self._kept = False
        self._fresh = False
        self._inside = -1  #: a descriptor of the pool whose open file holds the lock inside
        self.fd = -1  #: of the lock's file, open for writing
        refuse_place(path)
        at = lock_path(path)
        while beside and self.fd < 0:
            fd, self._fresh = _open(at, path, mode)
            try:
                flock(fd, path, kind)
                if is_at(fd, at):
                    self.fd = fd
            finally:
                if self.fd < 0:  # busy, or replaced meanwhile: a lock on a file without a name keeps nobody out
                    os.close(fd)

    def confirm(self, pool_fd: int) -> None:
        """Lock the pool itself too. Raises :class:`PoolBusy` if another process has it, by whatever name."""
        self._leave()
        self._inside = os.open(f"/proc/self/fd/{pool_fd}", os.O_RDWR | os.O_CLOEXEC)  # an open file of its own
        _lock_inside(self._inside, self._path, self._kind)
        with contextlib.suppress(OSError):  # for its pid, which /proc/locks shows of a flock alone
            fcntl.flock(self._inside, self._kind | fcntl.LOCK_NB)

    def keep(self) -> PoolLock:
        self._kept = True
        return self

    def close(self) -> None:
        """Idempotent."""
        self._leave()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _leave(self) -> None:
        if self._inside >= 0:
            os.close(self._inside)
            self._inside = -1

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
    """Take a lock on an open file. Raises :class:`PoolBusy` naming its holders."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        who, several = _holders(fd)
        remedy = f"stop {'them' if several else 'it'}, or name another pool"
        raise PoolBusy(f"pool {name} is held by {who}", remedy) from None
    except OSError as e:
        raise PoolError(f"lock of pool {name}: {e.strerror}", "the filesystem must support file locks") from e


def _lock_inside(fd: int, name: str, kind: int) -> None:
    """One byte for whoever has the pool to itself, or any free one of the sharers'."""
    if kind == fcntl.LOCK_EX:
        _refuse_writers(fd, name, _OWNER, 1 + _MOST_SHARERS)
        if not _take_byte(fd, name, _OWNER):
            _refuse_writers(fd, name, _OWNER, 1)  # somebody was faster
            log.warning("pool %s: a client's lock keeps this process from locking the pool itself", name)
        _refuse_writers(fd, name, _SHARERS, _MOST_SHARERS)  # who came between
    else:
        _refuse_writers(fd, name, _OWNER, 1)
        if not any(_take_byte(fd, name, at) for at in range(_SHARERS, _SHARERS + _MOST_SHARERS)):
            log.warning("pool %s: every byte that its users lock is taken", name)
        _refuse_writers(fd, name, _OWNER, 1)


def _take_byte(fd: int, name: str, at: int) -> bool:
    """Write-lock a byte; False if any lock is in the way."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise PoolError(f"lock of pool {name}: {e.strerror}", "the filesystem must support file locks") from e
        return False
    return True


def _refuse_writers(fd: int, name: str, at: int, n: int) -> None:
    """Raise :class:`PoolBusy` if another open file holds a write lock there."""
    asked = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, at, n, 0)
    try:
        kind, *_ = FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    except OSError as e:
        raise PoolError(f"lock of pool {name}: {e.strerror}", "the filesystem must support file locks") from e
    if kind != fcntl.F_UNLCK:
        who, several = _holders(fd)
        raise PoolBusy(f"pool {name} is held by {who}", f"stop {'them' if several else 'it'}, or name another pool")


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


def flock_holders(info: os.stat_result) -> set[int]:
    """Pids of those who hold a flock on a file, by the kernel's list; 0 for one whose pid is not visible from here."""
    wanted = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    pids = set()
    with open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
                pids.add(max(0, int(fields[4])))
    return pids


def _holders(fd: int) -> tuple[str, bool]:
    """Who holds the flock, as ``/proc/locks`` tells it, and whether that is more than one (a shared pool has many)."""
    pids = flock_holders(os.fstat(fd))
    seen = [str(pid) for pid in sorted(pids) if pid]
    if not seen:
        return "another process (its pid is not visible from here)", False
    unseen = " and others whose pids are not visible from here" if 0 in pids else ""
    return f"process{'es' if len(seen) > 1 else ''} {', '.join(seen)}{unseen}", len(seen) > 1 or bool(unseen)
