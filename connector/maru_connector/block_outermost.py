"""Asking vLLM to keep a block's layers together, so that a block is one piece instead of one per layer.

At 16 tokens an 8B model has pieces of 64 KiB per layer, of 16 KiB with tensor parallelism 4; together they are 2 MiB and 512
KiB. Every copy gets that much longer and their number that much smaller, which matters most where block ids are scattered
(``docs/performance.md``).

vLLM 0.26 asks in model runner V1, where every attention backend must say that it goes by the stride of a block; the cache
then arrives as one tensor. vLLM 0.32 and later take a layout from the connector and keep their own, with a warning, where a
backend declares others. But one that declares none counts as good for any, and not every such kernel goes by strides: it would
read wrong bytes. So there ``maru.block_outermost`` has to be set by somebody who knows the backend.

It is a preference, and must not cost more than it brings, so nothing is asked where

- blocks may have to be split into smaller ones for the kernels: vLLM 0.32 and 0.33 cannot split such blocks and would not start
  (seen with 128 tokens and FlashMLA), and split ones are no single piece. Blocks of 16, 32 or 64 tokens are not split;
- the model is a hybrid (its blocks are sized for Mamba layers), uses MLA (not every kernel takes a block's stride; its pieces
  are 73 KiB already), or is one that this connector does not cache;
- other connectors have a say: ``MultiConnector`` ends an engine whose connectors name different layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from maru_connector.namespace import declined_parallelism
from maru_connector.options import parse_options
from maru_shm.errors import MaruError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UNSPLIT_TOKENS = (16, 32, 64)
_MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
_CALLERS = 6  #: frames looked at: a subclass or two, and the loop in MultiConnector
#: Blackwell: its FlashInfer kernels read heads before tokens; the other backends there read either.
_HEADS_FIRST_CAPABILITY = 10


def preferred_layout(vllm_config: VllmConfig) -> str | None:
    """The name of a ``KVCacheLayout`` (vLLM 0.32 and later); None: no preference, unless ``maru.block_outermost`` is set."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:  # 0.26: names are NHD and HND, and say nothing of layers
        return None
    if not _suits(vllm_config, unless_set=False) or made_by_multi_connector():
        return None
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    heads_first = capability is not None and capability.major >= _HEADS_FIRST_CAPABILITY
    name = "BLHNC" if heads_first else "BLNHC"
    return name if name in KVCacheLayout.__members__ else None


def prefers_one_tensor(vllm_config: VllmConfig) -> bool:
    """For vLLM 0.26: whether all layers should share one tensor. Not where heads come first: vLLM would then put them outside
    the layers, and pieces would be a head long."""
    if not _suits(vllm_config, unless_set=True):
        return False
    try:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout
    except ImportError:
        return False
    return bool(get_kv_cache_layout() == "NHD")


def by_layer(cache: Any, backend: Any, tensors: Sequence[Any]) -> dict[str, Any]:
    """Layer name → view of that layer, of the one tensor that vLLM 0.26 registers.

    ``cache``: in memory order, as the backend's ``get_kv_cache_stride_order(include_num_layers_dimension=True)`` says.
    ``tensors``: the configuration's ``kv_cache_tensors``; the i-th names those that share layer i.
    """
    order = list(backend.get_kv_cache_stride_order(include_num_layers_dimension=True))
    layers = cache.permute(*(order.index(d) for d in range(len(order))))
    return {name: layers[i] for i, tensor in enumerate(tensors) for name in tensor.shared_by}


def _suits(config: VllmConfig, *, unless_set: bool) -> bool:
    """``unless_set``: whether it is wanted where the option says nothing."""
    from vllm.platforms import current_platform

    transfer, model = config.kv_transfer_config, config.model_config
    if transfer is None or model is None or not current_platform.is_cuda():  # a CPU's copies do not get faster
        return False
    try:
        wanted = parse_options(transfer.kv_connector_extra_config).block_outermost
    except MaruError:  # said by the connector's constructor, which comes later
        return False
    return bool(
        (unless_set if wanted is None else wanted)
        and config.cache_config.block_size in _UNSPLIT_TOKENS
        and config.cache_config.cache_dtype != "nvfp4"  # layers of other dtypes beside it may get other blocks
        and not (model.is_hybrid or model.use_mla)
        and declined_parallelism(config) is None
    )


def made_by_multi_connector() -> bool:
    """A child's configuration does not mention its siblings, so it is recognised by who is calling."""
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        owner = frame.f_locals.get("cls")
        bases = owner.__mro__ if isinstance(owner, type) else ()
        if frame.f_globals.get("__name__") == _MULTI_CONNECTOR or any(b.__module__ == _MULTI_CONNECTOR for b in bases):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
