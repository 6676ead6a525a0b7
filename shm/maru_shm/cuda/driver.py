"""The CUDA driver API as far as copies between host and device need it, by ctypes on ``libcuda.so.1``.

No CUDA package, no runtime, and no kernel but an empty one.

Every call releases the GIL. Every failing call raises :class:`CudaError` with the driver's own name for it. Loading the library
or asking for a device makes no context; :meth:`CudaDriver.retain` does.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from maru_shm.copy_shapes import Copies, as_rows
from maru_shm.cuda.descriptors import (
    LOCATION_DEVICE,
    MEMCPY3D,
    Descriptors,
    attributes,
    batch_room,
    fill_3d,
    fill_batch,
)
from maru_shm.errors import PlatformUnsupported, TransferError
from maru_shm.geometry import Direction

_VOID = ctypes.c_void_p
_U64 = ctypes.c_uint64
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_UINT = ctypes.c_uint

SUCCESS = 0
INVALID_VALUE = 1
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
MAP_FAILED = 205
NOT_READY = 600
ALREADY_REGISTERED = 712

#: After one of these every later call in the context fails too: an illegal address, an ECC or link error, a lost GPU.
STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})

_ATTRIBUTE_MAX_PITCH = 11
_SCHED_BLOCKING_SYNC = 4
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC = 1
_EVENT_DISABLE_TIMING = 2
_REGISTER_PORTABLE = 1
_REGISTER_READ_ONLY = 8
_ATTRIBUTE_READ_ONLY_REGISTER = 113
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE_TYPE_POSIX_FD = 1
IPC_HANDLE_BYTES = 64


#: Flat rows of one batch call. H200, driver 580, scattered rows of 64 KiB: 53.4 GB/s of 54.9 with 256 a call, 45 with 4,096;
#: of 16 KiB: 15 and 3.7, since a long batch costs the driver 4 µs a row instead of 1. Benchmarks set it.
FLAT_PER_CALL = 256

#: For compute capability 7.0 and later; the driver compiles it.
_EMPTY_KERNEL = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nop()\n{\nret;\n}\n"


class CudaError(TransferError):
    """A driver call failed. ``code`` is the CUresult."""

    def __init__(self, call: str, code: int, name: str, remedy: str = "") -> None:
        super().__init__(f"{call} failed with {name} ({code})", remedy)
        self.code = code
        self.name = name

    @property
    def sticky(self) -> bool:
        """Whether the context is lost with it."""
        return self.code in STICKY


class _IpcMemHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _INT), ("location_id", _INT), ("flags", _INT))


#: name → argument types. A trailing ``_v2``/``_v3`` is the current ABI of that call, as cuda.h maps it.
_CALLS: dict[str, tuple[object, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_VOID,),
    "cuGetErrorName": (_INT, _VOID),
    "cuDeviceGetCount": (_VOID,),
    "cuDeviceGet": (_VOID, _INT),
    "cuDeviceGetUuid_v2": (_VOID, _INT),
    "cuDeviceGetAttribute": (_VOID, _INT, _INT),
    "cuDevicePrimaryCtxSetFlags_v2": (_INT, _UINT),
    "cuDevicePrimaryCtxRetain": (_VOID, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuDevicePrimaryCtxReset_v2": (_INT,),
    "cuCtxSetCurrent": (_VOID,),
    "cuCtxGetCurrent": (_VOID,),
    "cuCtxGetStreamPriorityRange": (_VOID, _VOID),
    "cuStreamCreateWithPriority": (_VOID, _UINT, _INT),
    "cuStreamDestroy_v2": (_VOID,),
    "cuStreamSynchronize": (_VOID,),
    "cuStreamWaitEvent": (_VOID, _VOID, _UINT),
    "cuEventCreate": (_VOID, _UINT),
    "cuEventDestroy_v2": (_VOID,),
    "cuEventRecord": (_VOID, _VOID),
    "cuEventQuery": (_VOID,),
    "cuEventSynchronize": (_VOID,),
    "cuMemHostRegister_v2": (_VOID, _SIZE, _UINT),
    "cuMemHostUnregister": (_VOID,),
    "cuIpcOpenMemHandle_v2": (_VOID, _IpcMemHandle, _UINT),
    "cuIpcCloseMemHandle": (_U64,),
    "cuMemGetAddressRange_v2": (_VOID, _VOID, _U64),
    "cuMemImportFromShareableHandle": (_VOID, _VOID, _INT),
    "cuMemRelease": (_U64,),
    "cuMemAddressReserve": (_VOID, _SIZE, _SIZE, _U64, _U64),
    "cuMemAddressFree": (_U64, _SIZE),
    "cuMemMap": (_U64, _SIZE, _SIZE, _U64, _U64),
    "cuMemUnmap": (_U64, _SIZE),
    "cuMemSetAccess": (_U64, _SIZE, _VOID, _SIZE),
    "cuMemcpy3DAsync_v2": (_VOID, _VOID),
    "cuMemcpyHtoDAsync_v2": (_U64, _VOID, _SIZE, _VOID),
    "cuModuleLoadData": (_VOID, ctypes.c_char_p),
    "cuModuleGetFunction": (_VOID, _VOID, ctypes.c_char_p),
    "cuModuleUnload": (_VOID,),
    "cuLaunchKernel": (_VOID, *[_UINT] * 7, _VOID, _VOID, _VOID),
}
#: The batch calls of CUDA 12.8 (1) and 13.0 (2), which no longer tell the index of the operation that failed.
_BATCH_CALLS: dict[int, dict[str, tuple[object, ...]]] = {
    1: {
        "cuMemcpy3DBatchAsync": (_SIZE, _VOID, _VOID, _U64, _VOID),
        "cuMemcpyBatchAsync": (_VOID, _VOID, _VOID, _SIZE, _VOID, _VOID, _SIZE, _VOID, _VOID),
    },
    2: {
        "cuMemcpy3DBatchAsync_v2": (_SIZE, _VOID, _U64, _VOID),
        "cuMemcpyBatchAsync_v2": (_VOID, _VOID, _VOID, _SIZE, _VOID, _VOID, _SIZE, _VOID),
    },
}


class CudaDriver:
    """``libcuda`` loaded and initialised. Raises :class:`~maru_shm.errors.PlatformUnsupported` where that is not possible.

    Addresses, contexts, streams and events are plain integers.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as e:
            raise PlatformUnsupported(
                f"{library} cannot be loaded ({e})", "install the NVIDIA driver, or pass its libraries into the container"
            ) from e
        self._calls: dict[str, Callable[..., int]] = {}
        for name, arguments in _CALLS.items():
            self._bind(name, arguments)
        self._batch = self._bind_batch()
        self._call("cuInit", 0)
        self.version = self._int("cuDriverGetVersion")

    def _bind(self, name: str, arguments: tuple[object, ...]) -> None:
        try:
            function = getattr(self._lib, name)
        except AttributeError as e:
            raise PlatformUnsupported(f"the NVIDIA driver has no {name}", "use a driver for CUDA 12 or newer") from e
        function.argtypes = list(arguments)
        function.restype = _INT
        self._calls[name] = function

    def _bind_batch(self) -> int:
        """Which batch calls there are: those of CUDA 13 (2), of 12.8 (1) or none (0)."""
        for version in (2, 1):
            calls = _BATCH_CALLS[version]
            if all(hasattr(self._lib, name) for name in calls):
                for name, arguments in calls.items():
                    self._bind(name, arguments)
                return version
        return 0

    def limit_batch(self, version: int) -> None:
        """Do as an older driver: use the batch calls of CUDA 12.8 (1) or none (0). For tests of those paths on a newer one."""
        for name, arguments in _BATCH_CALLS.get(version, {}).items():
            self._bind(name, arguments)
        self._batch = version

    def _call(self, name: str, *arguments: object) -> None:
        code = self._calls[name](*arguments)
        if code != SUCCESS:
            raise self.error(name, code)

    def error(self, call: str, code: int, remedy: str = "") -> CudaError:
        text = ctypes.c_char_p()
        known = self._calls["cuGetErrorName"](code, ctypes.byref(text)) == SUCCESS and text.value is not None
        return CudaError(call, code, text.value.decode() if known and text.value else "an unknown error", remedy)

    def _int(self, name: str, *arguments: object) -> int:
        out = _INT()
        self._call(name, ctypes.byref(out), *arguments)
        return out.value

    def _handle(self, name: str, *arguments: object) -> int:
        out = _U64()
        self._call(name, ctypes.byref(out), *arguments)
        return out.value

    # --- devices and contexts -------------------------------------------------------------------------------------------
    def devices(self) -> dict[str, int]:
        """Visible devices: ``"GPU-<uuid>"`` → ordinal handle."""
        found: dict[str, int] = {}
        for ordinal in range(self._int("cuDeviceGetCount")):
            device = self._int("cuDeviceGet", ordinal)
            raw = ctypes.create_string_buffer(16)
            self._call("cuDeviceGetUuid_v2", raw, device)
            found[f"GPU-{uuid.UUID(bytes=raw.raw)}"] = device
        return found

    def max_pitch(self, device: int) -> int:
        """Largest row pitch of a copy, bytes (2 GiB - 1 on every device seen)."""
        return self._int("cuDeviceGetAttribute", _ATTRIBUTE_MAX_PITCH, device)

    def retain(self, device: int) -> int:
        """Make (or share) the device's primary context, waiting threads asleep rather than spinning; make it current."""
        self._call("cuDevicePrimaryCtxSetFlags_v2", device, _SCHED_BLOCKING_SYNC)
        context = self._handle("cuDevicePrimaryCtxRetain", device)
        self.use(context)
        return context

    def release(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def reset(self, device: int) -> None:
        """Destroy whatever is left of a lost primary context."""
        self._call("cuDevicePrimaryCtxReset_v2", device)

    def use(self, context: int) -> None:
        """Make ``context`` (0: none) current in this thread."""
        self._call("cuCtxSetCurrent", context)

    def current(self) -> int:
        """The context current in this thread, 0: none."""
        return self._handle("cuCtxGetCurrent")

    # --- streams and events -----------------------------------------------------------------------------------------------
    def create_stream(self) -> int:
        """A non-blocking stream of the highest priority."""
        least, greatest = _INT(), _INT()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        return self._handle("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, greatest.value)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def create_event(self) -> int:
        """An event without timing whose waiters sleep."""
        return self._handle("cuEventCreate", _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def event_done(self, event: int) -> bool:
        code = self._calls["cuEventQuery"](event)
        if code not in (SUCCESS, NOT_READY):
            raise self.error("cuEventQuery", code)
        return code == SUCCESS

    def wait_event(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def order_after(self, stream: int, event: int) -> None:
        """What is put on ``stream`` from now on waits for ``event``; this thread does not."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def wait_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    # --- an empty kernel --------------------------------------------------------------------------------------------------
    def load_empty(self) -> tuple[int, int]:
        """A module with a kernel that does nothing, for :meth:`unload`, and the kernel."""
        module = self._handle("cuModuleLoadData", _EMPTY_KERNEL)
        try:
            return module, self._handle("cuModuleGetFunction", module, b"nop")
        except CudaError:
            self.unload(module)
            raise

    def unload(self, module: int) -> None:
        """Returns when its kernels have ended."""
        self._call("cuModuleUnload", module)

    def launch_empty(self, kernel: int, stream: int) -> None:
        """Enqueue :meth:`load_empty`'s kernel: one thread."""
        self._call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)

    # --- memory -------------------------------------------------------------------------------------------------------------
    def registers_read_only(self, device: int) -> bool:
        """Whether host memory that is mapped read-only can be page-locked for ``device``."""
        return bool(self._int("cuDeviceGetAttribute", _ATTRIBUTE_READ_ONLY_REGISTER, device))

    def register_host(self, address: int, size: int, *, read_only: bool = False) -> None:
        """Page-lock host memory for all contexts. Registering what is registered is no error."""
        flags = _REGISTER_PORTABLE | (_REGISTER_READ_ONLY if read_only else 0)
        code = self._calls["cuMemHostRegister_v2"](address, size, flags)
        if code not in (SUCCESS, ALREADY_REGISTERED):
            raise self.error("cuMemHostRegister", code)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's allocation by its 64-byte handle; its base address here."""
        raw = _IpcMemHandle.from_buffer_copy(handle)
        return self._handle("cuIpcOpenMemHandle_v2", raw, _IPC_LAZY_ENABLE_PEER_ACCESS)

    def close_ipc(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def allocation_range(self, address: int) -> tuple[int, int]:
        """``(base, size)`` of the allocation ``address`` lies in."""
        base, size = _U64(), _SIZE()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def map_fd(self, fd: int, size: int, device: int) -> int:
        """Map an exported VMM allocation of ``size`` bytes for ``device``; undo it with :meth:`unmap`."""
        handle = self._handle("cuMemImportFromShareableHandle", fd, _HANDLE_TYPE_POSIX_FD)
        try:
            address = self._handle("cuMemAddressReserve", size, 0, 0, 0)
            try:
                self._call("cuMemMap", address, size, 0, handle, 0)
                try:
                    access = _AccessDesc(LOCATION_DEVICE, device, 3)
                    self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
                except CudaError:
                    self._call("cuMemUnmap", address, size)
                    raise
            except CudaError:
                self._call("cuMemAddressFree", address, size)
                raise
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
        return address

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    # --- copies ---------------------------------------------------------------------------------------------------------------
    def descriptors(self, n: int) -> Descriptors:
        """Room for ``n`` descriptors in the form this driver takes."""
        return batch_room(n) if self._batch else np.zeros(n, MEMCPY3D)

    def submit(self, direction: Direction, copies: Copies, room: Descriptors, device: int, stream: int) -> int:
        """Enqueue all copies on ``stream``; the number of driver calls it took. ``room`` may be reused on return.

        Stops at the first refusal: copies before it may be in flight.
        """
        if not self._batch:
            return self._submit_one_by_one(direction, copies, room[: len(copies)], stream)
        flat = self.flat_rows(copies)
        if flat.all():  # selecting costs 35 ns a row, under the GIL
            return self.submit_flat(direction, copies, device, stream)
        calls = 0
        if flat.any():
            calls += self.submit_flat(direction, copies[flat], device, stream)
            copies = copies[~flat]
        self._submit_pitched(direction, copies, room[: len(copies)], device, stream)
        return calls + 1

    def flat_rows(self, copies: Copies) -> npt.NDArray[np.bool_]:
        """Which of ``copies`` are single rows for :meth:`submit_flat`; none with a driver that has no such call."""
        if not self._batch:
            return np.zeros(len(copies), np.bool_)
        flat: npt.NDArray[np.bool_] = (copies["height"] == 1) & (copies["depth"] == 1)
        return flat

    def submit_flat(self, direction: Direction, copies: Copies, device: int, stream: int) -> int:
        """Enqueue single rows (see :meth:`flat_rows`) in calls of :data:`FLAT_PER_CALL`; the number of calls.

        Stops at the first refusal, as :meth:`submit` does. Needs no room, so threads may do it at once, each on its own stream.
        """
        target, source = ("device", "host") if direction is Direction.LOAD else ("host", "device")
        columns = [np.ascontiguousarray(copies[k]) for k in (target, source, "width")]
        kinds = attributes(direction, device)
        first = _SIZE(0)  # one set of attributes, from operation 0 on
        calls = 0
        for at in range(0, len(copies), FLAT_PER_CALL):
            part = [column[at : at + FLAT_PER_CALL] for column in columns]
            common = (*(p.ctypes.data for p in part), len(part[0]), ctypes.byref(kinds), ctypes.byref(first), 1)
            if self._batch == 2:
                self._call("cuMemcpyBatchAsync_v2", *common, stream)
            else:
                self._call("cuMemcpyBatchAsync", *common, ctypes.byref(_SIZE()), stream)
            calls += 1
        return calls

    def _submit_pitched(self, direction: Direction, copies: Copies, used: Descriptors, device: int, stream: int) -> None:
        fill_batch(used, direction, copies, device)
        if self._batch == 2:
            self._call("cuMemcpy3DBatchAsync_v2", len(used), used.ctypes.data, 0, stream)
        else:
            self._call("cuMemcpy3DBatchAsync", len(used), used.ctypes.data, ctypes.byref(_SIZE()), 0, stream)

    def load_staged(self, copies: Copies, stream: int) -> None:
        """Do ``copies`` host to device through memory of this process's own, row by row: slow, whatever the source is.

        The driver has taken the bytes when a call returns, as it does with all memory that is not page-locked.
        """
        for row in as_rows(copies):
            staged = ctypes.create_string_buffer(ctypes.string_at(int(row["host"]), int(row["width"])), int(row["width"]))
            self._call("cuMemcpyHtoDAsync_v2", int(row["device"]), staged, int(row["width"]), stream)

    def _submit_one_by_one(self, direction: Direction, copies: Copies, used: Descriptors, stream: int) -> int:
        fill_3d(used, direction, copies)
        copy, at = self._calls["cuMemcpy3DAsync_v2"], used.ctypes.data
        for i in range(len(used)):
            code = copy(at + i * MEMCPY3D.itemsize, stream)
            if code != SUCCESS:
                raise self.error("cuMemcpy3DAsync", code)
        return len(used)
