"""Whom the sidecar turned away, and why: for the log, the status and the metrics.

A client that is refused tries again every few seconds, and a broken one at once. So everything is counted, and the log gets
one line for a reason's first refusal, then at most one every 10 s with the number since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from maru_shm.messages import RefusalCode, Refused

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
_MAX_WORDS = 600  #: of a line: part of it are the client's own words


@dataclass(slots=True)
class _Kind:
    """The refusals for one reason."""

    count: int = 0
    unsaid: int = 0  #: since its last line in the log
    words: str = ""
    say_at: float = float("-inf")


class Refusals:
    """One thread counts, any may read. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds = {code: _Kind() for code in RefusalCode}
        self._last: tuple[str, float] | None = None

    @property
    def total(self) -> int:
        return sum(kind.count for kind in self._kinds.values())

    @property
    def counts(self) -> dict[RefusalCode, int]:
        """By reason, every reason."""
        return {code: kind.count for code, kind in self._kinds.items()}

    def note(self, who: str, refused: Refused) -> None:
        """``who`` got ``refused`` for an answer, or would have, had there been time to tell."""
        kind = self._kinds[refused.code]
        kind.count += 1
        kind.unsaid += 1
        kind.words = _line(who, refused)
        self._last = kind.words, self._clock()
        self.say()

    def say(self) -> None:
        """Log what is due. Called now and then too: the last of a burst is not to wait for the next."""
        now = self._clock()
        for kind in self._kinds.values():
            if kind.unsaid and now >= kind.say_at:
                more = f" ({kind.unsaid - 1} more before it for this reason)" if kind.unsaid > 1 else ""
                log.warning("%s%s", kind.words, more)
                kind.unsaid, kind.say_at = 0, now + LOG_EVERY_S

    def status(self) -> dict[str, object]:
        """Counts by reason, those there were; the last one in words, with its age in seconds."""
        values: dict[str, object] = {code.value: kind.count for code, kind in self._kinds.items() if kind.count}
        if self._last is not None:
            words, when = self._last
            values |= {"last": words, "last_age_s": round(self._clock() - when, 1)}
        return values


def _line(who: str, refused: Refused) -> str:
    remedy = f"; {refused.remedy}" if refused.remedy else ""
    text = printable(f"{who} refused ({refused.code.value}): {refused.what}{remedy}")
    return text if len(text) <= _MAX_WORDS else text[: _MAX_WORDS - 1] + "…"


def printable(text: str) -> str:
    """A peer's own words, fit for one line of a log."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
