"""What ``doctor``'s checks look at, and what they find."""

from __future__ import annotations

import enum
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from maru_sidecar.pool_spec import PoolSpec

if TYPE_CHECKING:
    from maru_sidecar.config import Config


class Verdict(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was found and, unless it is fine, what to do."""

    check: str
    verdict: Verdict
    what: str
    remedy: str = ""

    def row(self) -> dict[str, object]:
        return asdict(self) | {"verdict": self.verdict.value}


@dataclass(frozen=True, slots=True)
class Host:
    """What is examined. ``pool_bytes``: the configured size; of a shared pool, as of one on a device, the header's counts.

    ``server``: the metadata server's endpoint, empty if none is configured.
    """

    pool_path: str
    pool_bytes: int
    socket_path: str
    pool_backend: str = "shm"
    root: str = ""
    uid: int = field(default_factory=os.getuid)
    pool: PoolSpec | None = None  #: None: of a pool of one's own, with this path and size
    server: str = ""
    token_file: str = ""
    socket_group: str = ""  #: as configured; empty: the daemon's own

    @classmethod
    def of(cls, config: Config) -> Host:
        """This machine, for that configuration."""
        pool, server = config.pool, config.server
        return cls(
            pool.file_path, pool.size, config.control.socket, pool.backend, pool=pool, server=server.endpoint,
            token_file=server.token_file, socket_group=config.control.group,
        )  # fmt: skip

    @property
    def spec(self) -> PoolSpec:
        """The pool as a sidecar would open it."""
        return self.pool or PoolSpec(backend="file", path=self.pool_path, size=self.pool_bytes)

    def read(self, path: str) -> str | None:
        """Contents of a small file under the root; None if there is none or it may not be read."""
        try:
            with open(self.root + path, encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return None

    def meminfo(self, field: str) -> int | None:
        """A line of ``/proc/meminfo`` in bytes (of a line without unit: 1024 times its number)."""
        for line in (self.read("/proc/meminfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
        return None
