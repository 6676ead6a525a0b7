"""Off loopback the shared token decides who is heard."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import server_process

from maru_server.auth import derive, is_local, new_token, read_token, require_token
from maru_server.client import DirectoryClient
from maru_server.errors import ServerUnavailable
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
        for wrong in (None, new_token()):
            with pytest.raises(ServerUnavailable, match="tokens agree"):
                DirectoryClient(server.endpoint, wrong, timeout_ms=500)


def test_a_client_with_a_token_does_not_talk_to_a_server_without(token_file: Path) -> None:
    with server_process() as server, pytest.raises(ServerUnavailable):
        DirectoryClient(server.endpoint, read_token(str(token_file)), timeout_ms=500)


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
