"""What a server process counts about its requests: by verb, how many and how long; by code, how many were refused.

Two dictionary look-ups and a search among ten numbers per request, about 1 µs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from maru_server.protocol import ErrorCode
from maru_shm.http import Sample

#: Upper bounds in seconds: a lookup of 256 keys takes about 0.3 ms, in Redis 1.6 ms.
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class _Verb:
    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)  #: the last one: longer than any bound
        self.total_ns = 0


class RequestMetrics:
    """``verbs``: every name there is, so that a metric is there from the first scrape on."""

    def __init__(self, verbs: Iterable[str]) -> None:
        self._verbs = {name: _Verb() for name in (*verbs, "unknown")}
        self._refused: Counter[ErrorCode] = Counter()

    def answered(self, verb: str, elapsed_ns: int) -> None:
        v = self._verbs[verb]
        v.counts[bisect_left(BUCKETS, elapsed_ns / 1e9)] += 1
        v.total_ns += elapsed_ns

    def refused(self, code: ErrorCode) -> None:
        self._refused[code] += 1

    @property
    def total(self) -> int:
        return sum(sum(v.counts) for v in self._verbs.values())

    @property
    def total_refused(self) -> int:
        return self._refused.total()

    def by_verb(self) -> dict[str, dict[str, int | float]]:
        """Requests and mean seconds of the verbs that were asked for."""
        return {
            name: {"requests": n, "mean_seconds": round(v.total_ns / 1e9 / n, 6)}
            for name, v in self._verbs.items()
            if (n := sum(v.counts))
        }

    def samples(self) -> Iterator[Sample]:
        text = "Requests by verb"
        for name, v in self._verbs.items():
            yield Sample("maru_server_requests_total", "counter", text, {"verb": name}, sum(v.counts))
        text = "Requests refused, by reason"
        for code in ErrorCode:
            yield Sample("maru_server_refused_total", "counter", text, {"code": code.name.lower()}, self._refused[code])
        metric, text = "maru_server_request_duration_seconds", "From a request's bytes to its reply's, queueing not included"
        for name, v in self._verbs.items():
            below = 0
            for bound, n in zip((*map(str, BUCKETS), "+Inf"), v.counts, strict=True):
                below += n
                yield Sample(f"{metric}_bucket", "histogram", text, {"verb": name, "le": bound}, below)
            yield Sample(f"{metric}_sum", "histogram", text, {"verb": name}, v.total_ns / 1e9)
            yield Sample(f"{metric}_count", "histogram", text, {"verb": name}, below)
