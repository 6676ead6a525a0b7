"""The loader's order, the writer's patience, and what both do when something breaks inside them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.kv_process import HostKvProcess
from tests.support.switched_lease import SwitchedLease, granted
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import segment as segments
from maru_shm.errors import TransferError
from maru_shm.geometry import WHOLE, Direction, KvLayout, KvPlane, Share
from maru_shm.records import ClientRecords, SidecarRecords
from maru_shm.ring import SubmissionProducer
from maru_sidecar.checksum import SlabChecker
from maru_sidecar.copy_thread import PIECE_WEIGHT, WorkerPort
from maru_sidecar.directory import Directory
from maru_sidecar.loader import AGEING, Loader, LoadJob
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.sharing.foreign import ForeignLeases
from maru_sidecar.sharing.slabs import SharedSlabs
from maru_sidecar.slab_handles import Reservation
from maru_sidecar.slab_reader import SlabReader
from maru_sidecar.store_queue import PendingChunks, StoreJob, Writer
from maru_sidecar.tickets import Counters, TicketTable
from maru_sidecar.transfer.base import Copy, KvTarget, MayGoOn
from maru_sidecar.transfer.cpu import CpuTransfer

BLOCK, CHUNK_BLOCKS, BLOCKS = 4096, 4, 256
SLAB = BLOCK * CHUNK_BLOCKS
NAMESPACE = b"n" * 16
U64, I32 = npt.NDArray[np.uint64], npt.NDArray[np.int32]


class Bench:
    """A pool, an engine process, one session's records, a loader and a writer that the test starts."""

    def __init__(self, path: Path, lease: SwitchedLease | None = None) -> None:
        """``lease``: of a node that shares the pool, and was granted all of it."""
        self.pool = PoolFile.open(PoolSpec(path=str(path), size=8 << 20))
        if lease is None:
            self.directory = Directory(self.pool)
            self.directory.rebuild()
        else:
            self.directory = granted(self.pool, lease, range(1, self.pool.n_regions))
        self.checker = None if lease is None else SlabChecker(self.pool)
        self.transfer = CpuTransfer(self.pool.mapping, 2)
        self.process = HostKvProcess()
        regions = self.process.allocate(BLOCKS * BLOCK)
        layout = KvLayout(BLOCKS, 16, (KvPlane(0, 0, BLOCK, BLOCK),), tuple(regions), "bench")
        self.target = self.transfer.attach(layout, self.process.peer)
        shape = L.SegmentShape.for_limits(64, 64, 256)
        info = segments.SegmentInfo(time.time_ns(), 1, shape, os.getpid(), os.getpid(), 1, 1, "0badcafe", L.Role.WORKER)
        self.segment = segments.create(info)
        segments.unlink(info.name)
        self.client = ClientRecords(self.segment, SubmissionProducer(self.segment))
        self.table = TicketTable(SidecarRecords(self.segment), Counters(), lambda: None)
        self.pending = PendingChunks()
        self.quiet = threading.Event()
        self.quiet.set()
        sizes = {"slice_bytes": SLAB, "bytes_in_flight": SLAB, "fence_timeout_s": 60.0}
        reader = SlabReader(self.pool)
        shared = None if lease is None else SharedSlabs(self.directory, reader, ForeignLeases(lambda _: None))
        self.loader = Loader("loader", self.directory, reader, self.checker, shared=shared, **sizes)  # type: ignore[arg-type]
        self.writer = self.make_writer(0.0)

    def make_writer(self, patience_s: float, fence_timeout_s: float = 60.0) -> Writer:
        return Writer(
            "writer", self.directory, self.pending, self.checker, self.quiet,
            slice_bytes=SLAB, bytes_in_flight=SLAB, fence_timeout_s=fence_timeout_s, patience_s=patience_s,
            shared=self.checker is not None,
        )  # fmt: skip

    def port(self, target: KvTarget | None = None) -> WorkerPort:
        return WorkerPort(target or self.target, NAMESPACE, 0, 1, 64, SLAB, self.segment.words)

    def load(self, name: int, chunks: int, target: KvTarget | None = None) -> LoadJob:
        number = self.client.post(L.Op.LOAD, keys(name, chunks), blocks(chunks).tobytes())
        return LoadJob(self.table.open(self.table.records.accept(number)), self.port(target))

    def store(self, name: int, chunks: int, target: KvTarget | None = None) -> StoreJob:
        table = np.concatenate((np.full((1, CHUNK_BLOCKS), L.SKIP_BLOCK, np.int32), blocks(chunks)))
        number = self.client.post(L.Op.STORE, b"r" * 16 + keys(name, chunks), table.tobytes())
        return StoreJob(self.table.open(self.table.records.accept(number)), self.port(target))

    def state(self, job: LoadJob | StoreJob) -> L.State:
        return self.client.state(job.ticket.request.ticket)

    def finished(self, job: LoadJob | StoreJob) -> tuple[L.State, L.Code, int]:
        until(lambda: self.state(job).terminal, "the ticket is answered")
        reply = self.client.reply(job.ticket.request.ticket)
        return reply.state, reply.code, reply.n_done

    def close(self) -> None:
        for thread in (self.loader, self.writer):
            assert thread.stop(30)
        self.target.close()
        self.transfer.close()
        self.process.close()
        self.segment.close()
        self.pool.close(clean=True)


