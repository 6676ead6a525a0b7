"""The directory: which chunks the pool holds, who uses them, and what goes when room is needed.

Thread-safe by one lock. Every call costs O(keys it is given); none does I/O or copies data under the lock. Slab state on the
mapping changes together with the index: nothing is in the index before it is COMMITTED, nothing is reused while pinned.

A chunk is *pinned* by leases, copies (:class:`Acquired`), children being written, and operators. A chunk with a child in the
pool is never evicted: a prefix hit needs every chunk before it, so a parent that left first would strand its children.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from maru_shm import poolformat as F
from maru_shm.errors import PoolError, PoolFull
from maru_shm.layout import KEY_BYTES
from maru_shm.messages import ChunkInfo
from maru_sidecar import directory_view as view
from maru_sidecar import recovery
from maru_sidecar.chunk_index import Chunk, Namespace
from maru_sidecar.eviction import AdmissionPolicy, AdmitAll, EvictionPolicy, LeastRecentlyUsed, Watermarks
from maru_sidecar.holdings import Holdings
from maru_sidecar.leases import Lease, LeaseTable
from maru_sidecar.pool import PoolFile
from maru_sidecar.recovery import RebuildReport
from maru_sidecar.regions import RegionTable
from maru_sidecar.room import RoomMaker
from maru_sidecar.shared_regions import SharedRegions
from maru_sidecar.sharing.rights import WriteRights
from maru_sidecar.slab_header import SlabHeader

_CLEAR_BATCH = 256  #: chunks evicted per hold of the lock in clear(): about 1 ms
_COUNTERS = (
    "lookups",
    "chunks_asked",
    "chunks_hit",
    "stored",  #: slabs
    "aborted",  #: slabs
    "cleared",
    "dropped_bad",
    "full",  #: reservations refused for want of room
    "declined",
    "leases_expired",
)


class Presence(enum.Enum):
    """Why :meth:`Directory.reserve` gave no slab; in each case the caller stores nothing."""

    PRESENT = "present"  #: this rank's slab is committed
    PENDING = "pending"  #: somebody is writing it now, or room for it is on its way: ask again
    DECLINED = "declined"  #: the admission policy does not want it


class SlabRef(NamedTuple):
    """A slab's data offset (bytes from the pool's start), its state word when it was looked up, its header's offset.

    ``checksummed``: a checksum was stored with it, so a header without one is not its.
    """

    offset: int
    state_word: int
    header: int = 0
    checksummed: bool = False


class PoolEvents(Protocol):
    """Who shares the pool hears of changes. Called under the directory's lock: note it and return."""

    def committed(self, namespace: bytes, key: bytes, rank: int, *, region: int, number: int, generation: int) -> None: ...

    def removed(self, namespace: bytes, key: bytes, ranks: list[int]) -> None:
        """The chunk's slabs are about to be reused."""
        ...

    def low(self, stride: int) -> None:
        """The last empty region is in use; ``stride`` bytes were asked for."""
        ...

    def growing(self) -> bool:
        """Whether another region may be here in a moment: waiting for it is better than evicting."""
        ...


