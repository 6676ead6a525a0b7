"""The connector's half in vLLM's scheduler: who hits, what is loaded where, what is stored when.

Nothing here waits for I/O. What the pool holds of a request is asked in ``lookups.py``; every path out of a request ends
there, in :meth:`~maru_connector.lookups.Lookups.drop`. What becomes of a hit is decided here.

A hit is loaded in one of two ways: parked, by the sidecar, while others run (deferred); or, where it is the only live request,
by the workers themselves while its own forward pass runs (``overlap_policy.py`` says when, ``overlap.py`` how).

When a store is due is decided here, which chunks it carries in ``store_planner.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from maru_connector import namespace
from maru_connector.link import SidecarLink
from maru_connector.lookups import Lookups, NoAnswer
from maru_connector.metadata import LoadJob, StepMetadata, WorkerReport
from maru_connector.options import Options
from maru_connector.overlap_policy import OverlapPolicy
from maru_connector.pins import BlockPins
from maru_connector.request_state import Lookup, Phase, RequestState
from maru_connector.session import Session
from maru_connector.stats import MaruStats
from maru_connector.store_planner import StorePlanner
from maru_shm import keys as K
from maru_shm import layout as L

_MISS = (0, False)
#: Statuses of a request that ends while a step with it may be running, or because its load failed.
_UNFINISHED = frozenset({"FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"})


class SchedulerHalf:
    """``block_tokens``: tokens per scheduler block; ``num_blocks``: of the GPU cache; ``ranks``: workers that report."""

    def __init__(
        self, options: Options, link: SidecarLink, root: bytes, *, block_tokens: int, num_blocks: int, ranks: int,
        deferred: bool, may_load: bool = True, may_store: bool = True, overlap: OverlapPolicy | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self.link = link
        self._root = root
        self._block_tokens = block_tokens
        self._per_chunk = options.chunk_tokens // block_tokens
        self._deferred = deferred
        self._ranks = ranks
        self._may_load = may_load
        self._may_store = may_store
        self._overlap = overlap
        self._requests: dict[str, RequestState] = {}
        self._strangers: set[str] = set()  # live requests that cannot be cached
        pins = BlockPins(int(num_blocks * options.max_pinned_share), ranks)
        self._stores = StorePlanner(options.chunk_tokens, block_tokens, pins)
        self._min_hit = max(1, options.min_hit_tokens or 0)
        self._max_parked = int(num_blocks * options.max_parked_share)
        self._parked = 0
        self._last_use = np.zeros(num_blocks, dtype=np.int64)  # block → last step that could write it
        self._fence_floor = 0
        self._loads: list[LoadJob] = []
        self._inside: set[str] = set()  # requests with a load inside a step whose outcome is not known
        self._cancels: list[str] = []
        self._step = 0
        self._loras = namespace.LoraIdentities()
        self._stats = MaruStats()
        self._lookups = Lookups(options, link, overlap, self._stats)

    # --- requests come and ask ----------------------------------------------------------------------------------------------
    def on_new_request(self, request: Any) -> None:
        """Hash the prompt once and post its lookup."""
        if not namespace.cacheable(request):
            self._strangers.add(request.request_id)
            return
        state = self._new_state(request)
        self._requests[request.request_id] = state
        self.link.nudge()
        self._lookups.post_early(state, alone=self._alone())

    def _new_state(self, request: Any) -> RequestState:
        root = namespace.request_root(self._root, request, self._loras)
        size = self.options.chunk_tokens
        extra = namespace.chunk_extra(request, size)
        keys = K.ChunkKeys(root, size, extra) if extra is not None else K.ChunkKeys(root, size)
        state = RequestState(request, root, keys, store_at=request.num_prompt_tokens)
        state.may_store = self._may_store
        state.may_look_up = self._may_load and not getattr(request, "skip_reading_prefix_cache", False)
        return state

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond ``num_computed`` local ones, a multiple of the block size; None: ask again next step."""
        state = self._requests.get(request.request_id)
        if state is None or not state.may_look_up or state.phase is not Phase.ACTIVE:
            return _MISS
        if request.num_preemptions != state.preemptions:
            state.preemptions = request.num_preemptions
            state.known_hits = -1  # asked again with what it generated, and part of that is stored by now
        size = self.options.chunk_tokens
        chunks = request.num_tokens // size
        if num_computed % self._block_tokens or chunks * size - num_computed < self._min_hit:
            self._lookups.drop(state)
            return _MISS
        if state.lookup is None and state.known_hits >= 0 and state.known_hits * size - num_computed < self._min_hit:
            return _MISS  # asked before, and the local cache still covers it
        lookup = self._lookups.ask(state, alone=self._alone())
        if lookup is NoAnswer.LATER:
            return None, False
        if lookup is NoAnswer.MISS:
            return _MISS
        return self._claim(request, state, lookup, num_computed)

    def _claim(self, request: Any, state: RequestState, lookup: Lookup, num_computed: int) -> tuple[int | None, bool]:
        end = (lookup.hits or 0) * self.options.chunk_tokens
        state.slabs = b""
        if self._overlap is not None and self._alone():
            state.slabs = self._overlap.slabs_of(lookup, request.num_tokens - end)
        if not self._deferred and not state.slabs:
            # A synchronous full hit trips an assertion in the scheduler: it must compute one token at least.
            end = min(end, (request.num_tokens - 1) // self._block_tokens * self._block_tokens)
        n = end - num_computed
        if n < self._min_hit:
            self._lookups.drop(state)
            return _MISS
        if state.slabs:
            state.claimed_from = num_computed
            return n, False
        if self._deferred and self._parked and self._parked + n // self._block_tokens > self._max_parked:
            return None, False  # bounded: the loads in flight end, each within its timeout
        state.claimed_from = num_computed
        return n, self._deferred

    def _alone(self) -> bool:
        """Whether one request is live, or none."""
        return len(self._requests) <= 1 and not self._strangers

    def on_lost(self, session: Session) -> None:
        """The sidecar is gone, and with it the lookups of ``session``. Loads go on; their workers know."""
        self._lookups.on_lost(session, self._requests.values())

    # --- blocks are allocated, steps are built ------------------------------------------------------------------------------
    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None:
        """``n`` external tokens have blocks now: make the load. ``n`` = 0: no hit is used."""
        state = self._requests.get(request.request_id)
        if state is None or state.phase is not Phase.ACTIVE:
            return
        if n == 0:
            self._lookups.drop(state)
            return
        lookup = state.lookup  # None if the sidecar went meanwhile: the load is tried all the same, or recomputed
        size, per_chunk = self.options.chunk_tokens, self._per_chunk
        begin, end = state.claimed_from, state.claimed_from + n
        first, last = begin // size, -(-end // size)
        ids = np.asarray(blocks.get_block_ids()[0][first * per_chunk : last * per_chunk], dtype=np.int32)
        row = np.full((last - first) * per_chunk, L.SKIP_BLOCK, dtype="<i4")
        take = slice(begin // self._block_tokens - first * per_chunk, end // self._block_tokens - first * per_chunk)
        row[take] = ids[take]
        state.job = LoadJob(
            request_id=request.request_id,
            keys=bytes(state.keys.keys[first * L.KEY_BYTES : last * L.KEY_BYTES]),
            blocks=row.tobytes(),
            depth=first,
            fence=0,  # known when the step is built: this step's preemptions count
            lease=lookup.ticket if lookup else 0,
            lease_session=lookup.session.id if lookup else 0,
            generation=lookup.session.generation if lookup else 0,
            synchronous=bool(state.slabs) or not self._deferred,
            slabs=state.slabs[first * self._ranks * L.SLAB_REF.size : last * self._ranks * L.SLAB_REF.size],
        )
        self._loads.append(state.job)
        state.lookup, state.lease = None, lookup
        state.ranks_left = self._ranks
        state.parked_blocks = n // self._block_tokens
        self._parked += state.parked_blocks
        state.stored = max(state.stored, last)
        self._stats.add(hits=1, hit_tokens=n)
        if state.job.synchronous:
            self._inside.add(request.request_id)
        else:
            state.phase = Phase.LOADING

    def build_connector_meta(self, output: Any) -> StepMetadata:
        """Everything this step's workers have to know. Cheap when idle: one poll, no loop."""
        self._step += 1
        self._lookups.new_step()
        session = self.link.poll()
        if session is not None:
            session.sweep()
            session.segment.words[L.WORD_CLIENT_STEP] = self._step
        scheduled = output.num_scheduled_tokens
        if scheduled or output.preempted_req_ids:
            self._track(output, scheduled, session)
        meta = StepMetadata(self._step, bool(scheduled))
        if self._overlap is not None:
            meta.overlap_generation = self._overlap.generation
        if self._loads:
            meta.loads, self._loads = self._loads, []
            for job in meta.loads:
                ids = np.frombuffer(job.blocks, dtype="<i4")
                job.fence = int(self._last_use[ids[ids != L.SKIP_BLOCK]].max(initial=self._fence_floor))
        if self._stores.planned:
            meta.stores = self._stores.take()
        if self._cancels:
            meta.cancel_loads, self._cancels = self._cancels, []
        if session is not None:
            session.flush()
        return meta

    def _track(self, output: Any, scheduled: dict[str, int], session: Session | None) -> None:
        """What this step computes, and what of it is to be stored.

        Nothing, while a load inside a step may still fail: whoever computes on top of it, or on blocks shared with it, computes
        garbage then, which vLLM computes again and the pool would keep.
        """
        requests = self._requests
        for request_id in output.preempted_req_ids or ():
            state = requests.get(request_id)
            if state is None:
                self._fence_floor = self._step - 1  # an uncacheable request: its blocks are not known here
            else:
                self._blocks_freed(state.block_ids, state.last_step)
                self._has_blocks(state, [])
        for new in output.scheduled_new_reqs:
            state = requests.get(new.req_id)
            if state is not None:
                self._has_blocks(state, list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is None:
                continue
            state = requests.get(request_id)
            if state is not None:
                if request_id in cached.resumed_req_ids:
                    self._has_blocks(state, list(block_ids[0]))
                else:
                    state.block_ids += block_ids[0]
        step = self._step
        for request_id, n_tokens in scheduled.items():
            state = requests.get(request_id)
            if state is None:
                continue
            state.last_step = step
            computed = state.request.num_computed_tokens + n_tokens
            if computed >= state.store_at and state.may_store and session is not None and not self._inside:
                self._stores.plan(state, min(computed, state.request.num_tokens))

    def _has_blocks(self, state: RequestState, block_ids: list[int]) -> None:
        """A block table of its own: first, none any more, or another one."""
        state.block_ids = block_ids
        if state.stale:
            state.stale, state.may_store = False, self._may_store

    def _blocks_freed(self, block_ids: Iterable[int], last_step: int) -> None:
        """Remember when blocks were last written: a load into them waits for that step and no other."""
        ids = np.fromiter(block_ids, dtype=np.int64)
        if len(ids):
            self._last_use[ids] = np.maximum(self._last_use[ids], last_step)

    # --- outcomes -----------------------------------------------------------------------------------------------------------
    def update_connector_output(self, output: Any) -> None:
        """Take the workers' reports: unpin what is stored, settle loads."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for job, ranks in report.stores_done.items():
                self._stores.pins.done(job, ranks)
            if self._overlap is not None:
                self._overlap.note(report.overlap)
            for request_id in report.loads_failed:
                state = self._requests.get(request_id)
                if state is not None:
                    state.may_look_up = False  # a hit claimed again after a failure would loop for ever
                    state.stored = 0
                    state.store_at = state.request.num_prompt_tokens
                    self._stats.add(loads_failed=1)
            for request_id, ranks in report.loads_done.items():
                state = self._requests.get(request_id)
                if state is not None and state.job is not None:
                    state.ranks_left -= ranks
                    if state.ranks_left <= 0:
                        self._load_over(state)
        for request_id in output.finished_recving or ():
            state = self._requests.get(request_id)
            if state is not None and state.job is not None:
                self._load_over(state)

    def _load_over(self, state: RequestState) -> None:
        lease, state.lease, state.job = state.lease, None, None
        self._inside.discard(state.request.request_id)
        self._parked -= state.parked_blocks
        state.parked_blocks = 0
        if lease is not None:
            self._lookups.release(lease)
        if state.phase is Phase.ABORTED:
            del self._requests[state.request.request_id]
        else:
            state.phase = Phase.ACTIVE

    def request_finished(self, request: Any, block_ids: list[int]) -> None:
        """Store what is left and let go. Pins keep the blocks; their free is never delayed."""
        state = self._requests.get(request.request_id)
        if state is None:
            self._strangers.discard(request.request_id)
            self._blocks_freed(block_ids, self._step)
            return
        self._lookups.drop(state)
        if state.phase is Phase.LOADING:
            state.phase = Phase.ABORTED
            self._cancels.append(request.request_id)
            return
        self._blocks_freed({*state.block_ids, *block_ids}, state.last_step)  # vLLM names those of computed tokens
        state.block_ids = block_ids
        if block_ids:
            # The last token sampled has no KV unless a further step was launched: never counted.
            tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            believed = not self._inside or request.status.name not in _UNFINISHED
            if state.may_store and self.link.session is not None and believed:
                self._stores.plan(state, tokens)
            if (left := tokens // self.options.chunk_tokens - state.stored) > 0:
                self._stats.add(chunks_not_stored=left)
        if state.job is not None:  # its step may still run: the report that ends it gives the lease back
            state.phase = Phase.ABORTED
            return
        del self._requests[request.request_id]

    def has_pending_work(self) -> bool:
        """Whether an idle engine has to keep stepping: stores to post or to unpin."""
        return bool(self._cancels or self._stores.planned or len(self._stores.pins))

    def bind_block_pool(self, pool: Any) -> None:
        self._stores.pins.bind(pool)

    def reset_cache(self) -> bool:
        """Nothing stored before is served to this engine again: from here its keys start from a new, private root.

        That holds at once, without asking the sidecar, and hurts no other engine of the namespace. The old chunks age out.
        """
        self._root = K.request_root(self._root, salt="reset " + os.urandom(16).hex())
        for request_id, state in list(self._requests.items()):
            self._lookups.drop(state)
            if state.phase is not Phase.ACTIVE:
                self._cancels.append(request_id)
                state.may_store = False
                continue
            fresh = self._new_state(state.request)
            fresh.block_ids, fresh.last_step, fresh.job, fresh.lease = state.block_ids, state.last_step, state.job, state.lease
            fresh.parked_blocks, fresh.ranks_left = state.parked_blocks, state.ranks_left
            fresh.stale = bool(state.block_ids)
            fresh.may_store = self._may_store and not fresh.stale
            self._requests[request_id] = fresh
        return True

    def take_stats(self) -> MaruStats | None:
        if self._stats.is_empty():
            return None
        stats = MaruStats(self._stats.data)
        self._stats.reset()
        return stats

    def shutdown(self) -> None:
        self.link.close()
