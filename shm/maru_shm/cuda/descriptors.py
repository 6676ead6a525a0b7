"""The driver's copy descriptors, byte by byte, and how planned copies are written into them."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from maru_shm.copy_shapes import Copies
from maru_shm.geometry import Direction

MEMORY_HOST, MEMORY_DEVICE = 1, 2  # CUmemorytype
LOCATION_DEVICE, LOCATION_HOST = 1, 2  # CUmemLocationType: the other way round in the header, too
_OPERAND_POINTER = 1
_ORDER_STREAM = 1
_PREFER_OVERLAP = 1

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


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; one set for a whole batch."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("src_location", ctypes.c_int),
        ("src_location_id", ctypes.c_int),
        ("dst_location", ctypes.c_int),
        ("dst_location_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


def batch_room(n: int) -> Descriptors:
    """``n`` batch operations with their constant fields filled in."""
    room = np.zeros(n, BATCH_OP)
    room["src"]["type"] = room["dst"]["type"] = _OPERAND_POINTER
    room["order"] = _ORDER_STREAM
    room["flags"] = _PREFER_OVERLAP
    return room


def fill_batch(used: Descriptors, direction: Direction, copies: Copies, device: int) -> None:
    """Write ``copies`` over as many operations of a :func:`batch_room`."""
    host, gpu = sides(direction)
    for field in ("width", "height", "depth"):
        used[field] = copies[field]
    for side, kind, location, ordinal in ((host, "host", LOCATION_HOST, 0), (gpu, "device", LOCATION_DEVICE, device)):
        operand = used[side]
        operand["ptr"] = copies[kind]
        operand["row"] = copies[kind + "_row"]
        operand["layer"] = copies[kind + "_layer"]
        operand["location"] = location
        operand["location_id"] = ordinal


def fill_3d(used: Descriptors, direction: Direction, copies: Copies) -> None:
    """Write ``copies`` over as many MEMCPY3D."""
    host, gpu = sides(direction)
    used.view(np.uint8)[:] = 0
    for field in ("width", "height", "depth"):
        used[field] = copies[field]
    for side, kind, memory in ((host, "host", MEMORY_HOST), (gpu, "device", MEMORY_DEVICE)):
        used[side]["type"] = memory
        used[side][kind] = copies[kind]
        used[side]["pitch"] = copies[kind + "_row"]
        used[side]["layer"] = copies[kind + "_layer"]


def attributes(direction: Direction, device: int) -> CopyAttributes:
    """For a flat batch."""
    ends = {"host": (LOCATION_HOST, 0), "device": (LOCATION_DEVICE, device)}
    source, target = ("host", "device") if direction is Direction.LOAD else ("device", "host")
    return CopyAttributes(_ORDER_STREAM, *ends[source], *ends[target], _PREFER_OVERLAP)


def sides(direction: Direction) -> tuple[str, str]:
    """Which of ``src`` and ``dst`` is the host, which the device."""
    return ("src", "dst") if direction is Direction.LOAD else ("dst", "src")
