"""vLLM's real scheduler and real connector, with a toy model in place of the forward pass: no GPU, every byte checked.

:class:`Engine` is EngineCore without its processes: vLLM's own ``Scheduler`` or ``AsyncScheduler``; one worker half of the
connector per rank, driven by vLLM's own ``ActiveKVConnector``, so the hooks come in this release's order; vLLM's own aggregator
of the ranks' outputs. The toy model writes the KV of every scheduled token and, before that, *reads the KV of every token
before it*: one wrong byte under a running request raises :class:`WrongBytes` in the step that would have used it.

Runs under every supported vLLM release: the one that ``import vllm`` finds. Call :func:`tests.support.no_accelerator.pretend`
before this module is imported.
"""

from __future__ import annotations

import copy
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from tests.support.toy_model import VOCABULARY, Chain, continuation
from tests.support.vllm_kv import HEAD_SIZE, KV_HEADS, LAYERS, LAYOUTS, ROW, ToyKv, kv_cache_config, set_layout

MAX_MODEL_LEN = 1024
IDLE_SLEEP_S = 0.0005  #: an engine with nothing but loads in flight polls about this often


class WrongBytes(AssertionError):
    """A running request's KV is not what its tokens say."""


@dataclass
class Outcome:
    """What became of one request."""

    prompt: list[int] = field(repr=False)
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    aborted: bool = False
    computed: int = 0  #: tokens the forward pass worked on; all others came from a cache
    admissions: list[int] = field(default_factory=list)  #: tokens that a cache supplied, per admission (preemption adds one)


@dataclass(frozen=True)
class Settings:
    """How an engine is set up. Small on purpose: a block is 16 tokens, a chunk four blocks."""

    socket: str
    async_scheduling: bool = False
    num_blocks: int = 96
    block_tokens: int = 16
    chunk_tokens: int = 64
    max_batched_tokens: int = 128
    world_size: int = 1
    layout: str = LAYOUTS[0]
    kernel_tokens: int | None = None  #: smaller than a block: views at kernel-block granularity
    extra: Mapping[str, object] = field(default_factory=dict)
    connector: str = "MaruSidecarConnector"
    module: str | None = "maru_connector.connector"


def write_model(directory: Path) -> None:
    """The configuration of a model nobody loads."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE, "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "vocab_size": VOCABULARY,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


class _RunnerV2(VllmConfig):
    """Accelerators run model runner V2; without triton 0.26 and 0.32 would refuse to plan for it."""

    use_v2_model_runner = property(lambda self: True)


def vllm_config(settings: Settings, model: Path) -> VllmConfig:
    parallel = (
        {"tensor_parallel_size": settings.world_size, "distributed_executor_backend": "mp"} if settings.world_size > 1 else {}
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, seed=0
        ),
        cache_config=CacheConfig(block_size=settings.block_tokens, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=settings.max_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=settings.async_scheduling,
        ),
        parallel_config=ParallelConfig(**parallel),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=settings.connector,
            kv_connector_module_path=settings.module,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "maru.socket": settings.socket,
                "maru.weights_identity": "toy",  # a model without weights
                "maru.chunk_tokens": settings.chunk_tokens,
                **settings.extra,
            },
        ),
    )
    config.__class__ = _RunnerV2
    config.cache_config.num_gpu_blocks = settings.num_blocks
    set_layout(config, settings.layout)
    return config


@dataclass
class _Scheduled:
    """The model runner's state of one request."""

    chain: Chain
    blocks: list[int]
    computed: int


