"""Whether a server's answer fits the question: its kind, its lengths and counts, and its numbers.

What a client does with an answer rests on this: places become addresses of memory, grants become rights to write. Everything
here raises :class:`~maru_shm.errors.ProtocolViolation`, which ends a link's session; the question counts as not answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from maru_server import protocol as P
from maru_server.protocol import ClaimVerdict, Outcome
from maru_shm.errors import ProtocolViolation
from maru_shm.layout import KEY_BYTES

T = TypeVar("T")

_REMEDY = "check the address; run the same release on both sides"
_GENERATION_BITS = 56
_KINDS: dict[type[P.Request], type[P.Reply]] = {
    P.Hello: P.Welcome,
    P.AllocRegions: P.Granted,
    P.ClaimRegions: P.Claimed,
    P.Register: P.Outcomes,
    P.Delete: P.Outcomes,
    P.Lookup: P.Places,
    P.Pin: P.Places,
    P.Exists: P.Present,
    P.ListTables: P.Tables,
    P.ListKeys: P.KeyPage,
    P.GetStats: P.Stats,
    P.GetUsage: P.Usage,
    P.GetNodes: P.Nodes,
    P.GetRegions: P.Regions,
}  #: all others are answered with Ok
_REGISTERED = bytes([Outcome.REGISTERED, Outcome.EXISTS, Outcome.NOT_OWNER, Outcome.FULL])
_DELETED = bytes([Outcome.DELETED, Outcome.ABSENT, Outcome.PINNED, Outcome.NOT_OWNER])


def expect(reply: P.Reply, kind: type[T]) -> T:
    """The reply as the type its request asks for."""
    if not isinstance(reply, kind):
        raise ProtocolViolation(
            f"metadata server answered {type(reply).__name__}, not {kind.__name__}", "same release on both sides"
        )
    return reply


def check_answer(request: P.Request, reply: P.Reply) -> None:
    """Raise :class:`ProtocolViolation` unless ``reply`` (never an Error) can be the answer to ``request``."""
    expect(reply, _KINDS.get(type(request), P.Ok))
    match request, reply:
        case P.Hello(), P.Welcome():
            _check_welcome(reply)
        case P.AllocRegions(), P.Granted():
            if len(reply.grants) > request.count:
                raise _wrong(f"granted {len(reply.grants)} regions, {request.count} asked for")
            _check_grants(reply.grants)
        case P.ClaimRegions(), P.Claimed():
            _check_claimed(request, reply)
        case P.Register(), P.Outcomes():
            _check_outcomes("Register", request.keys, reply, _REGISTERED)
        case P.Delete(), P.Outcomes():
            _check_outcomes("Delete", request.keys, reply, _DELETED)
        case P.Lookup(), P.Places():
            n = _check_places("Lookup", request.keys, reply.places)
            if request.mode is P.Mode.ALL and n != len(request.keys) // KEY_BYTES:
                raise _wrong(f"answered Lookup of {len(request.keys) // KEY_BYTES} keys with {n} places")
            _check_grants(reply.grants)
        case P.Pin(), P.Places():
            _check_pinned(request, reply)
        case P.Exists(), P.Present():
            if len(reply.flags) != len(request.keys) // KEY_BYTES:
                raise _wrong(f"answered Exists of {len(request.keys) // KEY_BYTES} keys with {len(reply.flags)} flags")
        case P.ListKeys(), P.KeyPage():
            n = len(reply.keys) // KEY_BYTES
            if len(reply.keys) % KEY_BYTES or n > request.limit or len(reply.places) != n * P.PLACE_BYTES:
                raise _wrong(f"answered ListKeys with {len(reply.keys)} bytes of keys and {len(reply.places)} of places")
        case _:
            pass


def _wrong(what: str) -> ProtocolViolation:
    return ProtocolViolation(f"metadata server {what}", _REMEDY)


def _check_welcome(m: P.Welcome) -> None:
    low, high = P.LEASE_MS
    if not low <= m.lease_ms <= high:
        raise _wrong(f"gives leases of {m.lease_ms} ms, not of {low} to {high}")
    if not P.HEARTBEAT_MS_MIN <= m.heartbeat_ms <= m.lease_ms // 2:
        raise _wrong(
            f"wants a heartbeat every {m.heartbeat_ms} ms, not every {P.HEARTBEAT_MS_MIN} to {m.lease_ms // 2} of a lease of"
            f" {m.lease_ms} ms"
        )


def _check_grants(grants: Iterable[P.GrantInfo]) -> None:
    for g in grants:
        if not 0 <= g.token <= P.TOKEN_MAX:
            raise _wrong(f"granted a region with token {g.token}, which is not from 0 to {P.TOKEN_MAX}")
        if not 1 <= g.id <= P.GRANT_MAX:
            raise _wrong(f"granted region {g.region} as grant {g.id}, which is not from 1 to {P.GRANT_MAX}")


def _check_claimed(asked: P.ClaimRegions, m: P.Claimed) -> None:
    if len(m.results) != len(asked.regions):
        raise _wrong(f"answered a claim of {len(asked.regions)} regions with {len(m.results)} results")
    for region, result in zip(asked.regions, m.results, strict=True):
        g = result.grant
        if g is None:
            if result.verdict in (ClaimVerdict.GRANTED, ClaimVerdict.PROVISIONAL):
                raise _wrong(f"answered a claim of region {region.index} with {result.verdict.value!r} and no grant")
            continue
        if (g.device, g.region) != (region.device, region.index):
            raise _wrong(
                f"answered a claim of region {region.index} of device {region.device.hex()} with region {g.region} of device"
                f" {g.device.hex()}"
            )
        _check_grants([g])


def _check_outcomes(verb: str, keys: bytes, m: P.Outcomes, allowed: bytes) -> None:
    n = len(keys) // KEY_BYTES
    if len(m.codes) != n:
        raise _wrong(f"answered {verb} of {n} keys with {len(m.codes)} outcomes")
    if strange := m.codes.translate(None, allowed):
        raise _wrong(f"answered {verb} with outcome {strange[0]}, which is none of it")
    if len(m.places) not in (0, n * P.PLACE_BYTES):
        raise _wrong(f"answered {verb} of {n} keys with {len(m.places)} bytes of places")
    _check_grants(m.grants)


def _check_places(verb: str, keys: bytes, places: bytes) -> int:
    """How many places there are."""
    n, rest = divmod(len(places), P.PLACE_BYTES)
    asked = len(keys) // KEY_BYTES
    if rest or n > asked:
        raise _wrong(f"answered {verb} of {asked} keys with {len(places)} bytes of places, {P.PLACE_BYTES} each")
    if (np.frombuffer(places, P.PLACE)["generation"] >> np.uint64(_GENERATION_BITS)).any():
        raise _wrong(f"answered {verb} with a generation of more than {_GENERATION_BITS} bits")
    return n


def _check_pinned(asked: P.Pin, m: P.Places) -> None:
    n = _check_places("Pin", asked.keys, m.places)
    if n and not np.frombuffer(m.places, P.PLACE)["grant"].all():
        raise _wrong("answered Pin with a chunk that lies nowhere")
    if not (0 < m.pin < 1 << 64 if n else m.pin == 0):
        raise _wrong(f"answered Pin with {n} chunks under pin {m.pin}")
    if not 0 <= m.pin_ms <= asked.ttl_ms:
        raise _wrong(f"answered Pin for {asked.ttl_ms} ms with {m.pin_ms} ms")
    _check_grants(m.grants)