class Acquired:
    """Slabs pinned for a copy: ``refs[i]`` belongs to key ``i``; leading keys only. Also a context manager."""

    __slots__ = ("_chunks", "_directory", "refs")

    def __init__(self, directory: Directory, chunks: list[Chunk], refs: list[SlabRef]) -> None:
        self._directory = directory
        self._chunks = chunks
        self.refs = refs

    @property
    def n_found(self) -> int:
        return len(self.refs)

    def release(self) -> None:
        """Unpin (idempotent). No copy may touch the slabs afterwards."""
        chunks, self._chunks = self._chunks, []
        self._directory._end_copies(chunks)

    def __enter__(self) -> Acquired:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation:
    """A slab in WRITING state that one writer owns. End it once, by :meth:`commit` or :meth:`abort`."""

    __slots__ = ("_directory", "_ended", "_header", "_namespace", "_needed", "_slab", "offset")

    def __init__(self, directory: Directory, ns: Namespace, header: SlabHeader, needed: list[Chunk], slab: int) -> None:
        self._directory = directory
        self._namespace = ns
        self._header = header
        self._needed = needed  #: chunks pinned until the end
        self._slab = slab
        self._ended = False
        self.offset = 0  #: of the data, bytes from the pool's start

    def commit(self, checksum: int | None) -> None:
        """The data is there: publish it. ``checksum``: xxh3-64 of the data, None if not taken.

        Whatever this raises, the slab has been given back.
        """
        self._end()
        self._directory._commit(self, checksum)

    def abort(self) -> None:
        """Give the slab back (no effect once ended). No copy may write to it afterwards."""
        if not self._ended:
            self._end()
            self._directory._abort(self)

    def _end(self) -> None:
        if self._ended:
            raise PoolError("this reservation has ended", "commit or abort it once")
        self._ended = True


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
        """``rights``, ``mine``, ``events``: of a shared pool, see ``regions.RegionTable`` and :class:`PoolEvents`."""
        self._pool = pool
        self._lock = threading.Lock()
        self._regions = RegionTable(pool, rights, mine)
        self._events = events
        self._held = Holdings(self._regions, eviction, events.removed if events is not None else None)
        self._room = RoomMaker(self._held, watermarks or Watermarks(), quotas or {}, default_quota)
        self.shared = SharedRegions(self._lock, self._regions, self._held)
        self._admission = admission or AdmitAll()
        self._leases = LeaseTable()
        self._report = RebuildReport()
        self._copies = 0  #: slabs of all Acquired not yet released
        self._counts = dict.fromkeys(_COUNTERS, 0)

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
                self._held.account(ns, slab)
                owners.setdefault(self._regions.region_of(slab).index, []).append((slab, chunk))
            for region in self._regions.regions():
                self._regions.adopt_scanned(region, owners.get(region.index, []))
            self._held.offer_all()
            self._report = found.report
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
        self, namespace: bytes, keys: bytes, *, world: int, ttl_s: float, owner: Hashable
    ) -> tuple[Lease | None, npt.NDArray[np.uint64]]:
        """:meth:`lease`, and where the leased slabs lie: shape (chunks × ranks, 2), each (data offset in the pool, state word).

        One call, under one hold of the lock: :meth:`drop` takes a leased chunk out of the index too.
        """
        with self._lock:
            chunks, regions = self._leading(namespace, keys, world), self._regions
            refs = [(regions.data_offset(slab), regions.state_word(slab)) for chunk in chunks for slab in chunk.slabs]
            found = np.array(refs, np.uint64).reshape(-1, 2)
            bad = np.flatnonzero(found[:, 1] & 0xFF != F.SlabState.COMMITTED)
            if len(bad):  # a claimed hit cannot be taken back: it ends before what no reader would accept
                n = int(bad[0]) // world
                self._drop(chunks[n], chunks[n].slabs[int(bad[0]) % world])
                chunks, found = chunks[:n], found[: n * world]
            return self._lease(chunks, owner, ttl_s), found

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
            self._counts["leases_expired"] += len(ids)
            return len(ids)

    def acquire(self, namespace: bytes, keys: bytes, *, rank: int) -> Acquired:
        """Pin ``rank``'s slabs of the leading keys that have one, for a copy."""
        refs: list[SlabRef] = []
        chunks: list[Chunk] = []
        with self._lock:
            ns = self._held.namespaces.get(namespace)
            if ns is None or not 0 <= rank < ns.world:
                return Acquired(self, chunks, refs)
            regions, get = self._regions, ns.chunks.get
            for i in range(0, len(keys), KEY_BYTES):
                chunk = get(keys[i : i + KEY_BYTES])
                if chunk is None or not chunk.slabs[rank]:
                    break
                slab = chunk.slabs[rank]
                summed = chunk.summed >> rank & 1 == 1
                refs.append(SlabRef(regions.data_offset(slab), regions.state_word(slab), slab, summed))
                chunks.append(chunk)
            for chunk in chunks:
                self._held.pin(chunk)
            self._copies += len(chunks)
        return Acquired(self, chunks, refs)

    def _end_copies(self, chunks: list[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self._held.unpin(chunk)
            self._copies -= len(chunks)

    def _leading(self, namespace: bytes, keys: bytes, world: int) -> list[Chunk]:
        counts = self._counts
        counts["lookups"] += 1
        counts["chunks_asked"] += len(keys) // KEY_BYTES
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
        counts["chunks_hit"] += len(hits)
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
                self._counts["declined"] += 1
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
                self._counts["full"] += isinstance(e, PoolFull)
                self._end_pending(ns, header, needed)
                self._tell_if_low(stride)
                raise
            self._tell_if_low(stride)
            self._regions.begin_write(slab)
            self._held.account(ns, slab)
            self._held.writing += 1
            reservation = Reservation(self, ns, header, needed, slab)
            reservation.offset = self._regions.data_offset(slab)
            self._regions.set_owner(slab, reservation)
            ns.pending[key, rank] = reservation
            return reservation

    def _tell_if_low(self, stride: int) -> None:
        if self._events is not None and not self._regions.free_regions:
            self._events.low(stride)

    def _commit(self, r: Reservation, checksum: int | None) -> None:
        r._header = r._header._replace(checksum=checksum)
        try:
            self._regions.write_header(r._slab, r._header)
            self._publish(r)
        except BaseException:  # a slab left in WRITING would be lost, and its key PENDING, until a restart
            self._abort(r)
            raise

    def _publish(self, r: Reservation) -> None:
        with self._lock:
            self._regions.publish(r._slab)
            chunk = self._held.index(r._namespace, r._header, r._slab, used=time.monotonic_ns())
            self._held.writing -= 1
            self._counts["stored"] += 1
            self._regions.set_owner(r._slab, chunk)
            self._held.offer(chunk)
            self._end_pending(r._namespace, r._header, r._needed)
            if self._events is not None:
                self._events.committed(
                    r._header.namespace, r._header.key, r._header.rank, region=self._regions.region_of(r._slab).index,
                    number=self._regions.number(r._slab), generation=self._regions.state_word(r._slab) >> 8,
                )  # fmt: skip

    def _abort(self, r: Reservation) -> None:
        with self._lock:
            self._held.writing -= 1
            self._counts["aborted"] += 1
            self._held.free_slab(r._namespace, r._slab)
            self._end_pending(r._namespace, r._header, r._needed)

    def _end_pending(self, ns: Namespace, header: SlabHeader, needed: list[Chunk]) -> None:
        del ns.pending[header.key, header.rank]
        for chunk in needed:
            self._held.unpin(chunk)
        self._held.prune(ns)

    # --- administration -----------------------------------------------------------------------------------------------
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
        self._regions.mend(slab)
        self._counts["dropped_bad"] += 1

    def clear(self, namespace: bytes | None = None) -> int:
        """Evict every chunk that is not pinned and has no pinned descendant; returns how many chunks went."""
        with self._lock:
            names = [namespace] if namespace is not None else list(self._held.namespaces)
        return sum(self._clear_one(name) for name in names)

    def count(self, namespace: bytes | None = None) -> int:
        """Chunks of one namespace, or of all."""
        with self._lock:
            return sum(len(ns.chunks) for ns in self._held.namespaces.values() if namespace in (None, ns.id))

    def _clear_one(self, name: bytes) -> int:
        done, limit = 0, None
        while True:
            with self._lock:  # taken anew for each batch: lookups go on in between
                ns = self._held.namespaces.get(name)
                if ns is None:
                    return done
                limit = len(ns.chunks) if limit is None else limit  # what is stored meanwhile may stay
                for _ in range(min(_CLEAR_BATCH, limit - done)):
                    chunk = self._held.coldest(ns)
                    if chunk is None:
                        return done
                    self._held.remove(chunk)
                    self._counts["cleared"] += 1
                    done += 1
                if done >= limit:
                    return done

    def pin(self, namespace: bytes, keys: bytes, *, pinned: bool) -> tuple[int, int]:
        """Exclude leading chunks from eviction, or undo that once; stops at the first absent key. Counted, not persistent.

        Returns how many chunks were there and, of those to unpin, how many had no pin.
        """
        done = bare = 0
        with self._lock:
            ns = self._held.namespaces.get(namespace)
            for i in range(0, len(keys), KEY_BYTES):
                chunk = ns.chunks.get(keys[i : i + KEY_BYTES]) if ns is not None else None
                if chunk is None:
                    break
                if pinned:
                    self._held.pin(chunk)
                    chunk.admin_pins += 1
                    self._held.admin_pins += 1
                elif chunk.admin_pins:
                    chunk.admin_pins -= 1
                    self._held.admin_pins -= 1
                    self._held.unpin(chunk)
                else:
                    bare += 1
                done += 1
        return done, bare

    def page(self, namespace: bytes | None, after: bytes, limit: int) -> tuple[list[ChunkInfo], bool]:
        """Chunks ordered by key (then namespace) beyond ``after``, at most ``limit``, and whether there are more.

        ``after`` is the last key of the page before; with ``namespace`` None (all), that key followed by its namespace.
        """
        with self._lock:
            names = view.all_names(self._held, namespace)
        if namespace is not None and after:
            after = after[:KEY_BYTES] + namespace
        chosen, more = view.page_names(names, after, limit)
        with self._lock:
            return view.chunk_infos(self._held, chosen, time.monotonic_ns()), more

    def stats(self) -> dict[str, object]:
        """Plain values for status and metrics; ``*_total`` count since the sidecar's start.

        Hit ratio: ``chunks_hit_total / chunks_asked_total``. ``rebuild``: what the last restart kept and dropped.
        """
        with self._lock:
            return {
                **view.usage(self._held, self._room),
                "leases": len(self._leases),
                "slabs_copying": self._copies,
                "evicted_total": self._held.evicted,
                "regions_taken_total": self._room.regions_taken,
                **{f"{name}_total": n for name, n in self._counts.items()},
                "rebuild": self._report.as_dict(),
            }
