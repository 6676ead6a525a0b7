"""HTTP beside the RPC socket, served by the same thread: nothing blocks, so a slow peer costs a connection and no time.

A peer has ``REQUEST_S`` seconds to send its request, however it spends them, and as many to read the answer. At most
``MAX_PEERS`` are connected; a newcomer that finds no place takes that of the peer that has been waited for longest. One request
per connection, GET and HEAD only: nothing can be changed over HTTP.

Off loopback every page but the two probes wants ``Authorization: Bearer`` with a token of its own: it crosses the wire in
clear, so it must not be the cluster's.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

import zmq

from maru_server.lease import boottime_ns
from maru_shm.errors import ConfigError
from maru_shm.http import names_loopback

log = logging.getLogger(__name__)

MAX_PEERS = 32
MAX_HEAD = 8 << 10  #: bytes of a request line and its headers
REQUEST_S = 5.0
PROBES = ("/healthz", "/readyz")
_ACCEPTS = 8  #: per turn of the loop
_READ = 4096
_TEXT = "text/plain; charset=utf-8"


class Page(NamedTuple):
    status: HTTPStatus
    content_type: str
    body: bytes


def text_page(status: HTTPStatus, text: str) -> Page:
    return Page(status, _TEXT, text.encode() + b"\n")


@dataclass(eq=False, slots=True)
class _Peer:
    sock: socket.socket
    due_ns: int
    head: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None  #: what is left to send


class HttpFront:
    """Listens at construction (raises :class:`ConfigError`). ``pages``: path → page; None for a path that there is not.

    The owner of ``poller`` calls :meth:`ready` with what it reports for :attr:`descriptors`, and :meth:`tick` now and then.
    """

    def __init__(
        self,
        address: tuple[str, int],
        pages: Callable[[str], Page | None],
        *,
        token: str | None = None,
        request_s: float = REQUEST_S,
    ) -> None:
        host, port = address
        self._loopback = ipaddress.ip_address(host).is_loopback
        if not self._loopback and token is None:
            raise ConfigError(
                f"HTTP address {host} is not on loopback and no token is set", "give --http-token-file, or listen on 127.0.0.1"
            )
        self._pages = pages
        self._token = token
        self._request_ns = int(request_s * 1e9)
        self._peers: dict[int, _Peer] = {}  #: by descriptor, longest waited for first
        self._poller: zmq.Poller | None = None
        self._accepting = False
        self.requests = 0
        self.turned_out = 0  #: peers that lost their place to a newcomer
        self.too_slow = 0
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(128)
            self._listener.setblocking(False)
        except OSError as e:
            self._listener.close()
            raise ConfigError(f"HTTP address {host}:{port}: {e.strerror}", "choose a free port of this host") from e

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens; the port is the real one if 0 was asked."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def join(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._accept_from_now_on()

    def _accept_from_now_on(self) -> None:
        if not self._accepting and self._poller is not None:
            self._poller.register(self._listener.fileno(), zmq.POLLIN)
            self._accepting = True

    def ready(self, descriptor: int) -> None:
        """Something can be done with a descriptor; others than ours are ignored."""
        if descriptor == self._listener.fileno():
            self._accept()
        elif (peer := self._peers.get(descriptor)) is not None:
            try:
                self._read(peer) if peer.answer is None else self._write(peer)
            except BlockingIOError:
                return
            except OSError:  # hung up
                self._end(peer)

    def tick(self) -> None:
        """End whoever has used up its time."""
        now = boottime_ns()
        for peer in [p for p in self._peers.values() if p.due_ns <= now]:
            self.too_slow += 1
            self._end(peer)
        self._accept_from_now_on()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._end(peer)
        self._listener.close()

    # --- connections ------------------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        assert self._poller is not None
        for _ in range(_ACCEPTS):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._poller.unregister(self._listener.fileno())  # it would stay readable; the next tick tries again
                    self._accepting = False
                    return
                continue  # that peer has gone already
            if len(self._peers) >= MAX_PEERS:
                self.turned_out += 1
                self._end(next(iter(self._peers.values())))
            sock.setblocking(False)
            peer = self._peers[sock.fileno()] = _Peer(sock, boottime_ns() + self._request_ns)
            self._poller.register(sock.fileno(), zmq.POLLIN)
            self.ready(peer.sock.fileno())

    def _end(self, peer: _Peer) -> None:
        assert self._poller is not None
        descriptor = peer.sock.fileno()
        self._poller.unregister(descriptor)
        del self._peers[descriptor]
        with contextlib.suppress(OSError):
            peer.sock.shutdown(socket.SHUT_WR)  # the answer first, then the end, whatever of the request was not read
        peer.sock.close()

    def _read(self, peer: _Peer) -> None:
        assert self._poller is not None
        data = peer.sock.recv(_READ)
        peer.head += data
        if b"\r\n\r\n" not in peer.head and b"\n\n" not in peer.head:
            if not data:
                self._end(peer)
                return
            if len(peer.head) <= MAX_HEAD:
                return
            page, method = text_page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {MAX_HEAD} bytes"), "GET"
        else:
            page, method = self._page(bytes(peer.head))
        self.requests += 1
        peer.answer = memoryview(_rendered(page, method))
        # It has its time for reading anew, behind all that are waited for longer.
        descriptor = peer.sock.fileno()
        self._peers[descriptor] = self._peers.pop(descriptor)
        peer.due_ns = boottime_ns() + self._request_ns
        self._poller.modify(descriptor, zmq.POLLOUT)
        self._write(peer)

    def _write(self, peer: _Peer) -> None:
        assert peer.answer is not None
        peer.answer = peer.answer[peer.sock.send(peer.answer) :]
        if not peer.answer:
            self._end(peer)

    # --- requests ---------------------------------------------------------------------------------------------------------
    def _page(self, head: bytes) -> tuple[Page, str]:
        """The page for a request's head, and its method."""
        first, *rest = head.decode("latin-1").splitlines()
        words = first.split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return text_page(HTTPStatus.BAD_REQUEST, "an HTTP/1 request is wanted"), "GET"
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return text_page(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD"), "GET"
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
        path = target.partition("?")[0]
        if self._loopback and not names_loopback(headers.get("host", "")):
            return text_page(HTTPStatus.FORBIDDEN, "this host name is not served here"), method
        if self._token is not None and path not in PROBES:
            given = headers.get("authorization", "").encode("latin-1")
            if not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
                return text_page(HTTPStatus.UNAUTHORIZED, "Authorization: Bearer TOKEN is wanted"), method
        try:
            page = self._pages(path)
        except Exception as e:  # a source failed: the scraper sees it, the directory does not
            log.warning("HTTP %s failed", path, exc_info=True)
            page = text_page(HTTPStatus.INTERNAL_SERVER_ERROR, type(e).__name__)
        return page or text_page(HTTPStatus.NOT_FOUND, "see /healthz /readyz /metrics /status /version"), method


def _rendered(page: Page, method: str) -> bytes:
    head = [
        f"HTTP/1.0 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if page.status == HTTPStatus.METHOD_NOT_ALLOWED:
        head.append("Allow: GET, HEAD")
    if page.status == HTTPStatus.UNAUTHORIZED:
        head.append("WWW-Authenticate: Bearer")
    return ("\r\n".join(head) + "\r\n\r\n").encode() + (b"" if method == "HEAD" else page.body)
