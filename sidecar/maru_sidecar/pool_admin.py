"""What an operator does to a shared pool, or to any on a DAX device: initialise it, look at it, empty it.

Nothing else ever writes a shared pool's header, and nothing else makes one on a device.

On this machine the pool's lock keeps these apart from sidecars that use the pool. Sidecars of other machines cannot be seen
from here: stopping them first is the operator's part.
"""

from __future__ import annotations

import mmap
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from maru_shm import poolformat as F
from maru_shm.errors import PoolError, PoolTooLarge
from maru_sidecar import devdax, hostmemory
from maru_sidecar.pool_checks import check_extent
from maru_sidecar.pool_create import create
from maru_sidecar.pool_header import (
    PoolHeader,
    boot_id,
    map_medium,
    medium_bytes,
    plan_regions,
    read_header,
    read_page,
    write_header,
)
from maru_sidecar.pool_lock import PoolLock
from maru_sidecar.pool_path import open_existing, unopenable
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.sharing import owner
from maru_sidecar.slab_header import region_layout


@dataclass(frozen=True, slots=True)
class RegionView:
    """A region as its header and slab headers tell it. ``owner``: the node's id in hex, empty if none is named."""

    region: int
    owner: str
    token: int
    slab_bytes: int  #: 0: not formatted
    slabs: int
    committed: int
    writing: int


def initialise(
    path: str, size: int, region_size: int = 0, *, mode: int = 0o660, own: bool = False, overwrite: bool = False
) -> PoolHeader:
    """Make a pool of ``size`` bytes at ``path``: a file that must not exist or be empty, or a DAX device (0: all of it).

    A device keeps its mode, may hold a pool of one sidecar's ``own`` (files of that kind the sidecar makes by itself) and must
    begin with a page of zeros, unless ``overwrite``. Raises :class:`PoolError` otherwise, and as ``PoolFile.open`` does.
    """
    spec = PoolSpec(backend="file", path=path, size=size, region_size=region_size, mode=mode, shared=not own)
    if devdax.is_device(path):
        return _initialise_device(spec, overwrite=overwrite)
    if own or not size:
        raise PoolError(
            f"{path} is no device", "give --size; a sidecar makes the file of a pool of its own by itself, without --own"
        )
    with PoolLock(path, mode) as guard:
        return _initialise_file(spec, guard)


def _initialise_file(spec: PoolSpec, guard: PoolLock) -> PoolHeader:
    path, mode = spec.path, spec.mode
    created = not os.path.exists(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if created else 0), mode)
    except OSError as e:
        raise unopenable(path, e) from e
    try:
        guard.confirm(fd)
        if (present := os.fstat(fd).st_size) != 0:
            raise PoolError(
                f"{path} holds {present} bytes already", "only an empty file is initialised: remove it first if it may go"
            )
        header, _ = create(fd, hostmemory.filesystem_of(fd), spec, path, None, created=created)
        os.fchmod(fd, mode)
        return header
    finally:
        os.close(fd)


def _initialise_device(spec: PoolSpec, *, overwrite: bool) -> PoolHeader:
    path = spec.path
    with ExitStack() as held:
        fd = devdax.open_device(path, os.O_RDWR)
        held.callback(os.close, fd)
        held.enter_context(PoolLock(path, spec.mode, beside=False)).confirm(fd)
        there = medium_bytes(fd)
        if spec.size > there:
            raise PoolTooLarge(f"a pool of {spec.size} bytes on {path}, which has {there}", "leave --size out, or lower it")
        page = read_page(fd)
        if any(page) and not overwrite:
            what = "a pool already" if int.from_bytes(page[:8], "little") == F.POOL_MAGIC else "data, and not of a pool"
            remedy = f"maru-sidecar pool clear {path} empties a pool; --overwrite makes a new one, and what is there is lost"
            raise PoolError(f"DAX device {path} holds {what}", remedy)
        unit = hostmemory.filesystem_of(fd).region_unit
        region, n = plan_regions(spec.size or there, spec.region_size, unit)
        flags = F.FLAG_CREATING | (F.FLAG_SHARED if spec.shared else 0)
        header = PoolHeader(flags, uuid.uuid4().bytes, n * region, region, n, time.time_ns(), boot_id(), 0, 0)
        return _empty(fd, header)


