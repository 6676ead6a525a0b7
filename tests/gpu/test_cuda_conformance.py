"""Bytes moved between the pool and another process's GPU memory, compared with a plain gather and scatter."""

from __future__ import annotations

import os

import numpy as np
import pytest

from maru_shm.cuda.driver import CudaDriver
from maru_shm.errors import AttachRefused
from maru_shm.geometry import Direction, KvLayout, KvPlane
from maru_sidecar.transfer import cuda_device, cuda_nudge, cuda_pinning
from maru_sidecar.transfer.cuda import CudaTarget, CudaTransfer
from maru_sidecar.transfer.cuda_pinning import PinState
from tests.gpu.conftest import REGION
from tests.gpu.kv_process import KvProcess
from tests.support.kv_cases import KvCase, block_tables, cases
from tests.support.kv_process import random_bytes
from tests.support.shm_pool import ShmPool
from tests.support.waiting import until

CHUNKS, PER_CHUNK = 6, 4
ALL = cases()
#: Twelve layers with an allocation each (torch gives tensors from 10 MiB on one): 128 scattered blocks are 1,500 flat rows.
ROWS = KvCase("many-rows", 704, (704 * 16384,) * 12, tuple(KvPlane(i, 0, 16384, 16384, i) for i in range(12)))


def attach(transfer: CudaTransfer, process: KvProcess, case: KvCase) -> CudaTarget:
    return transfer.attach(case.layout(process.allocate(*case.allocations)), process.peer)


def offsets_for(case: KvCase, rng: np.random.Generator) -> np.ndarray:
    """Slab places over several regions, none across a boundary."""
    slab = PER_CHUNK * case.block_bytes
    per_region = (REGION - 8192) // slab
    places = [r * REGION + 8192 + i * slab for r in range(1, 9) for i in range(min(2, per_region))]
    return np.array(places, np.uint64)[rng.permutation(len(places))[:CHUNKS]]


def check_loads_and_stores(target: CudaTarget, process: KvProcess, pool: ShmPool, case: KvCase) -> None:
    rng = np.random.default_rng(5)
    size = PER_CHUNK * case.block_bytes
    for seed, table in enumerate(block_tables(rng, case.num_blocks, CHUNKS, PER_CHUNK).values()):
        offsets = offsets_for(case, rng)
        pool.bytes[REGION : 10 * REGION] = random_bytes(1000 + seed, 9 * REGION)
        wanted = process.fill(2000 + seed)  # poisoned: every byte outside the blocks must stay
        for offset, blocks in zip(offsets, table, strict=True):
            case.scatter(wanted, blocks, pool.bytes[int(offset) : int(offset) + size])
        target.submit(Direction.LOAD, offsets, table).wait()
        for got, want in zip(process.read(), wanted, strict=True):
            np.testing.assert_array_equal(got, want)

        memory = process.fill(3000 + seed)
        pool.bytes[REGION : 10 * REGION] = random_bytes(4000 + seed, 9 * REGION)
        expected = pool.bytes[: 10 * REGION].copy()
        for offset, blocks in zip(offsets, table, strict=True):
            keep = case.kept(blocks)
            expected[int(offset) : int(offset) + size][keep] = case.slab(memory, blocks)[keep]
        target.submit(Direction.STORE, offsets, table).wait()
        np.testing.assert_array_equal(pool.bytes[: 10 * REGION], expected)


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_every_layout_arrives_byte_for_byte(
    case: KvCase, transfer: CudaTransfer, engine_process: KvProcess, pool: ShmPool
) -> None:
    target = attach(transfer, engine_process, case)
    assert transfer.pinning.join(60) is PinState.PINNED
    check_loads_and_stores(target, engine_process, pool, case)


@pytest.mark.parametrize("submitters", [1, 2, 3])
def test_many_flat_rows_arrive_byte_for_byte_whoever_submits_them(
    submitters: int, transfer: CudaTransfer, engine_process: KvProcess, pool: ShmPool
) -> None:
    target = attach(transfer, engine_process, ROWS)
    target.device.submitters = submitters
    assert transfer.pinning.join(60) is PinState.PINNED
    rng = np.random.default_rng(6)
    size = 4 * ROWS.block_bytes
    for seed in range(2):
        table = rng.permutation(ROWS.num_blocks)[:128].astype(np.int32).reshape(32, 4)
        offsets = (1 + rng.permutation(40)[:32]).astype(np.uint64) * np.uint64(size)
        pool.bytes[size : 41 * size] = random_bytes(5000 + seed, 40 * size)
        wanted = engine_process.fill(6000 + 100 * seed)
        for offset, blocks in zip(offsets, table, strict=True):
            ROWS.scatter(wanted, blocks, pool.bytes[int(offset) : int(offset) + size])
        copy = target.submit(Direction.LOAD, offsets, table)
        copy.wait()
        assert copy.operations > cuda_device.ALONE
        for got, want in zip(engine_process.read(), wanted, strict=True):
            np.testing.assert_array_equal(got, want)

        memory = engine_process.fill(7000 + 100 * seed)
        pool.bytes[size : 41 * size] = random_bytes(8000 + seed, 40 * size)
        expected = pool.bytes[: 41 * size].copy()
        for offset, blocks in zip(offsets, table, strict=True):
            expected[int(offset) : int(offset) + size] = ROWS.slab(memory, blocks)
        target.submit(Direction.STORE, offsets, table).wait()
        np.testing.assert_array_equal(pool.bytes[: 41 * size], expected)
    assert min(len(lane.submitters) for lane in target.device._lanes.values()) >= submitters - 1
    target.device.submitters = 1
    target.close()


