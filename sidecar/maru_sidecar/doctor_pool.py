"""``doctor``'s checks of the pool: is there room for it, may it be opened, and would a sidecar take what lies there?"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from maru_shm.errors import MaruError
from maru_sidecar import devdax, hostmemory
from maru_sidecar.doctor_host import Finding, Host, Verdict
from maru_sidecar.output import human_bytes
from maru_sidecar.pool_checks import check_usable
from maru_sidecar.pool_create import plan
from maru_sidecar.pool_header import is_blank, medium_bytes, read_header
from maru_sidecar.pool_lock import flock_holders, lock_path
from maru_sidecar.pool_path import open_existing, refuse_among_devices


def check_pool_space(host: Host) -> Iterator[Finding]:
    """Does the configured pool fit where it is to lie? Memory already allocated to it counts."""
    if devdax.is_device(host.pool_path):
        yield _check_device(host.pool_path)
        return
    if misplaced(host.pool_path) is not None or host.spec.shared:  # check_pool_contents says so; a shared one has its space
        return
    directory = os.path.dirname(host.pool_path)
    try:
        fs = os.statvfs(directory)
    except OSError as e:
        yield Finding(
            "pool space", Verdict.BAD, f"{directory}: {e.strerror}", "create it, or set pool.path to a mounted filesystem"
        )
        return
    if (unfit := _unfit(host, directory)) is not None:
        yield Finding("pool space", Verdict.BAD, unfit.what, unfit.remedy)
        return
    size, free = fs.f_frsize * fs.f_blocks, fs.f_frsize * fs.f_bavail
    try:
        held = os.stat(host.pool_path).st_blocks * 512
    except OSError:
        held = 0
    need = max(0, host.pool_bytes - held)
    what = f"{directory} has {human_bytes(free)} free of {human_bytes(size)}, the pool wants {human_bytes(host.pool_bytes)}"
    what += f" and holds {human_bytes(held)}" if held else ""
    if need > free:
        remedy = f"mount -o remount,size={-(-(host.pool_bytes + (256 << 20)) >> 20)}M {directory}, or lower pool.size"
        yield Finding("pool space", Verdict.BAD, what, remedy)
    else:
        yield Finding("pool space", Verdict.OK, what)
    if host.pool_backend == "shm" and (available := host.meminfo("MemAvailable")) is not None and need > available:
        what = f"{human_bytes(available)} of memory are available, the pool wants {human_bytes(need)} more"
        yield Finding("memory", Verdict.BAD, what, "lower pool.size, or free memory: the kernel would kill processes instead")


def _unfit(host: Host, directory: str) -> MaruError | None:
    """Why a pool of that size cannot be cut into its regions there."""
    fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        plan(hostmemory.filesystem_of(fd), host.spec)
    except MaruError as e:
        return e
    finally:
        os.close(fd)
    return None


def misplaced(path: str) -> MaruError | None:
    """Why there can be no pool at a path in /dev; None anywhere else, and for a device."""
    try:
        refuse_among_devices(path)
    except MaruError as e:
        return e
    return None


def _check_device(path: str) -> Finding:
    try:
        fd = devdax.open_device(path, os.O_RDONLY)
    except MaruError as e:
        return Finding("pool space", Verdict.BAD, e.what, e.remedy)
    try:
        return Finding("pool space", Verdict.OK, f"{path} is a DAX device of {human_bytes(medium_bytes(fd))}")
    finally:
        os.close(fd)


def check_pool_contents(host: Host) -> Iterator[Finding]:
    """Would the sidecar open what lies there? An empty file and, for a pool of one's own, nothing at all are fine."""
    path = host.pool_path
    if (refused := misplaced(path)) is not None:
        yield Finding("pool", Verdict.BAD, refused.what, refused.remedy)
        return
    if not host.spec.shared and not os.path.lexists(path):
        return
    try:
        fd = open_existing(path, os.O_RDONLY)
    except MaruError as e:
        yield Finding("pool", Verdict.BAD, e.what, e.remedy)
        return
    try:
        if not host.spec.shared and is_blank(fd, hostmemory.filesystem_of(fd)):
            return
        header = check_usable(fd, host.spec, path)
    except MaruError as e:
        yield Finding("pool", Verdict.BAD, e.what, e.remedy)
    else:
        kind = "shared" if host.spec.shared else "own"
        size = f"{human_bytes(header.pool_bytes)} in {header.n_regions - 1} regions of {human_bytes(header.region_bytes)}"
        yield Finding("pool", Verdict.OK, f"{path} is a pool ({kind}), {size}")
    finally:
        os.close(fd)


def pool_bytes(host: Host) -> int:
    """Bytes of the pool that is there, where its header counts; else as configured."""
    if not host.spec.shared and not devdax.is_device(host.pool_path):
        return host.pool_bytes
    try:
        fd = open_existing(host.pool_path, os.O_RDONLY)
    except MaruError:
        return host.pool_bytes
    try:
        return read_header(fd, host.pool_path).pool_bytes
    except MaruError:
        return host.pool_bytes
    finally:
        os.close(fd)


def _is_locked(path: str) -> bool:
    """Whether a process holds the lock of the pool at ``path``, by the kernel's list: taking it would keep a sidecar out."""
    try:
        return bool(flock_holders(os.stat(lock_path(path))))
    except OSError:
        return False


def check_pool_file(host: Host) -> Iterator[Finding]:
    path = host.pool_path
    if misplaced(path) is not None or (host.spec.shared and not os.path.exists(path)):
        return  # check_pool_contents says so
    if devdax.is_device(path) and _check_device(path).verdict is not Verdict.OK:
        return  # whatever it is, its mode is right
    try:
        found = os.stat(path)
    except FileNotFoundError:
        directory = os.path.dirname(path)
        if os.path.isdir(directory) and not os.access(directory, os.W_OK):
            what = f"{path} does not exist and {directory} is closed to this user"
            yield Finding("pool file", Verdict.BAD, what, "run as the sidecar's user, or set pool.path")
        elif _is_locked(path):
            what = f"{path} does not exist, and a sidecar holds its lock: it was removed under it, and its memory stays taken"
            yield Finding("pool file", Verdict.BAD, what, "stop or restart that sidecar; stop it before its file is removed")
        else:
            yield Finding("pool file", Verdict.OK, f"{path} does not exist yet")
        return
    except OSError as e:
        yield Finding("pool file", Verdict.BAD, f"{path}: {e.strerror}", "run as the sidecar's user, or set pool.path")
        return
    mode = f"{path} (mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid})"
    if not os.access(path, os.R_OK | os.W_OK):
        yield Finding(
            "pool file", Verdict.BAD, f"{mode} is closed to this user", f"run as uid {found.st_uid}, or set pool.path"
        )
    elif stat.S_IMODE(found.st_mode) & 0o007:
        what = f"{mode} is open to every local user: cached prompts can be read or forged"
        yield Finding("pool file", Verdict.WARN, what, f"chmod o= {path}")
    else:
        yield Finding("pool file", Verdict.OK, mode)
