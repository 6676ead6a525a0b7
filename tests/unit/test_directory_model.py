"""The directory against a model a few lines long: any sequence of calls, checked against what may be true of it.

The model does not predict *which* chunk is evicted, only what must never happen: a hit on what was not committed, wrong
bytes, the loss of something pinned, a parent leaving before its child, a slab with two owners, a slab lost.
"""

from __future__ import annotations

from collections import Counter

import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule
from tests.support.pool_cases import KEY, NAMESPACE, ROOT, contents, key, reserve, temporary_pool

from maru_shm.errors import PoolFull
from maru_shm.poolformat import SlabState
from maru_sidecar.chunk_index import Chunk
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.slab_handles import Acquired, Presence, Reservation

REGION = 64 << 10
N_REGIONS = 3
SIZES = (4096, 9000, 30_000)  #: bytes; 14, 5 and 1 slab a region: they compete for regions
WORLD = 2
PATHS, DEPTH = 4, 5

#: prefix p, depth d → key; the first two chunks are common to all, as a system prompt is
TREE = {(p, d): key(f"shared/{d}" if d < 2 else f"{p}/{d}") for p in range(PATHS) for d in range(DEPTH)}
NAMESPACES = [NAMESPACE[:-1] + bytes([48 + i]) for i in range(len(SIZES))]

namespaces = st.integers(0, len(SIZES) - 1)
paths = st.integers(0, PATHS - 1)
depths = st.integers(0, DEPTH - 1)
ranks = st.integers(0, WORLD - 1)

Name = tuple[int, bytes, int]  #: (namespace, key, rank)


def prefix(p: int) -> bytes:
    return b"".join(TREE[p, d] for d in range(DEPTH))


