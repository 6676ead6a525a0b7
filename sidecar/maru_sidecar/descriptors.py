"""Closing descriptors that a client sent, without waiting for it.

The last close of a socket with ``SO_LINGER`` waits for its peer, that of a file on some network file systems for its server:
nothing the main thread may do for a stranger.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import struct
import threading
from collections.abc import Iterable

_THREADS = 16  #: that may hang in a close before further ones wait
CLOGGED = 1024  #: descriptors that wait; more are not taken in from clients until some have been closed
_NO_LINGER = struct.pack("ii", 0, 0)


class _Closer:
    """Daemon threads: the process ends without them. They start with the first descriptor."""

    def __init__(self) -> None:
        self._fds: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0
        self.pending = 0  #: descriptors not closed yet

    def close(self, fds: Iterable[int]) -> None:
        for fd in fds:
            with self._lock:
                self.pending += 1
                self._fds.put(fd)
                if self._fds.qsize() > self._idle and self._started < _THREADS:
                    self._started += 1
                    threading.Thread(target=self._run, name="maru-closer", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            fd = self._fds.get()
            with self._lock:
                self._idle -= 1
            _close(fd)
            with self._lock:
                self.pending -= 1


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as sock:  # not the last descriptor: closing this one does not wait
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    with contextlib.suppress(OSError):
        os.close(fd)


_closer = _Closer()


def close_later(fds: list[int]) -> None:
    """Close descriptors received from a client, in a thread; the list is empty afterwards."""
    _closer.close(fds)
    fds.clear()


def pending() -> int:
    """How many descriptors wait for their close, or hang in it."""
    return _closer.pending
