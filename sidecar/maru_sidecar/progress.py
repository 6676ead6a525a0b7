"""How far the start is, told three ways: the service manager's status line, a bar on a terminal, else lines in the log.

A new pool is sized at about 0.5 s per GiB with 4 KiB pages and touched at about as much again: minutes for a large one. The
socket answers meanwhile; this says why hits do not come yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TextIO

from maru_sidecar.output import human_bytes
from maru_sidecar.prefault import Prefault, PrefaultState

log = logging.getLogger(__name__)

BAR_WIDTH = 30
LOG_STEP = 10  #: per cent between two log lines


class Opening(Protocol):
    """The pool being sized. Bytes; ``seconds`` is 0 until it is open."""

    @property
    def done_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Starting(Protocol):
    """The daemon, as far as its start goes. ``prefault`` is None until the pool is open."""

    @property
    def opening(self) -> Opening: ...
    @property
    def prefault(self) -> Prefault | None: ...


class StartReport:
    """Call it about four times a second (a hook of the main loop); it falls silent when the start is over.

    ``tell`` takes the status line whenever it changes. ``terminal``: a stream for the bar, or None for log lines.
    """

    def __init__(self, sidecar: Starting, tell: Callable[[str], object], terminal: TextIO | None = None) -> None:
        self._sidecar = sidecar
        self._tell = tell
        self._terminal = terminal
        self._told = ""
        self._logged: tuple[str, int] = ("", -1)
        self._bar_open = False
        self.over = False

    def __call__(self) -> None:
        if self.over:
            return
        prefault = self._sidecar.prefault
        if prefault is None:
            opening = self._sidecar.opening
            self._show("opening the pool", opening.done_bytes, opening.total_bytes, 0.0)
            return
        progress = prefault.progress()
        if progress.state in (PrefaultState.IDLE, PrefaultState.RUNNING):
            self._show("ready, touching the pool", progress.done_bytes, progress.total_bytes, progress.rate)
        elif progress.state is PrefaultState.FAILED:
            self._end(f"ready; {progress.error}: first copies will be slower")
        elif progress.state is PrefaultState.DONE:
            self._end(f"ready, {human_bytes(progress.total_bytes)} touched")
        else:
            self._end("stopping")

    def _show(self, what: str, done: int, total: int, rate: float) -> None:
        percent = 100 * done // total if total else 0
        amount = f"{human_bytes(done)} of {human_bytes(total)} ({percent} %)" if total else ""
        speed = f", {human_bytes(rate)}/s, {(total - done) / rate:.0f} s left" if rate else ""
        self._say(f"{what} {amount}".rstrip())
        if self._terminal is not None:
            filled = BAR_WIDTH * percent // 100
            # The cursor returns to the start of the line, so that a log line in between overwrites the bar.
            self._terminal.write(f"\x1b[K[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {what} {amount}{speed}\r")
            self._terminal.flush()
            self._bar_open = True
        elif self._logged[0] != what or percent >= self._logged[1] + LOG_STEP:
            self._logged = (what, percent // LOG_STEP * LOG_STEP)
            log.info("%s %s%s", what, amount, speed)

    def _end(self, text: str) -> None:
        self.over = True
        self._say(text)
        if self._bar_open and self._terminal is not None:
            self._terminal.write("\x1b[K")
            self._terminal.flush()
        log.info("%s", text)

    def _say(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._tell(text)
