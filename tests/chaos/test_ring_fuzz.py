"""Random SIGKILLs of the sidecar and of engines at work. Invariants: every ticket has one terminal answer or is lost with the
sidecar, once; no byte is ever wrong; nothing is left in ``/dev/shm``; the pool serves what survived.

About 30 s; ``MARU_FUZZ_SECONDS`` makes it longer.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.support.client import Client, KvCache, prompt_keys
from tests.support.fuzz_engine import MAX_CHUNKS, PER_CHUNK, PROMPTS, Tally, chunk_bytes, tally
from tests.support.sidecar_process import SidecarProcess
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import segment as segments
from maru_sidecar.listener import instance_of

SECONDS = float(os.environ.get("MARU_FUZZ_SECONDS", "25"))
ENGINES = ("alpha", "beta")


class Engine:
    """A fuzzing engine process and its counters, which outlive it."""

    def __init__(self, socket: str, name: str) -> None:
        self.socket, self.name = socket, name
        self.fd = os.memfd_create(f"tally-{name}")
        os.posix_fallocate(self.fd, 0, 4096)
        self.counts = tally(self.fd)
        self.lives = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, seed: int) -> None:
        self.lives += 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fuzz_engine", self.socket, self.name, str(seed), str(self.fd)],
            pass_fds=[self.fd],
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        )

    def kill(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, "the engine ended by itself"
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        os.close(self.fd)


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS + 120)
def test_no_kill_at_any_moment_breaks_an_invariant() -> None:
    rng = random.Random(int(os.environ.get("MARU_FUZZ_SEED", "7")))
    sidecar = SidecarProcess(pool_bytes=2 << 20)  # 63 slabs for 144 chunks: eviction takes part
    engines = [Engine(sidecar.socket, name) for name in ENGINES]
    sidecar_kills = engine_kills = 0
    try:
        sidecar.start()
        for engine in engines:
            engine.start(rng.randrange(1 << 30))
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.02, 0.8))
            if rng.random() < 0.5:
                sidecar.kill()
                sidecar_kills += 1
                sidecar.start()
            else:
                engine = rng.choice(engines)
                engine.kill()
                engine_kills += 1
                engine.start(rng.randrange(1 << 30))
        before = [e.counts[Tally.ANSWERED] for e in engines]
        until(lambda: all(e.counts[Tally.ANSWERED] > n for e, n in zip(engines, before, strict=True)), "all work again")
        for engine in engines:
            engine.kill()
        _check_pool(sidecar)
        assert sidecar.stop() == 0
        _check_counts(engines, sidecar_kills, engine_kills)
        assert not list(segments.list_names(instance_of(sidecar.socket)))
    except AssertionError:
        print(sidecar.log.read_text()[-6000:])
        raise
    finally:
        for engine in engines:
            engine.close()
        sidecar.close()


def _check_counts(engines: list[Engine], sidecar_kills: int, engine_kills: int) -> None:
    total = {t: sum(e.counts[t] for e in engines) for t in Tally}
    summary = {t.name.lower(): n for t, n in total.items()}
    print(f"\nkills: sidecar {sidecar_kills}, engines {engine_kills}; {summary}")
    assert total[Tally.CORRUPT] == 0, summary
    assert total[Tally.REPEATED] == 0, summary
    assert total[Tally.UNEXCUSED] == 0, summary
    assert total[Tally.ANSWERED] > 500, summary
    assert total[Tally.LOADED] > 100, summary
    # What was out when an engine was killed can be counted by nobody: at most its table of records (and one lookup).
    unknown = total[Tally.POSTED] - total[Tally.ANSWERED] - total[Tally.LOST]
    assert -engine_kills - len(engines) <= unknown <= (engine_kills + len(engines)) * 14, summary


def _check_pool(sidecar: SidecarProcess) -> None:
    """Every chunk the directory offers holds its bytes; nothing is half-written, leased or in flight."""
    cache = KvCache(num_blocks=MAX_CHUNKS * PER_CHUNK, layers=2, piece=2048)
    found = 0
    with (
        Client(sidecar.socket, engine_id="check", cache=cache) as worker,
        Client(sidecar.socket, engine_id="check", role=L.Role.SCHEDULER) as scheduler,
    ):
        table = np.arange(MAX_CHUNKS * PER_CHUNK, dtype=np.int32).reshape(MAX_CHUNKS, PER_CHUNK)
        for prompt in range(PROMPTS):
            keys = prompt_keys(f"fuzz{prompt}", MAX_CHUNKS)
            hits = scheduler.hits(keys)
            found += hits
            if hits:
                assert worker.load(keys[: hits * 16], table[:hits]).state is L.State.DONE
            for i in range(hits):
                wanted = chunk_bytes(keys[i * 16 : i * 16 + 16], (PER_CHUNK, 2, 2048))
                np.testing.assert_array_equal(cache.blocks[table[i]], wanted)
    assert found
