"""Health, metrics and status over HTTP, for probes and scrapers: read-only, off unless configured, on loopback by default.

| path       | answer                                                                                |
|------------|---------------------------------------------------------------------------------------|
| `/healthz` | 200 while every thread of the daemon lives, else 503 and the reason                   |
| `/readyz`  | 200 while lookups are answered from the pool, else 503 and the reason (starting, draining) |
| `/metrics` | Prometheus text format 0.0.4, every metric present from the first scrape              |
| `/status`  | the sections of `maru-sidecar status`, JSON                                           |
| `/version` | JSON                                                                                  |

The answers come from callables that must be cheap and thread-safe. Nothing can be changed over HTTP: administration is the
control socket's, where the kernel says who asks.

Work is bounded: at most ``MAX_REQUESTS`` connections are open at once, one request each. A peer has ``REQUEST_S`` seconds to
send its request, however it spends them, and as many to read the answer. A newcomer that finds no place takes that of the
oldest peer that is being waited for, so peers that trickle bytes keep nobody out. Answers that are being computed are not
interrupted, but ``/healthz`` keeps ``HEALTH_PLACES`` of the places to itself: it is answered though every other answer hangs.
On loopback a request whose ``Host`` names anything else is refused, so that a web page cannot read the status through DNS
rebinding.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, ClassVar, cast

from maru_shm.errors import ConfigError
from maru_shm.http import METRICS_TYPE, Sample, names_loopback, render_metrics

MAX_REQUESTS = 32
HEALTH_PLACES = 4
REQUEST_S = 5.0
_ACCEPT_PAUSE_S = 0.02
MAX_HEAD = 16 << 10  #: bytes of a request line and its headers
_PATHS = ("/healthz", "/readyz", "/metrics", "/status", "/version")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the answers come from; every callable is called from the server's threads."""

    metrics: Callable[[], Iterable[tuple[str, str, str, Mapping[str, str], float]]]
    status: Callable[[], Mapping[str, object]]
    healthy: Callable[[], tuple[bool, str]]  #: (yes or no, reason)
    ready: Callable[[], tuple[bool, str]]
    version: Callable[[], Mapping[str, object]]


class HttpServer:
    """The server and its threads. Bound (and its port known) after construction, answering after :meth:`start`."""

    def __init__(self, address: tuple[str, int], sources: Sources, request_s: float = REQUEST_S) -> None:
        """``request_s``: what a peer has to send its request, and again to read the answer. Raises ``ConfigError``."""
        host, port = address
        try:
            self._server = _Server((host, port), sources, request_s)
        except OSError as e:
            raise ConfigError(
                f"HTTP address {host}:{port}: {e.strerror}", "choose a free port and an address of this host"
            ) from e
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="maru-http", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens; the port is the real one if 0 was asked."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Requests in progress end by themselves within their timeout; they hold nothing of the daemon's."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


