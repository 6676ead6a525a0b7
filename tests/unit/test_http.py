"""The HTTP endpoint over real sockets: what probes and scrapers see, and what it refuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.support.waiting import until

from maru_shm.errors import ConfigError
from maru_shm.http import Sample, parse_address, render_metrics
from maru_sidecar.http import MAX_HEAD, MAX_REQUESTS, HttpServer, Sources


@dataclass
class Daemon:
    """What a test says the daemon is like."""

    healthy: tuple[bool, str] = (True, "")
    ready: tuple[bool, str] = (True, "")
    metrics: list[Sample] = field(default_factory=list)
    broken: bool = False
    hang: threading.Event = field(default_factory=threading.Event)  #: cleared: a status does not come to its end

    def __post_init__(self) -> None:
        self.hang.set()

    def status(self) -> dict[str, object]:
        self.hang.wait(60)
        if self.broken:
            raise RuntimeError("directory lock lost")
        return {"pool": {"bytes": 4096}}


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def server(daemon: Daemon) -> Iterator[HttpServer]:
    sources = Sources(
        lambda: daemon.metrics, daemon.status, lambda: daemon.healthy, lambda: daemon.ready, lambda: {"version": "0.1.0"}
    )
    running = HttpServer(("127.0.0.1", 0), sources)
    running.start()
    yield running
    running.close()


def ask(server: HttpServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    connection.request(method, path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    found = response.status, response.headers["Content-Type"], response.read().decode()
    connection.close()
    return found


def test_health_and_readiness_are_two_things_and_say_why(server: HttpServer, daemon: Daemon) -> None:
    daemon.ready = (False, "draining")
    assert ask(server, "/healthz")[::2] == (200, "ok\n")
    assert ask(server, "/readyz")[::2] == (503, "draining\n")
    daemon.healthy = (False, "loader thread died")
    assert ask(server, "/healthz")[::2] == (503, "loader thread died\n")


def test_status_and_version_are_json(server: HttpServer) -> None:
    status, kind, body = ask(server, "/status?verbose=1")
    assert (status, kind, json.loads(body)) == (200, "application/json", {"pool": {"bytes": 4096}})
    assert json.loads(ask(server, "/version")[2]) == {"version": "0.1.0"}


def test_metrics_are_there_before_any_traffic(server: HttpServer, daemon: Daemon) -> None:
    daemon.metrics = [Sample("maru_leases", "gauge", "Leases held", {}, 0)]
    status, kind, body = ask(server, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "# HELP maru_leases Leases held\n# TYPE maru_leases gauge\nmaru_leases 0\n" in body
    assert 'maru_http_requests_total{path="/status"} 0\n' in body
    assert 'maru_http_requests_total{path="/metrics"} 1\n' in body


def test_families_are_grouped_and_text_is_escaped() -> None:
    text = render_metrics(
        [
            Sample("a_total", "counter", "back\\slash\nline", {"model": 'x"y\\z\n'}, 1),
            Sample("b", "gauge", "B", {}, 0.25),
            Sample("a_total", "counter", "back\\slash\nline", {"model": "w"}, 2.0),
            Sample("t_seconds_bucket", "histogram", "T", {"le": "+Inf"}, float("inf")),
            Sample("t_seconds_sum", "histogram", "T", {}, float("nan")),
            Sample("big", "gauge", "Big", {}, 1e300),
        ]
    )
    assert text.splitlines() == [
        r"# HELP a_total back\\slash\nline",
        "# TYPE a_total counter",
        r'a_total{model="x\"y\\z\n"} 1',
        'a_total{model="w"} 2',
        "# HELP b B",
        "# TYPE b gauge",
        "b 0.25",
        "# HELP t_seconds T",
        "# TYPE t_seconds histogram",
        't_seconds_bucket{le="+Inf"} +Inf',
        "t_seconds_sum NaN",
        "# HELP big Big",
        "# TYPE big gauge",
        "big 1e+300",
    ]


def test_other_paths_and_methods_change_nothing(server: HttpServer) -> None:
    assert ask(server, "/nowhere")[0] == 404
    assert ask(server, "/healthz", "POST")[0] == 501
    assert ask(server, "/status", "HEAD")[::2] == (200, "")


def test_a_foreign_host_name_is_refused_on_loopback(server: HttpServer) -> None:
    port = server.address[1]
    assert ask(server, "/status", host="attacker.example")[0] == 403
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]", f"[::1]:{port}"):
        assert ask(server, "/status", host=host)[0] == 200


def test_a_source_that_fails_is_an_error_for_this_request_only(server: HttpServer, daemon: Daemon) -> None:
    daemon.broken = True
    assert ask(server, "/status")[::2] == (500, "RuntimeError: directory lock lost\n")
    daemon.broken = False
    assert ask(server, "/status")[0] == 200


# --- peers that take their time -----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def trickling(server: HttpServer, n: int) -> Iterator[list[socket.socket]]:
    """``n`` connections with a request that never ends; a byte more on each whenever the test sends one."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(server.address, timeout=10)) for _ in range(n)]
        for sock in socks:
            sock.sendall(b"GET /healthz HTTP/1.0\r\nX: ")
        yield socks


