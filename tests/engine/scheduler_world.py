"""What a scheduler case works with: one sidecar, and engines that come and go on it; and the list of cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.sidecar_process import SidecarProcess

from maru_shm import messages

if TYPE_CHECKING:
    from tests.support.vllm_sched import Engine

Case = Callable[["World"], None]
CASES: dict[str, Case] = {}
FAST_LINK = {"maru.attach_timeout_s": 10.0}


def case(function: Case) -> Case:
    """Add a case to the list; its name is the sentence it proves."""
    CASES[function.__name__] = function
    return function


class World:
    """One sidecar, and engines that come and go on it."""

    def __init__(self, model: Path, scheduler: str) -> None:
        self.model = model
        self.scheduler = scheduler
        self.sidecar = SidecarProcess(pool_bytes=32 << 20)
        self._engines: list[Engine] = []

    def engine(self, *, attached: bool = True, **settings: Any) -> Engine:
        """A new engine; ``attached``: once it has found the sidecar."""
        from tests.support.vllm_sched import Engine, Settings

        extra = {**FAST_LINK, **settings.pop("extra", {})}
        asynchronous = self.scheduler == "async"
        engine = Engine(Settings(self.sidecar.socket, async_scheduling=asynchronous, extra=extra, **settings), self.model)
        self._engines.append(engine)
        if attached:
            engine.warm_up()
        return engine

    def sidecar_is_idle(self) -> bool:
        """Whether every request that was posted has its answer."""
        status = self.sidecar.ask(messages.GetStatus())
        assert isinstance(status, messages.Status), status
        return all(not session["in_flight"] for session in status.sections["sessions"])  # type: ignore[attr-defined]

    def end(self, engine: Engine) -> None:
        engine.close()
        self._engines.remove(engine)

    def warm(self, *prompts: list[int], **settings: Any) -> None:
        """Let a cold engine compute these prompts, and end it."""
        engine = self.engine(**settings)
        for tokens in prompts:
            engine.generate(tokens)
        self.end(engine)

    def close(self) -> None:
        try:
            for engine in self._engines:
                engine.close()
        finally:
            self.sidecar.close()
