"""What the connector asks of vLLM's cache layout, decided by vLLM's own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maru_connector import block_outermost, layout
from maru_connector.block_outermost import by_layer, prefers_one_tensor
from maru_connector.connector import MaruSidecarConnector

kv_cache_layout = pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM 0.26 has no layouts to choose from")

pytestmark = pytest.mark.engine
OURS = {
    "kv_connector": "MaruSidecarConnector", "kv_connector_module_path": "maru_connector.connector", "kv_role": "kv_both",
}  # fmt: skip
ANY = [layout.name for layout in kv_cache_layout.KVCacheLayout]


def resolved(monkeypatch: pytest.MonkeyPatch, transfer: dict[str, Any], supported: list[str], major: int = 9) -> str:
    """The layout vLLM settles on for an engine on a CUDA device of that capability."""
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *a, **k: SimpleNamespace(major=major, minor=0))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=None), kv_transfer_config=KVTransferConfig(**transfer),
        attention_config=SimpleNamespace(hisparse_config=None),
    )  # fmt: skip
    return str(resolve_kv_cache_layout(config, [supported]).name)


def test_blocks_are_kept_together_where_the_kernels_can_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(monkeypatch, OURS, ANY) == "BLNHC"
    assert resolved(monkeypatch, OURS, ["LBHNC", "BLHNC"], major=10) == "BLHNC"
    assert resolved(monkeypatch, OURS, ["LBNHC"]) == "LBNHC"  # and vLLM says that it dropped the preference


def test_a_cpu_engine_and_an_engine_told_otherwise_keep_vllms_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {**OURS, "kv_connector_extra_config": {"maru.block_outermost": False}}
    assert resolved(monkeypatch, off, ANY) == ANY[0]
    monkeypatch.undo()
    from vllm.config import KVTransferConfig

    config: Any = SimpleNamespace(kv_transfer_config=KVTransferConfig(**OURS))
    assert MaruSidecarConnector.get_required_kvcache_layout(config) is None  # vLLM's platform here is a CPU


def test_beside_another_connector_there_is_no_preference_to_quarrel_about(monkeypatch: pytest.MonkeyPatch) -> None:
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [OURS, offloading]},
    }
    alone = {**both, "kv_connector_extra_config": {"connectors": [offloading]}}
    assert resolved(monkeypatch, both, ANY) == resolved(monkeypatch, alone, ANY)


def test_one_tensor_of_all_layers_becomes_a_view_per_layer_with_a_blocks_layers_together() -> None:
    """As vLLM 0.26 hands it over: (blocks, layers, tokens, heads, K and V) in memory."""

    class Backend:
        @staticmethod
        def get_kv_cache_stride_order(*, include_num_layers_dimension: bool) -> tuple[int, ...]:
            assert include_num_layers_dimension
            return (1, 0, 3, 2, 4)  # of (layers, blocks, heads, tokens, K and V)

    blocks, layers, tokens, heads, words = 6, 3, 4, 2, 16
    memory = torch.arange(blocks * layers * tokens * heads * words, dtype=torch.float32)
    memory = memory.view(blocks, layers, tokens, heads, words)
    tensors = [SimpleNamespace(shared_by=[f"layers.{i}", f"shared.{i}"]) for i in range(layers)]
    views = by_layer(memory, Backend, tensors)
    assert list(views) == [name for t in tensors for name in t.shared_by]
    for i in range(layers):
        assert torch.equal(views[f"layers.{i}"], memory[:, i].transpose(1, 2))
    described = layout.describe(views, blocks, tokens)
    assert [p.piece_bytes for p in described.planes] == [layers * tokens * heads * words * 4]


@pytest.mark.parametrize(("order", "device", "wanted", "preferred"), [
    ("NHD", "cuda", True, True), ("HND", "cuda", True, False), ("NHD", "cpu", True, False), ("NHD", "cuda", False, False),
])  # fmt: skip
def test_vllm_0_26_is_asked_where_layers_lie_inside_blocks(
    monkeypatch: pytest.MonkeyPatch, order: str, device: str, *, wanted: bool, preferred: bool
) -> None:
    from vllm.v1.attention.backends import utils

    monkeypatch.setattr(utils, "get_kv_cache_layout", lambda: order, raising=False)
    assert prefers_one_tensor(device, wanted=wanted) is preferred


def test_an_option_that_is_wrong_is_reported_once_and_not_by_the_question_for_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**OURS, "kv_connector_extra_config": {"maru.block_outermots": True}}
    assert resolved(monkeypatch, wrong, ANY) == ANY[0]
    assert block_outermost._wanted({}) is True
