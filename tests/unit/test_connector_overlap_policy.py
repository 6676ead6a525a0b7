"""How much a step must compute for a hit to be overlapped with it, by vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from maru_connector.options import Options
from maru_connector.overlap_policy import overlap_policy


class Mode(SimpleNamespace):
    def mixed_mode(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.name)


def config(
    *, graphs: str | None = None, captured: int | None = None, speculative: int | None = None, long_prefill: int = 0
) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, long_prefill_token_threshold=long_prefill),
        compilation_config=SimpleNamespace(
            cudagraph_mode=Mode(name=graphs) if graphs else None, max_cudagraph_capture_size=captured
        ),
        num_speculative_tokens=speculative,
        parallel_config=SimpleNamespace(world_size=2),
    )


@pytest.mark.parametrize(
    ("settings", "block", "least", "most"),
    [
        ({}, 16, 64, 8192),
        ({"graphs": "PIECEWISE", "captured": 512}, 16, 64, 8192),
        ({}, 64, 128, 8192),
        ({"graphs": "FULL", "captured": 512}, 16, 513, 8192),
        ({"graphs": "FULL"}, 16, 64, 8192),
        ({"speculative": 99}, 16, 101, 8192),
        ({"long_prefill": 1024}, 16, 64, 1024),
    ],
)
def test_the_least_and_the_most_that_a_step_computes(settings: dict[str, Any], block: int, least: int, most: int) -> None:
    policy = overlap_policy(config(**settings), Options(layerwise_overlap=True), block_tokens=block)
    assert policy is not None
    assert (policy.min_tokens, policy.max_tokens) == (least, most)


def test_there_is_no_policy_unless_it_is_asked_for() -> None:
    assert overlap_policy(config(), Options(), block_tokens=16) is None
