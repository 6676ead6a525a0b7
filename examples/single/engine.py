#!/usr/bin/env python3
"""A vLLM CPU engine in a process of its own, driven by JSON lines: one request on stdin, one answer on stdout.

::

    {"op": "generate", "prompts": [[token, …], …], "max_tokens": n}   → {"answers": [{"tokens", "ttft_s", "hit_tokens"}, …]}
    {"op": "tokenize", "text": "…"}                                   → {"tokens": […]}
    {"op": "digest", "prompt": [token, …]}                            → {"digest": "hex", "tokens": n}
    {"op": "flush"}                                                   → {"ok": true}    every store is over
    {"op": "stop"}                                                    → {"ok": true}    and the process ends

The first line on stdout is ``{"ready": seconds}``. Everything vLLM prints goes to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

FLUSH_TIMEOUT_S = 60.0

# Read by vLLM at import. One process starts in 8 s, two in 37 s; binding threads to cores fails in small containers.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Engine:
    """``socket``: the sidecar's. ``kv_bytes``: size of the engine's own KV cache. ``options``: the connector's, ``maru.*``."""

    def __init__(
        self, model: str, socket: str, *, kv_bytes: int, chunk_tokens: int, max_model_len: int, options: dict[str, str]
    ) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=model,
            dtype="float32",  # bfloat16 prefill is four times slower on CPUs without bf16 units
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_seqs=8,
            block_size=32,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=kv_bytes,
            disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "MaruSidecarConnector",
                "kv_connector_module_path": "maru_connector.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"maru.socket": socket, "maru.chunk_tokens": chunk_tokens, **options},
            },
        )
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._count = 0

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Greedy answers to all prompts at once. ``ttft_s`` runs from submission to the first token."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        names = []
        for prompt in prompts:
            names.append(f"prompt-{self._count}")
            self._count += 1
            self._engine.add_request(names[-1], TokensPrompt(prompt_token_ids=list(prompt)), params)
        first: dict[str, float] = {}
        last: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - started)
                last[output.request_id] = output
        return [
            {
                "tokens": list(last[name].outputs[0].token_ids),
                "ttft_s": first[name],
                "hit_tokens": last[name].num_cached_tokens or 0,
            }
            for name in names
        ]

    def tokenize(self, text: str) -> list[int]:
        return list(self._llm.get_tokenizer().encode(text))

    def digest(self, prompt: Sequence[int]) -> tuple[str, int]:
        """BLAKE2b of the KV bytes that the engine's own prefix cache holds for ``prompt``, and how many tokens those are."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        probe = Request(
            request_id="digest", prompt_token_ids=list(prompt), sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None, block_hasher=self._core.request_block_hasher,
        )  # fmt: skip
        found, tokens, *_ = self._core.scheduler.kv_cache_manager.get_computed_blocks(probe)
        runner = self._core.model_executor.driver_worker.worker.model_runner
        h = hashlib.blake2b(digest_size=16)
        for layer in runner.kv_caches:
            for block in found.get_block_ids()[0]:
                h.update(layer[block].contiguous().numpy().tobytes())
        return h.hexdigest(), tokens

    def flush(self) -> None:
        """Step until the connector has nothing in flight: a server does this in its idle loop."""
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise SystemExit(f"engine: stores are still in flight after {FLUSH_TIMEOUT_S:.0f} s")
            self._engine.step()

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def serve(engine: Engine, answers: TextIO) -> None:
    """Answer lines until ``stop`` or the end of stdin."""

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    for line in sys.stdin:
        request = json.loads(line)
        match request["op"]:
            case "generate":
                answer(answers=engine.generate(request["prompts"], request["max_tokens"]))
            case "tokenize":
                answer(tokens=engine.tokenize(request["text"]))
            case "digest":
                digest, tokens = engine.digest(request["prompt"])
                answer(digest=digest, tokens=tokens)
            case "flush":
                engine.flush()
                answer(ok=True)
            case "stop":
                engine.flush()
                engine.close()
                answer(ok=True)
                return


def main() -> None:
    parser = argparse.ArgumentParser(description="A vLLM CPU engine driven by JSON lines.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--socket", required=True, help="the sidecar's control socket")
    parser.add_argument("--kv-bytes", type=int, default=256 << 20)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--option", action="append", default=[], metavar="maru.NAME=VALUE", help="of the connector")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints where it likes; the answers have their own descriptor
    started = time.perf_counter()
    engine = Engine(
        args.model,
        args.socket,
        kv_bytes=args.kv_bytes,
        chunk_tokens=args.chunk_tokens,
        max_model_len=args.max_model_len,
        options=dict(option.split("=", 1) for option in args.option),
    )
    answers.write(json.dumps({"ready": time.perf_counter() - started}) + "\n")
    answers.flush()
    serve(engine, answers)


if __name__ == "__main__":
    main()
