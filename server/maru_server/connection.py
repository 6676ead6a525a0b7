"""A client's connection: one DEALER socket, requests pipelined by id, every wait bounded.

libzmq would queue messages for an absent server and deliver them minutes later; here a request that got no answer in time
makes the socket be thrown away with everything in it, so what a server receives was meant for now.
"""

from __future__ import annotations

import os
import time

import msgspec
import zmq

from maru_server import __version__
from maru_server import protocol as P
from maru_server.answers import check_answer, expect
from maru_server.auth import guard_client, require_token
from maru_server.errors import ServerRefused, ServerUnavailable
from maru_server.handshakes import Reach, ServerReach, explain
from maru_shm.endpoint import normal_endpoint
from maru_shm.errors import ProtocolViolation

DEFAULT_ENDPOINT = "tcp://127.0.0.1:7420"


def default_endpoint() -> str:
    """``$MARU_SERVER``, else the sidecar's ``$MARU_SERVER_ENDPOINT``, else the default."""
    return os.environ.get("MARU_SERVER") or os.environ.get("MARU_SERVER_ENDPOINT") or DEFAULT_ENDPOINT


class Connection:
    """One thread uses it. ``epoch`` is the directory epoch that :meth:`hello` found."""

    def __init__(
        self, endpoint: str, token: str | None = None, *, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        self.endpoint = normal_endpoint(endpoint)
        require_token(self.endpoint, token)
        self._token = token
        self._context = context or zmq.Context.instance()
        self._socket: zmq.Socket[bytes] | None = None
        self._reach: ServerReach | None = None  # of the socket
        self._next_id = int.from_bytes(
            os.urandom(6), "little"
        )  # so that a late reply to an earlier socket's request never fits
        self.epoch = 0
        self.welcome: P.Welcome | None = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket, made when first needed."""
        if self._socket is None:
            s = self._context.socket(zmq.DEALER)
            s.setsockopt(zmq.LINGER, 0)
            s.setsockopt(zmq.MAXMSGSIZE, P.MAX_FRAME)
            s.setsockopt(zmq.IPV6, "[" in self.endpoint)
            s.setsockopt(zmq.RECONNECT_IVL, 50)
            s.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            s.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
            if self._token is not None:
                guard_client(s, self._token)
            self._reach = ServerReach(s)
            s.connect(self.endpoint)
            self._socket = s
        return self._socket

    def close(self) -> None:
        """Drop the socket and what is queued in it. The next use opens a new one (and needs a new :meth:`hello`)."""
        if self._reach is not None:
            self._reach.close()
            self._reach = None
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
        self.welcome = None

    def send(self, message: P.Request, *, epoch: int | None = None) -> int:
        """Queue a request; returns its id. Raises :class:`ServerUnavailable` if libzmq takes no more, or gave up."""
        self._next_id += 1
        header = P.HEADER.pack(P.MAGIC, P.PROTOCOL, 0, self._next_id, self.epoch if epoch is None else epoch)
        try:
            self.socket.send_multipart([header, P.encoder.encode(message)], zmq.NOBLOCK)
        except zmq.Again as e:
            raise self.unavailable(0) from e
        return self._next_id

    def unavailable(self, timeout_ms: int) -> ServerUnavailable:
        """Why no answer came within ``timeout_ms``, as far as the socket knows: nobody there, the token, or the server."""
        reach = self._reach.look() if self._reach is not None else Reach.NOTHING
        return ServerUnavailable(*explain(reach, self.endpoint, timeout_ms, token=self._token is not None))

    def receive(self, timeout_ms: int) -> tuple[int, int, P.Reply] | None:
        """``(request id, epoch, reply)``, or None if nothing came in time. Raises :class:`ProtocolViolation` for garbage."""
        if not self.socket.poll(timeout_ms, zmq.POLLIN):
            if self._reach is not None:
                self._reach.look()  # so that they do not pile up
            return None
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 2 or len(frames[0]) != P.HEADER.size or frames[0][:4] != P.MAGIC:
            raise ProtocolViolation(
                f"metadata server {self.endpoint} sent {len(frames)} frames that are no reply", "check the address"
            )
        _, _, _, request_id, epoch = P.HEADER.unpack(frames[0])
        try:
            return request_id, epoch, P.to_client.decode(frames[1])
        except msgspec.MsgspecError as e:
            raise ProtocolViolation(f"metadata server's reply not understood: {e}", "run the same release on both sides") from e

    def call(self, message: P.Request, timeout_ms: int, *, epoch: int | None = None) -> P.Reply:
        """Send and wait for this request's reply. Raises :class:`ServerUnavailable`, :class:`ServerRefused`, and
        :class:`ProtocolViolation` for a reply that is no answer to it.
        """
        reply = self.wait(self.send(message, epoch=epoch), timeout_ms)
        check_answer(message, reply)
        return reply

    def wait(self, request_id: int, timeout_ms: int) -> P.Reply:
        """The reply to a request of ours; replies to others are dropped."""
        return self._wait(request_id, timeout_ms)[1]

    def _wait(self, request_id: int, timeout_ms: int) -> tuple[int, P.Reply]:
        end = time.monotonic() + timeout_ms / 1000
        while (left := end - time.monotonic()) > 0:
            got = self.receive(max(1, int(left * 1000)))
            if got is not None and got[0] == request_id:
                return got[1], checked(got[2])
        why = self.unavailable(timeout_ms)
        self.close()
        raise why

    def hello(
        self,
        timeout_ms: int,
        *,
        client: str = f"maru/{__version__}",
        node: str = "",
        incarnation: int = 0,
        predecessor: P.Predecessor = P.Predecessor.UNKNOWN,
        label: str = "",
    ) -> P.Welcome:
        """Open the session (again). Raises as :meth:`call`."""
        message = P.Hello(P.PROTOCOL_MIN, P.PROTOCOL, client, node, incarnation, predecessor, label)
        epoch, reply = self._wait(self.send(message, epoch=0), timeout_ms)
        check_answer(message, reply)
        self.welcome = expect(reply, P.Welcome)
        self.epoch = epoch
        return self.welcome


def checked(reply: P.Reply) -> P.Reply:
    """The reply, unless it is an Error: that is raised as :class:`ServerRefused`."""
    if isinstance(reply, P.Error):
        raise ServerRefused(reply.code, reply.what, reply.remedy, max(0, reply.retry_ms))
    return reply
