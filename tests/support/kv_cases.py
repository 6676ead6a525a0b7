"""The paged KV caches that engines make, as places in allocations, and what a slab of each must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maru_shm.geometry import KvLayout, KvPlane, KvRegion
from maru_shm.layout import SKIP_BLOCK

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class KvCase:
    """``allocations``: sizes in bytes; a plane's ``region`` is an index into them."""

    name: str
    num_blocks: int
    allocations: tuple[int, ...]
    planes: tuple[KvPlane, ...]

    def layout(self, regions: Sequence[KvRegion]) -> KvLayout:
        layout = KvLayout(self.num_blocks, 16, self.planes, tuple(regions), self.name)
        layout.check()
        return layout

    @property
    def block_bytes(self) -> int:
        return sum(p.piece_bytes for p in self.planes)

    def piece(self, memory: Sequence[Bytes], plane: int, block: int) -> Bytes:
        p = self.planes[plane]
        at = p.offset + block * p.block_stride
        return memory[p.region][at : at + p.piece_bytes]

    def slab(self, memory: Sequence[Bytes], blocks: Sequence[int]) -> Bytes:
        """What a chunk of ``blocks`` looks like in a slab; zeros for a skipped block."""
        parts: list[Bytes] = []
        for plane, p in enumerate(self.planes):
            for block in blocks:
                skipped = block == SKIP_BLOCK
                parts.append(np.zeros(p.piece_bytes, np.uint8) if skipped else self.piece(memory, plane, block))
        return np.concatenate(parts)

    def kept(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which bytes of a slab belong to blocks that are not skipped."""
        return np.concatenate([np.repeat(blocks != SKIP_BLOCK, p.piece_bytes) for p in self.planes])

    def scatter(self, memory: Sequence[Bytes], blocks: Sequence[int], slab: Bytes) -> None:
        """Write a slab into ``memory`` as a load must."""
        at = 0
        for plane, p in enumerate(self.planes):
            for block in blocks:
                if block != SKIP_BLOCK:
                    self.piece(memory, plane, block)[:] = slab[at : at + p.piece_bytes]
                at += p.piece_bytes


def _one_buffer(name: str, blocks: int, count: int, piece: int, *, step: int = 0, lead: int = 0, stride: int = 0) -> KvCase:
    """``count`` planes in one allocation, ``step`` apart, the first at ``lead``."""
    stride = stride or piece
    step = step or blocks * stride
    planes = tuple(KvPlane(0, lead + i * step, stride, piece, i) for i in range(count))
    return KvCase(name, blocks, (lead + (count - 1) * step + blocks * stride,), planes)


def cases() -> list[KvCase]:
    """Every shape of cache the engines of this project are known to make, small."""
    nb, layers, piece = 96, 6, 8192
    packed = _one_buffer("packed-kv", nb, layers, piece)
    uneven = nb * piece + 4096
    k_and_v = tuple(
        KvPlane(0, layer * (nb * piece + uneven) + kv * nb * piece, piece, piece, layer)
        for layer in range(layers)
        for kv in (0, 1)
    )
    return [
        packed,
        _one_buffer("leading-2", nb, 2 * layers, piece // 2),
        KvCase("k-and-v-unevenly-spaced", nb, (layers * (nb * piece + uneven),), k_and_v),
        KvCase(
            "one-allocation-per-layer", nb, (nb * piece,) * layers, tuple(KvPlane(i, 0, piece, piece, i) for i in range(layers))
        ),
        _one_buffer("kernel-blocks-of-a-manager-block", nb // 4, layers, 4 * piece),
        _one_buffer("block-outermost", nb, 1, layers * piece),
        _one_buffer("block-outermost-padded", nb, 1, layers * piece, stride=layers * piece + 512),
        _one_buffer("block-outermost-by-layer", nb, layers, piece, step=piece, stride=layers * piece),
        _one_buffer("latent-576", nb, 5, 576 * 16, lead=256),
        _one_buffer("latent-fp8-656", nb, 5, 656 * 16, lead=768, step=nb * 656 * 16 + 16),
        _one_buffer("fp8", nb, layers, piece // 2, lead=512),
        _one_buffer("tiny-pieces", nb, 33, 528),
        KvCase(
            "two-kinds-of-layers",
            nb,
            (layers * nb * (piece + 4608),),
            tuple(
                KvPlane(0, (layer // 2) * 2 * nb * (piece + 4608) + (layer % 2) * 2 * nb * piece, (piece, 4608)[layer % 2],
                        (piece, 4608)[layer % 2], layer)
                for layer in range(layers)
            ),
        ),
        KvCase(
            "layers-in-reverse",
            nb,
            (layers * nb * piece,),
            tuple(KvPlane(0, (layers - 1 - i) * nb * piece, piece, piece, i) for i in range(layers)),
        ),
    ]  # fmt: skip


def block_tables(rng: np.random.Generator, num_blocks: int, chunks: int, per_chunk: int) -> dict[str, npt.NDArray[np.int32]]:
    """Tables of distinct blocks, shape (chunks, per_chunk): scattered, in runs long and short, falling, with skipped blocks."""
    n = chunks * per_chunk
    scattered = rng.permutation(num_blocks)[:n]
    first = int(rng.integers(0, num_blocks - n + 1))
    runs = np.concatenate(np.array_split(np.arange(n), max(1, n // 3))[::-1])
    skipping = scattered.copy()
    skipping[rng.random(n) < 0.4] = SKIP_BLOCK
    tables = {
        "scattered": scattered,
        "consecutive": np.arange(first, first + n),
        "falling": np.arange(first, first + n)[::-1],
        "short runs": first + runs,
        "skipping": skipping,
        "all skipped": np.full(n, SKIP_BLOCK),
    }
    return {name: table.astype(np.int32).reshape(chunks, per_chunk) for name, table in tables.items()}