def trickle(socks: list[socket.socket]) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.send(b"a")


def test_peers_that_trickle_bytes_keep_nobody_out(server: HttpServer) -> None:
    with trickling(server, 3 * MAX_REQUESTS) as socks:
        for path in ("/healthz", "/metrics", "/healthz", "/status"):
            trickle(socks)
            assert ask(server, path)[0] == 200
        threads = "process_request_thread"
        until(lambda: sum(threads in t.name for t in threading.enumerate()) <= MAX_REQUESTS, "the threads cut off have ended")
        cut = next(line for line in ask(server, "/metrics")[2].splitlines() if line.startswith("maru_http_cut_off_total "))
        assert int(cut.split()[1]) >= 2 * MAX_REQUESTS


def test_a_request_that_does_not_end_is_cut_off_though_bytes_keep_coming(daemon: Daemon) -> None:
    sources = Sources(list, daemon.status, lambda: (True, ""), lambda: (True, ""), dict)
    server = HttpServer(("127.0.0.1", 0), sources, request_s=0.3)
    server.start()
    with trickling(server, 1) as (sock,):
        sock.settimeout(0.05)

        def ended() -> bool:
            trickle([sock])
            try:
                return sock.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        until(ended, "the peer is cut off")
    server.close()


def test_a_head_without_end_is_cut_off(server: HttpServer) -> None:
    with socket.create_connection(server.address, timeout=10) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"GET /healthz HTTP/1.0\r\n")
        sock.sendall(b"X: " + b"y" * MAX_HEAD)
        assert sock.recv(1) == b""


def test_a_hanging_status_does_not_take_the_places_of_health(server: HttpServer, daemon: Daemon) -> None:
    daemon.hang.clear()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_REQUESTS):
            sock = stack.enter_context(socket.create_connection(server.address, timeout=10))
            sock.sendall(b"GET /status HTTP/1.0\r\n\r\n")
        for _ in range(3):
            assert ask(server, "/healthz")[0] == 200
        daemon.hang.set()
    assert ask(server, "/status")[0] == 200


def test_a_taken_port_is_a_configuration_error(server: HttpServer, daemon: Daemon) -> None:
    sources = Sources(list, dict, lambda: (True, ""), lambda: (True, ""), dict)
    with pytest.raises(ConfigError, match=f"HTTP address 127.0.0.1:{server.address[1]}: Address already in use"):
        HttpServer(server.address, sources)


def test_it_closes_without_having_been_started() -> None:
    HttpServer(("127.0.0.1", 0), Sources(list, dict, lambda: (True, ""), lambda: (True, ""), dict)).close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("[::1]:80", ("::1", 80)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
    ],
)
def test_an_address_without_host_is_loopback(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["9464", "host.example:80", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:-1"])
def test_a_wrong_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        parse_address(text)
