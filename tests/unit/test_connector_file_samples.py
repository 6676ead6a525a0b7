"""Weights and adapters are told apart by samples of their files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from maru_connector import file_samples
from maru_connector.file_samples import BLOCK, SPACING, digest_of_files, sample_digest

ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")


def write_safetensors(path: Path, tensors: dict[str, int]) -> dict[str, tuple[int, int]]:
    """A sparse file of ``tensors`` (name → bytes), all zero. Returns where each lies in the file."""
    header, offset = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    base = 8 + len(text)
    return {name: (base + at["data_offsets"][0], base + at["data_offsets"][1]) for name, at in header.items()}


def fill(path: Path, start: int, end: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\1" * (end - start))


def llama(layers: int) -> dict[str, int]:
    """Tensors of a model in which attention is a twentieth of the bytes, as in models with few key heads."""
    sizes = {"model.embed": 8 << 20}
    for i in range(layers):
        sizes |= {f"model.layers.{i}.mlp": 1 << 20}
        sizes |= {f"model.layers.{i}.self_attn.{name}": 16 << 10 for name in ATTENTION}
    return sizes


def test_every_tensor_counts(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    digests = set()
    for name in llama(6):
        spans = write_safetensors(path, llama(6))
        fill(path, *spans[name])
        digests.add(sample_digest(str(tmp_path)))
    assert len(digests) == len(llama(6))


def test_a_merged_adapter_that_touches_attention_alone_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    spans = write_safetensors(path, llama(22))
    base = sample_digest(str(tmp_path))
    for name in spans:
        if "self_attn" in name:
            fill(path, *spans[name])
    assert sample_digest(str(tmp_path)) != base


def test_one_expert_of_many_in_one_tensor_counts(tmp_path: Path) -> None:
    path, size = tmp_path / "model.safetensors", 1 << 30
    start, _ = write_safetensors(path, {"experts": size})["experts"]
    base = sample_digest(str(tmp_path))
    fill(path, start + size // 8, start + size // 8 + 2 * file_samples.TENSOR_SPACING)
    assert sample_digest(str(tmp_path)) != base


def test_a_model_of_very_many_tensors_is_read_once_per_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"t{i}": 5 * BLOCK for i in range(40)}
    write_safetensors(path, tensors)
    few = sample_digest(str(tmp_path))
    monkeypatch.setattr(file_samples, "MANY_TENSORS", 40)
    start, end = write_safetensors(path, tensors)["t7"]
    assert sample_digest(str(tmp_path)) != few
    zero = sample_digest(str(tmp_path))
    fill(path, start, end)
    assert sample_digest(str(tmp_path)) != zero


def test_the_names_of_tensors_count(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": 100, "b": 100})
    one = sample_digest(str(tmp_path))
    write_safetensors(path, {"b": 100, "a": 100})
    assert sample_digest(str(tmp_path)) != one


@pytest.mark.parametrize("name", ["model.bin", "model.gguf"])
def test_a_small_file_of_another_format_is_read_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(300_001))
    digests = {sample_digest(str(tmp_path))}
    for at in (0, 4097, 123_456, 300_000):
        fill(path, at, at + 1)
        digests.add(sample_digest(str(tmp_path)))
    assert len(digests) == 5


def test_a_large_file_of_another_format_is_sampled_every_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as file:
        file.truncate(6 << 30)
    digests = {sample_digest(str(tmp_path))}
    for at in (3, (2 << 30) + 7 * SPACING + 5, (6 << 30) - SPACING):
        fill(path, at, at + SPACING)  # wherever it lies, a sample is inside
        digests.add(sample_digest(str(tmp_path)))
    assert len(digests) == 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (8).to_bytes(8, "little") + b"not json",
        (4).to_bytes(8, "little") + b"[[]]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (46).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,99999999999]},"b":0}  ',
        (35).to_bytes(8, "little") + b'{"a":{"data_offsets":["0",true]}}   ',
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ],
    ids=["empty", "short", "length", "text", "list", "nested", "offset", "types", "pointer"],
)
def test_a_file_that_is_no_safetensors_whatever_its_name_is_read_as_any_other(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data + b"x" * 100)
    one = sample_digest(str(tmp_path))
    path.write_bytes(data + b"x" * 99 + b"y")
    assert one
    assert sample_digest(str(tmp_path)) != one


def test_copies_have_one_name_wherever_they_are(tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_bytes(data)
        (tmp_path / name / "config.json").write_text(name)
    assert sample_digest(str(tmp_path / "a")) == sample_digest(str(tmp_path / "b"))


def test_where_there_are_no_weights_there_is_no_digest(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").symlink_to("/nowhere/optimizer.pt")
    assert sample_digest(str(tmp_path)) == ""
    assert sample_digest("org/model-on-a-hub") == ""


def test_a_file_that_would_block_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.bin")
    with pytest.raises(OSError, match="not a regular file"):
        digest_of_files([str(tmp_path / "model.bin")])
