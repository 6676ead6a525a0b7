"""What ``maru-sidecar status`` shows unless it is asked for more: about a screenful of the sections in ``status.py``.

It is made from the sections as they came over the socket, possibly from another release: what is missing there is left out
here. A counter of trouble appears once it is not zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from maru_sidecar.output import human_bytes

ROWS = 8  #: of a table; the rest is counted
_TROUBLE = {
    "sidecar": (
        "connections_refused", "protocol_violations", "deferred_calls_failed", "engines_abandoned", "engines_hanging",
        "handlers_failed",
    ),
    "directory": ("dropped_bad_total", "full_total", "leases_expired_total"),
    "cache": ("lookups_not_registered",),
}  # fmt: skip
_ENGINE = ("engine_id", "label", "world", "registered", "complete", "chunk_tokens", "sessions")
_QUEUE = ("device", "queue", "jobs", "bytes_in_flight", "alive")
_TRANSFER = ("op", "tickets", "failed", "cancelled", "chunks", "bytes")
#: of a shared pool; the counters are in the section itself
_SHARING = (
    "node", "server", "state", "can_store", "cannot_store_because", "regions", "regions_writable", "regions_lost",
    "last_error", "last_error_age_s", "past_error", "past_error_age_s",
)  # fmt: skip


def summary(sections: Mapping[str, object]) -> dict[str, object]:
    """Sections of the same shape as a status, fewer and shorter."""
    shown = {
        "sidecar": _sidecar(sections),
        "pool": _pool(sections),
        "cache": _cache(sections),
        "sharing": _sharing(_values(sections, "sharing")),
        "engines": _rows(_list(sections, "engines"), _ENGINE),
        "queues": _rows([row for row in _list(sections, "queues") if row.get("jobs") or row.get("alive") is False], _QUEUE),
        "transfers": _rows([row for row in _list(sections, "transfers") if row.get("tickets")], _TRANSFER),
        "failures": dict(_values(sections, "failures")),
        "refusals": dict(_values(sections, "refusals")),
    }  # fmt: skip
    return {name: value for name, value in shown.items() if value}


def _values(sections: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = sections.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(sections: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    value = sections.get(name)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list | tuple) else []


def _picked(values: Mapping[str, object], keys: Iterable[str]) -> dict[str, object]:
    return {key: values[key] for key in keys if key in values}


def _trouble(sections: Mapping[str, object], name: str) -> dict[str, object]:
    return {key: n for key, n in _picked(_values(sections, name), _TROUBLE[name]).items() if n}


def _sidecar(sections: Mapping[str, object]) -> dict[str, object]:
    values = _values(sections, "sidecar")
    return _picked(values, ("version", "pid", "state", "health", "uptime_s", "socket")) | _trouble(sections, "sidecar")


def _pool(sections: Mapping[str, object]) -> dict[str, object]:
    values = _values(sections, "pool")
    shown = _picked(values, ("path",))
    used, total = values.get("bytes_used"), values.get("bytes_total")
    if isinstance(used, int) and isinstance(total, int) and total:
        shown["used"] = f"{human_bytes(used)} of {human_bytes(total)} ({100 * used / total:.0f} %)"
    if slabs := _slabs(_values(sections, "directory")):
        shown["slabs"] = slabs
    opened, wanted = values.get("opening_bytes"), values.get("opening_total_bytes")
    if isinstance(opened, int) and isinstance(wanted, int):
        shown["opening"] = f"{human_bytes(opened)} of {human_bytes(wanted)}"
    shown |= _picked(values, ("prefault", "prefault_error"))
    return shown | {key: value for key, value in _picked(values, ("warnings",)).items() if value}


def _slabs(directory: Mapping[str, object]) -> list[str]:
    """By size: those taken, of those there are and could be in empty regions. Eviction goes by them; a region's last bytes, too
    few for a slab, keep the bytes below 100 %."""
    empty = _count(directory, "regions_free")
    classes = [(_count(row, "stride"), _count(row, "regions"), _count(row, "slabs"), _count(row, "used"))
               for row in _list(directory, "size_classes")]  # fmt: skip
    shown = []
    for stride, regions, slabs, used in sorted((c for c in classes if c[1] and c[2]), key=lambda c: -c[2])[:ROWS]:
        total = slabs + empty * (slabs // regions)
        shown.append(f"{used} of {total} of {human_bytes(stride)} ({100 * used / total:.0f} %)")
    return shown


def _count(values: Mapping[str, object], key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) else 0


def _cache(sections: Mapping[str, object]) -> dict[str, object]:
    directory = _values(sections, "directory")
    shown = {
        **_picked(directory, ("chunks",)),
        **_picked(_values(sections, "cache"), ("hit_ratio", "load_success_ratio")),
        **_picked(directory, ("pins", "leases", "evicted_total")),
    }
    return shown | _trouble(sections, "directory") | _trouble(sections, "cache")


def _sharing(values: Mapping[str, object]) -> dict[str, object]:
    """Whatever says why something does not work is text under a key that depends on what it is: no text is left out."""
    texts = {key: value for key, value in values.items() if key not in _SHARING and isinstance(value, str) and value}
    return _picked(values, _SHARING) | texts


def _rows(rows: list[Mapping[str, object]], columns: Iterable[str]) -> list[dict[str, object]]:
    return [_picked(row, columns) for row in rows[:ROWS]]


def left_out(sections: Mapping[str, object]) -> str:
    """The line under the summary: what there is beside it."""
    more = [f"{len(rows) - ROWS} more {name}" for name in ("engines", "queues") if len(rows := _list(sections, name)) > ROWS]
    return "; ".join([*more, f"everything: --all; one section: --section {'|'.join(sections)}"])
