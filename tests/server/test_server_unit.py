"""The server's systemd unit: understood without a complaint, and hardened."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "systemd" / "maru-server.service"
MAX_EXPOSURE = 2.0  #: an unhardened unit has 9.6

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def analyze(*arguments: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", *arguments, str(UNIT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_systemd_has_nothing_to_say_about_it() -> None:
    assert analyze("verify") == ""  # unknown keys still exit 0, so any output counts


def test_it_is_hardened() -> None:
    found = re.search(r"exposure level for \S+: ([\d.]+)", analyze("security", "--offline=yes"))
    assert found is not None
    assert float(found[1]) <= MAX_EXPOSURE


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    assert "Environment=MARU_SERVER_ARGS=\n" in UNIT.read_text()
