"""Page-locking the pool for the copy engines, in the background and piece by piece.

Only registered memory is copied at the link's speed (55 GB/s against 7 to 12, H200). Registering costs 20 to 450 ms per GiB,
by page size and by whether the pages exist, so it never happens on a request's path: it starts at the first attach, while
the engine still warms up. A piece not yet registered is copied as pageable memory, slower and just as right; the driver
decides per copy. Pieces start and end on region boundaries, so no slab lies in two, and no copy may (``copy_shapes.py``).

Where the driver refuses (confidential computing, a locked-memory limit, a device mapping it cannot pin) that is said once
and the rest of the pool stays pageable.
"""

from __future__ import annotations

import enum
import logging
import threading

from maru_shm.copy_shapes import HostPieces
from maru_shm.cuda.driver import CudaDriver, CudaError
from maru_sidecar.transfer.base import PoolMapping

PIECE_BYTES = 1 << 30  #: large enough that calls do not count, small enough that the first one is there soon

log = logging.getLogger(__name__)


class PinState(enum.Enum):
    IDLE = "idle"  #: no engine attached
    PINNING = "pinning"
    PINNED = "pinned"
    REFUSED = "refused"  #: what is not registered stays pageable


class PoolPinning:
    """The pool's registration. It belongs to one context, portable to all; :meth:`stop` must precede that context's end."""

    def __init__(self, pool: PoolMapping, region_bytes: int) -> None:
        step = region_bytes or PIECE_BYTES
        self._pool = pool
        self._piece = step * max(1, PIECE_BYTES // step)
        self._registered: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.state = PinState.IDLE
        self.refusal = ""
        self.pinned_bytes = 0
        self._said = False

    @property
    def pieces(self) -> HostPieces:
        return HostPieces(self._pool.address, self._piece)

    def start(self, driver: CudaDriver, context: int) -> None:
        """Begin unless begun."""
        if self._thread is None:
            self._stop.clear()
            self.state = PinState.PINNING
            self._thread = threading.Thread(target=self._run, args=(driver, context), name="maru-pin", daemon=True)
            self._thread.start()

    def join(self, timeout: float | None = None) -> PinState:
        """Wait until nothing more will be registered (or ``timeout`` seconds); the state then."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.state

    def _run(self, driver: CudaDriver, context: int) -> None:
        try:
            driver.use(context)
            for offset in range(0, self._pool.size, self._piece):
                if self._stop.is_set():
                    return
                size = min(self._piece, self._pool.size - offset)
                driver.register_host(self._pool.address + offset, size)
                self._registered.append(self._pool.address + offset)
                self.pinned_bytes += size
            self.state = PinState.PINNED
        except CudaError as e:
            self.state = PinState.REFUSED
            self.refusal = e.what
            if not self._said:
                self._said = True
                log.warning(
                    "the pool is pinned up to %d of %d bytes: %s; copies of the rest run pageable, several times slower "
                    "(check the locked-memory limit and, with confidential computing, expect no pinning)",
                    self.pinned_bytes, self._pool.size, e.what,
                )  # fmt: skip

    def stop(self, driver: CudaDriver, context: int) -> None:
        """End registering and undo it. No copy of the pool may be in flight."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        try:
            driver.use(context)
            for address in self._registered:
                driver.unregister_host(address)
        except CudaError as e:  # a lost context took the registration with it
            log.debug("unregistering the pool: %s", e)
        self._registered.clear()
        self.pinned_bytes = 0
        self.state = PinState.IDLE