class DirectoryMachine(RuleBasedStateMachine):
    writing: Bundle[Name] = Bundle("writing")
    leases: Bundle[int] = Bundle("leases")
    copies: Bundle[Acquired] = Bundle("copies")

    @initialize()
    def open_pool(self) -> None:
        self.manager = temporary_pool(N_REGIONS, REGION)
        self.pool: PoolFile = self.manager.__enter__()
        self.directory = Directory(self.pool)
        self.directory.rebuild()
        self.committed: set[Name] = set()  #: and not seen to be gone since
        self.reservations: dict[Name, Reservation] = {}
        self.pinned: dict[object, set[tuple[int, bytes]]] = {}  #: lease or copy → chunks that may not go
        self.operators: Counter[tuple[int, bytes]] = Counter()  #: their pins
        self.before: dict[tuple[int, bytes], bytes] = {}  #: chunks present after the last rule, and their parents
        self.may_vanish: set[tuple[int, bytes]] = set()  #: dropped in this rule

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.pool.close(clean=False)
            self.manager.__exit__(None, None, None)

    # --- what engines do ---
    @rule(target=writing, n=namespaces, p=paths, d=depths, rank=ranks)
    def reserve(self, n: int, p: int, d: int, rank: int) -> object:
        k = TREE[p, d]
        name = (n, k, rank)
        try:
            got = reserve(
                self.directory, k, parent=TREE[p, d - 1] if d else ROOT, depth=d, rank=rank, world=WORLD, nbytes=SIZES[n],
                namespace=NAMESPACES[n],
            )  # fmt: skip
        except PoolFull:
            return multiple()
        assert (got is Presence.PENDING) == (name in self.reservations)
        if not isinstance(got, Reservation):
            assert got is Presence.PENDING or name in self.committed
            return multiple()
        self.pool.bytes[got.offset : got.offset + SIZES[n]] = contents(k, rank, SIZES[n])
        self.reservations[name] = got
        return name

    @rule(n=namespaces, p=paths, length=st.integers(1, DEPTH))
    def store_prefix(self, n: int, p: int, length: int) -> None:
        """A whole prefix on all ranks, as a finished prompt is stored: this is what fills the pool."""
        for d in range(length):
            for rank in range(WORLD):
                name = self.reserve(n, p, d, rank)
                if isinstance(name, tuple):
                    self.end_store(name, commit=True)
                    self.no_parent_leaves_before_its_child()

    @rule(name=consumes(writing), commit=st.booleans())
    def end_store(self, name: Name, *, commit: bool) -> None:
        reservation = self.reservations.pop(name, None)
        if reservation is None:  # its sidecar has died
            return
        n, k, rank = name
        if commit:
            reservation.commit(xxhash.xxh3_64_intdigest(contents(k, rank, SIZES[n])))
            self.committed.add(name)
            assert name in self.present()
        else:
            reservation.abort()

    @rule(n=namespaces, p=paths, skip=depths)
    def lookup(self, n: int, p: int, skip: int) -> None:
        hits = self.directory.lookup(NAMESPACES[n], prefix(p)[skip * KEY :], world=WORLD)
        assert {(n, TREE[p, skip + d], rank) for d in range(hits) for rank in range(WORLD)} <= self.committed

    @rule(target=leases, n=namespaces, p=paths, owner=st.integers(0, 1))
    def lease(self, n: int, p: int, owner: int) -> object:
        lease = self.directory.lease(NAMESPACES[n], prefix(p), world=WORLD, ttl_s=3600, owner=owner)
        if lease is None:
            return multiple()
        self.pinned[owner, lease.id] = {(n, TREE[p, d]) for d in range(lease.n)}
        return lease.id

    @rule(lease_id=leases)
    def release(self, lease_id: int) -> None:
        self.directory.release(lease_id)
        self.pinned = {token: names for token, names in self.pinned.items() if token not in ((0, lease_id), (1, lease_id))}

    @rule(owner=st.integers(0, 1))
    def owner_dies(self, owner: int) -> None:
        mine = {token for token in self.pinned if isinstance(token, tuple) and token[0] == owner}
        assert self.directory.release_owner(owner) == len(mine)
        for token in mine:
            del self.pinned[token]

    @rule(target=copies, n=namespaces, p=paths, rank=ranks)
    def begin_copy(self, n: int, p: int, rank: int) -> object:
        acquired = self.directory.acquire(NAMESPACES[n], prefix(p), rank=rank)
        self.pinned[acquired] = {(n, TREE[p, d]) for d in range(acquired.n_found)}
        for d, ref in enumerate(acquired.refs):
            assert bytes(self.pool.bytes[ref.offset : ref.offset + SIZES[n]]) == contents(TREE[p, d], rank, SIZES[n])
        return acquired

    @rule(acquired=copies)
    def end_copy(self, acquired: Acquired) -> None:
        if acquired in self.pinned:  # not reused meanwhile, whatever happened, drops included
            for ref in acquired.refs:
                now = self.pool.words[ref.header >> 3]
                assert now >> 8 == ref.state_word >> 8
                assert now & 0xFF in (SlabState.COMMITTED, SlabState.EVICTING)
            del self.pinned[acquired]
            acquired.release()

    # --- what operators and accidents do ---
    @rule(n=namespaces, p=paths, d=depths, rank=ranks)
    def drop(self, n: int, p: int, d: int, rank: int) -> None:
        name = (n, TREE[p, d])
        if self.directory.drop(NAMESPACES[n], name[1], rank):
            self.may_vanish.add(name)
            self.operators.pop(name, None)
            for names in self.pinned.values():
                names.discard(name)

    @rule(acquired=copies)
    def checksum_fails(self, acquired: Acquired) -> None:
        """A reader finds its last slab bad: it is dropped while this copy, and maybe others, still hold it."""
        if acquired in self.pinned and acquired.refs:
            chunk = acquired._chunks[-1]
            n = NAMESPACES.index(chunk.namespace.id)
            if (n, chunk.key) in self.pinned[acquired]:
                path, depth = next(at for at, k in TREE.items() if k == chunk.key)
                self.drop(n, path, depth, next(rank for rank, slab in enumerate(chunk.slabs) if slab))

    @rule(n=namespaces, p=paths, length=st.integers(1, DEPTH), pinned=st.booleans())
    def operator_pins(self, n: int, p: int, length: int, *, pinned: bool) -> None:
        done, bare = self.directory.admin.pin(NAMESPACES[n], prefix(p)[: length * KEY], pinned=pinned)
        names = [(n, TREE[p, d]) for d in range(done)]
        assert bare == (0 if pinned else sum(not self.operators[name] for name in names))
        for name in names:
            self.operators[name] = max(0, self.operators[name] + (1 if pinned else -1))

    @rule(n=st.none() | namespaces)
    def clear(self, n: int | None) -> None:
        self.directory.admin.clear(None if n is None else NAMESPACES[n])

    @precondition(lambda self: self.committed)
    @rule()
    def sidecar_is_killed(self) -> None:
        """Leases, copies and half-written slabs go; what was committed stays, and so do operators' pins."""
        before = self.present()
        n_writing = len(self.reservations)
        self.pool.close(clean=False)
        self.pool = PoolFile.open(self.pool.spec)
        self.directory = Directory(self.pool)
        report = self.directory.rebuild()
        assert self.present() == before
        assert (report.kept, report.dropped_writing) == (len(before), n_writing)
        assert (report.dropped_corrupt, report.dropped_duplicate, report.corrupt_regions) == (0, 0, 0)
        self.reservations.clear()
        self.pinned.clear()

    # --- what is true after every step ---
    def chunks(self) -> list[tuple[int, Chunk]]:
        found = self.directory._held.namespaces
        return [(n, c) for n, name in enumerate(NAMESPACES) if name in found for c in found[name].chunks.values()]

    def present(self) -> set[Name]:
        return {(n, chunk.key, rank) for n, chunk in self.chunks() for rank, slab in enumerate(chunk.slabs) if slab}

    @invariant()
    def only_what_was_committed_is_present_and_what_is_pinned_is(self) -> None:
        present = self.present()
        assert present <= self.committed
        self.committed = present
        there = {(n, k) for n, k, _ in present}
        for names in self.pinned.values():
            assert names <= there
        assert set(+self.operators) <= there
        assert Counter({(n, chunk.key): chunk.admin_pins for n, chunk in self.chunks()}) == self.operators

    @invariant()
    def no_parent_leaves_before_its_child(self) -> None:
        now = {(n, chunk.key): chunk.parent for n, chunk in self.chunks()}
        gone = set(self.before) - set(now) - self.may_vanish
        orphaned = {name for name in set(now) & set(self.before) if (name[0], self.before[name]) in gone}
        assert not orphaned
        self.before = now
        self.may_vanish = set()

    @invariant()
    def every_slab_is_free_or_has_one_owner_and_the_mapping_agrees(self) -> None:
        committed = [slab for _, chunk in self.chunks() for slab in chunk.slabs if slab]
        writing = [r.slab for r in self.reservations.values()]
        assert len({*committed, *writing}) == len(committed) + len(writing)
        assert all(self.pool.bytes[slab] == SlabState.COMMITTED for slab in committed)
        assert all(self.pool.bytes[slab] == SlabState.WRITING for slab in writing)
        stats = self.directory.admin.stats()
        used = [region for region in self.directory._regions.regions() if region.used]
        assert (stats["slabs_committed"], stats["slabs_writing"]) == (len(committed), len(writing))
        counted = sum(int(str(stats[f"slabs_{state}"])) for state in ("committed", "writing", "free", "evicting"))
        assert counted == sum(region.n_slabs for region in used)
        assert stats["regions_free"] == N_REGIONS - len(used)

    @invariant()
    def children_are_linked_and_whatever_may_go_is_known_to_the_policy(self) -> None:
        linked: dict[tuple[int, bytes], set[bytes]] = {}
        for n, chunk in self.chunks():
            linked.setdefault((n, chunk.parent), set()).add(chunk.key)
        for n, chunk in self.chunks():
            assert {child.key for child in chunk.child_list()} == linked.get((n, chunk.key), set())
            assert chunk.queued or not chunk.evictable

    @invariant()
    def the_bytes_of_every_chunk_are_its_own(self) -> None:
        for n, chunk in self.chunks():
            for rank, slab in enumerate(chunk.slabs):
                if slab:
                    at = self.directory._regions.data_offset(slab)
                    assert bytes(self.pool.bytes[at : at + SIZES[n]]) == contents(chunk.key, rank, SIZES[n])


TestDirectoryModel = DirectoryMachine.TestCase
TestDirectoryModel.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)  # fmt: skip
