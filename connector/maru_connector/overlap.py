"""In-process layerwise overlap, worker side: the pass computes layer k while layer k+1 is still on its way from the pool.

The engine copies the slabs itself, out of its own mapping of the pool, into its own KV cache. Nothing is asked of the sidecar
once the request is scheduled: the slabs are leased (LOCATE), the mapping outlives the sidecar, and a sidecar that comes back
honours the lease. That matters because vLLM cannot take a synchronous hit back: model runner V2 recomputes it wrongly.

So a hit is only *claimed* for this path when every worker is **ready**, and ready means proven:

- the pool is mapped (on a GPU also page-locked, and a trial copy came out right);
- in some earlier step vLLM called the layer hook for every layer of the KV cache. A cache that is read without its hook (an
  indexer's, a draft model's inside a graph) is never proven, and such an engine loads every hit deferred.

A full CUDA graph calls no hooks. Which kind of step it is, vLLM says before the pass (``connector.py`` asks); whenever it does
not say clearly, all layers are waited for up front: right, only not overlapped.

Readiness is told to the scheduler half per sidecar generation; every step's metadata says which generation the scheduler half
still builds on, and only mappings that neither side names any more go away.

If a slab changed under its lease all the same (it expired in a step that took a minute, say) the copied bytes are worthless
and the job is reported failed; see ``worker_half.py`` for what that means.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from maru_connector.log import OnceLogger, get_logger
from maru_connector.metadata import LoadJob
from maru_connector.pool_view import PoolView, file_identity
from maru_connector.session import Session
from maru_shm import layout as L
from maru_shm.errors import MaruError
from maru_shm.placed_planes import PlacedPlane

logger = get_logger("maru_connector")


class LayerCopier(Protocol):
    """Copies slabs into the KV cache layer after layer; one job at a time.

    ``verifies``: checksums are compared first, where slabs have them. A copy engine's slabs have none.
    """

    verifies: bool

    def adopt(self, view: PoolView) -> None:
        """Make ``view`` usable, in the background where that takes long. Asked for once per view, in an engine that serves."""
        ...

    def usable(self, view: PoolView) -> bool:
        """Whether copies out of ``view`` work, proven."""
        ...

    def forget(self, view: PoolView) -> None:
        """Undo :meth:`adopt`; no copy runs."""
        ...

    def start(self, slabs: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int32]) -> None:
        """Begin, behind all work launched so far. ``slabs``: shape (n,), addresses of the slabs' data here; ``blocks``: shape
        (n, blocks per chunk)."""
        ...

    def wait_layer(self, layer: int) -> None:
        """What is launched from now on sees this layer's bytes."""
        ...

    def wait_all(self) -> None:
        """What is launched from now on sees all bytes."""
        ...

    def finish(self) -> None:
        """:meth:`wait_all`, and no copy runs any more on return. Raises :class:`~maru_shm.errors.TransferError`."""
        ...

    def close(self) -> None: ...


class Outcome(NamedTuple):
    """How a job ended. ``seconds``: from its start until no copy ran."""

    arrived: bool
    nbytes: int
    seconds: float


class _Running(NamedTuple):
    view: PoolView
    slabs: npt.NDArray[np.uint64]  #: (n, 2), see ``layout.SLAB_REF``
    slab_bytes: int
    started: float
    nbytes: int


