"""Keys: equal exactly where the KV cache is interchangeable."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from maru_shm.keys import ChunkKeys, model_root, namespace_id, request_root

ROOT = model_root({"model": "m", "dtype": "bfloat16", "tp": 1})


def keys_of(tokens: list[int], chunk: int = 4, root: bytes = ROOT) -> list[bytes]:
    ck = ChunkKeys(root, chunk)
    ck.extend(tokens)
    return [bytes(ck.keys[i : i + 16]) for i in range(0, len(ck.keys), 16)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_extending_in_any_steps_gives_the_same_keys(tokens: list[int], cuts: list[int]) -> None:
    ck = ChunkKeys(ROOT, 4)
    for cut in sorted(cuts):
        ck.extend(tokens, min(cut, len(tokens)))
    ck.extend(tokens)
    assert bytes(ck.keys) == b"".join(keys_of(tokens))
    assert len(ck) == len(tokens) // 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=40), st.lists(st.integers(0, 3), min_size=8, max_size=40))
def test_keys_agree_exactly_as_far_as_the_prefix_does(a: list[int], b: list[int]) -> None:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ka, kb = keys_of(a), keys_of(b)
    for i in range(min(len(ka), len(kb))):
        assert (ka[i] == kb[i]) == ((i + 1) * 4 <= common)


def test_a_chunk_depends_on_its_parent_not_on_its_tokens_alone() -> None:
    a, b = keys_of([1, 2, 3, 4, 9, 9, 9, 9]), keys_of([5, 6, 7, 8, 9, 9, 9, 9])
    assert a[1] != b[1]


def test_salt_and_lora_separate_every_chunk_and_cannot_be_confused() -> None:
    tokens = list(range(16))
    roots = {
        "plain": ROOT,
        "salt": request_root(ROOT, salt="x"),
        "lora": request_root(ROOT, lora="x"),
        "both": request_root(ROOT, salt="x", lora="x"),
        "split": request_root(ROOT, salt="xx"),
    }
    all_keys = [k for r in roots.values() for k in keys_of(tokens, root=r)]
    assert len(set(all_keys)) == len(all_keys)


def test_extra_bytes_change_their_chunk_and_all_after_it() -> None:
    tokens = list(range(16))
    plain = keys_of(tokens)
    ck = ChunkKeys(ROOT, 4, extra=lambda i: b"image-1@2" if i == 1 else b"")
    ck.extend(tokens)
    with_image = [bytes(ck.keys[i : i + 16]) for i in range(0, 64, 16)]
    assert with_image[0] == plain[0]
    assert all(with_image[i] != plain[i] for i in (1, 2, 3))


def test_roots_depend_on_content_not_on_order() -> None:
    assert model_root({"a": 1, "b": [1, 2]}) == model_root({"b": [1, 2], "a": 1})
    assert model_root({"a": 1}) != model_root({"a": 2})
    assert model_root({"a": 1}) != model_root({"a": "1"})


def test_a_namespace_differs_by_layout_chunk_size_and_ranks() -> None:
    names = {
        namespace_id(ROOT, "L", 256, 1),
        namespace_id(ROOT, "M", 256, 1),
        namespace_id(ROOT, "L", 128, 1),
        namespace_id(ROOT, "L", 256, 2),
        namespace_id(request_root(ROOT, salt="s"), "L", 256, 1),
    }
    assert len(names) == 5
