"""The server's sockets and loop: one thread, one ROUTER, HTTP if asked for, a tick every 100 ms."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Sequence
from types import FrameType

import zmq

from maru_server import protocol as P
from maru_server.auth import guard_server, require_token
from maru_server.backend import Backend
from maru_server.cluster_state import Settings
from maru_server.errors import BackendUnavailable
from maru_server.handshakes import RefusedPeers
from maru_server.http import HttpFront
from maru_server.lease import boottime_ns
from maru_server.notify import notify, watchdog_ms
from maru_server.pages import Pages
from maru_server.service import Service
from maru_shm.endpoint import normal_endpoint
from maru_shm.errors import ConfigError

log = logging.getLogger(__name__)

TICK_MS = 100
_BURST = 64  # messages between two looks at the clock
_PENDING = 4096  # messages per peer that libzmq queues
_UNREAD = 256  # replies for a peer that does not read them: up to 240 KB each, and no client has that many requests out


class Server:
    """Binds at construction (raises :class:`ConfigError` for an address that cannot be bound), serves in :meth:`run`."""

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        endpoints: Sequence[str],
        token: str | None = None,
        *,
        http: tuple[str, int] | None = None,
        http_token: str | None = None,
    ) -> None:
        """``http``: where to show pages (``pages.py``); off loopback only with ``http_token``, which must not be ``token``."""
        if token is not None and http_token == token:
            raise ConfigError("the HTTP token is the cluster's token", "use another: HTTP sends it in clear")
        endpoints = [normal_endpoint(endpoint, listens=True) for endpoint in endpoints]
        for endpoint in endpoints:
            require_token(endpoint, token)
        self._backend = backend
        self._service = Service(backend, settings)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, P.MAX_FRAME)
        self._socket.setsockopt(zmq.RCVHWM, _PENDING)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD)
        self._socket.setsockopt(zmq.IPV6, any("[" in e for e in endpoints))
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)  # finds connections that a cut link left half open
        self._authenticator = guard_server(self._context, self._socket, token) if token is not None else None
        self._refused = RefusedPeers(self._socket)
        self.endpoints: list[str] = []
        self._pages = Pages(self._service, backend, self.endpoints, self._refused.counts)
        self.http: HttpFront | None = None
        try:
            for endpoint in endpoints:
                self._socket.bind(endpoint)
                self.endpoints.append(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(
                f"cannot bind {endpoint}: {e.strerror}", "choose another address, or stop what listens there"
            ) from e
        if http is not None:
            try:
                self.http = self._pages.front = HttpFront(http, self._pages.page, token=http_token)
            except ConfigError:
                self.close()
                raise
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.setblocking(False)
        self._stop = False

    def stop(self) -> None:
        """Ask :meth:`run` to return. Safe from signal handlers and other threads."""
        self._stop = True
        try:
            self._wake_w.send(b"x")
        except OSError:
            return  # full or closed: it is awake or gone already

    def run(self) -> None:
        """Serve until :meth:`stop`; then close."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._refused.socket, zmq.POLLIN)
        poller.register(self._wake_r.fileno(), zmq.POLLIN)
        if self.http is not None:
            self.http.join(poller)
        notify("READY=1\nSTATUS=serving on " + " ".join(self.endpoints))
        watchdog = watchdog_ms()
        next_tick = next_idle = next_watchdog = boottime_ns()
        try:
            while not self._stop:
                now = boottime_ns()
                if now >= next_tick:
                    self._tick()
                    next_tick = boottime_ns() + TICK_MS * 1_000_000
                if now >= next_idle:
                    self._service.forget_idle()
                    next_idle = now + 10_000_000_000
                if watchdog and now >= next_watchdog:
                    notify("WATCHDOG=1")
                    next_watchdog = now + watchdog * 1_000_000
                ready = dict(poller.poll(max(0, (next_tick - boottime_ns()) // 1_000_000 + 1)))
                if ready.pop(self._socket, 0):
                    self._serve_burst()
                if ready.pop(self._refused.socket, 0):
                    self._refused.look()
                if self.http is not None:
                    for descriptor in ready:
                        self.http.ready(descriptor)
        finally:
            notify("STOPPING=1")
            self.close()

    def _tick(self) -> None:
        try:
            self._backend.tick()
            self._pages.tick_failed = ""
        except BackendUnavailable as e:  # /readyz says so; restarting this server would not help
            self._pages.tick_failed = ""
            log.warning("the backend does not answer: %s", e)
        except Exception as e:
            log.exception("tick failed; it is tried again")
            self._pages.tick_failed = f"the last tick failed: {type(e).__name__}"
        self._refused.say()
        if self.http is not None:
            self.http.tick()

    def _serve_burst(self) -> None:
        for _ in range(_BURST):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = self._service.answer(identity, frames)
            if reply is None:
                continue
            try:
                self._socket.send_multipart([identity, *reply], zmq.NOBLOCK)
            except zmq.ZMQError as e:
                log.debug("reply dropped: %s", e)  # the peer has gone, or does not read

    def close(self) -> None:
        self._refused.close()
        self._socket.close()
        if self.http is not None:
            self.http.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()
        self._backend.close()


def stop_on_signals(server: Server) -> None:
    """Make SIGTERM and SIGINT end :meth:`Server.run` in order."""

    def on_signal(_signum: int, _frame: FrameType | None) -> None:
        server.stop()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
