"""``maru-ring``: look at live segments without disturbing them.

Every segment is mapped read-only, so nothing here can change a word of it, and nothing is asked of the sidecar or the
engine: the tool works on a hung pair and on the remains of a dead one.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from maru_shm import __version__
from maru_shm.errors import MaruError, SidecarUnavailable
from maru_sidecar.output import (
    EXIT_CODES_HELP,
    ExitCode,
    Format,
    cell,
    echo_json,
    echo_rows,
    echo_sections,
    format_option,
    one_line,
    run_command,
)

if TYPE_CHECKING:  # numpy and posix_ipc load when a segment is opened, not for --help
    from maru_sidecar.ring_tail import Following
    from maru_sidecar.ring_view import RecordView, SegmentView

PROGRAM = "maru-ring"
LS_COLUMNS = (
    "segment", "role", "sidecar", "client", "state", "head", "tail", "queued", "in_flight", "armed", "sidecar_beat_s",
    "client_beat_s", "step", "fence", "problem",
)  # fmt: skip
RECORD_COLUMNS = (
    "segment", "index", "ticket", "op", "state", "code", "label", "keys", "blocks", "depth", "done", "bytes", "age_s",
    "accept_us", "first_copy_us", "copy_us", "total_us", "cancel", "copying",
)  # fmt: skip
TAIL_FIELDS = ("label", "keys", "done", "bytes", "accept_us", "first_copy_us", "copy_us", "total_us")
STUCK_COLUMNS = ("segment", "index", "ticket", "op", "state", "label", "age_s", "what")

F = TypeVar("F", bound=Callable[..., Any])

segments_argument = click.argument("segments", nargs=-1, metavar="[SEGMENT]...")


def of_one_sidecar(command: F) -> F:
    """``--socket`` or ``--instance``: the segments of one sidecar; those of all on this host without."""
    socket = click.option("--socket", metavar="PATH", help="Only segments of the sidecar that serves this control socket.")
    instance = click.option(
        "--instance", metavar="HEX", callback=_hex, help="Only segments of this instance (8 hex digits, as in their names)."
    )
    return socket(instance(command))


def _hex(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """An instance as in the segments' names."""
    if value is not None and not re.fullmatch(r"[0-9a-fA-F]{8}", value):
        raise click.BadParameter(f"{value!r} is no instance: 8 hex digits, as in a segment's name or `maru-sidecar describe`")
    return value and value.lower()


def _instance(socket: str | None, instance: str | None) -> str | None:
    """The instance that was asked for. A socket's path makes its name: nobody needs to answer there.

    Raises :class:`SidecarUnavailable` for a path where there is no socket, unless a dead sidecar left segments of it: a
    wrong path would look as if all were well.
    """
    if socket is None:
        return instance
    if instance is not None:
        raise click.UsageError("--socket and --instance both name a sidecar: give one of them")
    from maru_shm.segment import list_names
    from maru_sidecar.listener import instance_of

    found = instance_of(socket)
    if (why := _no_socket(socket)) and not any(list_names(found)):
        raise SidecarUnavailable(f"no sidecar at {socket}: {why}; nor has one left segments", "name the right socket")
    return found


def _no_socket(path: str) -> str:
    """Why there is no socket at ``path``; empty if there is one, be it that nobody listens."""
    try:
        return "" if stat.S_ISSOCK(os.stat(path).st_mode) else "it is no socket"
    except OSError as e:
        return e.strerror or str(e)


