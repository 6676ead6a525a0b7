"""What separates chunks and models beyond the tokens."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maru_connector import namespace
from maru_connector.namespace import LoraIdentities, cacheable, chunk_extra, request_root
from maru_shm.keys import ChunkKeys, model_root

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
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.bin").write_bytes(os.urandom(5000))
    adapter = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path=str(tmp_path))
    roots = {
        request_root(ROOT, request(), loras),
        request_root(ROOT, request(cache_salt="alice"), loras),
        request_root(ROOT, request(cache_salt="bob"), loras),
        request_root(ROOT, request(lora_request=adapter), loras),
        request_root(ROOT, request(lora_request=adapter, cache_salt="alice"), loras),
    }
    assert len(roots) == 5


def test_prompt_embeddings_and_streamed_prompts_are_not_cached() -> None:
    assert cacheable(request())
    assert not cacheable(request(prompt_embeds=object()))
    assert not cacheable(request(resumable=True))


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


def test_a_model_whose_pooler_needs_every_token_is_declined() -> None:
    config, cache = engine(FullAttentionSpec())
    config.model_config = SimpleNamespace(is_prefix_caching_supported=False)
    assert "pooler" in (namespace.declined(config, cache) or "")
    config.model_config.is_prefix_caching_supported = True
    config.cache_config.enable_prefix_caching = False  # the user's choice for the local cache alone
    assert namespace.declined(config, cache) is None


def whole_engine(directory: Path, **multimodal: object) -> tuple[Any, Any]:
    """An engine's configuration as far as its facts go, with ``config.json`` and weights in ``directory``."""
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text('{"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn"}}')
        (directory / "model.bin").write_bytes(os.urandom(100))
    model = SimpleNamespace(
        model=str(directory), revision=None, hf_overrides={}, quantization=None, dtype="bfloat16", max_model_len=4096,
        hf_config=SimpleNamespace(rope_parameters={"rope_type": "yarn"}, sliding_window=None),
        multimodal_config=SimpleNamespace(**multimodal) if multimodal else None,
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=model, cache_config=SimpleNamespace(cache_dtype="auto"), device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(engine_id="e"), instance_id="1",
    )  # fmt: skip
    return config, engine(FullAttentionSpec())[1]


def root_of(config: Any, cache: Any) -> bytes:
    pytest.importorskip("vllm")
    return model_root(namespace.model_facts(config, cache))


def test_building_the_model_in_the_workers_does_not_change_their_root(tmp_path: Path) -> None:
    config, cache = whole_engine(tmp_path)
    scheduler = root_of(config, cache)
    config.model_config.hf_config.rope_parameters["rope_type"] = "deepseek_yarn"
    config.model_config.hf_config.sliding_window = 128
    for settled in ("fp8", "fp8_ds_mla"):
        config.cache_config.cache_dtype = settled
        assert root_of(config, cache) == scheduler


def test_kinds_of_kv_elements_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    roots = set()
    for kind in ("fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head"):
        config, cache = whole_engine(tmp_path)
        config.cache_config.cache_dtype = kind
        roots.add(root_of(config, cache))
    assert len(roots) == 4


def test_settings_that_change_what_an_image_becomes_are_facts(tmp_path: Path) -> None:
    roots = {
        root_of(*whole_engine(tmp_path, **settings))
        for settings in (
            {"mm_processor_kwargs": None, "media_io_kwargs": {}},
            {"mm_processor_kwargs": {"max_pixels": 1000}, "media_io_kwargs": {}},
            {"mm_processor_kwargs": None, "media_io_kwargs": {"video": {"num_frames": 4}}},
        )
    }
    assert len(roots) == 3


def test_a_cpu_engine_says_how_its_blocks_are_laid_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    config, cache = whole_engine(tmp_path)
    config.device_config.device_type = "cpu"
    config.model_config.dtype = torch.float32
    facts = namespace.model_facts(config, cache)
    assert facts["cpu"]
    cache.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=32)
    assert namespace.model_facts(config, cache)["cpu"] != facts["cpu"]


def test_a_retrained_draft_model_is_another_model(tmp_path: Path) -> None:
    config, cache = whole_engine(tmp_path)
    (tmp_path / "draft").mkdir()
    config.speculative_config = SimpleNamespace(method="eagle", model=str(tmp_path / "draft"))
    roots = set()
    for _ in range(2):
        (tmp_path / "draft" / "model.bin").write_bytes(os.urandom(100))
        roots.add(root_of(config, cache))
    assert len(roots) == 2
