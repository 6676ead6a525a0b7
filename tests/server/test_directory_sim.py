"""The directory simulation runs at a small size with nothing but the sources on its path, and draws what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def simulate(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    blocked = tmp_path / "path"
    blocked.mkdir()
    for package in ("zmq", "redis", "psutil", "posix_ipc", "matplotlib"):  # a machine that has none of them can run it
        (blocked / f"{package}.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(blocked), *(str(ROOT / d) for d in ("shm", "sidecar", "connector", "server"))])
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "directory_sim.py"), "--nodes", "2", "--chunks", "20000", *options],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


def test_it_measures_draws_and_extrapolates(tmp_path: Path) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    done = simulate(tmp_path, "--largest", "60000", "--extrapolate-to", "500000", "--json", str(out), "--svg", str(svg))
    found = json.loads(out.read_text())
    assert [(r["chunks"], r["how"]) for r in found["rows"]] == [
        (20_000, "measured"),
        (60_000, "measured"),
        (500_000, "extrapolated"),
    ]
    assert all(r["lookup_us_p50"] > 0 and r["bytes_per_key"] > 0 for r in found["rows"])
    assert found["machine"]["cores"] == os.cpu_count()
    circles = ET.parse(svg).getroot().findall(".//{http://www.w3.org/2000/svg}circle")
    assert len([c for c in circles if c.get("fill") == "white"]) == 3, "one extrapolated point in each panel"
    assert "2 nodes, 60,000 chunks: filled" in done.stderr


def test_what_does_not_fit_in_time_is_measured_with_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = simulate(tmp_path, "--largest", "200000", "--budget-s", "0.01", "--extrapolate-to", "200000", "--json", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert rows[-1]["how"] == "extrapolated"
    assert 0 < rows[-2]["chunks"] < 200_000
    assert "s are over, measuring with" in done.stderr
