"""What the directory commits and removes, told to the server in order and in batches.

The directory notes an event under its lock (an append); the main thread turns what has gathered into messages. A withdrawal
is queued before its slab is written again and before whatever is stored in it is published; readers compare generations, so
the time between costs them a miss at most.

A key that another node published first is tried again every minute as long as we hold it: the other may have dropped it since.
So is one that the server refused to take, with an error or because it is full.

A key may be *stuck* at the server on an old place of ours: withdrawn while another node had it pinned. It is withdrawn again
until that is over, then published where it lies now, if it does.

Answers have one outcome per key, and places for all keys or none: the link has checked it (``maru_server.answers``). One that
does not ends its session, and what it answered is told again in the next.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maru_server import protocol as P
from maru_server.announce import BATCH, Slabs
from maru_server.errors import ServerRefused
from maru_server.lease import RegionLease
from maru_server.node import NodeLink
from maru_shm.errors import MaruError
from maru_shm.layout import KEY_BYTES
from maru_sidecar.directory import Directory

log = logging.getLogger(__name__)

_STUCK_RETRY_S = 1.0
_PUBLISH_RETRY_S = 60.0
_RETRIED_MAX = 65_536  #: keys remembered of either kind; one forgotten is a miss for others until the next full announcement


class _Committed(NamedTuple):
    namespace: bytes
    rank: int
    key: bytes
    region: int
    number: int
    generation: int


class _Removed(NamedTuple):
    namespace: bytes
    rank: int
    key: bytes


@dataclass(slots=True)
class AnnounceCounts:
    published: int = 0  #: slabs
    withdrawn: int = 0
    elsewhere: int = 0  #: slabs whose key another node had published first


class Announcer:
    """``slab_handles.PoolEvents`` but for ``low`` and ``growing``. ``wake``: have the main thread call :meth:`flush` soon."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._events: deque[_Committed | _Removed] = deque()
        self._stuck: dict[_Removed, float] = {}  #: due times; changed by the link's thread and the main thread, a key at a time
        self._untaken: dict[_Removed, float] = {}  #: due times of keys another node published first, or refused; as above
        self.counts = AnnounceCounts()

    # --- under the directory's lock ------------------------------------------------------------
    def committed(self, namespace: bytes, key: bytes, rank: int, *, region: int, number: int, generation: int) -> None:
        self._note(_Committed(namespace, rank, key, region, number, generation))

    def removed(self, namespace: bytes, key: bytes, ranks: list[int]) -> None:
        for rank in ranks:
            self._note(_Removed(namespace, rank, key))

    def _note(self, event: _Committed | _Removed) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            self._wake()

    @property
    def waiting(self) -> int:
        return len(self._events)

    # --- the main thread ------------------------------------------------------------
    def flush(self, link: NodeLink, lease_of: Callable[[int], RegionLease | None], stride_of: Callable[[int], int]) -> None:
        """Hand everything noted to the link; never waits. ``stride_of``: bytes from slab to slab in a region."""
        for group in _groups(self._events):
            first = group[0]
            keys = b"".join(event.key for event in group)
            if isinstance(first, _Removed):
                self.counts.withdrawn += len(group)
                if not link.withdraw(first.namespace, first.rank, keys, self._withdrawn(first.namespace, first.rank, keys)):
                    self._keep(first.namespace, first.rank, keys, [True] * len(group))
                continue
            lease = lease_of(first.region)
            if lease is None:  # lost meanwhile
                continue
            slabs = Slabs(
                first.namespace, first.rank, keys,
                np.array([e.number for e in group if isinstance(e, _Committed)], np.uint32),
                np.array([e.generation for e in group if isinstance(e, _Committed)], np.uint64), stride_of(first.region),
            )  # fmt: skip
            self.counts.published += len(group)
            link.publish(lease, slabs, self._published(link, slabs))

    def retry(self, link: NodeLink, directory: Directory) -> None:
        """Withdraw stuck keys again, publish what another node had first or the server did not take."""
        now = time.monotonic()
        for event in [e for e, due in list(self._untaken.items()) if due <= now]:
            self._untaken.pop(event, None)
            if (place := directory.shared.place_of(event.namespace, event.key, event.rank)) is not None:
                self._note(_Committed(*event, *place))
        for event in [e for e, due in list(self._stuck.items()) if due <= now]:
            self._stuck.pop(event, None)

            def answered(reply: P.Reply | MaruError, event: _Removed = event) -> None:
                if not isinstance(reply, P.Outcomes) or reply.codes[0] == P.Outcome.PINNED:
                    self._keep(event.namespace, event.rank, event.key, [True])
                elif (place := directory.shared.place_of(event.namespace, event.key, event.rank)) is not None:
                    self._note(_Committed(*event, *place))

            if not link.submit(P.Delete(event.namespace, event.rank, event.key), answered):
                self._stuck[event] = now + _STUCK_RETRY_S

    # --- the link's thread ------------------------------------------------------------
    def _withdrawn(self, namespace: bytes, rank: int, keys: bytes) -> Callable[[P.Reply | MaruError], None]:
        def answered(reply: P.Reply | MaruError) -> None:
            if isinstance(reply, P.Outcomes):
                self._keep(namespace, rank, keys, [code == P.Outcome.PINNED for code in reply.codes])

        return answered

    def _published(self, link: NodeLink, slabs: Slabs) -> Callable[[P.Reply | MaruError], None]:
        def answered(reply: P.Reply | MaruError) -> None:
            if isinstance(reply, ServerRefused):
                self._publish_again(slabs, [True] * (len(slabs.keys) // KEY_BYTES))
            if not isinstance(reply, P.Outcomes):
                return
            self._publish_again(slabs, [code == P.Outcome.FULL for code in reply.codes])
            if not reply.places:
                return
            ours = {lease.grant for lease in link.regions}
            winners = np.frombuffer(reply.places, P.PLACE)["grant"].tolist()
            exists = [code == P.Outcome.EXISTS for code in reply.codes]
            stuck = [e and winner in ours for e, winner in zip(exists, winners, strict=True)]
            self.counts.elsewhere += sum(exists) - sum(stuck)
            self._keep(slabs.namespace, slabs.rank, slabs.keys, stuck)
            self._publish_again(slabs, [e and not s for e, s in zip(exists, stuck, strict=True)])

        return answered

    def _publish_again(self, slabs: Slabs, flags: Iterable[bool]) -> None:
        _remember(self._untaken, slabs.namespace, slabs.rank, slabs.keys, flags, after_s=_PUBLISH_RETRY_S)

    def _keep(self, namespace: bytes, rank: int, keys: bytes, stuck: Iterable[bool]) -> None:
        _remember(self._stuck, namespace, rank, keys, stuck, after_s=_STUCK_RETRY_S)


def _remember(
    where: dict[_Removed, float], namespace: bytes, rank: int, keys: bytes, flags: Iterable[bool], *, after_s: float
) -> None:
    """Note the flagged keys as due in ``after_s`` seconds."""
    due = time.monotonic() + after_s
    for i, flag in enumerate(flags):
        if flag and len(where) < _RETRIED_MAX:
            where[_Removed(namespace, rank, keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])] = due


def _groups(events: deque[_Committed | _Removed]) -> Iterator[list[_Committed | _Removed]]:
    """Neighbouring events that make one message, taken from the left; order is kept."""
    group: list[_Committed | _Removed] = []
    name: tuple[object, ...] = ()
    while events:
        event = events.popleft()
        its = (event.namespace, event.rank, event.region if isinstance(event, _Committed) else 0)
        if group and (its != name or len(group) >= BATCH):
            yield group
            group = []
        group.append(event)
        name = its
    if group:
        yield group
