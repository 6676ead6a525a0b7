"""The empty kernel beside stores, on an emulated driver."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from tests.support.cuda_world import OFFSETS, TABLE, CudaWorld, stand_in

from maru_shm.errors import TransferError
from maru_shm.geometry import Direction
from maru_sidecar.config import Transfer
from maru_sidecar.transfer import cuda_nudge
from maru_sidecar.transfer.base import Peer
from maru_sidecar.transfer.cuda import CudaTarget

REFUSED, ILLEGAL_ADDRESS = 1, 700


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class World(CudaWorld):
    def __init__(self, peer: Peer, *, nudge: bool = True) -> None:
        super().__init__(pin=False, nudge=nudge)
        self.peer = peer

    def attach(self) -> CudaTarget:
        return self.engine.attach(self.one()[0], self.peer)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with stand_in() as peer:
        yield peer


@pytest.fixture
def world(peer: Peer) -> Iterator[World]:
    w = World(peer)
    yield w
    w.engine.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cuda_nudge, "time", clock)
    return clock


def move(target: CudaTarget, direction: Direction = Direction.STORE) -> None:
    target.submit(direction, OFFSETS, TABLE).wait()


def test_a_kernel_runs_beside_a_store_at_most_once_a_second_and_never_beside_a_load(world: World, clock: Clock) -> None:
    target = world.attach()
    move(target, Direction.LOAD)
    assert world.driver.kernels == 0
    launches = []
    for clock.now in (0.0, 0.5, 0.9, 1.0, 1.9, 2.1):
        move(target)
        launches.append(world.driver.kernels)
    assert launches == [1, 1, 1, 2, 2, 3]


def test_it_is_loaded_anew_for_each_engine_and_nothing_of_it_is_left(world: World, clock: Clock) -> None:
    first = world.attach()
    assert world.driver.modules == {}
    move(first)
    loaded = set(world.driver.modules)
    second = world.attach()
    assert world.driver.modules == {}
    clock.now = 5
    move(first)
    assert len(world.driver.modules) == 1
    assert not loaded & set(world.driver.modules)
    first.close()
    second.close()
    world.engine.close()
    assert (world.driver.modules, world.driver.streams, world.driver.contexts) == ({}, {}, 0)


def test_without_the_setting_there_is_none(peer: Peer, clock: Clock) -> None:
    assert Transfer().gpu_nudge
    world = World(peer, nudge=False)
    move(world.attach())
    assert world.driver.kernels == 0
    world.engine.close()


@pytest.mark.parametrize("call", ["cuStreamCreateWithPriority", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"])
def test_where_it_cannot_run_stores_go_on_and_it_is_said_once(
    call: str, world: World, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    if call == "cuStreamCreateWithPriority":
        keep = world.attach()  # the streams of copies are there
        device = keep.device
        world.driver.fail[call] = REFUSED
        device.nudge = cuda_nudge.Nudge(world.driver)
    else:
        world.driver.fail[call] = REFUSED
    target = world.attach()
    for clock.now in (0.0, 2.0, 4.0):
        move(target)
    assert [r.getMessage() for r in caplog.records if "an empty kernel cannot be run" in r.getMessage()] == [
        f"decode steps of the engines may take 3 % longer than they could: an empty kernel cannot be run ({call} failed with "
        f"EMULATED_{REFUSED} ({REFUSED}))"
    ]
    world.driver.fail.clear()
    clock.now = 9
    move(target)
    assert world.driver.kernels == 0


def test_a_store_that_was_accepted_stays_so_when_the_kernel_finds_the_gpu_lost(world: World, clock: Clock) -> None:
    target = world.attach()
    world.driver.fail["cuLaunchKernel"] = ILLEGAL_ADDRESS
    copy = target.submit(Direction.STORE, OFFSETS, TABLE)
    copy.wait()
    with pytest.raises(TransferError, match="is lost"):
        target.submit(Direction.STORE, OFFSETS, TABLE)
