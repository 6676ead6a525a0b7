"""An engine that does random things for ever and checks every byte and every answer: one end of the crash fuzz.

Run as ``python -m tests.support.fuzz_engine SOCKET NAME SEED TALLY_FD``. The tally is a shared array of u64 counters, so that
what was counted survives SIGKILL. The bytes of a chunk follow from its key, so any engine can check what any other has
stored.
"""

from __future__ import annotations

import enum
import mmap
import os
import random
import sys
import time

import numpy as np
import numpy.typing as npt

from maru_shm import layout as L
from maru_shm.errors import AttachRefused, ProtocolViolation, RingFull, SidecarUnavailable
from tests.support.client import Client, KvCache, prompt_keys

PROMPTS = 24
MAX_CHUNKS = 6
PER_CHUNK = 4
SLOTS = 16  #: chunk-sized places in the KV cache, each with at most one ticket
IN_FLIGHT = 12
#: what may go wrong without anybody being at fault
EXCUSED = {L.Code.NOT_FOUND, L.Code.POOL_FULL, L.Code.DRAINING, L.Code.NOT_REGISTERED, L.Code.ENGINE_GONE}


class Tally(enum.IntEnum):
    """Indices into the shared counters."""

    ANSWERED = 0  #: tickets with a terminal answer
    LOST = 1  #: tickets out when the sidecar went away
    CORRUPT = 2  #: a byte that was not what it had to be
    REPEATED = 3  #: an answer for a ticket that had one already
    UNEXCUSED = 4  #: a failure that should not happen
    LOADED = 5  #: chunks loaded and checked
    STORED = 6
    CANCELLED = 7
    ATTACHED = 8
    POSTED = 9


