"""One epoll over everything the main thread waits for, and a way for other threads to have something done there."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

Handler = Callable[[int], None]  #: called with the epoll events


class Poller:
    """Level-triggered, unless registered with ``EPOLLET``: a handler that leaves input behind is called again.

    All but :meth:`call_soon` is for one thread. ``failed``: functions given to :meth:`call_soon` that raised.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self.failed = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.register(self._wake, self._drain_wake)

    def register(self, fd: int, handler: Handler, events: int = select.EPOLLIN) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Forget ``fd`` (idempotent); call it before closing the descriptor."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> int:
        """Wait for events and handle them; returns how many there were."""
        events = self._epoll.poll(timeout_s)
        for fd, mask in events:
            handler = self._handlers.get(fd)  # an earlier handler of this round may have unregistered it
            if handler is not None:
                handler(mask)
        return len(events)

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
