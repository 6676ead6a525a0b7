"""Touching the pool's pages in the background, so that no first request pays for it.

A page fault per 4 KiB costs about a second per GiB when it happens under a copy. ``MADV_POPULATE_WRITE`` in slices, through
ctypes (no GIL), from a few threads, does it beforehand: 625 ms per GiB with two threads on 4 KiB pages, about 100 on huge
pages. It changes no byte, so it may run while the pool is in use. On a DAX device a byte of every mapping unit is read instead:
its faults map whole units and need no memory.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
import threading
import time
from dataclasses import dataclass

import numpy as np

from maru_sidecar import hostmemory
from maru_sidecar.pool import PoolFile

SLICE = 64 << 20  #: bytes per call: a stop is obeyed within about 50 ms
_PAGE = 4096
_RETRIES = 100  #: EAGAIN and EINTR per slice


class PrefaultState(enum.Enum):
    IDLE = "idle"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PrefaultProgress:
    """``rate`` in bytes per second since the start; ``error`` says what failed and where (FAILED only)."""

    state: PrefaultState
    done_bytes: int
    total_bytes: int
    rate: float
    error: str


class Prefault:
    """One pass over one pool's mapping. :meth:`stop` (or the end of the pass) must come before the pool is closed."""

    def __init__(self, pool: PoolFile, *, threads: int | None = None, slice_bytes: int = SLICE) -> None:
        self._pool = pool
        self._slice = max(_PAGE, slice_bytes // _PAGE * _PAGE)
        self._offsets = itertools.count(0, self._slice)  # shared by the threads: next() is atomic under the GIL
        # On an ordinary filesystem a write fault would dirty every page and send the whole pool to disk.
        self._advice = hostmemory.MADV_POPULATE_WRITE if pool.filesystem.in_memory else hostmemory.MADV_POPULATE_READ
        self._touch_step = min(self._slice, pool.filesystem.page_bytes) if pool.filesystem.is_device else 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = 0
        self._started = self._ended = 0.0
        self._error = ""
        count = threads if threads is not None else max(1, min(8, (os.cpu_count() or 1) // 2))
        self._threads = [threading.Thread(target=self._work, name=f"prefault-{i}", daemon=True) for i in range(count)]
        self._running = 0

    def start(self) -> None:
        self._started = time.monotonic()
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask the threads to end and wait for them: one slice at most."""
        self._stop.set()
        self.join()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end; False if ``timeout`` seconds were not enough."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in self._threads)

    def progress(self) -> PrefaultProgress:
        with self._lock:
            total = self._pool.mapping.size
            seconds = (self._ended or time.monotonic()) - self._started if self._started else 0.0
            if self._error:
                state = PrefaultState.FAILED
            elif self._done >= total:
                state = PrefaultState.DONE
            elif self._running:
                state = PrefaultState.RUNNING
            else:
                state = PrefaultState.STOPPED if self._started else PrefaultState.IDLE
            return PrefaultProgress(state, self._done, total, self._done / seconds if seconds > 0 else 0.0, self._error)

    def _work(self) -> None:
        total = self._pool.mapping.size
        failure = ""
        try:
            while not self._stop.is_set():
                offset = next(self._offsets)
                if offset >= total:
                    break
                length = min(self._slice, total - offset)
                failed = self._populate(offset, length)
                if failed:
                    failure = (
                        f"prefault at offset {offset} of {total}: {os.strerror(failed)} ({errno.errorcode.get(failed, failed)})"
                    )
                    break
                with self._lock:
                    self._done += length
        except (OSError, ValueError) as e:  # ValueError: the mapping was closed under us
            failure = f"prefault: {e}"
        finally:
            with self._lock:
                if failure:
                    self._error = self._error or failure
                    self._stop.set()
                self._running -= 1
                if not self._running:
                    self._ended = time.monotonic()

    def _populate(self, offset: int, length: int) -> int:
        """0 or the errno."""
        if self._touch_step:
            return self._touch(offset, length, self._touch_step)
        for _ in range(_RETRIES):
            failed = hostmemory.madvise(self._pool.mapping.address + offset, length, self._advice)
            if failed == errno.EINVAL:  # before Linux 5.14: read a byte of every page instead
                return self._touch(offset, length, _PAGE)
            if failed not in (errno.EAGAIN, errno.EINTR):
                return failed
        return failed

    def _touch(self, offset: int, length: int, step: int) -> int:
        """Read a byte every ``step`` bytes; numpy gives up the GIL for it."""
        np.bitwise_or.reduce(np.frombuffer(self._pool.bytes, np.uint8, length, offset)[::step])
        return 0
