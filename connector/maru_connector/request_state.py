"""What the scheduler half knows of one request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from maru_connector.metadata import LoadJob
from maru_connector.session import Session
from maru_shm.keys import ChunkKeys


class Phase(enum.Enum):
    """Where a request stands with the cache."""

    ACTIVE = "active"  #: may look up and store
    LOADING = "loading"  #: parked; its blocks are the sidecar's until ``finished_recving``
    ABORTED = "aborted"  #: finished while loading; vLLM frees the blocks on ``finished_recving``


@dataclass(slots=True)
class Lookup:
    """A LOOKUP or LOCATE ticket. Once answered with hits it *is* the lease, until it is released."""

    session: Session
    ticket: int
    chunks: int  #: asked
    posted: float  #: monotonic seconds
    located: bool = False  #: a LOCATE: the answer says where the slabs lie
    asks: int = 0
    hits: int | None = None  #: leading chunks present, None until answered
    deadline: int = 0  #: end of the lease, CLOCK_MONOTONIC ns
    too_early: bool = False  #: answered before all workers were attached


@dataclass(slots=True)
class RequestState:
    """``stored`` is a watermark: the leading chunks that are in the pool or on their way."""

    request: Any
    root: bytes
    keys: ChunkKeys
    phase: Phase = Phase.ACTIVE
    lookup: Lookup | None = None
    may_look_up: bool = True  #: False after a failed load, a lookup that was not answered, leases too short, or by its own wish
    renewals: int = 0  #: lookups made anew because the lease was about to end
    preemptions: int = 0  #: as of the last time it was asked about
    known_hits: int = -1  #: leading chunks the last answered lookup found, -1 before the first
    claimed_from: int = 0  #: local tokens under the hit that was claimed last
    slabs: bytes = b""  #: slab references of the hit that was claimed last, if it is loaded by the overlap path
    job: LoadJob | None = None
    lease: Lookup | None = None  #: the lookup behind ``job``
    parked_blocks: int = 0
    ranks_left: int = 0  #: ranks that have not reported a synchronous load
    block_ids: list[int] = field(default_factory=list)  #: the request's block table, as far as it was announced
    last_step: int = 0  #: last engine step that could write its blocks
    stored: int = 0
    store_at: int = 0  #: tokens computed from which a store may be due
    may_store: bool = True
    stale: bool = False  #: its blocks hold KV of before a reset; not once it was preempted
