"""An empty kernel beside stores, at most one a second: it shortens the engines' decode steps by 3 % (``transfer.gpu_nudge``).

Measured on an H200 (driver 580.159, vLLM 0.26, Llama-3.1-8B, one request of 16k tokens): a decode step takes 5.38 ms, and 5.20
from the moment when another process makes a context on the GPU, also after that process has ended. Processes that spin beside
it change nothing. The sidecar's own context does not do it, since it is made while the engine starts, before its CUDA graphs
are captured; nor do copies, or an event on an idle stream (5.36). With this kernel steps took 5.15, beside a server of
LMCache's, which copies by kernels, 5.14 in the same run. The driver does not say why. What helps has in common that the GPU
switches to the compute work of another context once the engine's graphs exist; a switch costs the engine about 0.1 ms.

So the kernel is loaded anew after each attach, as in the runs that were measured. It has no part in any transfer.
"""

from __future__ import annotations

import logging
import threading
import time

from maru_shm.cuda.driver import CudaDriver, CudaError

INTERVAL_S = 1.0

log = logging.getLogger(__name__)


class Nudge:
    """One device's. Its context is current in the calling thread. What fails is said once, and no kernel is run any more."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._stream = self._module = self._kernel = 0
        self._last = -INTERVAL_S
        self._failed = False
        try:
            self._stream = driver.create_stream()
            self._load()  # the first time takes 70 ms: the driver's compiler is loaded. No store shall wait for that.
            self._unload()
        except CudaError as e:
            self._give_up(e)

    def renew(self) -> None:
        """An engine has attached."""
        with self._lock:
            try:
                self._unload()
            except CudaError as e:
                self._give_up(e)

    def run(self) -> None:
        """Run the kernel if its time has come; returns without waiting for it. Raises a sticky :class:`CudaError`."""
        if self._failed or time.monotonic() - self._last < INTERVAL_S:
            return
        with self._lock:
            if self._failed:
                return
            self._last = time.monotonic()
            try:
                if not self._module:
                    self._load()
                self._driver.launch_empty(self._kernel, self._stream)
            except CudaError as e:
                self._give_up(e)

    def close(self) -> None:
        """Raises :class:`CudaError`."""
        with self._lock:
            self._failed = True
            self._unload()
            if self._stream:
                self._driver.destroy_stream(self._stream)
                self._stream = 0

    def _load(self) -> None:
        self._module, self._kernel = self._driver.load_empty()

    def _unload(self) -> None:
        if self._module:
            module, self._module = self._module, 0
            self._driver.unload(module)

    def _give_up(self, error: CudaError) -> None:
        self._failed = True
        if error.sticky:
            raise error
        log.info("decode steps of the engines may take 3 %% longer than they could: an empty kernel cannot be run (%s)", error)
