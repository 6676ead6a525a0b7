"""What the server shows over HTTP.

| path       | answer                                                                                       |
|------------|----------------------------------------------------------------------------------------------|
| `/healthz` | 200 while the serving loop turns (it is the one that answers), 503 if its last tick failed   |
| `/readyz`  | 200 while requests can be answered, else 503 and the reason (the store does not answer)      |
| `/metrics` | Prometheus text format 0.0.4, every metric of the backend present from the first scrape      |
| `/status`  | the values of `maru-server stats` and the requests by verb, JSON                             |
| `/version` | JSON                                                                                         |

The backend is asked at most once a second, however many ask here: with Redis each question costs round trips, during which
nobody else is served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus

from maru_server import __version__
from maru_server import protocol as P
from maru_server.backend import Backend
from maru_server.errors import BackendUnavailable
from maru_server.handshakes import Refusal
from maru_server.http import HttpFront, Page, text_page
from maru_server.lease import boottime_ns
from maru_server.service import Service
from maru_shm.http import METRICS_TYPE, Sample, render_metrics

_ASK_NS = 1_000_000_000
#: value of ``Backend.stats`` → metric, type, help
_BACKEND = {
    "keys": ("maru_server_keys", "gauge", "Keys in the directory"),
    "tables": ("maru_server_tables", "gauge", "Tables: a namespace and a rank each"),
    "nodes": ("maru_server_nodes", "gauge", "Members of the cluster"),
    "devices": ("maru_server_devices", "gauge", "Devices, each a pool"),
    "grants": ("maru_server_regions", "gauge", "Regions granted, orphaned or draining"),
    "pins": ("maru_server_pins", "gauge", "Pins held by readers (memory backend)"),
    "hold": ("maru_server_hold", "gauge", "1 while nothing is granted because leases of the epoch before may still run"),
    "unswept_grants": ("maru_server_unswept_regions", "gauge", "Ended grants whose keys are still being removed"),
    "keys_looked_up_total": ("maru_server_keys_looked_up_total", "counter", "Keys that lookups and pins asked for"),
    "keys_found_total": ("maru_server_keys_found_total", "counter", "Keys of these that were found; of a pin the leading ones"),
    "keys_registered_total": ("maru_server_keys_registered_total", "counter", "Keys registered"),
    "nodes_died_total": ("maru_server_nodes_died_total", "counter", "Members whose lease ran out"),
}


class Pages:
    """``tick_failed`` is set by the loop. Used by its thread alone."""

    def __init__(self, service: Service, backend: Backend, endpoints: Sequence[str], refused: Mapping[Refusal, int]) -> None:
        """``refused``: connections that got no further than the handshake; read when asked."""
        self._service = service
        self._backend = backend
        self._endpoints = endpoints
        self._refused = refused
        self.front: HttpFront | None = None  #: to tell of itself
        self.tick_failed = ""
        self._known: dict[str, int | float | str] = {}
        self._failure = ""
        self._asked_ns = 0

    def page(self, path: str) -> Page | None:
        """The page at ``path``, None if there is none."""
        match path:
            case "/healthz":
                return _verdict(self.tick_failed)
            case "/readyz":
                self._ask()
                return _verdict(self._failure)
            case "/metrics":
                return Page(HTTPStatus.OK, METRICS_TYPE, render_metrics(self._samples()).encode())
            case "/status":
                self._ask()
                return _json(
                    self._service.own_stats()
                    | self._known
                    | {"endpoints": list(self._endpoints), "verbs": self._service.metrics.by_verb()}
                    | ({"backend_failure": self._failure} if self._failure else {})
                )
            case "/version":
                return _json({"version": __version__, "protocol": P.PROTOCOL, "backend": self._backend.name})
        return None

    def _ask(self) -> None:
        now = boottime_ns()
        if self._asked_ns and now - self._asked_ns < _ASK_NS:
            return
        try:
            self._known = {"epoch": self._backend.epoch()} | self._backend.stats()
            self._failure = ""
        except BackendUnavailable as e:
            self._failure = str(e)
        self._asked_ns = boottime_ns()

    def _samples(self) -> Iterator[Sample]:
        self._ask()
        own = self._service.own_stats()
        labels = {name: str(own[name]) for name in ("version", "backend", "instance")}
        yield Sample("maru_server_info", "gauge", "Which server this is", labels, 1)
        yield _plain("maru_server_backend_up", "gauge", "1 while the backend answers", not self._failure)
        yield _plain("maru_server_tick_failed", "gauge", "1 if the last tick failed", bool(self.tick_failed))
        yield _plain("maru_server_uptime_seconds", "gauge", "Since the start of this process", float(own["uptime_seconds"]))
        yield _plain("maru_server_sessions", "gauge", "Clients that said Hello", float(own["sessions"]))
        if not self._failure:
            yield _plain("maru_server_epoch", "gauge", "Epoch of the directory", float(self._known["epoch"]))
            for key, (name, kind, text) in _BACKEND.items():
                if key in self._known:
                    yield _plain(name, kind, text, float(self._known[key]))
        text = "Connections that got no further than the handshake, by reason"
        for why in Refusal:
            labels = {"reason": why.value}
            yield Sample("maru_server_handshakes_refused_total", "counter", text, labels, self._refused.get(why, 0))
        yield from self._service.metrics.samples()
        if self.front is not None:
            text = "HTTP requests answered"
            yield _plain("maru_server_http_requests_total", "counter", text, self.front.requests)
            text = "HTTP peers cut off because they were too slow"
            yield _plain("maru_server_http_too_slow_total", "counter", text, self.front.too_slow)
            text = "HTTP peers cut off in favour of newcomers"
            yield _plain("maru_server_http_turned_out_total", "counter", text, self.front.turned_out)


def _plain(name: str, kind: str, text: str, value: float) -> Sample:
    return Sample(name, kind, text, {}, value)


def _verdict(failure: str) -> Page:
    return text_page(HTTPStatus.SERVICE_UNAVAILABLE, failure) if failure else text_page(HTTPStatus.OK, "ok")


def _json(value: object) -> Page:
    return Page(HTTPStatus.OK, "application/json", json.dumps(value).encode() + b"\n")
