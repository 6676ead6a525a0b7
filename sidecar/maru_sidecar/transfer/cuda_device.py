"""One GPU as the sidecar uses it: context, streams, a few events, imported allocations. Made at the first attach.

The context is the device's primary one, retained while an engine on that device is attached (about 0.5 GiB of its memory) and
released after the last; a sidecar without engines holds no GPU memory. Loads and stores have a stream each, of the highest
priority, so a store never queues before a hit. Events carry no timing, their waiters sleep in the kernel, and they are reused.

Many flat rows can be submitted by several threads at once (``transfer.gpu_submitters``), each on a stream of its own, since one
may be slower than the wire. To the caller they are one submission: the further streams begin after what was on the
direction's stream before, and that stream goes on after them, so one event covers all and later submissions follow all.

A *sticky* error (illegal address, ECC, a lost GPU) ends the context: every later call in it fails. The device is then
*lost*: its copies fail, its engines must detach, and the next attach tries to reset and make it anew. Where the driver refuses
that, the attach says so: the sidecar has to be restarted (the pool survives).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from maru_shm.copy_shapes import Copies
from maru_shm.cuda.driver import (
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    MAP_FAILED,
    CudaDriver,
    CudaError,
)
from maru_shm.errors import AttachRefused, TransferError
from maru_shm.geometry import CUDA_IPC_HANDLE, CUDA_VMM_HANDLE, Direction, KvRegion, RegionKind
from maru_sidecar.transfer.cuda_nudge import Nudge

ROOM = 4096  #: descriptors per driver call
EVENTS = 64  #: copies in flight before another event is made

#: Up to so many flat rows the caller submits alone: 1 ms, beside which an event, two waits and a thread's wake-up would count.
ALONE = 1024

log = logging.getLogger(__name__)

_IPC_REMEDY = {
    MAP_FAILED: "run sidecar and engine in the same IPC and PID namespaces (containers: share both) and give both the same GPU",
    INVALID_CONTEXT: "the handle belongs to the sidecar's own process or to another driver instance; attach from the engine",
    INVALID_DEVICE: "make the engine's GPU visible to the sidecar (CUDA_VISIBLE_DEVICES, container device list)",
    INVALID_VALUE: "the engine freed this memory or made it with an allocator without IPC; let it register its KV cache again",
}


class _Submitter:
    """A further submitting thread of a lane and its stream.

    Raises :class:`CudaError` or ``RuntimeError`` (no thread) if it cannot be made.
    """

    def __init__(self, driver: CudaDriver, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[int], Callable[[], int]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        try:
            self.end = driver.create_event()  #: recorded behind a job's copies
            try:
                self.stream = driver.create_stream()
            except CudaError:
                driver.destroy_event(self.end)
                raise
        except CudaError:
            self.stop()
            raise

    def start(self, job: Callable[[], int]) -> Future[int]:
        future: Future[int] = Future()
        self._jobs.put((future, job))
        return future

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while self._one():
            pass

    def _one(self) -> bool:
        """A frame per job: an idle thread holds no copies."""
        item = self._jobs.get()
        if item is None:
            return False
        future, job = item
        try:
            future.set_result(job())
        except BaseException as e:  # noqa: BLE001 - raised in the caller's thread, which waits for it
            future.set_exception(e)
        return True


class _Lane:
    """One direction's streams and descriptor room; the lock keeps submissions in one piece."""

    def __init__(self, driver: CudaDriver) -> None:
        self.lock = threading.Lock()
        self.stream = driver.create_stream()
        self.room = driver.descriptors(ROOM)
        self.begin = driver.create_event()  #: what the submitters' streams wait for
        self.submitters: list[_Submitter] = []  #: all but the caller; made at first need
        self.no_more = False  #: one could not be made


class Mapping:
    """An allocation of an engine, mapped here. ``address`` is its base, ``size`` in bytes."""

    __slots__ = ("address", "key", "references", "size")

    def __init__(self, key: bytes, address: int, size: int) -> None:
        self.key = key  #: the driver's IPC handle; empty for a VMM mapping
        self.address = address
        self.size = size
        self.references = 0


