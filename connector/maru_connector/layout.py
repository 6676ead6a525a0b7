"""From vLLM's KV tensors to :class:`~maru_shm.geometry.KvLayout`: which bytes belong to a block.

vLLM hands over one strided view per layer. What is contiguous depends on version, backend and layout: K and V packed in the
last dimension or split along a leading 2, heads before tokens or after, all layers in one storage, layer-outermost or
block-outermost, views at kernel-block granularity finer than the manager's blocks. Nothing of that is assumed here: for
each view the dimensions are sorted by stride, the longest dense run of bytes inside a block becomes the *piece*, and every
index of a dimension that does not fit in the run opens a *plane* of its own. Pieces that follow each other in memory with
the same stride are merged, so a block-outermost cache ends up as a single plane.

Anything that cannot be described this way is refused by name, and the engine runs without cache.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maru_shm.errors import AttachRefused, ProtocolViolation
from maru_shm.geometry import MAX_PLANES, KvLayout, KvPlane, KvRegion, RegionKind
from maru_shm.placed_planes import PlacedPlane

MIN_PIECE_BYTES = 64  #: below this a plane per index would be thousands of tiny copies


def host_region(storage: Any) -> KvRegion:
    """A torch CPU storage as the sidecar reaches it: by process_vm_readv/writev at the engine's own addresses."""
    return KvRegion(RegionKind.PROCESS_VM, storage.data_ptr(), storage.nbytes())


def _cuda_region(storage: Any) -> KvRegion:
    from maru_connector.cuda_export import cuda_region  # loads the driver: only where a GPU is

    return cuda_region(storage)


#: torch device type → how a storage on it becomes a region
REGION_MAKERS: dict[str, Callable[[Any], KvRegion]] = {"cpu": host_region, "cuda": _cuda_region}


@dataclass(frozen=True, slots=True)
class _Plane:
    region: int
    offset: int
    stride: int
    piece: int
    layer: int


def describe(kv_caches: Mapping[str, Any], num_blocks: int, block_tokens: int) -> KvLayout:
    """The layout of ``kv_caches`` (layer name → tensor), whose block ids run from 0 to ``num_blocks - 1``.

    Layers that share one tensor count once. Raises :class:`AttachRefused` naming the layer and what is unsupported about it.
    """
    regions: list[KvRegion] = []
    region_of: dict[int, int] = {}
    planes: list[_Plane] = []
    seen: set[tuple[object, ...]] = set()
    meanings: list[str] = []
    for name in sorted(kv_caches, key=_natural):
        tensor = kv_caches[name]
        if not hasattr(tensor, "untyped_storage"):
            raise AttachRefused(
                f"KV cache of layer {name} is a {type(tensor).__name__}", "only single tensors per layer are supported"
            )
        identity = _identity(tensor)
        if identity in seen:
            continue
        seen.add(identity)
        storage = tensor.untyped_storage()
        region = region_of.setdefault(storage.data_ptr(), len(regions))
        if region == len(regions):
            maker = REGION_MAKERS.get(tensor.device.type)
            if maker is None:
                raise AttachRefused(
                    f"KV cache of layer {name} is on device {tensor.device}", f"supported: {', '.join(REGION_MAKERS)}"
                )
            regions.append(maker(storage))
        layer = len(meanings)
        layer_planes, meaning = _planes_of(name, tensor, num_blocks, region, layer)
        planes += layer_planes
        meanings.append(f"{_pattern(name)} {meaning}")
        if len(planes) > MAX_PLANES:
            raise AttachRefused(f"KV cache needs more than {MAX_PLANES} planes", "use a layout with blocks outside heads")
    joined = tuple(_joined(run) for run in _runs(planes))
    layout = KvLayout(num_blocks, block_tokens, joined, tuple(regions), _signature(meanings))
    try:
        layout.check()
    except ProtocolViolation as e:
        raise AttachRefused(f"KV cache layout is not addressable by block: {e.what}", "report the attention backend") from e
    return layout


def placed_layers(kv_caches: Mapping[str, Any], num_blocks: int) -> dict[str, tuple[PlacedPlane, ...]]:
    """Each layer's pieces at this process's own addresses, and where they lie in a slab of :func:`describe`'s layout.

    Layers that share one tensor have equal planes. Raises :class:`AttachRefused` where :func:`describe` does.
    """
    planes: list[_Plane] = []  # ``region``: the storage's address
    number: dict[tuple[object, ...], int] = {}  # of each distinct tensor
    for name in sorted(kv_caches, key=_natural):
        tensor = kv_caches[name]
        identity = _identity(tensor)
        if identity not in number:
            number[identity] = len(number)
            planes += _planes_of(name, tensor, num_blocks, tensor.untyped_storage().data_ptr(), number[identity])[0]
    placed: list[list[PlacedPlane]] = [[] for _ in number]
    slab_offset = 0
    for run in _runs(planes):
        whole, within = sum(p.piece for p in run), 0
        for p in run:
            placed[p.layer].append(
                PlacedPlane(p.region, p.region + p.offset, slab_offset, p.stride, p.piece, slab_step=whole, within=within)
            )
            within += p.piece
        slab_offset += whole
    return {name: tuple(placed[number[_identity(tensor)]]) for name, tensor in kv_caches.items()}


