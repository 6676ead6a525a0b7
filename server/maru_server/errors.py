"""What can go wrong between a node and the metadata server, under the project's one error base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maru_shm.errors import MaruError

if TYPE_CHECKING:
    from maru_server.protocol import ErrorCode


class ServerError(MaruError):
    """Base of everything a client of the metadata server may see."""


class ServerUnavailable(ServerError):
    """No answer in time, or no server at the address (Closed). The caller goes on with what it has locally."""


class ServerRefused(ServerError):
    """The server understood the request and said no. ``code`` says why, ``retry_ms`` when asking again may help (0: it
    won't).
    """

    def __init__(self, code: ErrorCode, what: str, remedy: str = "", retry_ms: int = 0) -> None:
        super().__init__(what, remedy)
        self.code = code
        self.retry_ms = retry_ms


class LeaseExpired(ServerError):
    """A region may not be written (any more): the lease ran out by this node's own clock, or the region went to another
    node.
    """


class BackendUnavailable(ServerError):
    """The store behind the server (Redis, Valkey) does not answer."""
