"""The empty kernel beside copies, on an emulated driver."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from tests.support.cuda_world import OFFSETS, TABLE, CudaWorld, stand_in
from tests.support.waiting import until

from maru_shm.geometry import Direction
from maru_sidecar.config import Transfer
from maru_sidecar.transfer import cuda_nudge
from maru_sidecar.transfer.base import Peer
from maru_sidecar.transfer.cuda import CudaTarget

REFUSED, ILLEGAL_ADDRESS, UNKNOWN = 1, 700, 999
SAID = "an empty kernel cannot be run"


class World(CudaWorld):
    def __init__(self, peer: Peer, *, nudge: bool = True) -> None:
        super().__init__(pin=False, nudge=nudge)
        self.peer = peer

    def attach(self) -> CudaTarget:
        return self.engine.attach(self.one()[0], self.peer)

    def wait_until_run(self, kernels: int) -> None:
        until(lambda: self.driver.kernels >= kernels, f"{kernels} kernels ran")

    def run_until(self, target: CudaTarget, condition: Callable[[], bool]) -> None:
        """Copy until ``condition`` holds: what is submitted while the kernel runs does not run it again."""

        def holds() -> bool:
            move(target)
            return condition()

        until(holds, "the kernel ran")

    def wait_until_over(self) -> None:
        until(lambda: not threads(), "the thread has given up")


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "maru-cuda0-nudge"]


def move(target: CudaTarget, direction: Direction = Direction.STORE) -> None:
    target.submit(direction, OFFSETS, TABLE).wait()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with stand_in() as peer:
        yield peer


@pytest.fixture
def world(peer: Peer) -> Iterator[World]:
    w = World(peer)
    yield w
    w.engine.close()
    assert not threads()


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_nudge, "INTERVAL_S", 0.0)


@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_a_kernel_runs_beside_copies_and_not_again_before_its_time(
    world: World, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_nudge, "INTERVAL_S", 3600.0)
    target = world.attach()
    assert world.driver.kernels == 0
    for _ in range(5):
        move(target, direction)
    world.wait_until_run(1)
    move(target, direction)
    target.close()
    world.engine.close()  # joins the thread
    assert world.driver.kernels == 1


def test_it_runs_beside_later_copies_too_and_is_loaded_anew_for_each_engine(world: World, no_pause: None) -> None:
    first = world.attach()
    world.run_until(first, lambda: world.driver.kernels > 1)
    loaded = set(world.driver.modules)
    world.run_until(first, lambda: world.driver.kernels > 2)
    assert set(world.driver.modules) == loaded
    second = world.attach()
    world.run_until(second, lambda: bool(world.driver.modules) and not loaded & set(world.driver.modules))
    assert len(world.driver.modules) == 1
    first.close()
    second.close()
    world.engine.close()
    assert (world.driver.modules, world.driver.streams, world.driver.contexts) == ({}, {}, 0)


def test_without_the_setting_there_is_none(peer: Peer) -> None:
    assert Transfer().gpu_nudge
    world = World(peer, nudge=False)
    move(world.attach())
    assert not threads()
    world.engine.close()
    assert world.driver.kernels == 0


@pytest.mark.parametrize("code", [REFUSED, ILLEGAL_ADDRESS, UNKNOWN])
@pytest.mark.parametrize("call", ["cuStreamCreateWithPriority", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"])
def test_where_it_cannot_run_nobody_else_notices_and_it_is_said_once(
    call: str, code: int, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target = world.attach()
    world.driver.fail[call] = code
    for _ in range(3):
        move(target)
    world.wait_until_over()
    world.driver.fail.clear()
    move(target, Direction.LOAD)
    move(world.attach())
    assert world.driver.kernels == 0
    assert world.engine.statistics().lost == ()
    assert [f"{call.removesuffix('_v2')} failed" in r.getMessage() for r in caplog.records if SAID in r.getMessage()] == [True]


def test_what_is_no_error_of_the_driver_s_harms_nobody_either(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def launch(*_: object) -> NoReturn:
        raise MemoryError("none left")

    caplog.set_level(logging.INFO)
    world.driver.launch_empty = launch  # type: ignore[method-assign]
    target = world.attach()
    move(target)
    world.wait_until_over()
    move(target)
    assert [SAID in r.getMessage() for r in caplog.records].count(True) == 1
    assert world.driver.modules == {}


@pytest.mark.parametrize("when", ["renewed", "closed"])
def test_a_kernel_that_cannot_be_unloaded_keeps_nothing_else(when: str, world: World, no_pause: None) -> None:
    target = world.attach()
    move(target)
    world.wait_until_run(1)
    world.driver.fail["cuModuleUnload"] = REFUSED
    if when == "renewed":
        world.run_until(world.attach(), lambda: not threads())
    world.engine.close()
    assert (world.driver.contexts, world.driver.events) == (0, {})