class Overlap:
    """``layers``: name → planes of every layer of this worker's KV cache, in slab order (``layout.placed_layers``); layers that
    share planes are equal. ``block_bytes``: of a block in a slab. ``rank``: of this worker among ``world``.
    """

    def __init__(
        self, layers: Mapping[str, tuple[PlacedPlane, ...]], copier: LayerCopier, *, block_bytes: int, rank: int, world: int
    ) -> None:
        order = distinct(layers)
        self._index = {name: order.index(planes) for name, planes in layers.items()}
        self._copier = copier
        self._block_bytes = block_bytes
        self._rank = rank
        self._world = world
        self._views: dict[int, PoolView] = {}  # by generation
        self._adopted: list[PoolView] = []
        self._namespace = b""  # the same for every sidecar: it follows from what this engine is
        self._current = 0  # generation attached to, 0: none
        self._told = 0  # generation the scheduler half was told is ready
        self._seen: set[str] = set()
        self._proven = False
        self._running: _Running | None = None
        self._layered = False
        self._hooked: set[int] = set()
        self._once = OnceLogger(logger)

    # --- readiness --------------------------------------------------------------------------------------------------------
    def attached(self, session: Session) -> None:
        """A new session: map its pool, or share the view of the same file."""
        if session.pool_fd < 0 or session.pool_bytes <= 0:
            return
        try:
            file = file_identity(session.pool_fd)
            same = [view for view in self._views.values() if view.file == file]
            self._namespace = bytes.fromhex(session.namespace)
            self._views[session.generation] = same[0] if same else PoolView(session.pool_fd, session.pool_bytes)
        except (MaruError, OSError, ValueError) as e:
            self._once.warning("map", "maru: the pool cannot be mapped here (%s); hits are loaded deferred.", e)
            return
        self._current = session.generation

    def lost(self, session: Session) -> None:
        """The sidecar is gone. Its view stays: a job that was claimed is served."""
        if session.generation == self._current:
            self._current = 0

    def changes(self) -> dict[int, int]:
        """What to tell the scheduler half: generation → +1 (this worker is ready for it) or -1 (no longer)."""
        view = self._views.get(self._current) if self._proven else None
        if view is not None and view not in self._adopted:
            self._adopted.append(view)
            self._copier.adopt(view)
        ready = self._current if view is not None and self._copier.usable(view) else 0
        if ready == self._told:
            return {}
        changes = {generation: n for generation, n in ((self._told, -1), (ready, 1)) if generation}
        self._told = ready
        return changes

    def keep_only(self, generation: int) -> None:
        """The scheduler half builds on ``generation`` (0: none): forget views that nobody names any more."""
        if len(self._views) < 2:
            return
        for old in self._views.keys() - {generation, self._current, self._told}:
            view = self._views.pop(old)
            if view not in self._views.values():
                self._retire(view)

    def _retire(self, view: PoolView) -> None:
        if view in self._adopted:
            self._adopted.remove(view)

        def unmap() -> None:
            self._copier.forget(view)
            view.close()

        threading.Thread(target=unmap, name="maru-unmap").start()  # a large mapping takes its time

    # --- a job ------------------------------------------------------------------------------------------------------------
    def start(self, job: LoadJob, *, layered: bool) -> bool:
        """Begin copying ``job``; False if its slabs are not (or no longer) as they were located.

        ``layered``: every layer's hook will be called in this step; else everything is waited for at once.
        """
        view = self._views.get(job.generation)
        n = len(job.keys) // L.KEY_BYTES
        refs = np.frombuffer(job.slabs, "<u8").reshape(-1, 2)
        blocks = np.frombuffer(job.blocks, "<i4").reshape(n, -1)
        if view is None or not self._copier.usable(view) or len(refs) != n * self._world:
            return False
        slabs = refs[self._rank :: self._world]
        slab_bytes = self._block_bytes * blocks.shape[1]
        if not view.holds(slabs, slab_bytes):
            return False
        if not view.names(slabs, slab_bytes, namespace=self._namespace, keys=job.keys, rank=self._rank):
            return False
        if self._copier.verifies and not view.intact(slabs, slab_bytes):
            return False
        nbytes = int((blocks != L.SKIP_BLOCK).sum()) * self._block_bytes
        self._running = _Running(view, slabs, slab_bytes, time.monotonic(), nbytes)
        self._layered = layered
        self._hooked.clear()
        self._copier.start(slabs[:, 0] + np.uint64(view.address), blocks)
        if not layered:
            self._copier.wait_all()
        return True

    def layer(self, name: str) -> None:
        """vLLM's hook before a layer's attention."""
        if self._running is not None:
            index = self._index.get(name)
            if index is None:  # not of this KV cache; nobody knows what it reads
                self._copier.wait_all()
            else:
                self._copier.wait_layer(index)
                self._hooked.add(index)
        elif not self._proven:
            self._seen.add(name)

    def finish(self) -> Outcome | None:
        """The pass is launched: end the job in progress, if any. Returns when no copy runs any more."""
        if self._running is None:
            if self._seen:
                self._proven = self._seen >= self._index.keys()
                self._seen.clear()
            return None
        job, self._running = self._running, None
        self._copier.finish()
        seconds = time.monotonic() - job.started
        missed = set(self._index.values()) - self._hooked if self._layered else ()
        if missed:
            self._proven = False
            logger.error("maru: %d layers ran without their hook in an overlapped load; it is given up.", len(missed))
        # A write that a stopped node had begun may land in the slabs of a shared pool at any time: what is right now was right.
        spoilt = self._copier.verifies and job.view.shared and not job.view.intact(job.slabs, job.slab_bytes)
        arrived = not missed and not spoilt and job.view.holds(job.slabs, job.slab_bytes)
        return Outcome(arrived, job.nbytes, seconds)

    def close(self) -> None:
        """The KV cache goes away (sleep, shutdown). No step runs."""
        self._current = 0
        self._proven = False
        self._copier.close()
        for view in {id(v): v for v in self._views.values()}.values():
            self._copier.forget(view)
            view.close()
        self._views.clear()
        self._adopted.clear()


def distinct(layers: Mapping[str, tuple[PlacedPlane, ...]]) -> Sequence[tuple[PlacedPlane, ...]]:
    """The layers in copy order, those that share their planes once."""
    return list(dict.fromkeys(layers.values()))
