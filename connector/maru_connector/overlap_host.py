"""Overlapped loads for a KV cache in host memory: one thread copies, attention waits for its layer.

The copies release the GIL, as the engine's own kernels do, so both really run at once; on a machine without a GPU this is how
the path is tested on a real engine.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from maru_connector.pool_view import PoolView
from maru_shm.copy_runs import Kind, Runs
from maru_shm.copy_shapes import Copies, CopyPlanner
from maru_shm.errors import TransferError
from maru_shm.placed_planes import PlacedPlane

_NO_PITCH_LIMIT = 1 << 62
_Job = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]


class HostCopier:
    """A :class:`~maru_connector.overlap.LayerCopier` on ``memmove``. ``layers``: in copy order."""

    verifies = True

    def __init__(self, layers: Sequence[tuple[PlacedPlane, ...]]) -> None:
        self._planners = [CopyPlanner(planes, _NO_PITCH_LIMIT) for planes in layers]
        self._arrived = [threading.Event() for _ in layers]
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def adopt(self, view: PoolView) -> None:
        """Nothing to do: the kernel brings the pages in as they are touched."""

    def usable(self, view: PoolView) -> bool:
        return True

    def forget(self, view: PoolView) -> None:
        """Nothing to undo."""

    def start(self, slabs: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int32]) -> None:
        """The engine computes on the calling thread: work launched before has finished."""
        for arrived in self._arrived:
            arrived.clear()
        self._error = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="maru-overlap", daemon=True)
            self._thread.start()
        self._jobs.put((slabs, blocks))

    def wait_layer(self, layer: int) -> None:
        self._arrived[layer].wait()
        if self._error is not None:
            raise TransferError(f"an overlapped load failed: {self._error}", "restart the engine") from self._error

    def wait_all(self) -> None:
        for layer in range(len(self._arrived)):
            self.wait_layer(layer)

    def finish(self) -> None:
        self.wait_all()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            runs: dict[Kind, Runs] = {}
            try:
                for planner, arrived in zip(self._planners, self._arrived, strict=True):
                    _copy(planner.plan(*job, known=runs))
                    arrived.set()
            except Exception as e:  # noqa: BLE001 - the engine's thread raises it: nobody may wait for ever
                self._error = e
                for arrived in self._arrived:
                    arrived.set()


def _copy(copies: Copies) -> None:
    for host, device, width, height, depth, host_row, host_layer, device_row, device_layer in copies.tolist():
        for z in range(depth):
            for y in range(height):
                source = host + (z * host_layer + y) * host_row
                ctypes.memmove(device + (z * device_layer + y) * device_row, source, width)
