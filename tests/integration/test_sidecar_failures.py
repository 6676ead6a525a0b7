"""Either side dies, stalls or is told to stop: the other goes on, no wrong byte is believed, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.client import Client, KvCache, admin, blocks_table, prompt_keys
from tests.support.engine_process import EngineProcess
from tests.support.sidecar_process import SidecarProcess, running_sidecar
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as segments
from maru_shm.errors import AttachRefused, SidecarUnavailable


@pytest.fixture
def sidecar() -> Iterator[SidecarProcess]:
    with running_sidecar() as process:
        yield process


def section(sidecar: SidecarProcess, name: str) -> Any:
    answer = sidecar.ask(M.GetStatus())
    assert isinstance(answer, M.Status)
    return answer.sections[name]


def segment_names() -> set[str]:
    return {name for name, *_ in segments.list_names()}


# --- the engine dies ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fence", [0, 1000], ids=["copies-running", "copies-waiting-for-their-fence"])
def test_an_engine_killed_with_transfers_out_leaves_nothing_behind(sidecar: SidecarProcess, fence: int) -> None:
    keys = prompt_keys("held", 4)
    with Client(sidecar.socket, engine_id="survivor") as survivor, EngineProcess() as engine:
        assert survivor.cache is not None
        survivor.cache.fill(1)
        survivor.store(keys, blocks_table(0, 4))
        names = engine.call("attach", sidecar.socket, {"engine_id": "victim"}, {"num_blocks": 256})
        assert engine.call("lease", keys) == 4
        loads = [(keys, blocks_table(4 * i, 4)) for i in range(12)]
        stores = [(prompt_keys(f"v{i}", 8), blocks_table(32 * (i % 4), 8)) for i in range(12)]
        assert engine.call("post_many", loads, stores, fence) == 24
        engine.kill()
        until(lambda: len(section(sidecar, "sessions")) == 1, "both sessions of the dead engine are gone")
        assert not {names[0], names[1]} & segment_names()
        directory = section(sidecar, "directory")
        assert (directory["leases"], directory["slabs_copying"], directory["slabs_writing"]) == (0, 0, 0)
        assert all(q["jobs"] == 0 and q["bytes_in_flight"] == 0 and q["alive"] for q in section(sidecar, "queues"))
        assert survivor.load(keys, blocks_table(40, 4)).state is L.State.DONE
        np.testing.assert_array_equal(survivor.cache.read(blocks_table(40, 4)), survivor.cache.read(blocks_table(0, 4)))


def test_a_restarted_engine_takes_its_place_at_once(sidecar: SidecarProcess) -> None:
    with EngineProcess() as first:
        first.call("attach", sidecar.socket, {}, {})
        first.kill()
    with EngineProcess() as second:  # the news of the first one's death may not even have been read
        second.call("attach", sidecar.socket, {}, {})
        assert second.call("store", prompt_keys("again", 2), blocks_table(0, 2)) == ("DONE", "OK", 2)


def test_what_a_dead_engine_had_stored_serves_the_next_one(sidecar: SidecarProcess) -> None:
    keys = prompt_keys("inherited", 4)
    with EngineProcess() as first:
        first.call("attach", sidecar.socket, {}, {})
        first.call("fill", 3)
        wanted = first.call("read", list(range(16)))
        first.call("store", keys, blocks_table(0, 4))
        first.kill()
    with EngineProcess() as second:
        second.call("attach", sidecar.socket, {}, {})
        assert second.call("lease", keys) == 4
        assert second.call("load", keys, blocks_table(20, 4)) == ("DONE", "OK", 4)
        assert second.call("read", list(range(20, 36))) == wanted


def test_a_store_whose_writer_died_is_taken_over_by_the_one_that_waited(sidecar: SidecarProcess) -> None:
    """The engine that stores a prefix is killed; another one's store of it ends with all of it there."""
    keys = prompt_keys("orphan", 16)
    for round_ in range(5):
        with EngineProcess() as victim, Client(sidecar.socket, engine_id="heir", cache=KvCache(num_blocks=256)) as heir:
            victim.call("attach", sidecar.socket, {"engine_id": "victim"}, {"num_blocks": 256})
            victim.call("post_many", [], [(keys, blocks_table(0, 16))], 0)
            ticket = heir.post_store(keys, blocks_table(0, 16))
            victim.kill()
            assert heir.finish(ticket).state is L.State.DONE
            with Client(sidecar.socket, engine_id="heir", role=L.Role.SCHEDULER) as scheduler:
                assert scheduler.hits(keys) == 16, f"round {round_}"
                heir.detach()
        admin(sidecar.socket, M.CacheClear())


