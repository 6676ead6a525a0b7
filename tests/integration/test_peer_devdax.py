"""Two sidecars and their engines on one DAX device; the real one that ``MARU_TEST_DEVDAX`` names, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.client import blocks_table, prompt_keys
from tests.support.dax_device import KINDS, DaxUnderTest, dax_device
from tests.support.shared_sidecars import SharedEngine, start_engine, start_server, start_sidecar
from tests.support.sidecar_process import SidecarProcess

from maru_shm import layout as L
from maru_sidecar import pool_admin

SETTINGS = ("pool.backend=devdax", "server.lookup_wait_ms=1000")  #: an emulated machine with such a device is slow


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaxUnderTest]:
    with dax_device(request.param, monkeypatch) as device:
        yield device


def test_what_one_sidecar_stores_on_a_device_the_engine_of_another_loads(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, device.region)
    keys, source, target = prompt_keys("device", 6), blocks_table(0, 6), blocks_table(32, 6)
    with contextlib.ExitStack() as stack:
        server = start_server(stack)
        a = start_sidecar(stack, device.path, server.endpoint, "a", *SETTINGS)
        b = start_sidecar(stack, device.path, server.endpoint, "b", *SETTINGS)
        engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
        engine_a.cache.fill(1)
        assert engine_a.store(keys, source).n_done == 6
        a.wait_until_published(6)
        loaded = engine_b.fetch(keys, target)
        assert (loaded.state, loaded.n_done) == (L.State.DONE, 6)
        np.testing.assert_array_equal(engine_b.cache.read(target), engine_a.cache.read(source))


def test_a_sidecar_killed_on_a_device_of_its_own_serves_what_it_had_stored(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, device.region, own=True)
    keys, source, target = prompt_keys("own", 6), blocks_table(0, 6), blocks_table(32, 6)
    sidecar = SidecarProcess(flags=("--pool-path", device.path, "--set", "pool.backend=devdax"))
    try:
        sidecar.start()
        engine = SharedEngine(sidecar)
        engine.cache.fill(2)
        assert engine.store(keys, source).n_done == 6
        stored = engine.cache.read(source)
        sidecar.kill()
        engine.close()
        sidecar.start()
        engine = SharedEngine(sidecar)
        assert engine.fetch(keys, target).n_done == 6
        np.testing.assert_array_equal(engine.cache.read(target), stored)
        engine.close()
    finally:
        sidecar.close()
