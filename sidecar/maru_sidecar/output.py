"""What the commands print: a table for people or JSON for programs, from the same plain values; errors as one line.

Exit codes are part of the interface and are the same in every command.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar

import click

from maru_shm import errors as E

Format = Literal["table", "json"]
F = TypeVar("F", bound=Callable[..., Any])


class ExitCode(enum.IntEnum):
    """Process exit codes of ``maru-sidecar`` and ``maru-ring``."""

    OK = 0
    PROBLEMS = 1  #: `doctor` found something bad, or an error without a code of its own
    USAGE = 2  #: a flag, the configuration file or the environment is wrong
    STUCK = 3  #: `maru-ring stuck` found something
    UNAVAILABLE = 4  #: no sidecar answers
    REFUSED = 5  #: the sidecar understood and refused
    SEGMENT = 6  #: a segment cannot be read
    POOL = 7  #: the pool cannot be used
    PLATFORM = 8  #: this machine lacks what correctness needs
    BUSY = 9  #: another sidecar has the pool or serves the socket
    NOT_FOUND = 10  #: `cache pin` or `unpin` met a key that is not in the pool
    INTERRUPTED = 130


EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 problems found or another error; 2 wrong flag or configuration; 3 stuck tickets; 4 no sidecar "
    "answers; 5 the sidecar refused; 6 a segment cannot be read; 7 the pool cannot be used; 8 this machine is not supported; "
    "9 another sidecar has the pool or the socket; 10 a key to pin or unpin is not in the pool."
)

_CODES: tuple[tuple[type[E.MaruError], ExitCode], ...] = (
    (E.ConfigError, ExitCode.USAGE),
    (E.SidecarUnavailable, ExitCode.UNAVAILABLE),
    (E.AttachRefused, ExitCode.REFUSED),
    (E.ProtocolVersionMismatch, ExitCode.REFUSED),
    (E.SegmentError, ExitCode.SEGMENT),
    (E.PoolBusy, ExitCode.BUSY),
    (E.SocketBusy, ExitCode.BUSY),
    (E.PoolError, ExitCode.POOL),
    (E.PlatformUnsupported, ExitCode.PLATFORM),
)


def exit_code(error: E.MaruError) -> ExitCode:
    """The exit code an error ends a command with."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.PROBLEMS)


def one_line(error: E.MaruError) -> str:
    """``what; remedy`` on a single line."""
    return " ".join(str(error).split())


def run_command(command: click.Command, program: str) -> NoReturn:
    """Run a click command as the process: errors become one line on stderr and an exit code, never a traceback."""
    try:
        code = command.main(prog_name=program, standalone_mode=False)
    except E.MaruError as e:
        click.echo(f"{program}: {one_line(e)}", err=True)
        code = exit_code(e)
    except click.ClickException as e:
        e.show()
        code = e.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = ExitCode.INTERRUPTED
    sys.exit(code if isinstance(code, int) else ExitCode.OK)


def format_option(command: F) -> F:
    """``--format json|table``."""
    return click.option(
        "--format", "fmt", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
    )(command)


def echo_json(value: object, *, compact: bool = False) -> None:
    """One JSON document; on one line if ``compact`` (a stream of records)."""
    indent = None if compact else 2
    click.echo(json.dumps(value, indent=indent, default=str, sort_keys=False))


def echo_rows(rows: Sequence[Mapping[str, object]], fmt: Format, columns: Sequence[str] = (), empty: str = "none") -> None:
    """A list of records: aligned columns under their names, or a JSON array."""
    if fmt == "json":
        echo_json(list(rows))
    elif not rows:
        click.echo(empty)
    else:
        names = list(columns) or list(rows[0])
        for line in table(names, [[cell(row.get(name)) for name in names] for row in rows]):
            click.echo(line)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns two blanks apart; numbers right-aligned. The last column is not padded."""
    widths = [max(len(r[i]) for r in [list(header), *rows]) for i in range(len(header))]
    numeric = [bool(rows) and all(_is_number(r[i]) for r in rows) for i in range(len(header))]
    lines = []
    for row in [list(header), *rows]:
        cells = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(".", "", 1).replace("-", "", 1).isdigit()


def cell(value: object) -> str:
    """A value as a table shows it: ``-`` for nothing, yes/no for booleans, no more digits than matter."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return " ".join(f"{k}={cell(v)}" for k, v in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ",".join(cell(v) for v in value) or "-"
    return str(value)


def echo_sections(sections: Mapping[str, object], fmt: Format) -> None:
    """Named sections of plain values (the sidecar's status): a block per section, a table where it holds records."""
    if fmt == "json":
        echo_json(sections)
        return
    for i, (name, value) in enumerate(sections.items()):
        if i:
            click.echo()
        click.echo(f"{name}:")
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            columns = list(dict.fromkeys(key for row in value for key in row))
            lines = table(columns, [[cell(row.get(c)) for c in columns] for row in value])
        elif isinstance(value, Mapping):
            width = max((len(str(k)) for k in value), default=0)
            lines = [f"{k!s:<{width}}  {cell(v)}" for k, v in value.items()] or ["-"]
        else:
            lines = [cell(value)]
        for line in lines:
            click.echo(f"  {line}")


def human_bytes(n: float) -> str:
    """Bytes with a binary unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
