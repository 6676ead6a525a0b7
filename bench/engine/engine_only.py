"""The floor of a cache hit: a connector that claims every prompt it has seen before and copies nothing.

What a hit costs with it is what the engine itself costs; the bytes over the pinned copy rate come on top. Its outputs are
wrong by design: it exists for measuring only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole


@dataclass
class LoadedRequests(KVConnectorMetadata):
    """Requests parked in this step; the worker reports them in the same step."""

    request_ids: set[str] = field(default_factory=set)


class EngineOnlyConnector(KVConnectorBase_V1):
    """Claims all but the last block of a prompt seen before, asynchronously, and reports it loaded at once."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._chunk = int(vllm_config.kv_transfer_config.kv_connector_extra_config.get("chunk_tokens", 256))
        self._seen: set[bytes] = set()
        self._parked: set[str] = set()

    # --- scheduler half
    def _cacheable(self, request: Any) -> int:
        return request.num_prompt_tokens // self._chunk * self._chunk

    def _keys(self, request: Any) -> list[bytes]:
        tokens = request.prompt_token_ids
        h = hashlib.blake2b(digest_size=16)
        keys = []
        for start in range(0, self._cacheable(request), self._chunk):
            h.update(repr(tokens[start : start + self._chunk]).encode())
            keys.append(h.copy().digest())
        return keys

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        hit = 0
        for key in self._keys(request):
            if key not in self._seen:
                break
            hit += self._chunk
        n = hit - num_computed_tokens
        return (n, True) if n > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._parked.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta, self._parked = LoadedRequests(self._parked), set()
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._seen.update(self._keys(request))
        return False, None

    # --- worker half
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        meta = self._get_connector_metadata()
        assert isinstance(meta, LoadedRequests)
        return None, set(meta.request_ids) or None
