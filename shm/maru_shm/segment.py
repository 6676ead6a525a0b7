"""Create, open, map and sweep the hot-path segment of one client (layout in ``layout.py``).

The sidecar creates a segment per attached client and hands its file descriptor over the control socket; the name stays
in ``/dev/shm`` while the session lives, so that ``maru-ring`` can look at it read-only. Names carry the instance (a hash
of the control socket's path) and the generation (new at every sidecar start): ``/maru.<instance>.<generation>.<session>``.
Whoever holds the instance's lock may sweep every other generation.

``posix_fallocate`` sizes the segment: a full tmpfs is ENOSPC here, not SIGBUS at the first touch.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import posix_ipc

from maru_shm import file_limit
from maru_shm import layout as L
from maru_shm.errors import SegmentCorrupt, SegmentError, SegmentNotReady, SegmentVersionMismatch

SHM_DIR = "/dev/shm"
NAME_PREFIX = "maru."
_NAME = re.compile(r"^maru\.(?P<instance>[0-9a-f]{8})\.(?P<generation>[0-9a-f]{16})\.(?P<session>\d+)$")


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The static block: what the creator wrote once."""

    generation: int  #: the sidecar's generation (u64)
    session: int
    shape: L.SegmentShape
    sidecar_pid: int
    client_pid: int
    sidecar_start: int  #: clock ticks since boot; pid and start time together name a process
    created_ns: int  #: ns since the epoch
    instance: str
    role: L.Role
    abi: tuple[int, int] = (L.ABI_MAJOR, L.ABI_MINOR)

    @property
    def name(self) -> str:
        return segment_name(self.instance, self.generation, self.session)


def segment_name(instance: str, generation: int, session: int) -> str:
    """POSIX shared-memory name, with its leading slash."""
    return f"/{NAME_PREFIX}{instance}.{generation:016x}.{session}"