def test_the_kernel_beside_copies_runs_for_each_engine(
    engine_process: KvProcess, pool: ShmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_nudge, "INTERVAL_S", 0.0)
    driver, ran = CudaDriver(), []
    launch = driver.launch_empty

    def counted(kernel: int, stream: int) -> None:
        launch(kernel, stream)
        driver.wait_stream(stream)
        ran.append(kernel)

    monkeypatch.setattr(driver, "launch_empty", counted)
    transfer = CudaTransfer(pool.mapping, REGION, nudge=True, driver=driver)
    for _ in range(2):
        before = len(ran)
        target = attach(transfer, engine_process, ALL[0])
        check_loads_and_stores(target, engine_process, pool, ALL[0])
        until(lambda before=before: len(ran) > before, "the kernel ran")
    transfer.close()


@pytest.mark.parametrize("case", [ALL[0], ALL[3], ALL[9]], ids=lambda c: c.name)
def test_an_unpinned_pool_arrives_byte_for_byte_too(case: KvCase, engine_process: KvProcess, pool: ShmPool) -> None:
    transfer = CudaTransfer(pool.mapping, REGION, pin=False)
    check_loads_and_stores(attach(transfer, engine_process, case), engine_process, pool, case)
    transfer.close()


@pytest.mark.parametrize("batch", [0, 1], ids=["copy-by-copy", "batch-of-cuda-12.8"])
@pytest.mark.parametrize("case", [ALL[0], ALL[9]], ids=lambda c: c.name)
def test_an_older_driver_s_calls_move_the_same_bytes(
    case: KvCase, batch: int, engine_process: KvProcess, pool: ShmPool
) -> None:
    driver = CudaDriver()
    driver.limit_batch(batch)
    transfer = CudaTransfer(pool.mapping, REGION, driver=driver)
    check_loads_and_stores(attach(transfer, engine_process, case), engine_process, pool, case)
    transfer.close()


def test_copies_race_registration_without_harm(
    engine_process: KvProcess, pool: ShmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copies run while the pool is being pinned: some pageable, some not, none across two registrations."""
    case = ALL[0]
    monkeypatch.setattr(cuda_pinning, "PIECE_BYTES", REGION)
    for _ in range(3):
        transfer = CudaTransfer(pool.mapping, REGION)
        check_loads_and_stores(attach(transfer, engine_process, case), engine_process, pool, case)
        transfer.close()


def test_two_workers_of_one_allocation_share_its_mapping(transfer: CudaTransfer, engine_process: KvProcess) -> None:
    case = ALL[0]
    layout = case.layout(engine_process.allocate(*case.allocations))
    first, second = transfer.attach(layout, engine_process.peer), transfer.attach(layout, engine_process.peer)
    first.close()
    second.submit(Direction.STORE, np.array([REGION], np.uint64), np.zeros((1, 4), np.int32)).wait()
    second.close()


def test_an_exported_vmm_allocation_is_imported_by_its_descriptor(
    transfer: CudaTransfer, engine_process: KvProcess, pool: ShmPool
) -> None:
    size = 4 << 20
    region, fd = engine_process.vmm(size)
    layout = KvLayout(size // 65536, 16, (KvPlane(0, 0, 65536, 65536),), (region,), "vmm")
    target = transfer.attach(layout, engine_process.peer, [fd])
    os.close(fd)
    pool.bytes[REGION : REGION + size] = 0
    table = np.arange(size // 65536, dtype=np.int32).reshape(1, -1)
    target.submit(Direction.STORE, np.array([REGION], np.uint64), table).wait()
    assert (pool.bytes[REGION : REGION + size] == 0x5A).all()


def test_memory_without_an_ipc_handle_is_refused_by_name(engine_process: KvProcess) -> None:
    assert "expandable_segments" in engine_process.call("refuse_expandable")


def test_a_handle_that_is_no_longer_valid_is_refused_by_name(transfer: CudaTransfer, engine_process: KvProcess) -> None:
    case = ALL[0]
    layout = case.layout(engine_process.allocate(*case.allocations))
    engine_process.allocate(4096)  # frees the first one
    engine_process.call("allocate")
    with pytest.raises(AttachRefused, match="cannot be imported"):
        transfer.attach(layout, engine_process.peer)
