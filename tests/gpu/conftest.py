"""Tests on a real GPU: ``pytest tests/gpu`` runs all; without a GPU they are skipped, saying why.

``MARU_ENGINE_DEVICE=cpu`` runs those of ``test_engine*.py`` on vLLM's CPU engine instead.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_shm.cuda.driver import CudaDriver
from maru_shm.errors import MaruError
from maru_sidecar.transfer.cuda import CudaTransfer
from tests.gpu.kv_process import KvProcess
from tests.support.shm_pool import ShmPool

REGION = 2 << 20
POOL = 512 << 20


def _why_not() -> str:
    try:
        if not CudaDriver().devices():
            return "no GPU is visible"
    except MaruError as e:
        return str(e)
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = _why_not() if here else ""
    on_cpu = os.environ.get("MARU_ENGINE_DEVICE") == "cpu"
    for item in here:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(300))
        if reason and not (on_cpu and item.path.name.startswith("test_engine")):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def pool() -> Iterator[ShmPool]:
    pool = ShmPool(POOL)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def engine_process() -> Iterator[KvProcess]:
    """The engine most tests share: starting one takes ten seconds."""
    process = KvProcess()
    yield process
    process.close()


@pytest.fixture
def transfer(pool: ShmPool) -> Iterator[CudaTransfer]:
    engine = CudaTransfer(pool.mapping, REGION)
    yield engine
    engine.close()
