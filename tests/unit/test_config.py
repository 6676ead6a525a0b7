"""Settings come from four layers, and whatever is wrong is named with its source and its remedy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from maru_shm import socket_path
from maru_shm.errors import ConfigError
from maru_shm.socket_path import default_socket_path
from maru_sidecar.config import Config, Limits, load_config, printable
from maru_sidecar.config_values import parse_mode, parse_size


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
        ("[cache]\nlease_ttl_s = 2\n", "cache.lease_ttl_s is 2", "between 3 and 86400"),
        ("[server]\npin_ttl_s = 2\n", "server.pin_ttl_s is 2", "3 to 3600"),
        ("[pool]\nsize = 'banana'\n", "pool.size is 'banana' in {path}", "sizes read as '64GiB'"),
        ("[pool]\nsize = -5\n", "pool.size is -5", "at least 1MiB"),
        ("[pool]\nsize = 1.5\n", "pool.size is 1.5 in {path}", "expected a whole number; sizes read as '64GiB'"),
        ("[pool]\npath = 3\n", "pool.path is 3 in {path}", "expected text in quotes"),
        ("[pool]\nshared = 1\n", "pool.shared is 1 in {path}", "expected true or false"),
        ("[pool]\nnuma_node = true\n", "pool.numa_node is True in {path}", "expected a whole number"),
        ("[pool]\nbackend = 7\n", "pool.backend is 7 in {path}", "expected one of shm, file"),
        ("[cache]\nlease_ttl_s = [1]\n", "cache.lease_ttl_s is [1] in {path}", "expected a number"),
        ("[control]\nallowed_uids = ['a']\n", "control.allowed_uids is ['a'] in {path}", "expected a list of whole numbers"),
        ("[control]\nallowed_uids = 5\n", "control.allowed_uids is 5 in {path}", "expected a list of whole numbers"),
        ("[control]\nmode = 660.0\n", "control.mode is 660.0 in {path}", "octal"),
        ("[control]\nmode = 660\n", "control.mode is 660 in {path}", "TOML reads a bare 660 as decimal"),
        ("pool = 3\n", "pool is 3 in {path}", "it must be a table: [pool] on a line"),
        ("[[pool]]\nsize = 1\n", "pool is [{{'size': 1}}] in {path}", "it must be a table"),
        ("[server]\nendpoint = 'foo'\n", "server.endpoint is 'foo' in {path}", "write tcp://HOST:PORT"),
        ("[http]\naddress = 'foo:80'\n", "http.address is 'foo:80' in {path}", "names are not looked up"),
        (
            "[cache]\nhigh_watermark = 0.5\n",
            "cache.low_watermark is 0.95 in the defaults",
            "at most cache.high_watermark, which is 0.5 in ",
        ),
        ("[server]\nendpoint = 'a:1'\n", "pool.shared is False in the defaults", "server.endpoint is 'tcp://a:1' in "),
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


@pytest.mark.parametrize("key", ["pool.mode", "control.mode"])
def test_modes_are_octal_wherever_they_are_read(tmp_path: Path, key: str) -> None:
    section, _, field = key.partition(".")

    def mode(config: Config) -> object:
        return getattr(getattr(config, section), field)

    for text in ("640", "0640", "0o640", "0O640", " 0640 "):
        assert mode(load_config(None, {}, {key: text})) == 0o640
        assert mode(load(env={f"MARU_{section.upper()}_{field.upper()}": text})) == 0o640
        assert mode(load(f"[{section}]\n{field} = '{text}'\n", tmp_path)) == 0o640
    assert mode(load(f"[{section}]\n{field} = 0o640\n", tmp_path)) == 0o640
    for text in ("99999", "1777", "0o1000", "-1", "689", "0x1ff", "rw-r-----", "6_40", "", "64GiB"):
        with pytest.raises(ConfigError, match=f"{key} is '{text}' in the command line; expected octal permission bits"):
            load_config(None, {}, {key: text})
    for number in ("0o1000", "-1", "600"):
        with pytest.raises(ConfigError, match=f"{key} is .* expected octal permission bits up to 0o777"):
            load(f"[{section}]\n{field} = {number}\n", tmp_path)


def test_a_mode_in_octal_is_all_that_is_a_mode() -> None:
    assert [parse_mode(text) for text in ("0", "777", "0o777")] == [0, 0o777, 0o777]
    with pytest.raises(ValueError, match="permission bits"):
        parse_mode("1000")


def test_what_is_printed_can_be_given_again(tmp_path: Path) -> None:
    config = load(pool__mode="0640", control__mode="0o606", control__allowed_uids="1,2", pool__size="1GiB")
    shown = json.loads(json.dumps(printable(config)))
    assert (shown["pool"]["mode"], shown["control"]["mode"]) == ("0o640", "0o606")
    given = {f"{section}.{key}": value for section, values in shown.items() for key, value in values.items()}
    assert load_config(None, {}, given) == config
    text = {key: str(value) for key, value in given.items() if value is not None and not isinstance(value, list)}
    assert load_config(None, {}, {**text, "control.allowed_uids": "1,2"}) == config


def test_a_single_component_is_no_name_where_something_else_lies_there() -> None:
    with pytest.raises(
        ConfigError, match=r"pool\.path is '/tmp' in the command line; expected /tmp/maru-pool, or /dev/shm/tmp"
    ):
        load(pool__path="/tmp")
    for path in ("tmp", "/dev/shm/tmp"):  # said without a doubt
        assert load(pool__path=path).pool.file_path == "/dev/shm/tmp"
    assert load(pool__path="/tmp", pool__backend="file").pool.file_path == "/tmp"  # refused where it is opened
    if os.access("/", os.W_OK):
        path = f"/maru-config-{os.getpid()}"
        assert load(pool__path=path).pool.file_path == f"/dev/shm{path}"
        Path(path).touch()
        try:
            with pytest.raises(ConfigError, match=f"expected pool.backend 'file' with it, or /dev/shm{path}: .* is a file"):
                load(pool__path=path)
        finally:
            os.unlink(path)


def test_a_pool_may_be_a_name_or_a_path() -> None:
    assert load(pool__path="maru-pool").pool.file_path == "/dev/shm/maru-pool"
    with pytest.raises(ConfigError, match=r"pool\.path is 'some/where'"):
        load(pool__backend="file", pool__path="some/where")


@pytest.mark.parametrize("key", ["pool.size", "http.address", "daemon.spin_us", "pool.shared", "pool.path", "limits.max_keys"])
def test_a_value_out_of_bounds_is_told_what_was_expected(key: str) -> None:
    wrong = {"http.address": "x", "pool.shared": "true", "pool.path": "a/b"}.get(key, "-1")
    with pytest.raises(ConfigError, match=f"{key} is .* in the command line; expected "):
        load_config(None, {}, {key: wrong})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"limits.{name}", str(10**20)) for name in Limits.__struct_fields__),
        *((f"limits.{name}", "0") for name in Limits.__struct_fields__),
        ("pool.numa_node", "-1"), ("pool.numa_node", "1024"),
        ("pool.size", str(1 << 70)), ("pool.region_size", "-4096"), ("pool.region_size", "5000"), ("pool.path", "/a\0b"),
        ("control.max_connections", str(10**9)), ("control.allowed_uids", "-1"), ("control.allowed_gids", str(1 << 32)),
        ("control.handshake_timeout_s", "inf"), ("control.idle_timeout_s", "nan"), ("transfer.fence_timeout_s", "inf"),
        ("transfer.copy_timeout_s", "inf"), ("cache.namespace_quota", str(1 << 70)), ("transfer.bytes_in_flight", str(1 << 70)),
    ],
)  # fmt: skip
def test_every_number_is_bounded_on_both_sides(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is .* in the command line; expected "):
        load_config(None, {}, {key: value})


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "[::1]:0", ":80", "localhost:80", "0.0.0.0:1", ""])
def test_the_http_address_is_an_address(address: str) -> None:
    assert load(http__address=address).http.address == address


@pytest.mark.parametrize("where", ["MARU_SERVER_ENDPOINT", "the command line"])
def test_a_wrong_endpoint_names_its_origin(where: str) -> None:
    with pytest.raises(ConfigError, match=f"server.endpoint is 'foo' in {where}; write tcp://HOST:PORT"):
        load(env={where: "foo"}) if where.startswith("MARU") else load(server__endpoint="foo")
