"""The server's pages: what they say, whom they answer, and that nobody can make the server wait."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Node, ServerProcess, free_port, keys_of, redis_process, server_process, until

from maru_server.auth import new_token
from maru_server.client import DirectoryClient
from maru_server.errors import BackendUnavailable, ServerRefused
from maru_server.http import MAX_HEAD, MAX_PEERS, HttpFront, text_page
from maru_shm.errors import ConfigError

LINE = re.compile(r'^[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [-+0-9.einfNa]+$')


def pages_of(server: ServerProcess) -> tuple[str, int]:
    assert server.process.stdout is not None
    line = server.process.stdout.readline()
    assert line.startswith("pages on http://127.0.0.1:"), line
    return "127.0.0.1", int(line.rpartition(":")[2])


def get(at: tuple[str, int], path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*at, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def metrics(at: tuple[str, int]) -> dict[str, float]:
    status, text = get(at, "/metrics")
    assert status == 200
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert LINE.match(line), line
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    return values


@pytest.fixture
def server() -> Iterator[tuple[ServerProcess, tuple[str, int]]]:
    with server_process(extra=("--http", "127.0.0.1:0")) as server:
        yield server, pages_of(server)


def test_the_pages_say_that_it_lives_is_ready_and_what_it_is(server: tuple[ServerProcess, tuple[str, int]]) -> None:
    _, at = server
    assert get(at, "/healthz") == (200, "ok\n")
    assert get(at, "/readyz") == (200, "ok\n")
    version = json.loads(get(at, "/version")[1])
    assert (version["backend"], version["protocol"]) == ("memory", 1)
    status = json.loads(get(at, "/status")[1])
    assert status["endpoints"] == [server[0].endpoint]
    assert status["keys"] == 0
    assert get(at, "/elsewhere")[0] == 404
    assert get(at, "/healthz", method="HEAD") == (200, "")
    assert get(at, "/metrics", method="POST")[0] == 405


def test_metrics_count_what_was_asked_by_verb_with_its_time(server: tuple[ServerProcess, tuple[str, int]]) -> None:
    process, at = server
    before = metrics(at)
    assert before['maru_server_requests_total{verb="Lookup"}'] == 0, "there from the first scrape on"
    assert before['maru_server_refused_total{code="wrong_epoch"}'] == 0
    node = Node(process.endpoint, "n1")
    [grant] = node.alloc(device=node.device())
    namespace, keys = b"n" * 16, keys_of(5)
    node.register(namespace, keys, grant)
    node.client.lookup(namespace, 0, keys)
    node.client.pin(namespace, 0, keys, 2000)
    with pytest.raises(ServerRefused):
        node.client.alloc("another", 1, device=b"u" * 16)
    after = until("the backend was asked again", lambda: m if (m := metrics(at))["maru_server_keys"] else None)
    assert after["maru_server_nodes"] == after["maru_server_regions"] == after["maru_server_pins"] == 1
    assert after["maru_server_keys"] == 5
    assert after["maru_server_epoch"] == node.client.epoch
    assert after['maru_server_requests_total{verb="Lookup"}'] == 1
    assert after['maru_server_refused_total{code="unknown_device"}'] == 1
    name = "maru_server_request_duration_seconds"
    buckets = [v for k, v in after.items() if k.startswith(f'{name}_bucket{{verb="Lookup"')]
    assert buckets == sorted(buckets)
    assert buckets[-1] == after[f'{name}_count{{verb="Lookup"}}'] == 1
    assert after[f'{name}_sum{{verb="Lookup"}}'] > 0
    verbs = json.loads(get(at, "/status")[1])["verbs"]
    assert verbs["Lookup"]["requests"] == 1
    node.client.close()


def test_slow_peers_never_make_the_server_wait_and_lose_their_place(server: tuple[ServerProcess, tuple[str, int]]) -> None:
    process, at = server
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(2 * MAX_PEERS):
            peer = stack.enter_context(socket.create_connection(at, timeout=10))
            peer.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
            peers.append(peer)
        assert get(at, "/healthz") == (200, "ok\n")
        with DirectoryClient(process.endpoint) as client:
            client.ping()
        assert metrics(at)["maru_server_http_turned_out_total"] >= MAX_PEERS
        assert peers[0].recv(1) == b"", "the one that was waited for longest"
        peers[-1].sendall(b" localhost\r\n\r\n")
        assert peers[-1].recv(12) == b"HTTP/1.0 200"


def test_a_peer_has_its_time_and_no_more() -> None:
    import zmq

    front = HttpFront(("127.0.0.1", 0), lambda _: text_page(http.HTTPStatus.OK, "x" * (32 << 20)), request_s=0.2)
    poller = zmq.Poller()
    front.join(poller)

    def turn() -> None:
        for descriptor, _ in poller.poll(10):
            front.ready(descriptor)
        front.tick()

    try:
        with socket.create_connection(front.address, timeout=10) as silent, socket.create_connection(front.address) as deaf:
            deaf.sendall(b"GET / HTTP/1.1\r\n\r\n")  # and never reads the 32 MiB
            end = time.monotonic() + 20
            while front.too_slow < 2 and time.monotonic() < end:
                turn()
            assert front.too_slow == 2
            assert silent.recv(1) == b""
    finally:
        front.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /version HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / SPDY/3\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * MAX_HEAD, b"431"),
        (b"\xff\xfe\r\n\r\n", b"400"),
        (b"GET /healthz HTTP/1.0\n\n", b"200"),
        (b"GET /healthz?x=1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", b"200"),
    ],
)
def test_every_request_gets_its_answer(
    server: tuple[ServerProcess, tuple[str, int]], request_bytes: bytes, status: bytes
) -> None:
    with socket.create_connection(server[1], timeout=10) as peer:
        peer.sendall(request_bytes)
        assert peer.recv(12)[9:] == status


def test_off_loopback_a_token_of_its_own_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--http-token-file"):
        HttpFront(("0.0.0.0", 0), lambda _: None)
    path = tmp_path / "http-token"
    path.write_text(token := new_token())
    path.chmod(0o600)
    with server_process(extra=("--http", "0.0.0.0:0", "--http-token-file", str(path))) as server:
        assert server.process.stdout is not None
        at = ("127.0.0.1", int(server.process.stdout.readline().rpartition(":")[2]))
        assert get(at, "/healthz")[0] == 200, "probes carry no token and tell nothing"
        assert get(at, "/metrics")[0] == 401
        assert get(at, "/metrics", headers={"Authorization": "Bearer " + "x" * 64})[0] == 401
        assert get(at, "/metrics", headers={"Authorization": f"Bearer {token}"})[0] == 200
        assert get(at, "/metrics", headers={"Authorization": "Bearer \xe9"})[0] == 401


def test_the_clusters_token_is_not_taken_for_the_pages(token_file: Path) -> None:
    from click.testing import CliRunner

    from maru_server.cli import main

    command = ["run", "--listen", "tcp://127.0.0.1:*", "--token-file", str(token_file)]
    done = CliRunner().invoke(main, [*command, "--http", "127.0.0.1:0", "--http-token-file", str(token_file)])
    assert done.exit_code == 2
    assert "HTTP sends it in clear" in done.output


def test_an_address_in_use_is_one_line(server: tuple[ServerProcess, tuple[str, int]]) -> None:
    from click.testing import CliRunner

    from maru_server.cli import main

    done = CliRunner().invoke(main, ["run", "--listen", "tcp://127.0.0.1:*", "--http", f"127.0.0.1:{server[1][1]}"])
    assert done.exit_code == 2
    assert "choose a free port" in done.output


def test_a_store_that_does_not_answer_is_not_ready_but_alive(tmp_path: Path) -> None:
    port = free_port()
    with redis_process(tmp_path, "--port", str(port), "--bind", "127.0.0.1") as redis:
        until("redis listens", lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
        with server_process(store=f"redis://127.0.0.1:{port}", extra=("--http", "127.0.0.1:0")) as server:
            at = pages_of(server)
            assert get(at, "/readyz")[0] == 200
            assert metrics(at)["maru_server_backend_up"] == 1
            redis.kill()
            redis.wait(10)
            until("it says so", lambda: get(at, "/readyz")[0] == 503)
            assert metrics(at)["maru_server_backend_up"] == 0
            with pytest.raises((ServerRefused, BackendUnavailable)):
                DirectoryClient(server.endpoint, node="late", timeout_ms=10_000)
            assert "backend_failure" in json.loads(get(at, "/status")[1])
