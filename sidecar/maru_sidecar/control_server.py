"""The control socket's server side: who connects, may they, and what do they say.

It never blocks the loop it runs in: sockets are non-blocking, a peer that does not read its answers is dropped, one that
has not said Hello in time gives its place back, and connections are bounded. What a message asks for is decided elsewhere
(:class:`Service`); here a peer is identified by the kernel (``SO_PEERCRED``, ``SO_PEERPIDFD``), never by what it says.

The socket's neighbour ``<socket>.lock`` is flocked for as long as the server lives. Whoever holds it may replace a stale
socket and sweep the segments of dead generations, so two sidecars never fight over one socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import hashlib
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from maru_shm import control
from maru_shm import messages as M
from maru_shm.errors import ConfigError, ProtocolViolation, SocketBusy
from maru_sidecar.config import Control
from maru_sidecar.descriptors import close_later
from maru_sidecar.engines import Refusal
from maru_sidecar.poller import Poller

log = logging.getLogger(__name__)

SO_PEERGROUPS = 59
SO_PEERPIDFD = 77  # Linux 6.5
_UCRED = struct.Struct("iII")
#: Connections beyond the limit that are kept until they have been told why not. (Closing at once, with their Hello unread,
#: would reset the connection and lose the answer.)
SURPLUS = 16
MESSAGES_PER_TURN = 16  #: of one connection, before others get theirs
HANG_UP = select.EPOLLRDHUP | select.EPOLLHUP


def instance_of(socket_path: str) -> str:
    """8 hex digits that name the sidecar serving this socket: part of its segments' names."""
    return hashlib.blake2b(os.path.realpath(socket_path).encode(), digest_size=4).hexdigest()


class Connection:
    """One peer. ``pidfd`` is open as long as the connection is."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid, self.uid, self.gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        self.groups = _peer_groups(sock)
        self.pidfd = _peer_pidfd(sock, self.pid)
        self.refusal: M.Refused | None = None  #: the answer to its Hello, and the end
        self.client = ""  #: what it calls itself, once it has said Hello
        self.session: int | None = None  #: once attached
        self.busy = False  #: a request of its is being worked on elsewhere; no further one is read
        self.hung_up = False
        self.closed = False
        self.last_heard = time.monotonic()

    @property
    def is_admin(self) -> bool:
        """Whether administration is allowed: the daemon's own user, or root."""
        return self.uid in (os.geteuid(), 0)

    def __str__(self) -> str:
        return f"{self.client or 'client'} (pid {self.pid}, uid {self.uid})"


class Service(Protocol):
    """What the messages mean."""

    def welcome(self) -> M.Welcome: ...

    def request(self, connection: Connection, message: M.ClientMessage, fds: list[int]) -> M.SidecarMessage | None:
        """Answer at once, or return None and answer later with :meth:`ControlServer.reply`. ``fds`` are the service's to close.

        Raises :class:`~maru_sidecar.engines.Refusal`."""
        ...

    def disconnected(self, connection: Connection) -> None: ...


