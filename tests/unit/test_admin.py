"""The admin client against a real SEQPACKET socket: what it asks, and what it says when the answer is missing or wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.responder import WELCOME, Responder

from maru_shm import messages as M
from maru_shm.errors import ProtocolVersionMismatch, ProtocolViolation, SidecarUnavailable
from maru_sidecar.admin import PIN_BATCH, AdminClient, AdminRefused


@pytest.fixture
def responder(tmp_path: Path) -> Iterator[Responder]:
    with Responder(tmp_path / "control.sock") as server:
        yield server


def chunk(i: int) -> M.ChunkInfo:
    return M.ChunkInfo("ab" * 16, f"{i:032x}", 1, 1, 4096, 256, 0, pinned=False, age_s=1.0)


def test_the_client_says_hello_before_anything_else_and_knows_who_answers(responder: Responder) -> None:
    responder.answers[M.Ping] = lambda _: M.Pong("READY")
    with AdminClient.connect(responder.path) as client:
        assert client.welcome == WELCOME
        assert client.ping() == "READY"
    assert [type(m) for m in responder.heard] == [M.Hello, M.Ping]


def test_each_verb_carries_its_arguments(responder: Responder) -> None:
    responder.answers |= {
        M.GetStatus: lambda _: M.Status({"pool": {"bytes": 1}}),
        M.Drain: lambda _: M.Done(),
        M.CacheClear: lambda _: M.Done(7, 2),
    }
    with AdminClient.connect(responder.path) as client:
        assert client.status() == {"pool": {"bytes": 1}}
        client.drain()
        assert client.cache_clear(engine_id="engine-a") == M.Done(7, 2)
    assert responder.heard[-1] == M.CacheClear("", "engine-a")


def test_a_long_directory_is_read_page_by_page_and_no_further_than_asked(responder: Responder) -> None:
    chunks = [chunk(i) for i in range(1200)]

    def page(ask: M.ClientMessage) -> M.SidecarMessage:
        assert isinstance(ask, M.CacheList)
        rest = [c for c in chunks if c.key > ask.after]
        return M.CachePage(rest[: ask.limit], more=len(rest) > ask.limit)

    responder.answers[M.CacheList] = page
    with AdminClient.connect(responder.path) as client:
        assert list(client.cache_list()) == chunks
        assert [ask.limit for ask in responder.heard if isinstance(ask, M.CacheList)] == [500, 500, 500]
        assert list(client.cache_list(limit=501)) == chunks[:501]
        assert list(client.cache_list(after=chunks[1197].key)) == chunks[1198:]


def test_pinning_stops_at_the_first_absent_key_across_batches(responder: Responder) -> None:
    present = PIN_BATCH + 10
    left = [present]

    def pin(ask: M.ClientMessage) -> M.SidecarMessage:
        assert isinstance(ask, M.Pin)
        n = min(left[0], len(ask.keys))
        left[0] -= n
        return M.Done(n)

    responder.answers[M.Pin] = pin
    with AdminClient.connect(responder.path) as client:
        assert client.pin("ab", [f"{i:032x}" for i in range(3 * PIN_BATCH)]) == present
        sizes = [len(ask.keys) for ask in responder.heard if isinstance(ask, M.Pin)]
        assert sizes == [PIN_BATCH, PIN_BATCH]  # the third batch was not asked for
        left[0] = 1
        assert client.unpin("ab", ["00"]) == M.Done(1, 0)
    assert responder.heard[-1] == M.Pin("ab", ["00"], pinned=False)


def test_a_refusal_names_its_code_and_remedy(responder: Responder) -> None:
    responder.answers[M.Drain] = lambda _: M.Refused(M.RefusalCode.NOT_AUTHORISED, "uid 12 may not drain", "ask an admin")
    with (
        AdminClient.connect(responder.path) as client,
        pytest.raises(AdminRefused, match="uid 12 may not drain; ask an") as refused,
    ):
        client.drain()
    assert refused.value.code is M.RefusalCode.NOT_AUTHORISED


def test_a_sidecar_of_another_protocol_is_named_as_such(responder: Responder) -> None:
    responder.answers[M.Hello] = lambda _: M.Refused(M.RefusalCode.VERSION, "protocol 9-9 is needed")
    with pytest.raises(ProtocolVersionMismatch, match="protocol 9-9 is needed; run the same release"):
        AdminClient.connect(responder.path)


def test_a_sidecar_that_dies_in_the_middle_is_unavailable(responder: Responder) -> None:
    responder.answers[M.Ping] = lambda _: None
    with AdminClient.connect(responder.path) as client, pytest.raises(SidecarUnavailable, match="closed the connection"):
        client.ping()


def test_an_answer_of_the_wrong_kind_is_the_peers_fault(responder: Responder) -> None:
    responder.answers[M.Ping] = lambda _: M.Done(1)
    with AdminClient.connect(responder.path) as client, pytest.raises(ProtocolViolation, match="answered Ping with Done"):
        client.ping()


def test_no_answer_ends_in_a_bounded_named_error(tmp_path: Path) -> None:
    path = str(tmp_path / "mute.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(path)
        mute.listen()
        with pytest.raises(SidecarUnavailable, match=r"no answer to Hello from .*mute\.sock in 0\.1 s"):
            AdminClient.connect(path, timeout_s=0.1)


def test_no_socket_says_how_to_start_a_sidecar(tmp_path: Path) -> None:
    with pytest.raises(SidecarUnavailable, match=r"No such file or directory; start it: maru-sidecar run"):
        AdminClient.connect(str(tmp_path / "none.sock"))
