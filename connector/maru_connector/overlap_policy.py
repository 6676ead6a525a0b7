"""Which hits take the overlap path: decided in the scheduler half, when a hit is claimed.

Exactly one live request: a step that waits for a load holds up every request in it, and every one that arrives meanwhile.
Live is what this engine has not finished, waiting requests included. Deciding by what one *step* holds instead would
overlap whenever the others happen not to be in it, and stall their next token: 16 to 18 % of TPOT, measured on the
ancestor of this connector. With two or more the hit is loaded by the sidecar while the others go on. Once its step is over
the request is one like any other.

The step must also compute something worth hiding a load behind, and be no full CUDA graph, which calls no layer hooks:

- with ``FULL_AND_PIECEWISE`` (vLLM's default) and ``FULL_DECODE_ONLY`` full graphs serve uniform decode only, so a step with
  more tokens than a decode query is none;
- with ``FULL`` it is none beyond the largest captured size. So piecewise graphs are never asked for: they would slow down every
  decode step for the sake of one prefill.

A hit on the whole prompt leaves one token to compute: nothing to hide behind, and vLLM forbids it synchronously. Ending it a
block early, so that the launch of the step's kernels hides a part of it, brings nothing: 2 GiB on an H200 took 67.5 ms to the
first token (p50 62.6, p90 81.4) where deferred loads took 65.1 (65.4, 67.3).
"""

from __future__ import annotations

import time
from typing import Any

from maru_connector.options import Options
from maru_connector.request_state import Lookup

MIN_TOKENS = 64  #: computed in the step; behind fewer no load can hide
LEASE_MARGIN_NS = 10_000_000_000  #: left of the lease: the copies are over in a fraction of it


class OverlapPolicy:
    """``min_tokens``: tokens a step must compute; ``max_tokens``: that it can compute at most; ``ranks``: workers that must be
    ready.
    """

    def __init__(self, *, min_tokens: int, max_tokens: int, ranks: int) -> None:
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self._ranks = ranks
        self._ready: dict[int, int] = {}  # sidecar generation → ranks

    def note(self, changes: dict[int, int]) -> None:
        """A worker report's ``overlap``."""
        for generation, n in changes.items():
            left = self._ready.get(generation, 0) + n
            if left > 0:
                self._ready[generation] = left
            else:
                self._ready.pop(generation, None)

    @property
    def generation(self) -> int:
        """The generation that all workers are ready for; 0: none."""
        return next((g for g, n in self._ready.items() if n >= self._ranks), 0)

    def slabs_of(self, lookup: Lookup, tokens: int) -> bytes:
        """Where the hit's slabs lie, as in the reply cell, if the hit may be loaded within its step; else empty.

        ``tokens``: left to compute after the hit.
        """
        if not lookup.hits or not lookup.located or lookup.session.generation != self.generation:
            return b""
        if min(tokens, self.max_tokens) < self.min_tokens or lookup.deadline - time.monotonic_ns() < LEASE_MARGIN_NS:
            return b""
        refs = lookup.session.slab_refs(lookup.ticket, lookup.hits * self._ranks)
        # A slab of another node's has no reference: its owner may evict it, and this path must not fail.
        return refs.tobytes() if refs is not None and refs[:, 0].all() else b""


def overlap_policy(config: Any, options: Options, *, block_tokens: int) -> OverlapPolicy | None:
    """The policy for an engine's ``VllmConfig``; None unless ``maru.layerwise_overlap`` is on."""
    if not options.layerwise_overlap:
        return None
    scheduler, compilation = config.scheduler_config, config.compilation_config
    decode_query = 1 + (getattr(config, "num_speculative_tokens", 0) or 0)
    least = max(MIN_TOKENS, 2 * block_tokens, decode_query + 1)
    mode = compilation.cudagraph_mode
    if mode is not None and mode.mixed_mode().name == "FULL":
        least = max(least, (compilation.max_cudagraph_capture_size or 0) + 1)
    most = getattr(scheduler, "max_num_scheduled_tokens", None) or scheduler.max_num_batched_tokens
    if 0 < scheduler.long_prefill_token_threshold < most:
        most = scheduler.long_prefill_token_threshold
    return OverlapPolicy(min_tokens=least, max_tokens=most, ranks=config.parallel_config.world_size)
