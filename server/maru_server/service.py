"""From a decoded request to a reply: sessions, bounds, dispatch. No sockets here.

Everything a peer sends is checked in this file, before a backend sees it.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from maru_server import __version__
from maru_server import protocol as P
from maru_server.backend import Backend, Keys, Table
from maru_server.cluster_state import Settings
from maru_server.errors import BackendUnavailable, ServerRefused
from maru_server.lease import boottime_ns
from maru_server.metrics import RequestMetrics
from maru_server.pin_budget import PinBudget
from maru_server.places import grant_ids
from maru_server.protocol import ErrorCode
from maru_shm.layout import KEY_BYTES

log = logging.getLogger(__name__)

MAX_SESSIONS = 20_000
SESSION_IDLE_NS = 600 * 1_000_000_000


class Session(msgspec.Struct):
    client: str
    member: str  #: "" for an observer
    last_ns: int


def _refuse(what: str, remedy: str = "") -> ServerRefused:
    return ServerRefused(ErrorCode.BAD_MESSAGE, what, remedy)


def _check_name(field: str, value: str) -> None:
    if len(value) > P.MAX_NAME or not value.isprintable() or "#" in value:
        raise _refuse(
            f"{field} of {len(value)} characters: {value[:20]!r}", f"at most {P.MAX_NAME} printable ones, without '#'"
        )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _refuse(f"{field} is {value}", f"from {low} to {high}")


def _check_uuid(device: bytes) -> None:
    if len(device) != P.UUID_BYTES:
        raise _refuse(f"device UUID of {len(device)} bytes", f"a UUID has {P.UUID_BYTES}")


class Service:
    """Answers requests on one backend. One thread uses it."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self._backend = backend
        self._settings = settings
        self._sessions: dict[bytes, Session] = {}  #: the one silent for longest first
        self._pins = PinBudget(settings.max_pinned_keys)
        self.instance = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._started_ns = boottime_ns()
        self.metrics = RequestMetrics(kind.__name__ for kind in get_args(P.Request))
        self._handlers: dict[type[Any], Callable[[Session, Any], P.Reply]] = {
            P.Heartbeat: self._heartbeat,
            P.Leave: self._leave,
            P.AddDevice: self._add_device,
            P.AllocRegions: self._alloc,
            P.FreeRegions: self._free,
            P.ClaimRegions: self._claim,
            P.Register: self._register,
            P.Lookup: self._lookup,
            P.Leading: self._leading,
            P.Exists: self._exists,
            P.Pin: self._pin,
            P.Unpin: self._unpin,
            P.Delete: self._delete,
            P.ListTables: self._list_tables,
            P.ListKeys: self._list_keys,
            P.GetStats: self._stats,
            P.GetUsage: lambda _s, _m: P.Usage(self._backend.usage()),
            P.GetNodes: lambda _s, _m: P.Nodes(self._backend.nodes()),
            P.GetRegions: lambda _s, _m: P.Regions(self._backend.regions()),
            P.Reset: self._reset,
        }

    # --- frames ----------------------------------------------------------------------------------------------------------
    def answer(self, identity: bytes, frames: list[bytes]) -> list[bytes] | None:
        """The reply's two frames for a message's frames; None for something that is not even ours to answer."""
        started = time.perf_counter_ns()
        header = frames[0] if frames else b""
        if len(header) != P.HEADER.size or header[:4] != P.MAGIC:
            self.metrics.answered("unknown", time.perf_counter_ns() - started)
            return None
        _, protocol, _, request_id, epoch = P.HEADER.unpack(header)
        verb, reply = self._reply(identity, protocol, epoch, frames)
        if isinstance(reply, P.Error):
            self.metrics.refused(reply.code)
        try:
            now_epoch = self._backend.epoch()
        except BackendUnavailable:
            now_epoch = 0
        answer = [P.HEADER.pack(P.MAGIC, P.PROTOCOL, 0, request_id, now_epoch), P.encoder.encode(reply)]
        self.metrics.answered(verb, time.perf_counter_ns() - started)
        return answer

    def _reply(self, identity: bytes, protocol: int, epoch: int, frames: list[bytes]) -> tuple[str, P.Reply]:
        """The request's verb and the reply to it."""
        verb = "unknown"
        try:
            if not P.PROTOCOL_MIN <= protocol <= P.PROTOCOL:
                raise self._version(protocol, protocol)
            if len(frames) != 2:
                raise _refuse(f"message of {len(frames)} frames", "a header and a body")
            if len(frames[1]) > P.MAX_MESSAGE:
                raise ServerRefused(ErrorCode.TOO_LARGE, f"body of {len(frames[1])} bytes", f"at most {P.MAX_MESSAGE}")
            message = P.to_server.decode(frames[1])
            verb = type(message).__name__
            return verb, self._dispatch(identity, epoch, message)
        except msgspec.MsgspecError as e:
            return verb, P.Error(ErrorCode.BAD_MESSAGE, f"request not understood: {e}", "run the same release on both sides")
        except ServerRefused as e:
            return verb, P.Error(e.code, e.what, e.remedy, e.retry_ms)
        except BackendUnavailable as e:
            return verb, P.Error(ErrorCode.BACKEND, e.what, e.remedy, self._settings.heartbeat_ms)
        except Exception as e:
            log.exception("request failed")
            return verb, P.Error(ErrorCode.INTERNAL, f"the server failed: {type(e).__name__}", "see its log")

    @staticmethod
    def _version(low: int, high: int) -> ServerRefused:
        return ServerRefused(
            ErrorCode.VERSION,
            f"client speaks protocol {low} to {high}, this server {P.PROTOCOL_MIN} to {P.PROTOCOL}",
            "upgrade the older side",
        )

    def _dispatch(self, identity: bytes, epoch: int, m: P.Request) -> P.Reply:
        if isinstance(m, P.Ping):
            return P.Ok()
        if isinstance(m, P.Hello):
            return self._hello(identity, m)
        session = self._sessions.pop(identity, None)
        if session is None:
            raise ServerRefused(ErrorCode.NO_SESSION, "no session on this connection", "say Hello first")
        self._sessions[identity] = session  # in the order of their last use
        session.last_ns = boottime_ns()
        now_epoch = self._backend.epoch()
        if epoch != now_epoch:
            raise ServerRefused(
                ErrorCode.WRONG_EPOCH, f"epoch {epoch} is over, this is {now_epoch}", "say Hello, announce again"
            )
        return self._handlers[type(m)](session, m)

    def forget_idle(self) -> None:
        """Drop sessions that were silent for ten minutes: ROUTER sockets do not tell of disconnections."""
        oldest = boottime_ns() - SESSION_IDLE_NS
        for identity in [i for i, s in self._sessions.items() if s.last_ns < oldest]:
            del self._sessions[identity]

    # --- membership --------------------------------------------------------------------------------------------------------
    def _hello(self, identity: bytes, m: P.Hello) -> P.Reply:
        if m.protocol_max < P.PROTOCOL_MIN or m.protocol_min > P.PROTOCOL or m.protocol_min > m.protocol_max:
            raise self._version(m.protocol_min, m.protocol_max)
        for field, value in (("client", m.client), ("node", m.node), ("label", m.label)):
            _check_name(field, value)
        _check_range("incarnation", m.incarnation, 0, 1 << 62)
        member = self._backend.join(m) if m.node else ""
        self._sessions.pop(identity, None)
        while len(self._sessions) >= MAX_SESSIONS:  # the one silent for longest; who still lives says Hello again
            del self._sessions[next(iter(self._sessions))]
        self._sessions[identity] = Session(m.client, member, boottime_ns())
        s = self._settings
        return P.Welcome(
            min(P.PROTOCOL, m.protocol_max),
            f"maru-server/{__version__}",
            self.instance,
            self._backend.name,
            s.lease_ms,
            s.heartbeat_ms,
            P.MAX_BATCH,
        )

    @staticmethod
    def _member(session: Session) -> str:
        if not session.member:
            raise ServerRefused(ErrorCode.NOT_A_NODE, "this session observes only", "say Hello with a node name")
        return session.member

    def _heartbeat(self, session: Session, _m: P.Heartbeat) -> P.Reply:
        self._backend.heartbeat(self._member(session))
        return P.Ok()

    def _leave(self, session: Session, _m: P.Leave) -> P.Reply:
        self._backend.leave(self._member(session))
        session.member = ""
        return P.Ok()

    # --- regions -----------------------------------------------------------------------------------------------------------
    def _add_device(self, session: Session, m: P.AddDevice) -> P.Reply:
        self._member(session)
        _check_uuid(m.device)
        _check_range("n_regions", m.n_regions, 1, P.MAX_REGIONS)
        _check_range("region_bytes", m.region_bytes, 1, 1 << 50)
        _check_range("first", m.first, 0, m.n_regions - 1)
        _check_name("label", m.label)
        self._backend.add_device(m)
        return P.Ok()

    def _alloc(self, session: Session, m: P.AllocRegions) -> P.Reply:
        _check_name("op", m.op)
        _check_range("count", m.count, 1, P.MAX_GRANTS_PER_CALL)
        _check_range("slab_bytes", m.slab_bytes, 0, 1 << 50)
        if m.device:
            _check_uuid(m.device)
        return P.Granted(self._backend.alloc(self._member(session), m))

    @staticmethod
    def _check_regions(regions: list[P.Region]) -> None:
        _check_range("number of regions", len(regions), 0, P.MAX_GRANTS_PER_CALL)
        for r in regions:
            _check_uuid(r.device)
            _check_range("region", r.index, 0, P.MAX_REGIONS)
            _check_range("token", r.token, 0, P.TOKEN_MAX)

    def _free(self, session: Session, m: P.FreeRegions) -> P.Reply:
        self._check_regions(m.regions)
        return P.Ok(self._backend.free(self._member(session), m.regions))

    def _claim(self, session: Session, m: P.ClaimRegions) -> P.Reply:
        self._check_regions(m.regions)
        _check_range("slab_bytes", m.slab_bytes, 0, 1 << 50)
        return P.Claimed(self._backend.claim(self._member(session), m))

    # --- directory ---------------------------------------------------------------------------------------------------------
    @staticmethod
    def _table(namespace: bytes, rank: int) -> Table:
        if len(namespace) != KEY_BYTES:
            raise _refuse(f"namespace of {len(namespace)} bytes", f"a namespace has {KEY_BYTES}")
        _check_range("rank", rank, 0, P.MAX_RANKS - 1)
        return namespace, rank

    @staticmethod
    def _keys(raw: bytes) -> Keys:
        if len(raw) % KEY_BYTES:
            raise _refuse(f"{len(raw)} bytes of keys", f"a multiple of {KEY_BYTES}")
        if len(raw) > P.MAX_BATCH * KEY_BYTES:
            raise ServerRefused(ErrorCode.TOO_LARGE, f"{len(raw) // KEY_BYTES} keys", f"at most {P.MAX_BATCH} in a message")
        return P.split_keys(raw)

    def _places(self, places: bytes, pin: int = 0, pin_ms: int = 0) -> P.Places:
        return P.Places(places, self._backend.infos(grant_ids(places)), pin, pin_ms)

    def _register(self, session: Session, m: P.Register) -> P.Reply:
        table, keys = self._table(m.namespace, m.rank), self._keys(m.keys)
        if len(m.places) != len(keys) * P.PLACE_BYTES:
            raise _refuse(f"{len(m.places)} bytes of places for {len(keys)} keys", f"{P.PLACE_BYTES} each")
        _check_range("slab_bytes", m.slab_bytes, 0, 1 << 50)
        codes, winners = self._backend.register(self._member(session), table, keys, m.places, m.slab_bytes)
        return P.Outcomes(codes, winners, self._backend.infos(grant_ids(winners)))

    def _lookup(self, _session: Session, m: P.Lookup) -> P.Reply:
        places = self._backend.lookup(self._table(m.namespace, m.rank), self._keys(m.keys))
        if m.mode is P.Mode.LEADING:
            places = places[: _leading(places) * P.PLACE_BYTES]
        return self._places(places)

    def _leading(self, _session: Session, m: P.Leading) -> P.Reply:
        _check_range("world", m.world, 1, P.MAX_RANKS)
        keys = self._keys(m.keys)
        if len(keys) * m.world > 16 * P.MAX_BATCH:
            raise ServerRefused(ErrorCode.TOO_LARGE, f"{len(keys)} keys × {m.world} ranks", f"at most {16 * P.MAX_BATCH}")
        for rank in range(m.world):
            keys = keys[: _leading(self._backend.lookup(self._table(m.namespace, rank), keys))]
            if not keys:
                break
        return P.Ok(len(keys))

    def _exists(self, _session: Session, m: P.Exists) -> P.Reply:
        places = self._backend.lookup(self._table(m.namespace, m.rank), self._keys(m.keys))
        return P.Present(bytes(int(places[i : i + 4] != P.NOWHERE[:4]) for i in range(0, len(places), P.PLACE_BYTES)))

    def _pin(self, session: Session, m: P.Pin) -> P.Reply:
        if m.ttl_ms < 1:
            raise _refuse(f"ttl_ms is {m.ttl_ms}", "at least 1")
        ttl_ms = min(m.ttl_ms, self._settings.max_pin_ms)
        table, keys = self._table(m.namespace, m.rank), self._keys(m.keys)
        member = self._member(session)
        self._pins.check(member)
        pin, places = self._backend.pin(member, table, keys, ttl_ms)
        if pin:
            self._pins.add(member, pin, len(places) // P.PLACE_BYTES, ttl_ms)
        return self._places(places, pin, ttl_ms if pin else 0)

    def _unpin(self, session: Session, m: P.Unpin) -> P.Reply:
        member = self._member(session)
        self._pins.release(member, m.pin)
        return P.Ok(self._backend.unpin(member, m.pin))

    def _delete(self, session: Session, m: P.Delete) -> P.Reply:
        return P.Outcomes(self._backend.delete(self._member(session), self._table(m.namespace, m.rank), self._keys(m.keys)))

    # --- views -------------------------------------------------------------------------------------------------------------
    def _list_tables(self, _session: Session, _m: P.ListTables) -> P.Reply:
        return P.Tables(self._backend.tables())

    def _list_keys(self, _session: Session, m: P.ListKeys) -> P.Reply:
        _check_range("limit", m.limit, 1, P.MAX_PAGE)
        if m.after and len(m.after) != KEY_BYTES:
            raise _refuse(f"key of {len(m.after)} bytes", f"a key has {KEY_BYTES}")
        keys, places, more = self._backend.page(self._table(m.namespace, m.rank), m.after, m.limit)
        return P.KeyPage(b"".join(keys), places, self._backend.infos(grant_ids(places)), more)

    def _stats(self, _session: Session, _m: P.GetStats) -> P.Reply:
        return P.Stats(self.own_stats() | {"epoch": self._backend.epoch()} | self._backend.stats() | self.operations())

    def own_stats(self) -> dict[str, int | float | str]:
        """What this process knows of itself, without asking the backend."""
        return {
            "version": __version__,
            "backend": self._backend.name,
            "instance": self.instance,
            "uptime_seconds": round((boottime_ns() - self._started_ns) / 1e9, 1),
            "sessions": len(self._sessions),
            "requests_total": self.metrics.total,
            "errors_total": self.metrics.total_refused,
        }

    def operations(self) -> dict[str, int | float | str]:
        """``ops.VERB.requests`` and ``ops.VERB.mean_seconds`` of the verbs that were asked for."""
        return {f"ops.{verb}.{name}": n for verb, values in self.metrics.by_verb().items() for name, n in values.items()}

    def _reset(self, _session: Session, m: P.Reset) -> P.Reply:
        if m.namespace:
            self._table(m.namespace, 0)
        return P.Ok(self._backend.reset(m.namespace))


def _leading(places: bytes) -> int:
    """Leading places that are not NOWHERE."""
    for i in range(0, len(places), P.PLACE_BYTES):
        if places[i : i + 4] == P.NOWHERE[:4]:
            return i // P.PLACE_BYTES
    return len(places) // P.PLACE_BYTES
