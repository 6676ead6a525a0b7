"""The directory in Redis or Valkey (single or Cluster): many stateless server processes in front of one shared store.

- The directory proper is spread: 16 buckets per table by the key's first hex digit, each its own hash tag
  ``{prefix:namespace:rank:digit}``, so one batch is at most 16 commands in one pipeline and a large namespace uses many
  masters.
- Members and grants are one small value changed by compare-and-set (``cluster.py`` computes the change). Heartbeats are
counters beside it, and a member is declared dead only if its counter has not moved up to the very moment of the change.
  The value is read and written whole: a grant costs 3 ms at 1,000 grants, 28 at 10,000, 400 at 50,000. Choose regions large
  enough that the cluster has at most about 10,000.
- The epoch names the stored data: a restarted front keeps it, an emptied store gets a new one and everybody announces again.
- A freed region waits out the longest pin instead of counting readers: pins and grants lie in different slots.

Run the store with ``maxmemory-policy noeviction``: an evicted grant would be granted twice.

Every access is bounded by ``timeout_s``; a store that does not answer becomes a BACKEND error, which a node treats as a miss.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from maru_server import protocol as P
from maru_server import redis_scripts as scripts
from maru_server.backend import Keys, Table
from maru_server.cluster import Cluster
from maru_server.cluster_state import ClusterState, Due, Observer, Settings
from maru_server.errors import BackendUnavailable, ServerRefused
from maru_server.lease import boottime_ns
from maru_server.places import grant_ids, n_found
from maru_server.protocol import ErrorCode, MemberState, Outcome
from maru_server.redis_store import Command, RedisStore

_CAS_ATTEMPTS = 50
_SWEEP_COUNT = 1000
_SWEEP_LOCK_MS = 30_000
_SWEEP_BUDGET_NS = 10_000_000  # per tick of 100 ms: about 7,000 keys looked at
T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(ClusterState).decode


class _Pin(msgspec.Struct, array_like=True):
    namespace: bytes
    rank: int
    keys: bytes


class RedisBackend:
    """See :class:`~maru_server.backend.Backend`. ``prefix`` separates several directories in one store."""

    name = "redis"

    def __init__(self, settings: Settings, url: str, *, prefix: str = "maru", timeout_s: float = 2.0) -> None:
        self._settings = settings
        self._store_client = RedisStore(url, timeout_s)
        self._run, self._one = self._store_client.run, self._store_client.one
        self._prefix = prefix
        self._meta = f"{{{prefix}:meta}}"
        self._version = b""
        self._cluster = Cluster(ClusterState(epoch=0, hold=True, next_token=0), settings)
        self._readable = self._cluster.readable
        self._observer = Observer()
        self._beats: dict[str, int] = {}
        self._seen_ns: dict[str, tuple[int, int]] = {}
        self._refreshed_ns = self._ticked_ns = 0
        self._sweep: Iterator[None] | None = None
        self._me = os.urandom(8).hex()
        self._counts: Counter[str] = Counter()
        self._refresh()

    def close(self) -> None:
        self._store_client.close()

    def _key(self, suffix: str) -> str:
        return f"{self._meta}:{suffix}"

    # --- members and grants: one value, compare-and-set ---------------------------------------------------------------
    def _refresh(self) -> None:
        """Load members and grants if they changed; start a new epoch if the store is empty."""
        version = self._one("get", self._key("version"))
        if version is None:
            self._version = b""
            self._cluster = Cluster(ClusterState.new(self._cluster.state.epoch), self._settings)
            self._store(self._cluster, self._cluster.state, Due())
            version = self._one("get", self._key("version"))
        if version != self._version:
            version, blob = self._one("mget", [self._key("version"), self._key("state")])
            if version is None or blob is None:
                raise BackendUnavailable(f"store {self._store_client.url} was emptied while reading", "ask again")
            self._adopt(version, Cluster(_decode_state(blob), self._settings))
        self._refreshed_ns = boottime_ns()

    def _adopt(self, version: bytes, cluster: Cluster) -> None:
        self._version, self._cluster = version, cluster
        self._readable = cluster.readable

    def _store(self, cluster: Cluster, before: ClusterState, due: Due) -> bool:
        old = {k for k, m in before.members.items() if m.state is MemberState.ALIVE} if before is not cluster.state else set()
        new = {k for k, m in cluster.state.members.items() if m.state is MemberState.ALIVE}
        serial = int(self._version.rpartition(b":")[2] or 0) + 1
        version = f"{cluster.state.epoch}:{serial}".encode()
        change = {"check": due.dead, "add": sorted(new - old), "remove": sorted(old - new)}
        stored = self._one(
            "eval", scripts.STORE_STATE, 4, self._key("version"), self._key("state"), self._key("beats"), self._key("alive"),
            self._version, version, _encode(cluster.state), _encode(change),
        )  # fmt: skip
        if stored:
            self._adopt(version, cluster)
        return bool(stored)

    def _change(self, change: Callable[[Cluster], T]) -> T:
        """Apply a change to members or grants. ``change`` may run several times."""
        for _ in range(_CAS_ATTEMPTS):
            self._refresh()
            before = self._cluster.state
            blob = _encode(before)
            cluster = Cluster(_decode_state(blob), self._settings)
            result = change(cluster)
            if _encode(cluster.state) == blob or self._store(cluster, before, Due()):
                return result
        raise BackendUnavailable(f"store {self._store_client.url}: too many servers change members at once", "ask again")

    def epoch(self) -> int:
        if boottime_ns() - self._refreshed_ns > 100_000_000:
            self._refresh()
        return self._cluster.state.epoch

    # --- time ---------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        self._sweep_a_little()
        now = boottime_ns()
        if now - self._ticked_ns < min(self._settings.silence_ms * 100_000, 500_000_000):  # a tenth of the silence, 0.5 s
            return
        self._ticked_ns = now
        self._refresh()
        self._beats = {k.decode(): int(v) for k, v in self._one("hgetall", self._key("beats")).items()}
        for member, count in self._beats.items():
            if self._seen_ns.get(member, (-1, 0))[0] != count:
                self._seen_ns[member] = (count, now)
        self._seen_ns = {m: s for m, s in self._seen_ns.items() if m in self._beats}
        due = self._cluster.due(self._observer, self._beats, now, None)
        if due:
            before = self._cluster.state
            cluster = Cluster(_decode_state(_encode(before)), self._settings)
            ended = cluster.apply(due)
            if self._store(cluster, before, due):
                self._counts["nodes_died"] += len(ended)
                for member in ended:
                    self._unpin_member(member)

    def _sweep_a_little(self) -> None:
        if self._sweep is None and self._cluster.state.unswept and self._sweep_lock():
            self._sweep = self._sweep_once()
        end = boottime_ns() + _SWEEP_BUDGET_NS
        while self._sweep is not None and boottime_ns() < end:
            if next(self._sweep, self) is self:
                self._sweep = None

    def _sweep_lock(self) -> bool:
        """Whether this front is the one that sweeps now."""
        key = self._key("sweeper")
        if self._one("set", key, self._me, None, _SWEEP_LOCK_MS, True):  # ex, px, nx
            return True
        return bool(self._one("get", key) == self._me.encode() and self._one("pexpire", key, _SWEEP_LOCK_MS))

    def _sweep_once(self) -> Iterator[None]:
        """Remove the keys of grants that had ended when it began, about 1,000 keys looked at per step."""
        ended = frozenset(self._cluster.state.unswept)
        for ns, rank, _ in self.tables():
            for digit in range(16):
                cursor = 0
                while True:
                    cursor, found = self._one("hscan", self._bucket((ns, rank), digit)[0], cursor, None, _SWEEP_COUNT)
                    stale = {k: v for k, v in found.items() if int.from_bytes(v[:4], "little") in ended}
                    self._delete_where((ns, rank), stale)
                    yield
                    if not self._sweep_lock():
                        return
                    if cursor == 0:
                        break
        self._change(lambda c: setattr(c.state, "unswept", [g for g in c.state.unswept if g not in ended]))

    # --- membership and regions ---------------------------------------------------------------------------------------
    def join(self, hello: P.Hello) -> str:
        return self._change(lambda c: c.join(hello))

    def leave(self, member: str) -> None:
        def end(cluster: Cluster) -> None:
            cluster.member(member)
            cluster.end_member(member)

        self._change(end)
        self._one("hdel", self._key("beats"), member)
        self._unpin_member(member)

    def _unpin_member(self, member: str) -> None:
        for pin in self._one("smembers", self._key(f"pins:{member}")):
            self.unpin(member, int(pin))

    def heartbeat(self, member: str) -> None:
        if not self._one("eval", scripts.HEARTBEAT, 2, self._key("beats"), self._key("alive"), member):
            self._refresh()
            self._cluster.member(member)
            raise ServerRefused(ErrorCode.NODE_DEAD, f"{member} is no member (any more)", "join with a new incarnation")

    def add_device(self, m: P.AddDevice) -> None:
        self._change(lambda c: c.add_device(m))

    def alloc(self, member: str, m: P.AllocRegions) -> list[P.GrantInfo]:
        return self._change(lambda c: c.alloc(member, m))

    def free(self, member: str, regions: list[P.Region]) -> int:
        return self._change(lambda c: c.free(member, regions))

    def claim(self, member: str, m: P.ClaimRegions) -> list[P.ClaimResult]:
        return self._change(lambda c: c.claim(member, m))

    # --- directory ----------------------------------------------------------------------------------------------------
    def _bucket(self, table: Table, digit: int) -> tuple[str, str]:
        """Names of a bucket's two hashes (places, pins)."""
        tag = f"{{{self._prefix}:{table[0].hex()}:{table[1]}:{digit:x}}}"
        return f"{tag}:d", f"{tag}:p"

    @staticmethod
    def _by_digit(keys: Keys) -> dict[int, list[int]]:
        """Indexes of keys by bucket."""
        groups: dict[int, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            groups[key[0] >> 4].append(i)
        return groups

    def _eval(self, script: str, table: Table, digit: int, *args: Any) -> Command:
        return ("execute_command", "EVAL", script, 2, *self._bucket(table, digit), *args)

    def _raw(self, table: Table, keys: Keys) -> list[bytes]:
        """Places as stored, NOWHERE where absent; members and grants are refreshed in the same round trip."""
        groups = self._by_digit(keys)
        commands = [("hmget", self._bucket(table, d)[0], [keys[i] for i in group]) for d, group in groups.items()]
        version, *answers = self._run([("get", self._key("version")), *commands])
        if version != self._version:
            self._refresh()
        out = [P.NOWHERE] * len(keys)
        for group, answer in zip(groups.values(), answers, strict=True):
            for i, place in zip(group, answer, strict=True):
                if place is not None:
                    out[i] = place
        return out

    def _count_keys(self, added: Counter[int]) -> list[Command]:
        return [("hincrby", self._key("keys"), str(g), n) for g, n in added.items() if n]

    def register(self, member: str, table: Table, keys: Keys, places: bytes, slab_bytes: int) -> tuple[bytes, bytes]:
        self._refresh()
        mine = self._cluster.writable_ids(member)
        if other := self._cluster.of_other_size(grant_ids(places) & mine, slab_bytes):  # once per region and layout
            self._change(lambda c: c.set_slab_bytes(other, slab_bytes))
            mine = self._cluster.writable_ids(member)
        mine_places = [places[i * 16 : i * 16 + 16] for i in range(len(keys))]
        grants = [int.from_bytes(p[:4], "little") for p in mine_places]
        codes = [Outcome.NOT_OWNER] * len(keys)
        winners = [P.NOWHERE] * len(keys)
        groups = {d: own for d, g in self._by_digit(keys).items() if (own := [i for i in g if grants[i] in mine])}
        if not groups:
            return bytes(codes), b""
        commands = [
            self._eval(scripts.REGISTER, table, digit, *(x for i in group for x in (keys[i], mine_places[i])))
            for digit, group in groups.items()
        ]
        _, *answers = self._run([("sadd", self._key("tables"), table[0] + table[1].to_bytes(4, "little")), *commands])
        added: Counter[int] = Counter()
        again: dict[int, list[tuple[int, bytes, bytes]]] = defaultdict(list)
        for (digit, group), answer in zip(groups.items(), answers, strict=True):
            for i, old in zip(group, answer, strict=True):
                if old in (b"", mine_places[i]):
                    codes[i] = Outcome.REGISTERED
                    added[grants[i]] += old == b""
                elif not self._readable.has(int.from_bytes(old[:4], "little")):
                    again[digit].append((i, old, b"stale"))
                elif old[:8] == mine_places[i][:8]:
                    again[digit].append((i, old, b"live"))
                else:
                    codes[i], winners[i] = Outcome.EXISTS, old
        if again:
            commands = [
                self._eval(scripts.REPLACE, table, d, *(x for i, old, how in g for x in (keys[i], old, mine_places[i], how)))
                for d, g in again.items()
            ]
            for group2, answer in zip(again.values(), self._run(commands), strict=True):
                for (i, old, _), done in zip(group2, answer, strict=True):
                    codes[i] = Outcome.REGISTERED if done else Outcome.EXISTS
                    if done:
                        added[grants[i]] += 1
                        added[int.from_bytes(old[:4], "little")] -= 1
                    else:
                        winners[i] = old
        if counting := self._count_keys(added):
            self._run(counting)
        self._counts["registered"] += codes.count(Outcome.REGISTERED)
        return bytes(codes), b"".join(winners) if Outcome.EXISTS in codes else b""

    def lookup(self, table: Table, keys: Keys) -> bytes:
        places = self._readable_places(table, keys)
        self._count_asked(len(keys), n_found(places))
        return places

    def _readable_places(self, table: Table, keys: Keys) -> bytes:
        return self._readable.filter(b"".join(self._raw(table, keys))) if keys else b""

    def _count_asked(self, n: int, found: int) -> None:
        self._counts["looked_up"] += n
        self._counts["found"] += found

    def pin(self, member: str, table: Table, keys: Keys, ttl_ms: int) -> tuple[int, bytes]:
        if not keys:
            return 0, b""
        self._refresh()
        pin = int(self._one("incr", self._key("last_pin")))
        groups = self._by_digit(keys)
        answers = self._run([self._eval(scripts.PIN, table, d, pin, ttl_ms, *(keys[i] for i in g)) for d, g in groups.items()])
        found = [P.NOWHERE] * len(keys)
        for group, answer in zip(groups.values(), answers, strict=True):
            for i, place in zip(group, answer, strict=True):
                found[i] = place or P.NOWHERE
        n = self._readable.leading(b"".join(found))
        self._count_asked(len(keys), n)
        self._unpin(pin, table, [k for k, place in zip(keys[n:], found[n:], strict=True) if place != P.NOWHERE])
        if n == 0:
            return 0, b""
        self._run([
            ("psetex", self._key(f"pin:{member}:{pin}"), ttl_ms, _encode(_Pin(table[0], table[1], b"".join(keys[:n])))),
            ("sadd", self._key(f"pins:{member}"), pin),
            ("pexpire", self._key(f"pins:{member}"), self._settings.max_pin_ms),
        ])  # fmt: skip
        return pin, b"".join(found[:n])

    def _unpin(self, pin: int, table: Table, keys: Keys) -> int:
        groups = self._by_digit(keys)
        if not groups:
            return 0
        return sum(self._run([self._eval(scripts.UNPIN, table, d, pin, *(keys[i] for i in g)) for d, g in groups.items()]))

    def unpin(self, member: str, pin: int) -> int:
        blob = self._one("getdel", self._key(f"pin:{member}:{pin}"))
        if blob is None:
            return 0
        held = msgspec.msgpack.decode(blob, type=_Pin)
        return self._unpin(pin, (held.namespace, held.rank), P.split_keys(held.keys))

    def _delete_where(self, table: Table, expected: dict[bytes, bytes]) -> dict[bytes, int]:
        """Delete keys that are still at the expected place and not pinned; key → 1 deleted, 2 pinned, 0 changed."""
        keys = list(expected)
        groups = self._by_digit(keys)
        if not groups:
            return {}
        commands = [
            self._eval(scripts.DELETE, table, digit, *(x for i in group for x in (keys[i], expected[keys[i]])))
            for digit, group in groups.items()
        ]
        results: dict[bytes, int] = {}
        for group, answer in zip(groups.values(), self._run(commands), strict=True):
            results.update(zip((keys[i] for i in group), answer, strict=True))
        removed = Counter(int.from_bytes(expected[k][:4], "little") for k, r in results.items() if r == 1)
        if removed:
            self._run(self._count_keys(Counter({g: -n for g, n in removed.items()})))
        return results

    def delete(self, member: str, table: Table, keys: Keys) -> bytes:
        if not keys:
            return b""
        raw = self._raw(table, keys)
        mine = self._cluster.writable_ids(member)
        codes = [Outcome.ABSENT] * len(keys)
        wanted = {}
        for i, (key, place) in enumerate(zip(keys, raw, strict=True)):
            grant = int.from_bytes(place[:4], "little")
            if not self._readable.has(grant):
                continue
            if grant not in mine:
                codes[i] = Outcome.NOT_OWNER
            else:
                wanted[key] = place
        results = self._delete_where(table, wanted)
        for i, key in enumerate(keys):
            if result := results.pop(key, 0):
                codes[i] = Outcome.DELETED if result == 1 else Outcome.PINNED
        return bytes(codes)

    def tables(self) -> list[tuple[bytes, int, int]]:
        members = sorted(self._one("smembers", self._key("tables")))
        out = []
        for m in members:
            table = (m[:16], int.from_bytes(m[16:], "little"))
            n = sum(self._run([("hlen", self._bucket(table, d)[0]) for d in range(16)]))
            if n:
                out.append((*table, n))
        return out

    def _scan(self, table: Table, digit: int) -> Iterator[tuple[bytes, bytes]]:
        cursor = 0
        while True:
            cursor, found = self._one("hscan", self._bucket(table, digit)[0], cursor, None, _SWEEP_COUNT)
            yield from found.items()
            if cursor == 0:
                return

    def page(self, table: Table, after: bytes, limit: int) -> tuple[list[bytes], bytes, bool]:
        self._refresh()
        keys: list[bytes] = []
        for digit in range(after[0] >> 4 if after else 0, 16):
            scanned = self._scan(table, digit)
            keys += sorted({k for k, v in scanned if k > after and self._readable.has(int.from_bytes(v[:4], "little"))})
            if len(keys) > limit:
                break
        more, keys = len(keys) > limit, keys[:limit]
        return keys, self._readable_places(table, keys), more

    def reset(self, namespace: bytes) -> int:
        n = 0
        for ns, rank, _ in self.tables():
            if namespace and ns != namespace:
                continue
            for digit in range(16):
                found = list(self._scan((ns, rank), digit))
                for i in range(0, len(found), _SWEEP_COUNT):
                    n += list(self._delete_where((ns, rank), dict(found[i : i + _SWEEP_COUNT])).values()).count(1)
        return n

    # --- views --------------------------------------------------------------------------------------------------------
    def infos(self, ids: set[int]) -> list[P.GrantInfo]:
        return self._cluster.infos(ids)

    def _key_counts(self) -> Callable[[int], int]:
        self._refresh()
        counts = {int(k): int(v) for k, v in self._one("hgetall", self._key("keys")).items()}
        return lambda grant: counts.get(grant, 0)

    def stats(self) -> dict[str, int | float | str]:
        self._refresh()
        s, tables = self._cluster.state, self.tables()
        return {
            "keys": sum(n for _, _, n in tables),
            "tables": len(tables),
            "nodes": len(s.members),
            "devices": len(s.devices),
            "grants": len(s.grants),
            "hold": int(s.hold),
            "unswept_grants": len(s.unswept),
            "keys_looked_up_total": self._counts["looked_up"],
            "keys_found_total": self._counts["found"],
            "keys_registered_total": self._counts["registered"],
            "nodes_died_total": self._counts["nodes_died"],
        }

    def usage(self) -> list[P.UsageRow]:
        counts = self._key_counts()  # first: it refreshes members and grants
        rows = self._cluster.usage(counts)
        per_namespace: Counter[bytes] = Counter()
        for ns, _, n in self.tables():
            per_namespace[ns] += n
        return rows + [P.UsageRow("namespace", ns.hex(), 0, n, 0, 0) for ns, n in per_namespace.items()]

    def nodes(self) -> list[P.NodeInfo]:
        now = boottime_ns()
        counts = self._key_counts()
        return self._cluster.nodes(counts, lambda m: (now - self._seen_ns.get(m, (0, now))[1]) // 1_000_000)

    def regions(self) -> list[P.RegionInfo]:
        counts = self._key_counts()
        return self._cluster.regions(counts)
