"""What the loader and the writer of one lane have in common: a thread, its jobs, and the copies it has in flight.

The thread alternates between *advancing* (submit slices of jobs until the bytes in flight reach their bound) and *landing*
the oldest copy in flight. Slices of all jobs share one first-in-first-out line, so a job's slices land in order and what has
landed of a job is always a leading part of it.

A job is in ``_jobs`` from :meth:`CopyThread.put` until :meth:`CopyThread._settle`, which gives its ticket the terminal
answer. An error in one job's step fails that job. Should the thread itself end, its ``finally`` fences what is in flight and
fails every job left, later arrivals included; :attr:`CopyThread.alive` turns False and the daemon's health with it.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from maru_shm import layout as L
from maru_shm.errors import EngineGone, RegionNotHeld, TransferError
from maru_shm.geometry import WHOLE, Direction, Share
from maru_sidecar.tickets import Ticket
from maru_sidecar.transfer.base import Copy, KvTarget, MayGoOn

log = logging.getLogger(__name__)

#: A fence word has no doorbell. It is polled every 50 µs at first (a decode step takes milliseconds), later every 500 µs: a
#: core polling for a long prefill then spends about 2 % on it.
FENCE_POLL_S = 50e-6
FENCE_POLL_SLOW_S = 500e-6
FENCE_SLOW_AFTER_NS = 2_000_000
FENCE_POLL_JOBS = 32  #: a look at so many jobs takes about 30 µs; with more, they are looked at less often


#: A piece counts as so many bytes at least, where copies are sized and bounded: its descriptors take about 100 bytes.
PIECE_WEIGHT = 1 << 10


@dataclass(slots=True)
class WorkerPort:
    """Where one worker's copies go: its imported KV cache, its slabs' names and its fence word."""

    target: KvTarget
    namespace: bytes
    rank: int
    world: int
    chunk_tokens: int
    slab_bytes: int
    words: memoryview  #: the segment's u64 words; valid while the worker has outstanding tickets
    slab_weight: int = field(init=False)  #: bytes that copying a slab counts for

    def __post_init__(self) -> None:
        pieces = self.chunk_tokens // self.target.layout.block_tokens * len(self.target.layout.planes)
        self.slab_weight = max(self.slab_bytes, pieces * PIECE_WEIGHT)

    @property
    def fence(self) -> int:
        return int(self.words[L.WORD_FENCE])


@dataclass(slots=True, eq=False)
class Job:
    """A ticket being worked on. ``eq=False``: jobs are told apart by identity."""

    ticket: Ticket
    port: WorkerPort
    queued_ns: int = field(default_factory=time.monotonic_ns)
    in_flight: int = 0  #: slices submitted and not landed
    done: int = 0  #: chunks landed (load) or newly stored (store)
    error: L.Code | None = None  #: no further slice is submitted
    withdrawn: bool = False

    @property
    def over(self) -> bool:
        """Whether no further slice may be submitted."""
        return self.withdrawn or self.error is not None

    def begin_copy(self) -> bool:
        """Announce a slice. With another one in flight the announcement stands; the cancel word is only looked at."""
        if self.in_flight:
            return not self.ticket.withdrawn
        return self.ticket.begin_copy()


J = TypeVar("J", bound=Job)


@dataclass(slots=True)
class Flight(Generic[J]):
    """A copy in flight."""

    job: J
    copy: Copy
    weight: int = field(default=0, kw_only=True)
    began_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)


F = TypeVar("F", bound=Flight)  # type: ignore[type-arg]


def code_of(error: BaseException) -> L.Code:
    """The record's code for what went wrong in a copy."""
    if isinstance(error, EngineGone):
        return L.Code.ENGINE_GONE
    if isinstance(error, RegionNotHeld):
        return L.Code.POOL_FULL
    return L.Code.COPY_FAILED if isinstance(error, TransferError) else L.Code.INTERNAL


