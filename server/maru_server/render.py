"""Rows as a table for people, JSON or CSV for programs."""

from __future__ import annotations

import csv
import enum
import io
from collections.abc import Sequence

import msgspec

Row = dict[str, object]


class Format(enum.StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def rows_of(items: Sequence[msgspec.Struct]) -> list[Row]:
    return [msgspec.structs.asdict(item) for item in items]


def render(rows: Sequence[Row], form: Format, columns: Sequence[str] = ()) -> str:
    """Text without a final newline. ``columns`` names them where there are no rows."""
    names = list(rows[0]) if rows else list(columns)
    if form is Format.JSON:
        return msgspec.json.format(msgspec.json.encode(list(rows)), indent=2).decode()
    cells = [[str(row[name]) for name in names] for row in rows]
    if form is Format.CSV:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([names, *cells])
        return out.getvalue().rstrip("\n")
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    numeric = [bool(rows) and all(isinstance(row[name], int | float) for row in rows) for name in names]
    lines = []
    for line in [names, *cells]:
        aligned = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