def _identity(tensor: Any) -> tuple[object, ...]:
    """Equal for layers that share one tensor."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _planes_of(name: str, tensor: Any, num_blocks: int, region: int, layer: int) -> tuple[list[_Plane], str]:
    shape, itemsize = list(tensor.shape), tensor.element_size()
    strides = [s * itemsize for s in tensor.stride()]
    block_dim = _block_dim(name, shape, num_blocks)
    ratio = shape[block_dim] // num_blocks  # kernel blocks per manager block
    kernel_stride = strides[block_dim]
    inner = sorted((d for d in range(len(shape)) if d != block_dim and shape[d] > 1), key=lambda d: strides[d])
    piece, dense = itemsize, []
    while inner and strides[inner[0]] == piece:
        dense.append(inner.pop(0))
        piece *= shape[dense[-1]]
    # What is left steps over other bytes: one plane per index, the largest stride outermost.
    outer = inner[::-1]
    if piece < MIN_PIECE_BYTES:
        raise AttachRefused(
            f"KV cache of layer {name} (shape {shape}, strides {strides} bytes) is contiguous for {piece} bytes only",
            "use an attention backend whose blocks are contiguous",
        )
    kernel_offsets = [0]
    if ratio > 1 and not outer and kernel_stride == piece:
        piece *= ratio
    else:
        kernel_offsets = [i * kernel_stride for i in range(ratio)]
    base = tensor.storage_offset() * itemsize
    planes = []
    for kernel in kernel_offsets:
        for index in itertools.product(*(range(shape[d]) for d in outer)):
            offset = base + kernel + sum(i * strides[d] for i, d in zip(index, outer, strict=True))
            planes.append(_Plane(region, offset, kernel_stride * ratio, piece, layer))
    order = ",".join(f"{d}" for d in outer) + "|" + ",".join(f"{d}" for d in reversed(dense))
    inner_shape = "x".join(str(n) for d, n in enumerate(shape) if d != block_dim)
    return planes, f"{str(tensor.dtype).removeprefix('torch.')} {inner_shape} dim{block_dim} x{ratio} {order}"


def _block_dim(name: str, shape: Sequence[int], num_blocks: int) -> int:
    if shape and shape[0] >= num_blocks and shape[0] % num_blocks == 0:
        return 0
    if len(shape) > 1 and shape[0] == 2 and shape[1] >= num_blocks and shape[1] % num_blocks == 0:
        return 1  # K and V split
    raise AttachRefused(
        f"KV cache of layer {name} has shape {list(shape)}, neither [blocks, …] nor [2, blocks, …] for {num_blocks} blocks",
        "report the attention backend",
    )


def _runs(planes: list[_Plane]) -> list[list[_Plane]]:
    """Planes that follow each other in memory within a block, in slab order, together: longer rows, fewer of them."""
    out: list[list[_Plane]] = []
    size = 0
    for p in planes:
        last = out[-1][-1] if out else None
        if (
            last is not None
            and last.region == p.region
            and last.stride == p.stride
            and last.offset + last.piece == p.offset
            and size + p.piece <= p.stride
        ):
            out[-1].append(p)
            size += p.piece
        else:
            out.append([p])
            size = p.piece
    return out


def _joined(run: list[_Plane]) -> KvPlane:
    """One plane of a run; its layer where it has but one."""
    first = run[0]
    layer = first.layer if all(p.layer == first.layer for p in run) else -1
    return KvPlane(first.region, first.offset, first.stride, sum(p.piece for p in run), layer)


def _signature(meanings: list[str]) -> str:
    """What the bytes mean, short: the distinct layer meanings with their counts, and a digest of the whole sequence."""
    digest = hashlib.blake2b("\n".join(meanings).encode(), digest_size=8).hexdigest()
    runs = [f"{len(list(group))}*{meaning}" for meaning, group in itertools.groupby(meanings)]
    return ("; ".join(runs))[:400] + f"; {digest}"


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key with layer 10 after layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _pattern(name: str) -> str:
    """A layer's name without its numbers: the ranks of a pipeline hold different layers of one kind."""
    return re.sub(r"\d+", "#", name)
