"""What separates chunks and models beyond the tokens."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maru_connector import namespace
from maru_connector.namespace import LoraIdentities, cacheable, chunk_extra, request_root, sample_digest
from maru_shm.keys import ChunkKeys

ROOT = b"0123456789abcdef"


def request(**fields: Any) -> Any:
    return SimpleNamespace(**{"cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None, **fields})


def image(identifier: str, offset: int, length: int = 8) -> Any:
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def keys_of(req: Any, tokens: list[int]) -> bytes:
    extra = chunk_extra(req, 16)
    keys = ChunkKeys(ROOT, 16, extra) if extra else ChunkKeys(ROOT, 16)
    keys.extend(tokens)
    return bytes(keys.keys)


def test_equal_placeholders_with_other_images_are_other_chunks() -> None:
    tokens = [7] * 48
    cat = keys_of(request(mm_features=[image("cat", 20)]), tokens)
    assert cat == keys_of(request(mm_features=[image("cat", 20)]), tokens)
    dog = keys_of(request(mm_features=[image("dog", 20)]), tokens)
    assert cat[:16] == dog[:16]  # the chunk before the image is text alone
    assert cat[16:32] != dog[16:32]
    assert cat[32:] != dog[32:]


def test_the_same_image_elsewhere_is_another_chunk() -> None:
    tokens = [7] * 48
    assert keys_of(request(mm_features=[image("cat", 20)]), tokens) != keys_of(request(mm_features=[image("cat", 22)]), tokens)


def test_an_image_over_a_chunk_boundary_counts_in_both() -> None:
    tokens = [7] * 32
    one, other = (keys_of(request(mm_features=[image(name, 12)]), tokens) for name in ("cat", "dog"))
    assert one[:16] != other[:16]


def test_a_salt_and_an_adapter_separate_every_chunk(tmp_path: Path) -> None:
    loras = LoraIdentities()
    (tmp_path / "adapter.safetensors").write_bytes(os.urandom(5000))
    adapter = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path=str(tmp_path))
    roots = {
        request_root(ROOT, request(), loras),
        request_root(ROOT, request(cache_salt="alice"), loras),
        request_root(ROOT, request(cache_salt="bob"), loras),
        request_root(ROOT, request(lora_request=adapter), loras),
        request_root(ROOT, request(lora_request=adapter, cache_salt="alice"), loras),
    }
    assert len(roots) == 5


def test_an_adapter_is_named_by_its_weights(tmp_path: Path) -> None:
    data = os.urandom(5000)
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter.safetensors").write_bytes(data if name != "three" else os.urandom(5000))
    identities = [
        LoraIdentities().of(SimpleNamespace(lora_int_id=i, lora_name=name, lora_path=str(tmp_path / name)))
        for i, name in enumerate(("one", "two", "three"))
    ]
    assert identities[0] == identities[1] != identities[2]


def test_an_adapter_without_files_here_is_named_by_name_and_path() -> None:
    def named(name: str, path: str) -> str:
        return LoraIdentities().of(SimpleNamespace(lora_int_id=1, lora_name=name, lora_path=path))

    assert len({named("a", "hub/x"), named("b", "hub/x"), named("a", "hub/y")}) == 3


def test_prompt_embeddings_and_streamed_prompts_are_not_cached() -> None:
    assert cacheable(request())
    assert not cacheable(request(prompt_embeds=object()))
    assert not cacheable(request(resumable=True))


def test_a_model_is_named_by_the_bytes_of_its_weights_not_by_its_path(tmp_path: Path) -> None:
    data = bytearray(os.urandom(1 << 20))
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    (tmp_path / "a" / "model.safetensors").write_bytes(data)
    (tmp_path / "b" / "model.safetensors").write_bytes(data)
    for at in range(0, len(data), 512):  # a re-training moves every tensor
        data[at] ^= 1
    (tmp_path / "c" / "model.safetensors").write_bytes(data)
    assert sample_digest(str(tmp_path / "a")) == sample_digest(str(tmp_path / "b"))
    assert sample_digest(str(tmp_path / "a")) != sample_digest(str(tmp_path / "c"))
    assert sample_digest(str(tmp_path)) == ""
    assert sample_digest("org/model-on-a-hub") == ""


class FullAttentionSpec:
    block_size = 16
    non_causal = False


class MambaSpec:
    block_size = 16


def engine(*specs: Any, **parallel: int) -> tuple[Any, Any]:
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel), cache_config=SimpleNamespace())
    return config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_one_full_attention_group_is_taken() -> None:
    assert namespace.declined(*engine(FullAttentionSpec())) is None


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (engine(FullAttentionSpec(), FullAttentionSpec()), "2 KV cache groups"),
        (engine(MambaSpec()), "MambaSpec"),
        (engine(FullAttentionSpec(), decode_context_parallel_size=2), "decode_context_parallel_size is 2"),
    ],
    ids=["groups", "kind", "context-parallel"],
)
def test_what_cannot_be_cached_in_chunks_is_declined_in_words(config: tuple[Any, Any], match: str) -> None:
    reason = namespace.declined(*config)
    assert reason is not None
    assert match in reason


def test_run_time_scales_are_declined() -> None:
    config, cache = engine(FullAttentionSpec())
    config.cache_config.calculate_kv_scales = True
    assert "scales" in (namespace.declined(config, cache) or "")
