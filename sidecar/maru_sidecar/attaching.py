"""An attach on its way: what can be refused at once, and what is made in a thread of its own.

Importing a KV cache touches the engine's memory or a GPU's driver. Either may take long, and a page fault in host memory for
ever, so each attach has a thread; there are at most ``MAX_THREADS``. An attach that exceeds its time is refused, its rank is
free again, and whatever its thread still comes to is undone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as S
from maru_shm.errors import AttachRefused, MaruError, SegmentError
from maru_shm.geometry import RegionKind
from maru_sidecar.config import Limits
from maru_sidecar.connection import Connection
from maru_sidecar.descriptors import close_later
from maru_sidecar.engines import Engine, Refusal
from maru_sidecar.lanes import Lane, Lanes
from maru_sidecar.pool import PoolFile
from maru_sidecar.transfer.base import KvTarget, Peer

log = logging.getLogger(__name__)

MAX_THREADS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """``pidfd`` is this attach's own."""

    session_id: int
    connection: Connection
    message: M.Attach
    engine: Engine
    pidfd: int
    began_s: float = field(default_factory=time.monotonic)

    def overdue(self, limit_s: float) -> bool:
        """Whether it takes too long. A GPU's driver may need minutes to page-lock a large pool, and hangs in no engine."""
        layout = self.message.layout
        in_host = layout is not None and layout.regions[0].kind is RegionKind.PROCESS_VM
        return in_host and time.monotonic() - self.began_s > limit_s


@dataclass(frozen=True, slots=True)
class Opened:
    """What the thread made for an attach. ``pool_fd`` is the client's, read-only."""

    segment: S.Segment
    doorbell: int
    pool_fd: int
    lane: Lane | None = None
    target: KvTarget | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """How this sidecar's segments are named."""

    instance: str
    generation: int
    pid: int
    start_time: int


class AttachThreads:
    """A thread for each attach; one that hangs costs its own place only. The process ends without them."""

    def __init__(self, limit: int = MAX_THREADS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.running = 0

    def submit(self, work: Callable[[], Opened], ended: Callable[[Future[Opened]], None]) -> None:
        """Do ``work``, then call ``ended`` in the same thread. Raises :class:`Refusal` if too many threads run."""
        future: Future[Opened] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as e:  # noqa: BLE001 - the attach's answer
                future.set_exception(e)
            with self._lock:
                self.running -= 1
            ended(future)

        with self._lock:
            if self.running >= self._limit:
                raise Refusal(
                    M.RefusalCode.LIMIT,
                    f"{self.running} attaches are under way",
                    f"at most {self._limit} at once; attach again",
                )
            self.running += 1
        try:
            threading.Thread(target=run, name="maru-attach", daemon=True).start()
        except RuntimeError as e:
            with self._lock:
                self.running -= 1
            raise Refusal(M.RefusalCode.LIMIT, f"no thread for the attach: {e}", "raise the process's limit of threads") from e


def check_limits(m: M.Attach, limits: Limits, held_bytes: int) -> None:
    """Raise :class:`Refusal` for an attach that asks for too much. ``held_bytes``: of the segments there are."""
    for name in ("max_records", "max_keys", "max_blocks"):
        asked, limit = getattr(m, name), getattr(limits, name)
        if not (0 if name == "max_blocks" else 1) <= asked <= limit:
            raise Refusal(M.RefusalCode.LIMIT, f"{name} is {asked}", f"at least 1, at most limits.{name} ({limit})")
    try:
        shape_of(m).check()
    except SegmentError as e:
        raise Refusal(M.RefusalCode.LIMIT, e.what, e.remedy) from e
    total = shape_of(m).total_bytes
    if total > limits.segment_bytes:
        raise Refusal(
            M.RefusalCode.LIMIT,
            f"a segment of {total} bytes ({m.max_records} records of {m.max_keys} keys and {m.max_blocks} blocks)",
            f"lower maru.max_records, or raise limits.segment_bytes ({limits.segment_bytes})",
        )
    if held_bytes + total > limits.total_segment_bytes:
        raise Refusal(
            M.RefusalCode.LIMIT,
            f"a segment of {total} bytes beside {held_bytes} bytes of other sessions",
            f"lower maru.max_records, or raise limits.total_segment_bytes ({limits.total_segment_bytes})",
        )


def make(opening: Opening, fds: list[int], ident: Identity, pool: PoolFile, lanes: Lanes) -> Opened:
    """In the attach's thread: make the segment, import the KV cache. ``fds`` are closed, whatever happens."""
    m = opening.message
    peer = Peer(opening.connection.pid, opening.pidfd, opening.connection.uid)
    info = S.SegmentInfo(
        ident.generation, opening.session_id, shape_of(m), ident.pid, peer.pid, ident.start_time, time.time_ns(),
        ident.instance, m.role,
    )  # fmt: skip
    with contextlib.ExitStack() as undo:
        undo.callback(close_later, fds)
        segment = S.create(info)
        undo.callback(segment.close)
        undo.callback(S.unlink, info.name)
        doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, doorbell)
        pool_fd = pool.open_readonly()
        undo.callback(os.close, pool_fd)
        lane, target = lanes.attach(m.layout, peer, fds) if m.layout is not None else (None, None)
        undo.pop_all()
        close_later(fds)
        return Opened(segment, doorbell, pool_fd, lane, target)


def shape_of(m: M.Attach) -> L.SegmentShape:
    """The segment an attach asks for."""
    refs = m.world_size if m.role is L.Role.SCHEDULER else 0  # what LOCATE answers
    return L.SegmentShape.for_limits(m.max_records, m.max_keys, m.max_blocks, refs_per_key=refs)


def refused(error: BaseException) -> M.Refused:
    """The answer to an attach that failed in its thread."""
    if isinstance(error, Refusal):
        return M.Refused(error.code, error.what, error.remedy)
    if isinstance(error, AttachRefused):
        return M.Refused(M.RefusalCode.UNREACHABLE_MEMORY, error.what, error.remedy)
    if isinstance(error, SegmentError):
        return M.Refused(M.RefusalCode.LIMIT, error.what, error.remedy)
    if isinstance(error, MaruError):
        return M.Refused(M.RefusalCode.FAILED, error.what, error.remedy)
    log.error("attach failed", exc_info=error)
    return M.Refused(M.RefusalCode.FAILED, f"attach failed: {type(error).__name__}", "see the sidecar's log")
