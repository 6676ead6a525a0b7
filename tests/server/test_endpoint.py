"""How the address of a metadata server is written."""

from __future__ import annotations

import pytest

from maru_server.connection import default_endpoint
from maru_shm.endpoint import normal_endpoint
from maru_shm.errors import ConfigError
from maru_sidecar.config import load_config


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("tcp://10.0.0.1:7420", "tcp://10.0.0.1:7420"),
        ("127.0.0.1:7420", "tcp://127.0.0.1:7420"),
        ("server.example:7420", "tcp://server.example:7420"),
        ("[::1]:7420", "tcp://[::1]:7420"),
        (" tcp://[fe80::1%eth0]:7420 ", "tcp://[fe80::1%eth0]:7420"),
        ("ipc:///run/maru/server.sock", "ipc:///run/maru/server.sock"),
    ],
)
def test_a_bare_host_and_port_is_tcp(text: str, means: str) -> None:
    assert normal_endpoint(text) == means
    assert normal_endpoint(text, listens=True) == means


@pytest.mark.parametrize(
    "text",
    ["", "7420", "host", "host:", ":7420", "tcp://", "tcp://host", "tcp://host:99999", "tcp://host:7420/x", "::1:7420", "udp://h:1",
     "http://127.0.0.1:7420", "ipc://", "tcp:/h:1", "tcp://a b:1"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write tcp://HOST:PORT \(or HOST:PORT\)"):
        normal_endpoint(text)


@pytest.mark.parametrize("text", ["*:7420", "tcp://127.0.0.1:*", "127.0.0.1:0"])
def test_an_address_to_listen_on_is_none_to_connect_to(text: str) -> None:
    assert normal_endpoint(text, listens=True)
    with pytest.raises(ConfigError, match="to listen on, not one to connect to"):
        normal_endpoint(text)


def test_the_sidecars_configuration_takes_the_same_forms() -> None:
    config = load_config(environ={}, flags={"pool.shared": "true", "server.endpoint": "127.0.0.1:17420"})
    assert config.server.endpoint == "tcp://127.0.0.1:17420"
    for wrong in ("127.0.0.1", "http://127.0.0.1:17420"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            load_config(environ={}, flags={"pool.shared": "true", "server.endpoint": wrong})


def test_one_name_in_the_environment_is_the_address_for_sidecar_and_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "MARU_SERVER_ENDPOINT": "10.0.0.1:7420", "MARU_POOL_SHARED": "true", "MARU_SERVER_TOKEN_FILE": "/etc/maru/token",
    }  # fmt: skip
    assert load_config(environ=environment).server.endpoint == "tcp://10.0.0.1:7420"
    monkeypatch.delenv("MARU_SERVER", raising=False)
    monkeypatch.setenv("MARU_SERVER_ENDPOINT", "10.0.0.1:7420")
    assert normal_endpoint(default_endpoint()) == "tcp://10.0.0.1:7420"


def test_the_name_of_the_commands_does_not_make_a_sidecar_share_its_pool() -> None:
    assert load_config(environ={"MARU_SERVER": "tcp://10.0.0.1:7420"}).server.endpoint == ""
