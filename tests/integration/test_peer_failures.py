"""Sidecars that share a pool, when one of them, the server, or its lease goes."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.server.servers import ServerProcess, free_port
from tests.support.client import blocks_table, prompt_keys
from tests.support.shared_sidecars import SharedSidecar, shared_pool, start_engine, start_server, start_sidecar
from tests.support.waiting import until

from maru_server.auth import new_token
from maru_server.client import DirectoryClient
from maru_shm import layout as L

KEYS = prompt_keys("survivor", 4)
SOURCE, TARGET = blocks_table(0, 4), blocks_table(32, 4)
LONG_REAP = ("--reap-ms", "60000")


@pytest.fixture
def path() -> Iterator[str]:
    with shared_pool() as pool:
        yield pool


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as held:
        yield held


def test_chunks_of_a_killed_sidecar_are_read_until_its_regions_are_reclaimed(path: str, stack: contextlib.ExitStack) -> None:
    server = start_server(stack, extra=("--reap-ms", "2000"))
    a = start_sidecar(stack, path, server.endpoint, "a")
    b = start_sidecar(stack, path, server.endpoint, "b")
    engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
    engine_a.cache.fill(1)
    engine_a.store(KEYS, SOURCE)
    a.wait_until_published(4)
    a.kill()
    assert engine_b.fetch(KEYS, TARGET).n_done == 4
    np.testing.assert_array_equal(engine_b.cache.read(TARGET), engine_a.cache.read(SOURCE))
    until(lambda: engine_b.hits(KEYS) == 0, "the regions were reclaimed: lease 2 s, grace 0.2 s, reap time 2 s", 30)


def test_a_killed_sidecar_that_starts_again_has_its_chunks_back_and_stores_on(path: str, stack: contextlib.ExitStack) -> None:
    server = start_server(stack, extra=LONG_REAP)
    a = start_sidecar(stack, path, server.endpoint, "a")
    b = start_sidecar(stack, path, server.endpoint, "b")
    engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
    engine_a.cache.fill(2)
    engine_a.store(KEYS, SOURCE)
    a.wait_until_published(4)
    until(lambda: a.sharing()["regions"] >= 2, "a spare region was granted")
    wanted = engine_a.cache.read(SOURCE)
    a.kill()
    a.start()
    a.wait_until_it_can_store()
    again = start_engine(stack, a)
    assert again.fetch(KEYS, TARGET).n_done == 4
    np.testing.assert_array_equal(again.cache.read(TARGET), wanted)
    assert engine_b.fetch(KEYS, TARGET).n_done == 4
    more = prompt_keys("after the restart", 4)
    assert again.store(more, SOURCE).n_done == 4
    until(lambda: engine_b.hits(more) == 4, "what was stored after the restart is found")


def test_without_a_server_local_hits_go_on_and_remote_ones_come_back_with_it(path: str, stack: contextlib.ExitStack) -> None:
    listen = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(stack, listen=listen)
    a = start_sidecar(stack, path, server.endpoint, "a")
    b = start_sidecar(stack, path, server.endpoint, "b")
    engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
    engine_a.cache.fill(3)
    engine_a.store(KEYS, SOURCE)
    a.wait_until_published(4)
    assert engine_b.hits(KEYS) == 4
    server.kill()
    assert engine_b.hits(KEYS) == 0  # answered after server.lookup_wait_ms at the latest
    assert engine_a.fetch(KEYS, TARGET).n_done == 4
    until(lambda: not a.sharing()["can_store"], "the lease has run out", 30)
    until(lambda: a.sharing()["state"] == "connecting", "the missing answer was noticed")
    away = a.sharing()
    assert away["cannot_store_because"].startswith("the lease has run out, and there is no session with the metadata server: ")
    assert "nobody listens there" in away["last_error"]
    assert 0 <= away["last_error_age_s"] < 30
    assert a.health() == f"degraded: nothing can be stored: {away['cannot_store_because']}"
    refused = engine_a.store(prompt_keys("no lease", 1), blocks_table(0, 1))
    assert (refused.state, refused.code) == (L.State.FAILED, L.Code.POOL_FULL)
    assert engine_a.fetch(KEYS, TARGET).n_done == 4
    start_server(stack, listen=listen)
    until(lambda: engine_b.hits(KEYS) == 4, "the server learned everything again", 30)
    assert engine_b.fetch(KEYS, TARGET).n_done == 4
    np.testing.assert_array_equal(engine_b.cache.read(TARGET), engine_a.cache.read(SOURCE))
    a.wait_until_it_can_store()
    assert engine_a.store(prompt_keys("lease again", 1), blocks_table(0, 1)).n_done == 1
    until(lambda: a.health() == "good", f"nothing is missing any more: {a.health()}")
    over = a.sharing()
    assert "last_error" not in over
    assert "cannot_store_because" not in over
    assert "nobody listens there" in over["past_error"]
    assert over["past_error_age_s"] >= 0


def test_an_outage_of_the_server_is_logged_once_at_each_of_its_turns(path: str, stack: contextlib.ExitStack) -> None:
    listen = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(stack, listen=listen)
    port = free_port()
    a = start_sidecar(stack, path, server.endpoint, "a", f"http.address=127.0.0.1:{port}")
    server.kill()
    until(lambda: not a.sharing()["can_store"], "the lease has run out", 30)
    attempts = a.sharing()["reconnects"]
    until(lambda: a.sharing()["reconnects"] >= attempts + 2, "it is tried again and again", 30)
    assert page(port, "/readyz") == (200, "READY\n")
    status, text = page(port, "/healthz")
    assert (status, text[:35]) == (200, "degraded: nothing can be stored: th")
    assert "maru_degraded 1\n" in page(port, "/metrics")[1]
    start_server(stack, listen=listen)
    a.wait_until_it_can_store()
    until(lambda: "maru_degraded 0\n" in page(port, "/metrics")[1], "nothing is missing any more")
    until(lambda: "stores are possible again" in a.log.read_text(), "the last turn is logged")
    said = a.log.read_text()
    for turn in (
        f"no session with metadata server {listen}: ",
        "stores stop: the lease has run out",
        f"linked to metadata server {listen}",
        "stores are possible again",
    ):
        assert said.count(turn) == 1, turn


def test_a_sidecar_with_the_wrong_token_says_that_the_token_is_the_reason(
    path: str, stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    for name in ("cluster", "mine"):
        (tmp_path / name).write_text(new_token())
        (tmp_path / name).chmod(0o600)
    server = ServerProcess(token_file=tmp_path / "cluster")
    stack.callback(server.stop)
    other = f"server.token_file={tmp_path / 'mine'}"
    for settings, reason in (((), "wants a token and none is set here"), ((other,), "the token set here is not the server's")):
        a = SharedSidecar(path, server.endpoint, "a", *settings)
        stack.callback(a.close)
        a.start()
        until(lambda a=a, reason=reason: reason in a.health(), f"health names the token: {a.health()}")  # type: ignore[misc]
        assert reason in a.sharing()["cannot_store_because"]
        a.close()


def test_a_sidecar_that_waits_for_a_new_servers_hold_says_so(path: str, stack: contextlib.ExitStack) -> None:
    server = start_server(stack, extra=("--lease-ms", "8000"))
    a = SharedSidecar(path, server.endpoint, "a")
    stack.callback(a.close)
    a.start()
    until(lambda: "leases given before may still run" in a.sharing()["cannot_store_because"], f"a reason: {a.sharing()}", 5)


def test_the_server_knows_bytes_of_regions_granted_before_an_engine_came_and_of_claimed_ones(
    path: str, stack: contextlib.ExitStack
) -> None:
    listen = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(stack, listen=listen)
    a = start_sidecar(stack, path, server.endpoint, "a")
    engine = start_engine(stack, a)
    engine.store(KEYS, SOURCE)
    a.wait_until_published(4)

    def used() -> set[int]:
        with DirectoryClient(listen) as client:
            rows = {row.bytes for row in client.usage() if row.kind in ("node", "device")}
            return rows | {sum(region.bytes for region in client.regions())}

    assert used() == {4 * 48 * 1024}
    server.kill()
    start_server(stack, listen=listen)
    until(lambda: used() == {4 * 48 * 1024}, "a server that is new learned it with the claims", 30)


def page(port: int, path: str) -> tuple[int, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.status, answer.read().decode()


def test_started_without_a_server_a_sidecar_serves_and_says_that_it_cannot_store(
    path: str, stack: contextlib.ExitStack
) -> None:
    listen = f"tcp://127.0.0.1:{free_port()}"
    a = SharedSidecar(path, listen, "a")
    stack.callback(a.close)
    a.start()
    engine = start_engine(stack, a)
    assert a.sharing()["can_store"] is False
    assert engine.hits(KEYS) == 0
    assert engine.store(KEYS, SOURCE).code == L.Code.POOL_FULL
    start_server(stack, listen=listen)
    a.wait_until_it_can_store()
    assert engine.store(KEYS, SOURCE).n_done == 4


def test_restarted_without_a_server_a_sidecar_serves_what_it_stored_before(path: str, stack: contextlib.ExitStack) -> None:
    server = start_server(stack, extra=LONG_REAP)
    a = start_sidecar(stack, path, server.endpoint, "a")
    engine = start_engine(stack, a)
    engine.cache.fill(5)
    engine.store(KEYS, SOURCE)
    wanted = engine.cache.read(SOURCE)
    server.kill()
    a.kill()
    a.start()
    again = start_engine(stack, a)
    assert again.fetch(KEYS, TARGET).n_done == 4
    np.testing.assert_array_equal(again.cache.read(TARGET), wanted)


def test_a_paused_sidecar_whose_region_went_to_another_forgets_it_and_writes_nothing(
    stack: contextlib.ExitStack,
) -> None:
    with shared_pool(2 << 20, 1 << 20) as small:  # one region
        server = start_server(stack)
        a = start_sidecar(stack, small, server.endpoint, "a")
        engine_a = start_engine(stack, a)
        engine_a.cache.fill(6)
        engine_a.store(KEYS, SOURCE)
        a.pause()
        try:
            b = start_sidecar(stack, small, server.endpoint, "b")  # waits until the region is reaped
            engine_b = start_engine(stack, b)
            engine_b.cache.fill(7)
            others = prompt_keys("heir", 16)
            assert engine_b.store(others, blocks_table(0, 16)).n_done == 16
            wanted = engine_b.cache.read(blocks_table(0, 16))
        finally:
            a.resume()
        until(lambda: a.sharing()["regions_lost"] == 1, "the loss was noticed", 30)
        assert engine_a.hits(KEYS) == 0
        assert engine_a.store(KEYS, SOURCE).code == L.Code.POOL_FULL
        engine_b.cache.fill(8)
        assert engine_b.fetch(others, blocks_table(0, 16)).n_done == 16
        np.testing.assert_array_equal(engine_b.cache.read(blocks_table(0, 16)), wanted)


def test_a_sidecar_that_stops_in_order_leaves_its_chunks_readable(path: str, stack: contextlib.ExitStack) -> None:
    server = start_server(stack, extra=LONG_REAP)
    a = start_sidecar(stack, path, server.endpoint, "a")
    b = start_sidecar(stack, path, server.endpoint, "b")
    engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
    engine_a.cache.fill(9)
    engine_a.store(KEYS, SOURCE)
    assert a.stop() == 0
    assert engine_b.fetch(KEYS, TARGET).n_done == 4
    np.testing.assert_array_equal(engine_b.cache.read(TARGET), engine_a.cache.read(SOURCE))
    a.start()
    a.wait_until_it_can_store()
    assert start_engine(stack, a).hits(KEYS) == 4
