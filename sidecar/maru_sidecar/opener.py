"""Opening the pool, in a thread of its own: sizing, the directory, the leases of the generation before. It may take minutes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maru_sidecar import harvest
from maru_sidecar.config import Config
from maru_sidecar.directory import Directory
from maru_sidecar.eviction import Watermarks
from maru_sidecar.pool import PoolFile

if TYPE_CHECKING:
    from maru_sidecar.sharing.node import Node

log = logging.getLogger(__name__)


class GivenUp(Exception):
    """The daemon stops before its pool is open."""


@dataclass(slots=True)
class Opening:
    """How far the pool is."""

    done_bytes: int = 0
    total_bytes: int = 0
    began_s: float = 0.0
    seconds: float = 0.0  #: once it is open


@dataclass(frozen=True, slots=True)
class Found:
    """What was opened. ``node``: where the pool is shared."""

    pool: PoolFile
    directory: Directory
    node: Node | None
    harvested: harvest.Harvest


class PoolOpener:
    """Opens a pool once. ``ended`` is called in the main thread, with what was found or what went wrong."""

    def __init__(
        self,
        config: Config,
        instance: str,
        pool_fd: int | None,
        opening: Opening,
        *,
        call_soon: Callable[[Callable[[], None]], None],
        ended: Callable[[Found | BaseException], None],
    ) -> None:
        """``pool_fd``: the pool, from a service manager, consumed here; None: at its path."""
        self._config = config
        self._instance = instance
        self._pool_fd = pool_fd
        self._opening = opening
        self._call_soon = call_soon
        self._ended = ended
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="maru-open", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def give_up(self) -> None:
        """Stop where the pool is only half there (any thread)."""
        self._given_up = True

    def close(self) -> None:
        """It was never started."""
        if self._pool_fd is not None:
            os.close(self._pool_fd)
            self._pool_fd = None

    # --- the thread ---------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._opening.began_s = time.monotonic()
        found: Found | BaseException
        try:
            found = self._open()
            self._opening.seconds = time.monotonic() - self._opening.began_s
        except BaseException as e:  # noqa: BLE001 - raised again in the main thread
            found = e
        self._call_soon(lambda: self._ended(found))

    def _open(self) -> Found:
        cache, path = self._config.cache, self._config.pool.file_path
        pool = self._open_file()
        try:
            for warning in pool.warnings:
                log.warning("pool %s: %s", path, warning)
            directory, node = self._make_directory(pool, Watermarks(cache.high_watermark, cache.low_watermark))
            report = directory.rebuild()
            harvested = harvest.sweep(
                self._instance, directory, max_ttl_s=cache.lease_ttl_s, max_bytes=self._config.limits.segment_bytes
            )
            dropped = {what: n for what, n in report.as_dict().items() if n and what not in ("kept", "bytes")}
            log.info(
                "pool %s: %d slabs kept, dropped: %s; %d leases taken over",
                path, report.kept, dropped or "none", harvested.leases,
            )  # fmt: skip
        except BaseException:
            pool.close(clean=False)
            raise
        return Found(pool, directory, node, harvested)

    def _make_directory(self, pool: PoolFile, marks: Watermarks) -> tuple[Directory, Node | None]:
        cache = self._config.cache
        if not self._config.server.endpoint:
            return Directory(pool, watermarks=marks, default_quota=cache.namespace_quota), None
        from maru_sidecar.sharing.node import Node

        node = Node(self._config, pool, self._instance, self._call_soon)
        directory = Directory(
            pool, watermarks=marks, default_quota=cache.namespace_quota, rights=node.rights, mine=node.claimed,
            events=node.events,
        )  # fmt: skip
        node.bind(directory, lease_ttl_s=cache.lease_ttl_s)
        return directory, node

    def _open_file(self) -> PoolFile:
        if self._pool_fd is None:
            return PoolFile.open(self._config.pool, self._progress)
        try:
            return PoolFile.from_fd(self._pool_fd, self._config.pool, self._progress)
        finally:
            self.close()

    def _progress(self, done: int, total: int) -> None:
        self._opening.done_bytes, self._opening.total_bytes = done, total
        if self._given_up:
            raise GivenUp
