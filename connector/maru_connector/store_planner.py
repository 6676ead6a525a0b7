"""Which chunks a request stores now, and in which jobs.

Stores are written behind: nothing while a prompt is still being prefilled in chunks, the whole prefix once it is complete,
each chunk of generated tokens as it fills up, and what is left when the request ends. Only confirmed tokens count: tokens
of the request's own list that a launched step has computed. Drafts, and the placeholders of asynchronous scheduling, are
not in that list, so a rejected token's KV is never published.

A chunk is stored once per request: ``RequestState.stored`` rises when a job is made, and a lookup's hits count as stored.
Between requests and engines the sidecar skips what it has.
"""

from __future__ import annotations

import numpy as np

from maru_connector.metadata import StoreJob
from maru_connector.pins import BlockPins
from maru_connector.request_state import RequestState
from maru_shm import layout as L

STORE_JOB_CHUNKS = 64  #: a long prefix is stored in pieces, so that its pins are released as it goes
NULL_BLOCK = 0  #: vLLM's placeholder for a block that is not in the cache


class StorePlanner:
    """Makes store jobs and pins their blocks; ``pins`` bounds what is in flight."""

    def __init__(self, chunk_tokens: int, block_tokens: int, pins: BlockPins) -> None:
        self.pins = pins
        self.planned: list[StoreJob] = []
        self._chunk_tokens = chunk_tokens
        self._per_chunk = chunk_tokens // block_tokens
        self._next_job = 1

    def take(self) -> list[StoreJob]:
        """The jobs planned since the last call."""
        jobs, self.planned = self.planned, []
        return jobs

    def plan(self, state: RequestState, tokens: int) -> None:
        """Plan what is complete of the first ``tokens`` tokens and not stored, as far as pins allow.

        Moves ``state.stored``, and ``state.store_at`` unless pins ran out: then the next step asks again, when stores in
        flight will have given some back.
        """
        size, per_chunk = self._chunk_tokens, self._per_chunk
        n = tokens // size
        if n > state.stored and self.pins.ready:
            n = min(n, len(state.block_ids) // per_chunk)
            state.keys.extend(state.request.all_token_ids, n * size)
            while state.stored < n and state.may_store:
                count = min(n - state.stored, STORE_JOB_CHUNKS)
                if self.pins.pinned:
                    count = min(count, self.pins.room() // per_chunk)
                if count <= 0:
                    return
                self._add(state, state.stored, count)
        state.store_at = max(state.store_at, (max(n, state.stored) + 1) * size)

    def _add(self, state: RequestState, first: int, count: int) -> None:
        per_chunk = self._per_chunk
        ids = state.block_ids[first * per_chunk : (first + count) * per_chunk]
        state.stored = first + count
        if NULL_BLOCK in ids:
            state.may_store = False
            return
        keys = bytes(state.keys.keys)
        parent = keys[(first - 1) * L.KEY_BYTES : first * L.KEY_BYTES] if first else state.root
        row = np.full((count + 1) * per_chunk, L.SKIP_BLOCK, dtype="<i4")
        row[per_chunk:] = ids
        job, self._next_job = self._next_job, self._next_job + 1
        self.pins.pin(job, ids)
        self.planned.append(
            StoreJob(
                job=job,
                request_id=state.request.request_id,
                keys=parent + keys[first * L.KEY_BYTES : (first + count) * L.KEY_BYTES],
                blocks=row.tobytes(),
                depth=first,
                fence=state.last_step,
            )
        )
