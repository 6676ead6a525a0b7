"""Overlapped loads on a real GPU, in a process of its own: torch there, the pool's file, and a compute stream that looks.

``python -m tests.gpu.overlap_process`` prints one JSON line: layers that were wrong when the compute stream had waited for
them, and the rate of one request's copies against a flat pinned copy (GB/s).
"""

from __future__ import annotations

import json
import os
import time

import numpy as np
import torch

from maru_connector.overlap import distinct
from maru_connector.overlap_cuda import CudaCopier, torch_engine
from maru_connector.pool_view import PoolView
from maru_shm import poolformat as P
from maru_shm.placed_planes import PlacedPlane

LAYERS, BLOCKS, PIECE, PER_CHUNK, CHUNKS = 32, 2048, 64 << 10, 16, 24
SLAB = LAYERS * PIECE * PER_CHUNK
REGION = 1 << 30


def pool_file() -> int:
    """A pool in shared memory whose first region is random."""
    fd = os.open(f"/dev/shm/maru-test-overlap-{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(f"/dev/shm/maru-test-overlap-{os.getpid()}")
    os.posix_fallocate(fd, 0, 2 * REGION)
    header = P.POOL_HEADER.pack(P.POOL_MAGIC, P.FORMAT, 0, b"u" * 16, 2 * REGION, REGION, 2, 0, b"b" * 16, 0, 0)
    os.pwrite(fd, header, 0)
    os.pwrite(fd, np.random.default_rng(1).integers(0, 256, REGION, np.uint8).tobytes(), REGION)
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)  # as a client gets it


def main() -> None:
    fd = pool_file()
    view = PoolView(fd, 2 * REGION)
    caches = [torch.zeros((BLOCKS, PIECE), dtype=torch.uint8, device="cuda:0") for _ in range(LAYERS)]
    layers = {f"layers.{i}": (PlacedPlane(i, cache.data_ptr(), i * PIECE, PIECE, PIECE),) for i, cache in enumerate(caches)}
    copier = CudaCopier(distinct(layers), torch_engine(0))
    started = time.monotonic()
    copier.adopt(view)
    while not copier.usable(view):
        if time.monotonic() - started > 60 or not any(t.is_alive() for t in copier._threads):
            raise SystemExit("the pool was not locked")
        time.sleep(0.01)
    locked = time.monotonic() - started
    pool = np.frombuffer(memoryview(view._map), np.uint8)
    rng, wrong, rates = np.random.default_rng(2), 0, {}
    slabs = REGION + (rng.permutation((REGION // SLAB) - 1)[:CHUNKS]).astype(np.uint64) * np.uint64(SLAB)
    tables = {
        "neighbours": np.arange(CHUNKS * PER_CHUNK, dtype=np.int32),
        "scattered": rng.permutation(BLOCKS)[: CHUNKS * PER_CHUNK].astype(np.int32),
    }
    spin = torch.zeros((4096, 4096), device="cuda:0")
    for name, flat in tables.items():
        table = flat.reshape(CHUNKS, PER_CHUNK)
        for repeat in range(3):
            for cache in caches:
                cache.zero_()
            ids = torch.from_numpy(flat.astype(np.int64)).cuda()
            for _ in range(20):
                spin = spin @ spin  # the step before is still running
            if repeat:
                torch.cuda.synchronize()
            started = time.monotonic()
            copier.start(slabs + np.uint64(view.address), table)
            seen = []
            for layer, cache in enumerate(caches):
                copier.wait_layer(layer)
                if not repeat:
                    seen.append(cache[ids])  # what attention would read
            copier.finish()
            rates[name] = max(rates.get(name, 0.0), CHUNKS * SLAB / (time.monotonic() - started) / 1e9)
            for layer, have in enumerate(seen):
                want = np.stack(
                    [pool[int(slab) + (layer * PER_CHUNK + j) * PIECE :][:PIECE] for slab in slabs for j in range(PER_CHUNK)]
                )
                wrong += int((have.cpu().numpy() != want).any())
    pinned = torch.empty(CHUNKS * SLAB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device="cuda:0")
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.monotonic()
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        rates["pinned"] = max(rates.get("pinned", 0.0), CHUNKS * SLAB / (time.monotonic() - started) / 1e9)
    del pool
    copier.close()
    copier.forget(view)
    view.close()
    print(json.dumps({"wrong": wrong, "locked_s": round(locked, 2), **{k: round(v, 1) for k, v in rates.items()}}))


if __name__ == "__main__":
    main()
