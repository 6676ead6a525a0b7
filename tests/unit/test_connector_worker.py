"""The worker half against a scripted sidecar: every job is reported exactly once, and never while its blocks are in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.support.connector_peer import Peer, PeerSession

from maru_connector.fence import HostFence
from maru_connector.link import SidecarLink
from maru_connector.metadata import LoadJob, StepMetadata, StoreJob, WorkerReport
from maru_connector.options import parse_options
from maru_connector.worker_half import WorkerHalf
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.records import Request

Answer = Callable[[PeerSession, Request], None]


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.0005)


class World:
    """A worker half, its sidecar, and what it has reported so far."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "control.sock")
        self.held: list[tuple[PeerSession, Request]] = []
        self.answer: Answer = lambda session, request: self.held.append((session, request))
        self.peer: Peer | None = Peer(self.path, self._answer)
        self.half: WorkerHalf
        self.step = 0
        self.finished: list[str] = []
        self.invalid: set[int] = set()
        self.reports: list[WorkerReport] = []
        self.open()

    def _answer(self, session: PeerSession, request: Request) -> None:
        self.answer(session, request)

    def open(self, **options: object) -> None:
        self.half = WorkerHalf(parse_options({f"maru.{k}": v for k, v in options.items()}), HostFence)
        link = SidecarLink(
            self.path,
            lambda: (M.Attach(L.Role.WORKER, "engine", 0, 1, b"r" * 16, 64, 4, 64, 1024), []),
            on_attached=self.half.on_attached,
            on_lost=self.half.on_lost,
        )
        assert self.half.attach(link)

    def run(
        self, *, loads: list[LoadJob] | None = None, stores: list[StoreJob] | None = None, cancel: list[str] | None = None
    ) -> None:
        """One engine step with a forward pass."""
        self.step += 1
        meta = StepMetadata(self.step, True, loads or [], stores or [], cancel or [])
        self.half.start_loads(meta)
        self.half.finish_step(meta)
        self.finished += sorted(self.half.get_finished(meta) or ())
        self.invalid |= self.half.take_invalid_blocks()
        if (report := self.half.take_report()) is not None:
            self.reports.append(report)

    def run_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, "the condition was not met in time"
            self.run()
            time.sleep(0.0005)

    @property
    def stores_done(self) -> dict[int, int]:
        total: dict[int, int] = {}
        for report in self.reports:
            for job, n in report.stores_done.items():
                total[job] = total.get(job, 0) + n
        return total

    def kill(self) -> None:
        assert self.peer is not None
        self.peer.close()
        self.peer = None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.half.detach()
    if world.peer is not None:
        world.peer.close()


def load(name: str = "a", blocks: tuple[int, ...] = (-1, 11, 12, 13), *, synchronous: bool = False) -> LoadJob:
    """Two chunks of two blocks; the first block is there already."""
    return LoadJob(name, b"k" * 32, np.array(blocks, "<i4").tobytes(), 0, 0, 0, 0, 1, synchronous)


def store(job: int = 1) -> StoreJob:
    return StoreJob(job, "a", b"k" * 32, np.array([-1, -1, 21, 22], "<i4").tobytes(), 0, 1)


def complete(state: L.State, n_done: int = 2, code: L.Code = L.Code.OK) -> Answer:
    return lambda session, request: session.records.complete(request.ticket, state, code, n_done=n_done, n_bytes=100)


def test_a_load_is_reported_once_when_it_is_done(world: World) -> None:
    world.answer = complete(L.State.DONE)
    world.run(loads=[load()])
    world.run_until(lambda: bool(world.finished))
    for _ in range(5):
        world.run()
    assert world.finished == ["a"]
    assert not world.invalid
    assert not world.reports


def test_a_failed_load_names_its_blocks_from_the_first_chunk_that_is_missing(world: World) -> None:
    world.answer = complete(L.State.FAILED, 1, L.Code.CHECKSUM)
    world.run(loads=[load()])
    world.run_until(lambda: bool(world.finished))
    assert world.invalid == {12, 13}
    assert [r.loads_failed for r in world.reports] == [{"a"}]


def test_a_load_that_claims_less_than_was_asked_has_failed(world: World) -> None:
    world.answer = complete(L.State.DONE, 0)
    world.run(loads=[load()])
    world.run_until(lambda: bool(world.finished))
    assert world.invalid == {11, 12, 13}


def test_the_invalid_blocks_come_with_the_completion_not_before(world: World) -> None:
    world.run(loads=[load()])
    until(lambda: bool(world.held))
    for _ in range(5):
        world.run()
    assert not world.finished
    assert not world.invalid
    complete(L.State.FAILED, 0, L.Code.NOT_FOUND)(*world.held[0])
    world.run()
    assert world.finished == ["a"]
    assert world.invalid == {11, 12, 13}


def test_without_a_sidecar_loads_fail_and_stores_end_at_once(world: World) -> None:
    world.kill()
    world.run_until(lambda: world.half.link is not None and world.half.link.session is None)
    world.run(loads=[load()], stores=[store(7)])
    assert world.finished == ["a"]
    assert world.invalid == {11, 12, 13}
    assert world.stores_done == {7: 1}