def tally(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")


def chunk_bytes(key: bytes, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """The KV cache of chunk ``key``: (blocks, layers, piece)."""
    n = int(np.prod(shape))
    return np.frombuffer(np.random.default_rng(int.from_bytes(key, "little")).bytes(n), np.uint8).reshape(shape)


class FuzzEngine:
    """One attachment's life; :meth:`run` returns when the sidecar has gone."""

    def __init__(self, socket: str, name: str, rng: random.Random, counts: memoryview) -> None:
        self.rng, self.counts = rng, counts
        self.cache = KvCache(num_blocks=SLOTS * MAX_CHUNKS * PER_CHUNK, layers=2, piece=2048)
        self.worker = Client(socket, engine_id=name, cache=self.cache, max_records=IN_FLIGHT + 4)
        self.scheduler = Client(socket, engine_id=name, role=L.Role.SCHEDULER, max_records=8)
        self.free_slots = list(range(SLOTS))
        self.out: dict[int, tuple[L.Op, bytes, int]] = {}  #: ticket → op, keys, slot
        self.withdrawn: set[int] = set()
        self.freed: dict[int, int] = {}  #: record index → state word it was left with
        self.step = 0
        counts[Tally.ATTACHED] += 1

    def run(self) -> None:
        while True:
            self.step += 1
            self.worker.set_fence(self.step)
            if len(self.out) < IN_FLIGHT and self.free_slots:
                self.post()
            self.poll()
            if self.step % 16 == 0 and self.worker.hung_up():
                self.poll()
                self.counts[Tally.LOST] += len(self.out)
                return

    def blocks(self, slot: int, chunks: int) -> npt.NDArray[np.int32]:
        first = slot * MAX_CHUNKS * PER_CHUNK
        return np.arange(first, first + chunks * PER_CHUNK, dtype=np.int32).reshape(chunks, PER_CHUNK)

    def post(self) -> None:
        rng = self.rng
        keys = prompt_keys(f"fuzz{rng.randrange(PROMPTS)}", rng.randint(1, MAX_CHUNKS))
        chunks = len(keys) // 16
        if rng.random() < 0.3:
            ticket = self.scheduler.post(L.Op.LOOKUP, keys)
            reply = self.scheduler.wait(ticket)
            self.count(Tally.POSTED)
            self.count(Tally.ANSWERED)
            self.excuse(reply.code)
            (self.scheduler.release if rng.random() < 0.9 else self.scheduler.records.free)(ticket)
            self.scheduler.publish()
            return
        slot = self.free_slots.pop(rng.randrange(len(self.free_slots)))
        table = self.blocks(slot, chunks)
        fence = self.step + rng.choice((0, 0, 0, 1, 3))
        self.check_freed()
        try:
            if rng.random() < 0.5:
                for i in range(chunks):
                    self.cache.blocks[table[i]] = self.expected(keys, i)
                op, ticket = L.Op.STORE, self.worker.post_store(keys, table, fence=fence)
            else:
                self.cache.blocks[table.reshape(-1)] = 0xEE
                op, ticket = L.Op.LOAD, self.worker.post_load(keys, table, fence=fence)
        except RingFull:
            self.free_slots.append(slot)
            return
        self.count(Tally.POSTED)
        self.out[ticket] = (op, keys, slot)
        if rng.random() < 0.1:
            self.withdrawn.add(ticket)
            mine = self.worker.records.set_cancel(ticket)
            self.worker.ring.push(ticket, L.Verb.CANCEL)
            self.worker.publish()
            if mine:  # no copy runs and none will: the blocks are this engine's again, at once
                self.cache.blocks[table.reshape(-1)] = 0x77
                self.out[ticket] = (L.Op.DRAIN, keys, slot)

    def expected(self, keys: bytes, i: int) -> npt.NDArray[np.uint8]:
        return chunk_bytes(keys[i * 16 : i * 16 + 16], (PER_CHUNK, *self.cache.blocks.shape[1:]))

    def poll(self) -> None:
        for ticket in list(self.out):
            if not self.worker.records.state(ticket).terminal:
                continue
            op, keys, slot = self.out.pop(ticket)
            reply = self.worker.records.reply(ticket)
            self.count(Tally.ANSWERED)
            self.excuse(reply.code)
            if reply.state is L.State.CANCELLED:
                self.count(Tally.CANCELLED)
                if ticket not in self.withdrawn:
                    self.count(Tally.UNEXCUSED)
            self.withdrawn.discard(ticket)
            self.check(op, keys, slot, reply.n_done)
            self.worker.records.free(ticket)
            self.freed[ticket & L.TICKET_INDEX_MASK] = ticket << 8 | L.State.FREE
            self.free_slots.append(slot)

    def check(self, op: L.Op, keys: bytes, slot: int, n_done: int) -> None:
        chunks = len(keys) // 16
        table = self.blocks(slot, chunks)
        if op is L.Op.STORE:
            self.count(Tally.STORED, n_done)
        elif op is L.Op.DRAIN:  # taken back before any copy: nobody may have written there
            if not (self.cache.blocks[table.reshape(-1)] == 0x77).all():
                self.count(Tally.CORRUPT)
        else:
            self.count(Tally.LOADED, n_done)
            for i in range(n_done):
                if not np.array_equal(self.cache.blocks[table[i]], self.expected(keys, i)):
                    self.count(Tally.CORRUPT)

    def check_freed(self) -> None:
        """A record given back stays as it was left until it is used again: an answer that comes twice would show here."""
        shape = self.worker.segment.shape
        for index, word in list(self.freed.items()):
            at = (shape.records_offset + index * L.RECORD_BYTES) // 8 + L.STATE_WORD
            now = self.worker.segment.words[at]
            if now != word and now >> 8 == word >> 8:
                self.count(Tally.REPEATED)
        self.freed.clear()

    def excuse(self, code: L.Code) -> None:
        if code is not L.Code.OK and code not in EXCUSED:
            self.count(Tally.UNEXCUSED)

    def count(self, what: Tally, n: int = 1) -> None:
        self.counts[what] += n

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


def main(socket: str, name: str, seed: int, tally_fd: int) -> None:
    counts, rng = tally(tally_fd), random.Random(seed)
    while True:
        try:
            engine = FuzzEngine(socket, name, rng, counts)
        except (SidecarUnavailable, AttachRefused, ProtocolViolation, OSError):
            time.sleep(0.01)  # it is restarting
            continue
        try:
            engine.run()
        except SidecarUnavailable:  # while a lookup was out
            engine.poll()
            counts[Tally.LOST] += len(engine.out) + 1
            counts[Tally.POSTED] += 1
        finally:
            engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)
