"""The KV cache of one toy worker, allocated by vLLM's own code, in every layout the releases use.

0.26 allocates one tensor per layer, physically NHD. Later releases allocate one buffer and place every layer in it by strides;
the layout names are theirs (L layer, B block, N token, H head, C the packed K and V).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

LAYERS, KV_HEADS, HEAD_SIZE = 3, 2, 8
ROW = (KV_HEADS, 2 * HEAD_SIZE)  #: float32 words of one token in one layer: K and V packed
POISON = 0xEE
#: layouts this release can allocate; the first is its default
LAYOUTS: tuple[str, ...] = ("LBNHC", "LBHNC", "BLNHC") if "layers" in KVCacheTensor.__dataclass_fields__ else ("NHD", "HND")


def kv_cache_config(num_blocks: int, block_tokens: int, layout: str) -> KVCacheConfig:
    """One full-attention group of ``LAYERS`` layers, placed as ``layout`` says."""
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    page = spec.page_size_bytes
    if layout in ("NHD", "HND"):
        tensors = [KVCacheTensor(size=page * num_blocks, shared_by=[name]) for name in names]
    else:
        layer_stride, block_stride = (page, page * LAYERS) if layout.startswith("B") else (page * num_blocks, page)
        tensors = [
            KVCacheTensor(size=page * num_blocks * LAYERS, layers=names, layer_stride=layer_stride, block_stride=block_stride)
        ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=[KVCacheGroupSpec(names, spec)])


def set_layout(config: VllmConfig, layout: str) -> None:
    """What EngineCore does once the layout is decided."""
    if layout not in ("NHD", "HND"):
        config.cache_config.kv_cache_layout = layout


class ToyKv:
    """The tensors as vLLM hands them to ``register_kv_caches``, and uint32 views of them by layer."""

    def __init__(self, config: KVCacheConfig, layout: str, *, kernel_tokens: int | None = None) -> None:
        spec = config.kv_cache_groups[0].kv_cache_spec
        self.block_tokens = spec.block_size
        self.kernel_tokens = kernel_tokens or spec.block_size
        if layout in ("NHD", "HND"):
            self.tensors = self._one_tensor_per_layer(config, layout)
        else:
            from vllm.v1.kv_cache_layout import KVCacheLayout
            from vllm.v1.worker.utils import allocate_kv_cache

            self.tensors = allocate_kv_cache(
                config, torch.device("cpu"), KVCacheLayout[layout], [kernel_tokens] if kernel_tokens else None
            )
        self.names = list(self.tensors)
        self._words = [self.tensors[name].view(torch.int32).numpy().view(np.uint32) for name in self.names]

    def _one_tensor_per_layer(self, config: KVCacheConfig, layout: str) -> dict[str, torch.Tensor]:
        from vllm.v1.worker.gpu.attn_utils import _allocate_kv_cache

        tensors = {}
        shape = (config.num_blocks * self.block_tokens // self.kernel_tokens, KV_HEADS, self.kernel_tokens, 2 * HEAD_SIZE)
        for name, raw in _allocate_kv_cache(config, {}, torch.device("cpu")).items():
            flat = raw.view(torch.float32)
            if layout == "NHD":
                tensors[name] = flat.view(shape[0], shape[2], shape[1], shape[3]).permute(0, 2, 1, 3)
            else:
                tensors[name] = flat.view(shape)
        return tensors

    def _place(self, blocks: Sequence[int], start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Kernel block and offset in it of each position."""
        position = np.arange(start, end)
        slot = (
            np.asarray(blocks, dtype=np.int64)[position // self.block_tokens] * self.block_tokens + position % self.block_tokens
        )
        return slot // self.kernel_tokens, slot % self.kernel_tokens

    def read(self, layer: int, blocks: Sequence[int], start: int, end: int) -> npt.NDArray[np.uint32]:
        """KV of positions ``start`` to ``end`` of a request that owns ``blocks``: (end − start, *ROW)."""
        block, offset = self._place(blocks, start, end)
        return self._words[layer][block, :, offset, :]

    def write(self, layer: int, blocks: Sequence[int], start: int, rows: npt.NDArray[np.uint32]) -> None:
        block, offset = self._place(blocks, start, start + len(rows))
        self._words[layer][block, :, offset, :] = rows

    def copy_block(self, source: int, target: int) -> None:
        """vLLM's copy-on-write of a shared block."""
        per = self.block_tokens // self.kernel_tokens
        for words in self._words:
            words[target * per : (target + 1) * per] = words[source * per : (source + 1) * per]

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with bytes that no prefix has."""
        per = self.block_tokens // self.kernel_tokens
        index = [b * per + i for b in blocks for i in range(per)]
        for words in self._words:
            words[index] = int.from_bytes(bytes([POISON]) * 4, "little")
