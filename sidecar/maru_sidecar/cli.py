"""``maru-sidecar``: run the daemon, ask it, drain it, look at its cache, examine the machine.

Every module is imported by the command that needs it: ``--help`` costs click and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from maru_shm import __version__
from maru_shm.socket_path import SEARCH, default_socket_path
from maru_sidecar import pool_cli
from maru_sidecar.output import (
    EXIT_CODES_HELP,
    ExitCode,
    Format,
    echo_json,
    echo_rows,
    echo_sections,
    format_option,
    run_command,
)

if TYPE_CHECKING:
    from maru_sidecar.admin import AdminClient
    from maru_sidecar.config import Config

PROGRAM = "maru-sidecar"
ALL = "all"  #: as a section's name
CHUNK_COLUMNS = ("namespace", "key", "ranks", "world", "bytes", "tokens", "leases", "pinned", "age_s")
F = TypeVar("F", bound=Callable[..., Any])

socket_option = click.option("--socket", metavar="PATH", help=f"Control socket (default: {SEARCH}).")
timeout_option = click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Seconds to wait for each answer."
)
config_option = click.option("--config", metavar="FILE", help="TOML configuration file (default: $MARU_CONFIG).")


def admin_options(command: F) -> F:
    """What every command that asks the sidecar takes: ``--socket``, ``--timeout``, ``--format``."""
    return socket_option(timeout_option(format_option(command)))


@contextmanager
def connected(socket: str | None, timeout: float) -> Iterator[AdminClient]:
    """An admin connection for one command."""
    from maru_sidecar.admin import AdminClient

    with AdminClient.connect(socket or default_socket_path(), timeout, f"{PROGRAM}-cli/{__version__}") as client:
        yield client


@click.group(epilog=EXIT_CODES_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Keep the KV cache of this node's LLM engines in shared memory."""


# --- the daemon -----------------------------------------------------------------------------------------------------------
#: flag, dotted configuration key, help. Values are checked where the file's and the environment's are: in load_config.
RUN_FLAGS = (
    ("--pool-backend", "pool.backend", "Where the pool lies: shm, file or devdax."),
    ("--pool-path", "pool.path", "Pool file or device, an absolute path; one component is a name in /dev/shm."),
    ("--pool-size", "pool.size", "Pool size, e.g. 64GiB."),
    ("--numa-node", "pool.numa_node", "NUMA node the pool's memory comes from."),
    ("--socket", "control.socket", f"Control socket, an absolute path (default: {SEARCH})."),
    ("--socket-mode", "control.mode", "Permission bits of the socket, octal."),
    ("--socket-group", "control.group", "Group that owns the socket."),
    ("--allow-uid", "control.allowed_uids", "Uids that may attach, comma-separated."),
    ("--allow-gid", "control.allowed_gids", "Gids that may attach, comma-separated."),
    ("--high-watermark", "cache.high_watermark", "Share of the slabs of one size above which a store evicts."),
    ("--low-watermark", "cache.low_watermark", "Share of those slabs down to which it evicts."),
    ("--lease-ttl", "cache.lease_ttl_s", "Seconds a hit stays pinned unless it is given back."),
    ("--checksum", "transfer.checksum", "auto, on or off."),
    ("--cpu-threads", "transfer.cpu_threads", "Copying threads for CPU engines; 0: by cores."),
    ("--fence-timeout", "transfer.fence_timeout_s", "Seconds to wait for an engine's fence."),
    ("--max-engines", "limits.max_engines", "Engines that may be attached at once."),
    ("--spin-us", "daemon.spin_us", "Microseconds the poller spins before it sleeps."),
    ("--drain-timeout", "daemon.drain_timeout_s", "Seconds given to work in flight at SIGTERM."),
    ("--http", "http.address", "host:port for health and metrics (off unless given)."),
    ("--log-level", "daemon.log_level", "debug, info, warning or error."),
)


def run_flags(command: F) -> F:
    for flag, key, text in reversed(RUN_FLAGS):
        command = click.option(flag, key.replace(".", "__"), metavar="VALUE", help=f"{text}  [{key}]")(command)
    return command


