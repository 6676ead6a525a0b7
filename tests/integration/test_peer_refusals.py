"""Sidecars that share a pool, with a server that grants less than they ask for, or nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest
from tests.server.servers import FAST
from tests.support.client import blocks_table, prompt_keys
from tests.support.shared_sidecars import SharedSidecar, shared_pool, start_engine, start_server, start_sidecar
from tests.support.waiting import until

from maru_server import protocol as P
from maru_server.backend import Keys, Table
from maru_server.client import DirectoryClient, places_of
from maru_server.cluster_state import Settings
from maru_server.errors import ServerRefused
from maru_server.link_types import LinkConfig, LinkState
from maru_server.memory import MemoryBackend
from maru_server.node import NodeLink
from maru_server.protocol import ErrorCode
from maru_server.server import Server
from maru_server.service import Service
from maru_shm import layout as L
from maru_shm.errors import MaruError, PoolError
from maru_sidecar.sharing import announcer
from maru_sidecar.sharing.foreign import Asker, Beyond
from maru_sidecar.sharing.lookups import PeerLookups

KEYS = prompt_keys("refused", 4)
SOURCE, TARGET = blocks_table(0, 4), blocks_table(32, 4)


@pytest.fixture
def path() -> Iterator[str]:
    with shared_pool() as pool:
        yield pool


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as held:
        yield held


class Fussy(MemoryBackend):
    """Pins and takes nothing while ``refuses``."""

    refuses = False

    def pin(self, member: str, table: Table, keys: Keys, ttl_ms: int) -> tuple[int, bytes]:
        if self.refuses:
            raise ServerRefused(ErrorCode.LIMIT, "too many pins already", "wait until some have ended")
        return super().pin(member, table, keys, ttl_ms)

    def register(self, member: str, table: Table, keys: Keys, places: bytes, slab_bytes: int) -> tuple[bytes, bytes]:
        if self.refuses:
            raise ServerRefused(ErrorCode.LIMIT, "too many tables already", "reset unused ones")
        return super().register(member, table, keys, places, slab_bytes)


def serve(stack: contextlib.ExitStack, settings: Settings = FAST) -> tuple[Fussy, str]:
    """A server in this process: its directory and its endpoint."""
    backend = Fussy(settings)
    server = Server(backend, settings, ["tcp://127.0.0.1:*"])
    thread = threading.Thread(target=server.run)
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.stop)
    return backend, server.endpoints[0]


def said(sidecar: SharedSidecar, text: str) -> int:
    return sidecar.log.read_text().count(text)


def test_a_server_that_pins_for_less_than_a_sidecar_asks_for_shortens_the_lease(path: str, stack: contextlib.ExitStack) -> None:
    server = start_server(stack, extra=("--max-pin-ms", "5000"))
    a, b = (start_sidecar(stack, path, server.endpoint, name, "server.pin_ttl_s=3600") for name in "ab")
    engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
    engine_a.store(KEYS, SOURCE)
    a.wait_until_published(4)
    ticket, reply = engine_b.lookup(KEYS)
    assert reply.n_done == 4
    assert 0 < reply.deadline - time.monotonic_ns() <= 5_000_000_000
    assert engine_b.load(ticket, KEYS, TARGET).n_done == 4
    shown = b.sharing()
    assert (shown["lookups_refused"], shown["requests_refused"]) == (0, 0)
    assert b.health() == "good"


def test_a_server_that_refuses_lookups_is_an_error_that_is_told(path: str, stack: contextlib.ExitStack) -> None:
    directory, endpoint = serve(stack)
    a, b = (start_sidecar(stack, path, endpoint, name) for name in "ab")
    engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
    engine_a.store(KEYS, SOURCE)
    a.wait_until_published(4)
    directory.refuses = True
    for _ in range(3):
        assert engine_b.hits(KEYS) == 0
    until(lambda: b.sharing()["requests_refused"] == 3, f"what is refused is counted: {b.sharing()}")
    shown, reason = b.sharing(), "the metadata server refused Pin: too many pins already"
    assert (shown["state"], shown["lookups_refused"], shown["lookups_unanswered"]) == ("ready", 3, 0)
    assert shown["last_error"].startswith(reason)
    assert b.health().startswith(f"degraded: {reason}")
    assert said(b, reason) == 1
    directory.refuses = False
    assert engine_b.fetch(KEYS, TARGET).n_done == 4
    over = b.sharing()
    assert "last_error" not in over
    assert over["past_error"].startswith(reason)
    assert b.health() == "good"


def test_a_lookup_answered_wrongly_is_a_miss_that_is_told(
    path: str, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch, bent = Service._dispatch, True

    def answer(self: Service, identity: bytes, epoch: int, m: P.Request) -> P.Reply:
        reply = dispatch(self, identity, epoch, m)
        return msgspec.structs.replace(reply, places=reply.places + b"x") if bent and isinstance(reply, P.Places) else reply

    monkeypatch.setattr(Service, "_dispatch", answer)
    _, endpoint = serve(stack)
    a, b = (start_sidecar(stack, path, endpoint, name) for name in "ab")
    engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
    engine_a.store(KEYS, SOURCE)
    a.wait_until_published(4)
    assert engine_b.hits(KEYS) == 0
    reason = "metadata server answered Pin of 4 keys with 65 bytes of places"
    until(lambda: b.sharing()["state"] == "ready", "the link is back")
    shown = b.sharing()
    assert (shown["lookups_refused"], shown["lookups_unanswered"], shown["foreign_leases"]) == (1, 0, 0)
    assert shown["last_error"].startswith(reason)
    assert b.health().startswith(f"degraded: {reason}")
    assert said(b, "Traceback") == 0
    bent = False
    assert engine_b.fetch(KEYS, TARGET).n_done == 4
    assert b.health() == "good"


def test_a_lookup_whose_chunks_cannot_be_looked_at_is_answered_once_and_holds_nothing() -> None:
    sent: list[P.Request] = []
    callbacks: list[Callable[[P.Reply | MaruError], None]] = []

    class Link:
        def submit(self, message: P.Request, done: Callable[[P.Reply | MaruError], None] | None = None) -> bool:
            sent.append(message)
            if done is not None:
                callbacks.append(done)
            return True

    def unreadable(_region: int) -> bool:
        raise PoolError("the pool's memory cannot be read", "see the log")

    released: list[int] = []
    directory = SimpleNamespace(shared=SimpleNamespace(has=unreadable), release=released.append, lease=lambda *_a, **_k: None)
    lookups = PeerLookups(
        Link(), bytes(16), directory, SimpleNamespace(), lambda function: function(),  # type: ignore[arg-type]
        wait_s=60, pin_ttl_s=30, lease_ttl_s=30,
    )  # fmt: skip
    answers: list[Beyond] = []
    assert lookups.ask(Asker(bytes(16), 1, "engine", 1, 1), KEYS, answers.append)
    grant = P.GrantInfo(3, bytes(16), 1, "n", 7, P.GrantState.GRANTED)
    with pytest.raises(PoolError):
        callbacks[0](P.Places(places_of(3, [0], [1]), [grant], 9, 30_000))
    lookups.expire(1 << 63)
    assert answers == [Beyond()]
    assert sent[1:] == [P.Unpin(9)]
    assert (len(lookups.leases), lookups.next_deadline_ns) == (0, None)


def test_pins_too_short_to_build_upon_are_a_miss_whose_reason_is_told(path: str, stack: contextlib.ExitStack) -> None:
    directory, endpoint = serve(stack, msgspec.structs.replace(FAST, max_pin_ms=1900))
    a, b = (start_sidecar(stack, path, endpoint, name) for name in "ab")
    engine_a, engine_b = start_engine(stack, a), start_engine(stack, b)
    engine_a.store(KEYS, SOURCE)
    a.wait_until_published(4)
    for _ in range(2):
        ticket, reply = engine_b.lookup(KEYS)
        assert (reply.state, reply.n_done, reply.deadline) == (L.State.DONE, 0, 0)
        engine_b.scheduler.release(ticket)
    shown, reason = b.sharing(), "chunks of other nodes are not used: they are pinned for 1.9 s"
    assert shown["lookups_pinned_too_short"] == 2
    assert shown["last_error"].startswith(reason)
    assert shown["foreign_leases"] == 0
    assert b.health().startswith(f"degraded: {reason}")
    assert said(b, reason) == 1
    until(lambda: directory.stats()["pins"] == 0, "the pins were given back")


@pytest.mark.parametrize("how", ["refuses", "full"])
def test_slabs_that_the_server_did_not_take_are_published_again(
    how: str, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "_PUBLISH_RETRY_S", 0.0)
    directory, endpoint = serve(stack, msgspec.structs.replace(FAST, max_keys=1))
    link = NodeLink(LinkConfig(endpoint, "a"), lambda _region: iter(()))
    stack.callback(link.close)
    link.add_device(bytes(16), 2, 4096)
    link.start()
    got: list[object] = []
    until(lambda: link.state is LinkState.READY, "the link is ready")
    link.request_regions(1, got.append)
    until(lambda: bool(got), "a region is granted")
    [region] = link.regions
    told = announcer.Announcer(lambda: None)

    def flush() -> None:
        told.flush(link, lambda _region: region, lambda _region: 4096)

    directory.refuses = how == "refuses"
    for number in (0, 1):
        told.committed(bytes(16), bytes([number] * 16), 0, region=region.region, number=number, generation=1)
        flush()
    until(lambda: len(told._untaken) == (2 if how == "refuses" else 1), "it is known what was not taken")
    assert link.stats().refused == (2 if how == "refuses" else 0)
    directory.refuses = False
    with DirectoryClient(endpoint) as client:
        client.reset()
    places = SimpleNamespace(shared=SimpleNamespace(place_of=lambda *_: (region.region, 1, 1)))
    before = link.stats().keys_announced

    def again() -> bool:
        told.retry(link, places)  # type: ignore[arg-type]
        flush()
        return link.stats().keys_announced > before

    until(again, "it is published after all")
