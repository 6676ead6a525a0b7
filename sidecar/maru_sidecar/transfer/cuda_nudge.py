"""An empty kernel beside copies, at most one a second: it shortens the engines' decode steps (``transfer.gpu_nudge``).

Measured on an H200 (driver 580.159, vLLM 0.26, Llama-3.1-8B, one request of 16k tokens): a decode step takes 5.32 ms, and 5.14
from the moment when another process runs an empty kernel or makes a context on the GPU, also after that process has ended. The
sidecar's own context does not do it, since it is made while the engine starts, before its CUDA graphs are captured; nor do its
copies, or an event on an idle stream (5.32); processes that spin beside it change nothing. With hits: 5.44 without this kernel,
5.22 with it, 5.21 beside a server of LMCache's, which copies by kernels. The driver does not say why. What helps has in common
that the GPU switches to the compute work of another context once the engine's graphs exist; a kernel every millisecond costs
the engine 0.5 ms a step.

So the kernel is loaded anew after each attach, as in the runs that were measured. It has no part in any transfer, and runs from
a thread of its own: the first time takes 70 ms, and whatever fails here is nobody else's failure.
"""

from __future__ import annotations

import logging
import threading

from maru_shm.cuda.driver import CudaDriver, CudaError

INTERVAL_S = 1.0
STOP_S = 5.0

log = logging.getLogger(__name__)


class Nudge:
    """One device's. Nothing here raises; what fails is said once, and no kernel is run any more."""

    def __init__(self, driver: CudaDriver, context: int, name: str) -> None:
        self._driver = driver
        self._context = context
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._renew = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as e:
            self._stop.set()
            _say(e)

    def renew(self) -> None:
        """An engine has attached."""
        self._renew = True

    def poke(self) -> None:
        """Copies were submitted: the kernel runs soon, if its time has come."""
        self._wake.set()

    def close(self) -> None:
        """The thread has ended on return, or hangs in the driver for :data:`STOP_S`."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def _serve(self) -> None:
        try:
            self._wake.wait()
            if not self._stop.is_set():
                self._driver.use(self._context)
                self._run()
        except Exception as e:  # noqa: BLE001 - copies go on without it, whatever it was
            _say(e)

    def _run(self) -> None:
        stream = self._driver.create_stream()
        module = kernel = 0
        try:
            while not self._stop.is_set():
                if self._renew and module:
                    loaded, module = module, 0
                    self._driver.unload(loaded)
                if not module:
                    self._renew = False
                    module, kernel = self._driver.load_empty()
                self._driver.launch_empty(kernel, stream)
                self._stop.wait(INTERVAL_S)
                self._wake.clear()
                if not self._stop.is_set():
                    self._wake.wait()
        finally:
            if module:
                self._driver.unload(module)
            self._driver.destroy_stream(stream)


def _say(error: Exception) -> None:
    log.info(
        "decode steps of the engines may take 2 to 5 %% longer than they could: an empty kernel cannot be run (%s)", error,
        exc_info=None if isinstance(error, CudaError) else error,
    )  # fmt: skip
