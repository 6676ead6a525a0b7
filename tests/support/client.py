"""A compact client of the sidecar: attach as scheduler or worker, post requests over the real ring, wait for the answers.

A worker's KV cache is a numpy array in the process that makes the client; run it in a child process to have an engine that
can be killed. Nothing here is faster or more careful than a test needs; the product's client is ``maru_connector``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from maru_shm import control, keys, segment
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.errors import AttachRefused, SidecarUnavailable
from maru_shm.geometry import KvLayout, KvPlane, KvRegion, RegionKind
from maru_shm.records import ClientRecords, Reply
from maru_shm.ring import SubmissionProducer

ROOT = keys.model_root({"model": "test"})
TIMEOUT_S = 20.0
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class KvCache:
    """A paged KV cache in this process: ``layers`` planes, layer-outermost, pieces of ``piece`` bytes."""

    def __init__(
        self, num_blocks: int = 64, *, layers: int = 3, piece: int = 4096, block_tokens: int = 16, signature: str = "test"
    ) -> None:
        self.num_blocks = num_blocks
        self.memory: Bytes = np.zeros(layers * num_blocks * piece, np.uint8)
        self.blocks = self.memory.reshape(layers, num_blocks, piece).swapaxes(0, 1)  #: [block, layer, byte]
        region = KvRegion(RegionKind.PROCESS_VM, self.memory.ctypes.data, self.memory.nbytes)
        planes = tuple(KvPlane(0, i * num_blocks * piece, piece, piece, i) for i in range(layers))
        self.layout = KvLayout(num_blocks, block_tokens, planes, (region,), signature)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.nbytes, np.uint8)

    def read(self, blocks: Sequence[int] | npt.NDArray[np.int32]) -> Bytes:
        """A copy of these blocks' bytes, shape (n, layers, piece)."""
        return self.blocks[np.asarray(blocks).reshape(-1)].copy()


def prompt_keys(name: str | int, chunks: int, *, chunk_tokens: int = 64, root: bytes = ROOT) -> bytes:
    """Keys of a prompt of ``chunks`` chunks; another ``name`` is another prompt."""
    chunk_keys = keys.ChunkKeys(root, chunk_tokens)
    first = int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=4).digest(), "little") >> 2
    chunk_keys.extend([first + i for i in range(chunks * chunk_tokens)])
    return bytes(chunk_keys.keys)


