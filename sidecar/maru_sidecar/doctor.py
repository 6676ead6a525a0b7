"""``maru-sidecar doctor``: what about this machine would make the sidecar refuse, crawl or surprise, and the remedy.

Each check returns findings; a check that cannot look says so in one. Checks only read, and no device context is made; stale
segments are unlinked by ``stale.remove_stale`` alone.

Paths below ``/proc`` and ``/sys`` are taken under :attr:`Host.root`, so that a copy of a machine's files
can be examined too.
"""

from __future__ import annotations

import ctypes
import glob
import grp
import os
import platform
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence

from maru_shm.atomics import require_supported_platform
from maru_shm.errors import MaruError, PlatformUnsupported
from maru_shm.socket_path import user_directory
from maru_sidecar.doctor_host import Finding, Host, Verdict
from maru_sidecar.doctor_pool import check_pool_contents, check_pool_file, check_pool_space, pool_bytes
from maru_sidecar.output import human_bytes
from maru_sidecar.stale import Liveness, survey_segments

__all__ = ["CHECKS", "SETTINGS", "Finding", "Host", "Verdict", "examine"]
SERVER_TIMEOUT_MS = 2000
Check = Callable[[Host], Iterator[Finding]]
MIN_KERNEL = (5, 14)  #: MADV_POPULATE_WRITE; pidfd_open is older (5.3)
MIN_PYTHON = (3, 11)
MIN_FDS = 4096  #: 3 descriptors per session (socket, segment, doorbell), a pidfd and one per imported allocation
SYSTEM_UID_MAX = 999  #: logind's RemoveIPC spares system users (Debian's and Red Hat's SYS_UID_MAX)


def examine(host: Host, checks: Sequence[Check] | None = None) -> list[Finding]:
    """Every check, or those given, in order."""
    return [finding for check in (CHECKS if checks is None else checks) for finding in check(host)]


# --- memory -----------------------------------------------------------------------------------------------------------------
def check_memlock(host: Host) -> Iterator[Finding]:
    """CUDA pins the pool for the copy engine, within RLIMIT_MEMLOCK of an unprivileged process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or host.uid == 0:
        yield Finding("memlock limit", Verdict.OK, "unlimited" if soft == resource.RLIM_INFINITY else "root is not bound by it")
    elif soft < (wanted := pool_bytes(host)):
        what = f"RLIMIT_MEMLOCK is {human_bytes(soft)}, the pool {human_bytes(wanted)}: it may not be pinned for the GPU"
        yield Finding("memlock limit", Verdict.WARN, what, "LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`")
    else:
        yield Finding("memlock limit", Verdict.OK, human_bytes(soft))


def check_huge_pages(host: Host) -> Iterator[Finding]:
    """Huge pages make prefault and registration about ten times faster, and a dying process quick to reap.

    A mounted tmpfs goes by its ``huge=`` option (the pool advises the kernel, so ``advise`` is enough); of the global
    switch only ``deny`` and ``force`` reach it.
    """
    shmem = host.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or ""
    switch = shmem.partition("[")[2].partition("]")[0] or "missing"
    mount = _mount_of(host, host.pool_path)
    where, kind, options = mount or (os.path.dirname(host.pool_path), "unknown", "")
    huge = next((o for o in options.split(",") if o.startswith("huge=")), "huge=never")
    what = f"{where} is {kind}, {huge}, shmem_enabled {switch}"
    slow = f"{what}: 4 KiB pages, prefault takes about 0.5 s per GiB; with huge pages 0.003 s"
    if kind == "hugetlbfs":
        yield Finding("huge pages", Verdict.OK, f"{where} is hugetlbfs")
    elif kind != "tmpfs":
        yield Finding("huge pages", Verdict.OK, f"{where} is {kind}: its own matter")
    elif switch in ("deny", "missing"):
        yield Finding("huge pages", Verdict.WARN, slow, "allow THP for shmem in this kernel, or put the pool on hugetlbfs")
    elif switch == "force" or huge != "huge=never":
        yield Finding("huge pages", Verdict.OK, what)
    else:
        yield Finding("huge pages", Verdict.WARN, slow, f"mount -o remount,huge=advise {where}")
    reserved, free = host.read("/proc/sys/vm/nr_hugepages") or "0", _meminfo_count(host, "HugePages_Free")
    yield Finding("hugetlb pages", Verdict.OK, f"{reserved} reserved, {free} free (needed for a pool on hugetlbfs only)")


def _meminfo_count(host: Host, field: str) -> int:
    value = host.meminfo(field)
    return 0 if value is None else value // 1024


def _mount_of(host: Host, path: str) -> tuple[str, str, str] | None:
    """``(mount point, type, options)`` of the filesystem that holds ``path``: the longest prefix, the last mount wins."""
    best: tuple[str, str, str] | None = None
    for line in (host.read("/proc/self/mounts") or "").splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = fields[1].replace(r"\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and (best is None or len(point) >= len(best[0])):
            best = point, fields[2], fields[3]
    return best


def check_numa(host: Host) -> Iterator[Finding]:
    """A pool on the GPU's node saves a hop per copy."""
    nodes = _nodes(host)
    if len(nodes) <= 1:
        yield Finding("NUMA", Verdict.OK, "one node")
        return
    gpus = []
    for address in sorted(glob.glob(host.root + "/proc/driver/nvidia/gpus/*")):
        bus = os.path.basename(address)
        gpus.append(f"GPU {bus} on node {host.read(f'/sys/bus/pci/devices/{bus}/numa_node') or 'unknown'}")
    what = f"{len(nodes)} nodes" + (": " + ", ".join(gpus) if gpus else "")
    if host.spec.numa_node is not None:
        yield Finding("NUMA", Verdict.OK, f"{what}; pool.numa_node is set")
    else:
        yield Finding("NUMA", Verdict.WARN, what, "set pool.numa_node to the node of the GPUs it serves")