def test_a_stopped_engine_does_not_stop_others(sidecar: SidecarProcess) -> None:
    with EngineProcess() as sleeper, Client(sidecar.socket, engine_id="awake") as awake:
        sleeper.call("attach", sidecar.socket, {"engine_id": "sleeper"}, {})
        sleeper.call("post_many", [], [(prompt_keys("zzz", 4), blocks_table(0, 4))], 99)
        os.kill(sleeper.pid, signal.SIGSTOP)
        try:
            assert awake.store(prompt_keys("up", 4), blocks_table(0, 4)).n_done == 4
        finally:
            os.kill(sleeper.pid, signal.SIGCONT)


def test_detach_answers_after_its_copies_are_fenced_and_leaves_siblings_alone(sidecar: SidecarProcess) -> None:
    with (
        Client(sidecar.socket, engine_id="tp", rank=0, world=2) as first,
        Client(sidecar.socket, engine_id="tp", rank=1, world=2) as second,
    ):
        waiting = first.post_store(prompt_keys("never", 4), blocks_table(0, 4), fence=7)
        sibling = second.post_store(prompt_keys("mine", 4), blocks_table(0, 4), fence=7)
        first.detach()
        assert first.records.reply(waiting).code is L.Code.ENGINE_GONE
        assert first.segment.words[L.WORD_SIDECAR_STATE] == L.SidecarState.STOPPED
        assert second.records.state(sibling) is L.State.ACCEPTED
        second.set_fence(7)
        assert second.finish(sibling).n_done == 4


def test_an_engine_can_attach_again_on_the_connection_it_detached_on(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket) as client:
        client.detach()
        again = client.ask(client._attach(), M.Attached)
        assert again.session != client.attached.session
        for fd in client.fds:
            os.close(fd)


# --- the sidecar dies ---------------------------------------------------------------------------------------------------------
def test_chunks_survive_sigkill_of_the_sidecar(sidecar: SidecarProcess) -> None:
    keys = prompt_keys("durable", 6)
    with Client(sidecar.socket) as worker:
        assert worker.cache is not None
        worker.cache.fill(5)
        wanted = worker.cache.read(blocks_table(0, 6))
        worker.store(keys, blocks_table(0, 6))
        sidecar.kill()
        until(worker.hung_up, "the worker has seen the sidecar go")
    sidecar.start()
    with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        assert scheduler.hits(keys) == 6
        assert worker.load(keys, blocks_table(20, 6)).state is L.State.DONE
        assert worker.cache is not None
        np.testing.assert_array_equal(worker.cache.read(blocks_table(20, 6)), wanted)


