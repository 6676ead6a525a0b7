"""From torch CUDA storages to regions that another process can import.

The sidecar opens the allocation around a storage by its legacy CUDA IPC handle, once, and adds the storage's offset in it:
torch's allocator cuts several storages from one allocation, and the driver hands out handles of whole allocations only.

Memory made by the VMM calls (``expandable_segments``, vLLM's sleep mode) has no such handle and is refused by name. The
driver is called by ctypes on the library that torch has loaded already; its context is current on this thread.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from typing import Any

from maru_shm.errors import AttachRefused, PlatformUnsupported, TransferError
from maru_shm.geometry import CUDA_IPC_HANDLE, KvRegion, RegionKind

_ATTRIBUTE_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_HANDLE_BYTES = 64


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver's library. Raises :class:`PlatformUnsupported` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise PlatformUnsupported(f"libcuda.so.1 cannot be loaded ({e})", "install the NVIDIA driver") from e


def call(name: str, *arguments: Any) -> None:
    """Call the driver. Integers wider than 32 bits must come as ctypes values. Raises :class:`TransferError` with its own name
    for what went wrong."""
    code = getattr(libcuda(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        libcuda().cuGetErrorName(code, ctypes.byref(text))
        raise TransferError(f"{name} failed with {(text.value or b'an unknown error').decode()} ({code})", "")


def cuda_region(storage: Any) -> KvRegion:
    """A torch CUDA storage (``tensor.untyped_storage()``) as a region. Raises :class:`AttachRefused`."""
    address, nbytes = storage.data_ptr(), storage.nbytes()
    pointer = ctypes.c_uint64(address)
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    handle = ctypes.create_string_buffer(_HANDLE_BYTES)
    try:
        _refuse_vmm(pointer, nbytes)
        call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        call("cuIpcGetMemHandle", handle, base)
        device = gpu_uuid(storage.device.index)
    except TransferError as e:
        raise AttachRefused(f"KV cache of {nbytes} bytes cannot be shared: {e.what}", "check that CUDA IPC works here") from e
    packed = CUDA_IPC_HANDLE.pack(handle.raw, address - base.value)
    return KvRegion(RegionKind.CUDA_IPC, address, nbytes, packed, device)


def _refuse_vmm(pointer: ctypes.c_uint64, nbytes: int) -> None:
    capable = ctypes.c_int()
    call("cuPointerGetAttribute", ctypes.byref(capable), _ATTRIBUTE_LEGACY_IPC_CAPABLE, pointer)
    if not capable.value:
        raise AttachRefused(
            f"KV cache of {nbytes} bytes lies in VMM memory, which has no CUDA IPC handle",
            "run without expandable_segments in PYTORCH_CUDA_ALLOC_CONF and without sleep mode",
        )


def gpu_uuid(ordinal: int) -> str:
    """``"GPU-<uuid>"`` of the device torch calls ``cuda:<ordinal>``; of a MIG instance, its own."""
    device = ctypes.c_int()
    raw = ctypes.create_string_buffer(16)
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    call("cuDeviceGetUuid_v2", raw, device)
    return f"GPU-{uuid.UUID(bytes=raw.raw)}"
