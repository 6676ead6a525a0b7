"""A scheduler half on a scripted sidecar, driven as vLLM's scheduler drives it. Needs vLLM."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from maru_connector.link import SidecarLink
from maru_connector.metadata import StepMetadata, WorkerReport
from maru_connector.options import parse_options
from maru_connector.scheduler_half import SchedulerHalf
from maru_connector.session import Session
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.records import Request as RingRequest
from tests.support.connector_peer import Peer, PeerSession

CHUNK, BLOCK, NUM_BLOCKS = 64, 16, 64


class Blocks:
    """KVCacheBlocks as far as the connector reads it."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self._ids,)


class World:
    """A scheduler half on a peer whose pool holds the first ``hits`` chunks of every prompt."""

    def __init__(self, directory: Path) -> None:
        self.hits = 100
        self.lease_s = 60.0
        self.silent = False
        self.unanswered: list[tuple[PeerSession, RingRequest]] = []
        self.granted: set[int] = set()
        self.peer = Peer(str(directory / "control.sock"), self._answer)
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.half: SchedulerHalf
        self.open()

    def _lost(self, session: Session) -> None:
        self.half.on_lost(session)

    def open(self, *, deferred: bool = True, **options: object) -> None:
        options = {"lookup_patience_ms": 10_000, **options}
        link = SidecarLink(
            self.peer.path,
            lambda: (M.Attach(L.Role.SCHEDULER, "engine", 0, 1, b"r" * 16, CHUNK, 64, 64, 1024), []),
            on_lost=self._lost,
        )
        self.half = SchedulerHalf(
            parse_options({"maru.chunk_tokens": CHUNK, **{f"maru.{k}": v for k, v in options.items()}}),
            link, b"r" * 16, block_tokens=BLOCK, num_blocks=NUM_BLOCKS, ranks=2, deferred=deferred,
        )  # fmt: skip
        self.half.bind_block_pool(self.pool)
        assert link.wait_attached(10)

    def _answer(self, session: PeerSession, request: RingRequest) -> None:
        if self.silent:
            self.unanswered.append((session, request))
            return
        n = min(self.hits, request.n_keys)
        deadline = time.monotonic_ns() + int(self.lease_s * 1e9) if n else 0
        if n:
            self.granted.add(request.ticket)
        session.records.complete(request.ticket, L.State.DONE, n_done=n, deadline=deadline)

    def ask(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        """Ask as the scheduler does, step after step, until there is an answer."""
        end = time.monotonic() + 10
        while True:
            answer = self.half.get_num_new_matched_tokens(request, local)
            if answer[0] is not None:
                return answer
            assert time.monotonic() < end, "no answer"
            self.step()

    def step(self, scheduled: dict[str, int] | None = None, *, new: dict[str, list[int]] | None = None,
             more: dict[str, list[int]] | None = None, preempted: set[str] | None = None) -> StepMetadata:  # fmt: skip
        """Build one step. ``new``: block tables of requests that start; ``more``: blocks added to running ones."""
        more = more or {}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled or {},
            preempted_req_ids=preempted or set(),
            scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=(ids,)) for r, ids in (new or {}).items()],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(more), new_block_ids=[(ids,) for ids in more.values()], resumed_req_ids=set()
            ),
        )
        return self.half.build_connector_meta(output)

    def report(self, *, finished: set[str] | None = None, report: WorkerReport | None = None) -> None:
        self.half.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=finished))

    def stored(self, job: int, ranks: int = 2) -> None:
        self.report(report=WorkerReport(stores_done={job: ranks}))

    def no_lease_is_left(self) -> bool:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            self.step()
            if set(self.peer.released) == self.granted and len(self.peer.released) == len(self.granted):
                return True
            time.sleep(0.001)
        return False


def request(n_tokens: int, name: str = "a", *, seed: int = 0) -> Request:
    tokens = random.Random(seed).choices(range(1000), k=n_tokens)
    parameters = SamplingParams(max_tokens=50)
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=parameters, pooling_params=None)


def ids_of(job: Any) -> list[int]:
    return np.frombuffer(job.blocks, "<i4").tolist()


def start(world: World, one: Request, blocks: list[int], n_tokens: int) -> StepMetadata:
    """Admit a request that missed, and schedule its first ``n_tokens`` tokens."""
    assert world.ask(one)[0] == 0
    world.half.update_state_after_alloc(one, Blocks(blocks), 0)
    meta = world.step({one.request_id: n_tokens}, new={one.request_id: blocks})
    one.num_computed_tokens += n_tokens
    return meta


@contextlib.contextmanager
def scripted(directory: Path) -> Iterator[World]:
    world = World(directory)
    yield world
    world.half.shutdown()
    world.peer.close()
