"""Who is a member, and which node may write which region: a state machine without clocks or I/O.

Both backends run this code: the memory backend keeps one :class:`Cluster`, the Redis backend loads it, applies one change and
stores it by compare-and-set. A region goes round like this::

    free ──alloc──▶ GRANTED ──lease over + grace──▶ ORPHANED ──reap time──▶ DRAINING ──no reader left──▶ free
                     │  ▲                              │                       ▲
                     │  └──────claim by same node──────┘                       │
                     └───────────────────────free──────────────────────────────┘

Keys of a region can be found in GRANTED, PROVISIONAL and ORPHANED; they vanish the moment it is DRAINING. A grant id is never
reused within an epoch, so ending a grant withdraws all its keys at once, and a sweep removes them later.

*Time without a common clock.* Several servers may front one Redis, and wall clocks jump. So nothing here is "older than": a
server acts when it has itself seen a fact unchanged for the whole time (:class:`~maru_server.cluster_state.Observer`). A
member's fact is its heartbeat counter. A server that starts late only waits longer, which is safe.

*After the state was lost* (memory server restarted), leases of the epoch before may still run and nobody knows them. For lease
+ grace (the *hold*) nothing is granted; nodes claim what they hold, and of two claims of one region the higher token wins. A
claim stays PROVISIONAL until the hold ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from maru_server import protocol as P
from maru_server.cluster_state import OPS_REMEMBERED, READABLE, ClusterState, Device, Due, Grant, Member, Observer, Settings
from maru_server.errors import ServerRefused
from maru_server.places import ReadableMask
from maru_server.protocol import ClaimResult, ClaimVerdict, ErrorCode, GrantInfo, GrantState, MemberState, Region


def member_key(node: str, incarnation: int) -> str:
    return f"{node}#{incarnation}"


def _region_key(device: bytes, region: int) -> str:
    return f"{device.hex()}/{region}"


class Cluster:
    """One :class:`ClusterState` with its indexes. Not thread-safe."""

    def __init__(self, state: ClusterState, settings: Settings) -> None:
        self.state = state
        self.settings = settings
        self.readable = ReadableMask([g.id for g in state.grants.values() if g.state in READABLE])
        self._by_region = {(g.device, g.region): g.id for g in state.grants.values()}
        self._waiting = {g.id for g in state.grants.values() if g.state in (GrantState.ORPHANED, GrantState.DRAINING)}
        self._held: dict[str, set[int]] = {key: set() for key in state.members}  # grants a member may write
        for g in state.grants.values():
            if g.id not in self._waiting:
                self._held[member_key(g.node, g.incarnation)].add(g.id)
        self._infos: dict[int, GrantInfo] = {}  # as sent, until the grant changes
        self._free: dict[bytes, list[int]] = {}  # heaps; an index in them may have been claimed meanwhile
        self._n_free = {d: v.n_regions - v.first for d, v in state.devices.items()}
        for g in state.grants.values():
            self._n_free[g.device] -= 1

    # --- members ---------------------------------------------------------------------------------------------------------
    def join(self, hello: P.Hello) -> str:
        """Admit an incarnation; returns its member key. Raises ``ServerRefused`` (STALE_INCARNATION, LIMIT)."""
        s, node, incarnation = self.state, hello.node, hello.incarnation
        key = member_key(node, incarnation)
        if key in s.members and s.members[key].state is MemberState.ALIVE:
            return key
        last = s.last_incarnation.get(node, -1)
        if incarnation == last and key not in s.members:
            raise ServerRefused(ErrorCode.NODE_DEAD, f"{key} was declared dead or has left", "join with a new incarnation")
        if incarnation <= last:
            raise ServerRefused(
                ErrorCode.STALE_INCARNATION,
                f"node {node} has joined as incarnation {last}, {incarnation} is not newer",
                "another process runs under this node name: stop one of them, or name them apart",
            )
        if len(s.members) >= self.settings.max_members or (
            last < 0 and len(s.last_incarnation) >= 10 * self.settings.max_members
        ):
            raise ServerRefused(ErrorCode.LIMIT, f"{len(s.members)} members already", "raise max_members")
        for old_key, old in list(s.members.items()):
            if old.node == node:
                old.state = MemberState.SUPERSEDED
                if hello.predecessor is P.Predecessor.ENDED:
                    self.end_member(old_key)
        s.members[key] = Member(node, incarnation, hello.label)
        self._held[key] = set()
        s.last_incarnation[node] = incarnation
        return key

    def member(self, key: str) -> Member:
        """A member that may act. Raises ``ServerRefused`` (NODE_DEAD, STALE_INCARNATION)."""
        member = self.state.members.get(key)
        if member is None:
            raise ServerRefused(ErrorCode.NODE_DEAD, f"{key} is no member (any more)", "join with a new incarnation")
        if member.state is not MemberState.ALIVE:
            raise ServerRefused(ErrorCode.STALE_INCARNATION, f"{key} was superseded", "one process per node name")
        return member

    def end_member(self, key: str) -> bool:
        """Its lease is over (or it left): its regions are nobody's to write, but stay readable."""
        member = self.state.members.pop(key, None)
        if member is None:
            return False
        held = self._held.pop(key)
        for i in held:
            self.state.grants[i].state = GrantState.ORPHANED
            self._infos.pop(i, None)
        self._waiting |= held
        return True

    @staticmethod
    def _holds(grant: Grant, member: Member) -> bool:
        return grant.node == member.node and grant.incarnation == member.incarnation

    # --- regions ---------------------------------------------------------------------------------------------------------
    def add_device(self, m: P.AddDevice) -> None:
        known = self.state.devices.get(m.device)
        if known is None:
            if len(self.state.devices) >= self.settings.max_devices:
                raise ServerRefused(ErrorCode.LIMIT, f"{len(self.state.devices)} devices already", "raise max_devices")
            self.state.devices[m.device] = Device(m.n_regions, m.region_bytes, m.first, m.label)
            self._n_free[m.device] = m.n_regions - m.first
        elif (known.n_regions, known.region_bytes, known.first) != (m.n_regions, m.region_bytes, m.first):
            raise ServerRefused(
                ErrorCode.DEVICE_MISMATCH,
                f"device {m.device.hex()} has {known.n_regions} regions of {known.region_bytes} bytes from {known.first}, not "
                f"{m.n_regions} of {m.region_bytes} from {m.first}",
                "use the same region size on every node",
            )

    def _take_lowest(self, device: bytes) -> int:
        """The lowest free region of a device that has one."""
        free = self._free.get(device)
        if free is None:
            d = self.state.devices[device]
            free = self._free[device] = list(range(d.first, d.n_regions))  # sorted is a heap
        while (device, (index := heapq.heappop(free))) in self._by_region:
            pass
        return index

    def alloc(self, key: str, m: P.AllocRegions) -> list[GrantInfo]:
        """Grant free regions, all or none, lowest index first on the first device that has one."""
        member, s = self.member(key), self.state
        if m.op in member.ops:
            return [s.grants[i].info() for i in member.ops[m.op] if i in s.grants]
        if s.hold:
            raise ServerRefused(
                ErrorCode.HOLDING,
                "the directory is new and leases given before may still run",
                "ask again when the hold is over",
                self.settings.silence_ms // 4,
            )
        if m.device and m.device not in s.devices:
            raise ServerRefused(ErrorCode.UNKNOWN_DEVICE, f"device {m.device.hex()} is not known", "add it first")
        devices = [m.device] if m.device else list(s.devices)
        n_free = sum(self._n_free[d] for d in devices)
        if n_free < m.count:
            raise ServerRefused(
                ErrorCode.NO_SPACE,
                f"{m.count} regions asked, {n_free} free on {len(devices)} devices",
                "free regions, wait for a dead node's to be reaped, or add a device",
                self.settings.heartbeat_ms,
            )
        granted: list[Grant] = []
        for device in devices:
            while self._n_free[device] and len(granted) < m.count:
                granted.append(self._grant(member, device, self._take_lowest(device), m.slab_bytes))
        member.ops[m.op] = [g.id for g in granted]
        while len(member.ops) > OPS_REMEMBERED:
            del member.ops[next(iter(member.ops))]
        return [g.info() for g in granted]

    def _token(self) -> int:
        self.state.next_token += 1
        return self.state.next_token

    def _grant(
        self,
        member: Member,
        device: bytes,
        region: int,
        slab_bytes: int,
        *,
        token: int = 0,
        state: GrantState = GrantState.GRANTED,
    ) -> Grant:
        s = self.state
        grant = Grant(
            s.next_grant, device, region, member.node, member.incarnation, token or self._token(), state, slab_bytes
        )  # fmt: skip
        s.next_grant += 1
        s.grants[grant.id] = grant
        self._by_region[device, region] = grant.id
        self._held[member_key(member.node, member.incarnation)].add(grant.id)
        self._n_free[device] -= 1
        self.readable.add(grant.id)
        s.last_token[_region_key(device, region)] = grant.token
        return grant

    def free(self, key: str, regions: list[Region]) -> int:
        """Start draining regions of this node; returns how many. A token that is not current is an old message: no effect."""
        member, n = self.member(key), 0
        for r in regions:
            grant = self.state.grants.get(self._by_region.get((r.device, r.index), 0))
            if grant is not None and grant.node == member.node and grant.token == r.token and grant.state in READABLE:
                self._drain(grant)
                n += 1
        return n

    def _withdraw(self, grant: Grant) -> None:
        """From now on its keys are not found and its holder may not register."""
        self.readable.discard(grant.id)
        self._infos.pop(grant.id, None)
        self._held.get(member_key(grant.node, grant.incarnation), set()).discard(grant.id)

    def _drain(self, grant: Grant) -> None:
        self._withdraw(grant)
        grant.state = GrantState.DRAINING
        self._waiting.add(grant.id)
        self.state.unswept.append(grant.id)

    def _end_grant(self, grant: Grant) -> None:
        s = self.state
        del s.grants[grant.id]
        if grant.state is not GrantState.DRAINING:
            s.unswept.append(grant.id)
        self._withdraw(grant)
        self._waiting.discard(grant.id)
        del self._by_region[grant.device, grant.region]
        self._n_free[grant.device] += 1
        if grant.device in self._free:
            heapq.heappush(self._free[grant.device], grant.region)

    def claim(self, key: str, m: P.ClaimRegions) -> list[ClaimResult]:
        member = self.member(key)
        return [self._claim(member, r, m.slab_bytes) for r in m.regions]

    def _claim(self, member: Member, r: Region, slab_bytes: int) -> ClaimResult:
        s = self.state
        device = s.devices.get(r.device)
        if device is None or not device.first <= r.index < device.n_regions:
            return ClaimResult(ClaimVerdict.LOST)
        grant = s.grants.get(self._by_region.get((r.device, r.index), 0))
        if grant is None:
            return self._claim_free(member, r, slab_bytes)
        if grant.state is GrantState.PROVISIONAL and not self._holds(grant, member) and r.token > grant.token:
            self._end_grant(grant)  # two nodes held it one after the other: the later grant counts
            return self._claim_free(member, r, slab_bytes)
        if grant.node != member.node or grant.token != r.token or grant.state is GrantState.DRAINING:
            return ClaimResult(ClaimVerdict.LOST)
        if grant.state is GrantState.ORPHANED:  # same grant id, so its keys stay where they are
            grant.incarnation, grant.token, grant.state = member.incarnation, self._token(), GrantState.GRANTED
            self._waiting.discard(grant.id)
            self._infos.pop(grant.id, None)
            self._held[member_key(member.node, member.incarnation)].add(grant.id)
            s.last_token[_region_key(r.device, r.index)] = grant.token
        elif not self._holds(grant, member):
            return ClaimResult(ClaimVerdict.WAIT)
        verdict = ClaimVerdict.PROVISIONAL if grant.state is GrantState.PROVISIONAL else ClaimVerdict.GRANTED
        return ClaimResult(verdict, grant.info())

    def _claim_free(self, member: Member, r: Region, slab_bytes: int) -> ClaimResult:
        s = self.state
        if s.last_token.get(_region_key(r.device, r.index), 0) > r.token:
            return ClaimResult(ClaimVerdict.LOST)  # granted to someone else since, even if free again
        if s.hold:
            s.next_token = max(s.next_token, r.token)
            grant = self._grant(member, r.device, r.index, slab_bytes, token=r.token, state=GrantState.PROVISIONAL)
            return ClaimResult(ClaimVerdict.PROVISIONAL, grant.info())
        return ClaimResult(ClaimVerdict.GRANTED, self._grant(member, r.device, r.index, slab_bytes).info())

    def of_other_size(self, ids: set[int], slab_bytes: int) -> set[int]:
        """Those of the grants that stand for slabs of another size; none for the size 0, which says nothing."""
        grants = self.state.grants
        return {i for i in ids if i in grants and grants[i].slab_bytes != slab_bytes} if slab_bytes else set()

    def set_slab_bytes(self, ids: set[int], slab_bytes: int) -> None:
        for i in ids:
            if (grant := self.state.grants.get(i)) is not None:
                grant.slab_bytes = slab_bytes
                self._infos.pop(i, None)

    # --- time ------------------------------------------------------------------------------------------------------------
    def due(self, observer: Observer, beats: Mapping[str, int], now_ns: int, readers: Callable[[int], bool] | None) -> Due:
        """What this process has seen unchanged for long enough.

        ``beats``: member → heartbeat count. ``readers(grant)``: whether a pin holds the grant; None where only time can tell.
        """
        s, t, due, facts = self.state, self.settings, Due(), set[object]()

        def age(fact: object, value: object = None) -> int:
            facts.add(fact)
            return observer.unchanged_ms(fact, value, now_ns)

        due.hold_over = s.hold and age(("hold", s.epoch)) >= t.silence_ms
        for key in s.members:
            count = beats.get(key, 0)
            if age(("member", s.epoch, key), count) >= t.silence_ms:
                due.dead[key] = count
        for i in self._waiting:
            grant = s.grants[i]
            if grant.state is GrantState.ORPHANED and age(("orphan", s.epoch, grant.id), grant.token) >= t.reap_ms:
                due.reap.append(grant.id)
            elif grant.state is GrantState.DRAINING:
                waited = age(("drain", s.epoch, grant.id))
                if waited > t.max_pin_ms + t.grace_ms or (readers is not None and not readers(grant.id)):
                    due.drained.append(grant.id)
        observer.keep(facts)
        return due

    def apply(self, due: Due) -> list[str]:
        """Apply what is due; returns the members that ended."""
        s = self.state
        if due.hold_over:
            s.hold = False
            for grant in s.grants.values():
                if grant.state is GrantState.PROVISIONAL:
                    grant.state = GrantState.GRANTED
                    self._infos.pop(grant.id, None)
        ended = [key for key in due.dead if self.end_member(key)]
        for i in due.reap:
            if (orphan := s.grants.get(i)) is not None and orphan.state is GrantState.ORPHANED:
                self._drain(orphan)
        for i in due.drained:
            if (drained := s.grants.get(i)) is not None and drained.state is GrantState.DRAINING:
                self._end_grant(drained)
        return ended

    # --- views -----------------------------------------------------------------------------------------------------------
    def writable_ids(self, key: str) -> set[int]:
        """Grants whose places this member may register; not to be changed by the caller."""
        self.member(key)
        return self._held[key]

    def infos(self, ids: set[int]) -> list[GrantInfo]:
        """What grant ids stand for; ids that have ended are left out."""
        found = []
        for i in ids:
            info = self._infos.get(i)
            if info is None:
                if (grant := self.state.grants.get(i)) is None:
                    continue
                info = self._infos[i] = grant.info()
            found.append(info)
        return found

    def nodes(self, keys_of: Callable[[int], int], silent_ms: Callable[[str], int]) -> list[P.NodeInfo]:
        out = []
        for key, m in self.state.members.items():
            mine = self._held[key]
            out.append(P.NodeInfo(m.node, m.incarnation, m.state, m.label, len(mine), sum(map(keys_of, mine)), silent_ms(key)))
        return out

    def regions(self, keys_of: Callable[[int], int]) -> list[P.RegionInfo]:
        return [
            P.RegionInfo(
                g.device.hex(),
                g.region,
                g.state.value,
                g.node,
                g.incarnation,
                g.token,
                keys_of(g.id),
                keys_of(g.id) * g.slab_bytes,
            )
            for g in sorted(self.state.grants.values(), key=lambda g: (g.device, g.region))
        ]

    def usage(self, keys_of: Callable[[int], int]) -> list[P.UsageRow]:
        devices: dict[bytes, list[Grant]] = {d: [] for d in self.state.devices}
        nodes: dict[str, list[Grant]] = {m.node: [] for m in self.state.members.values()}
        for grant in self.state.grants.values():
            devices[grant.device].append(grant)
            nodes.setdefault(grant.node, []).append(grant)
        rows = []
        for device, grants in devices.items():
            d = self.state.devices[device]
            rows.append(self._usage_row("device", device.hex(), grants, keys_of, (d.n_regions - d.first) * d.region_bytes))
        for node, grants in sorted(nodes.items()):
            capacity = sum(self.state.devices[g.device].region_bytes for g in grants)
            rows.append(self._usage_row("node", node, grants, keys_of, capacity))
        return rows

    @staticmethod
    def _usage_row(kind: str, name: str, grants: list[Grant], keys_of: Callable[[int], int], capacity: int) -> P.UsageRow:
        keys = {g.id: keys_of(g.id) for g in grants if g.state in READABLE}
        used = sum(keys.get(g.id, 0) * g.slab_bytes for g in grants)
        return P.UsageRow(kind, name, len(grants), sum(keys.values()), used, capacity)
