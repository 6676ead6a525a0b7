"""Lanes: a transfer engine with a loader and a writer of its own.

*One per GPU*, made at the first attach that needs it (no context before an engine uses that GPU), kept until the daemon ends.
*One per worker in host memory*, from its attach to its session's end. There the kernel copies from and to pages of the engine's
process, and a page fault over there may take for ever (userfaultfd, a FUSE mapping). Nothing but the death of that process ends
such a copy, so the threads in it are the engine's own: it holds up nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from maru_shm.errors import AttachRefused
from maru_shm.geometry import KvLayout, RegionKind
from maru_sidecar.checksum import SlabChecker
from maru_sidecar.config import Transfer
from maru_sidecar.directory import Directory
from maru_sidecar.loader import Loader
from maru_sidecar.pool import PoolFile
from maru_sidecar.sharing.slabs import SharedSlabs
from maru_sidecar.slab_reader import SlabReader
from maru_sidecar.store_queue import PendingChunks, Writer
from maru_sidecar.transfer.base import KvTarget, Peer, TransferEngine
from maru_sidecar.transfer.cpu import CpuTransfer

CPU = "cpu"
_RELEASE_S = 10.0  #: for threads that have nothing in flight


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """``device``: ``cpu`` or a GPU's UUID. ``own``: one worker's, ending with its session."""

    device: str
    transfer: TransferEngine
    loader: Loader
    writer: Writer
    own: bool

    def nudge(self) -> None:
        self.loader.nudge()
        self.writer.nudge()

    def hangs(self, limit_s: float) -> bool:
        """Whether a copy has been in flight for longer than that."""
        return self.loader.hangs(limit_s) or self.writer.hangs(limit_s)

    def dead_threads(self) -> list[str]:
        """Names of its threads that have ended though nobody stopped them."""
        dead = [t.name for t in (self.loader, self.writer) if not t.alive]
        return dead + (self.transfer.dead_threads() if isinstance(self.transfer, CpuTransfer) else [])


class Lanes:
    """All lanes. :meth:`attach` and :meth:`release` are called from several threads."""

    def __init__(self, pool: PoolFile, directory: Directory, config: Transfer, shared: SharedSlabs | None = None) -> None:
        self._pool = pool
        self._shared = shared
        self._directory = directory
        self._config = config
        self._lock = threading.Lock()
        self._cuda: TransferEngine | None = None
        self._devices: dict[str, Lane] = {}
        self._own: dict[int, Lane] = {}
        self._serial = 0
        self.pending = PendingChunks()

    def attach(self, layout: KvLayout, peer: Peer, fds: Sequence[int]) -> tuple[Lane, KvTarget]:
        """Import a worker's KV cache; may take seconds for a GPU's first context, and for ever in host memory.

        Raises :class:`~maru_shm.errors.AttachRefused` naming what is unreachable and why.
        """
        kind = layout.regions[0].kind
        if any(r.kind is not kind or r.device != layout.regions[0].device for r in layout.regions):
            raise AttachRefused("the KV cache lies on several devices", "a worker's cache is on one device")
        if kind is RegionKind.PROCESS_VM:
            return self._attach_host(layout, peer, fds)
        device = layout.regions[0].device
        with self._lock:
            cuda = self._cuda = self._cuda or self._make_cuda(kind)
        target = cuda.attach(layout, peer, fds)
        with self._lock:
            lane = self._devices.get(device)
            if lane is None:
                lane = self._devices[device] = self._make(device, device, cuda, own=False)
            return lane, target

    def _attach_host(self, layout: KvLayout, peer: Peer, fds: Sequence[int]) -> tuple[Lane, KvTarget]:
        transfer = CpuTransfer(self._pool.mapping, self._config.cpu_threads)
        target = transfer.attach(layout, peer, fds)
        try:
            with self._lock:
                self._serial += 1
                lane = self._own[self._serial] = self._make(CPU, f"{CPU}-{self._serial}", transfer, own=True)
        except BaseException:
            transfer.close()
            raise
        return lane, target

    def release(self, lane: Lane) -> None:
        """A session has ended; its copies have too, and its KV cache is forgotten."""
        if not lane.own:
            return
        with self._lock:
            self._own = {serial: other for serial, other in self._own.items() if other is not lane}
        _stop([lane], _RELEASE_S)
        lane.transfer.close()

    def _make_cuda(self, kind: RegionKind) -> TransferEngine:
        try:
            from maru_sidecar.transfer.cuda import CudaTransfer
        except ImportError as e:
            raise AttachRefused(
                f"the KV cache is reached by {kind.value}, and this installation has no cuda engine ({e})",
                "install a release with maru_sidecar.transfer.cuda",
            ) from e
        c = self._config
        return CudaTransfer(self._pool.mapping, self._pool.region_bytes, submitters=c.gpu_submitters, nudge=c.gpu_nudge)

    def _make(self, device: str, name: str, transfer: TransferEngine, *, own: bool) -> Lane:
        c = self._config
        checked = c.checksum == "on" or (c.checksum == "auto" and transfer.name == "cpu")
        checker = SlabChecker(self._pool) if checked else None
        loader = Loader(
            f"maru-loader-{name}", self._directory, SlabReader(self._pool), checker,
            slice_bytes=c.slice_bytes, bytes_in_flight=c.bytes_in_flight, fence_timeout_s=c.fence_timeout_s,
            shared=self._shared,
        )  # fmt: skip
        writer = Writer(
            f"maru-writer-{name}", self._directory, self.pending, checker, loader.quiet,
            slice_bytes=c.slice_bytes, bytes_in_flight=c.bytes_in_flight, fence_timeout_s=c.fence_timeout_s,
            patience_s=c.store_patience_s, shared=self._shared is not None,
        )  # fmt: skip
        lane = Lane(device, transfer, loader, writer, own)
        try:
            loader.start()
            writer.start()
        except BaseException:  # no thread could be started
            _stop([lane], _RELEASE_S)
            raise
        return lane

    def all(self) -> list[Lane]:
        with self._lock:
            return [*self._devices.values(), *self._own.values()]

    def dead_threads(self) -> list[str]:
        """Names of the loaders, writers and copying threads that have ended though nobody stopped them."""
        return [name for lane in self.all() for name in lane.dead_threads()]

    def hanging_threads(self) -> list[str]:
        """Names of the threads several engines share whose oldest copy does not end."""
        shared = [t for lane in self.all() if not lane.own for t in (lane.loader, lane.writer)]
        return [t.name for t in shared if t.hangs(self._config.copy_timeout_s)]

    def close(self, timeout_s: float) -> bool:
        """Stop every thread after its copies in flight; False if one did not end in time (its engine is left alone then)."""
        lanes = self.all()
        hanging = [lane for lane in lanes if lane.hangs(self._config.copy_timeout_s)]
        stopped = _stop([lane for lane in lanes if lane not in hanging], timeout_s) and _stop(hanging, 0.0)
        if stopped:
            for transfer in [lane.transfer for lane in lanes if lane.own] + ([self._cuda] if self._cuda is not None else []):
                transfer.close()
        return stopped


def _stop(lanes: Sequence[Lane], timeout_s: float) -> bool:
    """Stop the lanes' threads side by side; False if one did not end in time."""
    threads: list[Loader | Writer] = [t for lane in lanes for t in (lane.loader, lane.writer)]
    for thread in threads:
        thread.ask_to_stop()
    deadline = time.monotonic() + timeout_s
    ended = [thread.stop(max(0.0, deadline - time.monotonic())) for thread in threads]
    return all(ended)
