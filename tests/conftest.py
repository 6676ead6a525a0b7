"""Fixtures for all tests, and one check at the end: nothing of ours is left behind."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator

import psutil
import pytest

from maru_shm import segment as segments
from maru_shm.errors import MaruError

SETTLE_S = 10.0  #: a process that was just killed takes its memory down first


def _orphans() -> set[str]:
    """Segments whose sidecar is gone, and pools that this process made."""
    found = set(glob.glob(f"/dev/shm/maru-test-pool-{os.getpid()}-*"))
    for name, *_ in segments.list_names():
        try:
            segment = segments.open_readonly(name)
        except MaruError:  # being made or removed this moment
            continue
        owner, started = segment.info.sidecar_pid, segment.info.sidecar_start
        segment.close()
        if not segments.process_runs(owner, started):
            found.add(name)
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the run if it leaves shared memory without an owner, or a child process."""
    before = _orphans()
    yield
    for path in glob.glob(f"/dev/shm/maru-test-pool-{os.getpid()}-*.lock"):  # they stay, by design, as pools do
        if not os.path.exists(path.removesuffix(".lock")):
            os.unlink(path)
    deadline = time.monotonic() + SETTLE_S
    while left := _orphans() - before:
        if time.monotonic() > deadline:
            pytest.fail(f"left in /dev/shm: {sorted(left)}", pytrace=False)
        time.sleep(0.1)
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    _, alive = psutil.wait_procs(children, timeout=SETTLE_S)
    assert not alive, f"still running: {[child.cmdline() for child in alive]}"
