"""What peers send that they should not, and what they get for it. The server answers by name and goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Node, ServerProcess, keys_of, server_process, until

from maru_server import protocol as P
from maru_server.client import DirectoryClient
from maru_server.cluster_state import Settings
from maru_server.connection import Connection
from maru_server.errors import BackendUnavailable, ServerRefused, ServerUnavailable
from maru_server.memory import MemoryBackend
from maru_server.pin_budget import PinBudget
from maru_server.protocol import ErrorCode
from maru_server.server import Server
from maru_server.service import Service


class Raw:
    """A DEALER without any manners."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def ask(self, body: bytes, *, protocol: int = P.PROTOCOL, epoch: int = 0, request: int = 1) -> P.Reply:
        return self.ask_frames([P.HEADER.pack(P.MAGIC, protocol, 0, request, epoch), body])

    def ask_frames(self, frames: list[bytes]) -> P.Reply:
        self.socket.send_multipart(frames)
        assert self.socket.poll(10_000), "no answer"
        header, body = self.socket.recv_multipart()
        assert header[:4] == P.MAGIC
        return P.to_client.decode(body)


@pytest.fixture
def raw(memory_server: ServerProcess) -> Iterator[Raw]:
    raw = Raw(memory_server.endpoint)
    yield raw
    raw.socket.close(0)


def code(reply: P.Reply) -> ErrorCode:
    assert isinstance(reply, P.Error), reply
    assert reply.what
    return reply.code


HELLO = P.encoder.encode(P.Hello(1, 1, "test"))


def test_a_client_from_the_future_is_told_both_version_ranges(raw: Raw) -> None:
    reply = raw.ask(P.encoder.encode(P.Hello(7, 9, "test")))
    assert code(reply) is ErrorCode.VERSION
    assert isinstance(reply, P.Error)
    assert "7 to 9" in reply.what
    assert f"{P.PROTOCOL_MIN} to {P.PROTOCOL}" in reply.what
    assert code(raw.ask(HELLO, protocol=99)) is ErrorCode.VERSION


def test_a_client_that_speaks_older_and_newer_versions_agrees_on_ours(raw: Raw) -> None:
    reply = raw.ask(P.encoder.encode(P.Hello(0, 50, "test")))
    assert isinstance(reply, P.Welcome)
    assert reply.protocol == P.PROTOCOL


def test_unknown_fields_are_ignored_and_unknown_verbs_refused(raw: Raw) -> None:
    ping = msgspec.msgpack.encode({"type": "ping", "added_in_version_9": [1, 2, 3]})
    assert isinstance(raw.ask(ping), P.Ok)
    assert code(raw.ask(msgspec.msgpack.encode({"type": "detonate"}))) is ErrorCode.BAD_MESSAGE


def test_nothing_but_ping_works_before_hello(raw: Raw) -> None:
    assert code(raw.ask(P.encoder.encode(P.GetStats()))) is ErrorCode.NO_SESSION
    assert isinstance(raw.ask(P.encoder.encode(P.Ping())), P.Ok)


def test_a_request_under_another_epoch_is_refused(raw: Raw) -> None:
    raw.ask(HELLO)
    assert code(raw.ask(P.encoder.encode(P.GetStats()), epoch=12345)) is ErrorCode.WRONG_EPOCH


def test_an_oversized_body_is_refused_by_name(raw: Raw) -> None:
    assert code(raw.ask(bytes(P.MAX_MESSAGE + 1))) is ErrorCode.TOO_LARGE
    assert isinstance(raw.ask(HELLO), P.Welcome)


def test_a_monstrous_frame_costs_its_sender_the_connection_and_nobody_else(memory_server: ServerProcess, raw: Raw) -> None:
    raw.socket.send_multipart([P.HEADER.pack(P.MAGIC, 1, 0, 1, 0), bytes(P.MAX_FRAME + 1)])
    with DirectoryClient(memory_server.endpoint) as other:
        other.ping()
    assert not raw.socket.poll(300)


def test_too_many_keys_are_refused_by_name(memory_server: ServerProcess) -> None:
    with DirectoryClient(memory_server.endpoint) as client:
        with pytest.raises(ServerRefused) as error:
            client.exists(bytes(16), 0, bytes(16 * (P.MAX_BATCH + 1)))
        assert error.value.code is ErrorCode.TOO_LARGE
        assert client.exists(bytes(16), 0, bytes(16 * P.MAX_BATCH)) == [False] * P.MAX_BATCH