def keys(name: int, chunks: int) -> bytes:
    return b"".join(name.to_bytes(8, "little") + i.to_bytes(8, "little") for i in range(chunks))


def blocks(chunks: int) -> npt.NDArray[np.int32]:
    return np.arange(chunks * CHUNK_BLOCKS, dtype=np.int32).reshape(chunks, CHUNK_BLOCKS)


class Breaking:
    """A target whose copies raise ``error`` from the ``after``-th on; real until then."""

    slice_hint = 0

    def __init__(self, target: KvTarget, error: Exception, after: int, parts: int = 1) -> None:
        self.layout, self._target, self._error, self._left = target.layout, target, error, after
        self.parts = parts
        self.submitted: list[tuple[int, int, int]] = []  #: (chunks, part, parts)

    def submit(
        self, direction: Direction, offsets: U64, table: I32, share: Share = WHOLE, may_go_on: MayGoOn | None = None
    ) -> Copy:
        self._left -= 1
        if self._left < 0:
            raise self._error
        self.submitted.append((len(offsets), *share))
        return self._target.submit(direction, offsets, table, share, may_go_on)

    def checksum(self, table: I32) -> int | None:
        return self._target.checksum(table)

    def close(self) -> None:
        self._target.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    path = Path(f"/dev/shm/maru-test-pool-{os.getpid()}-threads")
    made = Bench(path)
    yield made
    made.close()
    path.unlink()


# --- the loader's order -------------------------------------------------------------------------------------------------------
def test_the_load_with_the_least_left_goes_first(bench: Bench) -> None:
    long, short = bench.load(1, 40), bench.load(2, 3)
    long.queued_ns = short.queued_ns  # ageing is another matter: 70 µs between the two would make up for the difference
    bench.loader._jobs = [long, short]
    assert bench.loader._pick() is short
    long.next = 38
    assert bench.loader._pick() is long


def test_a_load_that_has_waited_is_not_passed_for_ever(bench: Bench) -> None:
    long, short = bench.load(1, 40), bench.load(2, 3)
    excess_ns = int(37 * SLAB / AGEING * 1e9)
    long.queued_ns = short.queued_ns - excess_ns + 1_000  # 1 µs less than its excess would have taken to copy
    bench.loader._jobs = [long, short]
    assert bench.loader._pick() is short
    long.queued_ns = short.queued_ns - excess_ns - 1_000
    bench.loader._jobs = [long, short]
    assert bench.loader._pick() is long


def test_a_load_waiting_for_its_fence_is_passed_over(bench: Bench) -> None:
    number = bench.client.post(L.Op.LOAD, keys(1, 1), blocks(1).tobytes(), fence=5)
    blocked = LoadJob(bench.table.open(bench.table.records.accept(number)), bench.port())
    free = bench.load(2, 30)
    bench.loader._jobs = [blocked, free]
    assert bench.loader._pick() is free
    bench.segment.words[L.WORD_FENCE] = 5
    assert bench.loader._pick() is blocked


# --- the writer's patience ---
def test_stores_wait_for_loads(bench: Bench) -> None:
    bench.quiet.clear()
    bench.writer = bench.make_writer(patience_s=3600)
    bench.writer.start()
    job = bench.store(1, 3)
    bench.writer.put(job)
    until(lambda: not bench.writer._arrived, "the writer has taken it")
    assert bench.state(job) is L.State.ACCEPTED
    assert len(bench.pending) == 0  # nothing is reserved while it stands back
    bench.quiet.set()
    assert bench.finished(job) == (L.State.DONE, L.Code.OK, 3)


