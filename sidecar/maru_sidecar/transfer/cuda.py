"""The ``cuda`` engine: an engine's paged KV cache on a GPU, imported by CUDA IPC, moved by the copy engines alone.

No kernel takes part: from a second process one that reads host memory slows the engine by 90 to 120 %, the copy engine by 0 to
6 % (H200). One request is one driver call, or two (``cuMemcpy3DBatchAsync`` and ``cuMemcpyBatchAsync``; one call per copy on
drivers older than 12.8) over descriptors from :mod:`~maru_shm.copy_shapes`.

Nothing of CUDA is touched before the first :meth:`CudaTransfer.attach`. A machine without a driver or without the engine's GPU
refuses that attach by name. After the last engine of a device has detached its context goes, in the background.

A copy never waits for anything of the peer: ordering with the engine's stream is the fence word's business, polled on the CPU
before ``submit``. So a copy ends whatever happens to the engine: memory of a dead process stays mapped until
:meth:`CudaTarget.close` unmaps it. ``wait`` then raises ``EngineGone`` all the same: what was copied is not believed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maru_shm.copy_shapes import CopyPlanner
from maru_shm.cuda.driver import CudaDriver, CudaError
from maru_shm.errors import AttachRefused, EngineGone, MaruError, PlatformUnsupported, TransferError
from maru_shm.geometry import WHOLE, Direction, KvLayout, RegionKind, Share
from maru_shm.placed_planes import place
from maru_sidecar.transfer.base import MayGoOn, Peer, PoolMapping
from maru_sidecar.transfer.cpu import peer_exited
from maru_sidecar.transfer.cuda_device import CudaDevice, Mapping
from maru_sidecar.transfer.cuda_pinning import PinState, PoolPinning

_KINDS = (RegionKind.CUDA_IPC, RegionKind.CUDA_VMM)

#: Going over to another imported allocation within a submission takes 45 to 75 µs of CPU (driver 580), in which the copy engine
#: moves up to 4 MiB: a slice should hold twice that per allocation, or submitting becomes the bottleneck.
_SLICE_PER_ALLOCATION = 8 << 20
_ALLOCATIONS_PER_PART = 4


@dataclass(frozen=True, slots=True)
class CudaStatistics:
    """Counts since the start, over all devices."""

    submissions: int
    copies: int  #: descriptors
    calls: int  #: driver calls
    nbytes: int
    cpu_ns: int  #: CPU time of planning and submitting, of the calling threads
    devices: int  #: with a live context
    lost: tuple[str, ...]  #: UUIDs whose context is gone
    pin_state: PinState
    pinned_bytes: int
    pin_refusal: str


class CudaTransfer:
    """Transfer engine for CUDA IPC and VMM regions.

    ``region_bytes``: the pool's region size; the pool is registered in multiples of it (0: 1 GiB). ``pin=False`` never
    registers the pool: every copy is pageable. ``submitters``: threads per device and direction. ``nudge``: see
    ``cuda_nudge.py``. ``driver``: for tests; loaded at the first attach otherwise.
    """

    name = "cuda"

    def __init__(
        self,
        pool: PoolMapping,
        region_bytes: int = 0,
        *,
        pin: bool = True,
        submitters: int = 1,
        nudge: bool = False,
        driver: CudaDriver | None = None,
    ) -> None:
        self.pool = pool
        self.submitters = submitters
        self.nudge = nudge
        self.pinning = PoolPinning(pool, region_bytes)
        self._pin = pin
        self._pin_owner: CudaDevice | None = None
        self._driver = driver
        self._devices: dict[str, CudaDevice] = {}
        self._lock = threading.Lock()
        self._targets: set[CudaTarget] = set()
        self._reaper: threading.Thread | None = None
        self._closed = False
        self._count_lock = threading.Lock()
        self._counts = [0, 0, 0, 0, 0]

    def attach(self, layout: KvLayout, peer: Peer, fds: Sequence[int] = ()) -> CudaTarget:
        """Import the cache. ``fds``: one per VMM region, in their order; the caller closes them.

        Raises :class:`~maru_shm.errors.AttachRefused` naming what is missing: the driver, the GPU, or a region and why.
        """
        uuid, region_fds = _check(layout, fds)
        with self._lock:
            if self._closed:
                raise AttachRefused("the cuda engine is closed", "the sidecar is stopping")
            device = self._device(uuid)
            imports = self._import(device, layout, region_fds)
            device.targets += 1
            if device.nudge is not None:
                device.nudge.renew()
            target = CudaTarget(self, device, layout, peer, imports)
            self._targets.add(target)
            if self._pin and self._pin_owner is None:
                self._pin_owner = device
                self.pinning.start(device.driver, device.context)
            return target

    def _import(self, device: CudaDevice, layout: KvLayout, fds: Sequence[int]) -> list[tuple[Mapping, int]]:
        """Every region's mapping and address, in region order; all or none."""
        imports: list[tuple[Mapping, int]] = []
        try:
            for i, (region, fd) in enumerate(zip(layout.regions, fds, strict=True)):
                imports.append(device.import_region(i, region, fd))
        except MaruError:
            for mapping, _ in imports:
                device.drop(mapping)
            self._reap_later()
            raise
        return imports

    def _device(self, uuid: str) -> CudaDevice:
        try:
            if self._driver is None:
                self._driver = CudaDriver()
            known = self._devices.get(uuid)
            if known is not None and known.lost is None:
                return known
            if known is not None:
                if known.targets:
                    raise AttachRefused(
                        f"{uuid} is lost ({known.lost}) and {known.targets} engines are still attached",
                        "attach again when they have detached",
                    )
                self._reap()
            visible = self._driver.devices()
            if uuid not in visible:
                raise AttachRefused(
                    f"the engine's GPU {uuid} is not visible here (visible: {', '.join(sorted(visible)) or 'none'})",
                    "start the sidecar with that GPU: CUDA_VISIBLE_DEVICES, container device list",
                )
            device = self._devices[uuid] = CudaDevice(self._driver, uuid, visible[uuid], self.submitters, nudge=self.nudge)
        except PlatformUnsupported as e:
            raise AttachRefused(f"no CUDA here: {e.what}", e.remedy) from e
        except CudaError as e:
            raise AttachRefused(
                f"the GPU {uuid} cannot be used: {e.what}", "check it with nvidia-smi; after a lost context restart the sidecar"
            ) from e
        return device

    def forget(self, target: CudaTarget, device: CudaDevice) -> None:
        """``target`` has unmapped everything."""
        with self._lock:
            self._targets.discard(target)
            device.targets -= 1
            if device.targets == 0:
                self._reap_later()

    def _reap_later(self) -> None:
        """Release idle devices on a thread of their own: unregistering a large pool takes seconds."""
        self._reaper = threading.Thread(target=self._reap_locked, name="maru-cuda-release", daemon=True)
        self._reaper.start()

    def _reap_locked(self) -> None:
        with self._lock:
            self._reap()

    def _reap(self) -> None:
        """Release each device that no engine uses, the pool's registration before the context it lives in."""
        for uuid, device in list(self._devices.items()):
            others = [d for d in self._devices.values() if d.targets and d is not device and d.lost is None]
            if device.targets or (self._pin_owner is device and others and device.lost is None):
                continue
            if self._pin_owner is device:
                self.pinning.stop(device.driver, device.context)
                self._pin_owner = None
            device.destroy()
            del self._devices[uuid]
            if self._pin and self._pin_owner is None and others:
                self._pin_owner = others[0]
                self.pinning.start(others[0].driver, others[0].context)

    def count(self, copies: int, calls: int, nbytes: int, cpu_ns: int) -> None:
        with self._count_lock:
            for i, n in enumerate((1, copies, calls, nbytes, cpu_ns)):
                self._counts[i] += n

    def statistics(self) -> CudaStatistics:
        devices = list(self._devices.values())
        with self._count_lock:
            submissions, copies, calls, nbytes, cpu_ns = self._counts
        return CudaStatistics(
            submissions, copies, calls, nbytes, cpu_ns, len(devices), tuple(d.uuid for d in devices if d.lost),
            self.pinning.state, self.pinning.pinned_bytes, self.pinning.refusal,
        )  # fmt: skip

    def close(self) -> None:
        """Close every target and release every device. Idempotent."""
        with self._lock:
            self._closed = True
            targets = list(self._targets)
        for target in targets:
            target.close()
        if self._reaper is not None:
            self._reaper.join()
        self._reap_locked()