@pytest.mark.parametrize(
    "message",
    [
        P.Exists(b"short", 0, bytes(16)),
        P.Exists(bytes(16), -1, bytes(16)),
        P.Exists(bytes(16), P.MAX_RANKS, bytes(16)),
        P.Exists(bytes(16), 0, bytes(17)),
        P.Leading(bytes(16), 0, bytes(16)),
        P.ListKeys(bytes(16), 0, b"x", 10),
        P.ListKeys(bytes(16), 0, b"", 0),
        P.ListKeys(bytes(16), 0, b"", P.MAX_PAGE + 1),
        P.AddDevice(bytes(15), 4, 1),
        P.AddDevice(bytes(16), 0, 1),
        P.AddDevice(bytes(16), P.MAX_REGIONS + 1, 1),
        P.AddDevice(bytes(16), 4, 1, first=4),
        P.AddDevice(bytes(16), 4, 1, label="x" * 1000),
        P.FreeRegions([P.Region(bytes(16), -1, 1)]),
        P.AllocRegions("op", 0),
        P.AllocRegions("op", P.MAX_GRANTS_PER_CALL + 1),
        P.Register(bytes(16), 0, bytes(32), bytes(16)),
        P.Pin(bytes(16), 0, bytes(16), 0),
        P.Reset(b"abc"),
        P.Hello(1, 1, "test", node="a#b"),
        P.Hello(1, 1, "test", node="a", incarnation=-1),
    ],
    ids=lambda m: f"{type(m).__name__}",
)
def test_a_field_out_of_bounds_is_refused_by_name(memory_server: ServerProcess, message: P.Request) -> None:
    connection = Connection(memory_server.endpoint)
    connection.hello(5000, node="n", incarnation=1)
    with pytest.raises(ServerRefused) as error:
        connection.call(message, 5000)
    assert error.value.code is ErrorCode.BAD_MESSAGE
    connection.close()


def test_an_observer_cannot_act_as_a_node(memory_server: ServerProcess) -> None:
    with DirectoryClient(memory_server.endpoint) as client:
        for act in (
            client.heartbeat,
            client.leave,
            lambda: client.alloc("op"),
            lambda: client.add_device(bytes(16), 4, 4096),
            lambda: client.pin(bytes(16), 0, bytes(16), 10),
            lambda: client.unpin(1),
            lambda: client.delete(bytes(16), 0, bytes(16)),
        ):
            with pytest.raises(ServerRefused) as error:
                act()
            assert error.value.code is ErrorCode.NOT_A_NODE


def test_a_node_pins_no_more_keys_than_its_share_until_some_are_let_go() -> None:
    with server_process(extra=("--max-pinned-keys", "100")) as server:
        a, b = Node(server.endpoint, "a"), Node(server.endpoint, "b")
        [grant] = a.alloc(device=a.device(), others=(b,))
        namespace, keys = os.urandom(16), keys_of(50)
        a.register(namespace, keys, grant)
        first = a.client.pin(namespace, 0, keys, 3000).pin
        a.client.pin(namespace, 0, keys, 1500)
        with pytest.raises(ServerRefused, match="a#1 has pinned 100 keys already") as error:
            a.client.pin(namespace, 0, keys, 3000)
        assert error.value.code is ErrorCode.LIMIT
        assert b.client.unpin(first) == 0
        with pytest.raises(ServerRefused):
            a.client.pin(namespace, 0, keys, 3000)
        assert len(b.client.pin(namespace, 0, keys, 3000)) == 50, "another node has its own share"
        a.client.unpin(first)
        assert len(a.client.pin(namespace, 0, keys, 3000)) == 50

        def pinned() -> bool:
            a.client.heartbeat()
            try:
                return a.client.pin(namespace, 0, keys, 3000).pin > 0
            except ServerRefused:
                return False

        until("a pin has ended by itself", pinned)
        a.client.close()
        b.client.close()


def test_many_pins_of_one_key_count_as_more_than_their_keys() -> None:
    budget = PinBudget(1000)
    for pin in range(112):
        budget.check("n")
        budget.add("n", pin, 1, 60_000)
    with pytest.raises(ServerRefused):
        budget.check("n")
    for pin in range(112):
        budget.release("n", pin)
        budget.release("n", pin)
    budget.check("n")