class ControlServer:
    """Listener and connections; the polling thread uses it alone."""

    def __init__(self, config: Control, poller: Poller, service: Service, activated_fd: int | None = None) -> None:
        """Take the lock, bind (or adopt ``activated_fd``) and listen.

        Raises :class:`~maru_shm.errors.SocketBusy` or ``ConfigError``.
        """
        self._config = config
        self._poller = poller
        self._service = service
        self.connections: dict[int, Connection] = {}
        self.refused = 0  #: connections and messages turned away
        self._activated = activated_fd is not None
        self._paused = False
        self._lock_fd = _lock(config.socket)
        try:
            self._listener = _adopt(activated_fd) if activated_fd is not None else _listen(config)
            self._mode, self._group = _permissions(config.socket)
            self._file = _file_of(config.socket)
        except BaseException:
            os.close(self._lock_fd)
            raise
        poller.register(self._listener.fileno(), self._on_accept)

    # --- connections ----------------------------------------------------------------------------------------------------------
    def _on_accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                return  # the peer gave up meanwhile
            log.warning("cannot accept a connection: %s; pausing the listener", e.strerror)
            self._poller.unregister(self._listener.fileno())  # level-triggered: it would spin
            self._paused = True
            return
        sock.setblocking(False)
        try:
            connection = Connection(sock)
        except OSError as e:  # the peer is gone already
            log.debug("connection dropped: %s", e)
            sock.close()
            return
        self.connections[sock.fileno()] = connection
        self._poller.register(sock.fileno(), lambda events: self._on_event(connection, events), select.EPOLLIN | HANG_UP)
        limit = self._config.max_connections
        if len(self.connections) > limit + SURPLUS:
            self.refused += 1
            self.close_connection(connection)
        elif len(self.connections) > limit:
            what = f"{limit} connections are open"
            connection.refusal = M.Refused(M.RefusalCode.LIMIT, what, "raise control.max_connections")
        elif not self._authorised(connection):
            what = f"uid {connection.uid} may not use {self._config.socket}"
            remedy = "join the socket's group, or add the uid to control.allowed_uids"
            connection.refusal = M.Refused(M.RefusalCode.NOT_AUTHORISED, what, remedy)

    def _authorised(self, c: Connection) -> bool:
        """Own user and root always; else the configured ids, or where none are configured whoever the socket's mode admits."""
        if c.is_admin or c.uid in self._config.allowed_uids:
            return True
        if self._config.allowed_uids or self._config.allowed_gids:
            return bool({c.gid, *c.groups} & set(self._config.allowed_gids))
        return bool(self._mode & 0o002 or (self._mode & 0o020 and self._group in (c.gid, *c.groups)))

    def _on_event(self, c: Connection, events: int) -> None:
        if c.busy:
            if events & HANG_UP and not c.hung_up:
                c.hung_up = True  # closed when the request it is busy with has ended
                self._poller.unregister(c.sock.fileno())
            return
        for _ in range(MESSAGES_PER_TURN):
            if c.closed or c.busy:
                return
            try:
                received = control.receive(c.sock, control.to_sidecar)
            except BlockingIOError:
                return
            except ProtocolViolation as e:
                self._refuse_and_close(c, M.Refused(M.RefusalCode.BAD_MESSAGE, e.what, e.remedy))
                return
            except OSError:
                received = None
            if received is None:
                self.close_connection(c)
                return
            c.last_heard = time.monotonic()
            try:
                self._on_message(c, *received)
            except Exception:  # whatever a message provokes costs its sender the connection, not everyone the daemon
                log.exception("%s: %s", c, type(received[0]).__name__)
                self.close_connection(c)

    def _on_message(self, c: Connection, message: M.ClientMessage, fds: list[int]) -> None:
        if isinstance(message, M.Hello) or not c.client:
            close_later(fds)
            if c.refusal is not None:
                self._refuse_and_close(c, c.refusal)
            else:
                self._hello(c, message)
            return
        try:
            answer = self._service.request(c, message, fds)
        except Refusal as e:
            self.refused += 1
            refused = M.Refused(e.code, e.what, e.remedy)
            if e.code is M.RefusalCode.BAD_MESSAGE:
                self._refuse_and_close(c, refused)
            else:
                self.reply(c, refused)
            return
        if answer is not None:
            self.reply(c, answer)

    def _hello(self, c: Connection, message: M.ClientMessage) -> None:
        if not isinstance(message, M.Hello) or c.client or len(message.client) > 256:
            what = f"{type(message).__name__} where a (single) Hello was expected"
            self._refuse_and_close(c, M.Refused(M.RefusalCode.BAD_MESSAGE, what, "say Hello first, once"))
        elif message.protocol_max < M.PROTOCOL_MIN or message.protocol_min > M.PROTOCOL:
            what = f"protocol {message.protocol_min}-{message.protocol_max}, this sidecar speaks {M.PROTOCOL_MIN}-{M.PROTOCOL}"
            self._refuse_and_close(c, M.Refused(M.RefusalCode.VERSION, what, "run the same release on both sides"))
        else:
            c.client = _printable(message.client) or "unnamed"
            welcome = self._service.welcome()
            welcome.protocol = min(message.protocol_max, M.PROTOCOL)
            self.reply(c, welcome)

    # --- answers --------------------------------------------------------------------------------------------------------------
    def defer(self, c: Connection) -> None:
        """Read nothing more from ``c`` until :meth:`reply`: its request is being worked on."""
        c.busy = True
        self._poller.modify(c.sock.fileno(), HANG_UP)

    def reply(self, c: Connection, message: M.SidecarMessage, fds: Sequence[int] = ()) -> bool:
        """Send an answer; False (and the connection closed) if the peer is gone or does not read."""
        if c.closed:
            return False
        if c.busy:
            c.busy = False
            if c.hung_up:
                self.close_connection(c)
                return False
            self._poller.modify(c.sock.fileno(), select.EPOLLIN | HANG_UP)
        try:
            control.send(c.sock, message, fds)
        except ProtocolViolation as e:
            return self.reply(c, M.Refused(M.RefusalCode.FAILED, e.what, e.remedy))
        except (msgspec.MsgspecError, ArithmeticError, TypeError, ValueError):  # e.g. an integer of more than 64 bits
            log.exception("%s: %s cannot be encoded", c, type(message).__name__)
            what = f"the answer ({type(message).__name__}) cannot be sent"
            return self.reply(c, M.Refused(M.RefusalCode.FAILED, what, "see the sidecar's log"))
        except OSError as e:
            log.info("%s dropped: %s", c, "it does not read its answers" if isinstance(e, BlockingIOError) else e.strerror)
            self.close_connection(c)
            return False
        return True

    def _refuse_and_close(self, c: Connection, refused: M.Refused) -> None:
        self.refused += 1
        log.warning("%s refused: %s", c, refused.what)
        with contextlib.suppress(OSError):
            control.send(c.sock, refused)
        self.close_connection(c)

    def close_connection(self, c: Connection) -> None:
        """Hang up and tell the service (idempotent)."""
        if c.closed:
            return
        c.closed = True
        fd = c.sock.fileno()
        self._poller.unregister(fd)
        self.connections.pop(fd, None)
        with contextlib.suppress(OSError):
            c.sock.shutdown(socket.SHUT_RDWR)  # the peer sees the end now
        close_later([c.sock.detach()])  # messages that were not read may hold descriptors too
        self._service.disconnected(c)
        os.close(c.pidfd)

    # --- time -----------------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """Drop peers that owe a Hello or have been silent without a session; listen again after running out of descriptors."""
        now = time.monotonic()
        for c in list(self.connections.values()):
            limit = self._config.idle_timeout_s if c.client else self._config.handshake_timeout_s
            if c.session is None and not c.busy and now - c.last_heard > limit:
                log.info("%s dropped: silent for %.0f s", c, limit)
                self.close_connection(c)
        if self._paused:
            self._paused = False
            self._poller.register(self._listener.fileno(), self._on_accept)

    def stop_listening(self) -> None:
        """Accept nobody any more; a socket of our own disappears (idempotent)."""
        if self._listener.fileno() < 0:
            return
        self._poller.unregister(self._listener.fileno())
        self._paused = False
        self._listener.close()
        if not self._activated and self._file == _file_of(self._config.socket):  # else it is somebody else's by now
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._config.socket)

    def close(self) -> None:
        """Hang up on everyone and give the lock back."""
        self.stop_listening()
        for c in list(self.connections.values()):
            self.close_connection(c)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _printable(text: str) -> str:
    """A peer's own words, fit for one line of a log."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- the kernel's word on the peer --------------------------------------------------------------------------------------------
def _peer_groups(sock: socket.socket) -> tuple[int, ...]:
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 1024)  # Python's limit: 256 groups; with more, none count
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _peer_pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor naming the peer's process; raises ``OSError`` if it has ended."""
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as e:
        if e.errno not in (errno.ENOPROTOOPT, errno.EINVAL):
            raise
        return os.pidfd_open(pid)  # before Linux 6.5: a pid reused since connect() is caught by the uid check at best
    os.set_inheritable(fd, False)
    return fd


# --- the listening socket -------------------------------------------------------------------------------------------------
def _lock(path: str) -> int:
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)
        owner = os.stat(directory).st_uid
        if os.geteuid() != 0 and owner not in (os.geteuid(), 0):  # whoever owns it could put a socket of theirs in our place
            raise ConfigError(
                f"control socket {path}: uid {owner} owns its directory", "choose one of the sidecar's user or root"
            )
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


def _listen(config: Control) -> socket.socket:
    path = config.socket
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if _is_live(path):
            raise _busy(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # stale: we hold the lock
        before = os.umask(0o177)  # nobody connects before mode and group are right
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        if config.group:
            os.chown(path, -1, grp.getgrnam(config.group).gr_gid)
        os.chmod(path, config.mode)
        sock.listen(64)
    except SocketBusy:
        sock.close()
        raise
    except KeyError as e:
        sock.close()
        raise ConfigError(f"control.group is {config.group!r}", "no such group; create it, or name another") from e
    except OSError as e:
        sock.close()
        raise ConfigError(f"control socket {path}: {e.strerror}", "check its directory and group") from e
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
