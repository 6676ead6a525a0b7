"""A peer of the control socket, as the kernel knows it (``SO_PEERCRED``, ``SO_PEERPIDFD``), never by what it says of itself."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

from maru_shm import messages as M

SO_PEERGROUPS = 59
SO_PEERPIDFD = 77  # Linux 6.5
_UCRED = struct.Struct("iII")


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