def check_node(host: Host) -> Iterator[Finding]:
    """Is there the node that the pool is to lie on? The sidecar would start without it, and its memory come from anywhere."""
    wanted, nodes = host.spec.numa_node, _nodes(host) or [0]
    if wanted is None:
        yield Finding("NUMA node", Verdict.OK, "left to the kernel")
    elif wanted not in nodes:
        what = f"pool.numa_node is {wanted}: this machine has no such node"
        yield Finding("NUMA node", Verdict.WARN, what, f"one of {', '.join(map(str, nodes))}, or leave it out")
    else:
        yield Finding("NUMA node", Verdict.OK, f"pool.numa_node is {wanted}")


def _nodes(host: Host) -> list[int]:
    return sorted(int(path.rpartition("node")[2]) for path in glob.glob(host.root + "/sys/devices/system/node/node[0-9]*"))


# --- kernel and interpreter ---------------------------------------------------------------------------------------------------
def check_kernel(host: Host) -> Iterator[Finding]:
    release = host.read("/proc/sys/kernel/osrelease") or platform.release()
    numbers = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit()]
    if tuple(numbers) < MIN_KERNEL:
        remedy = "run 5.14 or later; on an older kernel prefault falls back to fallocate"
        yield Finding("kernel", Verdict.WARN, f"Linux {release}", remedy)
    else:
        yield Finding("kernel", Verdict.OK, f"Linux {release}")


def check_python(_host: Host) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] < MIN_PYTHON:
        yield Finding("python", Verdict.BAD, version, "run 3.11 or later")
    else:
        yield Finding("python", Verdict.OK, f"{platform.python_implementation()} {version}")


def check_memory_ordering(_host: Host) -> Iterator[Finding]:
    try:
        require_supported_platform()
    except PlatformUnsupported as e:
        yield Finding("memory ordering", Verdict.BAD, e.what, e.remedy)
    else:
        yield Finding("memory ordering", Verdict.OK, platform.machine())


def check_ptrace(host: Host) -> Iterator[Finding]:
    """CPU engines are copied with process_vm_readv/writev, which the kernel allows as it allows ptrace."""
    scope = host.read("/proc/sys/kernel/yama/ptrace_scope")
    if host.uid == 0 and scope != "3":
        yield Finding(
            "ptrace scope", Verdict.OK, f"{'no yama' if scope is None else scope}; root may copy a CPU engine's memory"
        )
    elif scope in (None, "0"):
        what = "no yama" if scope is None else "0"
        yield Finding("ptrace scope", Verdict.OK, f"{what}: a CPU engine of the same user can be copied")
    elif scope == "1":
        what = "1: a CPU engine must name the sidecar with PR_SET_PTRACER (the connector does); GPU engines are not concerned"
        yield Finding("ptrace scope", Verdict.OK, what)
    else:
        what = f"{scope}: a CPU engine's memory cannot be copied; GPU engines are not concerned"
        yield Finding("ptrace scope", Verdict.WARN, what, "sysctl kernel.yama.ptrace_scope=1, if CPU engines are to be served")