class CopyThread(ABC, Generic[J, F]):
    """One supervised thread. Everything with a leading underscore runs in it."""

    def __init__(self, name: str, slice_bytes: int, bytes_in_flight: int, fence_timeout_s: float) -> None:
        self.name = name
        self._slice_bytes = slice_bytes
        self._limit = bytes_in_flight
        self._fence_timeout_ns = int(fence_timeout_s * 1e9)
        self._wake = threading.Condition()
        self._arrived: list[J] = []
        self._jobs: list[J] = []
        self._flying: deque[F] = deque()
        self._stopping = False
        self._ended = False
        self.flying_bytes = 0
        self._flying_weight = 0
        self._busy_ns = 0  #: when the copy being made or waited for began, 0 = none
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # --- any thread -------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def hangs(self, limit_s: float) -> bool:
        """Whether the copy being made or waited for began more than ``limit_s`` ago."""
        began = self._busy_ns
        return began != 0 and time.monotonic_ns() - began > limit_s * 1e9

    @property
    def queued(self) -> int:
        """Jobs not settled."""
        return len(self._jobs) + len(self._arrived)

    def put(self, job: J) -> None:
        """Queue a job; its ticket gets its answer from here."""
        with self._wake:
            refused = self._ended
            if not refused:
                self._arrived.append(job)
                self._wake.notify()
        if refused:
            job.ticket.finish(L.State.FAILED, L.Code.INTERNAL)

    def nudge(self) -> None:
        """Look again at cancel words, closing sessions and chunks that were pending."""
        with self._wake:
            self._wake.notify()

    def ask_to_stop(self) -> None:
        """End the thread after the copies in flight; jobs left are failed."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def stop(self, timeout_s: float) -> bool:
        """:meth:`ask_to_stop`, and wait. False if it did not end in time."""
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------------------------------------------
    @abstractmethod
    def _advance(self) -> bool:
        """Submit what may be submitted; whether jobs are left that only wait for a fence or another ticket."""

    def _copied(self, flight: F) -> None:
        """A copy has ended well and its blocks are still the job's. What this raises counts as the copy's failure."""

    @abstractmethod
    def _landed(self, flight: F, error: BaseException | None) -> None:
        """A copy has ended; ``flight.job.in_flight`` is already lowered."""

    @abstractmethod
    def _answer(self, job: J) -> None:
        """Write the terminal answer of a job that has nothing in flight."""

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_arrived()
                blocked = self._advance()
                if self._flying:
                    self._land_oldest()
                elif not self._stopping:
                    self._sleep(blocked)
        finally:
            self._abandon()

    def _take_arrived(self) -> None:
        with self._wake:
            self._jobs += self._arrived
            self._arrived.clear()

    def _sleep(self, blocked: bool) -> None:  # noqa: FBT001
        with self._wake:
            if self._arrived or self._stopping:
                return
            if not blocked:
                self._wake.wait()
                return
            newest = max((job.queued_ns for job in self._jobs), default=0)
            slow = time.monotonic_ns() - newest > FENCE_SLOW_AFTER_NS
            self._wake.wait(FENCE_POLL_SLOW_S * max(1, len(self._jobs) // FENCE_POLL_JOBS) if slow else FENCE_POLL_S)

    def _slice(self, job: J) -> int:
        """Bytes of one submission of ``job``: the configured slice, or what its KV cache needs to be copied at full rate."""
        return max(self._slice_bytes, job.port.target.slice_hint)

    def _slice_chunks(self, job: J) -> int:
        """Chunks of one submission of ``job``."""
        return max(1, self._slice(job) // job.port.slab_weight)

    def _has_room(self, job: J) -> bool:
        """Whether one more slice may fly. Two always may: with one, the link idles while the next is prepared."""
        size = self._slice(job)
        return self._flying_weight + size <= max(self._limit, 2 * size)

    def _submit(
        self,
        job: J,
        direction: Direction,
        offsets: npt.NDArray[np.uint64],
        blocks: npt.NDArray[np.int32],
        *,
        share: Share = WHOLE,
        may_go_on: MayGoOn | None = None,
    ) -> Copy:
        """Begin the copy of a slice that was announced. Small ones are made here, so this may hang like a wait."""
        self._busy_ns = time.monotonic_ns()
        try:
            return job.port.target.submit(direction, offsets, blocks, share, may_go_on)
        except BaseException:
            if not job.in_flight:
                job.ticket.end_copy()
            raise
        finally:
            self._busy_ns = 0

    def _fly(self, flight: F, n_chunks: int) -> None:
        flight.job.in_flight += 1
        flight.weight = max(flight.copy.nbytes, n_chunks * flight.job.port.slab_weight)
        self._flying_weight += flight.weight
        self.flying_bytes += flight.copy.nbytes
        self._flying.append(flight)

    def _land_oldest(self) -> None:
        flight = self._flying.popleft()
        job: J = flight.job
        error: BaseException | None = None
        self._busy_ns = flight.began_ns
        try:
            flight.copy.wait()
            self._copied(flight)
        except Exception as e:  # noqa: BLE001 - whatever an engine raises, this job ends and the thread goes on
            error = e
            if not isinstance(e, EngineGone):
                log.warning("%s: copy of ticket %#x failed: %s", self.name, job.ticket.request.ticket, e)
        finally:
            self._busy_ns = 0
            self.flying_bytes -= flight.copy.nbytes
            self._flying_weight -= flight.weight
            job.in_flight -= 1
        if not job.in_flight:
            job.ticket.end_copy()
        if error is not None:
            job.error = job.error or code_of(error)
        else:
            job.ticket.n_bytes += flight.copy.nbytes
        try:
            self._landed(flight, error)
        except Exception:
            log.exception("%s: ticket %#x", self.name, job.ticket.request.ticket)
            job.error = job.error or L.Code.INTERNAL

    def _fence_open(self, job: J, now: int) -> bool:
        """Whether the job may touch its blocks; one that has waited too long is marked."""
        if job.port.fence >= job.ticket.request.fence:
            return True
        if now - job.queued_ns > self._fence_timeout_ns:
            job.error = L.Code.TIMED_OUT
        return False

    def _settle(self, job: J) -> None:
        self._jobs.remove(job)
        self._answer(job)

    def _fail(self, job: J, error: BaseException) -> None:
        """One job's step went wrong: it ends, the others go on."""
        unforeseen = None if isinstance(error, (TransferError, RegionNotHeld)) else error
        log.warning("%s: ticket %#x failed: %s", self.name, job.ticket.request.ticket, error, exc_info=unforeseen)
        job.error = job.error or code_of(error)

    def _abandon(self) -> None:
        """Fence what is in flight and answer every job: the thread is ending."""
        with self._wake:
            self._ended = True
        self._take_arrived()
        while self._flying:
            self._land_oldest()
        for job in list(self._jobs):
            if not job.over:
                job.error = L.Code.INTERNAL
            self._jobs.remove(job)
            try:
                self._answer(job)
            finally:
                job.ticket.finish(L.State.FAILED, L.Code.INTERNAL, n_done=job.done)
