"""What the daemon says of itself: sections for people, a flat list of samples for scrapers. Read from any thread.

Everything is a copy of plain values; nothing here takes a lock for longer than a copy. Metric names carry their unit, counters
end in ``_total``, and each is there, at zero, before the first request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from maru_shm import __version__
from maru_shm import layout as L
from maru_sidecar import descriptors
from maru_sidecar.lanes import Lane
from maru_sidecar.loader import Loader
from maru_sidecar.store_queue import Writer

if TYPE_CHECKING:
    from maru_sidecar.daemon import Sidecar


class Metric(NamedTuple):
    """One sample, as ``http.py`` renders it. ``type``: counter or gauge."""

    name: str
    type: str
    help: str
    labels: Mapping[str, str]
    value: float


#: key of Directory.stats() → help. Names follow: gauges ``maru_directory_<key>``, counters the same (they end in _total
#: already).
_DIRECTORY = {
    "chunks": "Chunks in the directory",
    "chunks_incomplete": "Chunks that some rank has not stored",
    "chunks_pinned": "Chunks with a pin of any kind",
    "slabs_committed": "Slabs holding a chunk",
    "slabs_writing": "Slabs being written",
    "slabs_free": "Free slabs of formatted regions",
    "leases": "Live leases",
    "regions_free": "Empty pool regions",
    "lookups_total": "Lookups",
    "chunks_asked_total": "Chunks asked for by lookups: the denominator of the hit ratio",
    "chunks_hit_total": "Chunks found by lookups",
    "stored_total": "Slabs committed",
    "aborted_total": "Slabs given back unwritten",
    "evicted_total": "Chunks evicted to make room",
    "cleared_total": "Chunks dropped by an operator",
    "dropped_bad_total": "Chunks dropped because their bytes failed the checksum",
    "full_total": "Stores refused because nothing could be evicted",
    "leases_expired_total": "Leases that ended by their deadline",
}
_POOL_BYTES = {
    "bytes_total": ("maru_pool_size_bytes", "Size of the pool"),
    "bytes_used": ("maru_pool_used_bytes", "Bytes in slabs that are in use"),
    "bytes_free": ("maru_pool_free_bytes", "Bytes that a store can take without evicting"),
    "largest_free_extent": ("maru_pool_largest_free_extent_bytes", "Longest run of empty regions"),
}
_TRANSFERS = (L.Op.LOAD, L.Op.STORE)
#: A lookup of an engine whose workers are not all there (yet): a miss with a reason, the ticket is DONE.
_NO_FAILURE = L.Code.NOT_REGISTERED
NAMESPACES_SHOWN = 200


#: key of sharing.node.Node.status() → metric, help; all 0 where the pool is not shared
_SHARING = {
    "can_store": ("maru_sharing_can_store", "1 while a region may be written"),
    "regions": ("maru_sharing_regions", "Regions granted to this node"),
    "regions_lost": ("maru_sharing_regions_lost_total", "Regions that went to another node"),
    "slabs_published": ("maru_sharing_published_slabs_total", "Slabs announced to the server"),
    "slabs_withdrawn": ("maru_sharing_withdrawn_slabs_total", "Slabs withdrawn before their reuse"),
    "lookups_asked": ("maru_sharing_lookups_total", "Lookups that went on at the server"),
    "lookups_unanswered": ("maru_sharing_lookups_unanswered_total", "Lookups answered without the server, which was too slow"),
    "lookups_refused": ("maru_sharing_lookups_refused_total", "Lookups that the server refused or whose session ended"),
    "lookups_pinned_too_short": ("maru_sharing_lookups_pinned_too_short_total", "Lookups whose pins were too short to be used"),
    "requests_refused": ("maru_sharing_requests_refused_total", "Requests of any kind that the server refused"),
    "grants_refused": ("maru_sharing_grants_refused_total", "Grants of regions that were not sound, and given back"),
    "chunks_found": ("maru_sharing_found_chunks_total", "Chunks found in regions of other nodes"),
    "chunks_stale": ("maru_sharing_stale_chunks_total", "Chunks the server knew and whose slabs were reused"),
    "slabs_vanished": ("maru_sharing_vanished_slabs_total", "Slabs that were reused before or during a load"),
    "foreign_leases": ("maru_sharing_foreign_leases", "Live leases on chunks of other nodes"),
    "reconnects": ("maru_sharing_reconnects_total", "Times the link to the server was made anew"),
}


# --- sections -----------------------------------------------------------------------------------------------------------------
def sections(sidecar: Sidecar) -> dict[str, object]:
    """Name → plain values (dict, or list of dicts)."""
    stats = _stats(sidecar)
    health = sidecar.health()
    return {
        "sidecar": {
            "version": __version__,
            "pid": os.getpid(),
            "state": sidecar.state.name,
            "health": health.text,
            "uptime_s": round(time.monotonic() - sidecar.started_s, 3),
            "socket": sidecar.config.control.socket,
            "instance": sidecar.instance,
            "generation": f"{sidecar.generation:016x}",
            "connections": len(sidecar.server.connections),
            "connections_refused": sidecar.server.refusals.total,
            "protocol_violations": sidecar.violations,
            "deferred_calls_failed": sidecar.poller.failed,
            "engines_abandoned": sidecar.sessions.abandoned if sidecar.sessions is not None else 0,
            "engines_hanging": sidecar.sessions.hanging if sidecar.sessions is not None else 0,
            "handlers_failed": sidecar.poller.failed_handlers,
            "descriptors_closing": descriptors.pending(),
        },
        "pool": _pool(sidecar, stats),
        "directory": stats,
        "cache": _cache(sidecar, stats),
        "sharing": _sharing(sidecar),
        "engines": _engines(sidecar),
        "sessions": _sessions(sidecar),
        "queues": _queues(_lanes(sidecar)),
        "transfers": _transfers(sidecar),
        "failures": {code.name: n for code, n in sidecar.counters.codes.items() if code not in (L.Code.OK, _NO_FAILURE) and n},
        "refusals": sidecar.server.refusals.status(),
    }


def _stats(sidecar: Sidecar) -> dict[str, object]:
    """The directory's numbers; of its namespaces the largest, so that the message stays in bounds."""
    if sidecar.directory is None:
        return {}
    stats = sidecar.directory.admin.stats()
    namespaces = stats.get("namespaces")
    if isinstance(namespaces, dict) and len(namespaces) > NAMESPACES_SHOWN:
        largest = sorted(namespaces.items(), key=lambda item: -_number(item[1].get("bytes")))[:NAMESPACES_SHOWN]
        stats = {**stats, "namespaces": dict(largest), "namespaces_held": len(namespaces)}
    return stats