def _check(layout: KvLayout, fds: Sequence[int]) -> tuple[str, list[int]]:
    """``(GPU UUID, descriptor or -1 of each region)``. Raises :class:`AttachRefused` for what this engine cannot import."""
    vmm = iter(fds)
    region_fds: list[int] = []
    for i, region in enumerate(layout.regions):
        if region.kind not in _KINDS:
            raise AttachRefused(f"region {i} is {region.kind.value}, not CUDA memory", "all regions of a cache are of one kind")
        if region.device != layout.regions[0].device or not region.device:
            raise AttachRefused(
                f"region {i} is on GPU {region.device or '(none)'}, region 0 on {layout.regions[0].device or '(none)'}",
                "a worker's cache lies on one GPU, named by its UUID",
            )
        fd = next(vmm, -1) if region.kind is RegionKind.CUDA_VMM else -1
        if region.kind is RegionKind.CUDA_VMM and fd < 0:
            raise AttachRefused(
                f"region {i} is a VMM allocation without a file descriptor", "send one descriptor per VMM region"
            )
        region_fds.append(fd)
    return layout.regions[0].device, region_fds


class CudaTarget:
    """One worker's KV cache, mapped here."""

    def __init__(
        self, engine: CudaTransfer, device: CudaDevice, layout: KvLayout, peer: Peer, imports: Sequence[tuple[Mapping, int]]
    ) -> None:
        self.layout = layout
        self.peer = peer
        self.device = device
        planes = place(layout, [address for _, address in imports], [mapping.address for mapping, _ in imports])
        self.planner = CopyPlanner(planes, device.max_pitch, engine.pinning.pieces)
        self._engine = engine
        self._mappings = [mapping for mapping, _ in imports]
        #: submissions smaller than this (bytes) waste the link: 24 instead of 44 GB/s at 64 MiB over 32 allocations (H200)
        self.slice_hint = _SLICE_PER_ALLOCATION * len({mapping.address for mapping in self._mappings})
        #: by allocation: all chunks of a span, a few layers at a time. The going over is paid once per span, and blocks that
        #: fall from chunk to chunk make long columns: 52 GB/s where slices of 8 chunks made 42 (H200)
        self.parts = max(1, self.planner.allocations // _ALLOCATIONS_PER_PART)
        self._copies: set[CudaCopy] = set()
        self._submitting = 0
        self._idle = threading.Condition()
        self._closed = False

    def submit(
        self,
        direction: Direction,
        slab_offsets: npt.NDArray[np.uint64],
        blocks: npt.NDArray[np.int32],
        share: Share = WHOLE,
        may_go_on: MayGoOn | None = None,
    ) -> CudaCopy:
        """See :class:`~maru_sidecar.transfer.base.KvTarget`. About 6 µs per descriptor, more where the pool is not pinned."""
        start = time.thread_time_ns()
        slabs = slab_offsets.astype(np.uint64) + np.uint64(self._engine.pool.address)
        copies = self.planner.plan(slabs, blocks, share)
        nbytes = int((copies["width"] * copies["height"] * copies["depth"]).sum())
        if not len(copies):
            return CudaCopy(self, 0, 0, 0)
        if peer_exited(self.peer.pidfd):
            raise EngineGone(f"process {self.peer.pid} has ended", "")
        with self._idle:
            if self._closed:
                raise TransferError("this KV cache is detached", "")
            self._submitting += 1
        copy = None
        try:
            if may_go_on is not None:
                may_go_on()
            event, calls = self.device.submit(direction, copies)
            copy = CudaCopy(self, event, nbytes, len(copies))
        finally:
            with self._idle:
                self._submitting -= 1
                if copy is not None:
                    self._copies.add(copy)
                self._idle.notify_all()
        self._engine.count(len(copies), calls, nbytes, time.thread_time_ns() - start)
        return copy

    def checksum(self, blocks: npt.NDArray[np.int32]) -> None:
        """None: the CPU would have to fetch the bytes from the GPU a second time."""

    def ended(self, copy: CudaCopy) -> None:
        with self._idle:
            self._copies.discard(copy)

    def close(self) -> None:
        with self._idle:
            if self._closed:
                return
            self._closed = True
            while self._submitting:
                self._idle.wait()
            copies = list(self._copies)
        for copy in copies:
            copy.settle()
        for mapping in self._mappings:
            self.device.drop(mapping)
        self._engine.forget(self, self.device)


class CudaCopy:
    """A copy in flight. ``operations``: its descriptors. Any thread may ask or wait."""

    def __init__(self, target: CudaTarget, event: int, nbytes: int, operations: int) -> None:
        self.nbytes = nbytes
        self.operations = operations
        self._target = target
        self._event = event  #: 0: none, or given back
        self._ended = not event
        self._waiters = 0
        self._lock = threading.Lock()
        self._error: TransferError | None = None

    def done(self) -> bool:
        with self._lock:
            if not self._ended:
                try:
                    if not self._target.device.ended(self._event):
                        return False
                    self._finish(None)
                except CudaError as e:
                    self._finish(e)
            return True

    def settle(self) -> None:
        """Block without the GIL until no byte of it moves any more; raises nothing."""
        with self._lock:
            if self._ended:
                return
            self._waiters += 1
        error: CudaError | None = None
        try:
            self._target.device.wait(self._event)
        except CudaError as e:
            error = e
        with self._lock:
            self._waiters -= 1
            self._finish(error)

    def _finish(self, error: CudaError | None) -> None:
        """Under the lock: take the result down once; the event goes back when nobody waits on it."""
        device, peer = self._target.device, self._target.peer
        if not self._ended:
            self._ended = True
            self._error = error
            if error is not None:
                device.note(error)
            elif peer_exited(peer.pidfd):
                self._error = EngineGone(f"process {peer.pid} ended during a copy", "")
            self._target.ended(self)
        if self._event and not self._waiters:
            device.recycle(self._event)
            self._event = 0

    def wait(self) -> None:
        self.settle()
        if self._error is not None:
            raise self._error
