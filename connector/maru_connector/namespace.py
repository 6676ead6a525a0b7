"""What makes two engines' KV bytes interchangeable, beyond the tokens: facts for ``keys.model_root``, and one request's
identity.

Anything that shapes the bytes is a fact; a fact too many costs a miss, one too few a wrong answer. Which model it is:
``model_identity.py``; which adapter: ``lora_identity.py``.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from typing import Any

from maru_connector.file_samples import sample_digest
from maru_connector.log import get_logger
from maru_connector.lora_identity import LoraIdentities
from maru_connector.model_identity import digest, identify
from maru_shm import keys

__all__ = ["LoraIdentities", "cacheable", "chunk_extra", "declined", "declined_parallelism", "model_facts", "request_root"]

logger = get_logger("maru_connector")

_SUPPORTED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
#: ``cache_dtype`` whose elements the type and shape of the KV tensors tell apart; building a model moves among these
_TOLD_BY_LAYOUT = ("auto", "half", "float16", "bfloat16", "float", "float32", "fp8", "fp8_e4m3", "fp8_inc", "fp8_ds_mla")
#: settings that change what a multimodal item becomes, without changing its identifier
_MULTIMODAL = (
    "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype",
)  # fmt: skip


def declined(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why this engine's KV cache cannot be cached in chunks, in words, or None if it can."""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups; one full-attention group is supported"
    spec = groups[0].kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    for one in inner.values() if isinstance(inner, dict) else [spec]:
        if type(one).__name__ not in _SUPPORTED_SPECS:
            return f"the KV cache is a {type(one).__name__}; supported: {', '.join(_SUPPORTED_SPECS)}"
        if getattr(one, "non_causal", False):
            return "attention is not causal: a chunk's KV depends on what follows it"
    parallelism = declined_parallelism(vllm_config)
    if parallelism is not None:
        return parallelism
    if not getattr(getattr(vllm_config, "model_config", None), "is_prefix_caching_supported", True):
        return "vLLM supports no prefix caching for this model: its pooler, or its attention, needs every token in the pass"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales are computed at run time: equal tokens give other bytes in another engine"
    return None


def declined_parallelism(vllm_config: Any) -> str | None:
    """The part of :func:`declined` that is known before the model is."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}; context parallelism splits blocks between ranks"
    return None


def model_facts(vllm_config: Any, kv_cache_config: Any, weights_identity: str | None = None) -> dict[str, object]:
    """The facts, equal in every process of one engine; plain values for ``keys.model_root``.

    ``weights_identity``: the user's name for the weights. Whoever gives it vouches that equal names are equal weights.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    found = identify(vllm_config, weights_identity)
    if found.unshared is not None:
        logger.info("maru: this engine's KV cache is not shared with other engines: %s.", found.unshared)
    block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    facts: dict[str, object] = {
        "vllm": _vllm_version(),
        **found.facts,
        "dtype": str(model.dtype),
        "kv_dtype": _kv_dtype(vllm_config.cache_config.cache_dtype),
        "block_tokens": block_tokens,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "ep": bool(getattr(parallel, "enable_expert_parallel", False)),
    }
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None:
        facts["multimodal"] = digest({name: getattr(multimodal, name, None) for name in _MULTIMODAL})
    if getattr(getattr(vllm_config, "device_config", None), "device_type", "") == "cpu":
        facts["cpu"] = _cpu_attention(model.dtype, block_tokens)
    draft = getattr(vllm_config, "speculative_config", None)
    if draft is not None:
        facts["draft"] = [str(getattr(draft, "method", "")), *_draft(str(getattr(draft, "model", "")))]
    return facts


def _kv_dtype(cache_dtype: object) -> str:
    """What the layout, a part of the namespace too, does not tell of the elements.

    Building a model settles ``cache_dtype`` in the workers' copy of the configuration alone: ``auto`` or ``fp8`` becomes
    ``fp8`` or ``fp8_ds_mla``. Those differ in the tensors' type or shape. The others, ``fp8_e5m2`` above all, stay.
    """
    return "" if str(cache_dtype) in _TOLD_BY_LAYOUT else str(cache_dtype)


def _cpu_attention(dtype: Any, block_tokens: int) -> str:
    """The instruction set that CPU attention is built for: it decides the order of bytes inside a block."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return f"{platform.machine()} {_get_attn_isa(dtype, block_tokens)}"
    except (ImportError, TypeError):  # another release's: it is private
        return platform.machine()


def _draft(model: str) -> list[str]:
    """The draft model, by its bytes where they are here. One that is stale costs speed, never a wrong token."""
    try:
        return [sample_digest(model) or model]
    except OSError:
        return [model]


def _vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


def cacheable(request: Any) -> bool:
    """Whether a request's KV is a function of tokens and images alone.

    Prompt embeddings have no token ids to key by, and a resumable (streaming-input) request may take back tokens it had.
    """
    return getattr(request, "prompt_embeds", None) is None and not getattr(request, "resumable", False)


def request_root(model_root: bytes, request: Any, loras: LoraIdentities) -> bytes:
    """First parent of the request's chunk keys: separated by its salt and adapter."""
    return keys.request_root(model_root, salt=getattr(request, "cache_salt", None) or "", lora=loras.of(request.lora_request))


def chunk_extra(request: Any, chunk_tokens: int) -> Callable[[int], bytes] | None:
    """``extra(i)`` for :class:`keys.ChunkKeys`: the multimodal items that reach into chunk ``i``, each with its position.

    None for plain text. An item counts with its full identifier and its offset relative to the chunk's start, so equal
    placeholders with other images, or the same image elsewhere, are other chunks.
    """
    features = list(getattr(request, "mm_features", None) or ())
    if not features:
        return None
    spans = [(f.mm_position.offset, f.mm_position.offset + f.mm_position.length, f.modality, f.identifier) for f in features]

    def extra(chunk: int) -> bytes:
        start, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        inside = [[b - start, e - start, modality, identifier] for b, e, modality, identifier in spans if b < end and e > start]
        return json.dumps(inside).encode() if inside else b""

    return extra
