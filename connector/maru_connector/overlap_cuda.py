"""Overlapped loads on a GPU: the copy engine fills layer k+1 on a stream of its own while layer k is computed.

One event per layer, made once. ``wait_layer`` makes the compute stream wait for its layer's event, the host never waits; and it
submits the copies of a layer further on, so that submitting (0.1 ms a layer, 1.3 ms where no two blocks are neighbours)
happens between kernel launches, not before the first one, and needs no second thread that would contend for the GIL.

The copy stream first waits for what the compute stream was given before: in a step planned ahead that is the step before.

The pool is page-locked in the background, in pieces, with pauses as long as the work: the driver's lock is shared with the
engine's launches. It begins when the engine has served its first step: page-locking while CUDA graphs are being captured would
break the capture. A piece needs 20 to 450 ms per GiB, by page size. Where the device cannot lock read-only memory, or the
driver refuses, the path is not used.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maru_connector.log import get_logger
from maru_connector.pool_view import PoolView
from maru_shm.copy_runs import Kind, Runs
from maru_shm.copy_shapes import COPY, Copies, CopyPlanner, HostPieces
from maru_shm.cuda.driver import CudaDriver, CudaError
from maru_shm.errors import MaruError, TransferError
from maru_shm.geometry import Direction
from maru_shm.placed_planes import PlacedPlane

logger = get_logger("maru_connector")

AHEAD = 4  #: layers submitted before they are asked for
ROOM = 4096  #: descriptors per driver call
PIECE_BYTES = 64 << 20  #: pieces end at multiples of it in this process's addresses; slabs may lie in two
TRIAL_BYTES = 4096


class Engine(NamedTuple):
    """What the copier has to know of the engine on this device."""

    ordinal: int
    current_stream: Callable[[], int]  #: the compute stream's handle
    scratch: int  #: address of TRIAL_BYTES of device memory
    read_scratch: Callable[[], bytes]


class CudaCopier:
    """A :class:`~maru_connector.overlap.LayerCopier` for one GPU. Raises :class:`MaruError` if its driver is too old.

    ``layers``: in copy order. Made on the engine's thread, whose context it uses, before the engine serves.
    """

    verifies = False

    def __init__(self, layers: Sequence[tuple[PlacedPlane, ...]], engine: Engine, driver: CudaDriver | None = None) -> None:
        self._driver = driver or CudaDriver()
        self._engine = engine
        self._context = self._driver.current()
        pitch = self._driver.max_pitch(engine.ordinal)
        self._planners = [CopyPlanner(planes, pitch, HostPieces(0, PIECE_BYTES)) for planes in layers]
        self._room = self._driver.descriptors(ROOM)
        self._stream = self._driver.create_stream()
        self._begin = self._driver.create_event()
        self._arrived = [self._driver.create_event() for _ in layers]
        self._submitted = 0
        self._refused = False  #: the driver refused copies that were planned for it
        self._job: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]] | None = None
        self._runs: dict[Kind, Runs] = {}  #: of the job: its layers' blocks form the same ones
        self._locked: dict[int, list[int]] = {}  # view's address → pieces registered
        self._usable: set[int] = set()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    # --- the pool ---------------------------------------------------------------------------------------------------------
    def adopt(self, view: PoolView) -> None:
        """Page-lock it on a thread; :meth:`usable` afterwards."""
        thread = threading.Thread(target=self._adopt, args=(view,), name="maru-lock", daemon=True)
        thread.start()  # before anybody may join it
        self._threads.append(thread)

    def usable(self, view: PoolView) -> bool:
        return view.address in self._usable and not self._refused

    def _adopt(self, view: PoolView) -> None:
        pieces = self._locked.setdefault(view.address, [])
        started = time.monotonic()
        try:
            self._driver.use(self._context)
            if not self._driver.registers_read_only(self._engine.ordinal):
                raise TransferError("this device does not page-lock memory that is mapped read-only", "")
            address, end = view.address, view.address + view.size
            while address < end:
                before = time.monotonic()
                until = min(end, (address // PIECE_BYTES + 1) * PIECE_BYTES)
                self._driver.register_host(address, until - address, read_only=True)
                pieces.append(address)
                address = until
                if self._stop.wait(time.monotonic() - before):
                    return
            self._try(view)
        except MaruError as e:
            self._unlock(view)
            logger.info("maru: hits are loaded deferred, not overlapped with compute: %s.", e)
        else:
            self._usable.add(view.address)
            logger.info("maru: pool page-locked for overlapped loads in %.1f s.", time.monotonic() - started)

    def _try(self, view: PoolView) -> None:
        """One copy of the pool's first bytes, by the calls that loads use."""
        trial = np.zeros(1, COPY)
        trial["host"], trial["device"], trial["width"] = view.address, self._engine.scratch, TRIAL_BYTES
        trial["height"] = trial["depth"] = trial["host_layer"] = trial["device_layer"] = 1
        trial["host_row"] = trial["device_row"] = TRIAL_BYTES
        self._driver.submit(Direction.LOAD, trial, self._driver.descriptors(1), self._engine.ordinal, self._stream)
        self._driver.wait_stream(self._stream)
        if self._engine.read_scratch()[:8] != ctypes.string_at(view.address, 8):
            raise TransferError("a trial copy out of the pool did not arrive", "report the driver's version")

    def forget(self, view: PoolView) -> None:
        for thread in self._threads:
            thread.join()
        self._usable.discard(view.address)
        self._unlock(view)

    def _unlock(self, view: PoolView) -> None:
        try:
            self._driver.use(self._context)
            for address in self._locked.pop(view.address, ()):
                self._driver.unregister_host(address)
        except MaruError as e:  # the context is gone, and the registration with it
            logger.debug("unregistering the pool: %s", e)

    # --- a job ------------------------------------------------------------------------------------------------------------
    def start(self, slabs: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int32]) -> None:
        self._job, self._runs, self._submitted = (slabs, blocks), {}, 0
        self._driver.record_event(self._begin, self._engine.current_stream())
        self._driver.order_after(self._stream, self._begin)
        self._submit_to(AHEAD)

    def _submit_to(self, end: int) -> None:
        assert self._job is not None
        while self._submitted < min(end, len(self._planners)):
            layer, self._submitted = self._submitted, self._submitted + 1
            copies = self._planners[layer].plan(*self._job, known=self._runs)
            for at in range(0, len(copies), ROOM):
                self._submit(copies[at : at + ROOM])
            self._driver.record_event(self._arrived[layer], self._stream)

    def _submit(self, copies: Copies) -> None:
        """The hit is claimed: a copy that the driver refuses is made another way, and no further hit comes here."""
        if not self._refused:
            try:
                self._driver.submit(Direction.LOAD, copies, self._room, self._engine.ordinal, self._stream)
            except CudaError as e:
                if e.sticky:
                    raise
                self._refused = True
                logger.error("maru: overlapped loads are given up, this one goes on through a staging buffer: %s.", e)
            else:
                return
        self._driver.load_staged(copies, self._stream)

    def wait_layer(self, layer: int) -> None:
        self._submit_to(layer + 1 + AHEAD)
        self._driver.order_after(self._engine.current_stream(), self._arrived[layer])

    def wait_all(self) -> None:
        self._submit_to(len(self._planners))
        self._driver.order_after(self._engine.current_stream(), self._arrived[-1])

    def finish(self) -> None:
        """The host waits, the GPU does not: the step's kernels are launched, and the last of them wait for the last copy."""
        self.wait_all()
        self._driver.wait_event(self._arrived[-1])
        self._job = None

    def close(self) -> None:
        """Stop page-locking, and give stream and events back. No copy runs."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        try:
            self._driver.use(self._context)
            for event in (self._begin, *self._arrived):
                self._driver.destroy_event(event)
            self._driver.destroy_stream(self._stream)
        except MaruError as e:
            logger.debug("closing the copy stream: %s", e)


def torch_engine(ordinal: int) -> Engine:
    """The torch engine of this process on ``cuda:<ordinal>``."""
    import torch

    scratch = torch.empty(TRIAL_BYTES, dtype=torch.uint8, device=f"cuda:{ordinal}")
    return Engine(
        ordinal,
        lambda: int(torch.cuda.current_stream(ordinal).cuda_stream),
        scratch.data_ptr(),
        lambda: bytes(scratch.cpu().numpy().tobytes()),
    )
