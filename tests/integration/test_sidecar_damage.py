"""Memory of the pool that was zeroed, punched out or overwritten behind the sidecar's back is a miss, on every lane."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.support.client import Client, blocks_table, prompt_keys
from tests.support.sidecar_process import SidecarProcess, running_sidecar

from maru_shm import layout as L
from maru_shm import poolformat as F
from maru_sidecar.slab_header import decode, encode

KEYS = prompt_keys("x", 3)
REGION = 1 << 20
_PUNCH = 3  #: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def headers(pool: mmap.mmap) -> Iterator[int]:
    """Offsets of all slab headers, in the order of their chunks."""
    magic, found = F.SLAB_MAGIC.to_bytes(8, "little"), []
    at = pool.find(magic)
    while at >= 0:
        found.append(at - 8)
        at = pool.find(magic, at + 8)
    return iter(sorted(found, key=lambda at: decode(pool[at : at + F.SLAB_HEADER_BYTES]).depth))


def zero_headers(pool: mmap.mmap) -> None:
    for at in headers(pool):
        pool[at : at + F.SLAB_HEADER_BYTES] = bytes(F.SLAB_HEADER_BYTES)


def clear_flag(pool: mmap.mmap) -> None:
    """The bit that says there is a checksum."""
    at = next(headers(pool))
    fields = F.SLAB_HEADER.fields
    assert fields is not None
    pool[at + fields["flags"][1]] &= ~F.FLAG_CHECKSUM


def unsummed(pool: mmap.mmap) -> None:
    """A sound header, of this very slab, that names no checksum."""
    at = next(headers(pool))
    header = decode(pool[at : at + F.SLAB_HEADER_BYTES])
    packed = encode(header._replace(checksum=None))
    assert F.slab_crc_matches(packed)
    pool[at + 8 : at + F.SLAB_HEADER_BYTES] = packed[8:]


def rename(pool: mmap.mmap) -> None:
    """Two slabs change places, headers only."""
    first, second, _ = headers(pool)
    one, other = (pool[at + 8 : at + F.SLAB_HEADER_BYTES] for at in (first, second))
    pool[first + 8 : first + F.SLAB_HEADER_BYTES] = other
    pool[second + 8 : second + F.SLAB_HEADER_BYTES] = one


def damage_key(pool: mmap.mmap) -> None:
    pool[next(headers(pool)) + 41] ^= 1


def free_state(pool: mmap.mmap) -> None:
    pool[next(headers(pool))] = F.SlabState.FREE


def zero_regions(pool: mmap.mmap) -> None:
    for region in range(REGION, len(pool), REGION):
        pool[region : region + F.HEADER_BYTES] = bytes(F.HEADER_BYTES)


def punch(pool: mmap.mmap) -> None:
    raise AssertionError("done on the file")


DAMAGES = [zero_headers, clear_flag, unsummed, rename, damage_key, free_state, zero_regions, punch]


def damage(sidecar: SidecarProcess, how: Callable[[mmap.mmap], None]) -> None:
    with open(sidecar.pool, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if how is punch:
            hole = ctypes.c_long(REGION), ctypes.c_long(size - REGION)
            assert ctypes.CDLL(None).fallocate(file.fileno(), _PUNCH, *hole) == 0
            return
        with mmap.mmap(file.fileno(), size) as pool:
            how(pool)


@pytest.mark.parametrize("checksum", ["on", "off"])
@pytest.mark.parametrize("how", DAMAGES, ids=lambda how: how.__name__)
def test_damage_to_what_describes_a_slab_is_a_miss(how: Callable[[mmap.mmap], None], checksum: str) -> None:
    if checksum == "off" and how in (unsummed, clear_flag):
        pytest.skip("no slab has a checksum")
    flags = ("--set", f"transfer.checksum={checksum}")
    with (
        running_sidecar(pool_bytes=16 << 20, flags=flags) as sidecar,
        Client(sidecar.socket) as worker,
        Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler,
    ):
        assert worker.cache is not None
        worker.cache.fill(1)
        worker.store(KEYS, blocks_table(0, 3))
        untouched = worker.cache.read(blocks_table(20, 3))
        damage(sidecar, how)
        reply = worker.load(KEYS, blocks_table(20, 3))
        assert (reply.state, reply.code, reply.n_done) == (L.State.FAILED, L.Code.CHECKSUM, 0)
        np.testing.assert_array_equal(worker.cache.read(blocks_table(20, 3)), untouched)
        assert scheduler.hits(KEYS) == 0
        for _ in range(4):  # the others may be bad too, and are found out one by one
            worker.store(KEYS, blocks_table(0, 3))
            reply = worker.load(KEYS, blocks_table(20, 3))
            if reply.state is L.State.DONE:
                break
        assert reply.n_done == 3
        np.testing.assert_array_equal(worker.cache.read(blocks_table(20, 3)), worker.cache.read(blocks_table(0, 3)))


def test_a_located_hit_ends_before_a_slab_that_is_none(sidecar_16: SidecarProcess) -> None:
    with Client(sidecar_16.socket) as worker, Client(sidecar_16.socket, role=L.Role.SCHEDULER) as scheduler:
        worker.store(KEYS, blocks_table(0, 3))
        with open(sidecar_16.pool, "r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
            _, second, _ = headers(pool)
            pool[second] = F.SlabState.FREE
        assert scheduler.wait(scheduler.post(L.Op.LOCATE, KEYS)).n_done == 1
        assert scheduler.hits(KEYS) == 1


@pytest.fixture
def sidecar_16() -> Iterator[SidecarProcess]:
    with running_sidecar(pool_bytes=16 << 20) as process:
        yield process
