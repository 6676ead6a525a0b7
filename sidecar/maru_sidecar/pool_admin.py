"""What an operator does to a shared pool: initialise it, look at it, empty it. Nothing else ever writes its header.

On this machine the pool's lock keeps these apart from sidecars that use the pool. Sidecars of other machines cannot be seen
from here: stopping them first is the operator's part.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
from dataclasses import dataclass, replace

import numpy as np

from maru_shm import poolformat as F
from maru_shm.errors import PoolError
from maru_sidecar import hostmemory
from maru_sidecar.pool import PoolSpec, create, lock, open_existing
from maru_sidecar.pool_header import PoolHeader, read_header, write_header
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


def initialise(path: str, size: int, region_size: int = 0, *, mode: int = 0o660) -> PoolHeader:
    """Make a shared pool of ``size`` bytes at ``path``, which must not exist or be empty.

    Raises :class:`PoolError` for a file with anything in it, and as ``PoolFile.open`` does.
    """
    spec = PoolSpec(backend="file", path=path, size=size, region_size=region_size, mode=mode, shared=True)
    created = not os.path.exists(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if created else 0), mode)
    except OSError as e:
        raise PoolError(f"pool {path}: {e.strerror}", "check that the directory exists and may be written") from e
    try:
        lock(fd, path)
        if (present := os.fstat(fd).st_size) != 0:
            raise PoolError(
                f"{path} holds {present} bytes already", "only an empty file is initialised: remove it first if it may go"
            )
        header, _ = create(fd, hostmemory.filesystem_of(fd), spec, path, None, created=created)
        os.fchmod(fd, mode)
        return header
    finally:
        os.close(fd)


def inspect(path: str) -> tuple[PoolHeader, list[RegionView]]:
    """Header and regions of a pool, in use or not; nothing is locked or written."""
    fd = open_existing(path, os.O_RDONLY)
    try:
        header = read_header(fd, path)
        if os.fstat(fd).st_size < header.pool_bytes:
            raise PoolError(f"pool {path} is smaller than its header says ({header.pool_bytes} bytes)", "it was truncated")
        with mmap.mmap(fd, header.pool_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
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
    """Forget everything in a shared pool. It gets a new UUID, so what a server still knows of it names another device.

    Raises :class:`~maru_shm.errors.PoolBusy` while a sidecar of this machine uses it.
    """
    fd = open_existing(path)
    try:
        lock(fd, path, fcntl.LOCK_EX)
        header = read_header(fd, path)
        if not header.flags & F.FLAG_SHARED:
            raise PoolError(f"pool {path} is not shared", "use `maru-sidecar cache clear`, or run with --pool-recreate")
        write_header(fd, replace(header, flags=header.flags | F.FLAG_CREATING))  # killed in between, nobody opens it
        for index in range(1, header.n_regions):
            os.pwrite(fd, bytes(F.HEADER_BYTES), index * header.region_bytes)
        os.fsync(fd)
        header = replace(header, uuid=uuid.uuid4().bytes)
        write_header(fd, header)
        return header
    finally:
        os.close(fd)
