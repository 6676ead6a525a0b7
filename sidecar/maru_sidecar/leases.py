"""Who holds which chunks until when. Not thread-safe: the directory's lock covers it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass

from maru_sidecar.chunk_index import Chunk

_SLACK = 1024  #: ended leases that are not worth a sweep


@dataclass(frozen=True, slots=True)
class Lease:
    """``n`` leading chunks are pinned until ``deadline_ns`` (CLOCK_MONOTONIC) or release."""

    id: int
    n: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class _Held:
    owner: Hashable
    chunks: list[Chunk]


class LeaseTable:
    """Live leases by id, by owner and by deadline. Ids start at 1 and are never reused."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._by_owner: dict[Hashable, set[int]] = {}
        self._deadlines: list[tuple[int, int]] = []  #: heap of (deadline, id); most ended leases are still in it
        self._next = 1

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, chunks: list[Chunk], owner: Hashable, deadline_ns: int) -> Lease:
        lease = Lease(self._next, len(chunks), deadline_ns)
        self._next += 1
        self._held[lease.id] = _Held(owner, chunks)
        self._by_owner.setdefault(owner, set()).add(lease.id)
        heapq.heappush(self._deadlines, (deadline_ns, lease.id))
        return lease

    def end(self, lease_id: int) -> list[Chunk]:
        """Forget a lease and return its chunks, to be unpinned once each; empty if it is unknown or has ended."""
        held = self._held.pop(lease_id, None)
        if held is None:
            return []
        ids = self._by_owner[held.owner]
        ids.discard(lease_id)
        if not ids:
            del self._by_owner[held.owner]
        if len(self._deadlines) > 2 * len(self._held) + _SLACK:  # a busy client ends thousands within one lease's time
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._held]
            heapq.heapify(self._deadlines)
        return held.chunks

    def of_owner(self, owner: Hashable) -> list[int]:
        return list(self._by_owner.get(owner, ()))

    def expired(self, now_ns: int) -> list[int]:
        """Ids whose deadline has passed, each reported once; costs O(log n) per lease, nothing when none is due."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, lease_id = heapq.heappop(self._deadlines)
            if lease_id in self._held:
                due.append(lease_id)
        return due
