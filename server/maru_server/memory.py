"""The default backend: everything in this process's memory, about 170 bytes per key, lost on restart and announced again.

A table is 256 dictionaries chosen by the key's first byte. A dictionary that grows is rebuilt at once, which for 10⁷ keys
would stop the server for a second; 1/256 of that is unnoticeable. It also lets a page of a listing sort 1/256 of the table.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
import numpy as np

from maru_server import protocol as P
from maru_server.backend import Keys, Table
from maru_server.cluster import Cluster
from maru_server.cluster_state import EPOCH_END, ClusterState, Observer, Settings
from maru_server.errors import ServerRefused
from maru_server.lease import boottime_ns
from maru_server.places import grant_ids, n_found
from maru_server.protocol import ErrorCode, Outcome
from maru_shm.errors import ConfigError

_SHARDS = 256
_SWEEP_BUDGET_NS = 2_000_000  # per tick, so that a lookup never waits longer for a sweep
T = TypeVar("T")
_Shards = list[dict[bytes, bytes]]


class _Pin(msgspec.Struct):
    member: str
    table: Table
    keys: Keys
    grants: list[int]


def load_epoch(path: str | None) -> int:
    """The last epoch a server wrote here, 0 if none. Raises :class:`ConfigError` for a file that holds no epoch."""
    try:
        with open(path or "", encoding="ascii") as f:
            text = f.read(32).strip()
    except FileNotFoundError:
        return 0
    if not text.isdigit() or int(text) >= EPOCH_END:
        raise ConfigError(f"{path} holds {text!r}, not an epoch (ms since 1970)", "remove it; then clocks must not go back")
    return int(text)


def store_epoch(path: str, epoch: int) -> None:
    with open(path + ".new", "w", encoding="ascii") as f:
        f.write(f"{epoch}\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".new", path)


def _release(counter: Counter[T], items: Iterable[T]) -> None:
    """Count down, and forget what reaches 0."""
    for item in items:
        if counter[item] <= 1:
            del counter[item]
        else:
            counter[item] -= 1


class MemoryBackend:
    """See :class:`~maru_server.backend.Backend`. ``epoch_path``: a file that makes epochs rise even if the wall clock goes
    back.
    """

    name = "memory"

    def __init__(self, settings: Settings, epoch_path: str | None = None) -> None:
        self._settings = settings
        state = ClusterState.new(load_epoch(epoch_path))
        if epoch_path is not None:
            store_epoch(epoch_path, state.epoch)
        self._cluster = Cluster(state, settings)
        self._observer = Observer()
        self._beats: dict[str, int] = {}
        self._seen_ns: dict[str, int] = {}
        self._readable = self._cluster.readable
        self._tables: dict[Table, _Shards] = {}
        self._n_keys = 0
        self._keys_of: Counter[int] = Counter()  # per grant, stale entries included until swept
        self._pins: dict[int, _Pin] = {}
        self._pin_ends: list[tuple[int, int]] = []
        self._pinned: Counter[tuple[Table, bytes]] = Counter()
        self._pinned_grants: Counter[int] = Counter()
        self._next_pin = state.epoch << 20
        self._sweep: Iterator[None] | None = None
        self._counts: Counter[str] = Counter()

    def epoch(self) -> int:
        return self._cluster.state.epoch

    def close(self) -> None:
        self._tables.clear()

    # --- time ------------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        now = boottime_ns()
        while self._pin_ends and self._pin_ends[0][0] <= now:
            self._end_pin(heapq.heappop(self._pin_ends)[1])
        due = self._cluster.due(self._observer, self._beats, now, lambda grant: self._pinned_grants[grant] > 0)
        if due:
            for member in self._cluster.apply(due):
                self._forget_member(member)
                self._counts["nodes_died"] += 1
        if self._sweep is None and self._cluster.state.unswept:
            self._sweep = self._sweep_once()
        if self._sweep is not None:
            end = boottime_ns() + _SWEEP_BUDGET_NS
            while boottime_ns() < end:
                if next(self._sweep, self) is self:
                    self._sweep = None
                    break

    def _sweep_once(self) -> Iterator[None]:
        """Remove the keys of grants that had ended when it began, one shard per step."""
        ended = frozenset(self._cluster.state.unswept)
        for table in list(self._tables):
            for i in range(_SHARDS):
                shards = self._tables.get(table)
                if shards is None:
                    break
                stale = [k for k, v in shards[i].items() if int.from_bytes(v[:4], "little") in ended]
                for key in stale:
                    self._remove(table, shards[i], key)
                yield
            self._drop_if_empty(table)
        self._cluster.state.unswept = [g for g in self._cluster.state.unswept if g not in ended]

    # --- membership and regions -------------------------------------------------------------------------------------------
    def join(self, hello: P.Hello) -> str:
        before = set(self._cluster.state.members)
        member = self._cluster.join(hello)
        for gone in before - self._cluster.state.members.keys():
            self._forget_member(gone)
        self._beat(member)
        return member

    def _beat(self, member: str) -> None:
        self._beats[member] = self._beats.get(member, 0) + 1
        self._seen_ns[member] = boottime_ns()

    def leave(self, member: str) -> None:
        self._cluster.member(member)
        self._cluster.end_member(member)
        self._forget_member(member)

    def _forget_member(self, member: str) -> None:
        self._beats.pop(member, None)
        self._seen_ns.pop(member, None)
        for pin in [i for i, p in self._pins.items() if p.member == member]:
            self._end_pin(pin)

    def heartbeat(self, member: str) -> None:
        self._cluster.member(member)
        self._beat(member)

    def add_device(self, m: P.AddDevice) -> None:
        self._cluster.add_device(m)

    def alloc(self, member: str, m: P.AllocRegions) -> list[P.GrantInfo]:
        return self._cluster.alloc(member, m)

    def free(self, member: str, regions: list[P.Region]) -> int:
        return self._cluster.free(member, regions)

    def claim(self, member: str, m: P.ClaimRegions) -> list[P.ClaimResult]:
        return self._cluster.claim(member, m)

    # --- directory --------------------------------------------------------------------------------------------------------
    def register(self, member: str, table: Table, keys: Keys, places: bytes, slab_bytes: int) -> tuple[bytes, bytes]:
        mine = self._cluster.writable_ids(member)
        self._cluster.set_slab_bytes(self._cluster.of_other_size(grant_ids(places) & mine, slab_bytes), slab_bytes)
        shards = self._tables.get(table)
        if shards is None:
            if len(self._tables) >= self._settings.max_tables:
                raise ServerRefused(ErrorCode.LIMIT, f"{len(self._tables)} namespaces × ranks already", "reset unused ones")
            shards = self._tables[table] = [{} for _ in range(_SHARDS)]
        codes, winners, any_winner = bytearray(), bytearray(), False
        grants = np.frombuffer(places, P.PLACE)["grant"].tolist()
        keys_of, readable = self._keys_of, self._readable
        for i, (key, grant) in enumerate(zip(keys, grants, strict=True)):
            place = places[i * 16 : i * 16 + 16]
            shard = shards[key[0]]
            old = shard.get(key)
            if grant not in mine:
                outcome = Outcome.NOT_OWNER
            elif old is None:
                if self._n_keys >= self._settings.max_keys:
                    outcome = Outcome.FULL
                else:
                    shard[key] = place
                    self._n_keys += 1
                    keys_of[grant] += 1
                    outcome = Outcome.REGISTERED
            elif old == place:
                outcome = Outcome.REGISTERED
            else:
                old_grant = int.from_bytes(old[:4], "little")
                same_slab = old[:8] == place[:8] and not self._pinned[table, key]
                if same_slab or not readable.has(old_grant):
                    shard[key] = place
                    keys_of[old_grant] -= 1
                    keys_of[grant] += 1
                    outcome = Outcome.REGISTERED
                else:
                    outcome = Outcome.EXISTS
            codes.append(outcome)
            if outcome is Outcome.EXISTS and old is not None:
                winners += old
                any_winner = True
            else:
                winners += P.NOWHERE
        self._counts["registered"] += codes.count(Outcome.REGISTERED)
        self._drop_if_empty(table)
        return bytes(codes), bytes(winners) if any_winner else b""

    def _raw(self, table: Table, keys: Keys) -> bytes:
        shards = self._tables.get(table)
        if shards is None:
            return P.NOWHERE * len(keys)
        nowhere = P.NOWHERE
        return b"".join([shards[k[0]].get(k, nowhere) for k in keys])

    def lookup(self, table: Table, keys: Keys) -> bytes:
        places = self._readable.filter(self._raw(table, keys))
        self._count_asked(len(keys), n_found(places))
        return places

    def _count_asked(self, n: int, found: int) -> None:
        self._counts["looked_up"] += n
        self._counts["found"] += found

    def pin(self, member: str, table: Table, keys: Keys, ttl_ms: int) -> tuple[int, bytes]:
        raw = self._raw(table, keys)
        n = self._readable.leading(raw)
        self._count_asked(len(keys), n)
        if n == 0:
            return 0, b""
        places = raw[: n * P.PLACE_BYTES]
        self._next_pin += 1
        pin = _Pin(member, table, tuple(keys[:n]), sorted(grant_ids(places)))
        self._pins[self._next_pin] = pin
        self._pinned.update((table, k) for k in pin.keys)
        self._pinned_grants.update(pin.grants)
        heapq.heappush(self._pin_ends, (boottime_ns() + ttl_ms * 1_000_000, self._next_pin))
        return self._next_pin, places

    def unpin(self, member: str, pin: int) -> int:
        held = self._pins.get(pin)
        return self._end_pin(pin) if held is not None and held.member == member else 0

    def _end_pin(self, pin: int) -> int:
        held = self._pins.pop(pin, None)
        if held is None:
            return 0
        _release(self._pinned, [(held.table, k) for k in held.keys])
        _release(self._pinned_grants, held.grants)
        return len(held.keys)

    def delete(self, member: str, table: Table, keys: Keys) -> bytes:
        mine = self._cluster.writable_ids(member)
        shards = self._tables.get(table)
        codes = bytearray()
        for key in keys:
            old = shards[key[0]].get(key) if shards is not None else None
            grant = int.from_bytes(old[:4], "little") if old is not None else 0
            if shards is None or old is None or not self._readable.has(grant):
                codes.append(Outcome.ABSENT)
            elif grant not in mine:
                codes.append(Outcome.NOT_OWNER)
            elif self._pinned[table, key]:
                codes.append(Outcome.PINNED)
            else:
                self._remove(table, shards[key[0]], key)
                codes.append(Outcome.DELETED)
        self._drop_if_empty(table)
        return bytes(codes)

    def _remove(self, table: Table, shard: dict[bytes, bytes], key: bytes) -> None:
        grant = int.from_bytes(shard.pop(key)[:4], "little")
        self._n_keys -= 1
        self._keys_of[grant] -= 1
        if self._keys_of[grant] <= 0:
            del self._keys_of[grant]

    def _drop_if_empty(self, table: Table) -> None:
        shards = self._tables.get(table)
        if shards is not None and not any(shards):
            del self._tables[table]

    def tables(self) -> list[tuple[bytes, int, int]]:
        return [(ns, rank, sum(map(len, shards))) for (ns, rank), shards in sorted(self._tables.items())]

    def page(self, table: Table, after: bytes, limit: int) -> tuple[list[bytes], bytes, bool]:
        shards = self._tables.get(table)
        keys: list[bytes] = []
        if shards is None:
            return keys, b"", False
        readable = self._readable
        for shard in shards[after[0] if after else 0 :]:
            keys += sorted(k for k, v in shard.items() if k > after and readable.has(int.from_bytes(v[:4], "little")))
            if len(keys) > limit:
                break
        more = len(keys) > limit
        keys = keys[:limit]
        return keys, self._raw(table, keys), more

    def reset(self, namespace: bytes) -> int:
        n = 0
        for table in [t for t in self._tables if not namespace or t[0] == namespace]:
            for shard in self._tables[table]:
                for key in [k for k in shard if not self._pinned[table, k]]:
                    self._remove(table, shard, key)
                    n += 1
            self._drop_if_empty(table)
        return n

    # --- views ------------------------------------------------------------------------------------------------------------
    def infos(self, ids: set[int]) -> list[P.GrantInfo]:
        return self._cluster.infos(ids)

    def _count(self, grant: int) -> int:
        return self._keys_of.get(grant, 0)

    def stats(self) -> dict[str, int | float | str]:
        s = self._cluster.state
        return {
            "keys": self._n_keys,
            "tables": len(self._tables),
            "nodes": len(s.members),
            "devices": len(s.devices),
            "grants": len(s.grants),
            "pins": len(self._pins),
            "hold": int(s.hold),
            "unswept_grants": len(s.unswept),
            "keys_looked_up_total": self._counts["looked_up"],
            "keys_found_total": self._counts["found"],
            "keys_registered_total": self._counts["registered"],
            "nodes_died_total": self._counts["nodes_died"],
        }

    def usage(self) -> list[P.UsageRow]:
        per_namespace: Counter[bytes] = Counter()
        for ns, _, n in self.tables():
            per_namespace[ns] += n
        return self._cluster.usage(self._count) + [
            P.UsageRow("namespace", ns.hex(), 0, n, 0, 0) for ns, n in per_namespace.items()
        ]

    def nodes(self) -> list[P.NodeInfo]:
        now = boottime_ns()
        return self._cluster.nodes(self._count, lambda m: (now - self._seen_ns.get(m, now)) // 1_000_000)

    def regions(self) -> list[P.RegionInfo]:
        return self._cluster.regions(self._count)
