"""The pool header: what a pool says of itself (``poolformat.POOL_HEADER``), read, checked and stored.

It is stored by ``pwrite`` where there is one: a kill cannot tear 100 bytes that the kernel copies in one call. hugetlbfs and
DAX devices have none; there it is stored twice through a mapping.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import uuid
from dataclasses import dataclass

from maru_shm import poolformat as F
from maru_shm.errors import PoolCorrupt, PoolError, PoolVersionMismatch
from maru_sidecar import devdax
from maru_sidecar.hostmemory import Filesystem
from maru_sidecar.pool_path import init_command

GiB = 1 << 30
_MIN_REGION = 1 << 20


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """The pool header, decoded (``poolformat.POOL_HEADER``). Sizes in bytes."""

    flags: int
    uuid: bytes
    pool_bytes: int
    region_bytes: int
    n_regions: int  #: including region 0, which holds this header
    created_ns: int
    boot_id: bytes
    clean: int
    epoch: int  #: rises at every open

    def pack(self) -> bytes:
        fields = (self.flags, self.uuid, self.pool_bytes, self.region_bytes, self.n_regions, self.created_ns)
        last = (self.boot_id, self.clean, self.epoch)
        return F.with_crc(F.POOL_HEADER.pack(F.POOL_MAGIC, F.FORMAT, *fields, *last))

    @staticmethod
    def unpack(raw: bytes, name: str) -> PoolHeader:
        """Decode and check. Raises :class:`PoolVersionMismatch` or :class:`PoolCorrupt`; the magic was checked before."""
        _, version, flags, uid, size, region, n, created, boot, clean, epoch = F.POOL_HEADER.unpack_from(raw)
        if version != F.FORMAT:
            raise PoolVersionMismatch(
                f"pool {name} has format {version}, this program knows {F.FORMAT}",
                "run the release that wrote it, or start with --pool-recreate to drop its contents",
            )
        if not F.crc_matches(raw, F.POOL_HEADER.size):
            raise PoolCorrupt(
                f"pool {name} has a header that fails its checksum", "start with --pool-recreate; its contents are lost"
            )
        if region <= 0 or region % F.DATA_ALIGN or n < 2 or size != n * region:
            raise PoolCorrupt(
                f"pool {name} claims {n} regions of {region} bytes in {size} bytes",
                "start with --pool-recreate; its contents are lost",
            )
        return PoolHeader(flags, uid, size, region, n, created, boot, clean, epoch)


def boot_id() -> bytes:
    """16 bytes that name this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return uuid.UUID(f.read().strip()).bytes


def plan_regions(size: int, region_size: int, page_bytes: int = F.DATA_ALIGN) -> tuple[int, int]:
    """``(region_bytes, n_regions)`` for a pool of at most ``size`` bytes. Raises :class:`PoolError` if not two regions fit.

    Automatic: the largest power of two up to 1 GiB that gives at least 16 regions, since region 0 holds only the header.
    """
    region = region_size
    if region == 0:
        region = _MIN_REGION
        while region < GiB and region * 2 * 16 <= size:
            region *= 2
        region = max(region, page_bytes)
    if region < 0 or region % F.DATA_ALIGN or region % page_bytes:
        raise PoolError(f"region size {region}", f"use a positive multiple of {max(page_bytes, F.DATA_ALIGN)} bytes")
    if size < 2 * region:
        raise PoolError(
            f"pool of {size} bytes holds {max(size, 0) // region} regions of {region} bytes",
            f"at least 2 are needed: make it {2 * region} bytes or more, or its regions smaller",
        )
    return region, size // region


def medium_bytes(fd: int) -> int:
    """Size of what the pool lies in: a file's length, a device's size."""
    device = devdax.of(fd)
    return os.fstat(fd).st_size if device is None else device.size


def is_blank(fd: int, fs: Filesystem) -> bool:
    """Whether the file holds nothing yet. On hugetlbfs, where a header cannot be the first write, zeros count as nothing."""
    if os.fstat(fd).st_size == 0:
        return True
    return fs.kind == "hugetlbfs" and not any(os.pread(fd, F.HEADER_BYTES, 0))


def read_page(fd: int) -> bytes:
    """The header's page, shorter if there is less. Raises :class:`PoolError` if a device cannot be mapped."""
    device = devdax.of(fd)
    if device is None:
        return os.pread(fd, F.HEADER_BYTES, 0)
    with map_medium(fd, device.align, mmap.PROT_READ) as mapped:
        return mapped[: F.HEADER_BYTES]


def map_medium(fd: int, size: int, access: int) -> mmap.mmap:
    """Map ``size`` bytes from the start; on a device a multiple of its alignment. Raises :class:`PoolError`."""
    try:
        return mmap.mmap(fd, size, mmap.MAP_SHARED, access)
    except (OSError, ValueError) as e:  # ValueError: longer than the file
        raise PoolError(
            f"{os.readlink(f'/proc/self/fd/{fd}')}: {size} bytes cannot be mapped: {e}",
            "check RLIMIT_AS, and of a device its mode (`daxctl list`)",
        ) from e


def read_magic(fd: int, name: str) -> bytes:
    raw = read_page(fd)
    if len(raw) < F.HEADER_BYTES or struct.unpack_from("<Q", raw)[0] != F.POOL_MAGIC:
        if devdax.of(fd) is not None:
            raise PoolError(
                f"DAX device {name} holds no maru pool",
                f"{init_command(name)} makes one (--own: for one sidecar alone); a sidecar never does on a device",
            )
        raise PoolError(
            f"{name} is a file of {os.fstat(fd).st_size} bytes that is no maru pool", "name another path, or remove it"
        )
    return raw


def read_header(fd: int, name: str) -> PoolHeader:
    """The header. Raises :class:`PoolError` for no pool, :class:`PoolVersionMismatch`, :class:`PoolCorrupt`."""
    raw = read_magic(fd, name)
    copy = raw[F.POOL_HEADER_COPY_OFFSET :]
    if not F.crc_matches(raw, F.POOL_HEADER.size) and F.crc_matches(copy, F.POOL_HEADER.size) and copy[:8] == raw[:8]:
        raw = copy  # a kill tore the header while it was stored through a mapping
    try:
        return PoolHeader.unpack(raw, name)
    except (PoolCorrupt, PoolVersionMismatch) as e:
        if devdax.of(fd) is None:
            raise
        remedy = f"{init_command(name, '--overwrite')} makes a new pool; what is on the device is lost"
        raise type(e)(e.what, remedy) from None


def write_header(fd: int, header: PoolHeader) -> None:
    """Store the header, flushed to the medium where that can be done."""
    raw = header.pack().ljust(F.HEADER_BYTES, b"\0")
    if (device := devdax.of(fd)) is not None:
        _store_mapped(fd, device.align, header.pack())
        return
    try:
        os.pwrite(fd, raw, 0)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise PoolError(f"pool header: {e.strerror}", "check the filesystem") from e
        # hugetlbfs: no write(2)
        page = os.fstatvfs(fd).f_bsize
        if os.fstat(fd).st_size < page:
            os.posix_fallocate(fd, 0, page)
        _store_mapped(fd, page, header.pack())
    else:
        os.fsync(fd)


def _store_mapped(fd: int, length: int, packed: bytes) -> None:
    """Store through a mapping, which a kill can interrupt at any byte: the copy first, so that one of the two is whole."""
    with map_medium(fd, length, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        at = F.POOL_HEADER_COPY_OFFSET
        mapped[at : at + len(packed)] = packed
        mapped[: len(packed)] = packed