def check_descriptors(_host: Host) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_FDS:
        what = f"RLIMIT_NOFILE is {soft} (hard {hard})"
        yield Finding("descriptors", Verdict.WARN, what, f"LimitNOFILE=65536 in the unit, or `ulimit -n {MIN_FDS}`")
    else:
        yield Finding("descriptors", Verdict.OK, f"RLIMIT_NOFILE is {soft}")


def check_cuda(host: Host) -> Iterator[Finding]:
    """The driver's version, through libcuda, without a context: no memory is taken on any GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        devices = glob.glob(host.root + "/dev/nvidia[0-9]*")
        if devices:
            what = f"{len(devices)} GPU device files but no libcuda.so.1"
            yield Finding(
                "CUDA driver",
                Verdict.BAD,
                what,
                "install the driver's user-space part (libcuda1), or mount it in the container",
            )
        else:
            yield Finding("CUDA driver", Verdict.OK, "none: CPU engines only")
        return
    version = ctypes.c_int(0)
    error = driver.cuDriverGetVersion(ctypes.byref(version))
    text = f"libcuda speaks CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if error:
        yield Finding("CUDA driver", Verdict.BAD, f"cuDriverGetVersion failed with {error}", "reinstall the driver")
    elif host.read("/proc/driver/nvidia/version") is None:
        what = f"{text}, but the kernel module is not loaded"
        yield Finding(
            "CUDA driver", Verdict.WARN, what, "modprobe nvidia nvidia-uvm, or ignore where only CPU engines are served"
        )
    else:
        yield Finding("CUDA driver", Verdict.OK, text)


# --- files and processes ------------------------------------------------------------------------------------------------------
def check_socket_place(host: Host) -> Iterator[Finding]:
    """Can the socket be made where it is to lie, for the group that is to have it?"""
    directory = os.path.dirname(host.socket_path)
    if not os.path.isdir(directory) and directory != user_directory():
        what = f"the directory of {host.socket_path} does not exist"
        yield Finding("socket place", Verdict.BAD, what, f"create {directory}, or set control.socket to another path")
    else:
        yield Finding("socket place", Verdict.OK, directory)
    if not host.socket_group:
        return
    try:
        grp.getgrnam(host.socket_group)
    except KeyError:
        what = f"control.group is {host.socket_group!r}: no such group"
        yield Finding("socket group", Verdict.BAD, what, "create it (groupadd --system), or name another")
    else:
        yield Finding("socket group", Verdict.OK, host.socket_group)


def check_socket(host: Host) -> Iterator[Finding]:
    path = host.socket_path
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        yield Finding("control socket", Verdict.OK, f"{path} does not exist: no sidecar runs there")
        return
    except OSError as e:
        yield Finding(
            "control socket", Verdict.BAD, f"{path}: {e.strerror}", "join the socket's group, or run as the sidecar's user"
        )
        return
    if not stat.S_ISSOCK(mode):
        yield Finding("control socket", Verdict.BAD, f"{path} is no socket", "remove it, or set control.socket to another path")
    elif mode & 0o002:
        what = f"{path} has mode {stat.S_IMODE(mode):04o}: every local user may attach"
        yield Finding("control socket", Verdict.WARN, what, "set control.mode to 0660, or list uids in control.allowed_uids")
    elif not os.access(path, os.W_OK):
        what = f"{path} has mode {stat.S_IMODE(mode):04o}, closed to this user"
        yield Finding("control socket", Verdict.BAD, what, "join the socket's group, or run as the sidecar's user")
    elif not _answers(path):
        what = f"{path} is there, nobody listens"
        yield Finding("control socket", Verdict.WARN, what, "start the sidecar; it replaces a socket nobody listens on")
    else:
        yield Finding("control socket", Verdict.OK, f"{path} (mode {stat.S_IMODE(mode):04o}) answers")


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(2.0)
        try:
            sock.connect(path)
        except OSError:
            return False
    return True


def check_server(host: Host) -> Iterator[Finding]:
    """Does the metadata server answer this node's token? Nothing is registered there: it is only pinged."""
    if not host.server:
        yield Finding("metadata server", Verdict.OK, "none configured: the pool is not shared")
        return
    from maru_server.extra import REMEDY

    try:
        from maru_server.auth import read_token
        from maru_server.connection import Connection
        from maru_server.protocol import Ping
    except ImportError as e:
        yield Finding("metadata server", Verdict.BAD, f"its client cannot be imported ({e})", REMEDY)
        return
    try:
        connection = Connection(host.server, read_token(host.token_file or None))
        try:
            connection.call(Ping(), SERVER_TIMEOUT_MS)
        finally:
            connection.close()
    except MaruError as e:
        yield Finding("metadata server", Verdict.BAD, e.what, e.remedy)
    else:
        yield Finding("metadata server", Verdict.OK, f"{host.server} answers")


