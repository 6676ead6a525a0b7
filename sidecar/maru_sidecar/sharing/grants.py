"""The asking for regions, and what a server's grant must look like before anything is done with it.

A grant is an index into the mapping: region 0 is the pool's own header, and one behind the last is no memory of the pool. The
server says who writes what, not what the pool looks like. A grant counts if it names a region of this pool, and once the server
has confirmed, in this life of its directory, that it knows the pool as it is. Anything else is given back and the mapping left
alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial

from maru_server import protocol as P
from maru_server.errors import ServerRefused
from maru_server.lease import RegionLease
from maru_server.node import NodeLink
from maru_shm.errors import MaruError
from maru_sidecar.pool import PoolFile
from maru_sidecar.sharing.rights import GrantedRegions

log = logging.getLogger(__name__)

#: A server that knows the pool otherwise, or grants what is no region of it, is asked again after this long: somebody has to
#: mend it first.
RECHECK_S = 2.0


class Grants:
    """One question at a time. ``use``: has the main thread take granted regions, and clear ``asking`` when it has."""

    def __init__(
        self, pool: PoolFile, link: NodeLink, rights: GrantedRegions, use: Callable[[list[RegionLease]], None]
    ) -> None:
        self._pool = pool
        self._link = link
        self._rights = rights
        self._use = use
        label = os.path.basename(pool.spec.path)
        self._device = P.AddDevice(pool.uuid, pool.n_regions, pool.region_bytes, 1, label)
        self._agreed_epoch = -1  # the life of the server's directory in which it confirmed the device
        self._mismatch = ""  # why it did not
        self._bad = ""  # the last grant that was refused; empty once a good one came
        self._ask_from_s = 0.0  # not before
        self.asking = False  #: neither granted nor refused yet
        self.refused = 0  #: grants given back
        self.refusal = ""  #: the server's, of the last question

    @property
    def amiss(self) -> str:
        """Why what the server says of regions is of no use; empty if it is. Any thread."""
        if self._mismatch:
            return f"no regions are asked for, the metadata server knows another pool of this UUID: {self._mismatch}"
        return f"the metadata server's grant was refused: {self._bad}" if self._bad else ""

    # --- the main thread ------------------------------------------------------------------------------------------------------
    def add_device(self) -> None:
        """Make the pool known to the server, now and after each of its restarts."""
        d = self._device
        self._link.add_device(d.device, d.n_regions, d.region_bytes, first=d.first, label=d.label)

    @property
    def may_ask(self) -> bool:
        return not self.asking and time.monotonic() >= self._ask_from_s

    def ask(self, stride: int, none: Callable[[], None]) -> None:
        """Ask for a region, or first whether the server knows the pool by now. ``none``: what to do if nothing was granted and
        nothing is wrong.
        """
        self.asking = True
        if self._mismatch:
            self._agree([])
        else:
            answered = partial(self._granted, none)
            self._link.request_regions(1, answered, device=self._pool.uuid, slab_bytes=stride)

    # --- the link's thread ----------------------------------------------------------------------------------------------------
    def _granted(self, none: Callable[[], None], result: list[RegionLease] | MaruError) -> None:
        """One region at most: the link has compared the answer with the question."""
        if isinstance(result, MaruError):
            self.refusal = str(result)
            self.asking = False
            return
        self.refusal = ""
        if not result:  # of an operation that was repeated, whose region was taken back meanwhile
            none()
            self.asking = False
            return
        if why := self._unusable(result[0]):
            self._refuse(result, why)
            result = []
        else:
            self._bad = ""
        if self._link.stats().epoch != self._agreed_epoch:
            self._agree(result)
        elif result:
            self._use(result)

    def _unusable(self, lease: RegionLease) -> str:
        """Why a granted region is none that this node can be given; empty if it is one."""
        name, pool = f"region {lease.region} of device {lease.device.hex()}", self._pool
        if lease.device != pool.uuid:
            return f"{name} was granted, and the pool is {pool.uuid.hex()}"
        if not 1 <= lease.region < pool.n_regions:
            return f"{name} was granted, and the pool's are 1 to {pool.n_regions - 1}"
        ours = dict(self._rights.items()).get(lease.region)
        return f"{name} was granted, which this node holds already" if ours is not None and not ours.revoked else ""

    def _refuse(self, leases: list[RegionLease], why: str) -> None:
        held = dict(self._rights.items())
        for lease in leases:
            if lease.device == self._pool.uuid and (ours := held.get(lease.region)) is not None:
                ours.revoked = True  # what is given back below is this region
        self.refused += len(leases)
        if not self._bad:
            log.warning("%s; nothing was done with it", why)
        self._bad = why
        self._ask_from_s = time.monotonic() + RECHECK_S
        self._give_back(leases)

    def _agree(self, leases: list[RegionLease]) -> None:
        """Ask the server whether the pool it knows is this one; ``leases`` are used if so. Any thread."""
        if not self._link.submit(self._device, partial(self._answered, leases)):
            self._give_back(leases)

    def _answered(self, leases: list[RegionLease], reply: P.Reply | MaruError) -> None:
        if isinstance(reply, MaruError):
            if isinstance(reply, ServerRefused) and reply.code is P.ErrorCode.DEVICE_MISMATCH:
                if not self._mismatch:
                    log.warning("no regions are asked for: the metadata server knows another pool of this UUID: %s", reply)
                self._mismatch = str(reply)
                self._ask_from_s = time.monotonic() + RECHECK_S
            else:
                self.refusal = str(reply)
            self._give_back(leases)
            return
        if self._mismatch:
            log.info("the metadata server knows this pool now: regions are asked for again")
        self._mismatch = ""
        self._agreed_epoch = self._link.stats().epoch
        if leases:
            self._use(leases)
        else:
            self.asking = False

    def _give_back(self, leases: list[RegionLease]) -> None:
        for lease in leases:
            self._link.free_region(lease)
        self.asking = False