def test_a_replayed_allocation_grants_nothing_new_and_a_replayed_free_frees_nothing(memory_server: ServerProcess) -> None:
    node = Node(memory_server.endpoint, "n")
    device = node.device(4)
    [first] = node.alloc(device=device, op="same")
    connection = node.client.connection
    alloc, free = P.AllocRegions("same", 1, device), P.FreeRegions([P.Region(device, first.region, first.token)])
    for _ in range(3):
        reply = connection.call(alloc, 5000)
        assert isinstance(reply, P.Granted)
        assert reply.grants[0].token == first.token
    assert [connection.call(free, 5000) for _ in range(3)] == [P.Ok(1), P.Ok(0), P.Ok(0)]
    [second] = node.alloc(device=device, op="other")
    assert connection.call(free, 5000) == P.Ok(0)
    assert [r.token for r in node.client.regions()].count(second.token) == 1
    node.client.close()


def test_replayed_registrations_and_deletions_change_nothing_twice(memory_server: ServerProcess) -> None:
    node = Node(memory_server.endpoint, "n")
    [grant] = node.alloc(device=node.device())
    namespace, keys = os.urandom(16), keys_of(4)
    for _ in range(3):
        node.register(namespace, keys, grant)
    assert node.client.stats()["keys"] == 4
    node.client.delete(namespace, 0, keys)
    assert node.client.delete(namespace, 0, keys) == [P.Outcome.ABSENT] * 4
    node.client.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=200) | st.dictionaries(st.text(max_size=8), st.binary(max_size=8)).map(msgspec.msgpack.encode))
def test_garbage_gets_a_named_error(raw: Raw, body: bytes) -> None:
    assert code(raw.ask(body)) in (ErrorCode.BAD_MESSAGE, ErrorCode.NO_SESSION)


def test_frames_that_are_no_message_are_dropped_or_refused_and_the_server_goes_on(raw: Raw) -> None:
    raw.socket.send_multipart([b"hello"])
    raw.socket.send_multipart([b"x" * P.HEADER.size, b"y"])
    header = P.HEADER.pack(P.MAGIC, 1, 0, 1, 0)
    assert code(raw.ask_frames([header])) is ErrorCode.BAD_MESSAGE
    assert code(raw.ask_frames([header, b"a", b"b"])) is ErrorCode.BAD_MESSAGE
    assert isinstance(raw.ask(HELLO), P.Welcome)


def test_no_server_is_an_error_with_the_address_in_it_and_in_bounded_time() -> None:
    with pytest.raises(ServerUnavailable, match=r"tcp://127\.0\.0\.1:1\b"):
        DirectoryClient("tcp://127.0.0.1:1", timeout_ms=200)


def test_a_full_server_forgets_who_was_silent_for_longest_and_turns_nobody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_server.service.MAX_SESSIONS", 3)
    backend = MemoryBackend(Settings())
    service = Service(backend, Settings())

    def ask(who: bytes, message: P.Request) -> P.Reply:
        header = P.HEADER.pack(P.MAGIC, P.PROTOCOL, 0, 1, backend.epoch())
        answer = service.answer(who, [header, P.encoder.encode(message)])
        assert answer is not None
        return P.to_client.decode(answer[1])

    hello = P.Hello(P.PROTOCOL_MIN, P.PROTOCOL, "test")
    for name in (b"a", b"b", b"c"):
        assert isinstance(ask(name, hello), P.Welcome)
    assert isinstance(ask(b"a", P.GetStats()), P.Stats)
    assert isinstance(ask(b"d", hello), P.Welcome)
    assert isinstance(ask(b"a", P.GetStats()), P.Stats)
    refused = ask(b"b", P.GetStats())
    assert isinstance(refused, P.Error)
    assert refused.code is ErrorCode.NO_SESSION


def test_a_store_that_is_away_costs_readiness_and_not_the_liveness_of_the_servers_before_it() -> None:
    class Away(MemoryBackend):
        def tick(self) -> None:
            raise BackendUnavailable("redis://nowhere does not answer", "start it")

    server = Server(Away(Settings()), Settings(), ["tcp://127.0.0.1:0"])
    try:
        server._tick()
        assert server._pages.page("/healthz").status == 200
    finally:
        server.close()