@dataclass(eq=False, slots=True)
class _Peer:
    """An open connection. ``computing``: its answer is being made, nothing is waited for."""

    sock: socket.socket
    since: float = field(default_factory=time.monotonic)
    computing: bool = False

    def cut(self) -> None:
        """Wake whoever waits for this peer; its thread then ends."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], sources: Sources, request_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.sources = sources
        self.loopback = ipaddress.ip_address(address[0]).is_loopback
        self.request_s = request_s
        self.lock = threading.Lock()
        self.peers: dict[Any, _Peer] = {}  #: by socket, in order of arrival
        self.requests = dict.fromkeys((*_PATHS, "other"), 0)
        self.turned_away = 0
        self.cut_off = 0
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's getfqdn, which asks a resolver."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    # --- places -----------------------------------------------------------------------------------------------------------
    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            if admitted := self._make_room():
                self.peers[request] = _Peer(request)
            else:
                self.turned_away += 1
        if not admitted:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self.shutdown_request(request)
            raise

    def _make_room(self) -> bool:
        """Whether there is a place; the oldest peer that is waited for gives its own."""
        if len(self.peers) < MAX_REQUESTS:
            return True
        oldest = next((key for key, peer in self.peers.items() if not peer.computing), None)
        if oldest is None:
            return False
        self.peers.pop(oldest).cut()
        self.cut_off += 1
        return True

    def service_actions(self) -> None:
        """Between two polls of the listener: cut off whoever has used up its time."""
        limit = time.monotonic() - self.request_s
        with self.lock:
            overdue = [key for key, peer in self.peers.items() if peer.since < limit and not peer.computing]
            for key in overdue:
                self.peers.pop(key).cut()
            self.cut_off += len(overdue)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # out of descriptors, or the peer is gone: the listener stays readable in the first case
            time.sleep(_ACCEPT_PAUSE_S)
            raise

    def shutdown_request(self, request: Any) -> None:
        with self.lock:  # nobody cuts a socket that is closed, whose number may be somebody else's by then
            self.peers.pop(request, None)
            super().shutdown_request(request)

    def begin_answer(self, request: Any, path: str) -> bool:
        """The request is complete; False if the places for answers of this kind are taken."""
        with self.lock:
            self.requests[path if path in _PATHS else "other"] += 1
            peer = self.peers.get(request)
            if peer is None:
                raise ConnectionAbortedError("cut off")
            computing = sum(other.computing for other in self.peers.values())
            peer.computing = path == "/healthz" or computing < MAX_REQUESTS - HEALTH_PLACES
            return peer.computing

    def end_answer(self, request: Any) -> None:
        """The answer is there; from here on it is the peer that is waited for."""
        with self.lock:
            if (peer := self.peers.get(request)) is not None:
                peer.computing = False
                peer.since = time.monotonic()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that hung up is not worth a traceback on stderr."""
        log.debug("HTTP request from %s ended early", client_address, exc_info=True)

    def own_samples(self) -> list[Sample]:
        with self.lock:
            counts, turned_away, cut_off = dict(self.requests), self.turned_away, self.cut_off
        text = "HTTP requests by path"
        samples = [Sample("maru_http_requests_total", "counter", text, {"path": p}, n) for p, n in counts.items()]
        text = "HTTP connections closed because too many were open"
        samples.append(Sample("maru_http_turned_away_total", "counter", text, {}, turned_away))
        text = "HTTP connections cut off because they were too slow"
        return [*samples, Sample("maru_http_cut_off_total", "counter", text, {}, cut_off)]


class _Head:
    """The reading side of a connection, up to ``MAX_HEAD`` bytes."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = MAX_HEAD

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(min(limit, self._left))
        self._left -= len(line)
        if not self._left:
            raise ConnectionAbortedError(f"a request head of more than {MAX_HEAD} bytes")
        return line

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"  # one request per connection: no idle keep-alive holds a slot
    server_version = "maru-sidecar"
    sys_version = ""
    _answers: ClassVar[dict[str, str]] = {p: p.strip("/") for p in _PATHS}

    def setup(self) -> None:
        self.request.settimeout(self.server.request_s)
        super().setup()
        self.rfile = cast(Any, _Head(self.rfile))  # all that is used of it

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self.server.begin_answer(self.request, path):
            self._text(HTTPStatus.SERVICE_UNAVAILABLE, "too many answers are being computed\n")
            return
        if self.server.loopback and not names_loopback(self.headers.get("Host", "")):
            self._text(HTTPStatus.FORBIDDEN, "this host name is not served here\n")
            return
        answer = self._answers.get(path)
        if answer is None:
            self._text(HTTPStatus.NOT_FOUND, "see " + " ".join(_PATHS) + "\n")
            return
        try:
            getattr(self, "_" + answer)()
        except OSError:
            raise  # the peer's side
        except Exception as e:  # a source failed: the scraper sees it, the daemon does not
            log.warning("HTTP %s failed: %s", path, e, exc_info=True)
            self._text(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(e).__name__}: {e}\n")

    do_HEAD = do_GET

    def _healthz(self) -> None:
        self._verdict(*self.server.sources.healthy())

    def _readyz(self) -> None:
        self._verdict(*self.server.sources.ready())

    def _metrics(self) -> None:
        text = render_metrics([*self.server.sources.metrics(), *self.server.own_samples()])
        self._send(HTTPStatus.OK, METRICS_TYPE, text.encode())

    def _status(self) -> None:
        self._json(self.server.sources.status())

    def _version(self) -> None:
        self._json(self.server.sources.version())

    def _verdict(self, good: bool, reason: str) -> None:  # noqa: FBT001 - unpacked from the source's pair
        self._text(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, (reason or "ok") + "\n")

    def _json(self, value: object) -> None:
        self._send(HTTPStatus.OK, "application/json", json.dumps(value, default=str).encode() + b"\n")

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.server.end_answer(self.request)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("HTTP %s " + format, self.client_address[0], *args)
