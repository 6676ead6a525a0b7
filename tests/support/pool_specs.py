"""Where a test's pool lies: a name in /dev/shm of its own, or a file; 16 MiB unless it says otherwise."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from maru_sidecar.pool_spec import PoolSpec

MiB = 1 << 20
SIZE = 16 * MiB


@contextlib.contextmanager
def shm_spec() -> Iterator[PoolSpec]:
    """A pool to be made in /dev/shm; its file is gone afterwards."""
    spec = PoolSpec(path=f"maru-test-pool-{os.getpid()}-{uuid.uuid4().hex}", size=SIZE)
    try:
        yield spec
    finally:
        Path(spec.file_path).unlink(missing_ok=True)


def file_spec(path: Path, size: int = SIZE, **more: object) -> PoolSpec:
    return PoolSpec(backend="file", path=str(path), size=size, **more)  # type: ignore[arg-type]