@dataclass
class Client:
    """One attached session. ``socket`` is the control socket's path."""

    socket: str
    role: L.Role = L.Role.WORKER
    cache: KvCache | None = None
    engine_id: str = "engine"
    rank: int = 0
    world: int = 1
    root: bytes = ROOT
    chunk_tokens: int = 64
    max_records: int = 32
    max_keys: int = 256
    max_blocks: int = 1024
    fds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.role is L.Role.WORKER and self.cache is None:
            self.cache = KvCache()
        self.sock = control.connect(self.socket, TIMEOUT_S)
        try:
            self.welcome = self.ask(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "tests/1"), M.Welcome)
            self.attached = self.ask(self._attach(), M.Attached)
        except BaseException:
            self.sock.close()
            raise
        segment_fd, self.doorbell, self.pool_fd = self.fds
        self.segment = segment.map_fd(segment_fd, writable=True)
        os.close(segment_fd)
        self.ring = SubmissionProducer(self.segment)
        self.records = ClientRecords(self.segment, self.ring)

    def _attach(self) -> M.Attach:
        layout = self.cache.layout if self.cache is not None and self.role is L.Role.WORKER else None
        return M.Attach(
            self.role, self.engine_id, self.rank, self.world, self.root, self.chunk_tokens, self.max_records, self.max_keys,
            self.max_blocks, layout, "test model",
        )  # fmt: skip

    def ask(self, message: M.ClientMessage, answer: type[T]) -> T:
        """One control request. Raises :class:`AttachRefused` with the refusal's words, or :class:`SidecarUnavailable`."""
        control.send(self.sock, message)
        received = control.receive(self.sock, control.to_client)
        if received is None:
            raise SidecarUnavailable("the sidecar closed the connection", "")
        reply, self.fds = received
        if isinstance(reply, M.Refused):
            raise AttachRefused(f"{reply.code.value}: {reply.what}", reply.remedy)
        assert isinstance(reply, answer), reply
        return reply

    # --- the ring -------------------------------------------------------------------------------------------------------------
    def post(self, op: L.Op, chunk_keys: bytes, blocks: npt.ArrayLike = (), **fields: int) -> int:
        """Post one request and ring the doorbell if the sidecar sleeps; returns the ticket."""
        ticket = self.records.post(op, chunk_keys, np.asarray(blocks, "<i4").tobytes(), **fields)  # type: ignore[arg-type]
        self.publish()
        return ticket

    def publish(self) -> None:
        if self.ring.publish():
            os.eventfd_write(self.doorbell, 1)

    def wait(self, ticket: int, timeout_s: float = TIMEOUT_S) -> Reply:
        """The terminal answer; the record stays taken until :meth:`free`. Raises if the sidecar goes away first."""
        deadline = time.monotonic() + timeout_s
        while not self.records.state(ticket).terminal:
            if time.monotonic() > deadline:
                raise AssertionError(f"ticket {ticket:#x} is {self.records.state(ticket).name} after {timeout_s} s")
            if self.hung_up() and not self.records.state(ticket).terminal:
                raise SidecarUnavailable("the sidecar went away", "")
            time.sleep(50e-6)
        return self.records.reply(ticket)

    def finish(self, ticket: int, timeout_s: float = TIMEOUT_S) -> Reply:
        """:meth:`wait`, and give the record back."""
        reply = self.wait(ticket, timeout_s)
        self.records.free(ticket)
        return reply

    def hung_up(self) -> bool:
        """Whether the sidecar has closed the connection."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP | select.POLLHUP)
        return bool(poll.poll(0))

    def set_fence(self, step: int) -> None:
        """Everything launched up to ``step`` has finished."""
        self.segment.words[L.WORD_FENCE] = step

    # --- requests -------------------------------------------------------------------------------------------------------------
    def lookup(self, chunk_keys: bytes) -> tuple[int, Reply]:
        """Ticket (its record holds the lease until :meth:`release`) and answer."""
        ticket = self.post(L.Op.LOOKUP, chunk_keys)
        return ticket, self.wait(ticket)

    def hits(self, chunk_keys: bytes) -> int:
        """How many leading chunks are there; the lease is given back at once."""
        ticket, reply = self.lookup(chunk_keys)
        self.release(ticket)
        return reply.n_done

    def release(self, ticket: int) -> None:
        self.records.release(ticket)
        self.publish()

    def post_store(
        self, chunk_keys: bytes, blocks: npt.ArrayLike, *, fence: int = 0, depth: int = 0, parent: bytes = b""
    ) -> int:
        """``blocks``: shape (n, blocks per chunk)."""
        table = np.asarray(blocks, np.int32)
        table = np.concatenate((np.full((1, table.shape[1]), L.SKIP_BLOCK, np.int32), table))
        return self.post(L.Op.STORE, (parent or self.root) + chunk_keys, table, fence=fence, depth=depth)

    def store(self, chunk_keys: bytes, blocks: npt.ArrayLike, **fields: int) -> Reply:
        return self.finish(self.post_store(chunk_keys, blocks, **fields))  # type: ignore[arg-type]

    def post_load(self, chunk_keys: bytes, blocks: npt.ArrayLike, *, fence: int = 0) -> int:
        return self.post(L.Op.LOAD, chunk_keys, np.asarray(blocks, np.int32), fence=fence)

    def load(self, chunk_keys: bytes, blocks: npt.ArrayLike, *, fence: int = 0) -> Reply:
        return self.finish(self.post_load(chunk_keys, blocks, fence=fence))

    # --- end --------------------------------------------------------------------------------------------------------------
    def detach(self) -> None:
        """An orderly end: the sidecar has fenced this session's copies when this returns."""
        self.ask(M.Detach(), M.Done)

    def close(self) -> None:
        """Hang up and unmap (idempotent). After a sidecar's end this removes the segment, as an engine that ends does."""
        if self.sock.fileno() < 0:
            return
        if self.hung_up():
            segment.unlink(self.attached.segment)
        self.sock.close()
        os.close(self.doorbell)
        os.close(self.pool_fd)
        self.segment.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def blocks_table(first: int, chunks: int, per_chunk: int = 4) -> npt.NDArray[np.int32]:
    """Consecutive blocks from ``first``, shape (chunks, per_chunk)."""
    return np.arange(first, first + chunks * per_chunk, dtype=np.int32).reshape(chunks, per_chunk)


def admin(socket: str, message: M.ClientMessage) -> M.SidecarMessage:
    """One control request on a connection of its own."""
    with contextlib.closing(control.connect(socket, TIMEOUT_S)) as sock:
        control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "tests/1"))
        assert control.receive(sock, control.to_client) is not None
        control.send(sock, message)
        received = control.receive(sock, control.to_client)
        assert received is not None, "the sidecar closed the connection"
        return received[0]