def _sharing(sidecar: Sidecar) -> dict[str, object]:
    return sidecar.node.status() if sidecar.node is not None and sidecar.pool is not None else {}


def _lanes(sidecar: Sidecar) -> list[Lane]:
    return sidecar.lanes.all() if sidecar.lanes is not None else []


def _pool(sidecar: Sidecar, stats: Mapping[str, object]) -> dict[str, object]:
    spec, opening = sidecar.config.pool, sidecar.opening
    values: dict[str, object] = {"backend": spec.backend, "path": spec.file_path, "configured_bytes": spec.size}
    if sidecar.pool is None or sidecar.prefault is None:
        return {**values, "opening_bytes": opening.done_bytes, "opening_total_bytes": opening.total_bytes}
    prefault = sidecar.prefault.progress()
    return {
        **values,
        "uuid": sidecar.pool.uuid.hex(),
        "region_bytes": sidecar.pool.region_bytes,
        **{key: stats[key] for key in _POOL_BYTES if key in stats},
        "open_s": round(opening.seconds, 3),
        "leases_taken_over": sidecar.harvested.leases,
        "prefault": prefault.state.value,
        "prefault_bytes": prefault.done_bytes,
        "prefault_bytes_per_s": round(prefault.rate),
        **({"prefault_error": prefault.error} if prefault.error else {}),
        "warnings": list(sidecar.pool.warnings),
    }