def test_stores_make_progress_though_loads_never_end(bench: Bench) -> None:
    bench.quiet.clear()
    bench.writer = bench.make_writer(patience_s=0.001)
    bench.writer.start()
    job = bench.store(1, 5)
    bench.writer.put(job)
    assert bench.finished(job) == (L.State.DONE, L.Code.OK, 5)


# --- things that break --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "code"),
    [(TransferError("a cable", "plug it in"), L.Code.COPY_FAILED), (ZeroDivisionError("a bug"), L.Code.INTERNAL)],
)
def test_an_error_in_one_job_ends_that_job_and_the_thread_goes_on(bench: Bench, error: Exception, code: L.Code) -> None:
    bench.loader.start()
    bench.writer.start()
    broken_store = bench.store(1, 5, Breaking(bench.target, error, after=2))
    bench.writer.put(broken_store)
    assert bench.finished(broken_store) == (L.State.FAILED, code, 2)
    assert bench.directory.lookup(NAMESPACE, keys(1, 5), world=1) == 2
    whole_store = bench.store(1, 5)
    bench.writer.put(whole_store)
    assert bench.finished(whole_store) == (L.State.DONE, L.Code.OK, 3)
    broken_load = bench.load(1, 5, Breaking(bench.target, error, after=3))
    bench.loader.put(broken_load)
    assert bench.finished(broken_load) == (L.State.FAILED, code, 3)
    whole_load = bench.load(1, 5)
    bench.loader.put(whole_load)
    assert bench.finished(whole_load) == (L.State.DONE, L.Code.OK, 5)
    assert bench.loader.alive
    assert bench.writer.alive
    stats = bench.directory.admin.stats()
    assert (stats["slabs_copying"], stats["slabs_writing"], len(bench.pending)) == (0, 0, 0)


def test_a_span_loaded_in_parts_is_complete_with_its_last_part_only(bench: Bench) -> None:
    bench.loader.start()
    bench.writer.start()
    store = bench.store(1, 5)
    bench.writer.put(store)
    assert bench.finished(store)[0] is L.State.DONE
    for after, answer in ((3, (L.State.FAILED, L.Code.COPY_FAILED, 2)), (9, (L.State.DONE, L.Code.OK, 5))):
        target = Breaking(bench.target, TransferError("a cable", "plug it in"), after, parts=2)
        load = bench.load(1, 5, target)
        bench.loader.put(load)
        assert bench.finished(load) == answer
        assert target.submitted == [(2, 0, 2), (2, 1, 2), (2, 0, 2), (2, 1, 2), (1, 0, 1)][:after]


class Meddling(Breaking):
    """Its second copy finds, when it lands, that ``meddle`` was called meanwhile."""

    def __init__(self, target: KvTarget, meddle: Callable[[], None]) -> None:
        super().__init__(target, ZeroDivisionError(), after=99)
        self._meddle = meddle

    def submit(
        self, direction: Direction, offsets: U64, table: I32, share: Share = WHOLE, may_go_on: MayGoOn | None = None
    ) -> Copy:
        if len(self.submitted) == 1:
            self._meddle()
        return super().submit(direction, offsets, table, share, may_go_on)


def test_a_slab_that_changed_during_its_copy_is_a_miss_from_there_on(bench: Bench) -> None:
    bench.loader.start()
    bench.writer.start()
    store = bench.store(1, 4)
    bench.writer.put(store)
    assert bench.finished(store)[0] is L.State.DONE
    with bench.directory.acquire(NAMESPACE, keys(1, 4), rank=0) as acquired:
        second = acquired.refs[1].header

    def meddle() -> None:
        bench.pool.words[second >> 3] = 0

    load = bench.load(1, 4, Meddling(bench.target, meddle))
    bench.loader.put(load)
    assert bench.finished(load) == (L.State.FAILED, L.Code.CHECKSUM, 1)
    assert bench.directory.lookup(NAMESPACE, keys(1, 4), world=1) == 1


