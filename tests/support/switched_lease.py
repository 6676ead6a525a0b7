"""A node's right to write regions of a shared pool, taken away by the test."""

from __future__ import annotations

from collections.abc import Iterable

from maru_shm.errors import RegionNotHeld
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.sharing.rights import GrantedRegions


class SwitchedLease:
    """A lease that holds until the test says otherwise."""

    def __init__(self) -> None:
        self.revoked = False
        self.token = 1
        self.held = True

    def writable(self, need_ms: int = 0) -> bool:
        del need_ms
        return self.held and not self.revoked

    def check(self, need_ms: int = 0) -> None:
        if not self.writable(need_ms):
            raise RegionNotHeld("the lease is over", "")


def granted(pool: PoolFile, lease: SwitchedLease, regions: Iterable[int]) -> Directory:
    """The directory of a node that was just granted these regions."""
    rights = GrantedRegions(0)
    directory = Directory(pool, rights=rights, mine=())
    for region in regions:
        rights.add(region, lease)
        assert directory.shared.add(region)
    return directory