def _cache(sidecar: Sidecar, stats: Mapping[str, object]) -> dict[str, object]:
    """Two ratios: of what lookups asked for, how much was there; of what loads asked for, how much arrived (all ranks counted).

    A lookup is not a load: an engine may look a prompt up several times, and find it in its own cache after all. ``hit_ratio``
    is the lookups'. ``lookups_not_registered``: lookups of engines without all their workers, which miss.
    """
    asked, hit = _number(stats.get("chunks_asked_total")), _number(stats.get("chunks_hit_total"))
    with sidecar.counters.lock:
        loads = sidecar.counters.ops[L.Op.LOAD]
        load_asked, loaded = loads.asked, loads.chunks
        unregistered = sidecar.counters.codes[_NO_FAILURE]
    hit_ratio = _ratio(hit, asked)
    return {
        "chunks_asked": asked, "chunks_hit": hit, "hit_ratio": hit_ratio, "lookup_hit_ratio": hit_ratio,
        "load_chunks_asked": load_asked, "load_chunks_loaded": loaded, "load_success_ratio": _ratio(loaded, load_asked),
        "lookups_not_registered": unregistered,
    }  # fmt: skip


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _engines(sidecar: Sidecar) -> list[dict[str, object]]:
    if sidecar.sessions is None:
        return []
    return [
        {
            "engine_id": e.engine_id, "label": e.label, "world": e.world, "registered": len(e.registered),
            "complete": e.complete,
            "namespace": e.namespace.hex(), "chunk_tokens": e.chunk_tokens, "slab_bytes": e.slab_bytes,
            "sessions": len(e.claims),
        }
        for e in list(sidecar.sessions.registry.engines.values())
    ]  # fmt: skip


def _sessions(sidecar: Sidecar) -> list[dict[str, object]]:
    if sidecar.sessions is None:
        return []
    now = time.monotonic()
    return [
        {
            "session": s.id, "engine_id": s.attach.engine_id, "role": s.attach.role.value, "rank": s.attach.rank,
            "pid": s.segment.info.client_pid, "transfer": s.lane.transfer.name if s.lane else "",
            "device": s.lane.device if s.lane else "", "in_flight": len(s.table.outstanding), "leases": len(s.leases),
            "age_s": round(now - s.attached_s, 1), "state": state,
        }
        for state, table in (("live", sidecar.sessions.live), ("ending", sidecar.sessions.ending))
        for s in list(table.values())
    ]  # fmt: skip


