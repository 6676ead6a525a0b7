"""The pool file: create or reopen, lock, size, map. What lies in it is ``maru_shm.poolformat``'s and ``regions.py``'s matter.

Rules that come from failures:

- A file that is no pool is never formatted (``pool_create.py``: a creation killed half-way is one, and is resumed).
- The lock (``pool_lock.py``) is on a file beside the pool: descriptors of the pool are handed to engines and to a service
  manager's descriptor store, and none of them can hold it.
- A pool is removed by unlinking, never by truncating: an engine that still maps it must not fault.
- A shared pool (``PoolSpec.shared``) was initialised as such by an operator (``pool_admin.py``), and so was any pool on a DAX
  device (``devdax.py``): a header written over somebody's device cannot be taken back. The sidecars of a shared pool hold the
  lock shared and write no header.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import time
from dataclasses import replace

from maru_shm import poolformat as F
from maru_shm.errors import PlatformUnsupported, PoolBusy, PoolError
from maru_sidecar import devdax, hostmemory
from maru_sidecar.pool_checks import check_matches, read_initialised
from maru_sidecar.pool_create import Progress, check_space, create, plan, size_file
from maru_sidecar.pool_header import PoolHeader, boot_id, is_blank, map_medium, read_header, read_magic, write_header
from maru_sidecar.pool_lock import FLOCK, PoolLock, is_at
from maru_sidecar.pool_path import close_quietly, open_existing, open_or_create, reopen, target_of
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.transfer.base import PoolMapping


class PoolFile:
    """An open, locked, mapped pool. Made by :meth:`open` or :meth:`from_fd`; one process at a time has it.

    ``suspect`` is true after a reboot without an orderly stop: headers may have reached the medium before their data, so
    whatever cannot be checked against a checksum must be dropped. It stays true, on the medium too, until
    :meth:`contents_checked`.
    """

    def __init__(self, lock_fd: int, header: PoolHeader, spec: PoolSpec, *, suspect: bool, warnings: list[str]) -> None:
        self.spec = spec
        self.uuid = header.uuid
        self.region_bytes = header.region_bytes
        self.n_regions = header.n_regions
        self.suspect = suspect
        self.filesystem = hostmemory.filesystem_of(lock_fd)
        self._header = header
        self._lock_fd = lock_fd
        self._guard: PoolLock | None = None  #: None until it is open
        fd = reopen(lock_fd, os.O_RDWR)
        try:
            self._mmap = map_medium(fd, header.pool_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise
        self.bytes = memoryview(self._mmap)  #: u8 view of the whole pool
        self.words = self.bytes.cast("Q")  #: u64 view: an element store is one aligned mov, it does not tear
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self.mapping = PoolMapping(address, header.pool_bytes, fd)
        self._closed = False
        self._warnings = tuple(warnings + self._advise())

    @property
    def size(self) -> int:
        """Bytes, whole regions."""
        return self._header.pool_bytes

    @property
    def epoch(self) -> int:
        """Rises with every use of the pool by another process. A shared pool has no common one: seconds since 1970 serve."""
        return int(time.time()) if self.spec.shared else self._header.epoch

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is not as wished (any thread): huge pages or a NUMA node refused when it was opened, a file removed since."""
        lost = self.lost()
        return (*self._warnings, lost) if lost else self._warnings

    def lost(self) -> str:
        """A warning if the pool's path does not name it any more: it works on, but its successor will not find it. Else empty.

        A memfd has no path.
        """
        path = self.spec.file_path
        try:
            if self._closed or not self.filesystem.kind or is_at(self._lock_fd, path):
                return ""
        except OSError:  # the directory is closed to us
            return ""
        return (
            f"pool_removed: {path} was removed or replaced; its memory stays taken, and a restart begins with an empty pool: "
            "stop the sidecar before its file is removed"
        )

    @classmethod
    def open(cls, spec: PoolSpec, progress: Progress | None = None) -> PoolFile:
        """Open ``spec``'s pool, creating its file if absent; may take 0.5 s per GiB (sizing), without the GIL.

        An existing file is left as it was, unless it is a pool and ``spec.recreate``. Raises :class:`PoolBusy`,
        :class:`PoolTooLarge`, :class:`PoolVersionMismatch`, :class:`PoolCorrupt`, or :class:`PoolError` for anything else.
        """
        path = spec.file_path
        if spec.backend == "devdax" or devdax.is_device(path):
            return cls._open_initialised(spec, path)
        if spec.shared:
            os.close(open_existing(path, os.O_RDONLY))  # what is not there has no lock
            return cls._open_initialised(spec, path)
        with PoolLock(path, spec.mode) as guard:
            pool = cls._open_own(spec, path, progress, guard)
            pool._guard = guard.keep()
            return pool

    @classmethod
    def _open_own(cls, spec: PoolSpec, path: str, progress: Progress | None, guard: PoolLock) -> PoolFile:
        recreate = spec.recreate
        for _ in range(16):  # each turn lost a race against a process that removed or created the file
            fd, created = open_or_create(path, spec)
            try:
                guard.confirm(fd)
                if not is_at(fd, path):
                    os.close(fd)
                    continue
                if recreate and not created and os.fstat(fd).st_size:
                    read_magic(fd, path)
                    plan(hostmemory.filesystem_of(fd), spec)  # a wrong size must not cost the old pool
                    os.unlink(path)
                    os.close(fd)
                    recreate = False
                    continue
            except BaseException:
                close_quietly(fd)
                raise
            return cls._from_locked(fd, spec, path, progress, created=created)
        raise PoolBusy(f"pool {path} keeps being replaced", "stop the other process that creates it")

    @classmethod
    def _open_initialised(cls, spec: PoolSpec, path: str) -> PoolFile:
        """Open a pool that an operator initialised: a shared one, to which nothing is written, or one on a device."""
        kind = fcntl.LOCK_SH if spec.shared else fcntl.LOCK_EX
        with PoolLock(path, spec.mode, kind, beside=not devdax.is_device(path)) as guard:
            pool = cls._open_locked(spec, path, guard)
            pool._guard = guard.keep()
            return pool

    @classmethod
    def _open_locked(cls, spec: PoolSpec, path: str, guard: PoolLock) -> PoolFile:
        if spec.backend == "devdax" and not devdax.is_device(path):
            raise PoolError(
                f"pool.backend is devdax, and {path} is no character device", "name a /dev/daxX.Y, or set backend file"
            )
        fd = open_existing(path)
        try:
            if spec.coherence == "flush":
                raise PlatformUnsupported(
                    "pool.coherence is 'flush': writing caches back needs a native helper that this release does not have",
                    "use memory that the hardware keeps coherent between hosts, or one host, with 'hardware'",
                )
            guard.confirm(fd)
            if os.fstat(fd).st_uid not in (os.geteuid(), 0):
                raise PoolError(
                    f"pool {path} belongs to uid {os.fstat(fd).st_uid}, neither to {os.geteuid()} nor to root",
                    "a stranger's pool is not trusted: run all its sidecars as one user",
                )
            header = read_initialised(fd, spec, path)
            if spec.shared:
                return cls(fd, header, spec, suspect=False, warnings=[])
            return cls._take(fd, header, spec, [])
        except BaseException:
            close_quietly(fd)
            raise

    @classmethod
    def from_fd(cls, fd: int, spec: PoolSpec, progress: Progress | None = None) -> PoolFile:
        """Open the pool behind a descriptor (a memfd, or one kept in a descriptor store); ``fd`` itself is not consumed.

        An empty file is formatted. Raises as :meth:`open` does.
        """
        name = f"fd {fd} ({target_of(fd)})"
        if devdax.of(fd) is not None:
            return cls._open_initialised(spec, spec.file_path)  # it is at its path for as long as the machine has it
        with PoolLock(spec.file_path, spec.mode) as guard:
            own = reopen(fd, os.O_RDWR)
            try:
                guard.confirm(own)
            except BaseException:
                os.close(own)
                raise
            pool = cls._from_locked(own, spec, name, progress, created=False)
            pool._guard = guard.keep()
            return pool

    @classmethod
    def _from_locked(cls, fd: int, spec: PoolSpec, name: str, progress: Progress | None, *, created: bool) -> PoolFile:
        try:
            fs = hostmemory.filesystem_of(fd)
            warnings: list[str] = []
            if is_blank(fd, fs):
                header, warnings = create(fd, fs, spec, name, progress, created=created)
            else:
                header = read_header(fd, name)
                if header.flags & F.FLAG_SHARED:
                    raise PoolError(f"pool {name} is shared", "set pool.shared = true, or name another path")
                if header.flags & F.FLAG_CREATING:
                    check_space(fd, fs, header.pool_bytes - os.fstat(fd).st_blocks * 512, spec, name)
                    header, warnings = size_file(fd, header, spec, name, progress)
            check_matches(fd, header, spec, name)
            return cls._take(fd, header, spec, warnings)
        except BaseException:
            close_quietly(fd)
            raise

    @classmethod
    def _take(cls, fd: int, header: PoolHeader, spec: PoolSpec, warnings: list[str]) -> PoolFile:
        """Use a pool of one's own: another epoch begins."""
        suspect = header.boot_id != boot_id() and not header.clean
        header = replace(header, clean=0, epoch=header.epoch + 1, boot_id=header.boot_id if suspect else boot_id())
        write_header(fd, header)
        return cls(fd, header, spec, suspect=suspect, warnings=warnings)

    def open_readonly(self) -> int:
        """A new read-only descriptor of the pool, for a process that may only read it; the caller closes it."""
        return reopen(self._lock_fd, os.O_RDONLY)

    def contents_checked(self) -> None:
        """What survived the last boot has been checked or dropped: the pool belongs to this boot from now on."""
        if self.suspect and not self.spec.shared:
            if not self.filesystem.is_device:
                os.fsync(self._lock_fd)
            self._store(replace(self._header, boot_id=boot_id()))
        self.suspect = False

    def close(self, *, clean: bool) -> None:
        """Unmap and unlock (idempotent). ``clean`` promises that no copy is in flight: the data is flushed, then marked clean,
        so that it may be believed after a reboot (a device cannot be flushed and is not marked). Takes as long as the medium
        needs; the GIL is free.
        """
        if self._closed:
            return
        self._closed = True
        if clean and not self.suspect and not self.spec.shared and not self.filesystem.is_device:
            os.fsync(self._lock_fd)  # data first: a clean mark must never reach the medium before what it vouches for
            self._store(replace(self._header, clean=1))
        self.words.release()
        self.bytes.release()
        # BufferError: somebody still holds a view; the last one unmaps.
        with contextlib.suppress(BufferError):
            self._mmap.close()
        os.close(self.mapping.fd)
        os.close(self._lock_fd)
        if self._guard is not None:
            self._guard.close()

    def lock_node(self, name: str) -> None:
        """Take ``name`` on this machine for as long as the pool is open, by a lock on a byte far behind the end of the lock's
        file (of the pool's, on a device).

        It proves that an earlier process of this name, here, is dead. Raises :class:`PoolBusy`.
        """
        at = (1 << 62) + int.from_bytes(F.node_id(name)[:7], "little")
        fd = self._guard.fd if self._guard is not None and self._guard.fd >= 0 else self._lock_fd
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
        except OSError as e:
            if e.errno not in (errno.EAGAIN, errno.EACCES):
                raise PoolError(f"pool {self.spec.file_path}: {e.strerror}", "the filesystem must support file locks") from e
            raise PoolBusy(
                f"another sidecar uses pool {self.spec.file_path} as node {name!r}", "give each sidecar its own server.node"
            ) from None

    def _store(self, header: PoolHeader) -> None:
        write_header(self._lock_fd, header)
        self._header = header

    def _advise(self) -> list[str]:
        """Huge pages and NUMA placement, best effort; returns a named warning for each wish the kernel refused."""
        warnings = []
        address, size, fs = self.mapping.address, self.mapping.size, self.filesystem
        if self.spec.hugepages and fs.kind != "hugetlbfs" and not fs.is_device:
            failed = hostmemory.madvise(address, size, hostmemory.MADV_HUGEPAGE)
            if failed:
                warnings.append(f"hugepages_refused: madvise(MADV_HUGEPAGE): {os.strerror(failed)}")
            elif fs.kind == "tmpfs" and not fs.huge and not hostmemory.shmem_hugepages():
                warnings.append(
                    "hugepages_off: this tmpfs gives 4 KiB pages; mount it with huge=advise or use hugetlbfs "
                    "(registering the pool with a GPU is ten times faster then)"
                )
        node = self.spec.numa_node
        if node is not None and not (fs.uses_ram or fs.kind == "hugetlbfs"):
            warnings.append(f"numa_ignored: node {node}: {fs.kind} places its own pages")
        elif node is not None and (refused := hostmemory.bind_to_node(address, size, node)):
            warnings.append(f"numa_refused: node {node}: {refused}")
        return warnings
