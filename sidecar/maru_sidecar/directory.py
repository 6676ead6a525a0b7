"""The directory: which chunks the pool holds, who uses them, and what goes when room is needed.

Thread-safe by one lock. Every call costs O(keys it is given); none does I/O or copies data under the lock. Slab state on the
mapping changes together with the index: nothing is in the index before it is COMMITTED, nothing is reused while pinned.

A chunk is *pinned* by leases, copies (:class:`Acquired`), children being written, and operators. A chunk with a child in the
pool is never evicted: a prefix hit needs every chunk before it, so a parent that left first would strand its children.

Here chunks are found, leased, copied from and stored. What operators do is ``directory_admin.py``'s matter, what the nodes of a
shared pool do ``shared_regions.py``'s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from maru_shm import poolformat as F
from maru_shm.errors import PoolError, PoolFull
from maru_shm.layout import KEY_BYTES
from maru_sidecar import recovery
from maru_sidecar.chunk_index import Chunk, Namespace
from maru_sidecar.directory_admin import DirectoryAdmin
from maru_sidecar.directory_view import Counts
from maru_sidecar.eviction import AdmissionPolicy, AdmitAll, EvictionPolicy, LeastRecentlyUsed, Watermarks
from maru_sidecar.holdings import Holdings
from maru_sidecar.leases import Lease, LeaseTable
from maru_sidecar.pool import PoolFile
from maru_sidecar.recovery import RebuildReport
from maru_sidecar.regions import RegionTable
from maru_sidecar.room import RoomMaker
from maru_sidecar.shared_regions import SharedRegions
from maru_sidecar.sharing.rights import WriteRights
from maru_sidecar.slab_handles import Acquired, PoolEvents, Presence, Reservation, SlabRef
from maru_sidecar.slab_header import SlabHeader
from maru_sidecar.slab_reader import SlabReader


class Directory:
    """The index of one pool. Call :meth:`rebuild` once, before anything else, to take over what the pool holds.

    ``quotas`` maps a namespace to its limit in bytes of slabs; ``default_quota`` holds for the others, 0 = none.
    """

    def __init__(
        self,
        pool: PoolFile,
        *,
        watermarks: Watermarks | None = None,
        quotas: Mapping[bytes, int] | None = None,
        default_quota: int = 0,
        eviction: Callable[[], EvictionPolicy] = LeastRecentlyUsed,
        admission: AdmissionPolicy | None = None,
        rights: WriteRights | None = None,
        mine: Iterable[int] | None = None,
        events: PoolEvents | None = None,
    ) -> None:
        """``rights``, ``mine``, ``events``: of a shared pool, see ``regions.RegionTable`` and ``slab_handles.PoolEvents``."""
        self._pool = pool
        self._lock = threading.Lock()
        self._regions = RegionTable(pool, rights, mine)
        self._slabs = self._regions.slabs
        self._reader = SlabReader(pool)
        self._events = events
        self._held = Holdings(self._regions, eviction, events.removed if events is not None else None)
        self._room = RoomMaker(self._held, watermarks or Watermarks(), quotas or {}, default_quota)
        self.shared = SharedRegions(self._lock, self._regions, self._held)
        self._admission = admission or AdmitAll()
        self._leases = LeaseTable()
        self._counts = Counts()
        self.admin = DirectoryAdmin(self._lock, self._held, self._room, self._leases, self._counts)

    # --- start ------------------------------------------------------------------------------------------------------
    def rebuild(self) -> RebuildReport:
        """Read every slab header and index what is sound (``recovery.py``); after an unclean reboot also checks the data."""
        with self._lock:
            found = recovery.recover(self._pool, self._regions)
            now, wall = time.monotonic_ns(), time.time_ns()
            owners: dict[int, list[tuple[int, object]]] = {}
            for slab, header in found.slabs:
                ns = self._held.namespace(header.namespace, header.world)
                chunk = self._held.index(ns, header, slab, used=now - max(0, wall - header.created_ns))
                if header.pins > chunk.admin_pins:  # of any rank: they are stored one by one
                    self._held.restore_pins(chunk, header.pins)
                self._held.account(ns, slab)
                owners.setdefault(self._regions.region_of(slab).index, []).append((slab, chunk))
            for region in self._regions.regions():
                self._regions.adopt_scanned(region, owners.get(region.index, []))
            self._held.offer_all()
            self._counts.rebuild = found.report
        self._pool.contents_checked()
        return found.report

    # --- reading ----------------------------------------------------------------------------------------------------
    def lookup(self, namespace: bytes, keys: bytes, *, world: int) -> int:
        """How many leading keys (n × 16 bytes) are present on all ``world`` ranks; they count as used now."""
        with self._lock:
            return len(self._leading(namespace, keys, world))

    def lease(self, namespace: bytes, keys: bytes, *, world: int, ttl_s: float, owner: Hashable) -> Lease | None:
        """:meth:`lookup`, and pin the hit for ``ttl_s`` seconds; None if nothing is there."""
        with self._lock:
            return self._lease(self._leading(namespace, keys, world), owner, ttl_s)

    def lease_located(
        self, namespace: bytes, keys: bytes, *, world: int, nbytes: int, ttl_s: float, owner: Hashable
    ) -> tuple[Lease | None, npt.NDArray[np.uint64]]:
        """:meth:`lease`, and where the leased slabs lie: shape (chunks × ranks, 2), each (data offset in the pool, state word).
        ``nbytes``: of each slab.

        A claimed hit cannot be taken back, so it ends before a slab that no reader would accept; the index of a node that was
        cut off or stopped may be stale. And all are zeros where one lies in a region that may not be written now: its next
        owner could lay it out again before the slabs are read.

        One call, under one hold of the lock: :meth:`drop` takes a leased chunk out of the index too.
        """
        with self._lock:
            chunks = self._leading(namespace, keys, world)
            slabs = [slab for chunk in chunks for slab in chunk.slabs]
            summed = [chunk.summed >> rank & 1 == 1 for chunk in chunks for rank in range(world)]
            refs = self._reader.leading_located(slabs, summed, namespace, keys, world=world, nbytes=nbytes)
            n, rank = divmod(len(refs), world)
            if n < len(chunks):
                self._drop(chunks[n], chunks[n].slabs[rank])
                chunks, refs = chunks[:n], refs[: n * world]
            if not self._slabs.may_write(slabs[: len(refs)]):
                refs[:] = 0
            return self._lease(chunks, owner, ttl_s), refs

    def _lease(self, chunks: list[Chunk], owner: Hashable, ttl_s: float) -> Lease | None:
        if not chunks:
            return None
        for chunk in chunks:
            self._held.pin(chunk)
        return self._leases.grant(chunks, owner, time.monotonic_ns() + int(ttl_s * 1e9))

    def release(self, lease_id: int) -> None:
        """End a lease; an unknown or ended one is ignored."""
        with self._lock:
            for chunk in self._leases.end(lease_id):
                self._held.unpin(chunk)

    def release_owner(self, owner: Hashable) -> int:
        """End every lease of ``owner``; returns how many."""
        with self._lock:
            ids = self._leases.of_owner(owner)
            for lease_id in ids:
                for chunk in self._leases.end(lease_id):
                    self._held.unpin(chunk)
            return len(ids)

    def holds_leases(self, owner: Hashable) -> bool:
        """Whether a lease of ``owner`` has neither ended nor, at the last :meth:`expire`, run out."""
        with self._lock:
            return bool(self._leases.of_owner(owner))

    def expire(self, now_ns: int) -> int:
        """End the leases whose deadline (CLOCK_MONOTONIC ns) has passed; returns how many."""
        with self._lock:
            ids = self._leases.expired(now_ns)
            for lease_id in ids:
                for chunk in self._leases.end(lease_id):
                    self._held.unpin(chunk)
            self._counts.leases_expired += len(ids)
            return len(ids)

    def acquire(self, namespace: bytes, keys: bytes, *, rank: int) -> Acquired:
        """Pin ``rank``'s slabs of the leading keys that have one, for a copy."""
        refs: list[SlabRef] = []
        chunks: list[Chunk] = []
        with self._lock:
            ns = self._held.namespaces.get(namespace)
            if ns is None or not 0 <= rank < ns.world:
                return Acquired(chunks, refs, self._end_copies)
            regions, slabs, get = self._regions, self._slabs, ns.chunks.get
            for i in range(0, len(keys), KEY_BYTES):
                chunk = get(keys[i : i + KEY_BYTES])
                if chunk is None or not chunk.slabs[rank]:
                    break
                slab = chunk.slabs[rank]
                summed = chunk.summed >> rank & 1 == 1
                refs.append(SlabRef(regions.data_offset(slab), slabs.state_word(slab), slab, summed))
                chunks.append(chunk)
            for chunk in chunks:
                self._held.pin(chunk)
            self._counts.copying += len(chunks)
        return Acquired(chunks, refs, self._end_copies)

    def _end_copies(self, chunks: list[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self._held.unpin(chunk)
            self._counts.copying -= len(chunks)

    def _leading(self, namespace: bytes, keys: bytes, world: int) -> list[Chunk]:
        counts = self._counts
        counts.lookups += 1
        counts.chunks_asked += len(keys) // KEY_BYTES
        ns = self._held.namespaces.get(namespace)
        hits: list[Chunk] = []
        if ns is None or ns.world != world:
            return hits
        get, now = ns.chunks.get, time.monotonic_ns()
        for i in range(0, len(keys), KEY_BYTES):
            chunk = get(keys[i : i + KEY_BYTES])
            if chunk is None or chunk.missing:
                break
            chunk.used = now
            hits.append(chunk)
        counts.chunks_hit += len(hits)
        return hits

    # --- writing ----------------------------------------------------------------------------------------------------
    def reserve(
        self,
        namespace: bytes,
        key: bytes,
        *,
        parent: bytes,
        rank: int,
        world: int,
        depth: int,
        tokens: int,
        nbytes: int,
    ) -> Reservation | Presence:
        """A slab of ``nbytes`` for ``rank``'s part of chunk ``key``, evicting as the watermarks and quotas say.

        Raises :class:`PoolFull` if nothing may be evicted, :class:`PoolError` for a chunk that fits in no region or contradicts
        the namespace's world size.
        """
        lengths = {len(namespace), len(key), len(parent)}
        if lengths != {KEY_BYTES} or not 0 <= rank < world or nbytes <= 0:
            raise PoolError(f"chunk of {nbytes} bytes, rank {rank} of {world}", "keys are 16 bytes and rank is below world")
        stride = F.slab_stride(nbytes)
        header = SlabHeader(namespace, key, parent, rank, world, nbytes, None, tokens, time.time_ns(), depth)
        with self._lock:
            self._regions.size_class(stride)
            ns = self._held.namespace(namespace, world)
            chunk = ns.chunks.get(key)
            if chunk is not None and chunk.slabs[rank]:
                chunk.used = time.monotonic_ns()
                return Presence.PRESENT
            if (key, rank) in ns.pending:
                return Presence.PENDING
            if not self._admission.admit(namespace, key, depth=depth, tokens=tokens, nbytes=nbytes):
                self._counts.declined += 1
                self._held.prune(ns)
                return Presence.DECLINED
            # Neither the parent nor this chunk's other ranks may go to make room for this slab, nor before it is committed.
            needed = [c for c in (ns.chunks.get(parent), chunk) if c is not None]
            for c in needed:
                self._held.pin(c)
            ns.pending[key, rank] = None
            growing = self._events is not None and self._events.growing()
            try:
                slab = self._room.take(ns, stride, evict=not growing)
            except PoolError as e:
                if growing and isinstance(e, PoolFull):
                    self._end_pending(ns, header, needed)
                    return Presence.PENDING
                self._counts.full += isinstance(e, PoolFull)
                self._end_pending(ns, header, needed)
                self._tell_if_low(stride)
                raise
            self._tell_if_low(stride)
            try:
                self._slabs.begin_write(slab)
            except BaseException:
                self._regions.free(slab)
                self._end_pending(ns, header, needed)
                raise
            self._held.account(ns, slab)
            self._held.writing += 1
            at = self._regions.data_offset(slab)
            reservation = Reservation(ns, header, needed, slab, at, commit=self._commit, give_back=self._abort)
            self._regions.set_owner(slab, reservation)
            ns.pending[key, rank] = reservation
            return reservation

    def guard(self, reservations: Iterable[Reservation]) -> Callable[[], None] | None:
        """What raises :class:`~maru_shm.errors.RegionNotHeld` once one of these may not be written any more; None in a pool of
        one's own.
        """
        return self._slabs.guard(r.slab for r in reservations)

    def _tell_if_low(self, stride: int) -> None:
        if self._events is not None and not self._regions.free_regions:
            self._events.low(stride)

    def _commit(self, r: Reservation, checksum: int | None) -> None:
        r.header = r.header._replace(checksum=checksum)
        try:
            self._slabs.write_header(r.slab, r.header)
            self._publish(r)
        except BaseException:  # a slab left in WRITING would be lost, and its key PENDING, until a restart
            self._abort(r)
            raise

    def _publish(self, r: Reservation) -> None:
        with self._lock:
            self._slabs.publish(r.slab)
            chunk = self._held.index(r.namespace, r.header, r.slab, used=time.monotonic_ns())
            self._held.writing -= 1
            self._counts.stored += 1
            self._regions.set_owner(r.slab, chunk)
            self._held.offer(chunk)
            self._end_pending(r.namespace, r.header, r.needed)
            if self._events is not None:
                self._events.committed(
                    r.header.namespace, r.header.key, r.header.rank, region=self._regions.region_of(r.slab).index,
                    number=self._regions.number(r.slab), generation=self._slabs.state_word(r.slab) >> 8,
                )  # fmt: skip

    def _abort(self, r: Reservation) -> None:
        with self._lock:
            self._held.writing -= 1
            self._counts.aborted += 1
            self._held.free_slab(r.namespace, r.slab)
            self._end_pending(r.namespace, r.header, r.needed)

    def _end_pending(self, ns: Namespace, header: SlabHeader, needed: list[Chunk]) -> None:
        del ns.pending[header.key, header.rank]
        for chunk in needed:
            self._held.unpin(chunk)
        self._held.prune(ns)

    # --- bad slabs --------------------------------------------------------------------------------------------------
    def drop(self, namespace: bytes, key: bytes, rank: int, *, slab: int = 0) -> bool:
        """Take a chunk with a bad slab out at once, all ranks; whoever copies from it keeps the memory until done.

        False if it is not there. ``rank`` names the bad slab; without it the others are of no use. ``slab``: the offset of its
        header, where a newer slab may have taken its place since; 0: any.
        """
        with self._lock:
            ns = self._held.namespaces.get(namespace)
            chunk = ns.chunks.get(key) if ns is not None else None
            if chunk is None or not 0 <= rank < len(chunk.slabs) or not chunk.slabs[rank]:
                return False
            if slab not in (0, chunk.slabs[rank]):
                return False
            self._drop(chunk, chunk.slabs[rank])
            return True

    def _drop(self, chunk: Chunk, slab: int) -> None:
        self._held.remove(chunk)
        self._regions.format.mend(self._regions.region_of(slab))
        self._counts.dropped_bad += 1
