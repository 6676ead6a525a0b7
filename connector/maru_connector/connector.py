"""What vLLM loads: a thin dispatcher to the scheduler half or the worker half. Works on vLLM 0.26 to 0.33.

Hooks that only some versions have are plain methods here, called where they exist. vLLM may call them in different orders; the
halves do not depend on it (``worker_half.py``).

``kv_role`` should be ``kv_both``: a consumer role is what makes vLLM hold freed blocks back until in-flight steps are over.
``kv_load_failure_policy`` is set to ``recompute`` by the scheduler's connector: the scheduler reads it right after constructing
us, and its default, ``fail``, would turn a lost cache into a failed request.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from maru_connector import block_outermost, layout, namespace
from maru_connector.fence import HostFence, StepFence
from maru_connector.link import LinkState, SidecarLink
from maru_connector.log import get_logger
from maru_connector.metadata import StepMetadata
from maru_connector.options import Options, check_chunk, for_device, parse_options
from maru_connector.overlap import LayerCopier, Overlap, distinct
from maru_connector.overlap_host import HostCopier
from maru_connector.overlap_policy import overlap_policy
from maru_connector.scheduler_half import SchedulerHalf
from maru_connector.stats import MaruStats
from maru_connector.worker_half import WorkerHalf
from maru_shm import keys
from maru_shm import messages as M
from maru_shm.atomics import require_supported_platform
from maru_shm.errors import MaruError
from maru_shm.geometry import KvLayout
from maru_shm.layout import Role
from maru_shm.placed_planes import PlacedPlane
from maru_shm.segment import Segment

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger("maru_connector")

try:  # 0.32 and later split external hits by tier
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    _HIT_SOURCE = None
else:
    _HIT_SOURCE = CacheHitSource.HOST


class MaruSidecarConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. A model or layout that cannot be cached runs as if there were no connector, after one log line.

    All but one: attention and Mamba layers in one model need vLLM's hybrid KV cache manager, which vLLM turns off for any
    connector that is not ``SupportsHMA``; such a model does not start. With ``SupportsHMA``, models with sliding windows would
    have several KV cache groups, and would not be cached; as it is, all their layers are kept as if they had full attention.
    """

    if _HIT_SOURCE is not None:
        _cache_hit_source = _HIT_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported_platform()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._options = for_device(parse_options(extra), vllm_config.device_config.device_type)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._kv_caches: dict[str, Any] = {}
        self._layout: KvLayout | None = None
        is_scheduler = role == KVConnectorRole.SCHEDULER
        if is_scheduler and self._options.ignored:
            logger.info("maru: %s belong to the sidecar's own configuration; ignored here.", ", ".join(self._options.ignored))
        reason = namespace.declined(vllm_config, kv_cache_config)
        if reason is not None:
            if is_scheduler:
                logger.warning("maru: this engine runs without the cache: %s.", reason)
            self.__class__ = _Uncached
            return
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._block_tokens: int = spec.block_size
        check_chunk(self._options, self._block_tokens)
        self._root = keys.model_root(namespace.model_facts(vllm_config, kv_cache_config, self._options.weights_identity))
        if is_scheduler:
            self._scheduler = self._make_scheduler_half()
        else:
            self._worker = WorkerHalf(self._options, self._make_fence, recomputes=self._recomputes_sync_loads())

    def _recomputes_sync_loads(self) -> bool:
        """Model runner V2 recomputes a failed synchronous load wrongly (vllm#49250), and with asynchronous scheduling the next
        step has been planned on the failed one."""
        config = self._vllm_config
        return not (getattr(config, "use_v2_model_runner", False) or config.scheduler_config.async_scheduling)

    def _make_scheduler_half(self) -> SchedulerHalf:
        transfer = self._kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            logger.info("maru: kv_load_failure_policy is %r; using 'recompute'.", transfer.kv_load_failure_policy)
            transfer.kv_load_failure_policy = "recompute"
            if block_outermost.made_by_multi_connector():
                logger.warning(
                    "maru: beside other connectors, vLLM goes by MultiConnector's own kv_load_failure_policy: set it to"
                    " 'recompute', or a load that fails is a failed request."
                )
        if not (transfer.is_kv_producer and transfer.is_kv_consumer):
            logger.warning("maru: kv_role is %r; 'kv_both' stores and loads.", transfer.kv_role)
        deferred = self._options.deferred_load
        if not deferred and not self._recomputes_sync_loads():
            logger.warning(
                "maru: maru.deferred_load=false needs model runner V1 and no asynchronous scheduling; hits are loaded deferred."
            )
            deferred = True
        link = SidecarLink(self._options.socket, lambda: (self._attach(Role.SCHEDULER, 0, None), []), on_lost=self._on_lost)
        half = SchedulerHalf(
            self._options, link, self._root, block_tokens=self._block_tokens, num_blocks=self._kv_cache_config.num_blocks,
            ranks=self._vllm_config.parallel_config.world_size, deferred=deferred, may_load=transfer.is_kv_consumer,
            may_store=transfer.is_kv_producer,
            overlap=overlap_policy(self._vllm_config, self._options, block_tokens=self._block_tokens),
        )  # fmt: skip
        if link.poll() is None and link.state is not LinkState.DISCONNECTED:
            link.wait_attached(self._options.attach_timeout_s)  # somebody answers: the first request can hit
        return half

    def _on_lost(self, session: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_lost(session)

    def _attach(self, role: Role, rank: int, kv_layout: KvLayout | None) -> M.Attach:
        config, chunk = self._vllm_config, self._options.chunk_tokens
        max_keys = -(-config.model_config.max_model_len // chunk) + 2  # a store's parent, and one for rounding
        return M.Attach(
            role=role, engine_id=str(self._kv_transfer_config.engine_id), rank=rank,
            world_size=config.parallel_config.world_size, root=self._root, chunk_tokens=chunk,
            max_records=self._options.max_records, max_keys=max_keys, max_blocks=max_keys * (chunk // self._block_tokens),
            layout=kv_layout, label=os.path.basename(str(config.model_config.model)),
        )  # fmt: skip

    # --- worker -----------------------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Attach now, off the request path; the engine starts even where no sidecar answers within
        ``maru.attach_timeout_s``.
        """
        self._kv_caches = kv_caches
        if self._worker is None:
            return
        try:
            self._layout = layout.describe(kv_caches, self._kv_cache_config.num_blocks, self._block_tokens)
        except MaruError as e:
            logger.warning("maru: this worker runs without the cache: %s.", e)
            return
        parallel = self._vllm_config.parallel_config
        rank = parallel.rank % parallel.world_size
        link = SidecarLink(
            self._options.socket,
            lambda: (self._attach(Role.WORKER, rank, self._layout), []),
            on_attached=self._worker.on_attached,
            on_lost=self._worker.on_lost,
        )
        self._worker.attach(link, self._make_overlap(rank))

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """vLLM 0.26, model runner V1: all layers in one tensor."""
        self.register_kv_caches(block_outermost.by_layer(kv_cache, attn_backend, self._kv_cache_config.kv_cache_tensors))

    def _make_overlap(self, rank: int) -> Overlap | None:
        """The overlap path for this worker's KV cache, where it is on and there is one for its device.

        Slabs of host memory carry checksums. One that does not match is a miss for a parked hit; after an overlapped one the
        engine must recompute, or end (``worker_half.py``).
        """
        if not self._options.layerwise_overlap or self._layout is None:
            return None
        layers = layout.placed_layers(self._kv_caches, self._layout.num_blocks)
        block_bytes, device = self._layout.block_bytes, next(iter(self._kv_caches.values())).device
        try:
            copier = _copier(distinct(layers), device)
        except MaruError as e:
            logger.warning("maru: maru.layerwise_overlap is not available on this engine (%s).", e)
            return None
        world = self._vllm_config.parallel_config.world_size
        return Overlap(layers, copier, block_bytes=block_bytes, rank=rank, world=world)

    def _make_fence(self, segment: Segment) -> StepFence:
        device = next(iter(self._kv_caches.values())).device
        if device.type == "cuda":
            from maru_connector.fence_cuda import cuda_fence

            return cuda_fence(segment, device)
        return HostFence(segment)

    def unregister_kv_caches(self) -> None:
        """Sleep: the memory under the KV cache goes away. Idempotent."""
        if self._worker is not None:
            self._worker.detach()

    def restore_kv_caches(self) -> None:
        """Wake-up: attach again. Idempotent."""
        if self._worker is not None and self._worker.link is None and self._kv_caches:
            self.register_kv_caches(self._kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Nothing to do: see ``worker_half.py``."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and isinstance(self._connector_metadata, StepMetadata):
            self._worker.start_loads(self._connector_metadata, layered=_calls_layer_hooks(forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole chunks are stored after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None and isinstance(self._connector_metadata, StepMetadata):
            self._worker.finish_step(self._connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        meta = self._connector_metadata
        return None, self._worker.get_finished(meta if isinstance(meta, StepMetadata) else None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_report() if self._worker is not None else None

    # --- scheduler --------------------------------------------------------------------------------------------------------
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the free: blocks with a store in flight are pinned instead."""
        if self._scheduler is not None:
            self._scheduler.request_finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_work()

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache() if self._scheduler is not None else None

    # --- both -------------------------------------------------------------------------------------------------------------
    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that is dropped costs a miss, never a request."""
        return False

    def get_kv_connector_stats(self) -> MaruStats | None:
        half = self._scheduler or self._worker
        return half.take_stats() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MaruStats:
        return MaruStats(data)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A preference: any layout whose blocks can be addressed will do."""
        return block_outermost.preferred_layout(vllm_config)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """vLLM 0.26, model runner V1."""
        return block_outermost.prefers_one_tensor(self._vllm_config)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.detach()


class _Uncached(MaruSidecarConnector, SupportsHMA):  # type: ignore[misc]
    """The connector of an engine that is not cached: there may be several KV cache groups, or none (encoders), and for
    a connector that is not ``SupportsHMA`` vLLM asserts that there is one when a request has finished.
    """

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def _calls_layer_hooks(forward_context: Any) -> bool:
    """Whether the pass to come will call the hook of every layer, as far as vLLM says so.

    Both runners announce a full graph: V1 as the context's run-time mode, V2 by a context without attention metadata (it
    replays outside any). Split batches (a list of metadata) run on streams of their own: not counted on.
    """
    metadata = getattr(forward_context, "attn_metadata", None)
    mode = getattr(forward_context, "cudagraph_runtime_mode", None)
    return isinstance(metadata, dict) and bool(metadata) and getattr(mode, "name", "FULL") in ("NONE", "PIECEWISE")


def _copier(layers: Sequence[tuple[PlacedPlane, ...]], device: Any) -> LayerCopier:
    if device.type == "cuda":
        from maru_connector.overlap_cuda import CudaCopier, torch_engine  # loads the driver: only where a GPU is

        return CudaCopier(layers, torch_engine(device.index if device.index is not None else 0))
    return HostCopier(layers)


__all__ = ["MaruSidecarConnector", "Options"]