class Worker:
    """One rank: its KV cache, its connector half, and the toy forward pass."""

    def __init__(self, config: VllmConfig, settings: Settings, rank: int) -> None:
        self.rank = rank
        if settings.world_size > 1:
            config = copy.copy(config)
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.rank = rank
        kv_config = kv_cache_config(settings.num_blocks, settings.block_tokens, settings.layout)
        self.kv = ToyKv(kv_config, settings.layout, kernel_tokens=settings.kernel_tokens)
        self.kv.poison(range(settings.num_blocks))
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self._hooks = ActiveKVConnector(config, self.kv.tensors)
        self._requests: dict[str, _Scheduled] = {}

    def execute(self, scheduled: Any) -> ModelRunnerOutput:
        """One engine step, with the hooks as this release's model runner calls them."""
        self._update(scheduled)
        if scheduled.total_num_scheduled_tokens == 0:
            return self._hooks.no_forward(scheduled)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self._hooks.pre_forward(scheduled)
        counts: dict[str, int] = scheduled.num_scheduled_tokens
        for layer, name in enumerate(self.kv.names):
            self.connector.wait_for_layer_load(name)
            for request_id, count in counts.items():
                self._attend(request_id, layer, count)
            self.connector.save_kv_layer(name, self.kv.tensors[name], None)
        if hasattr(self._hooks, "finish_forward"):
            self._hooks.finish_forward()
        sampled = [self._sample(request_id, count) for request_id, count in counts.items()]
        output = ModelRunnerOutput(
            req_ids=list(counts), req_id_to_index={r: i for i, r in enumerate(counts)}, sampled_token_ids=sampled
        )
        output.kv_connector_output = self._hooks.post_forward(scheduled.finished_req_ids)
        return output

    def _update(self, scheduled: Any) -> None:
        for request_id in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self._requests.pop(request_id, None)
        for pair in scheduled.kv_cache_block_copies or ():
            self.kv.copy_block(pair.src_block_id, pair.dst_block_id)
        for new in scheduled.scheduled_new_reqs:  # runner V2: resumed requests too, with all their tokens
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._requests[new.req_id] = _Scheduled(Chain(tokens), list(new.block_ids[0]), new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            state = self._requests[request_id]
            state.blocks += blocks[0] if blocks else []
            state.computed = computed

    def _attend(self, request_id: str, layer: int, count: int) -> None:
        """Read the KV of everything before, write that of ``count`` new tokens."""
        state = self._requests[request_id]
        start, end, chain = state.computed, state.computed + count, state.chain
        assert end <= len(chain.tokens), f"{request_id}: {count} tokens from {start} scheduled, only {len(chain.tokens)} known"
        want = chain.kv(0, end, rank=self.rank, layer=layer, shape=ROW)
        have = self.kv.read(layer, state.blocks, 0, start)
        bad = np.flatnonzero((have != want[:start]).any(axis=(1, 2)))
        if len(bad):
            raise WrongBytes(
                f"{request_id}: rank {self.rank}, layer {layer}: {len(bad)} of {start} positions hold wrong KV, "
                f"first {bad[0]}, last {bad[-1]}; first row {have[bad[0]].ravel()[:2]} instead of {want[bad[0]].ravel()[:2]}"
            )
        self.kv.write(layer, state.blocks, start, want[start:])

    def _sample(self, request_id: str, count: int) -> list[int]:
        state = self._requests[request_id]
        if state.computed + count < len(state.chain.tokens):
            return []
        token = state.chain.next_token()
        state.chain.append(token)
        return [token]


class Engine:
    """A scheduler, its workers and the loop between them."""

    def __init__(self, settings: Settings, model: Path) -> None:
        self.settings = settings
        self.config = vllm_config(settings, model)
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(settings.block_tokens, hash_function)
        self.workers = [Worker(self.config, settings, rank) for rank in range(settings.world_size)]
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=kv_cache_config(settings.num_blocks, settings.block_tokens, settings.layout),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=settings.block_tokens,
            log_stats=True,
        )
        self._aggregator = KVOutputAggregator(self.scheduler.connector.get_finished_count() or settings.world_size)
        self._depth = 2 if settings.async_scheduling else 1
        #: executed batches whose result the scheduler has not seen
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.outcomes: dict[str, Outcome] = {}
        self._submitted = 0

    # --- what a client does ---------------------------------------------------------------------------------------------------
    def submit(self, prompt: Sequence[int], max_tokens: int = 1, *, salt: str | None = None) -> Outcome:
        request_id = f"request-{self._submitted}"
        self._submitted += 1
        self.outcomes[request_id] = outcome = Outcome(list(prompt), max_tokens)
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                pooling_params=None,
                cache_salt=salt,
                block_hasher=self._hasher,
            )
        )
        return outcome

    def abort(self, outcome: Outcome) -> None:
        outcome.aborted = True
        self.scheduler.finish_requests([self.name_of(outcome)], RequestStatus.FINISHED_ABORTED)

    def status(self, outcome: Outcome) -> str:
        """The request's status name, empty once the scheduler has forgotten it."""
        request = self.scheduler.requests.get(self.name_of(outcome))
        return request.status.name if request else ""

    def name_of(self, outcome: Outcome) -> str:
        return next(name for name, other in self.outcomes.items() if other is outcome)

    # --- EngineCore's loop ----------------------------------------------------------------------------------------------------
    def step(self) -> None:
        """Schedule and execute one batch; take the oldest result once the queue of batches is full or nothing was added."""
        executed = False
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._note_admissions(scheduled)
            # Copies: between processes no two ranks could share vLLM's one empty output, which the aggregator writes to.
            outputs = [copy.copy(worker.execute(scheduled)) for worker in self.workers]
            output = outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(outputs)
            self.in_flight.append((scheduled, output))
            executed = scheduled.total_num_scheduled_tokens > 0
            for request_id, count in scheduled.num_scheduled_tokens.items():
                self.outcomes[request_id].computed += count
        if not executed:
            time.sleep(IDLE_SLEEP_S)
        if self.in_flight and (len(self.in_flight) >= self._depth or not executed):
            self.take_oldest()

    def _note_admissions(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            self.outcomes[new.req_id].admissions.append(new.num_computed_tokens)

    def take_oldest(self) -> None:
        """Hand the oldest executed batch's result to the scheduler."""
        scheduled, output = self.in_flight.popleft()
        for per_client in self.scheduler.update_from_output(scheduled, output).values():
            for one in per_client.outputs:
                outcome = self.outcomes[one.request_id]
                outcome.tokens += one.new_token_ids
                outcome.finished = outcome.finished or one.finish_reason is not None

    def run(self, until: Callable[[], bool] | None = None, *, timeout: float = 30.0) -> None:
        """Step until ``until`` holds, or until everything is done, stores included. Raises after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not (until() if until else not (self.scheduler.has_requests() or self.in_flight)):
            if time.monotonic() > deadline:
                waiting = {name: self.status(o) for name, o in self.outcomes.items() if not (o.finished or o.aborted)}
                raise AssertionError(f"the engine did not get there in {timeout:.0f} s; unfinished: {waiting}")
            self.step()

    def generate(self, prompt: Sequence[int], max_tokens: int = 1, *, salt: str | None = None) -> Outcome:
        """Submit one request, run until everything is done, and check its answer."""
        outcome = self.submit(prompt, max_tokens, salt=salt)
        self.run()
        self.check()
        return outcome

    def await_lookups(self, timeout: float = 20.0) -> None:
        """Wait, without a step, until the sidecar has answered what requests asked for on arrival."""
        lookups = [state.lookup for state in self.scheduler.connector._scheduler._requests.values() if state.lookup is not None]
        deadline = time.monotonic() + timeout
        while any(lookup.session.peek(lookup.ticket) is None for lookup in lookups):
            assert time.monotonic() < deadline, f"lookups were not answered in {timeout:.0f} s"
            time.sleep(IDLE_SLEEP_S)

    def warm_up(self, timeout: float = 10.0) -> None:
        """Serve one-token requests until the scheduler half has attached, which it does step by step."""
        deadline = time.monotonic() + timeout
        while self.scheduler.connector._scheduler.link.session is None:
            assert time.monotonic() < deadline, f"the scheduler half did not attach in {timeout:.0f} s"
            self.generate([0])
        self.outcomes.clear()

    # --- looking --------------------------------------------------------------------------------------------------------------
    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def check(self) -> None:
        """Every request ended with the model's answer, and no block is held by nobody."""
        for name, outcome in self.outcomes.items():
            if outcome.aborted:
                continue
            assert outcome.finished, f"{name} has not finished"
            want = continuation(outcome.prompt, outcome.max_tokens)
            assert outcome.tokens == want, f"{name} answered {outcome.tokens}, the model says {want}"
        assert self.free_blocks == self.settings.num_blocks - 1, (
            f"{self.settings.num_blocks - 1 - self.free_blocks} blocks leaked"
        )

    def forget_local(self, *, connector: bool = False) -> None:
        """Drop vLLM's own prefix cache and every byte of the KV cache: what is right afterwards was loaded."""
        assert self.scheduler.reset_prefix_cache(reset_connector=connector), "the local prefix cache is in use"
        for worker in self.workers:
            worker.kv.poison(range(self.settings.num_blocks))

    def close(self) -> None:
        """An orderly end of every half."""
        for worker in self.workers:
            worker.connector.shutdown()
        self.scheduler.shutdown()
