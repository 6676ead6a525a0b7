"""The control socket's server side: who connects, may they, and what do they say.

It never blocks the loop it runs in: sockets are non-blocking, a peer that does not read its answers is dropped, one that
has not said Hello in time gives its place back, and connections are bounded. What a message asks for is decided elsewhere
(:class:`Service`), who a peer is by the kernel (``connection.py``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from maru_shm import control
from maru_shm import messages as M
from maru_shm.errors import ProtocolViolation
from maru_sidecar import descriptors
from maru_sidecar.config import Control
from maru_sidecar.connection import Connection
from maru_sidecar.descriptors import close_later
from maru_sidecar.engines import Refusal
from maru_sidecar.listener import Listener
from maru_sidecar.poller import Poller
from maru_sidecar.refusal_log import Refusals, printable

log = logging.getLogger(__name__)

#: Connections beyond the limit that are kept until they have been told why not. (Closing at once, with their Hello unread,
#: would reset the connection and lose the answer.)
SURPLUS = 16
MESSAGES_PER_TURN = 16  #: of one connection, before others get theirs
HANG_UP = select.EPOLLRDHUP | select.EPOLLHUP


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
        self.refusals = Refusals()  #: of connections and messages
        self._asked: dict[Connection, str] = {}  #: what each asked for last, for the log
        self._paused = False
        self._stalled: set[Connection] = set()  #: they wait until descriptors have been closed
        self._listener = Listener(config, activated_fd)
        self._listen()

    # --- connections ----------------------------------------------------------------------------------------------------------
    def _on_accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.sock.accept()
        except BlockingIOError:
            return
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                return  # the peer gave up meanwhile
            log.warning("cannot accept a connection: %s; pausing the listener", e.strerror)
            self._pause()
            return
        sock.setblocking(False)
        try:
            connection = Connection(sock)
        except OSError as e:  # the peer is gone already
            log.debug("connection dropped: %s", e)
            sock.close()
            return
        self.connections[sock.fileno()] = connection
        self._poller.register(
            sock.fileno(), lambda events: self._on_event(connection, events), select.EPOLLIN | HANG_UP,
            failed=lambda _: self.close_connection(connection),
        )  # fmt: skip
        limit = self._config.max_connections
        if len(self.connections) > limit + SURPLUS:
            self.refusals.note(str(connection), _too_many(limit))
            self.close_connection(connection)
        elif len(self.connections) > limit:
            connection.refusal = _too_many(limit)
        elif not self._authorised(connection):
            what = f"uid {connection.uid} may not use {self._config.socket}"
            remedy = "join the socket's group, or add the uid to control.allowed_uids"
            connection.refusal = M.Refused(M.RefusalCode.NOT_AUTHORISED, what, remedy)

    def _listen(self) -> None:
        self._paused = False
        self._poller.register(self._listener.sock.fileno(), self._on_accept, failed=lambda _: self._pause())

    def _pause(self) -> None:
        """Accept nobody until the next tick: the listener is level-triggered, it would spin."""
        self._poller.unregister(self._listener.sock.fileno())
        self._paused = True

    def _authorised(self, c: Connection) -> bool:
        """Own user and root always; else the configured ids, or where none are configured whoever the socket's mode admits."""
        if c.is_admin or c.uid in self._config.allowed_uids:
            return True
        if self._config.allowed_uids or self._config.allowed_gids:
            return bool({c.gid, *c.groups} & set(self._config.allowed_gids))
        return self._listener.admits(c.gid, c.groups)

    def _on_event(self, c: Connection, events: int) -> None:
        if c.busy:
            if events & HANG_UP and not c.hung_up:
                c.hung_up = True  # closed when the request it is busy with has ended
                self._poller.unregister(c.sock.fileno())
            return
        if c in self._stalled and events & HANG_UP:
            self.close_connection(c)
            return
        for _ in range(MESSAGES_PER_TURN):
            if c.closed or c.busy:
                return
            try:
                if descriptors.pending() > descriptors.CLOGGED and control.carries_descriptors(c.sock):
                    self._stall(c)
                    return
                received = control.receive(c.sock, control.to_sidecar, close_later)
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
        self._asked[c] = _asked(message)
        try:
            answer = self._service.request(c, message, fds)
        except Refusal as e:
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
            c.client = printable(message.client) or "unnamed"
            welcome = self._service.welcome()
            welcome.protocol = min(message.protocol_max, M.PROTOCOL)
            self.reply(c, welcome)

    def _stall(self, c: Connection) -> None:
        """Leave a message with descriptors where it is: those before it hang in their close."""
        if not self._stalled:
            log.warning("%d descriptors sent by clients are not closed yet; taking in no more", descriptors.pending())
        self._stalled.add(c)
        self._poller.modify(c.sock.fileno(), HANG_UP)

    # --- answers --------------------------------------------------------------------------------------------------------------
    def defer(self, c: Connection) -> None:
        """Read nothing more from ``c`` until :meth:`reply`: its request is being worked on."""
        c.busy = True
        self._poller.modify(c.sock.fileno(), HANG_UP)

    def reply(self, c: Connection, message: M.SidecarMessage, fds: Sequence[int] = ()) -> bool:
        """Send an answer; False (and the connection closed) if the peer is gone or does not read."""
        if isinstance(message, M.Refused):  # whoever refuses, and whenever: everything goes out here
            self._note(c, message)
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
        self._note(c, refused)
        with contextlib.suppress(OSError):
            control.send(c.sock, refused)
        self.close_connection(c)

    def _note(self, c: Connection, refused: M.Refused) -> None:
        self.refusals.note(f"{c}{self._asked.get(c, '')}", refused)

    def close_connection(self, c: Connection) -> None:
        """Hang up and tell the service (idempotent)."""
        if c.closed:
            return
        c.closed = True
        fd = c.sock.fileno()
        self._poller.unregister(fd)
        self.connections.pop(fd, None)
        self._stalled.discard(c)
        with contextlib.suppress(OSError):
            c.sock.shutdown(socket.SHUT_RDWR)  # the peer sees the end now
        close_later([c.sock.detach()])  # messages that were not read may hold descriptors too
        self._service.disconnected(c)
        self._asked.pop(c, None)
        os.close(c.pidfd)

    # --- time -----------------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """Drop peers that owe a Hello or have been silent without a session; listen again after running out of descriptors."""
        self.refusals.say()
        now = time.monotonic()
        for c in list(self.connections.values()):
            limit = self._config.idle_timeout_s if c.client else self._config.handshake_timeout_s
            if c.session is None and not c.busy and now - c.last_heard > limit:
                log.info("%s dropped: silent for %.0f s", c, limit)
                self.close_connection(c)
        if self._stalled and descriptors.pending() <= descriptors.CLOGGED:
            stalled, self._stalled = self._stalled, set()
            for c in stalled:
                if not c.closed and not c.busy:
                    self._poller.modify(c.sock.fileno(), select.EPOLLIN | HANG_UP)
        if self._paused:
            self._listen()

    def stop_listening(self) -> None:
        """Accept nobody any more; a socket of our own disappears (idempotent)."""
        if not self._listener.closed:
            self._poller.unregister(self._listener.sock.fileno())
            self._paused = False
            self._listener.close()

    def close(self) -> None:
        """Hang up on everyone and give the lock back."""
        self.stop_listening()
        for c in list(self.connections.values()):
            self.close_connection(c)
        self._listener.unlock()


def _too_many(limit: int) -> M.Refused:
    return M.Refused(M.RefusalCode.LIMIT, f"{limit} connections are open", "raise control.max_connections")


def _asked(message: M.ClientMessage) -> str:
    """Who is meant where several clients share a name, and pids mean nothing across containers."""
    if isinstance(message, M.Attach):
        return f", {message.role.value} {message.rank} of engine {message.engine_id[:80]!r},"
    return f", {type(message).__name__},"
