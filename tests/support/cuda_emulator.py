"""The CUDA driver's copy calls, emulated on host memory for machines without a GPU.

:class:`EmulatedDriver` is the project's driver wrapper with the library underneath replaced: it decodes the very descriptors
the driver would get. Streams run in order, and only when an event or stream is waited for: until then work is in flight. What
waits for another stream's event makes that stream run first. A copy that touches a byte outside the host window or outside one
allocation fails the test.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from maru_shm.copy_shapes import COPY, Copies
from maru_shm.cuda import driver as D
from maru_shm.cuda.descriptors import BATCH_OP, MEMCPY3D

GPU = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
MAX_PITCH = (1 << 31) - 1


def execute(copy: np.void, *, to_device: bool, check: Callable[[str, int, int], None]) -> None:
    """Perform one :data:`COPY` as the hardware would, row by row; ``check(side, address, size)`` sees each row."""
    width, height, depth = (int(copy[k]) for k in ("width", "height", "depth"))
    assert width > 0
    assert height > 0
    assert depth > 0
    for side in ("host", "device"):
        assert width <= copy[f"{side}_row"] <= MAX_PITCH or height == depth == 1
        assert height <= copy[f"{side}_layer"]
    for z in range(depth):
        for y in range(height):
            host, device = (
                int(copy[s]) + (z * int(copy[f"{s}_layer"]) + y) * int(copy[f"{s}_row"]) for s in ("host", "device")
            )
            check("host", host, width)
            check("device", device, width)
            ctypes.memmove(*((device, host) if to_device else (host, device)), width)


@dataclass
class _Stream:
    pending: list[Callable[[], int | None]] = field(default_factory=list)  #: NOT_READY: it stays pending
    done: int = 0  #: operations that have run since the start
    queued: int = 0


class EmulatedDriver(D.CudaDriver):
    """``batch``: which cuMemcpy3DBatchAsync there is (2, 1 or 0). ``fail``: call name → CUresult it returns from now on."""

    def __init__(self, host: npt.NDArray[np.uint8], *, batch: int = 2) -> None:
        self._calls = {name: getattr(self, name.removesuffix("_v2")) for name in D._CALLS}
        self._calls["cuMemcpy3DBatchAsync_v2"] = self.batch_v2
        self._calls["cuMemcpy3DBatchAsync"] = self.batch_v1
        self._calls["cuMemcpyBatchAsync_v2"] = self.flat_v2
        self._calls["cuMemcpyBatchAsync"] = self.flat_v1
        self._batch = batch
        self.version = (12000, 12080, 13000)[batch]
        self.host = host
        self.fail: dict[str, int] = {}
        self.allocations: dict[int, npt.NDArray[np.uint8]] = {}
        self.handles: dict[bytes, int] = {}
        self.opened: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}
        self.registered: dict[int, int] = {}
        self.contexts = 0
        self.current_context = 0  #: the last one that any thread made current
        self.resets = 0
        self.streams: dict[int, _Stream] = {}
        self.events: dict[int, tuple[_Stream, int]] = {}
        self.batches: list[int] = []  #: descriptors of each pitched batch call
        self.flat_batches: list[int] = []  #: rows of each flat one
        self.rows_taken: dict[int, int] = {}  #: stream → flat rows it ever took
        self.refusals: dict[int, list[int]] = {}  #: stream → results of its next flat calls, in order; then it takes them again
        self.modules: dict[int, int] = {}  #: loaded → launches of its kernel
        self.kernels = 0  #: launches in all
        self.hold = threading.Event()  #: clear: queries say "not ready" and waits block
        self.hold.set()
        self.held: set[int] = set()  #: streams that do not run: queries of what depends on them say "not ready"
        self._run_lock = threading.RLock()
        self._next = 0x1000

    def _call(self, name: str, *arguments: object) -> None:
        if name in self.fail:
            raise self.error(name, self.fail[name])
        super()._call(name, *arguments)

    # --- what tests use -----------------------------------------------------------------------------------------------------
    def allocate(self, size: int, fill: npt.NDArray[np.uint8] | None = None) -> tuple[bytes, npt.NDArray[np.uint8]]:
        """An engine's allocation: ``(its 64-byte handle, its bytes)``."""
        memory = np.zeros(size, np.uint8) if fill is None else fill
        handle = len(self.handles).to_bytes(8, "little") * 8
        self.allocations[memory.ctypes.data] = memory
        self.handles[handle] = memory.ctypes.data
        return handle, memory

    def check(self, side: str, address: int, size: int) -> None:
        spans = [(a, self.allocations[a].nbytes) for a, n in self.opened.items() if n > 0]
        if side == "host":
            spans = [(self.host.ctypes.data, self.host.nbytes), *self.registered.items()]
        assert any(a <= address and address + size <= a + n for a, n in spans), f"{side} copy outside: {address:#x}+{size}"

    # --- the driver's side --------------------------------------------------------------------------------------------------
    def _new(self) -> int:
        self._next += 1
        return self._next

    def cuInit(self, _flags: int) -> int:
        return 0

    def cuDriverGetVersion(self, out: ctypes._CArgObject) -> int:
        return 0

    def cuGetErrorName(self, code: int, out: object) -> int:
        out._obj.value = f"EMULATED_{code}".encode()  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetCount(self, out: object) -> int:
        return _put(out, 1)

    def cuDeviceGet(self, out: object, ordinal: int) -> int:
        return _put(out, ordinal)

    def cuDeviceGetUuid(self, out: ctypes.Array[ctypes.c_char], device: int) -> int:
        out.raw = bytes(range(16))
        return 0

    def cuDeviceGetAttribute(self, out: object, attribute: int, device: int) -> int:
        return _put(out, MAX_PITCH)

    def cuDevicePrimaryCtxSetFlags(self, device: int, flags: int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, out: object, device: int) -> int:
        self.contexts += 1
        return _put(out, self._new())

    def cuDevicePrimaryCtxRelease(self, device: int) -> int:
        self.contexts -= 1
        return 0

    def cuDevicePrimaryCtxReset(self, device: int) -> int:
        self.resets += 1
        self.fail.clear()
        return 0

    def cuCtxSetCurrent(self, context: int) -> int:
        self.current_context = context
        return 0

    def cuCtxGetCurrent(self, out: object) -> int:
        return _put(out, 1)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        until = self.events[event]  # as recorded now
        self.streams[stream].pending.append(lambda: self._run(*until))
        self.streams[stream].queued += 1
        return 0

    def cuCtxGetStreamPriorityRange(self, least: object, greatest: object) -> int:
        return _put(greatest, -5)

    def cuStreamCreateWithPriority(self, out: object, flags: int, priority: int) -> int:
        stream = self._new()
        self.streams[stream] = _Stream()
        return _put(out, stream)

    def cuStreamDestroy(self, stream: int) -> int:
        del self.streams[stream]
        return 0

    def cuStreamSynchronize(self, stream: int) -> int:
        self.hold.wait()
        return self._run(self.streams[stream], self.streams[stream].queued)

    def cuEventCreate(self, out: object, flags: int) -> int:
        event = self._new()
        self.events[event] = (_Stream(), 0)
        return _put(out, event)

    def cuEventDestroy(self, event: int) -> int:
        del self.events[event]
        return 0

    def cuEventRecord(self, event: int, stream: int) -> int:
        self.events[event] = (self.streams[stream], self.streams[stream].queued)
        return 0

    def cuEventQuery(self, event: int) -> int:
        return self._run(*self.events[event]) if self.hold.is_set() else D.NOT_READY

    def cuEventSynchronize(self, event: int) -> int:
        self.hold.wait()
        return self._run(*self.events[event])

    def _run(self, stream: _Stream, until: int) -> int:
        with self._run_lock:
            while stream.done < until:
                if any(self.streams[held] is stream for held in self.held):
                    return D.NOT_READY
                operation = stream.pending.pop(0)
                if operation() == D.NOT_READY:
                    stream.pending.insert(0, operation)
                    return D.NOT_READY
                stream.done += 1
        return 0

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> int:
        if "cuMemHostRegister" in self.fail:
            return self.fail["cuMemHostRegister"]
        self.registered[address] = size
        return 0

    def cuMemHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cuIpcOpenMemHandle(self, out: object, handle: ctypes.Structure, flags: int) -> int:
        address = self.handles.get(bytes(handle))
        if address is None:
            return D.MAP_FAILED
        assert self.opened.get(address, 0) == 0, "a handle is opened once per process"
        self.opened[address] = 1
        return _put(out, address)

    def cuIpcCloseMemHandle(self, address: int) -> int:
        self.opened[address] -= 1
        return 0

    def cuMemGetAddressRange(self, base: object, size: object, address: int) -> int:
        _put(size, self.allocations[address].nbytes)
        return _put(base, address)

    def cuMemImportFromShareableHandle(self, out: object, fd: int, kind: int) -> int:
        return _put(out, fd)

    def cuMemRelease(self, handle: int) -> int:
        return 0

    def cuMemAddressReserve(self, out: object, size: int, alignment: int, at: int, flags: int) -> int:
        memory = np.zeros(size, np.uint8)
        self.allocations[memory.ctypes.data] = memory
        return _put(out, memory.ctypes.data)

    def cuMemAddressFree(self, address: int, size: int) -> int:
        return 0

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        self.opened[address] = 1
        return 0

    def cuMemUnmap(self, address: int, size: int) -> int:
        self.opened[address] = 0
        return 0

    def cuMemSetAccess(self, address: int, size: int, access: object, count: int) -> int:
        return 0

    def cuModuleLoadData(self, out: object, image: bytes) -> int:
        module = self._new()
        self.modules[module] = 0
        return _put(out, module)

    def cuModuleGetFunction(self, out: object, module: int, name: bytes) -> int:
        assert b".entry " + name + b"()" in D._EMPTY_KERNEL
        return _put(out, module)

    def cuModuleUnload(self, module: int) -> int:
        del self.modules[module]
        return 0

    def cuLaunchKernel(self, kernel: int, *arguments: Any) -> int:
        *sizes, shared, stream, parameters, extra = arguments
        assert (sizes, shared, parameters, extra) == ([1] * 6, 0, None, None)
        assert stream in self.streams
        self.modules[kernel] += 1
        self.kernels += 1
        return 0

    def _locked_as_one(self, copy: Copies) -> bool:
        """Whether a copy's host side lies within one registration, or in none."""
        start = int(copy["host"])
        rows = (int(copy["depth"]) - 1) * int(copy["host_layer"]) + int(copy["height"]) - 1
        end = start + rows * int(copy["host_row"]) + int(copy["width"])
        touched = [(a, a + n) for a, n in self.registered.items() if a < end and start < a + n]
        return not touched or (len(touched) == 1 and touched[0][0] <= start and end <= touched[0][1])

    def cuMemcpy3DAsync(self, at: int, stream: int) -> int:
        raw = np.frombuffer(ctypes.string_at(at, MEMCPY3D.itemsize), MEMCPY3D)[0].copy()
        to_device = bool(raw["src"]["type"] == 1)
        host, device = (raw["src"], raw["dst"]) if to_device else (raw["dst"], raw["src"])
        assert (host["type"], device["type"]) == (1, 2)
        sides = ((side[name], side["pitch"], side["layer"]) for side, name in ((host, "host"), (device, "device")))
        return self._queue(stream, raw, *sides, to_device=to_device)

    def cuMemcpyHtoDAsync(self, device: int, source: Any, size: int, stream: int) -> int:
        staged = ctypes.string_at(source, size)

        def arrive() -> None:
            self.check("device", device, size)
            ctypes.memmove(device, staged, size)

        self.streams[stream].pending.append(arrive)
        self.streams[stream].queued += 1
        return 0

    def batch_v1(self, n: int, at: int, failed: object, flags: int, stream: int) -> int:
        return self.batch_v2(n, at, flags, stream)

    def batch_v2(self, n: int, at: int, flags: int, stream: int) -> int:
        self.batches.append(n)
        raw = np.frombuffer(ctypes.string_at(at, n * BATCH_OP.itemsize), BATCH_OP).copy()
        for op in raw:
            assert op["order"] == 1
            assert op["src"]["type"] == op["dst"]["type"] == 1
            to_device = bool(op["src"]["location"] == 2)
            host, device = (op["src"], op["dst"]) if to_device else (op["dst"], op["src"])
            assert device["location"] == 1
            sides = ((s["ptr"], s["row"], s["layer"]) for s in (host, device))
            if code := self._queue(stream, op, *sides, to_device=to_device):
                return code
        return 0

    def flat_v1(self, *arguments: Any) -> int:
        *common, _failed, stream = arguments
        return self.flat_v2(*common, stream)

    def flat_v2(self, *arguments: Any) -> int:
        targets, sources, sizes, n, attributes, first, count, stream = arguments
        if (results := self.refusals.get(stream)) and (code := results.pop(0)):
            return code
        self.flat_batches.append(n)
        self.rows_taken[stream] = self.rows_taken.get(stream, 0) + n
        order, source, _, target, _, _ = np.frombuffer(attributes._obj, np.int32)
        assert (order, first._obj.value, count) == (1, 0, 1)
        assert {source, target} == {1, 2}
        columns = [np.frombuffer(ctypes.string_at(at, 8 * n), np.uint64) for at in (sources, targets, sizes)]
        for source_at, target_at, size in zip(*columns, strict=True):
            raw = {"width": size, "height": 1, "depth": 1}
            host, device = (source_at, target_at) if source == 2 else (target_at, source_at)
            if code := self._queue(stream, raw, (host, size, 1), (device, size, 1), to_device=bool(source == 2)):
                return code
        return 0

    def _queue(
        self, stream: int, raw: Any, host: tuple[int, int, int], device: tuple[int, int, int], *, to_device: bool
    ) -> int:
        copy: Copies = np.zeros(1, COPY)
        for k in ("width", "height", "depth"):
            copy[k] = raw[k]
        for side, (pointer, row, layer) in (("host", host), ("device", device)):
            copy[side], copy[f"{side}_row"], copy[f"{side}_layer"] = pointer, row, layer
        if not self._locked_as_one(copy[0]):
            return D.INVALID_VALUE
        queue = self.streams[stream]
        queue.pending.append(lambda: execute(copy[0], to_device=to_device, check=self.check))
        queue.queued += 1
        return 0


def _put(out: object, value: int) -> int:
    """Store through what ctypes.byref gave."""
    out._obj.value = value  # type: ignore[attr-defined]
    return 0