@cli.command("run", epilog=EXIT_CODES_HELP)
@config_option
@run_flags
@click.option(
    "--pool-recreate", "pool__recreate", is_flag=True, default=None, help="Drop an existing pool first  [pool.recreate]."
)
@click.option("--set", "assignments", metavar="KEY=VALUE", multiple=True, help="Any other setting, e.g. limits.max_keys=4096.")
@click.option("--check", is_flag=True, help="Print the configuration in effect as JSON, and what it lacks here; exit.")
def run(config: str | None, assignments: tuple[str, ...], *, check: bool, **flags: str | bool | None) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    A setting comes from its flag, else from MARU_<SECTION>_<KEY>, else from the file, else from the default. SIGTERM drains:
    no new work is accepted, work in flight ends, the pool keeps its chunks.
    """
    loaded = _configuration(config, flags, assignments)
    if check:
        from maru_sidecar.config import printable

        echo_json(printable(loaded))
        _check_settings(loaded)
        return
    from maru_sidecar.daemon import run_foreground

    sys.exit(run_foreground(loaded))


def _check_settings(config: Config) -> None:
    """Tell what `run` would warn about or refuse, the pool left alone. Exit 2 if it would refuse, as it does."""
    from maru_sidecar.doctor import SETTINGS, Host, Verdict, examine

    found = [f for f in examine(Host.of(config), SETTINGS) if f.verdict is not Verdict.OK]
    for finding in found:
        click.echo(f"{PROGRAM}: {finding.what}; {finding.remedy}", err=True)
    if any(finding.verdict is Verdict.BAD for finding in found):
        sys.exit(ExitCode.USAGE)


def _configuration(path: str | None, flags: Mapping[str, str | bool | None], assignments: tuple[str, ...] = ()) -> Config:
    from maru_shm.errors import ConfigError
    from maru_sidecar.config import load_config

    given: dict[str, object] = {key.replace("__", "."): value for key, value in flags.items()}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}", "write KEY=VALUE, e.g. --set limits.max_keys=4096")
        given[key.strip()] = value.strip()
    return load_config(path, flags=given)


# --- asking the daemon ------------------------------------------------------------------------------------------------------
@cli.command("ping")
@admin_options
def ping(socket: str | None, timeout: float, fmt: Format) -> None:
    """Is a sidecar there, and in which state? Exit 4 if none answers."""
    with connected(socket, timeout) as client:
        state = client.ping()
        if fmt == "json":
            echo_json({"state": state, "server": client.welcome.server, "pid": client.welcome.pid})
        else:
            click.echo(f"{client.welcome.server} (pid {client.welcome.pid}) is {state}")


@cli.command("status")
@admin_options
@click.option(
    "--section", "only", multiple=True, metavar="NAME", help="Only this section, in full (repeatable); `all`: as --all."
)
@click.option("--all", "everything", is_flag=True, help="Every section in full, about 100 lines.")
def status(socket: str | None, timeout: float, fmt: Format, only: tuple[str, ...], *, everything: bool) -> None:
    """The state of pool, cache, engines and queues on one screen; --all shows every counter. JSON is always complete."""
    from maru_shm.errors import ConfigError
    from maru_sidecar.status_summary import left_out, summary

    with connected(socket, timeout) as client:
        sections = client.status()
    everything = everything or ALL in only
    if missing := [name for name in only if name not in sections and name != ALL]:
        raise ConfigError(f"no section {missing[0]!r}", "there are: " + ", ".join([*sections, ALL]))
    if only and not everything:
        echo_sections({k: v for k, v in sections.items() if k in only}, fmt)
    elif everything or fmt == "json":
        echo_sections(sections, fmt)
    else:
        echo_sections(summary(sections), fmt)
        click.echo(f"\n{left_out(sections)}")


@cli.command("describe")
@admin_options
def describe(socket: str | None, timeout: float, fmt: Format) -> None:
    """Who answers on the socket: version, process, generation, state, and its segments."""
    from maru_shm.segment import list_names

    with connected(socket, timeout) as client:
        welcome, state = client.welcome, client.ping()
    mine = [name for name, _, generation, _ in list_names(welcome.instance) if generation == welcome.generation]
    sidecar = {
        "server": welcome.server, "pid": welcome.pid, "state": state, "protocol": welcome.protocol,
        "instance": welcome.instance, "generation": f"{welcome.generation:016x}",
    }  # fmt: skip
    echo_sections({"sidecar": sidecar, "segments": mine}, fmt)


@cli.command("drain")
@admin_options
def drain(socket: str | None, timeout: float, fmt: Format) -> None:
    """Refuse new work and finish what is in flight. The process stays until it is told to stop (SIGTERM)."""
    with connected(socket, timeout) as client:
        client.drain()
        state = client.ping()
    echo_json({"state": state}) if fmt == "json" else click.echo(state)


# --- the cache --------------------------------------------------------------------------------------------------------------
@cli.group("cache")
def cache() -> None:
    """Look at cached chunks, drop them, keep them."""


@cache.command("ls")
@admin_options
@click.option("--namespace", default="", metavar="HEX", help="Only this namespace.")
@click.option("--after", default="", metavar="KEY", help="Start after this key: the last one of the page before.")
@click.option("--limit", type=click.IntRange(min=1), default=500, show_default=True, help="At most this many chunks.")
def cache_ls(socket: str | None, timeout: float, fmt: Format, *, namespace: str, after: str, limit: int) -> None:
    """List chunks ordered by key."""
    import msgspec

    with connected(socket, timeout) as client:
        rows = [msgspec.to_builtins(chunk) for chunk in client.cache_list(namespace, after, limit)]
    echo_rows(rows, fmt, CHUNK_COLUMNS, empty="no chunks")
    if fmt == "table" and len(rows) == limit:
        click.echo(f"there may be more: --after {rows[-1]['key']}{rows[-1]['namespace']}", err=True)


@cache.command("clear")
@admin_options
@click.option("--namespace", metavar="HEX", help="Chunks of this namespace.")
@click.option("--engine", "engine_id", metavar="ID", help="Chunks of the namespace this engine uses.")
@click.option("--all", "everything", is_flag=True, help="Every chunk.")
def cache_clear(
    socket: str | None, timeout: float, fmt: Format, namespace: str | None, engine_id: str | None, *, everything: bool
) -> None:
    """Drop chunks. What is pinned, leased or in flight stays, and so does every chunk ahead of it in its prefix."""
    if sum((namespace is not None, engine_id is not None, everything)) != 1:
        raise click.UsageError("say what to clear: exactly one of --namespace, --engine, --all")
    if "" in (namespace, engine_id):  # on the wire an empty name means all
        raise click.UsageError("a namespace or engine id is not empty; to clear everything say --all")
    with connected(socket, timeout) as client:
        done = client.cache_clear(namespace or "", engine_id or "")
    if fmt == "json":
        echo_json({"dropped": done.n, "kept": done.left})
        return
    kept = f", {done.left} kept: pinned, leased, or ahead of a chunk that is" if done.left else ""
    click.echo(f"{done.n} chunks dropped{kept}")


def pin_arguments(command: F) -> F:
    """``NAMESPACE KEY...``. Click would only miss KEYS where somebody gave one word, a key."""
    namespace = click.argument("namespace", required=False, default="", metavar="NAMESPACE")
    return namespace(click.argument("keys", nargs=-1, metavar="KEY...")(command))


@cache.command("pin", epilog=EXIT_CODES_HELP)
@admin_options
@pin_arguments
def cache_pin(socket: str | None, timeout: float, fmt: Format, namespace: str, keys: tuple[str, ...]) -> None:
    """Exclude chunks from eviction until they are unpinned; `-` reads keys from standard input.

    NAMESPACE and KEY name a chunk as `cache ls` lists it. Pins are kept in the pool: they outlive the sidecar as the chunks do.
    A pin counts: unpin a chunk as often as it was pinned.

    Stops at the first KEY that is absent, names it and exits with 10; the chunks before it stay pinned.
    """
    wanted = _keys(keys)
    with connected(socket, timeout) as client:
        n = client.pin(namespace, wanted)
    _report_pins("pinned", n, 0, wanted, fmt)


@cache.command("unpin", epilog=EXIT_CODES_HELP)
@admin_options
@pin_arguments
def cache_unpin(socket: str | None, timeout: float, fmt: Format, namespace: str, keys: tuple[str, ...]) -> None:
    """Undo one `cache pin` of each chunk; `-` reads keys from standard input. A chunk without a pin is counted as such.

    Stops at the first KEY that is absent, names it and exits with 10; the chunks before it are unpinned.
    """
    wanted = _keys(keys)
    with connected(socket, timeout) as client:
        done = client.unpin(namespace, wanted)
    _report_pins("unpinned", done.n, done.left, wanted, fmt)


def _report_pins(what: str, n: int, bare: int, wanted: list[str], fmt: Format) -> None:
    """``n`` leading keys of ``wanted`` were there; ``bare`` of them had no pin to undo."""
    missing = wanted[n] if n < len(wanted) else None
    if fmt == "json":
        found = {what: n - bare, "asked": len(wanted), "not_found": missing, "not_tried": max(0, len(wanted) - n - 1)}
        echo_json(found | ({"not_pinned": bare} if what == "unpinned" else {}))
    else:
        unpinned = f"; {bare} {'was' if bare == 1 else 'were'} not pinned" if bare else ""
        click.echo(f"{n - bare} of {len(wanted)} chunks {what}{unpinned}")
    if missing is not None:
        rest = f"; not tried: {len(wanted) - n - 1}" if n + 1 < len(wanted) else ""
        click.echo(f"{PROGRAM}: {missing} is not in the pool{rest}", err=True)
        sys.exit(ExitCode.NOT_FOUND)


def _keys(given: tuple[str, ...]) -> list[str]:
    """Keys from the command line; ``-`` stands for those on standard input."""
    if not given:
        raise click.UsageError("give NAMESPACE and then at least one KEY: together they name a chunk, as `cache ls` lists it")
    return [key for word in given for key in (sys.stdin.read().split() if word == "-" else [word])]


# --- shared pools -----------------------------------------------------------------------------------------------------------
cli.add_command(pool_cli.pool)


# --- the machine ------------------------------------------------------------------------------------------------------------
@cli.command("doctor", epilog=EXIT_CODES_HELP)
@config_option
@click.option("--pool-path", "pool__path", metavar="PATH", help="Pool to examine for  [pool.path].")
@click.option("--pool-size", "pool__size", metavar="SIZE", help="Its size, e.g. 64GiB  [pool.size].")
@click.option("--socket", "control__socket", metavar="PATH", help=f"Control socket (default: {SEARCH})  [control.socket].")
@click.option("--fix", is_flag=True, help="Unlink segments whose sidecar and engine are dead, and only those.")
@format_option
def doctor(config: str | None, fmt: Format, *, fix: bool, **flags: str | None) -> None:
    """Examine this machine for the configuration that `run` would use. Exit 1 if anything is bad."""
    from maru_sidecar.doctor import Host, Verdict, examine
    from maru_sidecar.stale import remove_stale

    loaded = _configuration(config, flags)
    if fix:
        for name in remove_stale():
            click.echo(f"unlinked {name}", err=True)
    host = Host.of(loaded)
    findings = examine(host)
    echo_rows([f.row() for f in findings], fmt, ("verdict", "check", "what", "remedy"))
    if any(f.verdict is Verdict.BAD for f in findings):
        sys.exit(ExitCode.PROBLEMS)


@cli.command("version")
@format_option
def version(fmt: Format) -> None:
    """Versions of the program and of everything it shares with others."""
    import platform

    from maru_shm import layout, messages, poolformat

    values = {
        "maru-sidecar": __version__, "protocol": f"{messages.PROTOCOL_MIN}-{messages.PROTOCOL}",
        "segment_abi": f"{layout.ABI_MAJOR}.{layout.ABI_MINOR}", "pool_format": poolformat.FORMAT,
        "python": platform.python_version(),
    }  # fmt: skip
    if fmt == "json":
        echo_json(values)
    else:
        for name, value in values.items():
            click.echo(f"{name} {value}")


def main() -> None:
    """Entry point of ``maru-sidecar``."""
    run_command(cli, PROGRAM)


if __name__ == "__main__":
    main()
