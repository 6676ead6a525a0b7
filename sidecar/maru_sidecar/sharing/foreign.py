"""The foreign part of lookups' leases: which slabs of other nodes an engine was told it may load.

The main thread adds and removes, loaders find: one dictionary operation each, atomic under the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where a slab lies in the pool. ``number``: its index in the region."""

    region: int
    number: int
    generation: int


@dataclass(frozen=True, slots=True)
class Asker:
    """For whom: the engine's namespace and ranks, and who holds the lease."""

    namespace: bytes
    world: int
    owner: Hashable
    session: int
    ticket: int


@dataclass(slots=True)
class Beyond:
    """What was found beyond the local hit. ``deadline_ns`` 0: nothing."""

    n: int = 0
    deadline_ns: int = 0


@dataclass(slots=True)
class ForeignLease:
    """``places``: by key and rank. ``pins``: ids at the server. ``own``: leases of our directory between foreign chunks."""

    deadline_ns: int  #: CLOCK_MONOTONIC; from then on nothing may be read by it
    places: dict[tuple[bytes, int], Place] = field(default_factory=dict)
    pins: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)


class ForeignLeases:
    """By (session, ticket of the LOOKUP). ``end`` gives back what a lease holds."""

    def __init__(self, end: Callable[[ForeignLease], None]) -> None:
        self._end = end
        self._held: dict[tuple[int, int], ForeignLease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, session: int, ticket: int, lease: ForeignLease) -> None:
        self._held[session, ticket] = lease

    def find(self, session: int, ticket: int) -> ForeignLease | None:
        """The live lease, or None."""
        lease = self._held.get((session, ticket))
        return lease if lease is not None and time.monotonic_ns() < lease.deadline_ns else None

    def release(self, session: int, ticket: int) -> None:
        """End a lease (idempotent)."""
        lease = self._held.pop((session, ticket), None)
        if lease is not None:
            self._end(lease)

    def sweep(self, live: Callable[[int], bool], now_ns: int) -> None:
        """End the leases of sessions that are gone, and those whose time is over."""
        for (session, ticket), lease in list(self._held.items()):
            if now_ns >= lease.deadline_ns or not live(session):
                self.release(session, ticket)
