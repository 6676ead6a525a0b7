"""Counters for vLLM's own log line and metrics: sums since the last report, aggregated over ranks."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

MIB = 1 << 20


class MaruStats(KVConnectorStats):  # type: ignore[misc]
    """``data`` maps a counter's name to its sum; times in seconds, sizes in bytes."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = dict(data or {})

    def add(self, **counts: float) -> None:
        for name, n in counts.items():
            self.data[name] = self.data.get(name, 0) + n

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        out: dict[str, int | float] = {}
        for name in sorted(self.data):
            if not name.endswith(("_bytes", "_seconds")):
                out[name.replace("_", " ")] = self.data[name]
        for what in ("load", "store"):
            if n_bytes := self.data.get(f"{what}_bytes"):
                out[f"{what} MiB"] = round(n_bytes / MIB, 1)
                if seconds := self.data.get(f"{what}_seconds"):
                    out[f"{what} MiB/s"] = round(n_bytes / MIB / seconds, 1)
        return out
