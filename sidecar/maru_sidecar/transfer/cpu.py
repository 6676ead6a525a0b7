"""The ``cpu`` engine: host memory of the engine's process, by ``process_vm_readv`` and ``process_vm_writev``.

The kernel copies straight between the two address spaces: no staging buffer, nothing for the engine to map or to run. A
copy is cut into calls of at most 1,024 pieces (the kernel's IOV_MAX) and about 8 MiB, so that several threads share it and
the peer's life is checked often. Descriptors are numpy arrays filled in one go: 130,000 pieces take about 4 ms.

The peer is named by a pid here, because the system call takes one, and pids are reused. The pidfd is checked before every
call, and after a call that read the peer's memory: bytes read while the peer died are never believed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from maru_shm.errors import AttachRefused, EngineGone, TransferError
from maru_shm.geometry import WHOLE, Direction, KvLayout, RegionKind, Share
from maru_shm.layout import SKIP_BLOCK
from maru_sidecar.transfer.base import MayGoOn, Peer, PoolMapping

IOV_MAX = 1024
CALL_BYTES = 8 << 20  #: a call's target size; a single larger piece is not split
BUFFER_BYTES = 1 << 20  #: through which checksums are taken: it stays in a core's cache
INLINE_BYTES = 1 << 20  #: up to here waking another thread (50 µs) costs more than it saves
_IOVEC = np.dtype([("base", "<u8"), ("len", "<u8")])  # struct iovec on every 64-bit Linux

_libc = ctypes.CDLL(None, use_errno=True)
_CALLS = {Direction.LOAD: _libc.process_vm_writev, Direction.STORE: _libc.process_vm_readv}
for _function in _CALLS.values():
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    ]  # fmt: skip


def default_threads() -> int:
    """2 to 4 by the number of usable cores: one core moves 5-10 GB/s, four saturate a memory channel pair."""
    return max(2, min(4, len(os.sched_getaffinity(0))))


def peer_exited(pidfd: int) -> bool:
    """Whether the process behind ``pidfd`` has ended (non-blocking)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class CpuTransfer:
    """Transfer engine for :attr:`RegionKind.PROCESS_VM`.

    ``threads``: how many share one large copy, the waiting one included.
    """

    name = "cpu"

    def __init__(self, pool: PoolMapping, threads: int = 0) -> None:
        self.pool = pool
        self._helpers = [
            threading.Thread(target=self._help, name=f"maru-copy-{i}", daemon=True)
            for i in range((threads or default_threads()) - 1)
        ]
        self._ready = threading.Condition()
        self._loads: deque[CpuCopy] = deque()
        self._stores: deque[CpuCopy] = deque()
        self._closed = False
        self._started = False

    def attach(self, layout: KvLayout, peer: Peer, fds: Sequence[int] = ()) -> CpuTarget:
        """Probe both ends of every region. Raises :class:`~maru_shm.errors.AttachRefused` naming region and reason."""
        if peer.pid <= 0:
            raise AttachRefused("the engine's process is not visible from here", "run engine and sidecar in one pid namespace")
        if peer.uid != os.geteuid():
            # A process may become another program (execve) under the same pid. With one user on both sides the kernel
            # refuses what this sidecar may not touch; a privileged sidecar would copy a setuid program's memory.
            raise AttachRefused(
                f"the engine is of uid {peer.uid}, the sidecar of uid {os.geteuid()}", "run a CPU engine as the sidecar's user"
            )
        for i, region in enumerate(layout.regions):
            if region.kind is not RegionKind.PROCESS_VM:
                raise AttachRefused(
                    f"region {i} is {region.kind.value}, not process_vm", "all regions of a cache are of one kind"
                )
            for address in (region.address, region.address + region.size - 1):
                self._probe(i, address, peer)
        with self._ready:
            if not self._started:
                self._started = True
                for helper in self._helpers:
                    helper.start()
        return CpuTarget(self, layout, peer)

    @staticmethod
    def _probe(region: int, address: int, peer: Peer) -> None:
        byte = np.zeros(1, np.uint8)
        try:
            _transfer(Direction.STORE, peer, _iovec([byte.ctypes.data], [1]), _iovec([address], [1]))
        except EngineGone as e:
            raise AttachRefused(f"process {peer.pid} ended while attaching", "") from e
        except TransferError as e:
            code = e.__cause__.errno if isinstance(e.__cause__, OSError) else 0
            if code in (errno.EPERM, errno.EACCES):
                raise AttachRefused(
                    f"the memory of process {peer.pid} may not be read ({errno.errorcode[code]})",
                    "run engine and sidecar as one user and allow tracing: kernel.yama.ptrace_scope=0, or "
                    "prctl(PR_SET_PTRACER) in the engine, or CAP_SYS_PTRACE for the sidecar",
                ) from e
            if code == errno.ENOSYS:
                raise AttachRefused(
                    "this kernel has no process_vm_readv",
                    "enable CONFIG_CROSS_MEMORY_ATTACH, or the container's seccomp filter",
                ) from e
            raise AttachRefused(f"region {region} of process {peer.pid} is not readable at {address:#x}: {e.what}", "") from e

    def share(self, copy: CpuCopy) -> None:
        """Let the helper threads join ``copy``; loads go before stores."""
        if not self._helpers:
            return
        with self._ready:
            (self._loads if copy.direction is Direction.LOAD else self._stores).append(copy)
            self._ready.notify_all()

    def _help(self) -> None:
        while True:
            with self._ready:
                while not self._closed and not self._loads and not self._stores:
                    self._ready.wait()
                if self._closed:
                    return
                queue = self._loads or self._stores
                copy = queue[0]
                if not copy.has_work:
                    queue.popleft()
                    continue
            copy.run_one()

    def dead_threads(self) -> list[str]:
        """Names of helper threads that have ended though nobody closed the engine."""
        return [] if self._closed or not self._started else [h.name for h in self._helpers if not h.is_alive()]

    def close(self) -> None:
        """Stop the threads. Targets are closed before."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        if self._started:
            for helper in self._helpers:
                helper.join()


class CpuTarget:
    """One worker's KV cache in the memory of its process."""

    slice_hint = 0  #: a call per 1,024 pieces whatever the size
    parts = 1

    def __init__(self, engine: CpuTransfer, layout: KvLayout, peer: Peer) -> None:
        self.layout = layout
        self.peer = peer
        self._engine = engine
        planes = layout.planes
        self._address = np.array([layout.regions[p.region].address + p.offset for p in planes], np.uint64)
        self._stride = np.array([p.block_stride for p in planes], np.uint64)
        self._piece = np.array([p.piece_bytes for p in planes], np.uint64)
        self._within = np.concatenate(([0], np.cumsum(self._piece)[:-1])).astype(np.uint64)  # offset of a piece in its block
        self._in_flight = 0
        self._idle = threading.Condition()

    def submit(
        self,
        direction: Direction,
        slab_offsets: npt.NDArray[np.uint64],
        blocks: npt.NDArray[np.int32],
        share: Share = WHOLE,
        may_go_on: MayGoOn | None = None,
    ) -> CpuCopy:
        """See :class:`~maru_sidecar.transfer.base.KvTarget`. Small copies are done on return, well or not."""
        local, remote = self._pieces(slab_offsets, blocks, share.of(len(self._piece)))
        copy = CpuCopy(self, direction, local, remote, may_go_on)
        if not copy.has_work:  # every block skipped
            return copy
        with self._idle:
            self._in_flight += 1
        if copy.nbytes <= INLINE_BYTES:
            while copy.run_one():
                pass
        else:
            self._engine.share(copy)
        return copy

    def _pieces(
        self, slab_offsets: npt.NDArray[np.uint64], blocks: npt.NDArray[np.int32], planes: slice
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """Local and remote iovecs, pairwise of equal length, in slab order; neighbours merged up to CALL_BYTES."""
        n, per_chunk = blocks.shape
        ids = blocks.astype(np.uint64)
        piece = self._piece[planes, None]
        shape = (n, len(piece), per_chunk)
        remote = self._address[planes, None] + ids[:, None, :] * self._stride[planes, None]
        in_slab = np.uint64(per_chunk) * self._within[planes, None] + np.arange(per_chunk, dtype=np.uint64) * piece
        local = np.uint64(self._engine.pool.address) + slab_offsets.astype(np.uint64)[:, None, None] + in_slab
        sizes = np.broadcast_to(piece, shape)
        keep = np.broadcast_to((blocks != SKIP_BLOCK)[:, None, :], shape)
        if not keep.all():
            remote, local, sizes = remote[keep], local[keep], sizes[keep]
        remote, local, sizes = remote.reshape(-1), local.reshape(-1), sizes.reshape(-1)
        if len(sizes) > 1:
            ends = np.cumsum(sizes)
            joined = (remote[1:] == remote[:-1] + sizes[:-1]) & (local[1:] == local[:-1] + sizes[:-1])
            joined &= (ends[1:] - np.uint64(1)) // np.uint64(CALL_BYTES) == (ends[:-1] - sizes[:-1]) // np.uint64(CALL_BYTES)
            if joined.any():
                first = np.flatnonzero(np.concatenate(([True], ~joined)))
                sizes = np.add.reduceat(sizes, first)
                remote, local = remote[first], local[first]
        return _iovec(local, sizes), _iovec(remote, sizes)

    def checksum(self, blocks: npt.NDArray[np.int32]) -> int:
        """See :class:`~maru_sidecar.transfer.base.KvTarget`. 3 to 7 GB/s, by the pieces' size: they are read once more."""
        _, pieces = self._pieces(np.zeros(1, np.uint64), blocks[None], slice(None))
        pieces = _split(pieces, BUFFER_BYTES)
        buffer = np.empty(BUFFER_BYTES, np.uint8)
        digest = xxhash.xxh3_64()
        for start, stop in pairwise(_cuts(pieces["len"], BUFFER_BYTES)):
            remote = pieces[start:stop]
            ends = np.cumsum(remote["len"])
            local = _iovec(np.uint64(buffer.ctypes.data) + ends - remote["len"], remote["len"])
            _transfer(Direction.STORE, self.peer, local, remote)
            digest.update(buffer[: int(ends[-1])].data)
        return int(digest.intdigest())

    def ended(self) -> None:
        """A copy of this target has ended."""
        with self._idle:
            self._in_flight -= 1
            self._idle.notify_all()

    def close(self) -> None:
        with self._idle:
            while self._in_flight:
                self._idle.wait()


class CpuCopy:
    """A copy in flight: calls not yet begun, taken by helper threads and by whoever waits."""

    def __init__(
        self,
        target: CpuTarget,
        direction: Direction,
        local: npt.NDArray[np.void],
        remote: npt.NDArray[np.void],
        may_go_on: MayGoOn | None,
    ) -> None:
        self.direction = direction
        self.nbytes = int(local["len"].sum())
        self._target = target
        self._may_go_on = may_go_on
        self._local = local
        self._remote = remote
        self._calls = deque(pairwise(_cuts(local["len"])))
        self._left = len(self._calls)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        if not self._left:
            self._ended.set()

    @property
    def has_work(self) -> bool:
        return bool(self._calls)

    def run_one(self) -> bool:
        """Do one of the calls; False if none is left to begin."""
        try:
            start, stop = self._calls.popleft()
        except IndexError:
            return False
        error: BaseException | None = None
        try:
            if self._error is None:
                local, remote = self._local[start:stop], self._remote[start:stop]
                _transfer(self.direction, self._target.peer, local, remote, self._may_go_on)
        except BaseException as e:  # noqa: BLE001 - carried to the waiter, whichever thread met it
            error = e
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return True
        self._ended.set()
        self._target.ended()
        return True

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        while self.run_one():
            pass
        self._ended.wait()
        if self._error is not None:
            raise self._error


def _cuts(sizes: npt.NDArray[np.uint64], call_bytes: int = CALL_BYTES) -> list[int]:
    """Boundaries of calls of at most IOV_MAX pieces that reach about ``call_bytes``."""
    n = len(sizes)
    if n == 0:
        return []
    ends = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < n:
        start = cuts[-1]
        before = int(ends[start - 1]) if start else 0
        by_bytes = int(np.searchsorted(ends, np.uint64(before + call_bytes), side="right"))
        cuts.append(min(n, start + IOV_MAX, max(start + 1, by_bytes)))
    return cuts


def _split(pieces: npt.NDArray[np.void], size: int) -> npt.NDArray[np.void]:
    """The same bytes in pieces of at most ``size``."""
    if not (pieces["len"] > size).any():
        return pieces
    parts = -(-pieces["len"].astype(np.int64) // size)
    of = np.repeat(np.arange(len(pieces)), parts)
    within = ((np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * size).astype(np.uint64)
    return _iovec(pieces["base"][of] + within, np.minimum(pieces["len"][of] - within, np.uint64(size)))


def _iovec(base: npt.ArrayLike, sizes: npt.ArrayLike) -> npt.NDArray[np.void]:
    base = np.asarray(base, np.uint64)
    out = np.empty(len(base), _IOVEC)
    out["base"] = base
    out["len"] = sizes
    return out


def _transfer(
    direction: Direction,
    peer: Peer,
    local: npt.NDArray[np.void],
    remote: npt.NDArray[np.void],
    may_go_on: MayGoOn | None = None,
) -> None:
    """One call, repeated while it is partial. ``local`` and ``remote`` pair up piece by piece.

    Raises :class:`EngineGone` or :class:`TransferError` (its cause is the ``OSError``), and what ``may_go_on`` does.
    """
    call = _CALLS[direction]
    while len(local):
        if peer_exited(peer.pidfd):
            raise EngineGone(f"process {peer.pid} has ended", "")
        if may_go_on is not None:
            may_go_on()  # last: this process may be stopped between any two lines, and the call writes
        moved = call(peer.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
        if moved < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code == errno.ESRCH or peer_exited(peer.pidfd):
                raise EngineGone(f"process {peer.pid} has ended", "")
            error = OSError(code, os.strerror(code))
            raise TransferError(f"{call.__name__} of process {peer.pid}: {error.strerror}", "") from error
        if direction is Direction.STORE and peer_exited(peer.pidfd):
            raise EngineGone(f"process {peer.pid} ended during a copy", "")
        local, remote = _rest(local, remote, moved)


def _rest(
    local: npt.NDArray[np.void], remote: npt.NDArray[np.void], moved: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """What is left of a call that moved ``moved`` bytes."""
    ends = np.cumsum(local["len"])
    if moved == int(ends[-1]):
        return local[:0], remote[:0]
    whole = int(np.searchsorted(ends, np.uint64(moved), side="right"))
    inside = np.uint64(moved - (int(ends[whole - 1]) if whole else 0))
    local, remote = local[whole:].copy(), remote[whole:].copy()
    for side in (local, remote):
        side["base"][0] += inside
        side["len"][0] -= inside
    return local, remote
