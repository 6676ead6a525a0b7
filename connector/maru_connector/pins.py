"""Pins a store's GPU blocks so that they outlive their request, and unpins them when every rank has read them.

A pin is one more reference in vLLM's own block pool. A finished or preempted request gives up its references, the block
stays out of the free queue until the pin goes, and nobody has to delay ``request_finished``: the crashes that come with
delayed completions (vllm#43226, vllm#46240) cannot happen. Preemption needs nothing more either: a pinned block is not
handed out again.

Its price: vLLM's own ``reset_prefix_cache`` refuses while a block is pinned (with ``reset_running_requests`` it raises), as
it does for any block in use. An engine that pauses first is idle only when no pin is left (``has_pending_push_work``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BlockPins:
    """Blocks pinned per store job. ``limit``: most blocks pinned at once."""

    def __init__(self, limit: int, ranks: int) -> None:
        self.limit = limit
        self.pinned = 0
        self._ranks = ranks
        self._pool: Any = None
        self._jobs: dict[int, tuple[list[Any], int]] = {}

    def bind(self, pool: Any) -> None:
        """``pool``: vLLM's BlockPool."""
        self._pool = pool

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def ready(self) -> bool:
        return self._pool is not None

    def room(self) -> int:
        """Blocks that may still be pinned. An empty table always has room for one job, so that a small cache stores at all."""
        return self.limit - self.pinned

    def pin(self, job: int, block_ids: Sequence[int]) -> None:
        """Add a reference to each block for ``job``."""
        blocks = [self._pool.blocks[i] for i in block_ids]
        self._pool.touch(blocks)
        self._jobs[job] = (blocks, self._ranks)
        self.pinned += len(blocks)

    def done(self, job: int, ranks: int) -> bool:
        """``ranks`` more ranks are done with ``job``; True when that was the last (unknown jobs are ignored)."""
        entry = self._jobs.get(job)
        if entry is None:
            return False
        blocks, left = entry
        if left > ranks:
            self._jobs[job] = (blocks, left - ranks)
            return False
        del self._jobs[job]
        self.pinned -= len(blocks)
        self._pool.free_blocks(reversed(blocks))  # the tail first: it is evicted first
        return True