def _process_stat(pid: int) -> list[bytes]:
    """``/proc/<pid>/stat`` from its third field on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def process_start_time(pid: int) -> int:
    """Start time of ``pid`` in clock ticks since boot (field 22), which names it together with the pid; 0 if there is no
    such process. A zombie has one: whether it runs is :func:`process_runs`'s matter.
    """
    fields = _process_stat(pid)
    return int(fields[19]) if fields else 0


def process_runs(pid: int, start_time: int | None = None) -> bool:
    """Whether ``pid`` runs, and is the process that started at ``start_time`` if one is given (0: none ever did).

    A process that has ended and was not waited for (a zombie, which lasts where a container's first process reaps nothing)
    does not. One whose main thread alone has ended still does: its state (field 3) is Z too, its other threads (field 20) may
    be copying.
    """
    fields = _process_stat(pid) if pid > 0 else []
    if not fields or (fields[0] in (b"Z", b"X") and int(fields[17]) <= 1):
        return False
    return start_time is None or int(fields[19]) == start_time != 0


class Segment:
    """A mapped segment: ``words`` (u64 view), ``bytes`` (u8 view), ``shape`` and ``info``.

    Close it with :meth:`close`; the mapping goes when no view is left.
    """

    __slots__ = ("_mmap", "bytes", "fd", "info", "shape", "words")

    def __init__(self, mapped: mmap.mmap, info: SegmentInfo, fd: int = -1) -> None:
        self._mmap = mapped
        self.bytes = memoryview(mapped)
        self.words = self.bytes.cast("Q")
        self.info = info
        self.shape = info.shape
        self.fd = fd  #: -1 unless this side owns an open descriptor

    @property
    def mapped(self) -> bool:
        return not self._mmap.closed

    def close(self) -> None:
        """Unmap (idempotent). The name, if any, stays: see :func:`unlink`."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.words.release()
        self.bytes.release()
        # BufferError: a view is still held, by an operation that another thread has in flight; the last view unmaps.
        try:
            self._mmap.close()
        except BufferError:
            return


def create(info: SegmentInfo, mode: int = 0o600) -> Segment:
    """Create and publish a segment; the descriptor stays open in ``Segment.fd`` for handing over.

    Raises :class:`SegmentError` if the name exists or memory is short.
    """
    info.shape.check()
    total = info.shape.total_bytes
    try:
        shm = posix_ipc.SharedMemory(info.name, posix_ipc.O_CREX, mode=mode)  # no size: it would ftruncate
    except posix_ipc.ExistentialError as e:
        raise SegmentError(
            f"segment {info.name} exists", "another sidecar of this instance runs, or sweep stale segments"
        ) from e
    fd = os.dup(shm.fd)
    os.set_inheritable(fd, False)
    shm.close_fd()
    try:
        os.posix_fallocate(fd, 0, total)
        segment = Segment(mmap.mmap(fd, total), info, fd)
    except OSError as e:
        os.close(fd)
        unlink(info.name)
        hint = "enlarge /dev/shm or lower the record limits" if e.errno == errno.ENOSPC else file_limit.remedy_for(total)
        raise SegmentError(f"segment {info.name} of {total} bytes: {e.strerror}", hint or "see errno") from e
    s = info.shape
    L.STATIC.pack_into(
        segment.bytes, L.STATIC_OFFSET, L.ENDIAN_MARK, L.ABI_MAJOR, L.ABI_MINOR, total, info.generation, info.session,
        s.n_slots, s.n_records, s.cell_bytes, s.reply_bytes, info.sidecar_pid, info.client_pid, 0, info.sidecar_start,
        info.created_ns, info.instance.encode(), info.role.encode(),
    )  # fmt: skip
    L.STATIC_CRC.pack_into(segment.bytes, L.STATIC_CRC_OFFSET, _static_crc(segment.bytes))
    now = time.monotonic_ns()
    segment.words[L.WORD_SIDECAR_BEAT] = now
    segment.words[L.WORD_CLIENT_BEAT] = now
    segment.words[L.WORD_MAGIC] = L.SEGMENT_MAGIC  # SYNC POINT: published last
    return segment


def _static_crc(data: memoryview) -> int:
    return zlib.crc32(data[L.STATIC_OFFSET : L.STATIC_CRC_OFFSET])


def map_fd(fd: int, *, writable: bool) -> Segment:
    """Map a segment from a descriptor (not consumed), after checking everything its header claims.

    Raises :class:`SegmentNotReady`, :class:`SegmentVersionMismatch` or :class:`SegmentCorrupt`.
    """
    size = os.fstat(fd).st_size
    if size < L.RING_OFFSET:
        raise SegmentNotReady(f"segment has {size} bytes", f"expected at least {L.RING_OFFSET}")
    info = _read_info(memoryview(os.pread(fd, L.HEADER_BYTES, 0)), size)  # before it is mapped: its size may be a lie
    try:
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except (OSError, ValueError, OverflowError) as e:
        raise SegmentError(f"segment of {size} bytes cannot be mapped: {e}", "free memory, or restart the sidecar") from e
    return Segment(mapped, info)


def _read_info(view: memoryview, size: int) -> SegmentInfo:
    magic = int.from_bytes(view[:8], "little")
    if magic != L.SEGMENT_MAGIC:
        raise SegmentNotReady(f"segment magic is {magic:#018x}", "it is still being filled, or is no maru segment")
    (endian, major, minor, total, generation, session, slots, records, cell, reply, sidecar_pid, client_pid, _, start,
     created, instance, role) = L.STATIC.unpack_from(view, L.STATIC_OFFSET)  # fmt: skip
    if endian != L.ENDIAN_MARK or major != L.ABI_MAJOR:
        raise SegmentVersionMismatch(
            f"segment has ABI {major}.{minor}, this program {L.ABI_MAJOR}.{L.ABI_MINOR}", "run the same release on both sides"
        )
    (crc,) = L.STATIC_CRC.unpack_from(view, L.STATIC_CRC_OFFSET)
    if crc != _static_crc(view):
        raise SegmentCorrupt(f"segment header checksum is {crc:#010x}", "restart the sidecar; it makes a new segment")
    shape = L.SegmentShape(slots, records, cell, reply)
    shape.check()
    if total != size or shape.total_bytes != size:
        raise SegmentCorrupt(
            f"segment has {size} bytes, its header says {total}", "restart the sidecar; it makes a new segment"
        )
    try:
        parsed_role = L.Role(role.rstrip(b"\0").decode())
        parsed_instance = instance.rstrip(b"\0").decode("ascii")
    except ValueError as e:
        raise SegmentCorrupt(f"segment names role {role!r} of instance {instance!r}", "restart the sidecar") from e
    return SegmentInfo(
        generation, session, shape, sidecar_pid, client_pid, start, created, parsed_instance, parsed_role, (major, minor)
    )


def open_readonly(name: str, *, owner: int | None = None) -> Segment:
    """Map the named segment read-only: it cannot be disturbed (debugging tools, a new sidecar).

    Anybody may put something under such a name: only a regular file is opened, of user ``owner`` if given. Raises
    :class:`SegmentError` and its kinds, nothing else.
    """
    try:
        fd = os.open(SHM_DIR + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as e:
        raise SegmentNotReady(f"segment {name} does not exist", "list live segments with `maru-ring ls`") from e
    except OSError as e:
        raise SegmentError(f"segment {name} may not be opened: {e.strerror}", "run as the sidecar's user or root") from e
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise SegmentError(f"{SHM_DIR}{name} is no regular file", "remove it; no sidecar made it")
        if owner is not None and info.st_uid != owner:
            raise SegmentError(f"segment {name} belongs to uid {info.st_uid}", "remove it; this sidecar did not make it")
        return map_fd(fd, writable=False)
    finally:
        os.close(fd)


def unlink(name: str) -> bool:
    """Remove a segment's name; False if it was gone already. Raises :class:`SegmentError` if it may not be removed."""
    try:
        os.unlink(SHM_DIR + name)
    except FileNotFoundError:
        return False
    except OSError as e:
        raise SegmentError(f"{SHM_DIR}{name} cannot be removed: {e.strerror}", "remove it as its owner or root") from e
    return True


def list_names(instance: str | None = None) -> Iterator[tuple[str, str, int, int]]:
    """Yield ``(name, instance, generation, session)`` for each segment in ``/dev/shm``, oldest name first."""
    for entry in sorted(os.listdir(SHM_DIR)):
        match = _NAME.match(entry)
        if match and instance in (None, match["instance"]):
            yield "/" + entry, match["instance"], int(match["generation"], 16), int(match["session"])
