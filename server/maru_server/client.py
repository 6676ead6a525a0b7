"""The verbs, typed and blocking with a bound: for tools and background threads (never for a scheduler's thread).

A restarted server forgets its sessions: one NO_SESSION or WRONG_EPOCH is answered by saying Hello and asking again, if the
verb is safe to repeat under the new epoch (reads are; what names grant ids or pins is not).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import zmq

from maru_server import protocol as P
from maru_server.answers import expect
from maru_server.connection import Connection
from maru_server.errors import ServerRefused
from maru_server.protocol import ErrorCode, GrantInfo, Mode, Outcome

_HELLO_AGAIN = (ErrorCode.NO_SESSION, ErrorCode.WRONG_EPOCH)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Located:
    """Where keys lie. ``places``: shape (n,), dtype ``protocol.PLACE``, grant 0 where absent. ``grants``: by id."""

    places: npt.NDArray[np.void]
    grants: dict[int, GrantInfo]
    pin: int = 0
    pin_ms: int = 0  #: how long the pin lasts, counted from when it was asked for

    def __len__(self) -> int:
        return len(self.places)

    @staticmethod
    def of(reply: P.Places) -> Located:
        return Located(np.frombuffer(reply.places, P.PLACE), {g.id: g for g in reply.grants}, reply.pin, reply.pin_ms)


@dataclass(frozen=True, slots=True)
class Registered:
    """One outcome per key; ``winners`` as :class:`Located` (empty where every key became ours)."""

    outcomes: list[Outcome]
    winners: Located


class DirectoryClient:
    """One thread uses it. ``keys`` are n × 16 bytes, n ≤ ``protocol.MAX_BATCH``. Every verb raises
    :class:`~maru_server.errors.ServerUnavailable` or :class:`~maru_server.errors.ServerRefused`."""

    def __init__(
        self,
        endpoint: str,
        token: str | None = None,
        *,
        node: str = "",
        incarnation: int = 0,
        predecessor: P.Predecessor = P.Predecessor.UNKNOWN,
        label: str = "",
        timeout_ms: int = 5000,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.connection = Connection(endpoint, token, context=context)
        self._node, self._incarnation, self._predecessor, self._label = node, incarnation, predecessor, label
        self._timeout_ms = timeout_ms
        self.hello()

    def hello(self) -> P.Welcome:
        """Open the session; done at construction and after a restart of the server."""
        return self.connection.hello(
            self._timeout_ms, node=self._node, incarnation=self._incarnation, predecessor=self._predecessor, label=self._label
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    @property
    def epoch(self) -> int:
        return self.connection.epoch

    def _read(self, message: P.Request, kind: type[T]) -> T:
        if self.connection.welcome is None:
            self.hello()
        try:
            return expect(self.connection.call(message, self._timeout_ms), kind)
        except ServerRefused as e:
            if e.code not in _HELLO_AGAIN:
                raise
        self.hello()
        return expect(self.connection.call(message, self._timeout_ms), kind)

    def _write(self, message: P.Request, kind: type[T]) -> T:
        if self.connection.welcome is None:
            self.hello()
        return expect(self.connection.call(message, self._timeout_ms), kind)

    # --- node and regions --------------------------------------------------------------------------------------------------
    def ping(self) -> None:
        self.connection.call(P.Ping(), self._timeout_ms)

    def heartbeat(self) -> None:
        self._write(P.Heartbeat(), P.Ok)

    def leave(self) -> None:
        self._write(P.Leave(), P.Ok)

    def add_device(self, device: bytes, n_regions: int, region_bytes: int, *, first: int = 0, label: str = "") -> None:
        self._write(P.AddDevice(device, n_regions, region_bytes, first, label), P.Ok)

    def alloc(self, op: str, count: int = 1, *, device: bytes = b"", slab_bytes: int = 0) -> list[GrantInfo]:
        """Grant regions; the same ``op`` again gives the same regions."""
        return self._write(P.AllocRegions(op, count, device, slab_bytes), P.Granted).grants

    def free(self, grants: list[GrantInfo]) -> int:
        return self._write(P.FreeRegions([P.Region(g.device, g.region, g.token) for g in grants]), P.Ok).n

    def claim(self, regions: list[P.Region], *, slab_bytes: int = 0) -> list[P.ClaimResult]:
        return self._write(P.ClaimRegions(regions, slab_bytes), P.Claimed).results

    # --- directory ---------------------------------------------------------------------------------------------------------
    def register(self, namespace: bytes, rank: int, keys: bytes, places: bytes, *, slab_bytes: int = 0) -> Registered:
        reply = self._write(P.Register(namespace, rank, keys, places, slab_bytes), P.Outcomes)
        winners = Located(np.frombuffer(reply.places, P.PLACE), {g.id: g for g in reply.grants})
        return Registered([Outcome(c) for c in reply.codes], winners)

    def lookup(self, namespace: bytes, rank: int, keys: bytes, *, mode: Mode = Mode.ALL) -> Located:
        return Located.of(self._read(P.Lookup(namespace, rank, keys, mode), P.Places))

    def leading(self, namespace: bytes, world: int, keys: bytes) -> int:
        """Leading keys present on all of ranks 0 … world-1."""
        return self._read(P.Leading(namespace, world, keys), P.Ok).n

    def exists(self, namespace: bytes, rank: int, keys: bytes) -> list[bool]:
        return [bool(f) for f in self._read(P.Exists(namespace, rank, keys), P.Present).flags]

    def pin(self, namespace: bytes, rank: int, keys: bytes, ttl_ms: int) -> Located:
        """Pin the leading present keys for ``ttl_ms`` or the server's maximum. Read no more from them ``pin_ms`` after calling
        this.
        """
        return Located.of(self._write(P.Pin(namespace, rank, keys, ttl_ms), P.Places))

    def unpin(self, pin: int) -> int:
        return self._write(P.Unpin(pin), P.Ok).n

    def delete(self, namespace: bytes, rank: int, keys: bytes) -> list[Outcome]:
        return [Outcome(c) for c in self._write(P.Delete(namespace, rank, keys), P.Outcomes).codes]

    def tables(self) -> list[tuple[bytes, int, int]]:
        return self._read(P.ListTables(), P.Tables).tables

    def page(self, namespace: bytes, rank: int, after: bytes = b"", limit: int = 500) -> P.KeyPage:
        return self._read(P.ListKeys(namespace, rank, after, limit), P.KeyPage)

    # --- administration ----------------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, int | float | str]:
        return self._read(P.GetStats(), P.Stats).values

    def usage(self) -> list[P.UsageRow]:
        return self._read(P.GetUsage(), P.Usage).rows

    def nodes(self) -> list[P.NodeInfo]:
        return self._read(P.GetNodes(), P.Nodes).nodes

    def regions(self) -> list[P.RegionInfo]:
        return self._read(P.GetRegions(), P.Regions).regions

    def reset(self, namespace: bytes = b"") -> int:
        return self._write(P.Reset(namespace), P.Ok).n


def places_of(grant: int, slabs: npt.ArrayLike, generations: npt.ArrayLike) -> bytes:
    """Wire form of places in one grant: ``slabs`` and ``generations`` of shape (n,)."""
    slab = np.asarray(slabs)
    places = np.zeros(slab.shape, P.PLACE)
    places["grant"], places["slab"], places["generation"] = grant, slab, np.asarray(generations)
    return places.tobytes()
