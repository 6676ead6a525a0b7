"""The blocking client of the control socket that the commands use: hello, one request, one answer, in order.

It never attaches: no segment is made and no engine is disturbed. Every call is bounded by the timeout given at
:meth:`AdminClient.connect`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from maru_shm import control, errors
from maru_shm import messages as M

DEFAULT_TIMEOUT_S = 5.0
PAGE = 500  #: chunks per page; 200 B each, so that a page stays far below messages.MAX_MESSAGE
PIN_BATCH = 1000  #: keys per Pin message, 35 B each

A = TypeVar("A")


class AdminRefused(errors.AttachRefused):
    """The sidecar understood a request and refused it; ``code`` says why. Raised by every method of :class:`AdminClient`."""

    def __init__(self, refusal: M.Refused) -> None:
        super().__init__(f"refused ({refusal.code.value}): {refusal.what}", refusal.remedy)
        self.code = refusal.code


class AdminClient:
    """A connection that has been welcomed. ``welcome`` says who answers.

    Raised by every method: :class:`~maru_shm.errors.SidecarUnavailable` (no answer in time, or it went away),
    :class:`AdminRefused`, :class:`~maru_shm.errors.ProtocolViolation` (an answer no correct sidecar gives).
    """

    def __init__(self, sock: socket.socket, path: str, client: str) -> None:
        self._sock = sock
        self._path = path
        self.welcome = self._ask(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, client), M.Welcome)

    @classmethod
    def connect(cls, path: str, timeout_s: float = DEFAULT_TIMEOUT_S, client: str = "maru-sidecar-cli") -> AdminClient:
        """Connect and say hello. Also raises :class:`~maru_shm.errors.ProtocolVersionMismatch`."""
        sock = control.connect(path, timeout_s)
        try:
            return cls(sock, path, client)
        except errors.MaruError as e:
            sock.close()
            if isinstance(e, AdminRefused) and e.code is M.RefusalCode.VERSION:
                raise errors.ProtocolVersionMismatch(e.what, e.remedy or "run the same release on both sides") from e
            raise

    def ping(self) -> str:
        """The sidecar's state, by name."""
        return self._ask(M.Ping(), M.Pong).state

    def status(self) -> dict[str, object]:
        """Sections of plain values."""
        return self._ask(M.GetStatus(), M.Status).sections

    def drain(self) -> int:
        """Refuse new work from now on; returns the number of tickets still in flight."""
        return self._ask(M.Drain(), M.Done).n

    def cache_clear(self, namespace: str = "", engine_id: str = "") -> M.Done:
        """Drop what may go; ``n``: chunks dropped, ``left``: chunks that stay (pinned, leased, or ahead of one that is)."""
        return self._ask(M.CacheClear(namespace, engine_id), M.Done)

    def cache_page(self, namespace: str = "", after: str = "", limit: int = PAGE) -> M.CachePage:
        """One page of the directory, ordered by key."""
        return self._ask(M.CacheList(namespace, after, limit), M.CachePage)

    def cache_list(self, namespace: str = "", after: str = "", limit: int | None = None) -> Iterator[M.ChunkInfo]:
        """Every chunk after ``after`` (key, or key and namespace), at most ``limit``, fetched page by page."""
        left = limit
        while left is None or left > 0:
            page = self.cache_page(namespace, after, PAGE if left is None else min(PAGE, left))
            yield from page.chunks
            if not page.more or not page.chunks:
                return
            after = page.chunks[-1].key + page.chunks[-1].namespace
            left = None if left is None else left - len(page.chunks)

    def pin(self, namespace: str, keys: Sequence[str]) -> int:
        """Exclude chunks from eviction, restarts included; stops at the first absent key. Returns chunks pinned."""
        return self._set_pinned(namespace, keys, pinned=True).n

    def unpin(self, namespace: str, keys: Sequence[str]) -> M.Done:
        """Undo one pin of each chunk; stops at the first absent key. ``n``: chunks found, ``left``: those that had no pin."""
        return self._set_pinned(namespace, keys, pinned=False)

    def _set_pinned(self, namespace: str, keys: Sequence[str], *, pinned: bool) -> M.Done:
        total = bare = 0
        for at in range(0, len(keys), PIN_BATCH):
            batch = list(keys[at : at + PIN_BATCH])
            done = self._ask(M.Pin(namespace, batch, pinned=pinned), M.Done)
            total, bare = total + done.n, bare + done.left
            if done.n < len(batch):
                break
        return M.Done(total, bare)

    def _ask(self, request: M.ClientMessage, answer: type[A]) -> A:
        name = type(request).__name__
        try:
            control.send(self._sock, request)
            received = control.receive(self._sock, control.to_client)
        except TimeoutError as e:
            raise errors.SidecarUnavailable(
                f"no answer to {name} from {self._path} in {self._sock.gettimeout()} s", "raise --timeout, or look at its log"
            ) from e
        except OSError as e:
            raise errors.SidecarUnavailable(f"sidecar at {self._path}: {e.strerror or e}", "look at its log") from e
        if received is None:
            raise errors.SidecarUnavailable(f"sidecar at {self._path} closed the connection", "look at its log")
        message, fds = received
        for fd in fds:
            socket.close(fd)
        if isinstance(message, M.Refused):
            raise AdminRefused(message)
        if not isinstance(message, answer):
            raise errors.ProtocolViolation(
                f"sidecar at {self._path} answered {name} with {type(message).__name__}", "run the same release on both sides"
            )
        return message

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