def check_remove_ipc(host: Host) -> Iterator[Finding]:
    """logind deletes a user's shared memory when the last session ends, unless the user is a system user."""
    if not os.path.isdir(host.root + "/run/systemd/system"):
        yield Finding("RemoveIPC", Verdict.OK, "no systemd here")
    elif host.uid <= SYSTEM_UID_MAX:
        yield Finding("RemoveIPC", Verdict.OK, f"uid {host.uid} is a system user: logind leaves its shared memory alone")
    elif _logind_keeps_ipc(host):
        yield Finding("RemoveIPC", Verdict.OK, "RemoveIPC=no")
    else:
        what = f"uid {host.uid} is no system user: logind may delete its pool and segments at logout"
        yield Finding(
            "RemoveIPC",
            Verdict.WARN,
            what,
            "run as a system user (sysusers.d/maru-sidecar.conf), or RemoveIPC=no in logind.conf",
        )


def _logind_keeps_ipc(host: Host) -> bool:
    value = ""
    for path in ("/etc/systemd/logind.conf", *sorted(glob.glob(host.root + "/etc/systemd/logind.conf.d/*.conf"))):
        for line in (host.read(path.removeprefix(host.root)) or "").splitlines():
            key, _, setting = line.partition("=")
            value = setting.strip().lower() if key.strip() == "RemoveIPC" else value
    return value in ("no", "false", "0", "off")


def check_fd_store(_host: Host) -> Iterator[Finding]:
    if "NOTIFY_SOCKET" not in os.environ:
        yield Finding("service manager", Verdict.OK, "not run by one: no watchdog, no descriptor store")
    elif os.environ.get("FDSTORE", "0") in ("", "0"):  # set by systemd 254 and later
        what = "the manager offers no descriptor store (or is older than systemd 254, which names it)"
        yield Finding("service manager", Verdict.WARN, what, "FileDescriptorStoreMax=64 in the unit")
    else:
        yield Finding("service manager", Verdict.OK, f"descriptor store for {os.environ['FDSTORE']} descriptors")


def check_segments(_host: Host) -> Iterator[Finding]:
    """Segments whose sidecar is gone hold memory until someone unlinks them."""
    live = 0
    for name, state in survey_segments():
        if isinstance(state, MaruError):
            yield Finding("segments", Verdict.WARN, state.what if name in state.what else f"{name}: {state.what}", state.remedy)
        elif state is Liveness.STALE:
            yield Finding(
                "segments", Verdict.WARN, f"{name} is stale: sidecar and engine are dead", "maru-sidecar doctor --fix"
            )
        elif state is Liveness.AWAITED:
            what = f"{name}: of an earlier sidecar; its engine lives"
            remedy = "a running sidecar honours its leases and then removes it; start one if none runs"
            yield Finding("segments", Verdict.WARN, what, remedy)
        elif state is Liveness.ELSEWHERE:
            what = f"{name}: no such process here, but its beat is fresh (a sidecar in another pid namespace)"
            yield Finding("segments", Verdict.OK, what)
        else:
            live += 1
    yield Finding("segments", Verdict.OK, f"{live} live")


CHECKS: Sequence[Check] = (
    check_kernel, check_python, check_memory_ordering, check_pool_space, check_pool_file, check_pool_contents, check_server,
    check_huge_pages, check_numa, check_node, check_memlock, check_descriptors, check_ptrace, check_cuda, check_socket_place,
    check_socket, check_fd_store, check_remove_ipc, check_segments,
)  # fmt: skip
#: what this machine has to have for a configuration, the pool itself left alone: `run --check` looks at these
SETTINGS: Sequence[Check] = (check_node, check_socket_place)
