"""What the control messages mean (transport and authorisation of peers: ``control_server.py``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.errors import MaruError
from maru_sidecar.connection import Connection
from maru_sidecar.control_server import ControlServer
from maru_sidecar.descriptors import close_later
from maru_sidecar.directory import Directory
from maru_sidecar.engines import Refusal
from maru_sidecar.poller import Poller
from maru_sidecar.sessions import Sessions

log = logging.getLogger(__name__)

PAGE_MAX = 800  #: chunks of a CachePage: 200 bytes each keep it below messages.MAX_MESSAGE
_ADMIN = (M.CacheClear, M.CacheList, M.Pin, M.Drain)


class Host(Protocol):
    """The daemon, as its control messages see it. ``sessions`` and ``directory`` are None until the pool is open."""

    state: L.SidecarState
    sessions: Sessions | None
    directory: Directory | None

    def welcome(self) -> M.Welcome: ...

    def status(self) -> dict[str, object]: ...

    def drain(self) -> None: ...


class ControlService:
    """Answers requests; the main thread uses it alone. Work that grows with the cache runs in a thread of its own."""

    def __init__(self, host: Host, poller: Poller) -> None:
        self._host = host
        self._poller = poller
        self._admin = ThreadPoolExecutor(max_workers=1, thread_name_prefix="maru-admin")
        self._early: list[tuple[Connection, M.Attach, list[int]]] = []  #: attaches that wait for the pool
        self.server: ControlServer  #: set by the daemon once it listens

    def welcome(self) -> M.Welcome:
        return self._host.welcome()

    def request(self, connection: Connection, message: M.ClientMessage, fds: list[int]) -> M.SidecarMessage | None:
        """See :class:`~maru_sidecar.control_server.Service`."""
        if isinstance(message, M.Attach):
            self._attach(connection, message, fds)
            return None
        close_later(fds)
        if isinstance(message, _ADMIN) and not connection.is_admin:
            raise Refusal(
                M.RefusalCode.NOT_AUTHORISED,
                f"uid {connection.uid} asks for {type(message).__name__}",
                "administration is for the sidecar's own user and root",
            )
        if isinstance(message, M.Ping):
            return M.Pong(self._host.state.name)
        if isinstance(message, M.GetStatus):
            return M.Status(self._host.status())
        if isinstance(message, M.Detach):
            return self._detach(connection)
        directory, sessions = self._host.directory, self._host.sessions
        if directory is None or sessions is None:
            raise Refusal(
                M.RefusalCode.FAILED, "the pool is still being opened", "ask again when `maru-sidecar ping` says READY"
            )
        if isinstance(message, M.Drain):
            self._host.drain()
            return M.Done(sessions.in_flight())
        if isinstance(message, M.Pin):
            namespace, keys = _hex(message.namespace, "namespace"), _keys(message.keys)
            return M.Done(*directory.admin.pin(namespace, keys, pinned=message.pinned))
        if isinstance(message, M.CacheList):
            self._page(connection, directory, message)
            return None
        if isinstance(message, M.CacheClear):
            self._clear(connection, directory, sessions, message)
            return None
        raise Refusal(M.RefusalCode.BAD_MESSAGE, f"a second {type(message).__name__}", "say Hello once")

    def disconnected(self, connection: Connection) -> None:
        sessions = self._host.sessions
        session = sessions.live.get(connection.session) if sessions is not None and connection.session is not None else None
        if session is not None and sessions is not None:
            sessions.end(session, "its connection closed")

    # --- attach and detach ------------------------------------------------------------------------------------------------
    def _attach(self, connection: Connection, message: M.Attach, fds: list[int]) -> None:
        if self._host.state in (L.SidecarState.DRAINING, L.SidecarState.STOPPED):
            close_later(fds)
            raise Refusal(M.RefusalCode.DRAINING, "the sidecar is draining", "attach again when it has been restarted")
        sessions = self._host.sessions
        if sessions is None:  # sizing a large pool takes seconds; the client waits rather than start without a cache
            self._early.append((connection, message, fds))
        else:
            sessions.attach(connection, message, fds)
        self.server.defer(connection)

    def pool_ready(self) -> None:
        """Serve the attaches that came before the pool was open."""
        early, self._early = self._early, []
        for connection, message, fds in early:
            self._poller.call_soon(partial(self._attach_early, connection, message, fds))

    def _attach_early(self, connection: Connection, message: M.Attach, fds: list[int]) -> None:
        sessions = self._host.sessions
        if sessions is None or connection.hung_up:
            close_later(fds)
            self.server.close_connection(connection)
            return
        try:
            sessions.attach(connection, message, fds)
        except Refusal as e:
            self.server.reply(connection, M.Refused(e.code, e.what, e.remedy))
        except BaseException:  # counted and logged by the poller: descriptors that ran out, say, are this peer's trouble
            self.server.close_connection(connection)
            raise

    def _detach(self, connection: Connection) -> M.Done | None:
        sessions = self._host.sessions
        if sessions is None or connection.session is None:
            return M.Done()
        session = sessions.live.get(connection.session) or sessions.ending.get(connection.session)
        if session is None:
            return M.Done()
        self.server.defer(connection)
        sessions.detach(session)
        return None

    # --- administration ---------------------------------------------------------------------------------------------------
    def _page(self, connection: Connection, directory: Directory, m: M.CacheList) -> None:
        namespace = _hex(m.namespace, "namespace") if m.namespace else None
        # The listing of all namespaces is ordered by key, then namespace: one key may stand in several.
        after = b"".join(_hex(m.after[i : i + _HEX_KEY], "after") for i in range(0, len(m.after), _HEX_KEY))
        if len(after) == L.KEY_BYTES and namespace is None:
            after += b"\xff" * L.KEY_BYTES  # a key alone: behind all its namespaces
        limit = min(max(1, m.limit), PAGE_MAX)
        self._later(connection, lambda: M.CachePage(*directory.admin.page(namespace, after, limit)))

    def _clear(self, connection: Connection, directory: Directory, sessions: Sessions, m: M.CacheClear) -> None:
        namespace = _hex(m.namespace, "namespace") if m.namespace else None
        if m.engine_id:
            engine = sessions.registry.engines.get(m.engine_id)
            if engine is None or not engine.namespace:
                raise Refusal(
                    M.RefusalCode.FAILED, f"no engine {m.engine_id!r} with a KV cache is attached", "see maru-sidecar status"
                )
            namespace = engine.namespace
        self._later(connection, lambda: M.Done(directory.admin.clear(namespace), directory.admin.count(namespace)))

    def _later(self, connection: Connection, work: Callable[[], M.SidecarMessage]) -> None:
        """Answer with what ``work`` returns, computed in the administration thread."""
        self.server.defer(connection)

        def ended(future: Future[M.SidecarMessage]) -> None:
            self._poller.call_soon(lambda: self._answer(connection, future))

        self._admin.submit(work).add_done_callback(ended)

    def _answer(self, connection: Connection, future: Future[M.SidecarMessage]) -> None:
        error = future.exception()
        if error is None:
            self.server.reply(connection, future.result())
            return
        if not isinstance(error, MaruError):
            log.error("a request of %s failed", connection, exc_info=error)
        what, remedy = (error.what, error.remedy) if isinstance(error, MaruError) else (str(error), "see the sidecar's log")
        self.server.reply(connection, M.Refused(M.RefusalCode.FAILED, what, remedy))

    def close(self) -> None:
        self._admin.shutdown(wait=False, cancel_futures=True)
        for _, _, fds in self._early:
            close_later(fds)
        self._early.clear()


_HEX_KEY = 2 * L.KEY_BYTES


def _hex(text: str, name: str) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != L.KEY_BYTES:
        raise Refusal(M.RefusalCode.FAILED, f"{name} {text[:80]!r}", f"expected {2 * L.KEY_BYTES} hex digits")
    return raw


def _keys(keys: list[str]) -> bytes:
    return b"".join(_hex(key, "key") for key in keys)