@pytest.mark.parametrize(
    ("point", "op"),
    [
        ("load.before_copy", "load"),
        ("load.after_copy", "load"),
        ("commit.before_writing", "store"),
        ("commit.after_writing", "store"),
        ("commit.after_data", "store"),
        ("commit.before_state", "store"),
        ("commit.after_state", "store"),
        ("store.before_complete", "store"),
    ],
)
def test_a_sidecar_that_dies_in_mid_transfer_is_noticed_and_its_successor_serves_no_wrong_byte(point: str, op: str) -> None:
    sidecar = SidecarProcess()
    keys = prompt_keys("staged", 3)
    try:
        sidecar.start()
        with Client(sidecar.socket) as worker:
            assert worker.cache is not None
            worker.cache.fill(1)
            wanted = worker.cache.read(blocks_table(0, 3))
            if op == "load":
                worker.store(keys, blocks_table(0, 3))
                worker.detach()
        sidecar.stop()
        sidecar.start({"MARU_FAILPOINT": point})
        with Client(sidecar.socket, cache=worker.cache) as worker:
            ticket = (
                worker.post_load(keys, blocks_table(20, 3)) if op == "load" else worker.post_store(keys, blocks_table(0, 3))
            )
            with pytest.raises(SidecarUnavailable):
                worker.wait(ticket)
            names = {worker.attached.segment}
        sidecar.kill()
        sidecar.start()
        assert not names & segment_names()  # swept by its successor
        with Client(sidecar.socket, cache=worker.cache) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
            found = scheduler.hits(keys)
            assert found == 3 if op == "load" else 0 <= found <= 3
            assert worker.cache is not None
            if found:
                reply = worker.load(keys[: found * 16], blocks_table(30, found))
                assert reply.state is L.State.DONE
                np.testing.assert_array_equal(worker.cache.read(blocks_table(30, found)), wanted[: found * 4])
            assert worker.store(keys, blocks_table(0, 3)).n_done == 3 - found
        assert section(sidecar, "directory")["slabs_writing"] == 0
    finally:
        sidecar.close()


def test_a_lease_is_honoured_by_the_next_generation_until_its_deadline() -> None:
    flags = ("--lease-ttl", "3")
    with running_sidecar(flags=flags) as sidecar:
        keys = prompt_keys("promised", 4)
        with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
            worker.store(keys, blocks_table(0, 4))
            worker.store(prompt_keys("unleased", 4), blocks_table(0, 4))
            given_back, _ = scheduler.lookup(prompt_keys("unleased", 4))
            scheduler.release(given_back)
            scheduler.lookup(keys)
            sidecar.kill()
            sidecar.start()
            assert section(sidecar, "pool")["leases_taken_over"] == 1
            assert section(sidecar, "directory")["chunks_pinned"] == 4
            dropped = admin(sidecar.socket, M.CacheClear())
            assert isinstance(dropped, M.Done)
            assert dropped.n == 4  # what nobody leases
            until(lambda: section(sidecar, "directory")["leases"] == 0, "the lease has ended by its deadline")


def test_leases_of_a_dead_client_are_not_taken_over(sidecar: SidecarProcess) -> None:
    keys = prompt_keys("orphaned", 2)
    with EngineProcess() as engine:
        engine.call("attach", sidecar.socket, {}, {})
        engine.call("store", keys, blocks_table(0, 2))
        assert engine.call("lease", keys) == 2
        sidecar.pause()
        engine.kill()
        sidecar.kill()
    sidecar.start()
    assert section(sidecar, "pool")["leases_taken_over"] == 0


def test_a_slab_whose_bytes_changed_is_dropped_and_never_loaded(sidecar: SidecarProcess) -> None:
    keys = prompt_keys("rotten", 3)
    with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        assert worker.cache is not None
        worker.cache.fill(1)
        worker.store(keys, blocks_table(0, 3))
        ticket = scheduler.post(L.Op.LOCATE, keys)
        scheduler.wait(ticket)
        offset = int(scheduler.records.slab_refs(ticket, 3)[1][0])
        with open(sidecar.pool, "r+b") as pool:
            pool.seek(offset + 100)
            byte = pool.read(1)[0]
            pool.seek(offset + 100)
            pool.write(bytes([byte ^ 1]))
        scheduler.release(ticket)
        before = worker.cache.read(blocks_table(24, 2))
        reply = worker.load(keys, blocks_table(20, 3))
        assert (reply.state, reply.code, reply.n_done) == (L.State.FAILED, L.Code.CHECKSUM, 1)
        np.testing.assert_array_equal(worker.cache.read(blocks_table(24, 2)), before)
        assert scheduler.hits(keys) == 1
        assert worker.store(keys, blocks_table(0, 3)).n_done >= 1
        assert scheduler.hits(keys) == 3


