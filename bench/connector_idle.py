"""What the connector costs an engine step that has nothing to load or store. Target: at most 20 µs for both halves together.

Runs vLLM's hooks on real halves attached to a real sidecar: once with an empty step, once with a decode step of ``--requests``
requests of which none completes a chunk. Needs vLLM (any supported release) and a sidecar::

    maru-sidecar run --socket /tmp/maru.sock --pool-size 64MiB &
    python bench/connector_idle.py --socket /tmp/maru.sock
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

from maru_connector.fence import HostFence
from maru_connector.link import SidecarLink
from maru_connector.options import parse_options
from maru_connector.scheduler_half import SchedulerHalf
from maru_connector.worker_half import WorkerHalf
from maru_shm import messages as M
from maru_shm.geometry import KvLayout, KvPlane, KvRegion, RegionKind
from maru_shm.layout import Role

BLOCK_TOKENS, NUM_BLOCKS, PIECE_BYTES = 16, 256, 4096
ROOT = b"connector-idle.."


def kv_layout(memory: Any) -> KvLayout:
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    region = KvRegion(RegionKind.PROCESS_VM, address, NUM_BLOCKS * PIECE_BYTES)
    return KvLayout(NUM_BLOCKS, BLOCK_TOKENS, (KvPlane(0, 0, PIECE_BYTES, PIECE_BYTES, 0),), (region,), "idle")


def attach(role: Role, layout: KvLayout | None) -> tuple[M.Attach, list[int]]:
    return M.Attach(role, "connector-idle", 0, 1, ROOT, 256, 64, 64, 1024, layout), []


def output(scheduled: dict[str, int]) -> Any:
    """A SchedulerOutput as far as the connector reads it."""
    cached = SimpleNamespace(req_ids=list(scheduled), new_block_ids=[None] * len(scheduled), resumed_req_ids=set())
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, preempted_req_ids=set(), scheduled_new_reqs=[], scheduled_cached_reqs=cached
    )


def step(scheduler: SchedulerHalf, worker: WorkerHalf, scheduled: Any) -> None:
    """Every hook of one step, in vLLM's order."""
    meta = scheduler.build_connector_meta(scheduled)
    worker.start_loads(meta)
    worker.finish_step(meta)
    finished = worker.get_finished(meta)
    worker.take_invalid_blocks()
    worker.take_stats()
    report = worker.take_report()
    if report is not None or finished:
        scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=finished))
    scheduler.has_pending_work()
    scheduler.take_stats()


def measure(scheduler: SchedulerHalf, worker: WorkerHalf, scheduled: Any, steps: int) -> dict[str, float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        step(scheduler, worker, scheduled)
        times.append((time.perf_counter_ns() - start) / 1e3)
    times.sort()
    return {"p50_us": round(statistics.median(times), 2), "p99_us": round(times[int(len(times) * 0.99)], 2)}


def request(number: int) -> Any:
    tokens = list(range(200))
    return SimpleNamespace(
        request_id=f"r{number}", prompt_token_ids=tokens, all_token_ids=tokens, num_prompt_tokens=200, num_tokens=200,
        num_computed_tokens=200, num_preemptions=0, cache_salt=None, lora_request=None, mm_features=[], prompt_embeds=None,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=64)
    arguments = parser.parse_args()
    memory = bytearray(NUM_BLOCKS * PIECE_BYTES)
    layout = kv_layout(memory)
    options = parse_options({"maru.socket": arguments.socket})
    worker = WorkerHalf(options, HostFence)
    if not worker.attach(
        SidecarLink(
            arguments.socket, lambda: attach(Role.WORKER, layout), on_attached=worker.on_attached, on_lost=worker.on_lost
        )
    ):
        raise SystemExit(f"no sidecar at {arguments.socket}")
    link = SidecarLink(arguments.socket, lambda: attach(Role.SCHEDULER, None))
    scheduler = SchedulerHalf(options, link, ROOT, block_tokens=BLOCK_TOKENS, num_blocks=NUM_BLOCKS, ranks=1, deferred=True)
    link.wait_attached(5)
    results = {"idle": measure(scheduler, worker, output({}), arguments.steps)}
    requests = [request(i) for i in range(arguments.requests)]
    for one in requests:
        scheduler.on_new_request(one)
    decoding = output({one.request_id: 1 for one in requests})
    results[f"decode_{arguments.requests}"] = measure(scheduler, worker, decoding, arguments.steps)
    scheduler.shutdown()
    worker.detach()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
