"""Fixtures of the metadata server's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from servers import ServerProcess, redis_cluster, redis_on_socket, server_process


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_on_socket(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as url:
        yield url


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_on_socket(tmp_path_factory.mktemp("valkey"), "valkey") as url:
        yield url


@pytest.fixture(scope="session")
def valkey_cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_cluster(tmp_path_factory.mktemp("valkey-cluster"), "valkey") as url:
        yield url


_URLS = {"redis": "redis_url", "redis-cluster": "cluster_url", "valkey": "valkey_url", "valkey-cluster": "valkey_cluster_url"}


@pytest.fixture(scope="module", params=["memory", *_URLS])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server on each backend; tests of one module share it and bring their own nodes, devices and namespaces."""
    store = "memory" if request.param == "memory" else request.getfixturevalue(_URLS[request.param])
    prefix = request.module.__name__
    with ExitStack() as stack:
        yield stack.enter_context(server_process(store=store, extra=("--prefix", prefix)))


@pytest.fixture
def memory_server() -> Iterator[ServerProcess]:
    with server_process() as server:
        yield server


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    from maru_server.auth import new_token

    path = tmp_path / "token"
    path.write_text(new_token())
    path.chmod(0o600)
    return path
