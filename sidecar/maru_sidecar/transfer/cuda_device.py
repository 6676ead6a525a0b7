"""One GPU as the sidecar uses it: context, two streams, a few events, imported allocations. Made at the first attach.

The context is the device's primary one, retained while an engine on that device is attached (about 0.5 GiB of its memory) and
released after the last; a sidecar without engines holds no GPU memory. Loads and stores have a stream each, of the highest
priority, so a store never queues before a hit. Events carry no timing, their waiters sleep in the kernel, and they are reused.

A *sticky* error (illegal address, ECC, a lost GPU) ends the context: every later call in it fails. The device is then
*lost*: its copies fail, its engines must detach, and the next attach tries to reset and make it anew. Where the driver refuses
that, the attach says so: the sidecar has to be restarted (the pool survives).
"""

from __future__ import annotations

import logging
import threading
from collections import deque

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

ROOM = 4096  #: descriptors per driver call
EVENTS = 64  #: copies in flight before another event is made

log = logging.getLogger(__name__)

_IPC_REMEDY = {
    MAP_FAILED: "run sidecar and engine in the same IPC and PID namespaces (containers: share both) and give both the same GPU",
    INVALID_CONTEXT: "the handle belongs to the sidecar's own process or to another driver instance; attach from the engine",
    INVALID_DEVICE: "make the engine's GPU visible to the sidecar (CUDA_VISIBLE_DEVICES, container device list)",
    INVALID_VALUE: "the engine freed this memory or made it with an allocator without IPC; let it register its KV cache again",
}


class _Lane:
    """One direction's stream and descriptor room; the lock keeps submissions in one piece."""

    def __init__(self, driver: CudaDriver) -> None:
        self.lock = threading.Lock()
        self.stream = driver.create_stream()
        self.room = driver.descriptors(ROOM)


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

    def __init__(self, driver: CudaDriver, uuid: str, ordinal: int) -> None:
        self.driver = driver
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
        calls = 0
        with lane.lock:
            if self.lost is not None:
                raise TransferError(f"{self.uuid} is lost: {self.lost.what}", "engines detach; the next attach resets it")
            self.driver.use(self.context)
            try:
                event = self._event()
                for at in range(0, len(copies), ROOM):
                    part = copies[at : at + ROOM]
                    calls += self.driver.submit(direction, part, lane.room, self.ordinal, lane.stream)
                self.driver.record_event(event, lane.stream)
            except CudaError as e:
                self._fence(lane.stream, e)
                raise
        return event, calls

    def _event(self) -> int:
        try:
            return self._events.pop()
        except IndexError:
            return self.driver.create_event()  # kept afterwards

    def _fence(self, stream: int, error: CudaError) -> None:
        """After a refused submission: what was accepted of it has ended before the caller hears."""
        self.note(error)
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
        try:
            if self.lost is not None:
                self.driver.reset(self.ordinal)
            else:
                self.driver.use(self.context)
                for event in self._events:
                    self.driver.destroy_event(event)
                for lane in self._lanes.values():
                    self.driver.destroy_stream(lane.stream)
            self.driver.use(0)
            self.driver.release(self.ordinal)
        except CudaError as e:
            log.warning("releasing %s: %s", self.uuid, e)
        self._events.clear()
