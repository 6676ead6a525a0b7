"""What the connector asks of vLLM's cache layout, decided by vLLM's own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform

from maru_connector import layout
from maru_connector.block_outermost import by_layer, preferred_layout, prefers_one_tensor
from maru_connector.connector import MaruSidecarConnector

try:
    from vllm.v1.kv_cache_layout import KVCacheLayout
except ImportError:  # 0.26
    ANY: list[str] = []
else:
    ANY = [layout.name for layout in KVCacheLayout]

pytestmark = pytest.mark.engine
layouts = pytest.mark.skipif(not ANY, reason="vLLM 0.26 has no layouts to choose from")
OURS = {
    "kv_connector": "MaruSidecarConnector", "kv_connector_module_path": "maru_connector.connector", "kv_role": "kv_both",
}  # fmt: skip
ASKING: dict[str, Any] = {**OURS, "kv_connector_extra_config": {"maru.block_outermost": True}}
OFFLOADING: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}


def on_cuda(monkeypatch: pytest.MonkeyPatch, major: int = 9) -> None:
    """Have vLLM believe that its platform is a CUDA device of that capability."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *a, **k: SimpleNamespace(major=major, minor=0))


def engine(transfer: dict[str, Any] = ASKING, **facts: Any) -> Any:
    """An engine's configuration, as far as the question goes."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            kv_cache_layout=None, block_size=facts.get("block_size", 16), cache_dtype=facts.get("cache_dtype", "auto")
        ),
        model_config=SimpleNamespace(is_hybrid=facts.get("is_hybrid", False), use_mla=facts.get("use_mla", False)),
        parallel_config=SimpleNamespace(decode_context_parallel_size=facts.get("dcp", 1)),
        kv_transfer_config=KVTransferConfig(**transfer),
        attention_config=SimpleNamespace(hisparse_config=None),
    )


def resolved(config: Any, supported: list[str] = ANY) -> str:
    """The layout that vLLM settles on."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    return str(resolve_kv_cache_layout(config, [supported]).name)


@layouts
def test_blocks_are_kept_together_where_the_kernels_can_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    assert resolved(engine()) == "BLNHC"
    assert resolved(engine(), ["LBNHC"]) == "LBNHC"  # and vLLM says that it dropped the preference
    on_cuda(monkeypatch, major=10)
    assert resolved(engine(), ["LBHNC", "BLHNC"]) == "BLHNC"


@layouts
def test_vllm_0_32_is_asked_only_by_who_set_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that declares no layouts counts as good for any there, and need not be."""
    on_cuda(monkeypatch)
    assert preferred_layout(engine(OURS)) is None
    assert preferred_layout(engine(ASKING)) == "BLNHC"


REFUSED: list[dict[str, Any]] = [
    {"block_size": 128}, {"block_size": 48}, {"is_hybrid": True}, {"use_mla": True}, {"dcp": 2}, {"cache_dtype": "nvfp4"},
    {"transfer": {**OURS, "kv_connector_extra_config": {"maru.block_outermost": False}}},
    {"transfer": {**OURS, "kv_connector_extra_config": {"maru.block_outermots": True}}},  # the constructor tells of that one
]  # fmt: skip


@pytest.mark.parametrize("facts", REFUSED, ids=lambda f: next(iter(f)))
def test_nothing_is_asked_where_it_could_cost_more_than_it_brings(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    """Above all not an engine that would start without it: vLLM does not split such blocks for kernels of smaller ones."""
    on_cuda(monkeypatch)
    monkeypatch.setattr("vllm.v1.attention.backends.utils.get_kv_cache_layout", lambda: "NHD", raising=False)
    assert prefers_one_tensor(engine())
    assert preferred_layout(engine(**facts)) is None
    assert not prefers_one_tensor(engine(**facts))


def test_a_cpu_engine_is_asked_nothing() -> None:
    assert MaruSidecarConnector.get_required_kvcache_layout(engine()) is None
    assert not prefers_one_tensor(engine())


class _Heir(MaruSidecarConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return super().get_required_kvcache_layout(vllm_config)


class _Several(MultiConnector):  # type: ignore[misc]
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        asked = [c.get_required_kvcache_layout(config) for c, config in cls._get_connector_classes_and_configs(vllm_config)]
        return next((one for one in asked if one is not None), None)


@layouts
@pytest.mark.parametrize("several", [MultiConnector, _Several])
@pytest.mark.parametrize("ours", ["MaruSidecarConnector", "_Heir"])
def test_beside_another_connector_there_is_no_preference_to_quarrel_about(
    monkeypatch: pytest.MonkeyPatch, several: Any, ours: str
) -> None:
    on_cuda(monkeypatch)
    module = OURS["kv_connector_module_path"] if ours == "MaruSidecarConnector" else __name__
    child = {**ASKING, "kv_connector": ours, "kv_connector_module_path": module}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child, OFFLOADING]},
    }
    alone = {**both, "kv_connector_extra_config": {"connectors": [OFFLOADING]}}
    layout_of = several.get_required_kvcache_layout
    assert layout_of(engine(both)) == layout_of(engine(alone))
    assert resolved(engine(both)) == resolved(engine(alone))


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


def test_vllm_0_26_is_asked_where_layers_lie_inside_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    for order, preferred in (("NHD", True), ("HND", False)):
        monkeypatch.setattr("vllm.v1.attention.backends.utils.get_kv_cache_layout", lambda order=order: order, raising=False)
        assert prefers_one_tensor(engine()) is prefers_one_tensor(engine(OURS)) is preferred