def test_a_thread_that_dies_answers_every_ticket_and_is_seen_to_be_dead(bench: Bench) -> None:
    def die() -> bool:
        raise MemoryError("staged")

    jobs = [bench.load(i, 2) for i in range(3)]
    bench.loader._advance = die  # type: ignore[method-assign]
    for job in jobs[:2]:
        bench.loader.put(job)
    bench.loader._thread._target = _quietly(bench.loader._run)  # type: ignore[attr-defined]
    bench.loader.start()
    for job in jobs[:2]:
        assert bench.finished(job)[:2] == (L.State.FAILED, L.Code.INTERNAL)
    until(lambda: not bench.loader.alive, "the thread has ended")
    bench.loader.put(jobs[2])
    assert bench.finished(jobs[2])[:2] == (L.State.FAILED, L.Code.INTERNAL)
    assert not bench.table.outstanding


def _quietly(run):  # type: ignore[no-untyped-def]
    def target() -> None:
        with pytest.raises(MemoryError):
            run()

    return target


def test_stopping_ends_every_job_that_is_left(bench: Bench) -> None:
    bench.loader.start()
    bench.writer.start()
    number = bench.client.post(L.Op.LOAD, keys(1, 1), blocks(1).tobytes(), fence=99)
    waiting = LoadJob(bench.table.open(bench.table.records.accept(number)), bench.port())
    bench.loader.put(waiting)
    assert bench.loader.stop(30)
    assert bench.finished(waiting)[0] is L.State.FAILED
    assert not bench.table.outstanding


# --- copies that do not end ---
def test_a_store_does_not_wait_for_ever_for_a_chunk_whose_writer_hangs(bench: Bench) -> None:
    bench.writer = bench.make_writer(0.0, fence_timeout_s=0.2)
    bench.writer.start()
    job = bench.store(1, 2)
    hanging = bench.directory.reserve(NAMESPACE, keys(1, 1), parent=b"r" * 16, rank=0, world=1, depth=0, tokens=64, nbytes=SLAB)
    assert isinstance(hanging, Reservation)
    bench.pending.begin(job.name(0))
    bench.writer.put(job)
    assert bench.finished(job) == (L.State.FAILED, L.Code.TIMED_OUT, 1)
    assert bench.pending._waiting == {job.name(0): {}}  # nobody is left to be told
    hanging.abort()
    bench.pending.end(job.name(0))


def test_tiny_pieces_count_for_what_their_descriptors_cost(bench: Bench) -> None:
    planes = tuple(KvPlane(0, i * 2, BLOCK, 1) for i in range(256))
    layout = KvLayout(BLOCKS, 16, planes, bench.target.layout.regions, "tiny")
    port = WorkerPort(
        bench.transfer.attach(layout, bench.process.peer), NAMESPACE, 0, 1, 64, 256 * CHUNK_BLOCKS, bench.segment.words
    )
    assert port.slab_weight == 256 * CHUNK_BLOCKS * PIECE_WEIGHT
    job = bench.load(1, 60)
    assert bench.loader._slice_chunks(job) == 1  # of a slab's size
    job.port = port
    bench.loader._slice_bytes = 4 * port.slab_weight
    assert bench.loader._slice_chunks(job) == 4  # though 4096 would fit by their bytes


class Stuck:
    """A copy that ends when the test says so."""

    nbytes = SLAB

    def __init__(self) -> None:
        self.released = threading.Event()

    def wait(self) -> None:
        assert self.released.wait(60)


def test_a_copy_that_does_not_end_shows(bench: Bench) -> None:
    stuck = Stuck()

    class Target:
        slice_hint = 0
        parts = 1
        layout = bench.target.layout

        def submit(
            self, direction: Direction, offsets: U64, table: I32, share: Share = WHOLE, may_go_on: MayGoOn | None = None
        ) -> Copy:
            return stuck

        def checksum(self, table: I32) -> None: ...

        def close(self) -> None: ...

    bench.writer.start()
    assert not bench.writer.hangs(0.0)
    job = bench.store(1, 1, Target())
    bench.writer.put(job)
    until(lambda: bench.writer.hangs(0.0), "the copy is seen to hang")
    assert not bench.writer.hangs(3600.0)
    stuck.released.set()
    assert bench.finished(job) == (L.State.DONE, L.Code.OK, 1)
    assert not bench.writer.hangs(0.0)


# --- a pool that others write too ---------------------------------------------------------------------------------------------
@pytest.fixture
def shared() -> Iterator[tuple[Bench, SwitchedLease]]:
    path, lease = Path(f"/dev/shm/maru-test-pool-{os.getpid()}-threads-shared"), SwitchedLease()
    made = Bench(path, lease)
    made.process.fill(9)
    made.loader.start()
    made.writer.start()
    yield made, lease
    made.close()
    path.unlink()


