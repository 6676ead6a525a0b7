"""Access to Redis or Valkey, single or Cluster: bounded, one kind of error, fast to say no while the store is away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from maru_server.errors import BackendUnavailable
from maru_server.lease import boottime_ns
from maru_shm.errors import ConfigError

Command = tuple[Any, ...]  #: a client method's name and its arguments
_FAILED = (RedisError, RedisClusterException, OSError)
_AWAY_NS = 200_000_000  # after a failure nothing is tried for 0.2 s: each try may block the server for ``timeout_s``


class RedisStore:
    """A client for ``redis://``, ``rediss://`` or ``unix://`` (one server) or ``redis+cluster://`` (any node of a cluster).

    Every method raises :class:`BackendUnavailable` if the store does not answer; a cluster is asked at construction already.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rsplit("@", 1)[-1]  #: for messages, without user and password
        self._away_until_ns = 0
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        try:
            if url.startswith(("redis+cluster://", "rediss+cluster://")):
                self._client: Any = RedisCluster.from_url(url.replace("+cluster", "", 1), **limits)
            else:
                # one retry, for a connection that broke while idle: more would block the server for longer
                self._client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 1), **limits)
        except ValueError as e:
            form = "redis://HOST:PORT, rediss://…, unix:///PATH or redis+cluster://HOST:PORT"
            raise ConfigError(f"store {self.url}: {e}", f"write memory, {form}") from e
        except _FAILED as e:
            raise BackendUnavailable(f"store {self.url}: {e}", "check the address and that it runs") from e

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one pipeline; their results in order."""
        if boottime_ns() < self._away_until_ns:
            raise BackendUnavailable(f"store {self.url} did not answer a moment ago", "check that it runs")
        try:
            if len(commands) == 1:
                name, *args = commands[0]
                return [getattr(self._client, name)(*args)]
            cluster = isinstance(self._client, RedisCluster)
            pipe = self._client.pipeline() if cluster else self._client.pipeline(transaction=False)
            for name, *args in commands:
                getattr(pipe, name)(*args)
            return list(pipe.execute())
        except _FAILED as e:
            self._away_until_ns = boottime_ns() + _AWAY_NS
            raise BackendUnavailable(f"store {self.url}: {type(e).__name__}: {e}", "check that it runs") from e

    def one(self, name: str, *args: Any) -> Any:
        """Run one command."""
        return self.run([(name, *args)])[0]

    def close(self) -> None:
        self._client.close()
