"""What a :class:`~maru_server.node.NodeLink` is configured with, says of itself, and keeps of each request."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from maru_server import protocol as P
from maru_server.announce import Slabs, places
from maru_server.lease import RegionLease
from maru_shm.errors import MaruError

Callback = Callable[[P.Reply | MaruError], None]  #: the reply (never an Error) or what went wrong; on the link's thread


class LinkState(enum.StrEnum):
    CONNECTING = "connecting"  #: no session; every question is refused at once
    CLAIMING = "claiming"
    ANNOUNCING = "announcing"
    READY = "ready"
    SUPERSEDED = "superseded"  #: final
    STOPPED = "stopped"  #: final


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """``incarnation`` must be larger than that of any earlier process of this node; the default is the wall clock in ns."""

    endpoint: str
    node: str
    token: str | None = None
    incarnation: int = field(default_factory=time.time_ns)
    predecessor: P.Predecessor = P.Predecessor.UNKNOWN
    label: str = ""
    timeout_ms: int = 2000  #: for an answer; after that the connection is made anew
    queue_max: int = 65_536  #: publications and questions waiting


@dataclass(frozen=True, slots=True)
class LinkStats:
    """A snapshot for status pages."""

    state: LinkState
    epoch: int
    lease_ms_left: int
    regions: int
    queued: int
    in_flight: int
    keys_announced: int  #: accepted by the server, re-announcements included
    keys_existing: int  #: another node had them first
    dropped: int  #: publications that found the queue full
    reconnects: int
    refused: int  #: requests answered with an error
    last_error: str
    last_error_ms_ago: int
    error_stands: bool  #: whether ``last_error`` is still so
    regions_refused: str  #: why regions were not granted when last asked for; empty once some were


class Want:
    """A region allocation until it is answered for good."""

    def __init__(self, message: P.AllocRegions, end_ns: int, done: Callable[[list[RegionLease] | MaruError], None]) -> None:
        self.message, self.end_ns, self.done = message, end_ns, done
        self.next_ns = 0
        self.asked = False


class Publication:
    def __init__(self, region: RegionLease, slabs: Slabs, done: Callback | None) -> None:
        self.region, self.slabs, self.done = region, slabs, done

    def message(self) -> P.Request:
        s = self.slabs
        return P.Register(s.namespace, s.rank, s.keys, places(self.region, s), s.slab_bytes)


class Question:
    """Any other request. ``repeat``: send it again after a reconnection (it is idempotent and changes something)."""

    def __init__(self, request: P.Request, done: Callback | None, *, repeat: bool) -> None:
        self.request, self.done, self.repeat = request, done, repeat

    def message(self) -> P.Request:
        return self.request


Item = Publication | Question


@dataclass(slots=True)
class Pending:
    request: P.Request
    sent_ns: int
    answer: Callback
    item: Item | None = None
