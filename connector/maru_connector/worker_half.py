"""The connector's half in each vLLM worker: posts loads and stores, reads completion flags, reports each job once.

One table of live loads, one of live stores. A job enters its table when its metadata arrives and leaves it when it is
reported; so an unknown or second completion, which would kill EngineCore, cannot be produced. Jobs that cannot be posted
are reported at once.

Ordering. Stores are posted after the step's forward pass and carry its number; the fence word says when the pass has finished.
Loads carry the last step that could touch their blocks. A load is reported failed only when no copy can write its blocks
any more: vLLM recomputes into them at once.

A load that carries slab references is this process's own to copy (``overlap.py``); in its step nothing else is asked of the
sidecar. If that cannot begin, the sidecar loads it within the step. If it ends without the right bytes, all that is
left depends on the engine: model runner V1 without asynchronous scheduling recomputes; the others would compute wrong tokens
from then on (vllm#49250), so the worker raises and the engine ends rather than answer wrongly.
It takes a lease that did not hold.

Preemption needs nothing here. Blocks of a preempted request that a store still reads are pinned (``pins.py``), and only running
requests, never loading ones, are preempted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from maru_connector.fence import StepFence
from maru_connector.link import SidecarLink
from maru_connector.log import OnceLogger, get_logger
from maru_connector.metadata import LoadJob, StepMetadata, StoreJob, WorkerReport
from maru_connector.options import Options
from maru_connector.overlap import Overlap
from maru_connector.session import Ended, Ending, Session
from maru_connector.stats import MaruStats
from maru_shm import layout as L
from maru_shm.errors import RingFull, TransferError
from maru_shm.records import Reply
from maru_shm.segment import Segment

logger = get_logger("maru_connector")

_POLL_S = 50e-6  #: between looks while a step has to wait (synchronous modes only)


J = TypeVar("J", LoadJob, StoreJob)


@dataclass(slots=True)
class _Live(Generic[J]):
    job: J
    session: Session
    ticket: int
    posted: float
    cancelled: bool = False


class WorkerHalf:
    """``link`` is None while there is no KV cache to attach (before registration, asleep, or refused).

    ``recomputes``: whether this engine recomputes a failed synchronous load rightly.
    """

    def __init__(self, options: Options, make_fence: Callable[[Segment], StepFence], *, recomputes: bool = True) -> None:
        self.options = options
        self.link: SidecarLink | None = None
        self._recomputes = recomputes
        self._overlap: Overlap | None = None
        self._overlapping: LoadJob | None = None
        self._make_fence = make_fence
        self._fence: StepFence | None = None
        self._fence_step = 0  #: last step whose work was launched
        self._loaded_step = 0  #: last step whose loads were posted
        self._posted_step = 0  #: last step whose stores were posted
        self._loads: dict[str, _Live[LoadJob]] = {}
        self._stores: dict[int, _Live[StoreJob]] = {}
        self._finished: set[str] = set()
        self._invalid: set[int] = set()
        self._report = WorkerReport()
        self._reported = False
        self._stats = MaruStats()
        self._once = OnceLogger(logger)

    # --- attachment -------------------------------------------------------------------------------------------------------
    def attach(self, link: SidecarLink, overlap: Overlap | None = None) -> bool:
        """Take a link for this worker's KV cache and wait for it a bounded time; the engine goes on without it."""
        self.link, self._overlap = link, overlap
        return link.wait_attached(self.options.attach_timeout_s)

    def on_attached(self, session: Session) -> None:
        """A new segment: its fence starts at what has been launched so far."""
        self._fence = self._make_fence(session.segment)
        self._fence.after_step(self._fence_step)
        if self._overlap is not None:
            self._overlap.attached(session)

    def on_lost(self, session: Session) -> None:
        if self._overlap is not None:
            self._overlap.lost(session)
        fence, self._fence = self._fence, None
        if fence is not None:
            fence.close()

    def detach(self) -> None:
        """Let go of the KV cache (sleep, shutdown): copies are fenced by the sidecar before it answers."""
        link, self.link = self.link, None
        if link is not None:
            link.close()
        for load in self._loads.values():
            self._fail(load.job, 0)
        for store in self._stores.values():
            self._store_over(store.job)
        self._loads.clear()
        self._stores.clear()
        overlap, self._overlap = self._overlap, None
        if overlap is not None:
            overlap.close()
            self._note_readiness(overlap)

    def _session(self) -> Session | None:
        return self.link.poll() if self.link is not None else None

    # --- loads ------------------------------------------------------------------------------------------------------------
    def start_loads(self, meta: StepMetadata, *, layered: bool = False) -> None:
        """Start this step's loads and cancel those whose requests were aborted. Once per step, later calls do nothing.

        ``layered``: the pass has yet to come, and calls :meth:`wait_for_layer` for each layer.
        """
        if meta.step <= self._loaded_step:
            return
        self._loaded_step = meta.step
        for request_id in meta.cancel_loads:
            load = self._loads.get(request_id)
            if load is not None:
                load.cancelled = True
        if self._overlap is not None:
            self._overlap.keep_only(meta.overlap_generation)
        if not meta.loads:
            return
        session = self._session()
        for job in meta.loads:
            if job.slabs and self._overlap is not None and self._overlap.start(job, layered=layered):
                self._overlapping = job
            else:
                self._post_load(session, job)
        if session is not None:
            session.flush()
        if any(load.job.synchronous for load in self._loads.values()):
            self._wait_for(lambda: not self._loads, self.options.load_timeout_s + 1.0, self._poll_loads)

    def wait_for_layer(self, name: str) -> None:
        """vLLM is about to compute a layer's attention."""
        if self._overlap is not None:
            self._overlap.layer(name)

    def _finish_overlapped(self) -> None:
        """The pass is launched. An overlapped load ends within its step, so that its outcome is part of the step's."""
        if self._overlap is None:
            return
        outcome = self._overlap.finish()
        job, self._overlapping = self._overlapping, None
        if job is not None and outcome is not None:
            self._stats.add(load_bytes=outcome.nbytes, load_seconds=outcome.seconds)
            if outcome.arrived:
                self._stats.add(loads=1, loads_overlapped=1)
                self._over(job)
            else:
                self._fail(job, 0)
        self._note_readiness(self._overlap)

    def _note_readiness(self, overlap: Overlap) -> None:
        for generation, n in overlap.changes().items():
            self._report.overlap[generation] = self._report.overlap.get(generation, 0) + n
            self._reported = True

    def _post_load(self, session: Session | None, job: LoadJob) -> None:
        if session is None:
            self._fail(job, 0)
            return
        same = session.generation == job.generation
        try:
            ticket = session.post(
                L.Op.LOAD, job.keys, job.blocks, fence=job.fence, depth=job.depth, label=job.request_id,
                lease=job.lease if same else 0, lease_session=job.lease_session if same else 0,
            )  # fmt: skip
        except RingFull as e:
            self._once.warning("ring", "maru: a load was not posted (%s); it is recomputed.", e)
            self._fail(job, 0)
            return
        self._loads[job.request_id] = _Live(job, session, ticket, time.monotonic())

    def _poll_loads(self) -> None:
        now = 0.0
        for load in [*self._loads.values()]:
            ended = load.session.ended(load.ticket)
            if ended is not None:
                del self._loads[load.job.request_id]
                self._load_ended(load, ended)
                continue
            now = now or time.monotonic()
            late = now - load.posted > self.options.load_timeout_s
            if (late or load.cancelled) and load.session.cancel(load.ticket):
                del self._loads[load.job.request_id]
                if late:
                    self._stats.add(loads_timed_out=1)
                    self._once.warning(
                        "late", "maru: a load took longer than %.0f s; it is recomputed.", self.options.load_timeout_s
                    )
                self._fail(load.job, 0)

    def _load_ended(self, load: _Live[LoadJob], ended: Ended) -> None:
        n_keys, reply = len(load.job.keys) // L.KEY_BYTES, ended.reply
        n_done = min(reply.n_done, n_keys) if reply is not None and ended.ending is not Ending.CANCELLED else 0
        if reply is not None:
            self._stats.add(load_bytes=reply.bytes, load_seconds=_copy_seconds(reply))
        if ended.ending is Ending.DONE and n_done == n_keys:
            self._stats.add(loads=1)
            self._over(load.job)
        else:
            what = reply.code.name.lower() if reply is not None else "the sidecar is gone"
            self._once.warning(
                f"load {what}", "maru: a load of %d chunks failed (%s); what is missing is recomputed.", n_keys, what
            )
            self._fail(load.job, n_done)

    def _fail(self, job: LoadJob, n_done: int) -> None:
        """Report the blocks of every chunk from ``n_done`` on as invalid, in the same step as the end of the load."""
        if job.synchronous and not self._recomputes:
            raise TransferError(
                f"request {job.request_id} runs on a hit that did not arrive, and this engine would go on with wrong tokens",
                "set maru.layerwise_overlap to false and report the sidecar's and the engine's log",
            )
        rows = np.frombuffer(job.blocks, dtype="<i4").reshape(len(job.keys) // L.KEY_BYTES, -1)[n_done:]
        self._invalid.update(int(b) for b in rows[rows != L.SKIP_BLOCK])
        self._report.loads_failed.add(job.request_id)
        self._reported = True
        self._over(job)

    def _over(self, job: LoadJob) -> None:
        if job.synchronous:
            self._report.loads_done[job.request_id] = 1
            self._reported = True
        else:
            self._finished.add(job.request_id)

    # --- stores -----------------------------------------------------------------------------------------------------------
    def finish_step(self, meta: StepMetadata) -> None:
        """All of the step's work is launched: move the fence on and post its stores. Once per step, later calls do nothing."""
        if meta.step <= self._posted_step:
            return
        self._posted_step = self._fence_step = meta.step
        self._finish_overlapped()
        session = self._session()
        if session is not None:
            session.sweep()
            session.segment.words[L.WORD_CLIENT_STEP] = meta.step
            if self._fence is not None:
                self._fence.after_step(meta.step)
        if meta.stores:
            for job in meta.stores:
                self._post_store(session, job)
            if not self.options.write_behind:
                if session is not None:
                    session.flush()
                self._wait_for(lambda: not self._stores, self.options.store_timeout_s, self._poll_stores)
        if session is not None:
            session.flush()

    def _post_store(self, session: Session | None, job: StoreJob) -> None:
        if session is not None:
            try:
                ticket = session.post(L.Op.STORE, job.keys, job.blocks, fence=job.fence, depth=job.depth, label=job.request_id)
            except RingFull:
                self._stats.add(stores_skipped=1)
            else:
                self._stores[job.job] = _Live(job, session, ticket, time.monotonic())
                return
        self._store_over(job)

    def _poll_stores(self) -> None:
        now = 0.0
        for store in [*self._stores.values()]:
            ended = store.session.ended(store.ticket)
            if ended is not None:
                if ended.reply is not None:
                    self._stats.add(
                        store_bytes=ended.reply.bytes,
                        store_seconds=_copy_seconds(ended.reply),
                        chunks_stored=ended.reply.n_done,
                    )
                if ended.ending is not Ending.DONE:
                    self._stats.add(stores_failed=1)
            else:
                now = now or time.monotonic()
                if now - store.posted < self.options.store_timeout_s or not store.session.cancel(store.ticket):
                    continue  # while a copy may read them its blocks stay pinned
                self._stats.add(stores_timed_out=1)
            del self._stores[store.job.job]
            self._store_over(store.job)

    def _store_over(self, job: StoreJob) -> None:
        self._report.stores_done[job.job] = 1
        self._reported = True

    # --- reports ----------------------------------------------------------------------------------------------------------
    def get_finished(self, meta: StepMetadata | None) -> set[str] | None:
        """Requests whose load is over, well or not; each once."""
        if meta is not None:
            self.start_loads(meta)  # nothing is left unposted, whatever order this version calls its hooks in
            if not meta.has_forward:
                self.finish_step(meta)
            elif self._overlapping is not None:  # asked before the step is finished: an outcome belongs to its own step
                self._finish_overlapped()
        if self._fence is not None:
            self._fence.poll()
        if self._loads or self._stores:
            self._session()  # notices a death
            self._poll_loads()
            self._poll_stores()
        elif self.link is not None and self.link.has_lost_sessions:
            self.link.poll()
        if not self._finished:
            return None
        finished, self._finished = self._finished, set()
        return finished

    def take_invalid_blocks(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> WorkerReport | None:
        if not self._reported:
            return None
        report, self._report, self._reported = self._report, WorkerReport(), False
        return report

    def take_stats(self) -> MaruStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, MaruStats()
        return stats

    def _wait_for(self, done: Callable[[], bool], timeout: float, poll: Callable[[], None]) -> None:
        """Wait inside a step. Past ``timeout`` only a copy that cannot be recalled is waited for, or the sidecar's death."""
        end = time.monotonic() + timeout
        while not done():
            self._session()
            poll()
            if done() or (time.monotonic() > end and poll == self._poll_stores):
                return
            time.sleep(_POLL_S)


def _copy_seconds(reply: Reply) -> float:
    return max(0, reply.t_done - (reply.t_first_copy or reply.t_accepted)) / 1e9
