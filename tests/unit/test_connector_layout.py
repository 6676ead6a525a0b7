"""vLLM's KV tensors as planes: whatever the strides, a block's bytes are found, and only those."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from maru_connector.layout import describe  # noqa: E402
from maru_shm.errors import AttachRefused  # noqa: E402
from maru_shm.geometry import KvLayout, RegionKind  # noqa: E402

BLOCKS, HEADS, TOKENS, SIZE = 6, 2, 16, 32
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(12)]


def slab_block(layout: KvLayout, block: int) -> bytes:
    """What a transfer engine copies for one block: the pieces of all planes in plane order."""
    out = b""
    for plane in layout.planes:
        region = layout.regions[plane.region]
        address = region.address + plane.offset + block * plane.block_stride
        out += ctypes.string_at(address, plane.piece_bytes)
    return out


def write_back(layout: KvLayout, block: int, data: bytes) -> None:
    at = 0
    for plane in layout.planes:
        region = layout.regions[plane.region]
        ctypes.memmove(
            region.address + plane.offset + block * plane.block_stride, data[at : at + plane.piece_bytes], plane.piece_bytes
        )
        at += plane.piece_bytes
    assert at == len(data)


def block_values(caches: Mapping[str, Any], block: int, dim: int, ratio: int = 1) -> list[Any]:
    """The block's values through vLLM's own views."""
    return [t.narrow(dim, block * ratio, ratio).clone() for t in caches.values()]


def round_trip(caches: dict[str, Any], *, dim: int = 0, ratio: int = 1) -> KvLayout:
    """Copy block 1 over block 4 through the layout: block 4's views equal block 1's, every other block is untouched."""
    generator = torch.Generator().manual_seed(3)
    for t in caches.values():
        t.copy_(torch.rand(t.shape, generator=generator))
    layout = describe(caches, BLOCKS, TOKENS)
    before = [block_values(caches, b, dim, ratio) for b in range(BLOCKS)]
    write_back(layout, 4, slab_block(layout, 1))
    for b in range(BLOCKS):
        want = before[1] if b == 4 else before[b]
        for have, expected in zip(block_values(caches, b, dim, ratio), want, strict=True):
            assert torch.equal(have, expected)
    unique = {t.data_ptr(): t for t in caches.values()}.values()
    assert layout.block_bytes == sum(t.numel() * t.element_size() for t in unique) // BLOCKS
    return layout


def test_packed_k_and_v_heads_first_is_one_piece_per_layer() -> None:
    layout = round_trip({n: torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE) for n in NAMES[:3]})
    assert [(p.layer, p.piece_bytes) for p in layout.planes] == [(i, HEADS * TOKENS * 2 * SIZE * 4) for i in range(3)]
    assert {r.kind for r in layout.regions} == {RegionKind.PROCESS_VM}


def test_a_leading_two_gives_a_plane_for_k_and_one_for_v() -> None:
    layout = round_trip({NAMES[0]: torch.zeros(2, BLOCKS, TOKENS, HEADS, SIZE)}, dim=1)
    assert len(layout.planes) == 2


def test_two_behind_the_blocks_but_outside_in_memory_gives_two_planes_too() -> None:
    tensor = torch.zeros(2, BLOCKS, TOKENS, HEADS, SIZE).permute(1, 0, 2, 3, 4)
    assert len(round_trip({NAMES[0]: tensor}).planes) == 2


def test_tokens_first_in_memory_under_a_heads_first_view() -> None:
    tensor = torch.zeros(BLOCKS, TOKENS, HEADS, 2 * SIZE).permute(0, 2, 1, 3)
    assert len(round_trip({NAMES[0]: tensor}).planes) == 1


def test_heads_outside_blocks_give_a_plane_per_head() -> None:
    tensor = torch.zeros(HEADS, BLOCKS, TOKENS, 2 * SIZE).permute(1, 0, 2, 3)
    assert len(round_trip({NAMES[0]: tensor}).planes) == HEADS


def test_all_layers_in_one_storage_are_one_region() -> None:
    backing = torch.zeros(3, BLOCKS, HEADS, TOKENS, 2 * SIZE)
    layout = round_trip({n: backing[i] for i, n in enumerate(NAMES[:3])})
    assert len(layout.regions) == 1
    assert len(layout.planes) == 3


def test_a_block_outermost_cache_is_one_plane_of_all_layers() -> None:
    backing = torch.zeros(BLOCKS, 3, HEADS, TOKENS, 2 * SIZE)
    layout = round_trip({n: backing[:, i] for i, n in enumerate(NAMES[:3])})
    assert [(p.layer, p.piece_bytes) for p in layout.planes] == [(-1, 3 * HEADS * TOKENS * 2 * SIZE * 4)]


def test_an_offset_into_an_int8_backing_buffer_is_followed() -> None:
    raw = torch.zeros(4096 + BLOCKS * HEADS * TOKENS * SIZE * 4, dtype=torch.int8)
    tensor = raw[4096:].view(torch.float32).view(BLOCKS, HEADS, TOKENS, SIZE)
    layout = round_trip({NAMES[0]: tensor})
    assert layout.planes[0].offset == 4096


def test_kernel_blocks_finer_than_manager_blocks_are_joined() -> None:
    layout = round_trip({NAMES[0]: torch.zeros(BLOCKS * 4, HEADS, TOKENS // 4, SIZE)}, ratio=4)
    assert len(layout.planes) == 1


def test_kernel_blocks_that_are_not_neighbours_get_planes_of_their_own() -> None:
    backing = torch.zeros(BLOCKS * 2, 2, HEADS, TOKENS // 2, SIZE)
    layout = round_trip({n: backing[:, i] for i, n in enumerate(NAMES[:2])}, ratio=2)
    assert len(layout.planes) == 4


def test_mla_rows_are_one_piece() -> None:
    assert len(round_trip({NAMES[0]: torch.zeros(BLOCKS, TOKENS, 576)}).planes) == 1


def test_layers_that_share_a_tensor_count_once() -> None:
    tensor = torch.zeros(BLOCKS, HEADS, TOKENS, SIZE)
    assert len(round_trip({NAMES[0]: tensor, NAMES[1]: tensor}).planes) == 1


def test_layers_come_in_their_numerical_order_whatever_the_dictionary_says() -> None:
    caches = {n: torch.zeros(BLOCKS, HEADS, TOKENS, SIZE) for n in reversed(NAMES)}
    layout = describe(caches, BLOCKS, TOKENS)
    addresses = [layout.regions[p.region].address for p in layout.planes]
    assert addresses == [caches[n].data_ptr() for n in NAMES]


def test_the_same_shape_with_another_meaning_has_another_identity() -> None:
    def identity(tensor: Any) -> str:
        return describe({NAMES[0]: tensor}, BLOCKS, TOKENS).identity

    plain = identity(torch.zeros(BLOCKS, HEADS, TOKENS, SIZE))
    assert plain == identity(torch.zeros(BLOCKS, HEADS, TOKENS, SIZE))
    assert plain != identity(torch.zeros(BLOCKS, TOKENS, HEADS, SIZE).permute(0, 2, 1, 3))
    assert plain != identity(torch.zeros(BLOCKS, HEADS, TOKENS, SIZE, dtype=torch.int32))
    assert plain != identity(torch.zeros(BLOCKS * 2, HEADS, TOKENS // 2, SIZE))
    assert (
        plain != describe({"model.layers.0.cross_attn.attn": torch.zeros(BLOCKS, HEADS, TOKENS, SIZE)}, BLOCKS, TOKENS).identity
    )


def test_the_ranks_of_a_pipeline_have_one_identity() -> None:
    first = {n: torch.zeros(BLOCKS, HEADS, TOKENS, SIZE) for n in NAMES[:4]}
    second = {n: torch.zeros(BLOCKS, HEADS, TOKENS, SIZE) for n in NAMES[4:8]}
    assert describe(first, BLOCKS, TOKENS).identity == describe(second, BLOCKS, TOKENS).identity


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.zeros(5, HEADS, TOKENS, SIZE), r"shape \[5, 2, 16, 32\]"),
        (torch.zeros(SIZE, HEADS, TOKENS, BLOCKS).permute(3, 1, 2, 0), "contiguous for 4 bytes only"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, SIZE, device="meta"), "device meta"),
        ([torch.zeros(BLOCKS, 4)], "is a list"),
    ],
    ids=["blocks-do-not-fit", "not-contiguous", "device", "list"],
)
def test_what_cannot_be_addressed_is_refused_by_name(tensor: Any, match: str) -> None:
    with pytest.raises(AttachRefused, match=match):
        describe({NAMES[0]: tensor}, BLOCKS, TOKENS)
