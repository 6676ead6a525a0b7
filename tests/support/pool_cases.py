"""Small pools in /dev/shm and the few lines that fill them, shared by the tests of the directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash

from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.slab_handles import Presence, Reservation

MiB = 1 << 20
KEY = 16
ROOT = b"root............"
NAMESPACE = b"namespace......."
NBYTES = 260_000  #: 64 pages with padding: three slabs in a region of 1 MiB, beside their headers


def key(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=KEY).digest()


def chain(name: str, n: int) -> bytes:
    """The keys of a prefix of ``n`` chunks."""
    return b"".join(key(f"{name}/{i}") for i in range(n))


@contextlib.contextmanager
def temporary_pool(regions: int, region_size: int = MiB) -> Iterator[PoolFile]:
    """A pool with ``regions`` usable regions; gone afterwards, whatever happened to it meanwhile."""
    name = f"maru-test-pool-{os.getpid()}-{uuid.uuid4().hex}"
    pool = PoolFile.open(PoolSpec(path=name, size=(regions + 1) * region_size, region_size=region_size))
    try:
        yield pool
    finally:
        pool.close(clean=False)
        Path(pool.spec.file_path).unlink(missing_ok=True)


def reopen(pool: PoolFile) -> PoolFile:
    """The same pool as the next sidecar would open it after this one was killed."""
    pool.close(clean=False)
    return PoolFile.open(pool.spec)


def contents(chunk_key: bytes, rank: int, nbytes: int) -> bytes:
    """Bytes that name the chunk they belong to."""
    return hashlib.blake2b(chunk_key + bytes([rank])).digest().ljust(nbytes, chunk_key[:1])[:nbytes]


def reserve(
    directory: Directory,
    chunk_key: bytes,
    *,
    parent: bytes = ROOT,
    depth: int = 0,
    rank: int = 0,
    world: int = 1,
    nbytes: int = NBYTES,
    namespace: bytes = NAMESPACE,
) -> Reservation | Presence:
    return directory.reserve(
        namespace, chunk_key, parent=parent, rank=rank, world=world, depth=depth, tokens=256, nbytes=nbytes
    )  # fmt: skip


def store(
    pool: PoolFile,
    directory: Directory,
    keys: bytes,
    *,
    start: int = 0,
    parent: bytes = ROOT,
    rank: int = 0,
    world: int = 1,
    nbytes: int = NBYTES,
    namespace: bytes = NAMESPACE,
) -> int:
    """Store chunks that follow each other, the first at depth ``start``; returns how many were new."""
    new = 0
    for i in range(0, len(keys), KEY):
        k = keys[i : i + KEY]
        got = reserve(
            directory, k, parent=parent, depth=start + i // KEY, rank=rank, world=world, nbytes=nbytes, namespace=namespace
        )  # fmt: skip
        if isinstance(got, Reservation):
            data = contents(k, rank, nbytes)
            pool.bytes[got.offset : got.offset + nbytes] = data
            got.commit(xxhash.xxh3_64_intdigest(data))
            new += 1
        parent = k
    return new


def check_contents(pool: PoolFile, directory: Directory, keys: bytes, *, rank: int = 0, namespace: bytes = NAMESPACE) -> int:
    """Compare the bytes of all leading chunks with what belongs there; returns how many there were."""
    with directory.acquire(namespace, keys, rank=rank) as acquired:
        for i, ref in enumerate(acquired.refs):
            header = directory._regions.slabs.read_header(ref.header)
            k = keys[i * KEY : (i + 1) * KEY]
            data = bytes(pool.bytes[ref.offset : ref.offset + header.data_bytes])
            assert header.key == k
            assert data == contents(k, rank, header.data_bytes)
            assert xxhash.xxh3_64_intdigest(data) == header.checksum
        return acquired.n_found
