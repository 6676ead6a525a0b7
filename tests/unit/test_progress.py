"""What is said while a pool is opened and touched: on a terminal, in the log, to the service manager."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.prefault import Prefault
from maru_sidecar.progress import StartReport


@dataclass
class Opening:
    done_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0


@dataclass
class Sidecar:
    opening: Opening = field(default_factory=Opening)
    prefault: Prefault | None = None


@pytest.fixture
def pool() -> Iterator[PoolFile]:
    path = Path(f"/dev/shm/maru-test-pool-{os.getpid()}-progress")
    opened = PoolFile.open(PoolSpec(path=str(path), size=8 << 20))
    yield opened
    opened.close(clean=True)
    path.unlink()


def test_the_manager_is_told_each_change_once_and_nothing_after_the_end(pool: PoolFile) -> None:
    told: list[str] = []
    sidecar = Sidecar()
    report = StartReport(sidecar, told.append)
    report()
    sidecar.opening = Opening(2 << 30, 8 << 30)
    report()
    report()
    sidecar.prefault = Prefault(pool)
    report()
    sidecar.prefault.start()
    assert sidecar.prefault.join(30)
    report()
    report()
    assert told == [
        "opening the pool",
        "opening the pool 2.0 GiB of 8.0 GiB (25 %)",
        "ready, touching the pool 0 B of 8.0 MiB (0 %)",
        "ready, 8.0 MiB touched",
    ]
    assert report.over


def test_a_terminal_gets_one_line_that_is_redrawn_and_cleared(pool: PoolFile) -> None:
    terminal = io.StringIO()
    sidecar = Sidecar(Opening(1 << 30, 2 << 30))
    report = StartReport(sidecar, lambda _: None, terminal)
    report()
    sidecar.prefault = Prefault(pool)
    sidecar.prefault.start()
    sidecar.prefault.join(30)
    report()
    assert terminal.getvalue() == ("\x1b[K[###############...............] opening the pool 1.0 GiB of 2.0 GiB (50 %)\r\x1b[K")


def test_without_a_terminal_the_log_has_a_line_per_ten_per_cent(caplog: pytest.LogCaptureFixture) -> None:
    sidecar = Sidecar()
    report = StartReport(sidecar, lambda _: None)
    with caplog.at_level(logging.INFO):
        for percent in range(0, 100, 2):
            sidecar.opening = Opening(percent << 20, 100 << 20)
            report()
    assert len(caplog.messages) == 10
    assert caplog.messages[3] == "opening the pool 30.0 MiB of 100.0 MiB (30 %)"


def test_a_stopped_prefault_ends_the_report(pool: PoolFile) -> None:
    told: list[str] = []
    sidecar = Sidecar(prefault=Prefault(pool, threads=0))
    assert sidecar.prefault is not None
    sidecar.prefault.start()
    StartReport(sidecar, told.append)()
    assert told == ["stopping"]
