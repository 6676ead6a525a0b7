"""One epoll over everything the main thread waits for, and a way for other threads to have something done there."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

Handler = Callable[[int], None]  #: called with the epoll events
Failed = Callable[[Exception], None]  #: ends whoever a descriptor belongs to


@dataclass(frozen=True, slots=True)
class _Entry:
    handler: Handler
    failed: Failed | None


class Poller:
    """Level-triggered, unless registered with ``EPOLLET``: a handler that leaves input behind is called again.

    All but :meth:`call_soon` is for one thread. What a handler or a function raises never leaves :meth:`poll`: it is logged and
    counted (``failed``: functions given to :meth:`call_soon`, ``failed_handlers``), and the descriptor's owner ended.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._entries: dict[int, _Entry] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self.failed = 0
        self.failed_handlers = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.register(self._wake, self._drain_wake)

    def register(self, fd: int, handler: Handler, events: int = select.EPOLLIN, *, failed: Failed | None = None) -> None:
        """Watch ``fd``. ``failed`` is called once with what ``handler`` raises; it unregisters and ends the owner.

        Without it, or if it leaves ``fd`` registered, ``fd`` is unregistered: a level-triggered event would come again at once.
        """
        self._entries[fd] = _Entry(handler, failed)
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Forget ``fd`` (idempotent); call it before closing the descriptor."""
        if self._entries.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> int:
        """Wait for events and handle them; returns how many there were."""
        events = self._epoll.poll(timeout_s)
        for fd, mask in events:
            entry = self._entries.get(fd)  # an earlier handler of this round may have unregistered it
            if entry is None:
                continue
            try:
                entry.handler(mask)
            except Exception as e:  # one client's event must not take the daemon down
                self.failed_handlers += 1
                log.exception("a handler of descriptor %d failed", fd)
                self._end(fd, entry, e)
        return len(events)

    def _end(self, fd: int, entry: _Entry, error: Exception) -> None:
        try:
            if entry.failed is not None:
                entry.failed(error)
        except Exception:
            log.exception("the owner of descriptor %d could not be ended", fd)
        if self._entries.get(fd) is entry:  # else its owner has ended, and the number may be another's
            self.unregister(fd)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Have the polling thread call ``function``; what it raises is logged and counted. Any thread."""
        self._soon.append(function)
        with contextlib.suppress(OSError):  # EAGAIN: it is awake already; EBADF: it has been closed
            os.eventfd_write(self._wake, 1)

    def _drain_wake(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for _ in range(len(self._soon)):
            function = self._soon.popleft()
            try:
                function()
            except Exception:  # one client's late answer must not take the daemon down
                self.failed += 1
                log.exception("a deferred call failed")

    def close(self) -> None:
        wake, self._wake = self._wake, -1  # a late call_soon must not write into whatever gets the number next
        self._epoll.close()
        os.close(wake)
