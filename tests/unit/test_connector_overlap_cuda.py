"""Overlapped loads on an emulated GPU: the same code and descriptors, streams that run only when something waits for them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.support.cuda_emulator import EmulatedDriver
from tests.support.kv_cases import KvCase, block_tables, cases

from maru_connector import overlap_cuda
from maru_connector.overlap_cuda import TRIAL_BYTES, CudaCopier, Engine
from maru_connector.pool_view import PoolView
from maru_shm import layout as L
from maru_shm import poolformat as P
from maru_shm.cuda import driver as D
from maru_shm.placed_planes import PlacedPlane

REGION = 4 << 20


class World:
    """A pool file, an emulated GPU with a KV cache, and a compute stream."""

    def __init__(self, case: KvCase, *, batch: int = 2) -> None:
        self.rng = np.random.default_rng(3)
        fd = os.memfd_create("pool")
        header = P.POOL_HEADER.pack(P.POOL_MAGIC, P.FORMAT, 0, b"u" * 16, 4 * REGION, REGION, 4, 0, b"b" * 16, 0, 0)
        os.write(fd, header + self.rng.bytes(4 * REGION - len(header)))
        self.view = PoolView(fd, 4 * REGION)
        os.close(fd)
        self.pool = np.frombuffer(memoryview(self.view._map), np.uint8)
        self.driver = EmulatedDriver(self.pool, batch=batch)
        self.layers: list[tuple[PlacedPlane, ...]] = []
        self.memory = []
        for size in case.allocations:
            _, memory = self.driver.allocate(size, self.rng.integers(0, 256, size, np.uint8))
            self.driver.opened[memory.ctypes.data] = 1
            self.memory.append(memory)
        offset = 0
        for plane in case.planes:
            address = self.memory[plane.region].ctypes.data + plane.offset
            self.layers.append((PlacedPlane(plane.region, address, offset, plane.block_stride, plane.piece_bytes),))
            offset += plane.piece_bytes
        _, self.scratch = self.driver.allocate(TRIAL_BYTES)
        self.driver.opened[self.scratch.ctypes.data] = 1
        self.compute = self.driver.create_stream()
        engine = Engine(0, lambda: self.compute, self.scratch.ctypes.data, self.scratch.tobytes)
        self.copier = CudaCopier(self.layers, engine, self.driver)

    def ready(self) -> None:
        self.copier.adopt(self.view)
        end = time.monotonic() + 10
        while not self.copier.usable(self.view):
            assert time.monotonic() < end, "the pool was not locked"
            time.sleep(0.001)

    def arrived(self, layer: int, slabs: np.ndarray, blocks: np.ndarray) -> bool:
        """Whether a layer's pieces of every block are the slab's."""
        [plane] = self.layers[layer]
        memory = self.memory[plane.allocation]
        base = plane.device - memory.ctypes.data
        for slab, row in zip(slabs.tolist(), blocks.tolist(), strict=True):
            for j, block in enumerate(row):
                if block == L.SKIP_BLOCK:
                    continue
                have = memory[base + block * plane.block_stride :][: plane.piece]
                want = self.pool[slab + len(row) * plane.slab_offset + j * plane.piece :][: plane.piece]
                if (have != want).any():
                    return False
        return True

    def run_compute(self) -> None:
        """Let the compute stream get as far as it was told, and no other."""
        self.driver.cuStreamSynchronize(self.compute)

    def close(self) -> None:
        self.copier.close()
        self.copier.forget(self.view)
        del self.pool
        self.driver.host = np.empty(0, np.uint8)
        self.view.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World(cases()[0])
    yield made
    made.close()


@pytest.mark.parametrize("batch", [0, 1, 2], ids=["cuda-12.0", "cuda-12.8", "cuda-13"])
@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_compute_that_waits_for_a_layer_finds_it_there_whatever_the_layout(case: KvCase, batch: int) -> None:
    world = World(case, batch=batch)
    world.ready()
    offsets = np.array([REGION, 3 * REGION, 2 * REGION], np.uint64)
    for table in block_tables(world.rng, case.num_blocks, 3, 4).values():
        for memory in world.memory:
            memory[:] = 0
        world.copier.start(offsets + np.uint64(world.view.address), table)
        for layer in range(len(world.layers)):
            world.copier.wait_layer(layer)
            world.run_compute()
            assert world.arrived(layer, offsets, table)
        world.copier.finish()
    world.close()


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_no_copy_reaches_from_one_page_locked_piece_into_the_next(case: KvCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_connector.overlap_cuda.PIECE_BYTES", 5 * 4096)  # the driver refuses a copy that does
    world = World(case)
    world.ready()
    offsets = np.array([3 * REGION, 2 * REGION, REGION], np.uint64)
    for table in block_tables(world.rng, case.num_blocks, 3, 4).values():
        for memory in world.memory:
            memory[:] = 0
        world.copier.start(offsets + np.uint64(world.view.address), table)
        world.copier.finish()
        world.run_compute()
        assert all(world.arrived(layer, offsets, table) for layer in range(len(world.layers)))
    world.close()


@pytest.mark.parametrize("call", ["cuMemcpy3DBatchAsync_v2", "cuMemcpyBatchAsync_v2"])
def test_copies_that_the_driver_refuses_once_a_hit_is_claimed_are_made_by_staging_and_the_path_is_given_up(call: str) -> None:
    world = World(next(c for c in cases() if c.name == "packed-kv"))
    world.ready()
    offsets, table = np.array([REGION, 3 * REGION], np.uint64), np.array([[7, 3, 5], [9, 10, 11]], np.int32)
    world.driver.fail[call] = world.driver.fail["cuMemcpyBatchAsync_v2"] = D.INVALID_VALUE
    world.copier.start(offsets + np.uint64(world.view.address), table)
    world.copier.finish()
    world.run_compute()
    assert all(world.arrived(layer, offsets, table) for layer in range(len(world.layers)))
    assert not world.copier.usable(world.view)
    world.close()


def test_compute_waits_for_its_own_layer_only(world: World) -> None:
    world.ready()
    offsets, table = np.array([REGION], np.uint64), np.array([[7, 3, 5]], np.int32)
    assert len(world.layers) > 1
    world.copier.start(offsets + np.uint64(world.view.address), table)
    world.copier.wait_layer(0)
    world.run_compute()
    assert world.arrived(0, offsets, table)
    assert not world.arrived(len(world.layers) - 1, offsets, table)
    world.copier.finish()
    assert all(world.arrived(layer, offsets, table) for layer in range(len(world.layers)))


def test_copies_wait_for_the_compute_launched_before_them(world: World) -> None:
    world.ready()
    before: list[bool] = []
    offsets, table = np.array([REGION], np.uint64), np.array([[1, 2, 3]], np.int32)
    stream = world.driver.streams[world.compute]
    stream.pending.append(lambda: before.append(world.arrived(0, offsets, table)))
    stream.queued += 1
    world.copier.start(offsets + np.uint64(world.view.address), table)
    world.driver.cuStreamSynchronize(world.copier._stream)
    assert before == [False]
    world.copier.finish()


def test_the_pool_is_locked_read_only_in_pieces_and_unlocked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_cuda, "PIECE_BYTES", REGION)
    world = World(cases()[0])
    world.ready()
    registered, end = sorted(world.driver.registered.items()), world.view.address
    for address, size in registered:
        assert address == end
        end += size
        assert end % REGION == 0 or end == world.view.address + world.view.size
    assert end == world.view.address + world.view.size
    assert len(registered) in (4, 5)  # the first and the last may be short
    world.close()
    assert not world.driver.registered


def test_where_the_driver_refuses_to_lock_the_pool_the_path_stays_unused(world: World) -> None:
    world.driver.fail["cuMemHostRegister"] = 801
    world.copier.adopt(world.view)
    for thread in world.copier._threads:
        thread.join()
    assert not world.copier.usable(world.view)
    assert not world.driver.registered