# --- the sidecar stops ----------------------------------------------------------------------------------------------------
def test_sigterm_refuses_new_work_finishes_what_is_in_flight_and_exits_with_0(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket) as worker:
        waiting = worker.post_store(prompt_keys("last", 2), blocks_table(0, 2), fence=3)
        until(lambda: worker.records.state(waiting) is L.State.ACCEPTED, "the store is queued")
        os.kill(sidecar.pid, signal.SIGTERM)
        until(lambda: worker.segment.words[L.WORD_SIDECAR_STATE] == L.SidecarState.DRAINING, "it drains")
        refused = worker.post_load(prompt_keys("late", 1), blocks_table(0, 1))
        assert worker.finish(refused).code is L.Code.DRAINING
        worker.set_fence(3)
        assert worker.wait(waiting).n_done == 2
        until(worker.hung_up, "the sidecar has hung up")
        assert worker.segment.words[L.WORD_SIDECAR_STATE] == L.SidecarState.STOPPED
    assert sidecar.stop() == 0
    assert not os.path.exists(sidecar.socket)
    sidecar.start()
    with Client(sidecar.socket), Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        assert scheduler.hits(prompt_keys("last", 2)) == 2


def test_a_drain_that_never_ends_is_cut_off() -> None:
    with running_sidecar(flags=("--drain-timeout", "0.5")) as sidecar, Client(sidecar.socket) as worker:
        stuck = worker.post_store(prompt_keys("stuck", 2), blocks_table(0, 2), fence=1000)
        until(lambda: worker.records.state(stuck) is L.State.ACCEPTED, "the store is queued")
        assert sidecar.stop() == 0
        assert worker.records.state(stuck) is L.State.FAILED


def test_an_administrator_s_drain_refuses_work_and_attaches_but_the_process_stays(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        assert isinstance(sidecar.ask(M.Drain()), M.Done)
        assert sidecar.state() == "DRAINING"
        _, reply = scheduler.lookup(prompt_keys("any", 1))
        assert (reply.state, reply.code) == (L.State.FAILED, L.Code.DRAINING)
        with pytest.raises(AttachRefused, match="draining"):
            Client(sidecar.socket, engine_id="late")


def test_a_fence_that_never_comes_ends_in_a_timeout() -> None:
    with running_sidecar(flags=("--fence-timeout", "0.3")) as sidecar, Client(sidecar.socket) as worker:
        for ticket in (
            worker.post_load(prompt_keys("f", 1), blocks_table(0, 1), fence=9),
            worker.post_store(prompt_keys("f", 1), blocks_table(0, 1), fence=9),
        ):
            assert worker.finish(ticket).code is L.Code.TIMED_OUT


# --- two of them --------------------------------------------------------------------------------------------------------------
def run_second(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "maru_sidecar", "run", *flags], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_second_sidecar_on_the_same_socket_is_refused_by_name(sidecar: SidecarProcess) -> None:
    second = run_second("--socket", sidecar.socket, "--pool-path", sidecar.pool + "-2", "--pool-size", "64MiB")
    assert second.returncode != 0
    assert f"another sidecar serves {sidecar.socket}" in second.stderr
    assert not os.path.exists(sidecar.pool + "-2")
    assert sidecar.state() == "READY"


def test_a_second_sidecar_on_the_same_pool_is_refused_by_name(sidecar: SidecarProcess, tmp_path: Any) -> None:
    second = run_second("--socket", str(tmp_path / "s"), "--pool-path", sidecar.pool, "--pool-size", str(64 << 20))
    assert second.returncode != 0
    assert f"process {sidecar.pid}" in second.stderr
    assert not (tmp_path / "s").exists()
    assert sidecar.state() == "READY"


def test_an_idle_sidecar_uses_next_to_no_cpu(sidecar: SidecarProcess) -> None:
    """At most 1 % of a core, over 2 s of its own CPU clock."""
    import psutil

    with Client(sidecar.socket), Client(sidecar.socket, role=L.Role.SCHEDULER):
        process = psutil.Process(sidecar.pid)
        until(lambda: section(sidecar, "pool")["prefault"] == "done", "the pool has been touched")
        began, before = time.monotonic(), sum(process.cpu_times()[:2])
        until(lambda: time.monotonic() - began > 2.0, "two seconds have passed")
        assert sum(process.cpu_times()[:2]) - before <= 0.01 * (time.monotonic() - began) + 0.01  # the clock ticks at 10 ms
