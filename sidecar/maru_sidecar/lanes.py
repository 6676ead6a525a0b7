"""A lane per device: the transfer engine that reaches it, its loader and its writer.

Lanes are made at the first attach that needs one (no GPU context before an engine uses that GPU) and stay until the daemon
ends. A device that hangs holds up its own lane only.
"""

from __future__ import annotations

import threading
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
from maru_sidecar.store_queue import PendingChunks, Writer
from maru_sidecar.transfer.base import KvTarget, Peer, TransferEngine
from maru_sidecar.transfer.cpu import CpuTransfer

COPY_HANGS_S = 30.0  #: a slice of 16 MiB takes milliseconds; this one does not end any more


@dataclass(frozen=True, slots=True)
class Lane:
    """``device``: ``cpu`` or a GPU's UUID."""

    device: str
    transfer: TransferEngine
    loader: Loader
    writer: Writer

    def nudge(self) -> None:
        self.loader.nudge()
        self.writer.nudge()


class Lanes:
    """All lanes. :meth:`attach` is called from several threads."""

    def __init__(self, pool: PoolFile, directory: Directory, config: Transfer, shared: SharedSlabs | None = None) -> None:
        self._pool = pool
        self._shared = shared
        self._directory = directory
        self._config = config
        self._lock = threading.Lock()
        self._transfers: dict[str, TransferEngine] = {}
        self._lanes: dict[str, Lane] = {}
        self.pending = PendingChunks()

    def attach(self, layout: KvLayout, peer: Peer, fds: Sequence[int]) -> tuple[Lane, KvTarget]:
        """Import a worker's KV cache; may take seconds for a GPU's first context.

        Raises :class:`~maru_shm.errors.AttachRefused` naming what is unreachable and why.
        """
        kind = layout.regions[0].kind
        if any(r.kind is not kind or r.device != layout.regions[0].device for r in layout.regions):
            raise AttachRefused("the KV cache lies on several devices", "a worker's cache is on one device")
        with self._lock:
            transfer = self._transfer(kind)
        target = transfer.attach(layout, peer, fds)
        with self._lock:
            return self._lane(layout.regions[0].device or "cpu", transfer), target

    def _transfer(self, kind: RegionKind) -> TransferEngine:
        name = "cpu" if kind is RegionKind.PROCESS_VM else "cuda"
        transfer = self._transfers.get(name)
        if transfer is None:
            transfer = self._transfers[name] = self._make_cpu() if name == "cpu" else self._make_cuda(kind)
        return transfer

    def _make_cpu(self) -> TransferEngine:
        return CpuTransfer(self._pool.mapping, self._config.cpu_threads)

    def _make_cuda(self, kind: RegionKind) -> TransferEngine:
        try:
            from maru_sidecar.transfer.cuda import CudaTransfer
        except ImportError as e:
            raise AttachRefused(
                f"the KV cache is reached by {kind.value}, and this installation has no cuda engine ({e})",
                "install a release with maru_sidecar.transfer.cuda",
            ) from e
        return CudaTransfer(self._pool.mapping, self._pool.region_bytes)

    def _lane(self, device: str, transfer: TransferEngine) -> Lane:
        lane = self._lanes.get(device)
        if lane is not None:
            return lane
        c = self._config
        checked = c.checksum == "on" or (c.checksum == "auto" and transfer.name == "cpu")
        checker = SlabChecker(self._pool, self._directory) if checked else None
        loader = Loader(
            f"maru-loader-{device}", self._directory, checker,
            slice_bytes=c.slice_bytes, bytes_in_flight=c.bytes_in_flight, fence_timeout_s=c.fence_timeout_s,
            shared=self._shared,
        )  # fmt: skip
        writer = Writer(
            f"maru-writer-{device}", self._directory, self.pending, checker, loader.quiet,
            slice_bytes=c.slice_bytes, bytes_in_flight=c.bytes_in_flight, fence_timeout_s=c.fence_timeout_s,
            patience_s=c.store_patience_s,
        )  # fmt: skip
        loader.start()
        writer.start()
        lane = self._lanes[device] = Lane(device, transfer, loader, writer)
        return lane

    def all(self) -> list[Lane]:
        with self._lock:
            return list(self._lanes.values())

    def dead_threads(self) -> list[str]:
        """Names of the loaders, writers and copying threads that have ended though nobody stopped them."""
        dead = [t.name for lane in self.all() for t in (lane.loader, lane.writer) if not t.alive]
        cpu = self._transfers.get("cpu")
        return dead + (cpu.dead_threads() if isinstance(cpu, CpuTransfer) else [])

    def hanging_threads(self) -> list[str]:
        """Names of the loaders and writers whose oldest copy has been in flight for longer than ``COPY_HANGS_S``."""
        return [t.name for lane in self.all() for t in (lane.loader, lane.writer) if t.hangs(COPY_HANGS_S)]

    def close(self, timeout_s: float) -> bool:
        """Stop every thread after its copies in flight; False if one did not end in time (its engine is left alone then)."""
        stopped = True
        for lane in self.all():
            stopped = lane.loader.stop(timeout_s) and stopped
            stopped = lane.writer.stop(timeout_s) and stopped
        if stopped:
            for transfer in self._transfers.values():
                transfer.close()
        return stopped
