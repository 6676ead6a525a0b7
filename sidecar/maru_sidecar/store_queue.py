"""The write-behind queue of one lane: engines' KV blocks → slabs, behind the loads.

*Loads first.* Before each slice the writer waits until the loader of its lane is quiet, at most ``patience_s``: stores make
at least that progress under any load, and a hit never queues behind more than one slice.

*Nothing is stored twice.* A chunk that is in the pool is skipped. One that another ticket is writing (a prefix shared by two
requests, or by two engines) is set aside: when the other commits it counts as present, when the other fails this ticket copies
it itself. A reservation is held only while its copy is in flight, never by a ticket that waits, so no two wait for each other.

*Two-phase commit.* ``reserve`` marks the slab WRITING, ``commit`` publishes it after the copy. An engine that dies, a cancel
or an error aborts the reservations of the slice; what was committed before stays and is reported (``n_done``).

*Shared pools.* The right to write a region may end at any time: this process may be stopped for longer than its lease. It is
asked again before each system call or submission of a copy, and before commit; without it the slice's chunks are aborted and
nothing is stored to the mapping. One call or submission that had begun may still land in the next owner's slab. So a checksum
is taken there from the engine's memory, not from the pool: it never vouches for what another node wrote. (Of what a GPU's
copy engine moved it is taken from the pool, if at all: that would be a second transfer.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from maru_shm import failpoints
from maru_shm import layout as L
from maru_shm.errors import PoolFull, RegionNotHeld
from maru_shm.geometry import Direction
from maru_sidecar.checksum import SlabChecker
from maru_sidecar.copy_thread import CopyThread, Flight, Job
from maru_sidecar.directory import Directory
from maru_sidecar.slab_handles import Presence, Reservation

log = logging.getLogger(__name__)

ChunkName = tuple[bytes, bytes, int]  #: namespace, key, rank


class PendingChunks:
    """Chunks being written, over all writers, and who wants to know when that ends. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[ChunkName, dict[object, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, chunk: ChunkName) -> None:
        with self._lock:
            self._waiting[chunk] = {}

    def ask(self, chunk: ChunkName, who: object, callback: Callable[[], None]) -> bool:
        """Call ``who`` back once when ``chunk`` is settled; False (and never) if nobody is writing it."""
        with self._lock:
            waiting = self._waiting.get(chunk)
            if waiting is None:
                return False
            waiting[who] = callback
            return True

    def forget(self, chunk: ChunkName, who: object) -> None:
        """``who`` does not want to know any more: a write may take for ever."""
        with self._lock:
            self._waiting.get(chunk, {}).pop(who, None)

    def end(self, chunk: ChunkName) -> None:
        """Committed or aborted."""
        with self._lock:
            callbacks = self._waiting.pop(chunk, {})
        for callback in callbacks.values():
            callback()


@dataclass(slots=True, eq=False)
class StoreJob(Job):
    """``todo``: chunks not settled, in order. ``aside``: those that another ticket is writing."""

    todo: list[int] = field(default_factory=list)
    aside: list[int] = field(default_factory=list)
    lost: bool = False  #: reservations of it were aborted
    asked: int = 0  #: callbacks owed to this job; touched under the writer's lock
    retry_ns: int = 0

    @property
    def n_chunks(self) -> int:
        return self.ticket.request.n_keys - 1

    def name(self, chunk: int) -> ChunkName:
        return self.port.namespace, self.ticket.request.key(chunk + 1), self.port.rank


@dataclass(slots=True)
class StoreFlight(Flight[StoreJob]):
    reserved: list[tuple[int, Reservation]]
    checksums: list[int] = field(default_factory=list)  #: of these, where they are taken


class Writer(CopyThread[StoreJob, StoreFlight]):
    """See the module. ``loader_quiet``: set while the lane's loader has nothing it could do. ``shared``: others write the pool
    too.
    """

    RETRY_NS = 1_000_000  #: a chunk was PENDING and is not any more: ask again after this

    def __init__(
        self,
        name: str,
        directory: Directory,
        pending: PendingChunks,
        checker: SlabChecker | None,
        loader_quiet: threading.Event,
        *,
        slice_bytes: int,
        bytes_in_flight: int,
        fence_timeout_s: float,
        patience_s: float,
        shared: bool = False,
    ) -> None:
        super().__init__(name, slice_bytes, bytes_in_flight, fence_timeout_s)
        self._directory = directory
        self._pending = pending
        self._checker = checker
        self._shared = shared
        self._loader_quiet = loader_quiet
        self._patience_s = patience_s

    def put(self, job: StoreJob) -> None:
        job.todo = list(range(job.n_chunks))
        super().put(job)

    def _advance(self) -> bool:
        while (job := self._pick()) is not None and self._has_room(job):
            if self._flying and not self._loader_quiet.is_set():
                break  # land what flies before standing back for the loads
            self._stand_back()
            try:
                self._step(job)
            except Exception as e:  # noqa: BLE001 - logged, and this job's answer
                self._fail(job, e)
            self._settle_if_over(job)
        return bool(self._jobs)

    def _stand_back(self) -> None:
        self._loader_quiet.wait(self._patience_s)

    def _pick(self) -> StoreJob | None:
        """The next job in turn that can make progress; on the way, those that are over or overdue are settled."""
        now = time.monotonic_ns()
        chosen: StoreJob | None = None
        for job in list(self._jobs):
            if not job.over and job.ticket.withdrawn:
                job.withdrawn = True
            if job.aside and not job.asked and now >= job.retry_ns:
                job.todo, job.aside = sorted(job.aside + job.todo), []
            if job.aside and now - job.queued_ns > self._fence_timeout_ns:
                job.error = job.error or L.Code.TIMED_OUT  # whoever writes them hangs
            if chosen is None and job.todo and not job.over and self._fence_open(job, now):
                chosen = job
            self._settle_if_over(job)
        return chosen

    def _settle_if_over(self, job: StoreJob) -> None:
        finished = not job.todo and not job.aside
        if (job.over or finished) and not job.in_flight and job in self._jobs:
            self._settle(job)

    def _step(self, job: StoreJob) -> None:
        """Reserve and submit one slice of ``job``, then send it to the end of the line."""
        self._jobs.remove(job)
        self._jobs.append(job)
        port, request = job.port, job.ticket.request
        wanted = self._slice_chunks(job)
        reserved: list[tuple[int, Reservation]] = []
        try:
            while job.todo and len(reserved) < wanted:
                chunk = job.todo[0]
                try:
                    got = self._directory.reserve(
                        port.namespace, request.key(chunk + 1), parent=request.key(chunk), rank=port.rank, world=port.world,
                        depth=request.depth + chunk, tokens=port.chunk_tokens, nbytes=port.slab_bytes,
                    )  # fmt: skip
                except PoolFull:
                    job.error = L.Code.POOL_FULL  # its descendants would be useless without it
                    break
                job.todo.pop(0)
                if got is Presence.PENDING:
                    self._set_aside(job, chunk)
                elif isinstance(got, Reservation):
                    self._pending.begin(job.name(chunk))
                    reserved.append((chunk, got))
            if not reserved:
                return
            if not job.begin_copy():
                job.withdrawn = True
                self._abort(job, reserved)
                return
            offsets = np.array([r.offset for _, r in reserved], np.uint64)
            blocks = request.blocks[[chunk + 1 for chunk, _ in reserved]]
            may_go_on = self._directory.guard(r for _, r in reserved)
            copy = self._submit(job, Direction.STORE, offsets, blocks, may_go_on=may_go_on)
        except BaseException:
            self._abort(job, reserved)
            raise
        self._fly(StoreFlight(job, copy, reserved), len(reserved))

    def _set_aside(self, job: StoreJob, chunk: int) -> None:
        job.aside.append(chunk)

        def settled() -> None:
            with self._wake:
                job.asked -= 1
                self._wake.notify()

        with self._wake:
            job.asked += 1
        if not self._pending.ask(job.name(chunk), job, settled):
            with self._wake:
                job.asked -= 1
            job.retry_ns = time.monotonic_ns() + self.RETRY_NS

    def _abort(self, job: StoreJob, reserved: list[tuple[int, Reservation]]) -> None:
        job.lost = job.lost or bool(reserved)
        for chunk, reservation in reserved:
            try:
                reservation.abort()
            finally:
                self._pending.end(job.name(chunk))

    def _copied(self, flight: StoreFlight) -> None:
        if self._checker is None:
            return
        port, blocks = flight.job.port, flight.job.ticket.request.blocks
        for chunk, reservation in flight.reserved:
            checksum = port.target.checksum(blocks[chunk + 1]) if self._shared else None
            if checksum is None:
                checksum = self._checker.checksum(reservation.offset, port.slab_bytes)
            flight.checksums.append(checksum)

    def _landed(self, flight: StoreFlight, error: BaseException | None) -> None:
        job = flight.job
        # A session that closed while the copy ran may have reused its blocks: what was read then is not believed.
        if error is not None or job.ticket.table.closing:
            job.withdrawn = job.withdrawn or error is None
            self._abort(job, flight.reserved)
        else:
            self._commit(job, flight)
        self._settle_if_over(job)

    def _commit(self, job: StoreJob, flight: StoreFlight) -> None:
        left, checksums = list(flight.reserved), iter(flight.checksums)
        try:
            while left:
                chunk, reservation = left[0]
                reservation.commit(next(checksums, None))
                left.pop(0)
                job.done += 1
                self._pending.end(job.name(chunk))
        except RegionNotHeld as e:
            log.warning("%s: ticket %#x: %s", self.name, job.ticket.request.ticket, e)
            job.error = job.error or L.Code.POOL_FULL
        finally:
            self._abort(job, left)

    def _settle(self, job: StoreJob) -> None:
        for chunk in job.aside:
            self._pending.forget(job.name(chunk), job)
        super()._settle(job)

    def _answer(self, job: StoreJob) -> None:
        failpoints.hit("store.before_complete")
        if job.error is not None:
            job.ticket.finish(L.State.FAILED, job.error, n_done=job.done)
        elif job.withdrawn and (job.todo or job.aside or job.lost):
            job.ticket.withdraw(job.done)
        else:
            job.ticket.finish(L.State.DONE, n_done=job.done)
