"""What travels between the two halves of the connector, once per engine step and pickled in multi-process engines.

Plain data, small: ids are raw little-endian arrays, exactly as they go into the ring's request cell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class LoadJob:
    """Fill a parked request's blocks. ``blocks``: int32, n chunks × blocks per chunk, SKIP_BLOCK where already there."""

    request_id: str
    keys: bytes
    blocks: bytes
    depth: int  #: index of the first chunk in the prefix
    fence: int  #: last engine step that could have touched these blocks
    lease: int  #: the lookup's ticket
    lease_session: int
    generation: int  #: of the sidecar that gave the lease
    synchronous: bool = False  #: the step's own forward pass reads these blocks
    slabs: bytes = b""  #: overlap path: n chunks × ranks ``layout.SLAB_REF``; empty: the sidecar copies


@dataclass(slots=True)
class StoreJob:
    """Publish a request's chunks. ``keys`` has n + 1 keys: the first is the parent, its block ids are SKIP_BLOCK."""

    job: int
    request_id: str
    keys: bytes
    blocks: bytes
    depth: int
    fence: int


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler → workers. ``step`` counts every ``schedule()``; ``has_forward`` is False where no token was scheduled."""

    step: int = 0
    has_forward: bool = False
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    cancel_loads: list[str] = field(default_factory=list)  #: requests aborted while loading
    overlap_generation: int = 0  #: the sidecar generation whose pool loads may be overlapped from; 0: none


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers → scheduler. A store is over when every rank has counted it; one failed rank fails a load."""

    stores_done: dict[int, int] = field(default_factory=dict)  #: job → ranks that are done with its blocks
    loads_done: dict[str, int] = field(default_factory=dict)  #: synchronous loads: request → ranks
    loads_failed: set[str] = field(default_factory=set)
    overlap: dict[int, int] = field(default_factory=dict)  #: sidecar generation → ranks newly ready for overlap, less those not

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Sum of two ranks' reports of one step."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            _sum(self.stores_done, other.stores_done),
            _sum(self.loads_done, other.loads_done),
            self.loads_failed | other.loads_failed,
            _sum(self.overlap, other.overlap),
        )


def _sum(a: dict[Any, int], b: dict[Any, int]) -> dict[Any, int]:
    out = dict(a)
    for key, n in b.items():
        out[key] = out.get(key, 0) + n
    return out
