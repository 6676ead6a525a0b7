"""What a directory backend must do. One conformance suite runs on every implementation.

Keys are tuples of 16-byte keys; places are n × 16 bytes (``protocol.PLACE``). Lengths and bounds were checked before. Every
call answers for the moment of the call: a place is returned only if its grant is readable.

Raises :class:`~maru_server.errors.ServerRefused` for what the caller may not do,
:class:`~maru_server.errors.BackendUnavailable` when the store does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from maru_server import protocol as P

Table = tuple[bytes, int]  #: namespace, rank
Keys = Sequence[bytes]


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def settings_lease_ms(self) -> int:
        """How long a heartbeat renews a node's lease."""
        ...

    def epoch(self) -> int: ...

    def tick(self) -> None:
        """Apply what time has made due (dead members, expired pins, drained regions) and sweep a little. Call every 100 ms
        or so.
        """
        ...

    # membership and regions
    def join(self, hello: P.Hello) -> str: ...
    def leave(self, member: str) -> None: ...
    def heartbeat(self, member: str) -> None: ...
    def add_device(self, m: P.AddDevice) -> None: ...
    def alloc(self, member: str, m: P.AllocRegions) -> list[P.GrantInfo]: ...
    def free(self, member: str, regions: list[P.Region]) -> int: ...
    def claim(self, member: str, m: P.ClaimRegions) -> list[P.ClaimResult]: ...

    # directory
    def register(self, member: str, table: Table, keys: Keys, places: bytes) -> tuple[bytes, bytes]:
        """``(codes, winners' places)``; first writer wins. The same place again, or the same slab with a newer generation that
        nobody pins, is REGISTERED."""
        ...

    def lookup(self, table: Table, keys: Keys) -> bytes: ...

    def pin(self, member: str, table: Table, keys: Keys, ttl_ms: int) -> tuple[int, bytes]:
        """Pin the leading present keys; ``(pin id, their places)``, ``(0, b"")`` if the first is absent."""
        ...

    def unpin(self, pin: int) -> int:
        """Keys let go; 0 for an unknown (expired, repeated) id."""
        ...

    def delete(self, member: str, table: Table, keys: Keys) -> bytes:
        """Outcome codes. ``member`` "" may delete any key."""
        ...

    def tables(self) -> list[tuple[bytes, int, int]]: ...
    def page(self, table: Table, after: bytes, limit: int) -> tuple[list[bytes], bytes, bool]:
        """``(keys, places, more)`` in key order."""
        ...

    def reset(self, namespace: bytes) -> int: ...

    # views
    def infos(self, ids: set[int]) -> list[P.GrantInfo]: ...
    def stats(self) -> dict[str, int | float | str]: ...
    def usage(self) -> list[P.UsageRow]: ...
    def nodes(self) -> list[P.NodeInfo]: ...
    def regions(self) -> list[P.RegionInfo]: ...
    def close(self) -> None: ...


def grant_ids(places: bytes) -> set[int]:
    """The grant ids that occur in places, without 0."""
    ids = set(np.unique(np.frombuffer(places, P.PLACE)["grant"]).tolist())
    ids.discard(0)
    return ids


class ReadableMask:
    """Which grant ids are readable, as an array: a batch of places is filtered in a few µs."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._mask = np.zeros(max(ids, default=0) + 1024, np.bool_)
        self._mask[list(ids)] = True

    def has(self, grant: int) -> bool:
        return grant < len(self._mask) and bool(self._mask[grant])

    def flags(self, places: bytes) -> npt.NDArray[np.bool_]:
        """shape (n,): whether each place can be read."""
        grants = np.frombuffer(places, P.PLACE)["grant"]
        if len(grants) and int(grants.max()) >= len(self._mask):
            known = grants < len(self._mask)
            return np.asarray(known & self._mask[np.where(known, grants, 0)])
        return np.asarray(self._mask[grants])

    def filter(self, places: bytes) -> bytes:
        """The places with unreadable ones made NOWHERE."""
        array = np.frombuffer(places, P.PLACE)
        stale = ~self.flags(places) & (array["grant"] != 0)
        if not stale.any():
            return places
        array = array.copy()
        array[stale] = np.zeros((), P.PLACE)
        return array.tobytes()

    def leading(self, places: bytes) -> int:
        """How many leading places can be read."""
        flags = self.flags(places)
        return len(flags) if flags.all() else int(flags.argmin())