class Late:
    """A copy, and then what somebody else's late write does to the pool."""

    def __init__(self, copy: Copy, write: Callable[[], None]) -> None:
        self._copy, self._write, self.nbytes = copy, write, copy.nbytes

    def done(self) -> bool:
        return self._copy.done()

    def wait(self) -> None:
        self._copy.wait()
        self._write()


class WrittenLate(Breaking):
    """``write`` is given the slab of the first copy when that has landed, before anybody looks at it."""

    def __init__(self, target: KvTarget, write: Callable[[int], None]) -> None:
        super().__init__(target, ZeroDivisionError(), after=99)
        self._write = write

    def submit(
        self, direction: Direction, offsets: U64, table: I32, share: Share = WHOLE, may_go_on: MayGoOn | None = None
    ) -> Copy:
        copy = super().submit(direction, offsets, table, share, may_go_on)
        return Late(copy, lambda: self._write(int(offsets[0]))) if len(self.submitted) == 1 else copy


def test_a_store_whose_lease_ends_in_the_middle_writes_nothing_more(shared: tuple[Bench, SwitchedLease]) -> None:
    bench, lease = shared
    seen: list[bytes] = []

    def stopped_for_long() -> None:
        lease.held = False
        seen.append(bytes(bench.pool.bytes))

    store = bench.store(1, 3, Meddling(bench.target, stopped_for_long))
    bench.writer.put(store)
    assert bench.finished(store) == (L.State.FAILED, L.Code.POOL_FULL, 0)  # nor is what had landed published
    assert [bytes(bench.pool.bytes)] == seen
    stats = bench.directory.admin.stats()
    assert (stats["slabs_writing"], stats["slabs_committed"]) == (0, 0)
    assert not len(bench.pending)
    lease.held = True
    again = bench.store(1, 3)
    bench.writer.put(again)
    assert bench.finished(again) == (L.State.DONE, L.Code.OK, 3)


def test_a_slab_that_is_anothers_when_its_copy_lands_is_left_to_the_other(shared: tuple[Bench, SwitchedLease]) -> None:
    bench, _ = shared
    seen: list[bytes] = []

    def take_over(_: int) -> None:
        [slab] = [r.slab for ns in bench.directory._held.namespaces.values() for r in ns.pending.values()]  # type: ignore[attr-defined]
        bench.pool.words[slab >> 3] += 1 << 8
        seen.append(bytes(bench.pool.bytes[slab : slab + 256]) + slab.to_bytes(8, "little"))

    store = bench.store(1, 1, WrittenLate(bench.target, take_over))
    bench.writer.put(store)
    assert bench.finished(store) == (L.State.FAILED, L.Code.POOL_FULL, 0)
    slab = int.from_bytes(seen[0][256:], "little")
    assert bytes(bench.pool.bytes[slab : slab + 256]) == seen[0][:256]


def test_no_checksum_vouches_for_what_another_node_wrote_during_a_store(shared: tuple[Bench, SwitchedLease]) -> None:
    bench, _ = shared

    def write(offset: int) -> None:
        bench.pool.bytes[offset + 100] ^= 0xFF

    store = bench.store(1, 2, WrittenLate(bench.target, write))
    bench.writer.put(store)
    assert bench.finished(store) == (L.State.DONE, L.Code.OK, 2)
    load = bench.load(1, 2)
    bench.loader.put(load)
    assert bench.finished(load) == (L.State.FAILED, L.Code.CHECKSUM, 0)


def test_what_another_node_wrote_into_ones_own_slab_during_a_load_is_not_served(shared: tuple[Bench, SwitchedLease]) -> None:
    bench, _ = shared
    store = bench.store(1, 3)
    bench.writer.put(store)
    assert bench.finished(store)[0] is L.State.DONE
    with bench.directory.acquire(NAMESPACE, keys(1, 3), rank=0) as acquired:
        second = acquired.refs[1].offset

    def write() -> None:
        bench.pool.bytes[second + 100] ^= 0xFF

    load = bench.load(1, 3, Meddling(bench.target, write))
    bench.loader.put(load)
    assert bench.finished(load) == (L.State.FAILED, L.Code.CHECKSUM, 1)
    assert bench.directory.lookup(NAMESPACE, keys(1, 3), world=1) == 1
