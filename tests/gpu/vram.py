"""How much memory of the GPUs is in use, as the driver tells any process."""

from __future__ import annotations

import subprocess
import time


def used_mib() -> int:
    """Over all GPUs."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())


def wait_until_used(limit: int) -> None:
    """Wait until at most ``limit`` MiB are in use."""
    deadline = time.monotonic() + 30
    while (used := used_mib()) > limit:
        assert time.monotonic() < deadline, f"{used} MiB are still in use, expected at most {limit}"
        time.sleep(0.2)
