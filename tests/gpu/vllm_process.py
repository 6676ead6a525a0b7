"""A vLLM engine in one process, on whatever device vLLM finds, driven over a pipe: tests see its KV cache and stage deaths.

Weights are random but seeded (``bench/engine/engine_patches.py``), so answers depend on the KV cache. Nothing here reads a
clock to be in the middle of something: an event in the engine is what stages it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from maru_shm import layout as L
from tests.support.served_process import ROOT, ServedProcess, serve

WAIT_S = 60.0
GARBAGE = 7.0  #: what :meth:`_Engine.poison` leaves in the KV cache: finite, or padding rows would spread it


@dataclass(frozen=True)
class Shape:
    """A model without weights and an engine for it."""

    dtype: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    block_tokens: int
    chunk_tokens: int
    kv_bytes: int  #: of the engine's own cache
    max_model_len: int
    max_batched_tokens: int
    graph_sizes: tuple[int, ...] = ()  #: token counts for which CUDA graphs are captured; none: eager

    @property
    def chunk_bytes(self) -> int:
        item = 4 if self.dtype == "float32" else 2
        return self.layers * self.chunk_tokens * 2 * self.kv_heads * self.head_dim * item

    def like(self, model: Path) -> Shape:
        """The same engine for the Llama whose ``config.json`` lies in ``model``; its cache holds as many tokens."""
        c = json.loads((model / "config.json").read_text())
        heads, hidden = c["num_attention_heads"], c["hidden_size"]
        other = replace(
            self, hidden=hidden, layers=c["num_hidden_layers"], heads=heads, kv_heads=c["num_key_value_heads"],
            head_dim=c.get("head_dim") or hidden // heads, intermediate=c["intermediate_size"], vocabulary=c["vocab_size"],
        )  # fmt: skip
        return replace(other, kv_bytes=self.kv_bytes * other.chunk_bytes // self.chunk_bytes)

    def write(self, directory: Path) -> None:
        """The model's ``config.json``."""
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "max_position_embeddings": 1 << 17,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": self.vocabulary, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1, "eos_token_id": 2,
            "torch_dtype": self.dtype,
        }  # fmt: skip
        (directory / "config.json").write_text(json.dumps(config))


@dataclass
class Answer:
    """``hit_tokens``: what vLLM took from any cache."""

    tokens: list[int] = field(default_factory=list)
    hit_tokens: int = 0


class VllmProcess(ServedProcess):
    """The engine is built by :meth:`build`, which may be collected later: two engines start at once."""

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("tests.gpu.vllm_process", environment=environment, log=log, timeout=240)

    def build(self, shape: Shape, model: Path, socket: str, **options: object) -> None:
        """Start building; :meth:`result` waits until it is built."""
        self.start("build", asdict(shape), str(model), socket, options)

    def ask(self, *prompts: Sequence[int], n: int = 16) -> list[Answer]:
        """Greedy answers of ``n`` tokens to all prompts at once."""
        return [Answer(*one) for one in self.call("ask", [list(p) for p in prompts], n)]

    def ask_one(self, prompt: Sequence[int], n: int = 16) -> Answer:
        return self.ask(prompt, n=n)[0]


