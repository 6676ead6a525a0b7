"""The control socket's file, and the lock beside it.

``<socket>.lock`` is flocked for as long as the server lives. Whoever holds it may replace a stale socket and sweep the segments
of dead generations, so two sidecars never fight over one socket. A service manager may hand over a listening socket instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import os
import socket
import stat

from maru_shm.errors import ConfigError, SocketBusy
from maru_shm.socket_path import user_directory
from maru_sidecar.config import Control


def instance_of(socket_path: str) -> str:
    """8 hex digits that name the sidecar serving this socket: part of its segments' names."""
    return hashlib.blake2b(os.path.realpath(socket_path).encode(), digest_size=4).hexdigest()


class Listener:
    """The lock, and the listening socket with its file."""

    def __init__(self, config: Control, activated_fd: int | None = None) -> None:
        """Take the lock, bind (or adopt ``activated_fd``) and listen; what was made is gone again if that fails.

        Raises :class:`~maru_shm.errors.SocketBusy` or ``ConfigError``.
        """
        self._path = config.socket
        self._activated = activated_fd is not None
        with contextlib.ExitStack() as undo:
            self._lock_fd = _lock(config.socket)
            undo.callback(os.close, self._lock_fd)
            self.sock = _adopt(activated_fd) if activated_fd is not None else _listen(config)
            undo.callback(self.sock.close)
            self._file = _file_of(config.socket)
            undo.callback(self._remove)
            self._mode, self._group = _permissions(config.socket)
            undo.pop_all()

    def admits(self, gid: int, groups: tuple[int, ...]) -> bool:
        """Whether the socket's mode lets a stranger of these groups connect."""
        return bool(self._mode & 0o002 or (self._mode & 0o020 and self._group in (gid, *groups)))

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def close(self) -> None:
        """Listen no more; a socket of our own disappears (idempotent)."""
        if not self.closed:
            self.sock.close()
            self._remove()

    def unlock(self) -> None:
        """Give the lock back (idempotent)."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove(self) -> None:
        if not self._activated and self._file == _file_of(self._path):  # else it is somebody else's by now
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def _lock(path: str) -> int:
    directory = os.path.dirname(path)
    try:
        if directory == user_directory():  # any other is the operator's to make: a typing error must not leave directories
            os.makedirs(directory, mode=0o755, exist_ok=True)
        try:
            owner = os.stat(directory).st_uid
        except FileNotFoundError as e:
            raise ConfigError(
                f"control socket {path}: the directory {directory} does not exist", "create it, or choose another socket"
            ) from e
        if os.geteuid() != 0 and owner not in (os.geteuid(), 0):  # whoever owns it could put a socket of theirs in our place
            raise ConfigError(
                f"control socket {path}: uid {owner} owns its directory", "choose one of the sidecar's user or root"
            )
        _refuse_file(path)
        while (fd := _take_lock(path)) is None:
            pass
    except OSError as e:
        raise ConfigError(f"control socket {path}: {e.strerror}", "choose a directory the sidecar's user may write") from e
    return fd


def _take_lock(path: str) -> int | None:
    """The locked descriptor; None if the file was replaced meanwhile: a lock on a file without a name keeps nobody out."""
    fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise _busy(path) from None
    held = os.fstat(fd)
    if _file_of(path + ".lock") != (held.st_dev, held.st_ino):
        os.close(fd)
        return None
    return fd


def _busy(path: str) -> SocketBusy:
    return SocketBusy(f"another sidecar serves {path}", "stop it, or choose another control.socket")


def _file_of(path: str) -> tuple[int, int] | None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _is_live(path: str) -> bool:
    """Whether somebody listens there. The lock says so too, unless its file was cleaned away."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # its queue is full
            return True
    return True


def _refuse_file(path: str) -> None:
    """A socket that nobody serves is replaced; what is no socket is somebody's file, and is never removed."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"control socket {path}: what lies there is no socket", "remove it, or choose another path")


def _listen(config: Control) -> socket.socket:
    path = config.socket
    with contextlib.ExitStack() as undo:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        undo.callback(sock.close)
        try:
            group = grp.getgrnam(config.group).gr_gid if config.group else -1
            if _is_live(path):
                raise _busy(path)
            _refuse_file(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # stale: we hold the lock
            before = os.umask(0o177)  # nobody connects before mode and group are right
            try:
                sock.bind(path)
            finally:
                os.umask(before)
            undo.callback(os.unlink, path)
            if config.group:
                os.chown(path, -1, group)
            os.chmod(path, config.mode)
            sock.listen(64)
        except KeyError as e:
            raise ConfigError(f"control.group is {config.group!r}", "no such group; create it, or name another") from e
        except OSError as e:
            raise ConfigError(f"control socket {path}: {e.strerror}", "check its directory and group") from e
        undo.pop_all()
    return sock


def _permissions(path: str) -> tuple[int, int]:
    """Mode and group of the socket's file; nobody but us is admitted by a socket that has no file (any more)."""
    try:
        info = os.stat(path)
    except OSError:
        return 0, -1
    return info.st_mode, info.st_gid


def _adopt(fd: int) -> socket.socket:
    """A listening socket handed over by the service manager."""
    sock = socket.socket(fileno=fd)
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_UNIX or sock.type & 0xF != socket.SOCK_SEQPACKET or not listening:
        sock.close()
        raise ConfigError(
            "the activated control socket is no listening AF_UNIX SEQPACKET socket", "use ListenSequentialPacket="
        )
    sock.setblocking(False)
    return sock
