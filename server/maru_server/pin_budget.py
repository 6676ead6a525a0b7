"""How much each member has pinned, so that nobody's pins fill the server's memory.

Counted by the server process that granted the pins. A pin held by a member that died is counted until its time is over: nobody
asks for more under that name.
"""

from __future__ import annotations

import heapq
from collections import Counter

from maru_server.errors import ServerRefused
from maru_server.lease import boottime_ns
from maru_server.protocol import ErrorCode

#: A pin costs about as much memory as this many of its keys (0.5 KiB; a key 75 bytes).
PIN_WEIGHT = 8


class PinBudget:
    """``max_keys``: of one member. The message that reaches it is still answered, so one batch more may be pinned."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._used: Counter[str] = Counter()
        self._weights: dict[tuple[str, int], int] = {}
        self._ends: list[tuple[int, str, int]] = []

    def check(self, member: str) -> None:
        """Raise :class:`ServerRefused` (LIMIT) for a member that holds its share already."""
        now = boottime_ns()
        while self._ends and self._ends[0][0] <= now:
            _, whose, pin = heapq.heappop(self._ends)
            self.release(whose, pin)
        if self._used[member] >= self._max_keys:
            raise ServerRefused(
                ErrorCode.LIMIT,
                f"{member} has pinned {self._max_keys} keys already (each pin counts as {PIN_WEIGHT} more)",
                "end pins that are not needed, or raise the server's --max-pinned-keys",
            )
        if not self._used[member]:
            del self._used[member]

    def add(self, member: str, pin: int, n_keys: int, ttl_ms: int) -> None:
        self.release(member, pin)  # a store that was emptied numbers its pins anew
        self._weights[member, pin] = weight = n_keys + PIN_WEIGHT
        self._used[member] += weight
        heapq.heappush(self._ends, (boottime_ns() + ttl_ms * 1_000_000, member, pin))

    def release(self, member: str, pin: int) -> None:
        """A pin that is unknown, or ended before, changes nothing."""
        self._used[member] -= self._weights.pop((member, pin), 0)
        if self._used[member] <= 0:
            del self._used[member]
