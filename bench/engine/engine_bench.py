"""TTFT, TPOT and throughput of one vLLM engine with one KV connector: populate, drop the engine's cache, hit.

    python bench/engine/engine_bench.py --connector maru --model DIR --docs 20 --tokens 16384 --json out.json

Every document is run twice while populating: the second run is the engine's own prefix-cache hit and the *reference* for its
tokens, since a recomputed last token differs numerically from a full prefill. A pass of external hits must then give the
same tokens. Weights are random but seeded (``engine_patches.py``), so that tokens depend on the KV cache. Times are wall-clock
seconds measured at the client. The report is written anew after every pass, so that a run cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
_here = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join([_here, *filter(None, [os.environ.get("PYTHONPATH")])])

from connectors import kv_config  # noqa: E402
from engine_patches import seed_weights, skip_inductor_init  # noqa: E402

STARTED = time.perf_counter()


@dataclass
class Answer:
    """One request as its client saw it (seconds, tokens)."""

    ttft: float
    tpot: float
    tokens: list[int]
    cached: int


@dataclass
class Pass:
    """One pass over the documents."""

    name: str
    in_flight: int
    answers: list[Answer] = field(default_factory=list)
    wall: float = 0.0
    same: int | None = None  #: answers equal to their reference, token for token
    failures: int = 0

    def figures(self) -> dict[str, Any]:
        ttft = sorted(a.ttft for a in self.answers)
        pick = lambda q: ttft[min(len(ttft) - 1, int(q * len(ttft)))] * 1e3
        return {
            "pass": self.name,
            "in_flight": self.in_flight,
            "n": len(ttft),
            "ttft_mean_ms": statistics.mean(ttft) * 1e3,
            "ttft_p50_ms": pick(0.5),
            "ttft_p90_ms": pick(0.9),
            "tpot_mean_ms": statistics.mean(a.tpot for a in self.answers) * 1e3,
            "tokens_per_s": sum(len(a.tokens) for a in self.answers) / self.wall,
            "cached_tokens_mean": statistics.mean(a.cached for a in self.answers),
            "same_as_reference": self.same,
            "failures": self.failures,
        }


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rng = random.Random(args.seed)
        self.passes: list[Pass] = []
        self.count = 0
        self.engine: Any = None
        self.start_s = 0.0  #: of the engine's constructor
        self.ready_s = 0.0  #: since this process was started, or forked from one that had imported vLLM

    def documents(self, n: int) -> list[list[int]]:
        return [[self.rng.randrange(10, self.args.vocab - 10) for _ in range(self.args.tokens)] for _ in range(n)]

    def start(self) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        a = self.args
        options: dict[str, Any] = {}
        for text in a.options:
            options |= json.loads(text)
        kv = kv_config(a.connector, a.host_gib, a.chunk_tokens, options)
        blocks = a.gpu_docs * ((a.tokens + a.out_tokens) // a.block_size + 2) + 64
        settings: dict[str, Any] = {
            "model": a.model,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": a.dtype,
            "max_model_len": a.tokens + max(a.suffix, a.room) + a.out_tokens + 64,
            "max_num_batched_tokens": a.batched_tokens,
            "max_num_seqs": 16,
            "num_gpu_blocks_override": blocks,
            "block_size": a.block_size,
            "enable_prefix_caching": True,
            "enforce_eager": a.eager,
            "seed": 0,
        }
        if a.gpu_memory:
            settings["gpu_memory_utilization"] = a.gpu_memory
        if a.layers:
            settings["hf_overrides"] = {"num_hidden_layers": a.layers}
        if not a.eager:
            settings["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        if a.no_async_scheduling:
            settings["async_scheduling"] = False
        if kv:
            settings["kv_transfer_config"] = KVTransferConfig(**kv)
        begin = time.perf_counter()
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        self.start_s = time.perf_counter() - begin
        self.ready_s = time.perf_counter() - STARTED
        print(f"[bench] {a.name}: engine start {self.start_s:.1f} s, {self.ready_s:.1f} s in all", flush=True)

    async def ask(self, tokens: list[int], out_tokens: int = 0) -> Answer:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=out_tokens or self.args.out_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.count += 1
        begin, first, last, out, cached = time.perf_counter(), 0.0, 0.0, [], 0
        async for delta in self.engine.generate({"prompt_token_ids": tokens}, params, f"r{self.count}"):
            if delta.outputs and delta.outputs[0].token_ids:
                last = time.perf_counter()
                first = first or last
                out += list(delta.outputs[0].token_ids)
            cached = delta.num_cached_tokens or cached
        return Answer(first - begin, (last - first) / max(1, len(out) - 1), out, cached)

    async def run(
        self, name: str, docs: list[list[int]], in_flight: int, reference: list[Answer] | None = None, out_tokens: int = 0
    ) -> Pass:
        gate = asyncio.Semaphore(in_flight)
        result = Pass(name, in_flight)

        async def one(doc: list[int]) -> Answer:
            async with gate:
                return await self.ask(doc, out_tokens)

        begin = time.perf_counter()
        done = await asyncio.gather(*(one(d) for d in docs), return_exceptions=True)
        result.wall = time.perf_counter() - begin
        result.answers = [x for x in done if isinstance(x, Answer)]
        result.failures = len(done) - len(result.answers)
        if reference is not None:
            pairs = zip(done, reference, strict=True)
            result.same = sum(isinstance(x, Answer) and x.tokens == ref.tokens for x, ref in pairs)
        self.report(result, len(docs))
        return result

    def report(self, result: Pass, n: int) -> None:
        self.passes.append(result)
        self.write()
        f = result.figures()
        print(
            f"[bench] {self.args.name:15} {result.name:9} x{result.in_flight} TTFT mean {f['ttft_mean_ms']:.1f}"
            f" p50 {f['ttft_p50_ms']:.1f} p90 {f['ttft_p90_ms']:.1f} ms  TPOT {f['tpot_mean_ms']:.2f} ms "
            f" {f['tokens_per_s']:.0f} tok/s  cached {f['cached_tokens_mean']:.0f}  same {result.same}/{n}"
            f"  failures {result.failures}",
            flush=True,
        )

    async def populate(self, docs: list[list[int]]) -> list[Answer]:
        """Each document cold, then at once again: the engine's own prefix-cache hit, returned as the reference."""
        cold, own = Pass("populate", 1), Pass("own-hit", 1)
        for doc in docs:
            for result, n in ((cold, self.args.populate_out), (own, 0)):
                begin = time.perf_counter()
                result.answers.append(await self.ask(doc, n))
                result.wall += time.perf_counter() - begin
        for result in (cold, own):
            self.report(result, len(docs))
        return own.answers

    async def drop_engine_cache(self) -> None:
        await asyncio.sleep(self.args.settle)
        for _ in range(40):
            if await self.engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.25)
        raise RuntimeError("the engine's prefix cache could not be reset: blocks are still held")

    async def main(self) -> None:
        a = self.args
        self.start()
        try:
            await self.run("warm-up", self.documents(2), 2)
            docs = self.documents(a.docs)
            reference = await self.populate(docs)
            for n in a.in_flight:
                await self.drop_engine_cache()
                await self.run("hit", docs, n, reference)
            if a.suffix:
                await self.drop_engine_cache()
                tail = [[self.rng.randrange(10, a.vocab - 10) for _ in range(a.suffix)] for _ in docs]
                await self.run("suffix", [d + t for d, t in zip(docs, tail, strict=True)], 1, out_tokens=a.suffix_out)
            if a.populate8:
                await self.drop_engine_cache()
                await self.run("populate", self.documents(a.populate8), 8)
        finally:
            self.engine.shutdown()

    def write(self) -> None:
        """The report so far, as a whole file or none."""
        if not self.args.json:
            return
        report = {
            "args": vars(self.args),
            "engine_start_s": self.start_s,
            "ready_s": self.ready_s,
            "passes": [p.figures() for p in self.passes],
            "answers": [[asdict(x) for x in p.answers] for p in self.passes] if self.args.keep_answers else [],
        }
        part = Path(self.args.json + ".part")
        part.write_text(json.dumps(report))
        part.replace(self.args.json)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--connector", default="none")
    p.add_argument("--name", help="of this run, in what is printed; the connector's by default")
    p.add_argument("--options", action="append", default=[], help="JSON merged into kv_connector_extra_config; repeatable")
    p.add_argument("--model", required=True, help="directory with a config.json")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--vocab", type=int, default=128000)
    p.add_argument("--docs", type=int, default=20)
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--suffix", type=int, default=0, help="also hit with this many fresh tokens appended, one in flight")
    p.add_argument("--room", type=int, default=0, help="at least this much of the longest prompt beside the document")
    p.add_argument("--suffix-out", type=int, default=0, help="output tokens of that pass; --out-tokens by default")
    p.add_argument(
        "--populate-out", type=int, default=0, help="output tokens of the first populate pass; --out-tokens by default"
    )
    p.add_argument("--out-tokens", type=int, default=128)
    p.add_argument("--in-flight", type=lambda s: [int(x) for x in s.split(",")], default=[1, 4, 8])
    p.add_argument("--populate8", type=int, default=10, help="documents of the populate pass at 8 in flight; 0 skips it")
    p.add_argument("--gpu-docs", type=int, default=9, help="documents that fit into the engine's own cache")
    p.add_argument("--host-gib", type=float, default=62)
    p.add_argument("--block-size", type=int, default=16)
    p.add_argument("--chunk-tokens", type=int, default=256)
    p.add_argument("--batched-tokens", type=int, default=8192)
    p.add_argument("--layers", type=int, default=0)
    p.add_argument("--gpu-memory", type=float, default=0.8)
    p.add_argument("--settle", type=float, default=1.0, help="seconds to wait before the engine's cache is dropped")
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--eager", action="store_true")
    p.add_argument("--no-async-scheduling", action="store_true")
    p.add_argument("--skip-inductor-init", action="store_true", help="a quicker start, the same for every connector")
    p.add_argument("--keep-answers", action="store_true")
    p.add_argument("--json")
    parsed = p.parse_args(argv)
    parsed.name = parsed.name or parsed.connector
    return parsed


def main(argv: list[str] | None = None) -> None:
    global STARTED
    parsed = arguments(argv)
    if argv is not None:  # a process forked for this run
        STARTED = time.perf_counter()
    seed_weights()
    if parsed.skip_inductor_init:
        skip_inductor_init()
    asyncio.run(Bench(parsed).main())


if __name__ == "__main__":
    main()