def _empty(fd: int, header: PoolHeader) -> PoolHeader:
    """Store the header with every region unformatted. Killed in between, it is marked CREATING, and nobody opens it."""
    header = replace(header, flags=header.flags | F.FLAG_CREATING)
    write_header(fd, header)
    with map_medium(fd, header.pool_bytes, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        for index in range(1, header.n_regions):
            at = index * header.region_bytes
            mapped[at : at + F.HEADER_BYTES] = bytes(F.HEADER_BYTES)
    if devdax.of(fd) is None:
        os.fsync(fd)
    header = replace(header, flags=header.flags & ~F.FLAG_CREATING)
    write_header(fd, header)
    return header


def inspect(path: str) -> tuple[PoolHeader, list[RegionView]]:
    """Header and regions of a pool, in use or not; nothing is locked or written."""
    fd = open_existing(path, os.O_RDONLY)
    try:
        header = read_header(fd, path)
        check_extent(fd, header, path)
        with map_medium(fd, header.pool_bytes, mmap.PROT_READ) as mapped:
            return header, [_view(mapped, header.region_bytes, i) for i in range(1, header.n_regions)]
    finally:
        os.close(fd)


def _view(mapped: mmap.mmap, region_bytes: int, index: int) -> RegionView:
    base = index * region_bytes
    page = mapped[base : base + F.HEADER_BYTES]
    record = owner.parse(page[F.REGION_OWNER_OFFSET :])
    layout = region_layout(page, region_bytes)
    committed = writing = 0
    if layout is not None:
        headers = mapped[base + F.HEADER_BYTES : base + F.HEADER_BYTES + layout[1] * F.SLAB_HEADER_BYTES]
        states = np.frombuffer(headers, F.SLAB_HEADER)["state"] & 0xFF
        committed, writing = int((states == F.SlabState.COMMITTED).sum()), int((states == F.SlabState.WRITING).sum())
    stride, slabs = (layout[0], layout[1]) if layout is not None else (0, 0)
    return RegionView(
        index, record.node.hex() if record else "", record.token if record else 0, stride, slabs, committed, writing
    )


def clear(path: str) -> PoolHeader:
    """Forget everything in a shared pool or one on a device. It gets a new UUID, so what a server still knows of it names
    another device.

    Raises :class:`~maru_shm.errors.PoolBusy` while a sidecar of this machine uses it.
    """
    with _clearable(path) as (fd, header):
        return _empty(fd, replace(header, uuid=uuid.uuid4().bytes))


def check_clearable(path: str) -> None:
    """Raise what :func:`clear` would raise now, and change nothing: before somebody is asked whether to go on."""
    with _clearable(path):
        pass


@contextmanager
def _clearable(path: str) -> Iterator[tuple[int, PoolHeader]]:
    """A pool that may be emptied, locked: its descriptor and header."""
    with ExitStack() as held:
        beside = not devdax.is_device(path)
        if beside:
            os.close(open_existing(path, os.O_RDONLY))  # what is not there has no lock
        guard = held.enter_context(PoolLock(path, 0o660, beside=beside))
        fd = open_existing(path)
        held.callback(os.close, fd)
        guard.confirm(fd)
        header = read_header(fd, path)
        if not header.flags & F.FLAG_SHARED and devdax.of(fd) is None:
            raise PoolError(f"pool {path} is not shared", "use `maru-sidecar cache clear`, or run with --pool-recreate")
        check_extent(fd, header, path)
        yield fd, header
