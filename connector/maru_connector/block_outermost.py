"""Asking vLLM to keep a block's layers together, so that a block is one piece instead of one per layer.

At 16 tokens an 8B model has pieces of 64 KiB per layer, of 16 KiB with tensor parallelism 4; together they are 2 MiB and 512
KiB. Every copy gets that much longer and their number that much smaller, which matters most where block ids are scattered
(``docs/performance.md``). vLLM 0.32 and later take a layout from the connector and fall back to their own, with a warning,
where the attention backend cannot use it; in 0.26 model runner V1 alone asks, and its cache then arrives as one tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from maru_connector.options import parse_options
from maru_shm.errors import MaruError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
#: Blackwell: its FlashInfer kernels read heads before tokens; the other backends there read either.
_HEADS_FIRST_CAPABILITY = 10


def preferred_layout(vllm_config: VllmConfig) -> str | None:
    """The name of a ``KVCacheLayout`` (vLLM 0.32 and later), None: no preference.

    None also beside other connectors: ``MultiConnector`` ends an engine whose connectors name different layouts, and it is
    recognised by who is calling, since a child's configuration does not mention it.
    """
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:  # 0.26: names are NHD and HND, and say nothing of layers
        return None
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not _wanted(transfer.kv_connector_extra_config) or _asked_by_multi_connector():
        return None
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():  # a CPU's copies do not get faster, and its kernels know one layout
        return None
    capability = current_platform.get_device_capability()
    heads_first = capability is not None and capability.major >= _HEADS_FIRST_CAPABILITY
    name = "BLHNC" if heads_first else "BLNHC"
    return name if name in KVCacheLayout.__members__ else None


def prefers_one_tensor(device_type: str, *, wanted: bool) -> bool:
    """For vLLM 0.26: whether all layers should share one tensor. Not where heads come first: vLLM would then put them outside
    the layers, and pieces would be a head long. ``wanted``: ``maru.block_outermost``."""
    if device_type != "cuda" or not wanted:
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


def _wanted(extra: Any) -> bool:
    try:
        return parse_options(extra).block_outermost
    except MaruError:  # said by the connector's constructor, which comes later
        return False


def _asked_by_multi_connector() -> bool:
    caller = sys._getframe(3)  # whoever called the connector's class method, which called preferred_layout
    return caller.f_globals.get("__name__") == _MULTI_CONNECTOR
