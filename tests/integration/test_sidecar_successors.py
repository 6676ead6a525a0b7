"""A lease lasts until its deadline, however many sidecars come and go meanwhile, and its segment not longer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.client import Client, KvCache, admin, blocks_table, prompt_keys
from tests.support.engine_process import EngineProcess
from tests.support.sidecar_process import SidecarProcess
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as segments
from maru_sidecar.listener import instance_of

KEYS = prompt_keys("promised", 4)


@pytest.fixture
def sidecar() -> Iterator[SidecarProcess]:
    process = SidecarProcess(pool_bytes=4 << 20, flags=("--lease-ttl", "60"))
    process.start()
    yield process
    process.close()
    assert not names(process)


def names(sidecar: SidecarProcess) -> set[str]:
    return {name for name, *_ in segments.list_names(instance_of(sidecar.socket))}


def section(sidecar: SidecarProcess, name: str) -> Any:
    answer = sidecar.ask(M.GetStatus())
    assert isinstance(answer, M.Status)
    return answer.sections[name]


def churn(client: Client) -> None:
    """Store several times what the pool holds."""
    for i in range(40):
        client.store(prompt_keys(f"churn{i}", 8), blocks_table(0, 8))


@pytest.mark.parametrize("ends", [["stop"], ["kill", "kill"], ["stop", "stop"], ["stop", "kill"], ["kill", "stop", "kill"]])
@pytest.mark.parametrize("op", [L.Op.LOOKUP, L.Op.LOCATE])
def test_a_lease_outlives_every_end_of_its_sidecar(sidecar: SidecarProcess, ends: list[str], op: L.Op) -> None:
    with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        worker.store(KEYS, blocks_table(0, 4))
        assert scheduler.wait(scheduler.post(op, KEYS)).n_done == 4
        for end in ends:
            getattr(sidecar, end)()
            sidecar.start()
        assert names(sidecar) == {scheduler.attached.segment}
        with Client(sidecar.socket, engine_id="other", cache=KvCache(64)) as other:
            churn(other)
            with Client(sidecar.socket, role=L.Role.SCHEDULER, engine_id="other") as asking:
                assert asking.hits(KEYS) == 4
    until(lambda: not names(sidecar), "nothing is left of clients that have gone")
    until(lambda: section(sidecar, "directory")["leases"] == 0, "nor their leases")


def test_stores_that_end_during_a_stop_do_not_evict_what_is_leased(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        worker.store(KEYS, blocks_table(0, 4))
        scheduler.lookup(KEYS)
        tickets = [worker.post_store(prompt_keys(f"last{i}", 8), blocks_table(0, 8), fence=1) for i in range(20)]
        until(lambda: worker.records.state(tickets[-1]) is L.State.ACCEPTED, "they are queued")
        admin(sidecar.socket, M.Drain())
        worker.set_fence(1)
        sidecar.stop()
        sidecar.start()
        assert section(sidecar, "pool")["leases_taken_over"] == 1
        assert section(sidecar, "directory")["chunks_pinned"] == 4


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_segment_goes_with_its_last_lease_though_its_client_lives(end: str) -> None:
    sidecar = SidecarProcess(flags=("--lease-ttl", "3"))
    try:
        sidecar.start()
        with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
            worker.store(KEYS, blocks_table(0, 4))
            scheduler.lookup(KEYS)
            getattr(sidecar, end)()
            assert scheduler.attached.segment in names(sidecar)
            sidecar.start()
            until(lambda: not names(sidecar), "the segment has gone")
            until(lambda: section(sidecar, "directory")["leases"] == 0, "and its lease")
    finally:
        sidecar.close()


def test_a_lease_given_back_is_not_handed_over(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        worker.store(KEYS, blocks_table(0, 4))
        assert scheduler.hits(KEYS) == 4
        until(lambda: section(sidecar, "directory")["leases"] == 0, "it is given back")
        sidecar.stop()
        assert not names(sidecar)


@pytest.mark.parametrize("successor", ["a successor", ""])
def test_a_client_that_dies_after_the_stop_leaves_neither_lease_nor_segment(sidecar: SidecarProcess, successor: str) -> None:
    with EngineProcess() as engine:
        attached = engine.call("attach", sidecar.socket, {}, {})
        engine.call("store", KEYS, blocks_table(0, 4))
        assert engine.call("lease", KEYS) == 4
        sidecar.stop()
        assert names(sidecar) == {attached[1]}
        if successor:
            sidecar.start()
            assert section(sidecar, "pool")["leases_taken_over"] == 1
        engine.kill()
    if successor:
        until(lambda: section(sidecar, "directory")["leases"] == 0, "the lease of the dead is given back")
    else:
        sidecar.start()
        assert section(sidecar, "pool")["leases_taken_over"] == 0
    until(lambda: not names(sidecar), "the segment of the dead is removed")


def test_clients_without_leases_leave_no_segment_at_a_stop(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER):
        worker.store(KEYS, blocks_table(0, 4))
        sidecar.stop()
        assert not names(sidecar)
