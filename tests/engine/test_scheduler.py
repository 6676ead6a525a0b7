"""The connector under the real schedulers of vLLM 0.26.0, 0.32.0 and 0.33.0, plain and asynchronous, without a GPU.

The cases are in ``cases_*.py``. Each release runs them in a process of its own, with its Python files ahead of the
installed ones; each test here waits for its case's line.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.scheduler_cases import CASE_TIMEOUT_S, CASES, SCHEDULERS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / ".cache" / "vllm-src"
#: release → its unpacked Python files, None for the engine that is installed
RELEASES: dict[str, Path | None] = {"0.26.0": SOURCES / "0.26.0", "0.32.0": None, "0.33.0": SOURCES / "0.33.0"}
IMPORT_TIMEOUT_S = 120  #: vLLM's import takes 5 s, 30 s where no byte code is cached

NOISE = ("Initializing KVConnectorBase_V1", "Turning off hybrid kv cache manager")  #: printed for every engine
NAME = "test_under_vllm"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(IMPORT_TIMEOUT_S + 2 * CASE_TIMEOUT_S)]


class Matrix:
    """All chosen cases under one release, in a process of their own."""

    def __init__(self, release: str, chosen: list[str], directory: Path) -> None:
        self._release = release
        self._results = directory / "results.jsonl"
        self._results.touch()
        self._log = directory / "log.txt"
        self._lines: list[dict[str, object]] = []
        source = RELEASES[release]
        if source is not None and not (source / "vllm").is_dir():
            pytest.fail(f"{source} is missing: make setup")
        path = [*([str(source)] if source else []), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("scheduler_cases.py")),
                    self._results,
                    directory / "model",
                    *chosen,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path),
                    "VLLM_LOGGING_LEVEL": "WARNING",
                    "OMP_NUM_THREADS": "1",
                },
            )

    def wait_for(self, timeout: float, **fields: str) -> dict[str, object]:
        """The first line that has these fields."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self._process.poll() is not None
            lines = self._results.read_text().splitlines(keepends=True)
            self._lines = [json.loads(line) for line in lines if line.endswith("\n")]
            for line in self._lines:
                if fields.items() <= line.items() if fields else "vllm" in line:
                    return line
            if ended or time.monotonic() > deadline:
                why = f"exit status {self._process.returncode}" if ended else f"{timeout:.0f} s passed"
                pytest.fail(
                    f"vLLM {self._release}: no result for {fields or 'the import'} ({why}):\n{self._tail()}", pytrace=False
                )
            time.sleep(0.05)

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not any(noise in line for noise in NOISE)][-25:])

    def result(self, case: str, scheduler: str) -> str:
        """What went wrong in this case, empty if nothing did."""
        first = self.wait_for(IMPORT_TIMEOUT_S)
        assert str(first["vllm"]).startswith(self._release), f"{first['vllm']} was imported instead of {self._release}"
        error = str(self.wait_for(2 * CASE_TIMEOUT_S, case=case, scheduler=scheduler)["error"])
        return f"{error}\n--- vLLM's log\n{self._tail()}" if error else ""

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        for left in glob.glob(f"/dev/shm/maru-test-pool-{self._process.pid}-*"):  # only where a run was cut short
            os.unlink(left)


@pytest.fixture(scope="module")
def matrix_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Matrix]]:
    """release → its matrix, started when that release's first test asks; one runs at a time (two cores)."""
    started: dict[str, Matrix] = {}

    def get(release: str) -> Matrix:
        if release not in started:
            for other in started.values():
                other.close()
            ours = [item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == NAME]
            chosen = {params["case"] for params in ours if params["release"] == release}
            started[release] = Matrix(release, [c for c in CASES if c in chosen], tmp_path_factory.mktemp(release))
        return started[release]

    yield get
    for matrix in started.values():
        matrix.close()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("release", RELEASES)
def test_under_vllm(release: str, case: str, scheduler: str, matrix_of: Callable[[str], Matrix]) -> None:
    error = matrix_of(release).result(case, scheduler)
    if error:
        pytest.fail(error, pytrace=False)
