"""The CUDA driver API as far as a sidecar needs it, by ctypes on ``libcuda.so.1``: no CUDA package, no kernel, no runtime.

Every call releases the GIL. Every failing call raises :class:`CudaError` with the driver's own name for it. Loading the library
or asking for a device makes no context; :meth:`CudaDriver.retain` does.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from maru_shm.errors import PlatformUnsupported, TransferError
from maru_sidecar.transfer.base import Direction
from maru_sidecar.transfer.copy_shapes import Copies

_VOID = ctypes.c_void_p
_U64 = ctypes.c_uint64
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_UINT = ctypes.c_uint
_TEXT = ctypes.c_char_p

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
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE_TYPE_POSIX_FD = 1
_MEMORY_HOST, _MEMORY_DEVICE = 1, 2  # CUmemorytype
_LOCATION_DEVICE, _LOCATION_HOST = 1, 2  # CUmemLocationType; the reverse order, as the header has it
_OPERAND_POINTER = 1
_ORDER_STREAM = 1
_PREFER_OVERLAP = 1
IPC_HANDLE_BYTES = 64

#: CUDA_MEMCPY3D_BATCH_OP (112 bytes), operands flattened: element size is one byte between pointers, so rows are bytes.
_OPERAND = [
    ("type", "<u4"),
    ("pad", "<u4"),
    ("ptr", "<u8"),
    ("row", "<u8"),
    ("layer", "<u8"),
    ("location", "<i4"),
    ("location_id", "<i4"),
]
BATCH_OP = np.dtype(
    [
        ("src", _OPERAND),
        ("dst", _OPERAND),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
        ("order", "<u4"),
        ("flags", "<u4"),
    ]
)
#: CUDA_MEMCPY3D (200 bytes), for drivers older than 12.8.
_SIDE = [
    ("x", "<u8"),
    ("y", "<u8"),
    ("z", "<u8"),
    ("lod", "<u8"),
    ("type", "<u4"),
    ("pad", "<u4"),
    ("host", "<u8"),
    ("device", "<u8"),
    ("array", "<u8"),
    ("reserved", "<u8"),
    ("pitch", "<u8"),
    ("layer", "<u8"),
]
MEMCPY3D = np.dtype([("src", _SIDE), ("dst", _SIDE), ("width", "<u8"), ("height", "<u8"), ("depth", "<u8")])
Descriptors = npt.NDArray[np.void]


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
    "cuDeviceGetName": (_TEXT, _INT, _INT),
    "cuDeviceGetUuid_v2": (_VOID, _INT),
    "cuDeviceGetAttribute": (_VOID, _INT, _INT),
    "cuDevicePrimaryCtxSetFlags_v2": (_INT, _UINT),
    "cuDevicePrimaryCtxRetain": (_VOID, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuDevicePrimaryCtxReset_v2": (_INT,),
    "cuCtxSetCurrent": (_VOID,),
    "cuCtxGetStreamPriorityRange": (_VOID, _VOID),
    "cuStreamCreateWithPriority": (_VOID, _UINT, _INT),
    "cuStreamDestroy_v2": (_VOID,),
    "cuStreamSynchronize": (_VOID,),
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
}
_BATCH_V1 = (_SIZE, _VOID, _VOID, _U64, _VOID)  # 12.8: with the index of the operation that failed
_BATCH_V2 = (_SIZE, _VOID, _U64, _VOID)  # 13.0


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
        """Which cuMemcpy3DBatchAsync there is: 2 (CUDA 13), 1 (12.8) or 0 (none)."""
        for version, name, arguments in ((2, "cuMemcpy3DBatchAsync_v2", _BATCH_V2), (1, "cuMemcpy3DBatchAsync", _BATCH_V1)):
            if hasattr(self._lib, name):
                self._bind(name, arguments)
                return version
        return 0

    def limit_batch(self, version: int) -> None:
        """Do as an older driver: use the batch call of CUDA 12.8 (1) or none (0). For tests of those paths on a newer one."""
        if version == 1:
            self._bind("cuMemcpy3DBatchAsync", _BATCH_V1)
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

    def device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

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

    def wait_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    # --- memory -------------------------------------------------------------------------------------------------------------
    def register_host(self, address: int, size: int) -> None:
        """Page-lock host memory for all contexts. Registering what is registered is no error."""
        code = self._calls["cuMemHostRegister_v2"](address, size, _REGISTER_PORTABLE)
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
                    access = _AccessDesc(_LOCATION_DEVICE, device, 3)
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
        """Room for ``n`` descriptors in the form this driver takes, constant fields filled in."""
        if not self._batch:
            return np.zeros(n, MEMCPY3D)
        room = np.zeros(n, BATCH_OP)
        room["src"]["type"] = room["dst"]["type"] = _OPERAND_POINTER
        room["order"] = _ORDER_STREAM
        room["flags"] = _PREFER_OVERLAP
        return room

    def submit(self, direction: Direction, copies: Copies, room: Descriptors, device: int, stream: int) -> int:
        """Enqueue all copies on ``stream``; the number of driver calls it took. ``room`` may be reused on return.

        Stops at the first refusal: copies before it may be in flight.
        """
        used = room[: len(copies)]
        host, gpu = ("src", "dst") if direction is Direction.LOAD else ("dst", "src")
        for field in ("width", "height", "depth"):
            used[field] = copies[field]
        if not self._batch:
            self._fill_3d(used, copies, host, gpu)
            return self._submit_one_by_one(used, stream)
        for side, kind, location, ordinal in ((host, "host", _LOCATION_HOST, 0), (gpu, "device", _LOCATION_DEVICE, device)):
            operand = used[side]
            operand["ptr"] = copies[kind]
            operand["row"] = copies[kind + "_row"]
            operand["layer"] = copies[kind + "_layer"]
            operand["location"] = location
            operand["location_id"] = ordinal
        if self._batch == 2:
            self._call("cuMemcpy3DBatchAsync_v2", len(used), used.ctypes.data, 0, stream)
        else:
            failed = _SIZE()
            self._call("cuMemcpy3DBatchAsync", len(used), used.ctypes.data, ctypes.byref(failed), 0, stream)
        return 1

    @staticmethod
    def _fill_3d(used: Descriptors, copies: Copies, host: str, gpu: str) -> None:
        used.view(np.uint8)[:] = 0
        for field in ("width", "height", "depth"):
            used[field] = copies[field]
        for side, kind, memory in ((host, "host", _MEMORY_HOST), (gpu, "device", _MEMORY_DEVICE)):
            used[side]["type"] = memory
            used[side][kind] = copies[kind]
            used[side]["pitch"] = copies[kind + "_row"]
            used[side]["layer"] = copies[kind + "_layer"]

    def _submit_one_by_one(self, used: Descriptors, stream: int) -> int:
        copy, at = self._calls["cuMemcpy3DAsync_v2"], used.ctypes.data
        for i in range(len(used)):
            code = copy(at + i * MEMCPY3D.itemsize, stream)
            if code != SUCCESS:
                raise self.error("cuMemcpy3DAsync", code)
        return len(used)
