"""Which model an engine runs, from what loading it leaves alone: its files, its commit, and what the user asked for.

The scheduler's process and the workers each compute the facts, from copies of one configuration, and must agree. In the
workers a model has been built from that copy, and building writes to it: DeepSeek renames its rotary embedding in
``hf_config``, attention layers settle ``cache_dtype``. So nothing is taken from either.

A model that nothing names durably gets its engine's own name: cached, shared with nobody.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, NamedTuple

from maru_connector.file_samples import sample_digest

_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype")
#: models that compute keys and values with the engine's maximum length: rotary tables, Llama 4's attention temperature
_LENGTH_DEPENDENT = re.compile(rb'"(rope_)?type": "(longrope|su|dynamic)"|"model_type": "llama4')
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_CONFIG_BYTES = 64 << 20


class ModelIdentity(NamedTuple):
    facts: dict[str, object]
    unshared: str | None  #: why no other engine gives its model this name, in words; None where others do


def identify(vllm_config: Any, named: str | None = None) -> ModelIdentity:
    """Facts of weights and configuration. ``named``: the user's name for the weights, in place of what is found out."""
    model = vllm_config.model_config
    overrides = _overrides(model)
    facts: dict[str, object] = {
        "overrides": overrides,
        "quantization": [str(model.quantization), digest(getattr(model, "quantization_config", None))],
        "implementation": str(getattr(model, "model_impl", "")),
        "loader": _loader(getattr(vllm_config, "load_config", None)),
    }
    unshared = "hf_overrides is a function" if callable(getattr(model, "hf_overrides", None)) else None
    if named:
        facts["weights"] = f"named:{named}"
    else:
        try:
            facts |= _weights(model)
        except OSError as e:
            unshared = f"the weights cannot be read: {e}"
        unshared = _unnamed(vllm_config, facts) or unshared
    config = None
    try:
        config = _config(model)
    except OSError as e:
        unshared = f"the configuration cannot be read: {e}"
    if config is None:
        facts["model"] = model.model  # named by the user or not: another repository is another configuration
    else:
        facts["config"] = {name: hashlib.blake2b(text, digest_size=16).hexdigest() for name, text in config.items()}
    if config is None or _LENGTH_DEPENDENT.search(b"\n".join(config.values()) + json.dumps(overrides).encode()):
        facts["max_model_len"] = model.max_model_len
    if unshared is not None:  # both: users may give an engine the same id again when it is restarted
        facts["engine"] = [str(vllm_config.kv_transfer_config.engine_id), str(getattr(vllm_config, "instance_id", ""))]
    return ModelIdentity(facts, unshared)


def _unnamed(vllm_config: Any, facts: dict[str, object]) -> str | None:
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "weight_transfer_config is set: the weights change in place"
    if getattr(getattr(vllm_config, "load_config", None), "load_format", "") == "dummy":
        return "load_format is dummy: nothing says what the weights are, or become"
    if facts.get("elsewhere"):
        return f"the weights are at {facts['elsewhere']}, which may come to hold others"
    if "weights" not in facts and "commit" not in facts:
        return f"there are no weight files in {facts.get('model')}"
    if "commit" in facts and not _COMMIT.fullmatch(str(facts["commit"])):
        return f"the commit of {facts['model']} is not known"
    return None


def digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=_plain).encode(), digest_size=16).hexdigest()


def _plain(value: object) -> object:
    """An odd configuration value as something that is equal in every process: no addresses, no hash order."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def _weights(model: Any) -> dict[str, object]:
    """A local model by its bytes, one elsewhere by name and commit. Raises :class:`OSError`."""
    if os.path.exists(model.model):
        sampled = sample_digest(model.model)
        elsewhere = str(getattr(model, "model_weights", "") or "")
        return {"weights": sampled} if sampled and not elsewhere else {"model": model.model, "elsewhere": elsewhere}
    revision = str(getattr(model, "revision", None))
    commit = revision if _COMMIT.fullmatch(revision) else None
    if commit is None and getattr(model, "hf_config_path", None) in (None, model.model):  # else it is another repository's
        commit = getattr(model.hf_config, "_commit_hash", None)
    return {"model": model.model, "revision": revision, "commit": str(commit)}


def _loader(load_config: Any) -> list[object]:
    """Where else weights come from: a QLoRA adapter, a tensorizer's address."""
    extra = getattr(load_config, "model_loader_extra_config", None)
    plain = {k: v for k, v in extra.items() if isinstance(v, (str, int, float))} if isinstance(extra, dict) else {}
    return [str(getattr(load_config, "load_format", "")), plain]


def _overrides(model: Any) -> object:
    """What the user changed of the model's configuration, as it was said."""
    said = getattr(model, "hf_overrides", None)
    generation = getattr(model, "override_generation_config", None) or {}
    return [
        getattr(said, "__qualname__", type(said).__name__) if callable(said) else json.loads(json.dumps(said, default=_plain)),
        str(getattr(model, "hf_config_path", None)),
        str(getattr(model, "code_revision", None)),
        bool(getattr(model, "disable_sliding_window", False)),
        str(generation.get("attn_temperature_tuning")),  # Llama 4 takes it from here
    ]


def _config(model: Any) -> dict[str, bytes] | None:
    """The files that say how to build the model and prepare its input; None where they are not here (the commit names them).

    Python files too: models may bring their own code. Raises :class:`OSError`.
    """
    directory = str(getattr(model, "hf_config_path", None) or model.model)
    if os.path.isfile(directory):  # GGUF: the file describes itself
        return {}
    if not os.path.isdir(directory):
        return None
    files = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        wanted = name.endswith(("config.json", ".py")) or name == "params.json"
        if wanted and name != "tokenizer_config.json" and os.path.isfile(path):
            with open(path, "rb") as file:
                files[name] = _without_volatile(file.read(_MAX_CONFIG_BYTES))
    return files


def _without_volatile(data: bytes) -> bytes:
    """A configuration without what changes when a model is saved again or moved; other text as it is."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(parsed, dict):
        return data
    return json.dumps({k: v for k, v in parsed.items() if k not in _VOLATILE_CONFIG}, sort_keys=True).encode()
