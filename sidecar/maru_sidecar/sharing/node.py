"""This sidecar as a node of a metadata server: the regions it may write, what it tells, what it asks.

*Regions.* A node holds what it was granted: at the start those whose owner record names it (claimed; readable at once,
writable once the claim is confirmed), later one more whenever the last empty one is taken into use, as long as the server
has any. Surplus empty regions go back. Without a server nothing new can be stored after the lease has run out; what is there
is served on.

*Losing one.* The link marks a region's lease revoked when the server gave it to another node. From that moment no word of it
is written; at the next tick its chunks are forgotten. Loads in between compare generations.

*Trusting the server.* The link compares each answer with its question; ``grants.py`` compares a grant with the pool.

*Names.* A node is one sidecar on one pool. Its name is locked on this machine (``PoolFile.lock_node``), which proves that an
earlier process of it is dead; across machines the names must differ, and by default contain the machine's.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from maru_server import protocol as P
from maru_server.announce import Slabs
from maru_server.auth import read_token
from maru_server.lease import RegionLease
from maru_server.link_types import LinkConfig, LinkState, LinkStats
from maru_server.node import NodeLink
from maru_shm import poolformat as F
from maru_shm.errors import MaruError
from maru_sidecar.config import Config
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_header import boot_id
from maru_sidecar.sharing import owner
from maru_sidecar.sharing.announcer import Announcer
from maru_sidecar.sharing.grants import Grants
from maru_sidecar.sharing.lookups import PeerLookups
from maru_sidecar.sharing.news import StoreNews
from maru_sidecar.sharing.rights import GrantedRegions
from maru_sidecar.sharing.slabs import SharedSlabs
from maru_sidecar.slab_reader import SlabReader

log = logging.getLogger(__name__)

#: A store waits this long for a region that was asked for: a grant takes about a millisecond where the server answers at all.
GROWTH_S = 1.0

CallSoon = Callable[[Callable[[], None]], None]


def default_node_name(instance: str) -> str:
    """``host/instance``: unique where host names are."""
    return f"{socket.gethostname()}/{instance}"


class Node:
    """Made with the pool, joined to its directory by :meth:`bind`. The main thread uses it, but for the link's callbacks."""

    def __init__(self, config: Config, pool: PoolFile, instance: str, call_soon: CallSoon) -> None:
        """Lock the node's name and read what it held. Raises ``PoolBusy``, ``ConfigError``."""
        self._config = config.server
        self._pool = pool
        self._call_soon = call_soon
        self.name = config.server.node or default_node_name(instance)
        self.id = F.node_id(self.name)
        pool.lock_node(self.name)
        self.rights = GrantedRegions(config.server.write_margin_ms)
        self.events = _Events(self)
        held = owner.of_node(pool, self.id)
        pool.suspect = any(record.boot != boot_id() for _, record in held)
        self._recorded = {region: record.token for region, record in held}
        token = read_token(config.server.token_file or None)
        self.link = NodeLink(
            LinkConfig(
                config.server.endpoint, self.name, token=token, predecessor=P.Predecessor.ENDED,
                label=f"pid {os.getpid()}, pool {pool.spec.file_path}",
            ),
            self._slabs,
            [P.Region(pool.uuid, region, record.token) for region, record in held],
        )  # fmt: skip
        for lease in self.link.regions:
            self.rights.add(lease.region, lease)
        self.grants = Grants(pool, self.link, self.rights, lambda leases: call_soon(partial(self._take, leases)))
        self._woken = False  # a flush is on its way that will look at the stock of empty regions
        self._asked_s = 0.0  # when a region was wanted last
        self._stride = 0
        self._lost = 0
        self._stores = StoreNews()
        self._directory: Directory
        self.lookups: PeerLookups
        self.slabs: SharedSlabs

    @property
    def claimed(self) -> list[int]:
        """Regions held from before."""
        return sorted(region for region, _ in self.rights.items())

    def bind(self, directory: Directory, *, lease_ttl_s: float) -> None:
        """The pool's directory, made with this node's ``rights``, ``events`` and ``claimed``."""
        self._directory = directory
        reader = SlabReader(self._pool)
        self.lookups = PeerLookups(
            self.link, self._pool.uuid, directory, reader, self._call_soon, wait_s=self._config.lookup_wait_ms / 1e3,
            pin_ttl_s=self._config.pin_ttl_s, lease_ttl_s=lease_ttl_s,
        )  # fmt: skip
        self.slabs = SharedSlabs(directory, reader, self.lookups.leases)

    def start(self) -> None:
        self.grants.add_device()
        self.link.start()
        self.tick()

    # --- the main thread ----------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Tell the server what changed, ask for a region if one is wanted."""
        self.events.flush(self.link, self._lease_of, self._directory.shared.stride_of)
        self._grow()

    def tick(self) -> None:
        """A few times a second."""
        for region, lease in self.rights.items():
            if lease.revoked:
                self._lose(region)
            elif lease.token != self._recorded.get(region) and lease.writable():
                self._record(region, lease.token)
        self._give_back()
        self._stores.look(self.no_stores)
        self.events.retry(self.link, self._directory)
        self.flush()

    def _lose(self, region: int) -> None:
        self.rights.remove(region)
        self._recorded.pop(region, None)
        self._lost += 1
        n = self._directory.shared.lose(region)
        log.warning("region %d is another node's now: %d chunks forgotten", region, n)

    def _record(self, region: int, token: int) -> None:
        owner.write(self._pool, region, self.id, token)
        self._recorded[region] = token

    def _lease_of(self, region: int) -> RegionLease | None:
        return next((lease for lease in self.link.regions if lease.region == region), None)

    def _give_back(self) -> None:
        while self._directory.shared.n_free > 2 * self._config.spare_regions and self.link.state is LinkState.READY:
            region = self._directory.shared.give_back()
            lease = self.rights.remove(region) if region is not None else None
            if region is None or lease is None:
                return
            if lease.writable():
                owner.erase(self._pool, region)
            self._recorded.pop(region, None)
            if (held := self._lease_of(region)) is not None:
                self.link.free_region(held)

    # --- growing --------------------------------------------------------------------------------------------------------------
    def _grow(self) -> None:
        """Keep empty regions in stock: a store that finds none has to evict."""
        if self.grants.may_ask and self._directory.shared.n_free < self._config.spare_regions:
            self._asked_s = time.monotonic()
            self.grants.ask(self._stride, self._took_none)
        self._woken = False  # last: whoever looks sees one of the two

    def _took_none(self) -> None:
        """On the link's thread: a region is still wanted, the next tick asks again."""
        self._woken = True

    def _take(self, leases: list[RegionLease]) -> None:
        """Use granted regions. By the main thread, which is also the one that sees that a region was lost."""
        try:
            for lease in leases:
                if lease.region in self.rights:
                    self._lose(lease.region)  # and granted anew before a tick saw it
                self.rights.add(lease.region, lease)
                if not self._take_in(lease):
                    self.rights.remove(lease.region)
                    self.link.free_region(lease)
        finally:
            # A burst may have taken the region's first slab already, which asked for nothing while this was under way, and its
            # last before the flush comes: until that has looked at the stock, more may be on its way.
            self._asked_s = time.monotonic()
            self._woken = True
            self.grants.asking = False
        self.flush()

    def _take_in(self, lease: RegionLease) -> bool:
        """Whether a granted region can be used."""
        try:
            usable = self._directory.shared.add(lease.region)
            if usable:
                self._record(lease.region, lease.token)
        except MaruError as e:  # the lease ended this moment
            log.warning("region %d: %s", lease.region, e)
            return False
        return usable

    def want_region(self, stride: int) -> None:
        """Under the directory's lock: the last empty region is in use."""
        self._stride = stride
        if not self._woken and not self.grants.asking:
            self._woken = True
            self._asked_s = time.monotonic()
            self._call_soon(self.flush)

    @property
    def growing(self) -> bool:
        """Whether a region was asked for a moment ago and neither granted nor refused."""
        return (self._woken or self.grants.asking) and time.monotonic() - self._asked_s < GROWTH_S

    def _slabs(self, lease: RegionLease) -> Iterator[Slabs]:
        """On the link's thread: what a region holds, for a full announcement."""
        tables: dict[tuple[bytes, int], list[tuple[bytes, int, int]]] = {}
        for namespace, rank, key, number, generation in self._directory.shared.committed_in(lease.region):
            tables.setdefault((namespace, rank), []).append((key, number, generation))
        for (namespace, rank), rows in tables.items():
            yield Slabs(
                namespace, rank, b"".join(r[0] for r in rows), np.array([r[1] for r in rows], np.uint32),
                np.array([r[2] for r in rows], np.uint64), self._directory.shared.stride_of(lease.region),
            )  # fmt: skip

    # --- what is amiss; any thread --------------------------------------------------------------------------------------------
    def no_stores(self) -> str:
        """Why nothing can be stored now; empty if something can."""
        if self.rights.writable:
            return ""
        s = self.link.stats()
        if s.state in (LinkState.SUPERSEDED, LinkState.STOPPED):
            return s.last_error or "the link to the metadata server has ended"
        if s.state is LinkState.CONNECTING or not self.link.lease.held():
            lease = "the lease has run out" if self.link.lease.term else "no lease yet"
            if s.state is LinkState.CONNECTING:
                return f"{lease}, and there is no session with the metadata server: {s.last_error or 'connecting'}"
            return f"{lease}, and the metadata server's answer is awaited"
        if len(self.rights):
            return "the regions held from before are not confirmed yet; they are once a lease and the grace time have passed"
        if self.grants.amiss:
            return self.grants.amiss
        refused = s.regions_refused or self.grants.refusal
        return f"no region was granted: {refused}" if refused else "no region is granted yet: the server was asked for one"

    def trouble(self) -> str:
        """What sharing lacks now; empty if nothing. What is here is served all the same."""
        if why := self.no_stores():
            return f"nothing can be stored: {why}"
        s = self.link.stats()
        if s.state is LinkState.CONNECTING and s.last_error:
            return f"no session with the metadata server, stores stop when the lease ends: {s.last_error}"
        return self.grants.amiss or (s.last_error if s.error_stands else self.lookups.too_short)

    # --- status and end -------------------------------------------------------------------------------------------------------
    def status(self) -> dict[str, object]:
        """Plain values for the status page."""
        s, told, asked = self.link.stats(), self.events.counts, self.lookups.counts
        no_stores = self.no_stores()
        return {
            "node": self.name,
            "server": self._config.endpoint,
            "state": s.state.value,
            "can_store": not no_stores,
            **({"cannot_store_because": no_stores} if no_stores else {}),
            "regions": len(self.rights),
            "regions_writable": self.rights.writable,
            "regions_lost": self._lost,
            "grants_refused": self.grants.refused,
            "lease_ms_left": s.lease_ms_left,
            "slabs_published": told.published,
            "slabs_withdrawn": told.withdrawn,
            "slabs_known_elsewhere": told.elsewhere,
            "keys_announced": s.keys_announced,
            "lookups_asked": asked.asked,
            "lookups_unanswered": asked.late,
            "lookups_refused": asked.refused,
            "lookups_pinned_too_short": asked.short,
            "chunks_found": asked.chunks,
            "chunks_stale": asked.stale,
            "slabs_vanished": self.slabs.vanished,
            "foreign_leases": len(self.lookups.leases),
            "reconnects": s.reconnects,
            "requests_refused": s.refused,
            **({"region_refused": refusal} if (refusal := self.grants.amiss or self.grants.refusal) else {}),
            **self._error(s),
        }

    def _error(self, s: LinkStats) -> dict[str, object]:
        """What is wrong now, else what was."""
        if not s.error_stands and self.lookups.too_short:
            return {"last_error": self.lookups.too_short}
        name = "last_error" if s.error_stands else "past_error"
        return {name: s.last_error, f"{name}_age_s": round(s.last_error_ms_ago / 1e3, 1)} if s.last_error else {}

    def close(self) -> None:
        """Write nothing any more, leave. After the last copy and before the pool is closed."""
        self.lookups.close()
        self.flush()
        self.link.close()


class _Events(Announcer):
    """``slab_handles.PoolEvents`` for a node."""

    def __init__(self, node: Node) -> None:
        super().__init__(lambda: node._call_soon(node.flush))
        self._node = node

    def low(self, stride: int) -> None:
        self._node.want_region(stride)

    def growing(self) -> bool:
        return self._node.growing
