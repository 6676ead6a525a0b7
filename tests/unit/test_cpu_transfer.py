"""The cpu engine's own edges: pieces merged and cut into calls, copies that fail half-way, shared work."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from tests.support.kv_process import HostKvProcess, random_bytes
from tests.support.shm_pool import ShmPool

from maru_shm.errors import AttachRefused, EngineGone, RegionNotHeld, TransferError
from maru_shm.geometry import Direction, KvLayout, KvPlane, KvRegion, RegionKind
from maru_sidecar.transfer import cpu
from maru_sidecar.transfer.base import Peer
from maru_sidecar.transfer.cpu import BUFFER_BYTES, CALL_BYTES, IOV_MAX, CpuTransfer


@pytest.fixture(scope="module")
def pool() -> Iterator[ShmPool]:
    made = ShmPool(64 << 20)
    yield made
    made.close()


@pytest.fixture
def process() -> Iterator[HostKvProcess]:
    made = HostKvProcess()
    yield made
    made.close()


@pytest.fixture(params=[1, 3], ids=["one-thread", "three-threads"])
def engine(request: pytest.FixtureRequest, pool: ShmPool) -> Iterator[CpuTransfer]:
    made = CpuTransfer(pool.mapping, request.param)
    yield made
    made.close()


def flat_layout(region: KvRegion, block: int) -> KvLayout:
    return KvLayout(region.size // block, 16, (KvPlane(0, 0, block, block),), (region,), "flat")


def test_a_copy_of_thousands_of_tiny_pieces_takes_calls_of_1024(
    engine: CpuTransfer, process: HostKvProcess, pool: ShmPool
) -> None:
    n, planes, piece = 128, 65, 48
    (region,) = process.allocate(n * planes * piece)
    layout = KvLayout(n, 16, tuple(KvPlane(0, i * n * piece, piece, piece, i) for i in range(planes)), (region,), "tiny")
    (memory,) = process.fill(1)
    blocks = np.random.default_rng(2).permutation(n).astype(np.int32).reshape(1, n)
    target = engine.attach(layout, process.peer)
    target.submit(Direction.STORE, np.array([4096], np.uint64), blocks).wait()
    by_plane = memory.reshape(planes, n, piece)[:, blocks[0]]
    np.testing.assert_array_equal(pool.bytes[4096 : 4096 + memory.nbytes], by_plane.reshape(-1))
    assert n * planes > 4 * IOV_MAX


def test_neighbouring_blocks_become_one_piece_up_to_a_call(process: HostKvProcess, pool: ShmPool, engine: CpuTransfer) -> None:
    block = 64 << 10
    (region,) = process.allocate(512 * block)
    target = engine.attach(flat_layout(region, block), process.peer)
    local, remote = target._pieces(np.array([0], np.uint64), np.arange(512, dtype=np.int32).reshape(1, 512), slice(None))
    assert len(local) == 512 * block // CALL_BYTES
    assert (local["len"] == remote["len"]).all()
    assert int(local["len"].sum()) == region.size


def test_a_piece_larger_than_a_call_is_one_call(process: HostKvProcess, pool: ShmPool, engine: CpuTransfer) -> None:
    block = 12 << 20
    (region,) = process.allocate(2 * block)
    (memory,) = process.fill(3)
    target = engine.attach(flat_layout(region, block), process.peer)
    target.submit(Direction.STORE, np.array([0], np.uint64), np.array([[1, 0]], np.int32)).wait()
    np.testing.assert_array_equal(pool.bytes[:block], memory[block:])
    np.testing.assert_array_equal(pool.bytes[block : 2 * block], memory[:block])


@pytest.mark.parametrize("direction", Direction)
def test_a_copy_that_meets_unreachable_memory_raises_and_the_next_one_works(
    engine: CpuTransfer, process: HostKvProcess, pool: ShmPool, direction: Direction
) -> None:
    size, hole, block = 32 << 20, 16 << 20, 1 << 20
    regions = process.call("allocate_with_a_hole", size, hole)
    target = engine.attach(flat_layout(regions[0], block), process.peer)
    with pytest.raises(TransferError, match="Bad address"):
        target.submit(direction, np.array([0], np.uint64), np.arange(12, 20, dtype=np.int32).reshape(1, 8)).wait()
    pool.bytes[: 8 << 20] = random_bytes(4, 8 << 20)
    target.submit(Direction.LOAD, np.array([0], np.uint64), np.arange(8, dtype=np.int32).reshape(1, 8)).wait()
    np.testing.assert_array_equal(process.read()[0][: 8 << 20], pool.bytes[: 8 << 20])
    target.close()


def test_a_partial_call_is_continued_where_it_stopped() -> None:
    local = cpu._iovec([1000, 5000, 9000], [100, 200, 300])
    remote = cpu._iovec([10, 20, 30], [100, 200, 300])
    for moved in range(601):
        rest_local, rest_remote = cpu._rest(local, remote, moved)
        assert int(rest_local["len"].sum()) == 600 - moved
        assert (rest_local["len"] == rest_remote["len"]).all()
        if len(rest_local):
            whole = 3 - len(rest_local)
            inside = moved - sum((100, 200, 300)[:whole])
            assert rest_local["base"][0] == (1000, 5000, 9000)[whole] + inside
            assert rest_remote["base"][0] == (10, 20, 30)[whole] + inside
    assert local["base"].tolist() == [1000, 5000, 9000]  # the caller's arrays are not changed


def test_a_store_asks_before_each_call_and_what_is_refused_is_not_written(
    engine: CpuTransfer, process: HostKvProcess, pool: ShmPool
) -> None:
    block, calls, allowed = 1 << 20, 6, 3
    (region,) = process.allocate(calls * CALL_BYTES)
    (memory,) = process.fill(5)
    target = engine.attach(flat_layout(region, block), process.peer)
    pool.bytes[: calls * CALL_BYTES] = 0
    asked = itertools.count(1)

    def may_go_on() -> None:
        if next(asked) > allowed:
            raise RegionNotHeld("the lease is over", "")

    table = np.arange(calls * CALL_BYTES // block, dtype=np.int32).reshape(1, -1)
    copy = target.submit(Direction.STORE, np.array([0], np.uint64), table, may_go_on=may_go_on)
    with pytest.raises(RegionNotHeld):
        copy.wait()
    target.close()  # nothing runs any more
    written = pool.bytes[: calls * CALL_BYTES].reshape(calls, -1)
    wanted = memory.reshape(calls, -1)
    whole = [bool((written[i] == wanted[i]).all()) for i in range(calls)]
    assert sum(whole) == allowed
    assert not written[~np.array(whole)].any()


@pytest.mark.parametrize("piece", [48, 5000, 3 * BUFFER_BYTES + 12345], ids=["tiny", "pages", "larger-than-the-buffer"])
def test_a_checksum_is_taken_of_the_engines_memory_in_a_slabs_order(
    engine: CpuTransfer, process: HostKvProcess, pool: ShmPool, piece: int
) -> None:
    n, planes = 40 if piece < BUFFER_BYTES else 4, 3
    (region,) = process.allocate(n * planes * piece)
    layout = KvLayout(n, 16, tuple(KvPlane(0, i * n * piece, piece, piece, i) for i in range(planes)), (region,), "planes")
    process.fill(6)
    target = engine.attach(layout, process.peer)
    table = np.array([[3, 0, 1]], np.int32)
    nbytes = planes * 3 * piece
    target.submit(Direction.STORE, np.array([4096], np.uint64), table).wait()
    stored = xxhash.xxh3_64_intdigest(pool.bytes[4096 : 4096 + nbytes].tobytes())
    pool.bytes[4096 : 4096 + nbytes] = 0
    assert target.checksum(table[0]) == stored
    assert not pool.bytes[4096 : 4096 + nbytes].any()
    process.kill()
    with pytest.raises(EngineGone):
        target.checksum(table[0])


def test_a_process_that_has_ended_is_refused_at_attach(engine: CpuTransfer, process: HostKvProcess) -> None:
    (region,) = process.allocate(1 << 20)
    process.kill()
    with pytest.raises(AttachRefused, match="ended"):
        engine.attach(flat_layout(region, 4096), process.peer)


def test_another_process_with_a_dead_peer_s_pid_is_never_touched(
    engine: CpuTransfer, process: HostKvProcess, pool: ShmPool
) -> None:
    """The pid is a living process's, the pidfd a dead one's: what counts is the pidfd."""
    impostor = HostKvProcess()
    try:
        (region,) = impostor.allocate(1 << 20)
        impostor.fill(1)
        target = engine.attach(flat_layout(region, 4096), impostor.peer)
        process.kill()
        target.peer = Peer(impostor.peer.pid, process.pidfd)
        before = impostor.read()[0]
        for direction in Direction:
            with pytest.raises(EngineGone):
                target.submit(direction, np.array([0], np.uint64), np.arange(8, dtype=np.int32).reshape(1, 8)).wait()
        np.testing.assert_array_equal(impostor.read()[0], before)
    finally:
        impostor.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the uid needs root")
def test_memory_of_another_user_is_refused_with_the_remedy(pool: ShmPool, tmp_path: os.PathLike[str]) -> None:
    """An unprivileged child tries to attach to this (root's) process."""
    memory = np.zeros(1 << 20, np.uint8)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        said = b"nothing was refused"
        try:
            region = KvRegion(RegionKind.PROCESS_VM, memory.ctypes.data, memory.nbytes)
            CpuTransfer._probe(0, region.address, Peer(os.getppid(), os.pidfd_open(os.getppid())))
        except AttachRefused as e:
            said = str(e).encode()
        finally:
            os.write(writer, said)
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)
    assert "EPERM" in said
    assert "ptrace_scope" in said


def test_a_region_of_gpu_memory_is_refused(engine: CpuTransfer, process: HostKvProcess) -> None:
    region = KvRegion(RegionKind.CUDA_IPC, 1 << 30, 1 << 20, b"\0" * 64, "GPU-0")
    with pytest.raises(AttachRefused, match="cuda_ipc"):
        engine.attach(flat_layout(region, 4096), process.peer)


def test_an_engine_of_another_user_is_refused_by_name(engine: CpuTransfer, process: HostKvProcess) -> None:
    (region,) = process.allocate(4096)
    somebody = dataclasses.replace(process.peer, uid=os.geteuid() + 1)
    with pytest.raises(AttachRefused, match="the engine is of uid"):
        engine.attach(flat_layout(region, 4096), somebody)
    engine.attach(flat_layout(region, 4096), process.peer)
