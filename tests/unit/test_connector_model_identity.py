"""A model's name among engines: what it is made of, never where it lies or what loading made of its configuration."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maru_connector.model_identity import identify

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = os.urandom(5000)


def model(directory: Path, config: dict[str, object] | None = None, weights: bytes = WEIGHTS) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    (directory / "model.bin").write_bytes(weights)
    return directory


def engine(name: object, *, engine_id: str = "e", **fields: Any) -> Any:
    commit = fields.pop("commit", None)
    transfer = fields.pop("weight_transfer_config", None)
    settings: dict[str, Any] = {
        "model": str(name), "revision": None, "quantization": None, "max_model_len": 4096, "hf_overrides": {},
        "hf_config": SimpleNamespace(_commit_hash=commit), **fields,
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**settings), kv_transfer_config=SimpleNamespace(engine_id=engine_id), instance_id="1",
        weight_transfer_config=transfer,
    )  # fmt: skip


def same(one: Any, other: Any, named: str | None = None) -> bool:
    return identify(one, named).facts == identify(other, named).facts


def shared(**fields: Any) -> bool:
    """Whether two engines that differ in their id alone share."""
    name = fields.pop("name")
    return same(engine(name, engine_id="a", **fields), engine(name, engine_id="b", **fields))


def test_copies_share_and_retrained_models_do_not(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b")
    assert same(engine(a, engine_id="1"), engine(b, engine_id="2"))
    assert not same(engine(a), engine(model(tmp_path / "c", weights=bytes(5000))))


def test_a_model_saved_again_by_another_release_is_the_same(tmp_path: Path) -> None:
    a = model(tmp_path / "a", {"model_type": "llama", "torch_dtype": "float16"})
    b = model(tmp_path / "b", {"transformers_version": "5", "dtype": "float16", "model_type": "llama"})
    assert same(engine(a), engine(b))


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "params.json", "preprocessor_config.json", "model.py"])
def test_every_file_that_says_how_to_build_a_model_counts(tmp_path: Path, name: str) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b")
    (b / name).write_text('{"rope_theta": 1}')
    assert not same(engine(a), engine(b))


def test_the_tokenizer_and_odd_files_do_not_count(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b")
    (b / "tokenizer_config.json").write_text("{}")
    (b / "broken.py").symlink_to("/nowhere")
    assert same(engine(a), engine(b))


def test_a_configuration_from_elsewhere_counts(tmp_path: Path) -> None:
    a = model(tmp_path / "a")
    configs = [tmp_path / "one", tmp_path / "two"]
    for i, path in enumerate(configs):
        path.mkdir()
        (path / "config.json").write_text(f'{{"rope_theta": {i}}}')
    assert not same(engine(a, hf_config_path=str(configs[0])), engine(a, hf_config_path=str(configs[1])))


def test_what_the_user_overrides_counts(tmp_path: Path) -> None:
    a = model(tmp_path / "a")
    assert same(engine(a, hf_overrides={"x": {"y": 1, "z": 2}}), engine(a, hf_overrides={"x": {"z": 2, "y": 1}}))
    assert not same(engine(a, hf_overrides={"rope_theta": 1}), engine(a))
    assert not same(engine(a, disable_sliding_window=True), engine(a))


def test_overrides_by_a_function_are_not_shared(tmp_path: Path) -> None:
    a = model(tmp_path / "a")
    assert not shared(name=a, hf_overrides=lambda config: config)
    assert "function" in (identify(engine(a, hf_overrides=lambda config: config)).unshared or "")


@pytest.mark.parametrize(
    ("config", "matters"),
    [
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, True),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "dynamic"}}, True),
        ({"model_type": "llama4"}, True),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, False),
        ({"model_type": "llama", "quantization_config": {"activation_scheme": "dynamic"}}, False),
    ],
    ids=["longrope", "dynamic", "llama4", "llama3", "dynamic-scales"],
)
def test_the_maximum_length_counts_where_keys_depend_on_it(tmp_path: Path, config: dict[str, object], *, matters: bool) -> None:
    a = model(tmp_path / "a", config)
    assert same(engine(a, max_model_len=1000), engine(a, max_model_len=2000)) is not matters


def test_a_hubs_model_is_named_by_its_commit() -> None:
    assert shared(name="org/model", commit=COMMIT)
    assert shared(name="org/model", revision=COMMIT)
    assert not same(engine("org/model", commit=COMMIT), engine("org/model", commit=COMMIT[::-1]))
    assert not same(engine("org/model", commit=COMMIT), engine("org/other", commit=COMMIT))


def test_a_hubs_model_of_unknown_commit_is_not_shared() -> None:
    assert not shared(name="org/model")
    assert not shared(name="org/model", revision="main")
    assert not shared(name="org/model", commit=COMMIT, hf_config_path="org/config")  # the configuration's, not the weights'


def test_weights_at_an_address_are_not_shared(tmp_path: Path) -> None:
    assert not shared(name=model(tmp_path / "a"), model_weights="s3://bucket/model")


def test_weights_that_change_in_place_are_not_shared(tmp_path: Path) -> None:
    a = model(tmp_path / "a")
    assert shared(name=a)
    assert not shared(name=a, weight_transfer_config=object())
    one, restarted = engine(a, weight_transfer_config=object()), engine(a, weight_transfer_config=object())
    restarted.instance_id = "2"
    assert not same(one, restarted)  # even where the user gives it the same id


def test_weights_that_are_nowhere_are_not_shared(tmp_path: Path) -> None:
    a = model(tmp_path / "a")
    one, other = engine(a, engine_id="1"), engine(a, engine_id="2")
    one.load_config = other.load_config = SimpleNamespace(load_format="dummy", model_loader_extra_config={})
    assert not same(one, other)
    assert same(one, other, "v7")
    (a / "model.bin").unlink()
    assert not shared(name=a)


def test_weights_that_cannot_be_read_are_not_shared(tmp_path: Path) -> None:
    a = model(tmp_path / "a")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = identify(engine(a))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "cannot be read" in (found.unshared or "")
    assert found.facts["engine"]


def test_the_users_name_stands_for_the_weights(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b", weights=bytes(5000))
    assert same(engine(a, engine_id="1", weight_transfer_config=object()), engine(b, engine_id="2"), "v7")
    assert identify(engine(a), "v7").facts != identify(engine(a), "v8").facts
    assert not same(engine(a), engine(model(tmp_path / "c", {"rope_theta": 1})), "v7")  # for the weights, no more
    assert not same(engine("org/a"), engine("org/b"), "v7")
