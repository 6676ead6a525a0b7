"""Making a pool of an empty file: space checked, header first, then the bytes.

- Size by ``posix_fallocate``, never by ``ftruncate``: a file larger than its tmpfs truncates fine and the first touch is
  SIGBUS.
- The header is written first, marked CREATING, and the file is sized afterwards: at no moment is there a non-empty file at
  its path that is not a pool, so a creation killed half-way is resumed.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from maru_shm import file_limit
from maru_shm import poolformat as F
from maru_shm.errors import PoolError, PoolTooLarge
from maru_sidecar import hostmemory
from maru_sidecar.pool_header import GiB, PoolHeader, boot_id, plan_regions, write_header
from maru_sidecar.pool_spec import PoolSpec

_SLICE = GiB  #: fallocate step, so that progress can be told: about 0.5 s with 4 KiB pages

#: Called as ``progress(done_bytes, total_bytes)`` while the file is being sized; may raise to give up.
Progress = Callable[[int, int], None]


def check_space(fd: int, fs: hostmemory.Filesystem, wanted: int, spec: PoolSpec, name: str) -> None:
    """Preflight: a clear answer before minutes of allocation. ``posix_fallocate`` still has the last word."""
    free = hostmemory.free_bytes(fd, fs)
    if free is not None and wanted > free:
        remedy = f"lower {_size_setting(spec)}, or enlarge the filesystem ({fs.kind or 'memfd'})"
        raise PoolTooLarge(_no_room(name, wanted, free), remedy)
    if fs.uses_ram and wanted > (ram := hostmemory.available_ram()):
        raise PoolTooLarge(_no_room(name, wanted, ram), f"lower {_size_setting(spec)}: the machine has no more memory")


def _size_setting(spec: PoolSpec) -> str:
    """What the size came from: shared pools are made by `pool init` alone."""
    return "--size" if spec.shared else "pool.size"


def _no_room(name: str, wanted: int, free: int) -> str:
    return f"pool {name} wants {wanted} bytes ({wanted / GiB:.1f} GiB), {free} bytes ({free / GiB:.1f} GiB) are free"


def create(
    fd: int, fs: hostmemory.Filesystem, spec: PoolSpec, name: str, progress: Progress | None, *, created: bool
) -> tuple[PoolHeader, list[str]]:
    """Make a pool of an empty file; on failure the file is gone again (or empty, if it was there before)."""
    try:
        region, n = plan(fs, spec)
        flags = F.FLAG_CREATING | (F.FLAG_SHARED if spec.shared else 0)
        header = PoolHeader(flags, uuid.uuid4().bytes, n * region, region, n, time.time_ns(), boot_id(), 0, 0)
        check_space(fd, fs, header.pool_bytes, spec, name)
        write_header(fd, header)
        return size_file(fd, header, spec, name, progress)
    except BaseException:
        # Nothing maps it yet and nobody else holds the lock.
        if created:
            os.unlink(name)
        else:
            os.ftruncate(fd, 0)
        raise


def plan(fs: hostmemory.Filesystem, spec: PoolSpec) -> tuple[int, int]:
    """``(region_bytes, n_regions)`` of the pool that ``spec`` asks for. Raises :class:`PoolError`."""
    return plan_regions(spec.size, spec.region_size, fs.region_unit)


def size_file(
    fd: int, header: PoolHeader, spec: PoolSpec, name: str, progress: Progress | None
) -> tuple[PoolHeader, list[str]]:
    """Give the file its bytes and end CREATING; returns the header and warnings. Zeros are unformatted regions."""
    total = header.pool_bytes
    warnings = []
    try:
        with hostmemory.allocating_on(spec.numa_node) as refused:
            if refused:
                warnings.append(f"numa_refused: node {spec.numa_node}: {refused}")
            for done in range(0, total, _SLICE):
                if progress is not None:
                    progress(done, total)
                os.posix_fallocate(fd, done, min(_SLICE, total - done))
    except OSError as e:
        if limit := file_limit.remedy_for(total):
            raise PoolTooLarge(f"pool {name} of {total} bytes: {e.strerror}", limit) from e
        if e.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
            raise PoolError(f"pool {name} of {total} bytes: {e.strerror}", "check the filesystem") from e
        free = hostmemory.free_bytes(fd, hostmemory.filesystem_of(fd)) or 0
        raise PoolTooLarge(_no_room(name, total, free), f"lower {_size_setting(spec)}, or enlarge the filesystem") from e
    if progress is not None:
        progress(total, total)
    header = replace(header, flags=header.flags & ~F.FLAG_CREATING)
    write_header(fd, header)
    return header, warnings
