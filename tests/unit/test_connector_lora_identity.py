"""An adapter's identity: equal for equal bytes everywhere, private where that cannot be known, and never an exception."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maru_connector.lora_identity import LoraIdentities

WEIGHTS = os.urandom(5000)


def adapter(directory: Path, weights: bytes = WEIGHTS, config: str = '{"r": 8, "lora_alpha": 16}') -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_text(config)
    return directory


def request(path: object, *, number: int = 1, name: str = "a", **fields: object) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(path), **fields)


def test_a_request_without_an_adapter_has_no_identity() -> None:
    assert LoraIdentities().of(None) == ""


def test_engines_agree_on_copies_of_an_adapter(tmp_path: Path) -> None:
    one = LoraIdentities().of(request(adapter(tmp_path / "x")))
    other = LoraIdentities().of(request(adapter(tmp_path / "y"), number=7, name="b"))
    assert one == other != ""


@pytest.mark.parametrize(
    "changed",
    [{"config": '{"r": 8, "lora_alpha": 64}'}, {"weights": bytes(5000)}],
    ids=["alpha", "weights"],
)
def test_weights_and_configuration_both_count(tmp_path: Path, changed: dict[str, Any]) -> None:
    one = LoraIdentities().of(request(adapter(tmp_path / "x")))
    assert LoraIdentities().of(request(adapter(tmp_path / "y", **changed))) != one


def test_how_the_weights_are_read_counts(tmp_path: Path) -> None:
    path = adapter(tmp_path / "x")
    assert LoraIdentities().of(request(path, is_3d_lora_weight=True)) != LoraIdentities().of(request(path))


def test_what_training_left_behind_is_not_looked_at(tmp_path: Path) -> None:
    path = adapter(tmp_path / "x")
    one = LoraIdentities().of(request(path))
    (path / "optimizer.pt").symlink_to("/nowhere/optimizer.pt")
    (path / "training_args.bin").write_bytes(b"seed 2")
    assert LoraIdentities().of(request(path)) == one


@pytest.mark.parametrize("path", ["org/adapter-on-a-hub", "/nowhere", "a\0b", "", "\udcff"])
def test_an_adapter_that_cannot_be_read_is_private_to_the_engine(path: str) -> None:
    ours, theirs = LoraIdentities(), LoraIdentities()
    assert ours.of(request(path)) == ours.of(request(path))
    assert ours.of(request(path)) != theirs.of(request(path))
    assert ours.of(request(path)) != ours.of(request(path, number=2, name="b"))
    assert ours.of(request(path)).encode()


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_private(tmp_path: Path, missing: str) -> None:
    path = adapter(tmp_path / "x")
    (path / missing).unlink()
    (path / missing).symlink_to("/nowhere")
    assert LoraIdentities().of(request(path)) != LoraIdentities().of(request(path))


def test_a_fifo_among_the_weights_neither_blocks_nor_is_read(tmp_path: Path) -> None:
    path = adapter(tmp_path / "x")
    one = LoraIdentities().of(request(path))
    os.mkfifo(path / "adapter_model.bin")
    assert LoraIdentities().of(request(path)) == one


def test_an_adapter_loaded_in_place_is_named_by_its_new_bytes(tmp_path: Path) -> None:
    ours = LoraIdentities()
    path = adapter(tmp_path / "x")
    before = ours.of(request(path))
    adapter(path, bytes(5000))
    after = ours.of(request(path, load_inplace=True))
    assert after == LoraIdentities().of(request(path)) != before
    assert ours.of(request(path)) == after  # later requests come without the flag


def test_bytes_that_change_without_a_trace_are_seen_when_loaded_in_place(tmp_path: Path) -> None:
    ours = LoraIdentities()
    path = adapter(tmp_path / "x")
    before = ours.of(request(path))
    weights = path / "adapter_model.safetensors"
    status = weights.stat()
    weights.write_bytes(bytes(5000))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert ours.of(request(path, load_inplace=True)) != before


def test_files_that_change_under_a_loaded_adapter_make_it_private_until_it_is_loaded_again(tmp_path: Path) -> None:
    ours = LoraIdentities()
    path = adapter(tmp_path / "x")
    before = ours.of(request(path))
    adapter(path, bytes(6000))  # the workers may hold the old weights still
    fresh = LoraIdentities().of(request(path))
    unsure = ours.of(request(path))
    assert len({before, fresh, unsure}) == 3
    assert ours.of(request(path)) == unsure
    assert ours.of(request(path, load_inplace=True)) == fresh


def test_a_disk_that_fails_once_does_not_rename_an_adapter(tmp_path: Path) -> None:
    ours = LoraIdentities()
    path = adapter(tmp_path / "x")
    before = ours.of(request(path))
    path.rename(tmp_path / "away")
    assert ours.of(request(path)) != before
    (tmp_path / "away").rename(path)
    assert ours.of(request(path)) == before