def _queues(lanes: list[Lane]) -> list[dict[str, object]]:
    """By device: in host memory each worker has a lane of its own."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for lane in lanes:
        threads: tuple[tuple[str, Loader | Writer], ...] = (("load", lane.loader), ("store", lane.writer))
        for name, thread in threads:
            row = rows.setdefault(
                (lane.device, name),
                {"device": lane.device, "queue": name, "jobs": 0, "bytes_in_flight": 0, "alive": True, "lanes": 0},
            )
            row["jobs"] += thread.queued
            row["bytes_in_flight"] += thread.flying_bytes
            row["alive"] &= thread.alive
            row["lanes"] += 1
    return list(rows.values())


def _transfers(sidecar: Sidecar) -> list[dict[str, object]]:
    counters = sidecar.counters
    with counters.lock:
        return [
            {
                "op": op.name.lower(), "tickets": c.tickets, "failed": c.failed, "cancelled": c.cancelled,
                "chunks_asked": c.asked,
                "chunks": c.chunks, "bytes": c.bytes, "seconds": round(c.seconds, 6),
            }
            for op, c in counters.ops.items()
        ]  # fmt: skip


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


# --- metrics ------------------------------------------------------------------------------------------------------------------
def metrics(sidecar: Sidecar) -> list[Metric]:
    """A flat snapshot of counters and gauges."""
    sources = (_daemon_metrics, _cache_metrics, _request_metrics, _queue_metrics, _sharing_metrics)
    return [metric for source in sources for metric in source(sidecar)]


def _daemon_metrics(sidecar: Sidecar) -> Iterator[Metric]:
    yield Metric("maru_info", "gauge", "Version of the sidecar", {"version": __version__, "instance": sidecar.instance}, 1)
    for state in L.SidecarState:
        yield Metric("maru_state", "gauge", "1 for the state the sidecar is in", {"state": state.name}, state is sidecar.state)
    health = sidecar.health()
    yield Metric("maru_healthy", "gauge", "1 while every thread of the daemon is alive", {}, health.good)
    yield Metric("maru_degraded", "gauge", "1 while something from outside is missing; local hits go on", {}, health.degraded)
    yield Metric("maru_uptime_seconds", "gauge", "Time since the start", {}, time.monotonic() - sidecar.started_s)
    yield Metric("maru_connections", "gauge", "Open control connections", {}, len(sidecar.server.connections))
    for code, n in sidecar.server.refusals.counts.items():
        yield Metric("maru_refused_total", "counter", "Connections and control messages refused", {"code": code.value}, n)
    yield Metric(
        "maru_protocol_violations_total", "counter", "Sessions ended for a broken ring or record", {}, sidecar.violations
    )
    for kind, n in (("event", sidecar.poller.failed_handlers), ("deferred", sidecar.poller.failed)):
        yield Metric("maru_handlers_failed_total", "counter", "Calls in the main loop that raised", {"kind": kind}, n)
    yield Metric("maru_descriptors_closing", "gauge", "Clients' descriptors not closed yet", {}, descriptors.pending())
    sessions = list(sidecar.sessions.live.values()) if sidecar.sessions is not None else []
    for role in L.Role:
        n = sum(s.attach.role is role for s in sessions)
        yield Metric("maru_sessions", "gauge", "Attached clients", {"role": role.value}, n)
    engines = len(sidecar.sessions.registry.engines) if sidecar.sessions is not None else 0
    yield Metric("maru_engines", "gauge", "Attached engines", {}, engines)


def _cache_metrics(sidecar: Sidecar) -> Iterator[Metric]:
    stats = _stats(sidecar)
    for key, (name, text) in _POOL_BYTES.items():
        yield Metric(name, "gauge", text, {}, _number(stats.get(key)))
    for key, text in _DIRECTORY.items():
        kind = "counter" if key.endswith("_total") else "gauge"
        yield Metric(f"maru_directory_{key}", kind, text, {}, _number(stats.get(key)))
    prefault = sidecar.prefault.progress() if sidecar.prefault is not None else None
    done, failed = (prefault.done_bytes, bool(prefault.error)) if prefault is not None else (0, False)
    yield Metric("maru_prefault_bytes", "gauge", "Bytes of the pool touched so far", {}, done)
    yield Metric("maru_prefault_failed", "gauge", "1 if touching the pool's pages failed", {}, failed)


def _request_metrics(sidecar: Sidecar) -> Iterator[Metric]:
    counters = sidecar.counters
    with counters.lock:
        ops = [(op.name.lower(), op in _TRANSFERS, c.tickets, c.failed, c.cancelled, c.asked, c.chunks, c.bytes, c.seconds)
               for op, c in counters.ops.items()]  # fmt: skip
        codes = dict(counters.codes)
    for name, moves, tickets, failed, cancelled, asked, chunks, n_bytes, seconds in ops:
        for outcome, n in (("done", tickets - failed - cancelled), ("failed", failed), ("cancelled", cancelled)):
            yield Metric("maru_requests_total", "counter", "Terminal answers", {"op": name, "outcome": outcome}, n)
        labels = {"op": name}
        yield Metric("maru_request_seconds_total", "counter", "Time from posted to answered, summed", labels, seconds)
        yield Metric("maru_request_chunks_asked_total", "counter", "Chunks asked for", labels, asked)
        yield Metric("maru_request_chunks_total", "counter", "Chunks found, loaded or newly stored", labels, chunks)
        if moves:
            yield Metric("maru_transfer_bytes_total", "counter", "Bytes copied", labels, n_bytes)
    for code, n in codes.items():
        if code is not L.Code.OK:
            yield Metric("maru_failures_total", "counter", "Answers by error code", {"code": code.name}, n)


def _queue_metrics(sidecar: Sidecar) -> Iterator[Metric]:
    rows = _queues(_lanes(sidecar))
    rows = rows or [{"device": "cpu", "queue": q, "jobs": 0, "bytes_in_flight": 0} for q in ("load", "store")]
    for row in rows:
        labels = {"device": str(row["device"]), "queue": str(row["queue"])}
        yield Metric("maru_queue_jobs", "gauge", "Transfers queued or running", labels, _number(row["jobs"]))
        yield Metric("maru_in_flight_bytes", "gauge", "Bytes being copied", labels, _number(row["bytes_in_flight"]))
    hanging = sidecar.sessions.hanging if sidecar.sessions is not None else 0
    yield Metric("maru_hanging_engines", "gauge", "Engines whose memory does not answer and holds up a thread", {}, hanging)
    abandoned = sidecar.sessions.abandoned if sidecar.sessions is not None else 0
    yield Metric("maru_abandoned_sessions_total", "counter", "Sessions ended because a copy did not end", {}, abandoned)
    pending = len(sidecar.lanes.pending) if sidecar.lanes is not None else 0
    yield Metric("maru_pending_chunks", "gauge", "Chunks being written", {}, pending)


def _sharing_metrics(sidecar: Sidecar) -> Iterator[Metric]:
    values = _sharing(sidecar)
    for key, (name, text) in _SHARING.items():
        yield Metric(name, "counter" if name.endswith("_total") else "gauge", text, {}, _number(values.get(key)))
