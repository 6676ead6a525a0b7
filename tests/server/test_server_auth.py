"""Off loopback the shared token decides who is heard."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request
from pathlib import Path

import pytest
from servers import free_port, server_process, until

from maru_server.auth import derive, new_token, read_token, require_token
from maru_server.client import DirectoryClient
from maru_server.errors import ServerUnavailable
from maru_server.link_types import LinkConfig
from maru_server.node import NodeLink
from maru_shm.endpoint import is_local
from maru_shm.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "reach"),
    [
        ("tcp://127.0.0.1:7420", "local"),
        ("tcp://127.9.9.9:1", "local"),
        ("tcp://[::1]:7420", "local"),
        ("tcp://localhost:7420", "local"),
        ("ipc:///run/maru/server.sock", "local"),
        ("tcp://0.0.0.0:7420", "remote"),
        ("tcp://*:7420", "remote"),
        ("tcp://[::]:7420", "remote"),
        ("tcp://10.0.0.1:7420", "remote"),
        ("tcp://localhost.example:7420", "remote"),
        ("pgm://127.0.0.1:7420", "remote"),
    ],
)
def test_only_loopback_and_ipc_count_as_local(endpoint: str, reach: str) -> None:
    assert is_local(endpoint) is (reach == "local")
    if reach == "remote":
        with pytest.raises(ConfigError, match="not on loopback"):
            require_token(endpoint, None)
    require_token(endpoint, new_token())


def test_the_holder_of_the_token_is_heard_and_nobody_else(token_file: Path) -> None:
    with server_process(token_file=token_file) as server:
        with DirectoryClient(server.endpoint, read_token(str(token_file))) as client:
            client.ping()
        for wrong, says in ((None, "wants a token and none is set"), (new_token(), "is not the server's")):
            with pytest.raises(ServerUnavailable, match=f"refused the handshake: .*{says}.*token_file"):
                DirectoryClient(server.endpoint, wrong, timeout_ms=500)


def test_a_client_with_a_token_does_not_talk_to_a_server_without(token_file: Path) -> None:
    with server_process() as server, pytest.raises(ServerUnavailable, match="has no token, and one is set here"):
        DirectoryClient(server.endpoint, read_token(str(token_file)), timeout_ms=500)


@pytest.mark.parametrize("mine", [None, "a token"])
def test_a_missing_server_is_not_taken_for_a_refused_token(mine: str | None) -> None:
    with pytest.raises(ServerUnavailable, match="nobody listens there"):
        DirectoryClient(f"tcp://127.0.0.1:{free_port()}", mine and new_token(), timeout_ms=500)


def test_what_listens_and_says_nothing_is_told_from_a_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServerUnavailable, match="takes connections and says nothing"):
            DirectoryClient(f"tcp://127.0.0.1:{port}", new_token(), timeout_ms=500)


def test_a_server_that_stopped_answering_is_told_from_one_that_refuses(token_file: Path) -> None:
    with (
        server_process(token_file=token_file) as server,
        DirectoryClient(server.endpoint, read_token(str(token_file)), timeout_ms=500) as client,
    ):
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(ServerUnavailable, match="did not answer within 500 ms"):
                client.ping()
        finally:
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(("mine", "says"), [(None, "wants a token and none is set"), ("wrong", "is not the server's")])
def test_a_nodes_link_says_that_the_token_is_the_reason(
    token_file: Path, mine: str | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server_process(token_file=token_file) as server:
        link = NodeLink(LinkConfig(server.endpoint, "n1", token=mine and new_token(), timeout_ms=400), lambda _: ())
        link.start()
        try:
            until("the link has tried three times", lambda: link.stats().reconnects >= 3)
            assert says in link.stats().last_error
        finally:
            link.close()
    assert sum(says in record.getMessage() for record in caplog.records) == 1


def test_the_server_counts_and_logs_whom_it_refused(token_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with server_process(token_file=token_file, extra=("--http", f"127.0.0.1:{port}")) as server:
        for wrong in (None, new_token(), new_token()):
            with pytest.raises(ServerUnavailable):
                DirectoryClient(server.endpoint, wrong, timeout_ms=200)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        refused = dict(re.findall(r'maru_server_handshakes_refused_total{reason="(\w+)"} (\d+)', text))
    assert set(refused) == {"no_token", "wrong_token", "incomplete", "other"}
    assert int(refused["no_token"]) + int(refused["incomplete"]) >= 1, "which side notices first is chance"
    assert int(refused["wrong_token"]) >= 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "connections refused" in line]
    assert 1 <= len(lines) <= 2, "the first at once, the rest every ten seconds"
    assert re.search(r"1 (without a token|given up by the peer .*); the last from (127\.0\.0\.1|an unknown address)$", lines[0])


def test_a_server_refuses_to_start_off_loopback_without_a_token() -> None:
    with pytest.raises(AssertionError, match="did not start"):
        server_process(listen="tcp://0.0.0.0:*").__enter__()


def test_a_token_file_that_others_may_read_is_refused(token_file: Path) -> None:
    token_file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(str(token_file))
    with pytest.raises(ConfigError, match="No such file"):
        read_token(str(token_file) + ".missing")


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 32"):
        derive("password")


def test_keys_follow_from_the_token_and_differ_by_role() -> None:
    token = new_token()
    keys = derive(token)
    assert keys == derive(token)
    assert len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    assert keys.server_secret != derive(new_token()).server_secret
