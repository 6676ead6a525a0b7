"""Rows of the table as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = (
    ("populate 1", "populate", 1), ("own hit", "own-hit", 1), ("hit 1", "hit", 1), ("hit 4", "hit", 4), ("hit 8", "hit", 8),
    ("populate 8", "populate", 8), ("suffix", "suffix", 1),
)  # fmt: skip


def summary(rows: Mapping[str, Any]) -> str:
    """A row a line: TTFT mean (p50 / p90) and TPOT in ms, output tokens per second, tokens cached, answers as in own hit."""
    return "\n".join(_line(name, row) for name, row in rows.items())


def _line(name: str, row: Mapping[str, Any]) -> str:
    parts = [name]
    if "engine_start_s" in row:
        parts.append(f"start {row['engine_start_s']:.1f} s ({row['ready_s']:.1f} from the process's)")
    if "server_start_s" in row:
        parts.append(f"server {row['server_start_s']} s")
    for title, what, in_flight in COLUMNS:
        p = find(row, what, in_flight)
        if p is None:
            continue
        text = (
            f"{title}: {p['ttft_mean_ms']:.1f} ({p['ttft_p50_ms']:.1f} / {p['ttft_p90_ms']:.1f}), {p['tpot_mean_ms']:.2f},"
            f" {p['tokens_per_s']:.0f} tok/s, cached {p['cached_tokens_mean']:.0f}"
        )
        if p["same_as_reference"] is not None:
            text += f", same {p['same_as_reference']}/{p['n']}"
        parts.append(text + (f", FAILED {p['failures']}" if p["failures"] else ""))
    if "failed" in row:
        parts.append(f"FAILED: {row['failed']}")
    return f"{' | '.join(parts)} | {row.get('row_s', 0)} s"


def find(row: Mapping[str, Any], what: str, in_flight: int) -> Mapping[str, Any] | None:
    """The figures of one pass of a row, if it got there."""
    return next((p for p in row.get("passes", ()) if (p["pass"], p["in_flight"]) == (what, in_flight)), None)


def hidden_share(rows: Mapping[str, Any]) -> str:
    """How much of a load overlap hides: 1 - (overlapped - engine only) / (deferred - engine only), of the suffix pass."""
    found = [find(rows.get(name, {}), "suffix", 1) for name in ("engine_only", "maru", "maru_overlap")]
    if None in found:
        return "share of the load time hidden by overlap: not measured (engine_only, maru and maru_overlap with --suffix)"
    texts = []
    for key in ("ttft_mean_ms", "ttft_p50_ms"):
        floor, deferred, overlapped = (p[key] for p in found if p is not None)
        share = 1 - (overlapped - floor) / (deferred - floor) if deferred > floor else float("nan")
        texts.append(f"{share:.0%} by {key} ({floor:.1f} engine only, {deferred:.1f} deferred, {overlapped:.1f} overlapped)")
    return "share of the load time hidden by overlap: " + "; ".join(texts)
