"""The load queue of one lane: slabs → engines' KV blocks, fair between requests.

*Order.* The next slice goes to the load with the least bytes left, less ``AGEING`` bytes for every second it has waited. Short
hits pass long ones, which costs a long one little (its slices already fill the link) and saves the short one the whole wait:
N equal loads arriving together finish one after the other, not all at the time of the last. Ageing bounds the wait: a load is
passed only by those that are shorter by more than it could have copied, at 8 GiB/s, since it came.

*Fence.* A load whose fence has not been reached is passed over, so it blocks no other; after ``fence_timeout_s`` it fails.

*Checks.* Every slab is checked against its key before the copy and looked at again after it (``slab_reader.py``), whatever
moves its bytes. Where it has a checksum and the engine is on the CPU, the bytes are hashed (xxh3-64, 30 GB/s without the GIL):
before they are copied, and in a shared pool after it instead, our own slabs too. There a write that a stopped node had begun
may land in any slab, at any time: what is right after the copy was right during it. A mismatch of any kind drops the slab from
the pool and fails the load there: a wrong byte is never served. Slabs of other nodes (``sharing/slabs.py``) cannot be pinned
here; one that was reused is a miss.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from maru_shm import failpoints
from maru_shm import layout as L
from maru_shm.geometry import Direction, Share
from maru_sidecar.checksum import SlabChecker
from maru_sidecar.copy_thread import CopyThread, Flight, Job
from maru_sidecar.directory import Directory
from maru_sidecar.sharing.slabs import MixedSlabs, SharedSlabs
from maru_sidecar.slab_handles import Acquired
from maru_sidecar.slab_reader import SlabReader

AGEING = 8 << 30  #: bytes per second of waiting


@dataclass(slots=True, eq=False)
class LoadJob(Job):
    """``next``: first chunk of the span in progress. ``found``: leading chunks present, once acquired.

    A span is submitted in ``parts``, each some planes of all its chunks; ``part`` is the next one.
    """

    next: int = 0
    stop: int = 0  #: first chunk after the span in progress
    part: int = 0
    parts: int = 1
    torn: bool = False  #: a slice failed: what lands after it completes nothing
    checksums: list[int | None] = field(default_factory=list)  #: of the chunks before ``stop``, as their sound headers had them
    found: int = 0
    acquired: Acquired | MixedSlabs | None = None
    offsets: npt.NDArray[np.uint64] | None = None

    @property
    def n_chunks(self) -> int:
        return self.ticket.request.n_keys

    @property
    def submitted(self) -> bool:
        return self.over or (self.acquired is not None and self.next >= self.found)

    @property
    def bytes_left(self) -> int:
        submitted = (self.stop - self.next) * self.part // self.parts if self.part else 0
        return (self.n_chunks - self.next - submitted) * self.port.slab_bytes


@dataclass(slots=True)
class LoadFlight(Flight[LoadJob]):
    start: int
    stop: int  #: first chunk after this slice
    last: bool  #: with it, and all before it, the chunks are complete


class Loader(CopyThread[LoadJob, LoadFlight]):
    """See the module. ``quiet`` is set while no load could make progress: the writer waits for it."""

    def __init__(
        self,
        name: str,
        directory: Directory,
        reader: SlabReader,
        checker: SlabChecker | None,
        *,
        slice_bytes: int,
        bytes_in_flight: int,
        fence_timeout_s: float,
        shared: SharedSlabs | None = None,
    ) -> None:
        super().__init__(name, slice_bytes, bytes_in_flight, fence_timeout_s)
        self._directory = directory
        self._reader = reader
        self._shared = shared
        self._checker = checker
        self.quiet = threading.Event()
        self.quiet.set()

    def put(self, job: LoadJob) -> None:
        self.quiet.clear()
        super().put(job)

    def _advance(self) -> bool:
        while (job := self._pick()) is not None and self._has_room(job):
            try:
                self._step(job)
            except Exception as e:  # noqa: BLE001 - logged, and this job's answer
                self._fail(job, e)
                self._settle_if_over(job)
        if not self._flying and not self._arrived:
            self.quiet.set()
        return bool(self._jobs)

    def _pick(self) -> LoadJob | None:
        """The job whose slice goes next; on the way, those that are over or overdue are settled."""
        now = time.monotonic_ns()
        best: LoadJob | None = None
        best_score = 0.0
        for job in list(self._jobs):
            if not job.over and job.ticket.withdrawn:
                job.withdrawn = True
            if not job.submitted and self._fence_open(job, now):
                score = job.bytes_left - AGEING * (now - job.queued_ns) / 1e9
                if best is None or score < best_score:
                    best, best_score = job, score
            self._settle_if_over(job)
        return best

    def _settle_if_over(self, job: LoadJob) -> None:
        if job.submitted and not job.in_flight and job in self._jobs:
            self._settle(job)

    def _step(self, job: LoadJob) -> None:
        """Submit one slice of ``job``."""
        request = job.ticket.request
        if job.acquired is None:
            job.acquired = self._acquire(job)
            job.found = min(job.acquired.n_found, job.n_chunks)
            job.offsets = np.array([ref.offset for ref in job.acquired.refs[: job.found]], np.uint64)
            if job.found < job.n_chunks and not job.found:
                job.error = L.Code.NOT_FOUND
        if not job.part:
            self._begin_span(job)
        start, stop = job.next, job.stop
        if stop <= start or job.offsets is None:
            self._settle_if_over(job)
            return
        if not job.begin_copy():
            job.withdrawn = True
            self._settle_if_over(job)
            return
        failpoints.hit("load.before_copy")
        offsets, blocks = job.offsets[start:stop], request.blocks[start:stop]
        copy = self._submit(job, Direction.LOAD, offsets, blocks, share=Share(job.part, job.parts))
        job.part += 1
        last = job.part == job.parts
        if last:
            job.next, job.part = stop, 0
        self.quiet.clear()
        self._fly(LoadFlight(job, copy, start, stop, last), -(-(stop - start) // job.parts))

    def _begin_span(self, job: LoadJob) -> None:
        """Set the next chunks to load, and in how many parts; none if the first of them is not sound."""
        request, port = job.ticket.request, job.port
        assert job.acquired is not None
        start, whole = job.next, self._slice_chunks(job)
        stop = min(job.found, start + whole * port.target.parts)
        job.parts = max(1, min(port.target.parts, -(-(stop - start) // whole)))
        refs = job.acquired.refs[start:stop]
        keys = request.keys[start * L.KEY_BYTES : stop * L.KEY_BYTES]
        good, checksums = self._reader.leading_sound(refs, port.namespace, keys, rank=port.rank, nbytes=port.slab_bytes)
        if self._checker is not None and self._shared is None:
            good = self._checker.leading_good(refs[:good], checksums, port.slab_bytes)
        job.checksums += checksums[:good]
        if start + good < stop:
            stop = start + good
            job.error = self._give_up(job, stop)
        if job.error is not None:
            job.parts = 1  # nothing is submitted after this
        job.stop = stop

    def _acquire(self, job: LoadJob) -> Acquired | MixedSlabs:
        if self._shared is not None:
            return self._shared.acquire(job.port, job.ticket.request)
        return self._directory.acquire(job.port.namespace, job.ticket.request.keys, rank=job.port.rank)

    def _landed(self, flight: LoadFlight, error: BaseException | None) -> None:
        job = flight.job
        job.torn = job.torn or error is not None
        if flight.last and not job.torn and flight.start == job.done:
            job.done = self._intact_until(flight)  # leading: nothing before it is missing
            if job.done < flight.stop:
                code = self._give_up(job, job.done)
                job.error = job.error or code
        failpoints.hit("load.after_copy")
        self._settle_if_over(job)

    def _intact_until(self, flight: LoadFlight) -> int:
        """The first chunk of a landed slice that was touched during the copy; its end if there is none."""
        job, start, stop = flight.job, flight.start, flight.stop
        assert job.acquired is not None
        refs = job.acquired.refs[start:stop]
        if self._shared is not None and self._checker is not None:
            refs = refs[: self._checker.leading_good(refs, job.checksums[start:stop], job.port.slab_bytes)]
        return start + self._reader.leading_unchanged(refs)

    def _give_up(self, job: LoadJob, i: int) -> L.Code:
        """Slab ``i`` is not what it was taken for: it is a miss from here on. Returns the load's answer."""
        assert job.acquired is not None
        port, ref = job.port, job.acquired.refs[i]
        if self._directory.drop(port.namespace, job.ticket.request.key(i), port.rank, slab=ref.header):
            return L.Code.CHECKSUM
        if self._shared is not None:
            self._shared.vanished += 1
        return L.Code.NOT_FOUND

    def _answer(self, job: LoadJob) -> None:
        if job.acquired is not None:
            job.acquired.release()
        ticket = job.ticket
        if job.withdrawn and job.done < job.n_chunks:
            ticket.withdraw(job.done)
        elif job.error is None and job.done == job.n_chunks:
            ticket.finish(L.State.DONE, n_done=job.done)
        else:
            ticket.finish(L.State.FAILED, job.error or L.Code.NOT_FOUND, n_done=job.done)