class CudaDevice:
    """Raises :class:`CudaError` if the context cannot be made."""

    def __init__(self, driver: CudaDriver, uuid: str, ordinal: int, submitters: int = 1, *, nudge: bool = False) -> None:
        self.driver = driver
        #: threads that submit the flat rows of one submission, the caller among them; 1: no other. A row costs its thread 1 to
        #: 1.3 µs in the driver (H200), so the 32,768 rows of 1,024 blocks × 32 layers take one thread 33 to 43 ms, where the
        #: wire needs 39 for rows of 64 KiB. What more threads bring: docs/performance.md.
        self.submitters = submitters
        self.uuid = uuid
        self.ordinal = ordinal
        self.targets = 0  #: engines attached; kept by the transfer engine under its lock
        self.lost: CudaError | None = None
        self._mappings: dict[bytes, Mapping] = {}
        self._mapping_lock = threading.Lock()
        self.context = driver.retain(ordinal)
        try:
            self.max_pitch = driver.max_pitch(ordinal)
            self._lanes = {d: _Lane(driver) for d in Direction}
            self._events = deque(driver.create_event() for _ in range(EVENTS))
            self.nudge = Nudge(driver, self.context, f"maru-cuda{ordinal}-nudge") if nudge else None
        except CudaError:
            driver.release(ordinal)
            raise

    # --- imports ------------------------------------------------------------------------------------------------------------
    def import_region(self, index: int, region: KvRegion, fd: int) -> tuple[Mapping, int]:
        """Map the allocation around region ``index``; the mapping and the region's address in it.

        The driver opens a handle once per process, so regions of one allocation share a mapping. ``fd``: the exported
        allocation of a VMM region, not consumed. Raises :class:`AttachRefused`.
        """
        codec = CUDA_VMM_HANDLE if region.kind is RegionKind.CUDA_VMM else CUDA_IPC_HANDLE
        if len(region.handle) != codec.size:
            raise AttachRefused(f"region {index} has a handle of {len(region.handle)} bytes", f"expected {codec.size}")
        with self._mapping_lock:
            try:
                self.driver.use(self.context)
                if region.kind is RegionKind.CUDA_VMM:
                    offset, size = CUDA_VMM_HANDLE.unpack(region.handle)
                    mapping = Mapping(b"", self.driver.map_fd(fd, size, self.ordinal), size)
                else:
                    key, offset = CUDA_IPC_HANDLE.unpack(region.handle)
                    mapping = self._mapping_of(key)
            except CudaError as e:
                self.note(e)
                remedy = _IPC_REMEDY.get(e.code, "check that both processes use this GPU and one driver")
                raise AttachRefused(f"region {index} on {self.uuid} cannot be imported: {e.what}", remedy) from e
            mapping.references += 1
        if offset + region.size > mapping.size:
            self.drop(mapping)
            raise AttachRefused(
                f"region {index} claims bytes {offset} to {offset + region.size} of an allocation of {mapping.size}",
                "register the KV cache again; both sides must run the same release",
            )
        return mapping, mapping.address + offset

    def _mapping_of(self, key: bytes) -> Mapping:
        known = self._mappings.get(key)
        if known is None:
            address = self.driver.open_ipc(key)
            try:
                known = Mapping(key, address, self.driver.allocation_range(address)[1])
            except CudaError:
                self.driver.close_ipc(address)
                raise
            self._mappings[key] = known
        return known

    def drop(self, mapping: Mapping) -> None:
        """Give one reference back; the last one unmaps, and the engine's memory returns to the device."""
        with self._mapping_lock:
            mapping.references -= 1
            if mapping.references:
                return
            self._mappings.pop(mapping.key, None)
            try:
                self.driver.use(self.context)
                if mapping.key:
                    self.driver.close_ipc(mapping.address)
                else:
                    self.driver.unmap(mapping.address, mapping.size)
            except CudaError as e:
                self.note(e)
                log.warning("unmapping %d bytes of an engine on %s: %s", mapping.size, self.uuid, e)

    # --- copies -------------------------------------------------------------------------------------------------------------
    def submit(self, direction: Direction, copies: Copies) -> tuple[int, int]:
        """Enqueue ``copies``; ``(event, driver calls)``. If it raises, none of them is in flight."""
        lane = self._lanes[direction]
        with lane.lock:
            if self.lost is not None:
                raise TransferError(f"{self.uuid} is lost: {self.lost.what}", "engines detach; the next attach resets it")
            self.driver.use(self.context)
            event = 0
            try:
                event = self._event()
                calls = self._enqueue(lane, direction, copies)
                self.driver.record_event(event, lane.stream)
            except BaseException as e:
                self._fence(lane, e)
                if event:
                    self.recycle(event)
                raise
        if self.nudge is not None:
            self.nudge.poke()
        return event, calls

    def _enqueue(self, lane: _Lane, direction: Direction, copies: Copies) -> int:
        """Put ``copies`` on the lane's stream, or where it has to wait for them; the number of driver calls.

        Raises what the first part refused was refused with. By then no thread submits any more.
        """
        flat = self._many_flat(copies)
        submitters = self._submitters(lane, direction) if len(flat) else []
        own, *others = self._parts(copies, flat, 1 + len(submitters))
        if submitters:
            self.driver.record_event(lane.begin, lane.stream)
        jobs: list[Future[int]] = []
        calls = 0
        try:
            for submitter, rows in zip(submitters, others, strict=True):
                jobs.append(submitter.start(partial(self._enqueue_rows, lane, submitter, direction, rows)))
            for at in range(0, len(own), ROOM):
                calls += self.driver.submit(direction, own[at : at + ROOM], lane.room, self.ordinal, lane.stream)
        finally:
            for error in (job.exception() for job in jobs):  # waits for each
                if isinstance(error, CudaError):
                    self.note(error)
        for submitter, job in zip(submitters, jobs, strict=True):
            calls += job.result()
            self.driver.order_after(lane.stream, submitter.end)
        return calls

    def _enqueue_rows(self, lane: _Lane, submitter: _Submitter, direction: Direction, rows: Copies) -> int:
        """In a submitter's thread."""
        self.driver.use(self.context)
        self.driver.order_after(submitter.stream, lane.begin)
        calls = self.driver.submit_flat(direction, rows, self.ordinal, submitter.stream)
        self.driver.record_event(submitter.end, submitter.stream)
        return calls

    def _submitters(self, lane: _Lane, direction: Direction) -> list[_Submitter]:
        """All but the caller, or as many as can be made: without them copies are slower, not refused."""
        while len(lane.submitters) < self.submitters - 1 and not lane.no_more:
            n = len(lane.submitters) + 2
            try:
                lane.submitters.append(_Submitter(self.driver, f"maru-cuda{self.ordinal}-{direction.value}-{n}"))
            except (CudaError, RuntimeError) as e:
                if isinstance(e, CudaError) and e.sticky:
                    raise
                lane.no_more = True
                log.warning(
                    "%s: no thread %d to submit each %s's copies, which may be slower: %s", self.uuid, n, direction.value, e
                )
        return lane.submitters[: self.submitters - 1]

    def _many_flat(self, copies: Copies) -> npt.NDArray[np.intp]:
        """Indices of the flat rows, if they are enough to be shared out; else none."""
        none = np.empty(0, np.intp)
        if len(copies) <= ALONE or self.submitters == 1:
            return none
        flat = np.flatnonzero(self.driver.flat_rows(copies))
        return flat if len(flat) > ALONE else none

    def _parts(self, copies: Copies, flat: npt.NDArray[np.intp], n: int) -> list[Copies]:
        """What each of ``n`` submitting threads takes: an even share of the flat rows, and the caller all else."""
        if n == 1:
            return [copies]
        cuts = [len(flat) * i // n for i in range(1, n)]
        spans = [slice(*span) for span in pairwise([*cuts, len(flat)])]
        if len(flat) == len(copies):  # views: selecting costs 40 ns a row, under the GIL
            return [copies[: cuts[0]], *(copies[span] for span in spans)]
        return [np.delete(copies, flat[cuts[0] :]), *(copies[flat[span]] for span in spans)]

    def _event(self) -> int:
        try:
            return self._events.pop()
        except IndexError:
            return self.driver.create_event()  # kept afterwards

    def _fence(self, lane: _Lane, error: BaseException) -> None:
        """After a refused submission: what was accepted of it has ended before the caller hears."""
        if isinstance(error, CudaError):
            self.note(error)
        for stream in (lane.stream, *(other.stream for other in lane.submitters)):
            try:
                self.driver.wait_stream(stream)
            except CudaError as e:
                self.note(e)

    def ended(self, event: int) -> bool:
        """Whether the copies before ``event`` have ended (non-blocking)."""
        self.driver.use(self.context)
        return self.driver.event_done(event)

    def wait(self, event: int) -> None:
        self.driver.use(self.context)
        self.driver.wait_event(event)

    def recycle(self, event: int) -> None:
        self._events.append(event)

    def note(self, error: CudaError) -> None:
        """Remember a sticky error: the context is gone."""
        if error.sticky and self.lost is None:
            self.lost = error
            log.error("%s is lost: %s; its engines recompute until they attach again", self.uuid, error.what)

    def destroy(self) -> None:
        """Give everything back. Nothing is in flight, nothing imported."""
        others = [other for lane in self._lanes.values() for other in lane.submitters]
        for other in others:
            other.stop()
        if self.nudge is not None:
            self.nudge.close()
        try:
            if self.lost is not None:
                self.driver.reset(self.ordinal)
            else:
                self.driver.use(self.context)
                lanes = self._lanes.values()
                for event in (*self._events, *(lane.begin for lane in lanes), *(other.end for other in others)):
                    self.driver.destroy_event(event)
                for stream in (*(lane.stream for lane in lanes), *(other.stream for other in others)):
                    self.driver.destroy_stream(stream)
        except CudaError as e:
            log.warning("releasing %s: %s", self.uuid, e)
        try:  # whatever was refused above goes with the context
            self.driver.use(0)
            self.driver.release(self.ordinal)
        except CudaError as e:
            log.warning("releasing %s: %s", self.uuid, e)
        self._events.clear()
        for lane in self._lanes.values():
            lane.submitters.clear()
