"""Run the connector's cases under vLLM's real schedulers: ``test_scheduler.py`` does, once per vLLM release.

::

    scheduler_cases.py RESULTS MODEL_DIR [CASE…]      one JSON line per (case, scheduler) in RESULTS

Imports of vLLM are left to :func:`main` and to the cases' bodies, so that the list of cases can be read without it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engine import cases_failures, cases_hits, cases_overlap, cases_pressure
from tests.engine.scheduler_world import CASES, Case, World
from tests.support import no_accelerator

__all__ = ["CASES", "CASE_TIMEOUT_S", "SCHEDULERS", "cases_failures", "cases_hits", "cases_overlap", "cases_pressure"]

CASE_TIMEOUT_S = 90
SCHEDULERS = ("plain", "async")


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def expired(*_: object) -> None:
        raise TimeoutError(f"the case ran longer than {seconds} s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run_case(function: Case, model: Path, scheduler: str) -> str:
    """Empty if it passed, else what went wrong."""
    world = World(model, scheduler)
    error = ""
    try:
        with time_limit(CASE_TIMEOUT_S):
            world.sidecar.start()
            function(world)
    except (Exception, SystemExit):  # noqa: BLE001 — the whole matrix is reported, whatever one case does
        error = traceback.format_exc()
        if world.sidecar.log.exists():
            error += "\n--- the sidecar's log\n" + world.sidecar.log.read_text()[-4000:]
    try:
        with time_limit(CASE_TIMEOUT_S):
            world.close()
    except Exception:  # noqa: BLE001
        error += "\n--- at the end\n" + traceback.format_exc()
    return error


def main() -> None:
    results, model, *chosen = sys.argv[1:]
    no_accelerator.pretend()
    import vllm
    from tests.support.vllm_sched import write_model

    write_model(Path(model))
    with open(results, "a") as out:

        def report(**fields: object) -> None:
            out.write(json.dumps(fields) + "\n")
            out.flush()

        report(vllm=vllm.__version__)
        for name, function in CASES.items():
            if chosen and name not in chosen:
                continue
            for scheduler in SCHEDULERS:
                started = time.monotonic()
                error = run_case(function, Path(model), scheduler)
                report(case=name, scheduler=scheduler, error=error, seconds=round(time.monotonic() - started, 2))
        report(complete=True)


if __name__ == "__main__":
    main()
