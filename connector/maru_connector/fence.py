"""The fence word: how the sidecar learns that an engine step's work has finished.

``WORD_FENCE`` holds k once everything launched up to and including engine step k has finished. A store carries the step that
wrote its tokens, a load the last step that could still touch its blocks; the sidecar waits for the word, never the engine.
"""

from __future__ import annotations

from typing import Protocol

from maru_shm import layout as L
from maru_shm.atomics import order_fence
from maru_shm.segment import Segment


class StepFence(Protocol):
    """Publishes finished steps in one segment."""

    def after_step(self, step: int) -> None:
        """Called on the compute thread when all work of ``step`` has been launched; returns at once."""
        ...

    def poll(self) -> None:
        """Publish what has finished meanwhile, where nobody else does; each step asks, idle ones too."""
        ...

    def close(self) -> None:
        """The segment is about to be unmapped; no write to it may follow. Idempotent."""
        ...


class HostFence:
    """For engines that compute on the calling thread: launched is finished, so the word is stored directly."""

    __slots__ = ("_words",)

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words

    def after_step(self, step: int) -> None:
        order_fence()
        self._words[L.WORD_FENCE] = step  # SYNC POINT: release, the step's writes are visible before it

    def poll(self) -> None:
        return None

    def close(self) -> None:
        return None
