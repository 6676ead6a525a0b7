"""Whether a pool that is there is the one wanted: its header against its file or device, and against the configuration."""

from __future__ import annotations

import os

from maru_shm import poolformat as F
from maru_shm.errors import PoolCorrupt, PoolError
from maru_sidecar import devdax, hostmemory
from maru_sidecar.pool_header import PoolHeader, medium_bytes, read_header
from maru_sidecar.pool_path import init_command
from maru_sidecar.pool_spec import PoolSpec


def check_usable(fd: int, spec: PoolSpec, name: str) -> PoolHeader:
    """The header of a pool that is there, if a sidecar would open it for ``spec`` as it is. Raises as :meth:`PoolFile.open`."""
    if spec.shared or devdax.of(fd) is not None:
        return read_initialised(fd, spec, name)
    header = read_header(fd, name)
    if header.flags & F.FLAG_SHARED:
        raise PoolError(f"pool {name} is shared", "set pool.shared = true, or name another path")
    if not (header.flags & F.FLAG_CREATING or spec.recreate):  # else it is resumed, or made anew
        check_matches(fd, header, spec, name)
    return header


def read_initialised(fd: int, spec: PoolSpec, name: str) -> PoolHeader:
    """The header of a pool that must have been initialised for what ``spec`` wants. Raises :class:`PoolError`."""
    if spec.recreate:
        raise PoolError(f"pool {name} is not recreated by a sidecar", f"empty it with maru-sidecar pool clear {name}")
    header = read_header(fd, name)
    if header.flags & F.FLAG_CREATING:
        raise PoolError(f"pool {name} is half initialised", f"once more: {_anew(name)}")
    if spec.shared and not header.flags & F.FLAG_SHARED:
        raise PoolError(f"pool {name} was not initialised for sharing", f"{_anew(name)}; or set pool.shared = false")
    if not spec.shared and header.flags & F.FLAG_SHARED:
        raise PoolError(f"pool {name} is shared", f"set pool.shared = true; or make one's own of it: {_anew(name, '--own')}")
    check_extent(fd, header, name)
    if spec.region_size and spec.region_size != header.region_bytes:
        raise PoolError(
            f"pool {name} has regions of {header.region_bytes} bytes, wanted are {spec.region_size}",
            "leave pool.region_size out: it is the header's",
        )
    return header


def check_extent(fd: int, header: PoolHeader, name: str) -> None:
    """Whether the pool lies within its file or device, in regions that can be mapped. Raises :class:`PoolCorrupt`."""
    if (there := medium_bytes(fd)) < header.pool_bytes:
        raise PoolCorrupt(f"pool {name} has {header.pool_bytes} bytes by its header, there are {there}", "initialise it anew")
    unit = hostmemory.filesystem_of(fd).region_unit
    if header.region_bytes % unit:
        raise PoolCorrupt(
            f"pool {name} has regions of {header.region_bytes} bytes, its device maps multiples of {unit}",
            "initialise it anew, or give the device the alignment it had (daxctl reconfigure-device --align)",
        )


def check_matches(fd: int, header: PoolHeader, spec: PoolSpec, name: str) -> None:
    """The file against its header, then the header against the wish.

    Another size is refused rather than adopted: a pool silently smaller or larger than configured is found out under load.
    """
    actual = os.fstat(fd).st_size
    if actual < header.pool_bytes:
        raise PoolCorrupt(
            f"pool {name} was truncated: {actual} bytes, its header says {header.pool_bytes}",
            "start with --pool-recreate; its contents are lost",
        )
    remedy = "start with --pool-recreate to drop its contents, or configure the size it has"
    if spec.region_size and spec.region_size != header.region_bytes:
        raise PoolError(f"pool {name} has regions of {header.region_bytes} bytes, wanted are {spec.region_size}", remedy)
    wanted = spec.size // header.region_bytes * header.region_bytes
    if wanted != header.pool_bytes:
        raise PoolError(f"pool {name} has {header.pool_bytes} bytes, wanted are {spec.size}", remedy)


def _anew(path: str, *options: str) -> str:
    """How to make a pool where there is one: a file is removed first, so that nothing is lost by a slip of the pen."""
    if devdax.is_device(path):
        return f"{init_command(path, *options, '--overwrite')} (what it holds is lost)"
    return f"remove the file, then {init_command(path, *options)}"
