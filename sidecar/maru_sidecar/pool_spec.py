"""What pool a sidecar is told to use: the ``[pool]`` section of its configuration."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

SHM_DIR = "/dev/shm"
MAX_NODES = 1024  #: NUMA nodes that a policy's mask has bits for


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What pool to open.

    ``backend`` ``shm``: ``path`` is a POSIX name (one component, ``maru-pool`` or ``/maru-pool``) or a path in a tmpfs.
    ``file``: any path on fsdax, hugetlbfs or an ordinary filesystem. ``devdax``: a DAX device, which is recognised under
    ``file`` and ``shm`` too; here anything else is refused. ``size`` in bytes, rounded down to whole regions; on a device and
    of a shared pool it is the header's instead.
    """

    backend: Literal["shm", "file", "devdax"] = "shm"
    path: str
    size: int
    region_size: int = 0  #: bytes, a multiple of 4 KiB; 0: 1 GiB, or a sixteenth of a pool below 16 GiB
    hugepages: bool = True  #: ask for transparent huge pages (tmpfs mounted or set to ``advise``)
    numa_node: int | None = None  #: below MAX_NODES
    recreate: bool = False  #: remove an existing *pool* first, whatever its size or format
    mode: int = 0o600  #: permission bits of a file to be made, whatever the umask
    #: several sidecars use it (same file or device, each under its own path), each writing what a metadata server granted it;
    #: it must have been initialised by `maru-sidecar pool init`
    shared: bool = False
    coherence: Literal["hardware", "flush"] = "hardware"  #: of a shared pool between hosts

    @property
    def file_path(self) -> str:
        """Absolute path of the file."""
        if self.backend == "shm" and "/" not in self.path.removeprefix("/"):
            return f"{SHM_DIR}/{self.path.removeprefix('/')}"
        return os.path.abspath(self.path)
