"""The transfer engines under test, each with a pool and a KV cache in a process of its own.

To join the suite an engine adds a factory to ``ENGINES``: it yields an engine and a KV process with ``allocate``, ``fill``,
``read``, ``kill`` and ``peer``. Where the hardware is missing the factory skips, saying why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.kv_cases import KvCase
from tests.support.kv_process import HostKvProcess
from tests.support.shm_pool import ShmPool

from maru_shm.errors import MaruError
from maru_sidecar.transfer.base import KvTarget, TransferEngine
from maru_sidecar.transfer.cpu import CpuTransfer

REGION = 2 << 20
POOL = 80 << 20


@dataclass
class Rig:
    """An engine, its pool, and the process at the other end."""

    engine: TransferEngine
    pool: ShmPool
    process: Any

    def attach(self, case: KvCase) -> KvTarget:
        """A target for a fresh cache of this shape."""
        return self.engine.attach(case.layout(self.process.allocate(*case.allocations)), self.process.peer, ())


@contextlib.contextmanager
def _cpu(pool: ShmPool) -> Iterator[Rig]:
    engine, process = CpuTransfer(pool.mapping), HostKvProcess()
    yield Rig(engine, pool, process)
    process.close()
    engine.close()


@contextlib.contextmanager
def _cuda(pool: ShmPool) -> Iterator[Rig]:
    from maru_shm.cuda.driver import CudaDriver
    from maru_sidecar.transfer.cuda import CudaTransfer

    pytest.importorskip("torch", reason="the GPU's KV process needs torch")
    try:
        devices = CudaDriver().devices()
    except MaruError as e:
        pytest.skip(str(e))
    if not devices:
        pytest.skip("no GPU is visible")
    from tests.gpu.kv_process import KvProcess

    engine, process = CudaTransfer(pool.mapping, REGION), KvProcess()
    yield Rig(engine, pool, process)
    process.close()
    engine.close()


ENGINES = {"cpu": _cpu, "cuda": _cuda}


@pytest.fixture(scope="module")
def pool() -> Iterator[ShmPool]:
    made = ShmPool(POOL)
    yield made
    made.close()


@pytest.fixture(scope="module", params=[pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest, pool: ShmPool) -> Iterator[Rig]:
    """Shared by a module's tests: a process with a GPU context takes ten seconds to start."""
    with ENGINES[request.param](pool) as made:
        yield made


@pytest.fixture(params=[pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def mortal_rig(request: pytest.FixtureRequest, pool: ShmPool) -> Iterator[Rig]:
    """One whose process the test may kill."""
    with ENGINES[request.param](pool) as made:
        yield made
