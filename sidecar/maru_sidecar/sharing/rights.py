"""Which regions of a pool this sidecar may write, asked before every write.

The answer for a shared pool is a lease's, by this node's own clock (``maru_server.lease``); nothing here knows the server.
"""

from __future__ import annotations

from typing import Protocol

from maru_shm.errors import MaruError, RegionNotHeld


class WriteRights(Protocol):
    """Thread-safe; each call costs about a microsecond at most."""

    def may_start(self, region: int) -> bool:
        """Whether a slab's write may begin: there is time enough to finish it."""
        ...

    def may_write(self, region: int) -> bool:
        """Whether a word may be stored now."""
        ...

    def check(self, region: int) -> None:
        """Raise :class:`RegionNotHeld`, saying why, unless a word may be stored now."""
        ...


class WholePool:
    """A pool of one's own."""

    def may_start(self, region: int) -> bool:
        del region
        return True

    def may_write(self, region: int) -> bool:
        del region
        return True

    def check(self, region: int) -> None:
        del region


class Lease(Protocol):
    """What is asked of ``maru_server.lease.RegionLease``. Times in ms."""

    revoked: bool
    token: int

    def writable(self, need_ms: int = 0) -> bool: ...

    def check(self, need_ms: int = 0) -> None: ...


class GrantedRegions:
    """The regions granted to this node. ``margin_ms``: how long one slab's write may take."""

    def __init__(self, margin_ms: int) -> None:
        self._margin_ms = margin_ms
        self._leases: dict[int, Lease] = {}

    def add(self, region: int, lease: Lease) -> None:
        self._leases[region] = lease

    def remove(self, region: int) -> Lease | None:
        return self._leases.pop(region, None)

    def items(self) -> list[tuple[int, Lease]]:
        return list(self._leases.items())

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, region: int) -> bool:
        return region in self._leases

    @property
    def writable(self) -> int:
        """How many may be written now."""
        return sum(lease.writable() for _, lease in self.items())

    def may_start(self, region: int) -> bool:
        lease = self._leases.get(region)
        return lease is not None and lease.writable(self._margin_ms)

    def may_write(self, region: int) -> bool:
        lease = self._leases.get(region)
        return lease is not None and lease.writable()

    def check(self, region: int) -> None:
        lease = self._leases.get(region)
        if lease is None:
            raise RegionNotHeld(f"region {region} is not granted to this node", "nothing to do: another region is used")
        try:
            lease.check()
        except MaruError as e:
            raise RegionNotHeld(e.what, e.remedy) from e