@click.group(epilog=EXIT_CODES_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Look at the shared-memory rings of sidecars and their engines, read-only.

    A SEGMENT is a name as `ls` prints it, or the session number at its end where only one segment has it. Without one,
    every readable segment is meant: of all sidecars on this host, or of the one that --socket or --instance names.
    """


@cli.command("ls")
@of_one_sidecar
@format_option
def ls(socket: str | None, instance: str | None, fmt: Format) -> None:
    """List segments with their processes, ring positions and beats; one that cannot be read with its problem."""
    from maru_sidecar.ring_view import open_all

    rows: list[dict[str, object]] = []
    for name, opened in open_all(_instance(socket, instance)):
        if isinstance(opened, MaruError):
            rows.append({"segment": name, "problem": one_line(opened)})
            continue
        with opened as view:
            rows.append(view.summary() | {"problem": ""})
    echo_rows(rows, fmt, LS_COLUMNS, empty="no segments")


@cli.command("show")
@click.argument("segment")
@format_option
def show(segment: str, fmt: Format) -> None:
    """One segment's header in full, and how many records are in which state."""
    from maru_sidecar.ring_view import open_named, resolve

    with open_named(resolve(segment)) as view:
        echo_sections(view.details(), fmt)


@cli.command("records")
@segments_argument
@click.option("--all", "everything", is_flag=True, help="Also freed records: their last answer is still there.")
@of_one_sidecar
@format_option
def records(segments: tuple[str, ...], socket: str | None, instance: str | None, *, everything: bool, fmt: Format) -> None:
    """Requests in the record tables, with the time each step took.

    accept_us: posted to accepted. first_copy_us: accepted to the first copy. copy_us: first copy (or acceptance, where
    nothing was copied) to the answer. total_us: posted to the answer.
    """
    found: list[RecordView] = []
    for view in _views(segments, _instance(socket, instance)):
        with view:
            found += [r for r in view.records() if r.ticket and (everything or r.live)]
    found.sort(key=lambda r: (r.segment, r.ticket))
    echo_rows([r.row() for r in found], fmt, RECORD_COLUMNS[len(segments) == 1 :], empty="no records")


@cli.command("tail")
@segments_argument
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many requests.")
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop after this long.")
@of_one_sidecar
@format_option
def tail(
    segments: tuple[str, ...],
    socket: str | None,
    instance: str | None,
    *,
    count: int | None,
    seconds: float | None,
    fmt: Format,
) -> None:
    """Follow requests as they complete: until interrupted, --count or --seconds. JSON: one document per line.

    Segments of engines that start meanwhile are followed too, those that vanish no more; while there is none it waits. With
    SEGMENTs named it ends when they are gone: none comes back.

    Looks every 2 ms; a record that is used again in between is not seen. The engine is never slowed down for this.
    """
    from maru_sidecar.ring_tail import Following
    from maru_sidecar.ring_view import resolve

    asked = _instance(socket, instance)
    following = Following(
        asked, [resolve(text, asked) for text in segments], lambda said: click.echo(f"{PROGRAM}: {said}", err=True)
    )
    for printed, record in enumerate(_completions(following, seconds), start=1):
        row = record.row()
        if fmt == "json":
            echo_json(row, compact=True)
        else:
            fields = " ".join(f"{k}={cell(row[k])}" for k in TAIL_FIELDS)
            click.echo(f"{record.segment} {record.op} {record.state} {record.code} {fields}")
        sys.stdout.flush()
        if printed == count:
            return


def _completions(following: Following, seconds: float | None) -> Iterator[RecordView]:
    from maru_sidecar.ring_tail import POLL_S

    end = time.monotonic() + seconds if seconds is not None else float("inf")
    with following:
        while True:
            yield from following.completed()
            if following.over or time.monotonic() >= end:
                return
            time.sleep(POLL_S)


@cli.command("stuck")
@of_one_sidecar
@click.option("--seconds", type=click.FloatRange(min=0), default=5.0, show_default=True, help="A ticket this old is stuck.")
@format_option
def stuck(socket: str | None, instance: str | None, seconds: float, fmt: Format) -> None:
    """List what does not move: old tickets, copies left open, dead processes. Exit 3 if any.

    A segment that cannot be read is listed too; exit 6 if that is all there is to say.
    """
    from maru_sidecar.ring_view import open_all

    rows: list[dict[str, object]] = []
    unreadable: list[dict[str, object]] = []
    for name, opened in open_all(_instance(socket, instance)):
        if isinstance(opened, MaruError):
            unreadable.append({"segment": name, "what": one_line(opened)})
            continue
        with opened as view:
            rows += view.stuck(seconds)
    echo_rows(rows + unreadable, fmt, STUCK_COLUMNS, empty="nothing is stuck")
    if rows or unreadable:
        sys.exit(ExitCode.STUCK if rows else ExitCode.SEGMENT)


def _views(segments: Sequence[str], instance: str | None) -> Iterator[SegmentView]:
    """The named segments, which must be readable; or all (of an instance), those that are not reported on stderr and passed
    over.
    """
    from maru_sidecar.ring_view import open_all, open_named, resolve

    for text in segments:
        yield open_named(resolve(text, instance))
    if not segments:
        for name, opened in open_all(instance):
            if isinstance(opened, MaruError):
                click.echo(f"{PROGRAM}: {name}: {one_line(opened)}", err=True)
            else:
                yield opened


def main() -> None:
    """Entry point of ``maru-ring``."""
    run_command(cli, PROGRAM)


if __name__ == "__main__":
    main()
