"""The connector's options: names, aliases, types, and what is said about a wrong one."""

from __future__ import annotations

import pytest

from maru_connector.options import MIN_HIT_TOKENS, check_chunk, for_device, parse_options
from maru_shm.errors import ConfigError


def test_nothing_set_gives_the_documented_defaults() -> None:
    options = parse_options(None)
    assert (options.chunk_tokens, options.deferred_load, options.write_behind) == (256, True, True)
    assert options.layerwise_overlap is False


def test_what_a_load_is_worth_parking_for_depends_on_the_device_unless_it_is_said() -> None:
    assert for_device(parse_options({}), "cpu").min_hit_tokens == 0
    assert for_device(parse_options({}), "cuda").min_hit_tokens == MIN_HIT_TOKENS
    assert for_device(parse_options({"maru.min_hit_tokens": 5}), "cuda").min_hit_tokens == 5


def test_the_socket_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARU_SOCKET", "/somewhere/control.sock")
    assert parse_options({}).socket == "/somewhere/control.sock"
    assert parse_options({"maru.socket": "/else.sock"}).socket == "/else.sock"


def test_values_are_taken_as_json_or_as_text() -> None:
    options = parse_options({"maru.chunk_tokens": "128", "maru.write_behind": "false", "maru.load_timeout_s": 5})
    assert (options.chunk_tokens, options.write_behind, options.load_timeout_s) == (128, False, 5.0)


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("maru_async_load", "deferred_load"),
        ("maru_enable_deferred_loading", "deferred_load"),
        ("maru_async_store", "write_behind"),
        ("maru_enable_write_behind", "write_behind"),
        ("maru_overlap_load_with_compute", "layerwise_overlap"),
        ("maru_enable_layerwise_overlap", "layerwise_overlap"),
    ],
)
def test_the_in_engine_connectors_flags_still_work(alias: str, field: str) -> None:
    assert getattr(parse_options({alias: False}), field) is False


def test_its_settings_that_moved_to_the_sidecar_are_listed_not_refused() -> None:
    options = parse_options({"maru_pool_size": "4G", "maru_kv_chunk_tokens": 512})
    assert options.ignored == ("maru_pool_size",)
    assert options.chunk_tokens == 512


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"'maru\.chunk_token'.*did you mean maru\.chunk_tokens"):
        parse_options({"maru.chunk_token": 256})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("maru_kv_chunk_token", "maru_kv_chunk_tokens"),
        ("maru_chunk_tokens", "maru.chunk_tokens"),
        ("maru_write_behind", "maru.write_behind"),
        ("maru_server_urls", "maru_server_url"),
        ("Maru.chunk_tokens", "maru.chunk_tokens"),
        ("maru-chunk_tokens", "maru.chunk_tokens"),
        ("maru_", "options: maru.socket"),
        ("maru.", "options: maru.socket"),
    ],
)
def test_a_misspelt_alias_is_refused_like_a_misspelt_option(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"no option '{key}'; .*{nearest}"):
        parse_options({key: 256})


def test_a_relative_socket_is_refused_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"maru\.socket is 'rel\.sock'; expected an absolute path"):
        parse_options({"maru.socket": "rel.sock"})
    monkeypatch.setenv("MARU_SOCKET", "rel.sock")
    with pytest.raises(ConfigError, match=r"MARU_SOCKET is 'rel\.sock'; expected an absolute path"):
        parse_options({})


def test_other_peoples_keys_are_left_alone() -> None:
    others = {"lmcache.config": "x", "engine": 3, "chunk_size": 256, "marula": 1}
    assert parse_options(others) == parse_options({})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("maru.chunk_tokens", 0),
        ("maru.chunk_tokens", 2.5),
        ("maru.chunk_tokens", "many"),
        ("maru.chunk_tokens", True),
        ("maru.chunk_tokens", float("inf")),
        ("maru.deferred_load", "perhaps"),
        ("maru.socket", ""),
        ("maru.load_timeout_s", -1),
        ("maru.load_timeout_s", float("nan")),
        ("maru.max_pinned_share", 1.5),
    ],
)
def test_a_wrong_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_options({key: value})


def test_an_option_set_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_options({"maru.deferred_load": True, "maru_async_load": False})


def test_a_chunk_is_a_whole_number_of_blocks() -> None:
    check_chunk(parse_options({}), 16)
    with pytest.raises(ConfigError, match=r"e\.g\. 384"):
        check_chunk(parse_options({}), 96 * 2)