def test_more_loads_than_records_fail_at_once_and_the_rest_go_on(world: World) -> None:
    world.run(loads=[load(f"r{i}", (i, i, i, i)) for i in range(6)])
    assert world.finished == ["r4", "r5"]
    until(lambda: len(world.held) == 4)
    for one in world.held:
        complete(L.State.DONE)(*one)
    world.run_until(lambda: len(world.finished) == 6)
    assert world.invalid == {4, 5}


def test_a_load_that_takes_too_long_is_taken_back(world: World) -> None:
    world.half.detach()
    world.open(load_timeout_s=0.05)
    world.run(loads=[load()])
    until(lambda: bool(world.held))
    world.run_until(lambda: bool(world.finished))
    assert world.invalid == {11, 12, 13}
    session, request = world.held[0]
    assert not session.records.begin_copy(request.ticket)


def test_a_load_under_a_running_copy_is_not_taken_back_before_the_copy_ends(world: World) -> None:
    def begin(session: PeerSession, request: Request) -> None:
        assert session.records.begin_copy(request.ticket)
        world.held.append((session, request))

    world.answer = begin
    world.half.detach()
    world.open(load_timeout_s=0.01)
    world.run(loads=[load()])
    until(lambda: bool(world.held))
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        world.run()
    assert not world.finished
    session, request = world.held[0]
    session.records.end_copy(request.ticket)
    world.run()
    assert world.finished == ["a"]


def test_an_aborted_load_is_cancelled_and_still_reported_once(world: World) -> None:
    world.run(loads=[load()])
    until(lambda: bool(world.held))
    world.run(cancel=["a"])
    world.run()
    assert world.finished == ["a"]


def test_jobs_in_flight_end_once_each_when_the_sidecar_goes(world: World) -> None:
    world.run(loads=[load("a"), load("b")], stores=[store(1), store(2)])
    until(lambda: len(world.held) == 4)
    world.kill()
    world.run_until(lambda: len(world.finished) == 2)
    for _ in range(5):
        world.run()
    assert sorted(world.finished) == ["a", "b"]
    assert world.stores_done == {1: 1, 2: 1}


def test_a_store_is_posted_behind_its_step_and_reported_when_it_is_over(world: World) -> None:
    fences: list[int] = []

    def note(session: PeerSession, request: Request) -> None:
        assert session.segment is not None
        fences.append(session.segment.words[L.WORD_FENCE])
        world.held.append((session, request))

    world.answer = note
    world.run(stores=[store(5)])
    until(lambda: bool(world.held))
    assert fences == [1]
    assert not world.stores_done
    assert world.held[0][1].blocks.tolist() == [[-1, -1], [21, 22]]
    complete(L.State.DONE, 1)(*world.held[0])
    world.run()
    assert world.stores_done == {5: 1}


def test_the_fence_waits_for_the_end_of_the_step(world: World) -> None:
    world.run()
    meta = StepMetadata(2, True)
    session = world.half.link.session if world.half.link else None
    assert session is not None
    world.half.start_loads(meta)
    world.half.get_finished(meta)  # speculative decoding asks before the draft model has run
    assert session.segment.words[L.WORD_FENCE] == 1
    world.half.finish_step(meta)
    assert session.segment.words[L.WORD_FENCE] == 2


def test_a_step_without_a_forward_pass_is_finished_by_get_finished(world: World) -> None:
    meta = StepMetadata(1, False, stores=[store(3)])
    world.half.start_loads(meta)
    world.half.get_finished(meta)  # 0.26 does not call wait_for_save here
    until(lambda: bool(world.held))


def test_a_synchronous_load_is_over_when_the_hook_returns(world: World) -> None:
    world.answer = complete(L.State.DONE)
    meta = StepMetadata(1, True, [load(synchronous=True)])
    world.half.start_loads(meta)
    report = world.half.take_report()
    assert report is not None
    assert report.loads_done == {"a": 1}
    assert world.half.get_finished(meta) is None  # nothing was parked


def test_a_synchronous_store_is_over_when_the_hook_returns(world: World) -> None:
    world.half.detach()
    world.open(write_behind=False)
    world.answer = complete(L.State.DONE, 1)
    world.run(stores=[store(9)])
    assert world.stores_done == {9: 1}


def test_sleep_ends_what_is_in_flight_and_wake_up_attaches_again(world: World) -> None:
    world.run(loads=[load()], stores=[store(1)])
    until(lambda: len(world.held) == 2)
    world.half.detach()
    world.half.detach()
    world.run()
    assert world.finished == ["a"]
    assert world.stores_done == {1: 1}


def test_reports_of_ranks_add_up() -> None:
    one = WorkerReport({1: 1, 2: 1}, {"s": 1}, {"a"})
    other = WorkerReport({2: 1, 3: 1}, {"s": 1}, {"b"})
    assert one.aggregate(other) == WorkerReport({1: 1, 2: 2, 3: 1}, {"s": 2}, {"a", "b"})
