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

Work is bounded: at most ``MAX_REQUESTS`` connections are served at once (more are closed at the door), one request each, and a
peer that sends or reads nothing for ``PEER_TIMEOUT_S`` is dropped. On loopback a request whose ``Host`` names anything else is
refused, so that a web page cannot read the status through DNS rebinding.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NamedTuple

from maru_shm.errors import ConfigError

MAX_REQUESTS = 16
PEER_TIMEOUT_S = 5.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATHS = ("/healthz", "/readyz", "/metrics", "/status", "/version")

log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One line of ``/metrics``. ``type``: counter, gauge, histogram or summary; a histogram's samples are named ``…_bucket``
    (label ``le``), ``…_sum`` and ``…_count``."""

    name: str
    type: str
    help: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the answers come from; every callable is called from the server's threads."""

    metrics: Callable[[], Iterable[tuple[str, str, str, Mapping[str, str], float]]]
    status: Callable[[], Mapping[str, object]]
    healthy: Callable[[], tuple[bool, str]]  #: (yes or no, reason)
    ready: Callable[[], tuple[bool, str]]
    version: Callable[[], Mapping[str, object]]


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, ``[v6]:port`` or ``:port`` (loopback). Raises :class:`~maru_shm.errors.ConfigError`.

    The host is an address or ``localhost``: a name would need a resolver at start-up.
    """
    host, colon, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    remedy = "write host:port, e.g. 127.0.0.1:9464 or [::1]:9464"
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"HTTP address {text!r}", remedy)
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError as e:
        raise ConfigError(f"HTTP address {text!r}", remedy) from e
    return host, int(port)


def render_metrics(samples: Iterable[tuple[str, str, str, Mapping[str, str], float]]) -> str:
    """Prometheus text format: samples grouped into families in order of first appearance, HELP and TYPE once each."""
    families: dict[str, list[str]] = {}
    for sample in samples:
        name, kind, text, labels, value = sample
        family = _family(name, kind)
        lines = families.get(family)
        if lines is None:
            escaped = text.replace("\\", r"\\").replace("\n", r"\n")
            lines = families[family] = [f"# HELP {family} {escaped}", f"# TYPE {family} {kind}"]
        pairs = ",".join(f'{k}="{_escape(v)}"' for k, v in labels.items())
        lines.append(f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}")
    return "".join(line + "\n" for lines in families.values() for line in lines)


def _family(name: str, kind: str) -> str:
    if kind in ("histogram", "summary"):
        for suffix in ("_bucket", "_sum", "_count"):
            if name.endswith(suffix):
                return name.removesuffix(suffix)
    return name


def _escape(value: object) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else repr(float(value))


class HttpServer:
    """The server and its threads. Bound (and its port known) after construction, answering after :meth:`start`."""

    def __init__(self, address: tuple[str, int], sources: Sources) -> None:
        host, port = address
        try:
            self._server = _Server((host, port), sources)
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], sources: Sources) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.sources = sources
        self.loopback = ipaddress.ip_address(address[0]).is_loopback
        self.slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self.count_lock = threading.Lock()
        self.requests = dict.fromkeys((*_PATHS, "other"), 0)
        self.turned_away = 0
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's getfqdn, which asks a resolver."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            with self.count_lock:
                self.turned_away += 1
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self.slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that hung up is not worth a traceback on stderr."""
        log.debug("HTTP request from %s ended early", client_address, exc_info=True)

    def own_samples(self) -> list[Sample]:
        with self.count_lock:
            counts, turned_away = dict(self.requests), self.turned_away
        text = "HTTP requests by path"
        samples = [Sample("maru_http_requests_total", "counter", text, {"path": p}, n) for p, n in counts.items()]
        text = "HTTP connections closed because too many were open"
        return [*samples, Sample("maru_http_turned_away_total", "counter", text, {}, turned_away)]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PEER_TIMEOUT_S
    protocol_version = "HTTP/1.0"  # one request per connection: no idle keep-alive holds a slot
    server_version = "maru-sidecar"
    sys_version = ""
    _answers: ClassVar[dict[str, str]] = {p: p.strip("/") for p in _PATHS}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        with self.server.count_lock:
            self.server.requests[path if path in _PATHS else "other"] += 1
        if self.server.loopback and not _is_local(self.headers.get("Host", "")):
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


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine's loopback; an HTTP/1.0 probe may send none."""
    name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
    name = name.strip("[]").lower()
    if name in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
