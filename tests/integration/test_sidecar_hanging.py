"""Engines whose memory does not answer: their own threads hang, everybody else's copies go on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
from tests.support.client import Client, KvCache, blocks_table, prompt_keys
from tests.support.faulting_memory import FaultingCache, userfaultfd
from tests.support.sidecar_process import SidecarProcess, running_sidecar
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.errors import AttachRefused
from maru_sidecar.daemon import MAX_HANGING

COPY_TIMEOUT_S = 1.0
MEMBERS = 8


def _may_hang() -> bool:
    try:
        os.close(userfaultfd())
    except PermissionError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _may_hang(), reason="userfaultfd is not allowed here (vm.unprivileged_userfaultfd)")


@pytest.fixture
def sidecar() -> Iterator[SidecarProcess]:
    with running_sidecar(flags=("--set", f"transfer.copy_timeout_s={COPY_TIMEOUT_S}")) as process:
        yield process


# --- engines that hang, each in a process that can be killed -----------------------------------------------------------------
def _hang_in_copies(path: str, pipe: Connection, n: int, op: L.Op) -> None:
    """``n`` engines, each with a copy that does not end and a ticket that waits behind it."""
    engines = []
    for i in range(n):
        client = Client(path, engine_id=f"hanging {i}", cache=FaultingCache(f"hanging {i}"))
        queued = [prompt_keys(f"queued {i} {j}", 1) for j in range(2)]
        if op is L.Op.LOAD:
            feeder = KvCache(layers=1, signature=f"hanging {i}")
            with Client(path, engine_id="feeder", cache=feeder) as other:
                for keys in queued:
                    other.store(keys, blocks_table(0, 1))
            first, second = (client.post_load(keys, blocks_table(4 + 4 * j, 1)) for j, keys in enumerate(queued))
        else:
            first, second = (client.post_store(keys, blocks_table(4 + 4 * j, 1)) for j, keys in enumerate(queued))
        engines.append((client, first, second))
    pipe.send("posted")
    pipe.recv()  # told to look
    states = [
        (L.SidecarState(client.segment.words[L.WORD_SIDECAR_STATE]).name, *(client.records.state(t).name for t in (a, b)))
        for client, a, b in engines
    ]
    pipe.send(states)
    time.sleep(600)


def _hang_in_attaches(path: str, pipe: Connection, i: int) -> None:
    pipe.send("attaching")
    try:
        Client(path, engine_id=f"hanging {i}", cache=FaultingCache(whole=True))
        pipe.send("attached")
    except AttachRefused as e:
        pipe.send(str(e))
    time.sleep(600)


@contextlib.contextmanager
def engine(target: Callable[..., None], *args: object) -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=target, args=(args[0], theirs, *args[1:]), daemon=True)
    process.start()
    try:
        assert ours.poll(20)
        ours.recv()
        yield ours
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def status(sidecar: SidecarProcess) -> dict[str, object]:
    answer = sidecar.ask(M.GetStatus())
    assert isinstance(answer, M.Status), answer
    values = answer.sections["sidecar"]
    assert isinstance(values, dict)
    return values


def sessions(sidecar: SidecarProcess) -> object:
    answer = sidecar.ask(M.GetStatus())
    assert isinstance(answer, M.Status), answer
    return answer.sections["sessions"]


def works(sidecar: SidecarProcess, name: str) -> None:
    """A new engine attaches, stores and loads: copies that threads share (over 1 MiB), and small ones."""
    cache = KvCache(num_blocks=512, layers=2)
    cache.fill(7)
    with Client(sidecar.socket, engine_id=name, cache=cache) as client:
        for chunks in (1, 48):
            keys, source, target = prompt_keys(f"{name} {chunks}", chunks), blocks_table(0, chunks), blocks_table(256, chunks)
            assert client.store(keys, source).n_done == chunks
            assert client.load(keys, target).n_done == chunks
            np.testing.assert_array_equal(cache.read(source), cache.read(target))
        client.detach()


# --- copies ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", [L.Op.STORE, L.Op.LOAD], ids=lambda op: op.name)
def test_a_copy_that_does_not_end_costs_its_own_engine_the_session_and_nobody_anything(
    sidecar: SidecarProcess, op: L.Op
) -> None:
    with engine(_hang_in_copies, sidecar.socket, 1, op) as hanging:
        works(sidecar, "before it is noticed")
        until(lambda: status(sidecar)["engines_abandoned"] == 1, "the engine is given up")
        works(sidecar, "afterwards")
        assert status(sidecar)["engines_hanging"] == 1
        assert status(sidecar)["health"] == "good"
        hanging.send("look")
        assert hanging.poll(20)
        # The copy in flight may still touch its memory: that ticket alone is not answered.
        assert hanging.recv() == [("STOPPED", "ACCEPTED", "FAILED")]
        with Client(sidecar.socket, engine_id="hanging 0"):
            pass  # its place is free
    until(lambda: sessions(sidecar) == [], "with its process the last of it is gone")
    assert (status(sidecar)["engines_hanging"], status(sidecar)["engines_abandoned"]) == (0, 1)


def test_too_many_of_them_are_a_reason_to_restart_and_the_others_go_on_until_then(sidecar: SidecarProcess) -> None:
    with engine(_hang_in_copies, sidecar.socket, MAX_HANGING + 1, L.Op.STORE):
        until(lambda: status(sidecar)["engines_hanging"] == MAX_HANGING + 1, "all are given up")
        assert f"memory of {MAX_HANGING + 1} engines does not answer" in str(status(sidecar)["health"])
        works(sidecar, "beside them")
    until(lambda: status(sidecar)["health"] == "good", "their processes have ended")


def test_a_sidecar_can_be_stopped_while_copies_hang(sidecar: SidecarProcess) -> None:
    with engine(_hang_in_copies, sidecar.socket, 2, L.Op.STORE):
        until(lambda: status(sidecar)["engines_abandoned"] == 2, "the engines are given up")
        assert sidecar.stop() == 1  # not clean: the pool is still being written
    sidecar.start()
    works(sidecar, "after the restart")


# --- attaches ---------------------------------------------------------------------------------------------------------------
def test_attaches_that_do_not_end_are_refused_and_keep_nobody_out(sidecar: SidecarProcess) -> None:
    with contextlib.ExitStack() as stack:
        hanging = [stack.enter_context(engine(_hang_in_attaches, sidecar.socket, i)) for i in range(MEMBERS)]
        works(sidecar, "beside them")
        for pipe in hanging:
            assert pipe.poll(20)
            assert "unreachable_memory" in pipe.recv()
        assert status(sidecar)["engines_hanging"] == MEMBERS
        works(sidecar, "afterwards")
    until(lambda: status(sidecar)["engines_hanging"] == 0, "their processes have ended")
    assert sessions(sidecar) == []
