"""Settings come from four layers, and whatever is wrong is named with its source and its remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maru_shm import socket_path
from maru_shm.errors import ConfigError
from maru_shm.socket_path import default_socket_path
from maru_sidecar.config import Config, load_config, parse_size


def load(text: str | None = None, tmp_path: Path | None = None, env: dict[str, str] | None = None, **flags: object) -> Config:
    path = None
    if text is not None and tmp_path is not None:
        path = str(tmp_path / "maru.toml")
        Path(path).write_text(text)
    return load_config(path, env or {}, {k.replace("__", "."): v for k, v in flags.items()})


def test_the_defaults_are_valid() -> None:
    config = load()
    assert config.pool.size == 4 << 30
    assert config.http.address == ""
    assert config.transfer.checksum == "auto"


def test_each_layer_overrides_the_one_before(tmp_path: Path) -> None:
    text = '[pool]\nsize = "1GiB"\n[cache]\nlease_ttl_s = 10\n[daemon]\nspin_us = 1\n'
    env = {"MARU_CACHE_LEASE_TTL_S": "20", "MARU_DAEMON_SPIN_US": "2"}
    config = load(text, tmp_path, env, daemon__spin_us="3")
    assert config.pool.size == 1 << 30
    assert config.cache.lease_ttl_s == 20
    assert config.daemon.spin_us == 3


def test_a_flag_that_is_not_given_changes_nothing(tmp_path: Path) -> None:
    assert load("[daemon]\nspin_us = 7\n", tmp_path, daemon__spin_us=None).daemon.spin_us == 7


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('[http]\naddress = "127.0.0.1:9464"\n')
    assert load_config(None, {"MARU_CONFIG": str(tmp_path / "m.toml")}).http.address == "127.0.0.1:9464"


def test_the_socket_has_two_names_in_the_environment_that_must_agree() -> None:
    for env in (
        {"MARU_SOCKET": "/a/b"},
        {"MARU_CONTROL_SOCKET": "/a/b"},
        {"MARU_SOCKET": "/a/b", "MARU_CONTROL_SOCKET": "/a/b"},
    ):
        assert load(env=env).control.socket == default_socket_path(env) == "/a/b"
        assert load(env=env, control__socket="/flag").control.socket == "/flag"
    disagreeing = {"MARU_SOCKET": "/a/b", "MARU_CONTROL_SOCKET": "/c/d"}
    relative = {"MARU_SOCKET": "run/maru.sock"}
    for read in (lambda env: load(env=env), default_socket_path):
        with pytest.raises(ConfigError, match="MARU_SOCKET is '/a/b' and MARU_CONTROL_SOCKET is '/c/d'; unset one"):
            read(disagreeing)
        with pytest.raises(ConfigError, match=r"MARU_SOCKET is 'run/maru\.sock'; expected an absolute path"):
            read(relative)


def test_the_socket_is_searched_where_the_help_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(socket_path, "SYSTEM_DIRECTORY", str(tmp_path))
    assert default_socket_path({"XDG_RUNTIME_DIR": "/x"}) == f"{tmp_path}/control.sock"
    monkeypatch.setattr(socket_path, "SYSTEM_DIRECTORY", str(tmp_path / "absent"))
    assert default_socket_path({"XDG_RUNTIME_DIR": "/x", "MARU_SOCKET": ""}) == "/x/maru.sock"
    assert default_socket_path({}) == f"/tmp/maru-{os.getuid()}/maru.sock"
    places = (
        "$MARU_SOCKET",
        "$MARU_CONTROL_SOCKET",
        "/run/maru/control.sock",
        "$XDG_RUNTIME_DIR/maru.sock",
        "/tmp/maru-UID/maru.sock",
    )
    assert [socket_path.SEARCH.index(place) for place in places] == sorted(socket_path.SEARCH.index(place) for place in places)


def test_variables_of_other_programs_are_left_alone() -> None:
    load(env={"MARU_FAILPOINT": "x", "MARU_SERVER_PORT": "1", "MARU_TEST_ROUNDS": "2"})


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64GiB", 64 << 30), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("2tib", 2 << 40), ("7 b", 7)],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "1e9", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("[pool]\nsiez = 1\n", "unknown key 'pool.siez' in {path}", "did you mean 'pool.size'"),
        ("[pol]\nsize = 1\n", "unknown section [pol] in {path}", "did you mean 'pool'"),
        ("size = 1\n", "unknown section [size] in {path}", "known: "),
        ("[cache]\nlease_ttl_s = 'soon'\n", "cache.lease_ttl_s is 'soon' in {path}", "expected a number"),
        ("[pool]\nsize = 'banana'\n", "pool.size is 'banana' in {path}", "sizes read as '64GiB'"),
        ("[pool]\nsize = -5\n", "pool.size is -5", "at least 1MiB"),
        ("[pool]\nsize = 1.5\n", "pool.size is 1.5", "int"),
        ("[pool]\nbackend = 'tape'\n", "pool.backend is 'tape'", "expected one of shm, file"),
        ("[cache]\nlow_watermark = 0.99\n", "cache.low_watermark is 0.99", "high_watermark"),
        ("[control]\nsocket = 'relative'\n", "control.socket is 'relative' in {path}", "; expected an absolute path"),
        (f"[control]\nsocket = '/{'x' * 200}'\n", "control.socket is", "at most 107 bytes"),
        ("[control]\nmode = '999'\n", "control.mode is '999'", "octal"),
        ("[http]\naddress = 'localhost'\n", "http.address is 'localhost'", "host:port"),
        ("[transfer]\nbytes_in_flight = '1MiB'\n", "transfer.bytes_in_flight is 1048576", "slice_bytes"),
        ("[transfer]\ngpu_submitters = 9\n", "transfer.gpu_submitters is 9 in {path}", "1 to 8"),
        (
            "[pool]\nshared = true\ncoherence = 'flush'\n[server]\nendpoint = 'localhost:7400'\n",
            "pool.coherence is 'flush' in {path}",
            "expected hardware",
        ),
        (
            "[pool]\nshared = true\n[server]\nendpoint = 'meta.example:7400'\n",
            "server.token_file is ''",
            "the cluster's token: tcp://meta.example:7400 is not on loopback",
        ),
        ("[pool\n", "maru.toml", "TOML"),
    ],
)
def test_a_wrong_file_is_named_with_key_place_and_remedy(tmp_path: Path, text: str, what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path)
    assert what.format(path=tmp_path / "maru.toml") in str(caught.value)
    assert remedy in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/no/such/file\.toml: No such file"):
        load_config("/no/such/file.toml", {})


def test_a_wrong_variable_and_a_wrong_flag_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'pool\.sise' in MARU_POOL_SISE"):
        load(env={"MARU_POOL_SISE": "1"})
    with pytest.raises(ConfigError, match=r"limits\.max_records is 0 in the command line"):
        load(limits__max_records="0")


def test_lists_and_modes_are_read_from_text() -> None:
    config = load(env={"MARU_CONTROL_ALLOWED_UIDS": "1000, 1001", "MARU_CONTROL_MODE": "0666"}, control__allowed_gids="5")
    assert config.control.allowed_uids == (1000, 1001)
    assert config.control.allowed_gids == (5,)
    assert config.control.mode == 0o666


def test_a_pool_may_be_a_name_or_a_path() -> None:
    assert load(pool__path="maru-pool").pool.file_path == "/dev/shm/maru-pool"
    with pytest.raises(ConfigError, match=r"pool\.path is 'some/where'"):
        load(pool__backend="file", pool__path="some/where")


@pytest.mark.parametrize("key", ["pool.size", "http.address", "daemon.spin_us", "pool.shared", "pool.path", "limits.max_keys"])
def test_a_value_out_of_bounds_is_told_what_was_expected(key: str) -> None:
    wrong = {"http.address": "x", "pool.shared": "true", "pool.path": "a/b"}.get(key, "-1")
    with pytest.raises(ConfigError, match=f"{key} is .* in the command line; expected "):
        load_config(None, {}, {key: wrong})
