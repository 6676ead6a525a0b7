"""The right to write a region, enforced by the writer's own clock.

A node's *lease* is renewed by heartbeats. The server counts it from the heartbeat's arrival, the node from the moment it *sent*
it, less a bound on clock drift, so the node always stops first::

    node    sent ──────────── D·(1−drift) ──▶ stop
    server        arrived ────────────────── D ──── grace ──▶ regions may go to another node

Time is CLOCK_BOOTTIME: it counts a suspended machine's sleep too, and nobody can set it. A node that was paused and wakes up
late finds its lease over before it writes.

What a check cannot do is stop a write that was already running when the process was paused, or that begins right after the
check. It is bounded by asking for a slab's whole duration in advance (``need_ms``), by asking again before each system call or
submission that writes, and before commit: what may land late is one of those, and it is never published by who wrote it. It
may land in a slab of the region's next owner, and no software closes that window. The generation does not show it, since the
slab is the next owner's all the time; a checksum does, if it was taken of where the bytes came from and is compared after they
were read. Slabs without a checksum are not protected from it.
"""

from __future__ import annotations

import time

from maru_server.errors import LeaseExpired

DRIFT = 0.01  #: bound on how much faster the server's clock may run; crystals stay within 0.0002
_MS = 1_000_000


def boottime_ns() -> int:
    """Nanoseconds since boot, sleep included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class NodeLease:
    """One node's write lease. A single thread renews it; any thread may read it without a lock.

    ``term`` counts unbroken stretches: it rises when a renewal comes after the lease had run out, since then the server may
    have given regions away in between.
    """

    __slots__ = ("_deadline_ns", "term")

    def __init__(self) -> None:
        self._deadline_ns = 0
        self.term = 0

    @property
    def deadline_ns(self) -> int:
        """CLOCK_BOOTTIME ns after which nothing may be written; 0 if never held."""
        return self._deadline_ns

    def held(self, now_ns: int | None = None) -> bool:
        return (boottime_ns() if now_ns is None else now_ns) < self._deadline_ns

    def renew(self, sent_ns: int, duration_ms: int) -> None:
        """The server confirmed a heartbeat that was sent at ``sent_ns``."""
        deadline = sent_ns + int(duration_ms * (1 - DRIFT)) * _MS
        now = boottime_ns()
        if deadline <= now:
            return  # confirmed too late to be of use
        if now >= self._deadline_ns:
            self.term += 1  # before the deadline: a reader that sees the new deadline sees the new term
        self._deadline_ns = max(self._deadline_ns, deadline)

    def end(self) -> None:
        """Give the lease up now (leaving, or told that this incarnation is dead)."""
        self._deadline_ns = 0


class RegionLease:
    """The right to write one region: a grant's fencing token under a node lease. Ask :meth:`check` before every write.

    It stays the same object when the region is claimed again after a restart of the server or a broken lease; ``grant`` (the
    id that places carry) and ``token`` may change then. One thread confirms and revokes, any thread checks.
    """

    __slots__ = ("_lease", "_term", "device", "grant", "region", "revoked", "token")

    def __init__(self, lease: NodeLease, device: bytes, region: int, token: int = 0) -> None:
        self._lease = lease
        self._term = -1
        self.device = device
        self.region = region
        self.token = token
        self.grant = 0
        self.revoked = False  #: the region is another node's or was given back; final

    def confirm(self, token: int, grant: int) -> None:
        """The server granted the region, or confirmed a claim, in the node lease's current term."""
        self.token, self.grant = token, grant
        self._term = self._lease.term

    @property
    def unbroken(self) -> bool:
        """Whether the node's lease has never run out since the last :meth:`confirm`."""
        return self._term == self._lease.term and self._lease.held()

    def writable(self, need_ms: int = 0) -> bool:
        """Whether a write of at most ``need_ms`` may start now."""
        deadline = self._lease.deadline_ns  # before the term: see NodeLease.renew
        return not self.revoked and self._lease.term == self._term and boottime_ns() + need_ms * _MS < deadline

    def check(self, need_ms: int = 0) -> None:
        """Raise :class:`LeaseExpired` unless a write of at most ``need_ms`` may start now (and, after it, before commit)."""
        if self.writable(need_ms):
            return
        if self.revoked:
            why = "it was given back or went to another node"
        elif self._lease.term != self._term:
            why = "the server has not confirmed it since the node's lease was broken"
        else:
            why = f"the node's lease ends in {(self._lease.deadline_ns - boottime_ns()) / _MS:.0f} ms, {need_ms} ms are needed"
        raise LeaseExpired(
            f"region {self.region} of device {self.device.hex()} (token {self.token}) may not be written: {why}",
            "write nothing to it until its claim is confirmed",
        )