class _Engine:
    def __init__(self, pipe: Connection) -> None:
        self.overlaps: list[dict[str, Any]] = []
        self._count = 0
        self._on_first_layer: Callable[[], None] | None = None

    # --- an engine ----------------------------------------------------------------------------------------------------------
    def build(self, shape: dict[str, Any], model: str, socket: str, options: dict[str, Any]) -> dict[str, Any]:
        """Returns how long it took, what device it is on, and which model runner it has."""
        started = time.monotonic()
        sys.path.insert(0, str(ROOT / "bench" / "engine"))
        import torch
        from engine_patches import seed_weights, skip_inductor_init
        from vllm import LLM

        if os.environ.get("MARU_TEST_CPU_LAYOUTS"):
            _allow_cpu_layouts(os.environ["MARU_TEST_CPU_LAYOUTS"])
        self.shape = Shape(**shape)
        skip_inductor_init()
        seed_weights(2 / self.shape.hidden**0.5)  # sharp attention: answers depend on single tokens far back
        graphs = list(self.shape.graph_sizes)
        self._llm = LLM(
            model=model, skip_tokenizer_init=True, load_format="dummy", dtype=self.shape.dtype, seed=0,
            enforce_eager=not graphs, max_num_seqs=16, max_model_len=self.shape.max_model_len,
            max_num_batched_tokens=self.shape.max_batched_tokens, block_size=self.shape.block_tokens,
            enable_prefix_caching=True, kv_cache_memory_bytes=self.shape.kv_bytes, disable_log_stats=True,
            **({"gpu_memory_utilization": 0.3} if torch.cuda.is_available() else {}),
            **({"compilation_config": {"cudagraph_capture_sizes": graphs}} if graphs else {}),
            kv_transfer_config={
                "kv_connector": "MaruSidecarConnector", "kv_connector_module_path": "maru_connector.connector",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "maru.socket": socket, "maru.chunk_tokens": self.shape.chunk_tokens, "maru.weights_identity": "seed 0",
                    **options,
                },
            },
        )  # fmt: skip
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._connector = get_kv_transfer_group()
        self._scheduler = self._core.scheduler.connector._scheduler
        self._worker = self._connector._worker
        self._watch_overlap()
        caches = self._caches()
        return {
            "seconds": round(time.monotonic() - started, 1), "device": caches[0].device.type, "layers": len(caches),
            "runner": "V2" if getattr(self._engine.vllm_config, "use_v2_model_runner", False) else "V1",
        }  # fmt: skip

    def _watch_overlap(self) -> None:
        """Note every overlapped load: whether it waited layer by layer, in which kind of pass, and whether it arrived."""
        overlap = self._worker._overlap
        if overlap is None:
            return
        start, finish, hook = overlap.start, overlap.finish, self._connector.wait_for_layer_load

        def watched_start(job: Any, *, layered: bool) -> bool:
            from vllm.forward_context import get_forward_context

            mode = get_forward_context().cudagraph_runtime_mode.name
            begun = bool(start(job, layered=layered))
            self.overlaps.append({"begun": begun, "layered": layered, "graphs": mode, "arrived": False})
            return begun

        def watched_finish() -> Any:
            outcome = finish()
            if outcome is not None:
                self.overlaps[-1]["arrived"] = outcome.arrived
            return outcome

        def watched_hook(name: str) -> None:
            if overlap._running is not None and self._on_first_layer is not None:
                stage, self._on_first_layer = self._on_first_layer, None
                stage()
            hook(name)

        overlap.start, overlap.finish, self._connector.wait_for_layer_load = watched_start, watched_finish, watched_hook

    def take_overlaps(self) -> list[dict[str, Any]]:
        """The overlapped loads since the last call."""
        taken, self.overlaps = self.overlaps, []
        return taken

    # --- requests -----------------------------------------------------------------------------------------------------------
    def _add(self, prompts: list[list[int]], n: int) -> list[str]:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        names = [f"r{self._count + i}" for i in range(len(prompts))]
        self._count += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
        return names

    def ask(self, prompts: list[list[int]], n: int) -> list[tuple[list[int], int]]:
        names, last = self._add(prompts, n), {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                last[output.request_id] = output
        return [(list(last[name].outputs[0].token_ids), last[name].num_cached_tokens or 0) for name in names]

    def flush(self) -> None:
        """Step until every store is over, as a server does in its idle loop."""
        self._until(lambda: not (self._core.scheduler.has_requests() or self._core.batch_queue), self._engine.step, "flushed")

    def _until(self, condition: Callable[[], bool], step: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not {what} within {WAIT_S:.0f} s")
            step()

    def attach(self, generation: int) -> int:
        """Serve small requests until both halves are attached to another sidecar than ``generation``, and, where overlap is on,
        ready for it. Returns its generation."""

        def current() -> int:
            sessions = [self._scheduler.link.session, self._worker.link.session]
            found = {session.generation if session is not None else 0 for session in sessions}
            if self._scheduler._overlap is not None:
                found.add(self._scheduler._overlap.generation)
            return found.pop() if len(found) == 1 else 0

        prompt = list(range(10, 10 + 2 * self.shape.block_tokens))
        self._until(lambda: current() not in (0, generation), lambda: self.ask([prompt], 1), "attached and ready")
        return current()

    def overlap_from(self, tokens: int) -> None:
        """Have only hits that leave as much to compute overlapped."""
        self._scheduler._overlap.min_tokens = tokens

    # --- the KV cache -------------------------------------------------------------------------------------------------------
    def _caches(self) -> list[Any]:
        """One tensor per layer, blocks outermost."""
        caches = self._core.model_executor.driver_worker.worker.model_runner.kv_caches
        blocks = self._engine.vllm_config.cache_config.num_gpu_blocks
        return [cache.movedim(list(cache.shape).index(blocks), 0) for cache in caches]

    def planes(self) -> list[int]:
        """Bytes of a block's piece in each plane of the layout that was attached."""
        return [plane.piece_bytes for plane in self._connector._layout.planes]

    def forget(self) -> None:
        """Drop the engine's own prefix cache and every byte of its KV cache: what is right afterwards was loaded."""
        self.flush()
        if not self._core.scheduler.reset_prefix_cache():
            raise RuntimeError("blocks of the prefix cache are still in use")
        self.poison()

    def poison(self) -> None:
        """Overwrite the KV cache, and keep what the engine believes of it."""
        for cache in self._caches():
            cache.fill_(GARBAGE)
        self._synchronize()  # the sidecar's copies know nothing of this engine's streams

    def _synchronize(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def digest(self, prompt: list[int], tokens: int) -> str:
        """Of the KV bytes that the engine's own prefix cache holds for the first ``tokens`` of ``prompt``, whole blocks."""
        import torch
        import xxhash
        from vllm import SamplingParams
        from vllm.v1.request import Request

        probe = Request(
            request_id="digest", prompt_token_ids=prompt[: tokens + 1], sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None, block_hasher=self._core.request_block_hasher,
        )  # fmt: skip
        found, n, *_ = self._core.scheduler.kv_cache_manager.get_computed_blocks(probe)
        if n != tokens:
            raise AssertionError(f"{n} of {tokens} tokens are in the engine's cache")
        h = xxhash.xxh3_128()
        self._synchronize()
        for cache in self._caches():
            blocks = torch.tensor(found.get_block_ids()[0], device=cache.device)
            h.update(cache.index_select(0, blocks).contiguous().view(torch.uint8).cpu().numpy())
        return h.hexdigest()

    # --- deaths -------------------------------------------------------------------------------------------------------------
    def kill_at_first_layer(self, pid: int) -> None:
        """When the next overlapped load waits for its first layer: SIGKILL ``pid``, wait for its end, and go on."""
        pidfd = os.pidfd_open(pid)

        def stage() -> None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], WAIT_S)
            os.close(pidfd)

        self._on_first_layer = stage

    def die_while_loading(self, prompts: list[list[int]]) -> None:
        """Ask, and end by SIGKILL as soon as the sidecar says that it is copying into this engine."""
        start_loads = self._worker.start_loads

        def deadly(meta: Any, **options: Any) -> None:
            start_loads(meta, **options)
            deadline = time.monotonic() + WAIT_S
            while self._worker._loads and time.monotonic() < deadline:
                for load in self._worker._loads.values():
                    record = load.ticket & L.TICKET_INDEX_MASK
                    base = load.session.segment.shape.records_offset + record * L.RECORD_BYTES
                    if load.session.segment.words[base // 8 + L.COPYING_WORD]:
                        os.kill(os.getpid(), signal.SIGKILL)

        self._worker.start_loads = deadly
        self.ask(prompts, 1)

    def stop(self) -> None:
        """An orderly end, stores included."""
        self.flush()
        with contextlib.suppress(AttributeError):
            self._engine.engine_core.shutdown()


def _allow_cpu_layouts(names: str) -> None:
    """Have vLLM's CPU backend accept these layouts, too."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = (*CPUAttentionBackend.supported_kv_cache_layouts(), *(KVCacheLayout[name] for name in names.split(",")))
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)


if __name__ == "__main__":
    # Read by vLLM at import. One process: the test looks into scheduler and worker alike.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    serve(_Engine)
