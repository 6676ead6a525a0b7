"""The two processes of the demo, from the outside: the sidecar and an engine."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 150.0  #: an engine is up in 8 s to 40 s; the first one after an installation also compiles its byte code
STOP_TIMEOUT_S = 60.0


class EngineProcess:
    """``engine.py`` as a child process. Every wait is bounded; what the engine printed is in ``log``."""

    def __init__(self, model: Path, socket: str, log: Path, *flags: str) -> None:
        self.log = log
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, HERE / "engine.py", "--model", model, "--socket", socket, *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.start_s = float(self._answer(START_TIMEOUT_S)["ready"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            line = ""
        if not line:
            self.kill()
            tail = self.log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the engine (pid {self.pid}) gave no answer within {timeout:.0f} s; its log ends:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def post(self, op: str, **fields: object) -> None:
        """Send a request and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self._process.stdin.flush()

    def ask(self, op: str, *, timeout: float = 120.0, **fields: object) -> dict[str, Any]:
        self.post(op, **fields)
        return self._answer(timeout)

    def wait(self, *, timeout: float = 120.0) -> dict[str, Any]:
        """The answer to an earlier :meth:`post`."""
        return self._answer(timeout)

    def generate(self, *prompts: Sequence[int], max_tokens: int) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.ask("generate", prompts=prompts, max_tokens=max_tokens)["answers"]
        return answers

    def stop(self) -> None:
        """An orderly end, stores included."""
        self.ask("stop", timeout=STOP_TIMEOUT_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL; idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)


class Sidecar:
    """``maru-sidecar run`` in the foreground, as a child process; ``flags`` are added to its command line."""

    def __init__(self, directory: Path, pool: str, size: str, *flags: str, name: str = "sidecar") -> None:
        self.socket = str(directory / f"{name}.sock")
        self.log = directory / f"{name}.log"
        with open(self.log, "ab") as out:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "maru_sidecar",
                    "run",
                    "--socket",
                    self.socket,
                    "--pool-path",
                    pool,
                    "--pool-size",
                    size,
                    *flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def command(self, *arguments: str) -> str:
        """A ``maru-sidecar`` command's standard output; raises if it failed."""
        return subprocess.run(
            [sys.executable, "-m", "maru_sidecar", *arguments, "--socket", self.socket],
            check=True, capture_output=True, text=True, timeout=30,
        ).stdout  # fmt: skip

    def answers(self) -> bool:
        """Whether it runs and answers a ping."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the sidecar ended at once:\n{self.log.read_text(errors='replace')[-4000:]}")
        with contextlib.suppress(subprocess.CalledProcessError):
            return "ready" in self.command("ping").lower()
        return False

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"the sidecar ignored SIGTERM for {STOP_TIMEOUT_S:.0f} s") from None
