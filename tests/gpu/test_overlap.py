"""Overlapped loads on the real device: what the compute stream reads after waiting for a layer is that layer's bytes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_compute_that_waits_for_a_layer_reads_its_bytes_at_the_links_rate() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.overlap_process"],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["wrong"] == 0
    assert result["neighbours"] >= 0.8 * result["pinned"], result
    assert result["scattered"] >= 0.5 * result["pinned"], result
