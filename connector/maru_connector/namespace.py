"""What makes two engines' KV bytes interchangeable, beyond the tokens: facts for ``keys.model_root``, and one request's
identity.

Anything that shapes the bytes is a fact; a fact too many costs a miss, one too few a wrong answer. The weights are named by
a digest of samples of their files rather than by a path: a re-trained model in the same directory is another model, a copy
of the same model elsewhere is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

from maru_shm import keys

SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 4096
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype")
#: rotary embeddings whose table depends on the engine's maximum length
_LENGTH_DEPENDENT_ROPE = ("longrope", "su", "dynamic")
_SUPPORTED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


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


def model_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, object]:
    """The facts, equal in every process of one engine; plain values for ``keys.model_root``."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    hf_config = _config_dict(model.hf_config)
    spec_config = getattr(vllm_config, "speculative_config", None)
    facts: dict[str, object] = {
        "vllm": _vllm_version(),
        **_weights(model.model, getattr(model, "revision", None), model.hf_config),
        "config": _digest(hf_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load_format": str(getattr(getattr(vllm_config, "load_config", None), "load_format", "")),
        "kv_dtype": str(cache.cache_dtype),
        "block_tokens": kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "ep": bool(getattr(parallel, "enable_expert_parallel", False)),
        "kv_heads": model.get_num_kv_heads(parallel),
        "head_size": model.get_head_size(),
        "window": str(getattr(model, "get_sliding_window", lambda: None)()),
    }
    if any(word in json.dumps(hf_config, default=_plain) for word in (f'"{r}"' for r in _LENGTH_DEPENDENT_ROPE)):
        facts["max_model_len"] = model.max_model_len
    if spec_config is not None:
        facts["draft"] = [str(getattr(spec_config, "method", "")), str(getattr(spec_config, "model", ""))]
    return facts


def _vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


def _config_dict(config: Any) -> dict[str, object]:
    raw = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    return {k: v for k, v in raw.items() if k not in _VOLATILE_CONFIG}


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=_plain).encode(), digest_size=16).hexdigest()


def _plain(value: object) -> object:
    """An odd configuration value as something that is equal in every process: no addresses, no hash order."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def _weights(name: str, revision: str | None, hf_config: Any) -> dict[str, object]:
    """A local model by its bytes; one from a hub by its name and commit."""
    sampled = sample_digest(name)
    if sampled:
        return {"weights": sampled}
    return {"model": name, "revision": str(revision), "commit": str(getattr(hf_config, "_commit_hash", None))}


def sample_digest(path: str) -> str:
    """Digest of names, sizes and evenly spaced samples of the weight files at ``path`` (a directory or one file).

    16 × 4 KiB per file: a millisecond per file, and no re-training leaves them all as they were. Empty if there are none.
    """
    if os.path.isdir(path):
        files = sorted(os.path.join(path, f) for f in os.listdir(path) if f.endswith(_WEIGHT_SUFFIXES))
    elif os.path.isfile(path):
        files = [path]
    else:
        return ""
    h = hashlib.blake2b(digest_size=16)
    for name in files:
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            h.update(f"{os.path.basename(name)}:{size};".encode())
            for i in range(SAMPLES_PER_FILE):
                file.seek(max(0, size - SAMPLE_BYTES) * i // max(1, SAMPLES_PER_FILE - 1))
                h.update(file.read(SAMPLE_BYTES))
    return h.hexdigest() if files else ""


class LoraIdentities:
    """Names adapters by path and contents; each is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], str] = {}

    def of(self, lora_request: Any) -> str:
        """Identity of a request's adapter, empty without one."""
        if lora_request is None:
            return ""
        path = str(getattr(lora_request, "lora_path", "") or "")
        key = (int(lora_request.lora_int_id), str(lora_request.lora_name), path)
        identity = self._known.get(key)
        if identity is None:
            sampled = sample_digest(path)
            identity = self._known[key] = f"weights:{sampled}" if sampled else f"name:{lora_request.lora_name}:{path}"
        return identity


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
