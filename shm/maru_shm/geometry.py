"""How an engine's paged KV cache lies in memory, said once at attach.

A *plane* is one strided array of pieces: block ``b`` owns ``piece_bytes`` at ``region.address + offset + b * block_stride``. A
layer-outermost cache has a plane per layer (or per K and V of a layer); a block-outermost one has a single plane whose piece
is all layers. A slab holds a chunk plane-major: for each plane, in plane order, the pieces of all blocks::

    slab = plane 0: block 0 | block 1 | … ; plane 1: block 0 | …

so neighbouring blocks of a layer are one flat copy, and one block is still a single pitched copy over all layers. Strides
may differ between engines that share a slab; piece sizes and their meaning (``signature``) may not.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec

from maru_shm.errors import ProtocolViolation

MAX_PLANES = 4096
MAX_REGIONS = 1024
_MAX_ADDRESS = 1 << 63


class Direction(enum.Enum):
    """Which way a copy goes."""

    LOAD = "load"  #: slab → engine
    STORE = "store"  #: engine → slab


class Share(NamedTuple):
    """Part number ``part`` (from 0) of ``parts`` of something that is copied in parts."""

    part: int = 0
    parts: int = 1

    def of(self, n: int) -> slice:
        """Which of ``n`` pieces; all shares together are all of them, none twice."""
        return slice(self.part * n // self.parts, (self.part + 1) * n // self.parts)


WHOLE = Share()


class RegionKind(enum.StrEnum):
    """How the sidecar reaches a region of the engine's memory."""

    PROCESS_VM = "process_vm"  #: host memory of the client process, by process_vm_readv/writev
    CUDA_IPC = "cuda_ipc"  #: legacy CUDA IPC handle of the allocation around it
    CUDA_VMM = "cuda_vmm"  #: exported VMM allocation; the file descriptor travels beside the message


#: ``KvRegion.handle`` of a CUDA_IPC region: the 64-byte handle of the allocation it lies in, its offset there (bytes)
CUDA_IPC_HANDLE = struct.Struct("<64sQ")
#: of a CUDA_VMM region: its offset in the exported allocation, that allocation's size (bytes)
CUDA_VMM_HANDLE = struct.Struct("<QQ")


class KvRegion(msgspec.Struct, frozen=True):
    """One contiguous range. ``address`` is where the engine sees it; ``handle``: a CUDA_IPC_HANDLE or CUDA_VMM_HANDLE."""

    kind: RegionKind
    address: int
    size: int  #: bytes
    handle: bytes = b""
    device: str = ""  #: GPU UUID ("GPU-…"), empty for host memory


class KvPlane(msgspec.Struct, frozen=True, array_like=True):
    """Bytes. ``layer`` is the layer index the piece belongs to, -1 if it holds several."""

    region: int
    offset: int
    block_stride: int
    piece_bytes: int
    layer: int = -1


class KvLayout(msgspec.Struct, frozen=True):
    """The paged KV cache of one worker.

    ``signature`` says what the bytes of a piece mean (layer names, heads, head size, dtype, token order): it is part of the
    namespace, so two engines share slabs only where their pieces agree.
    """

    num_blocks: int
    block_tokens: int
    planes: tuple[KvPlane, ...]
    regions: tuple[KvRegion, ...]
    signature: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return sum(p.piece_bytes for p in self.planes)

    @property
    def identity(self) -> str:
        """``signature`` plus the piece sizes in slab order: equal identities give interchangeable slabs."""
        return f"{self.signature}|plane-major|{self.block_tokens}|" + ",".join(
            f"{p.layer}:{p.piece_bytes}" for p in self.planes
        )

    def check(self) -> None:
        """Raise :class:`ProtocolViolation` if any block of any plane could lie outside its region, or a number is absurd."""
        if not 0 < self.num_blocks < 1 << 31 or not 0 < self.block_tokens <= 1 << 20:
            raise ProtocolViolation(f"KV cache of {self.num_blocks} blocks of {self.block_tokens} tokens", "")
        if not 0 < len(self.planes) <= MAX_PLANES or not 0 < len(self.regions) <= MAX_REGIONS:
            raise ProtocolViolation(f"KV cache of {len(self.planes)} planes in {len(self.regions)} regions", "")
        for r in self.regions:
            if r.address <= 0 or r.size <= 0 or r.address + r.size > _MAX_ADDRESS:
                raise ProtocolViolation(f"KV region at {r.address:#x} of {r.size} bytes", "")
        for i, p in enumerate(self.planes):
            if not 0 <= p.region < len(self.regions):
                raise ProtocolViolation(f"plane {i} names region {p.region} of {len(self.regions)}", "")
            last = p.offset + (self.num_blocks - 1) * p.block_stride + p.piece_bytes
            if p.offset < 0 or p.piece_bytes <= 0 or p.block_stride < p.piece_bytes or last > self.regions[p.region].size:
                raise ProtocolViolation(
                    f"plane {i} (offset {p.offset}, stride {p.block_stride}, piece {p.piece_bytes}) leaves its region of "
                    f"{self.regions[p.region].size} bytes",
                    "",
                )
