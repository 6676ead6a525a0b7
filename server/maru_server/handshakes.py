"""What libzmq does not tell those who use a socket: whether anybody listens, and who was refused for the token.

CURVE gives the refused side no reason: its connection is closed and tried again for ever, which looks like a server that is
down. The sockets' own events tell the two apart. Monitors are read without waiting, by the thread that uses the socket; what
they have not read yet is kept without a limit, because libzmq's I/O thread would wait at a limit.
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from maru_server.lease import boottime_ns

log = logging.getLogger(__name__)

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_PER_LOOK = 256  #: events taken at a time, so that a flood of strangers does not keep the thread from its own work
_LOG_EVERY_NS = 10_000_000_000
_ADDRESSES_MAX = 1024
_serial = itertools.count()


class _Monitor:
    """The events of ``events`` of one socket, from now on."""

    def __init__(self, of: zmq.Socket[bytes], events: int) -> None:
        self._of = of
        name = f"inproc://maru-monitor-{next(_serial)}"
        of.monitor(name, events)
        self.socket: zmq.Socket[bytes] = of.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(name)

    def events(self) -> Iterator[tuple[int, int]]:
        """(event, value) of what happened since the last look."""
        for _ in range(_PER_LOOK):
            try:
                message = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            yield int(message["event"]), int(message["value"])

    def close(self) -> None:
        """Before the monitored socket is closed."""
        self._of.disable_monitor()
        self.socket.close(0)


class Reach(enum.Enum):
    """How far a client's connection got, by its latest attempt."""

    NOTHING = enum.auto()  #: no answer from the network
    NOBODY = enum.auto()  #: nothing listens at the address
    SILENT = enum.auto()  #: connected, and no handshake
    REFUSED = enum.auto()  #: the server ended the handshake
    OTHER_MECHANISM = enum.auto()  #: one side has a token, the other has none
    UP = enum.auto()
    LOST = enum.auto()  #: was up, the server has hung up


class ServerReach:
    """Watches a client's socket. Made before it connects, asked by the thread that uses it."""

    def __init__(self, of: zmq.Socket[bytes]) -> None:
        events = zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED
        self._monitor = _Monitor(of, events)
        self._reach = Reach.NOTHING

    def look(self) -> Reach:
        for event, value in self._monitor.events():
            self._reach = self._after(event, value)
        return self._reach

    def _after(self, event: int, value: int) -> Reach:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return Reach.UP
        if event & _FAILED:
            mismatch = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            return Reach.OTHER_MECHANISM if mismatch else Reach.REFUSED
        if event == zmq.EVENT_CLOSED:  # of an attempt to connect
            return Reach.NOBODY
        if event == zmq.EVENT_DISCONNECTED and self._reach is Reach.UP:
            return Reach.LOST
        if event == zmq.EVENT_CONNECTED and self._reach in (Reach.NOTHING, Reach.NOBODY, Reach.LOST):
            return Reach.SILENT  # a refusal stands until an attempt gets further
        return self._reach

    def close(self) -> None:
        """Before the socket is closed."""
        self._monitor.close()


def explain(reach: Reach, endpoint: str, timeout_ms: int, *, token: bool) -> tuple[str, str]:
    """What and remedy of an answer that did not come. ``token``: whether this side has one."""
    server = f"metadata server {endpoint}"
    give = "the server's: server.token_file of a sidecar, --token-file of a command, or $MARU_SERVER_TOKEN_FILE"
    match reach:
        case Reach.NOBODY:
            return f"no metadata server at {endpoint}: nobody listens there", "start it, or correct the address"
        case Reach.REFUSED | Reach.OTHER_MECHANISM if not token:
            return f"{server} refused the handshake: it wants a token and none is set here", f"give {give}"
        case Reach.OTHER_MECHANISM:
            return (
                f"{server} has no token, and one is set here: whoever answers there is not trusted",
                "start the server with --token-file, or take the token away here",
            )
        case Reach.REFUSED:
            return f"{server} refused the handshake: the token set here is not the server's", f"give {give}"
        case Reach.SILENT:
            return (
                f"{endpoint} takes connections and says nothing within {timeout_ms} ms",
                "see whether the metadata server hangs, or something else listens there",
            )
        case Reach.UP:
            return f"{server} did not answer within {timeout_ms} ms", "it hangs or has too much to do: see its log"
        case Reach.LOST:
            return f"{server} hung up", "check that it runs"
    return (
        f"no metadata server at {endpoint}: no connection within {timeout_ms} ms",
        "check the address, the network and any firewall between",
    )


class Refusal(enum.StrEnum):
    """Why a peer got no further than the handshake."""

    NO_TOKEN = "no_token"  #: it offered none where one is wanted
    WRONG_TOKEN = "wrong_token"
    INCOMPLETE = "incomplete"  #: it hung up: which side notices first that one has a token and the other none is chance
    OTHER = "other"  #: it does not speak the protocol


_SAYS = {
    Refusal.NO_TOKEN: "without a token",
    Refusal.WRONG_TOKEN: "with a wrong token",
    Refusal.INCOMPLETE: "given up by the peer (one side has no token, or it only probed the port)",
    Refusal.OTHER: "not understood",
}


class RefusedPeers:
    """Watches the server's socket. Made before it binds, used by the loop's thread."""

    def __init__(self, of: zmq.Socket[bytes]) -> None:
        self._monitor = _Monitor(of, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED)
        self._from: dict[int, str] = {}  #: by descriptor; one that is reused is overwritten
        self._failed: Refusal | None = None  #: of the connection whose end comes next: one I/O thread makes the events
        self.counts: Counter[Refusal] = Counter()
        self._unsaid: Counter[Refusal] = Counter()
        self._last_from = ""
        self._hung_up: set[str] = set()  #: addresses whose giving up was said; a port's probe comes again and again
        self._say_next_ns = 0

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Readable when :meth:`look` has something to do."""
        return self._monitor.socket

    def look(self) -> None:
        for event, value in self._monitor.events():
            if event == zmq.EVENT_ACCEPTED:
                self._from[value] = _peer(value)
            elif event == zmq.EVENT_DISCONNECTED:
                address = self._from.pop(value, "")
                if self._failed is not None:
                    self._count(self._failed, address)
                    self._failed = None
            else:
                self._failed = _refusal(event, value)
        self.say()

    def _count(self, why: Refusal, address: str) -> None:
        self.counts[why] += 1
        if why is Refusal.INCOMPLETE:
            if address in self._hung_up or len(self._hung_up) >= _ADDRESSES_MAX:
                return
            self._hung_up.add(address)
        self._unsaid[why] += 1
        self._last_from = address or self._last_from

    def say(self) -> None:
        """Log what was refused since the last line, at most every 10 s."""
        now = boottime_ns()
        if not self._unsaid or now < self._say_next_ns:
            return
        self._say_next_ns = now + _LOG_EVERY_NS
        parts = ", ".join(f"{n} {_SAYS[why]}" for why, n in self._unsaid.items())
        log.warning("connections refused: %s; the last from %s", parts, self._last_from or "an unknown address")
        self._unsaid.clear()

    def close(self) -> None:
        """Before the socket is closed."""
        self._monitor.close()


def _refusal(event: int, value: int) -> Refusal:
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return Refusal.INCOMPLETE
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return Refusal.WRONG_TOKEN
    return Refusal.NO_TOKEN if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else Refusal.OTHER


def _peer(descriptor: int) -> str:
    """Address of a connection's other end; empty if it has closed meanwhile: from this machine that is a matter of luck."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as s:
            name = s.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else "this machine"
