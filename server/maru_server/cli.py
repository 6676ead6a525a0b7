"""``maru-server``: run the metadata server, and look at one."""

from __future__ import annotations

import enum
import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from maru_server import __version__
from maru_server import protocol as P
from maru_server.auth import new_token, read_token, token_in
from maru_server.backend import Backend
from maru_server.client import DirectoryClient
from maru_server.cluster_state import PIN_FLOOR_MS, Settings
from maru_server.connection import DEFAULT_ENDPOINT, default_endpoint
from maru_server.errors import ServerRefused, ServerUnavailable
from maru_server.extra import REMEDY, is_missing
from maru_server.memory import MemoryBackend
from maru_server.render import Format, Row, render, rows_of
from maru_server.server import Server, stop_on_signals
from maru_shm.errors import ConfigError, MaruError
from maru_shm.http import parse_address
from maru_shm.layout import KEY_BYTES

_FORMAT = click.option("--format", "form", type=click.Choice([f.value for f in Format]), default="table", show_default=True)


class ExitCode(enum.IntEnum):
    """Exit codes of ``maru-server``; where ``maru-sidecar`` has the same case, the same number."""

    OK = 0
    FAILED = 1  #: an error without a code of its own, or a question answered with no
    USAGE = 2  #: a flag, an address or a file named there is wrong
    UNAVAILABLE = 4  #: no server answers, or it refused the token
    REFUSED = 5  #: the server understood and refused


EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 another error; 2 wrong flag, address or file; 4 no server answers (or it refused the token); 5 the "
    "server refused."
)
_CODES: tuple[tuple[type[MaruError], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (ServerUnavailable, ExitCode.UNAVAILABLE),
    (ServerRefused, ExitCode.REFUSED),
)


class _Failure(click.ClickException):
    def __init__(self, error: MaruError) -> None:
        super().__init__(str(error))
        self.exit_code: int = next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)  # type: ignore[misc]


def _fails_with_one_line(f: Callable[..., None]) -> Callable[..., None]:
    """A MaruError ends a command with its text and an exit code, without a traceback."""

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            f(*args, **kwargs)
        except MaruError as e:
            raise _Failure(e) from e

    return wrapped


def _asks_a_server(f: Callable[..., None]) -> Callable[..., None]:
    """Adds --server, --token-file, --timeout; the command gets a connected client."""

    @click.option(
        "--server",
        default=default_endpoint,
        help=f"tcp://HOST:PORT ($MARU_SERVER or $MARU_SERVER_ENDPOINT, else {DEFAULT_ENDPOINT}).",
    )
    @click.option("--token-file", type=click.Path(), help="Shared token ($MARU_SERVER_TOKEN_FILE).")
    @click.option("--timeout", type=click.FloatRange(min=0.05), default=5.0, show_default=True, help="Seconds for an answer.")
    @_fails_with_one_line
    @functools.wraps(f)
    def wrapped(server: str, token_file: str | None, timeout: float, **kwargs: Any) -> None:
        with DirectoryClient(server, read_token(token_file), timeout_ms=int(timeout * 1000)) as client:
            f(client, **kwargs)

    return wrapped


@click.group(epilog=EXIT_CODES_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="maru-server")
def main() -> None:
    """The metadata server: shares the directory between nodes that see the same CXL memory. It carries no KV bytes."""


@main.command()
@click.option(
    "--listen",
    multiple=True,
    help=f"tcp://HOST:PORT or ipc:///PATH to listen on; repeatable. Off loopback a token is required. [{DEFAULT_ENDPOINT}]",
)
@click.option(
    "--token-file", type=click.Path(), help="Shared token ($MARU_SERVER_TOKEN_FILE, or systemd's credential maru-token)."
)
@click.option(
    "--backend", "store", default="memory", show_default=True, help="memory, or redis://, unix://, redis+cluster:// URL."
)
@click.option("--prefix", default="maru", show_default=True, help="Separates several directories in one Redis.")
@click.option("--state-dir", type=click.Path(file_okay=False), help="Remembers the epoch ($STATE_DIRECTORY).")
@click.option("--lease-ms", type=click.IntRange(*P.LEASE_MS), default=Settings().lease_ms, show_default=True)
@click.option("--grace-ms", type=click.IntRange(0), default=Settings().grace_ms, show_default=True)
@click.option("--heartbeat-ms", type=click.IntRange(P.HEARTBEAT_MS_MIN), default=Settings().heartbeat_ms, show_default=True)
@click.option(
    "--reap-ms",
    type=click.IntRange(0),
    default=Settings().reap_ms,
    show_default=True,
    help="A dead node's chunks stay readable this long.",
)
@click.option(
    "--max-pin-ms",
    type=click.IntRange(PIN_FLOOR_MS),
    default=Settings().max_pin_ms,
    show_default=True,
    help="Readers' pins last no longer, whatever a sidecar's server.pin_ttl_s asks for.",
)
@click.option(
    "--max-keys", type=click.IntRange(1), default=Settings().max_keys, show_default=True, help="About 170 bytes of memory each."
)
@click.option(
    "--max-pinned-keys",
    type=click.IntRange(1),
    default=Settings().max_pinned_keys,
    show_default=True,
    help="What one node may have pinned at once; about 75 bytes of memory each.",
)
@click.option("--http", "http_address", default="", help="Show /healthz /readyz /metrics /status /version on HOST:PORT. [off]")
@click.option(
    "--http-token-file", type=click.Path(), help="Bearer token of the pages (not the cluster's); required off loopback."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)
@_fails_with_one_line
def run(
    *,
    listen: tuple[str, ...],
    token_file: str | None,
    store: str,
    prefix: str,
    state_dir: str | None,
    http_address: str,
    http_token_file: str | None,
    log_level: str,
    **times: int,
) -> None:
    """Serve in the foreground until SIGTERM."""
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    settings = Settings(**times)
    if settings.heartbeat_ms * 2 > settings.lease_ms:
        raise ConfigError(
            f"heartbeat of {settings.heartbeat_ms} ms and lease of {settings.lease_ms} ms",
            "make the lease at least two heartbeats",
        )
    http = parse_address(http_address) if http_address else None
    http_token = token_in(http_token_file) if http_token_file else None
    server = Server(
        _backend(store, settings, prefix, state_dir), settings, listen or (DEFAULT_ENDPOINT,), read_token(token_file),
        http=http, http_token=http_token,
    )  # fmt: skip
    stop_on_signals(server)  # before anybody is told that it runs
    for endpoint in server.endpoints:
        click.echo(f"listening on {endpoint}")
    if server.http is not None:
        host, port = server.http.address
        click.echo(f"pages on http://{f'[{host}]' if ':' in host else host}:{port}")
    sys.stdout.flush()
    server.run()


def _backend(store: str, settings: Settings, prefix: str, state_dir: str | None) -> Backend:
    if store != "memory":
        try:
            from maru_server.redis_backend import RedisBackend  # the redis package is needed by this backend only
        except ImportError as e:
            if not is_missing(e):
                raise
            raise ConfigError(f"--backend {store} needs the package {e.name!r}, which is not installed", REMEDY) from e
        return RedisBackend(settings, store, prefix=prefix)
    directory = state_dir or os.environ.get("STATE_DIRECTORY")
    if directory is None:
        return MemoryBackend(settings)
    try:
        os.makedirs(directory, exist_ok=True)
        return MemoryBackend(settings, os.path.join(directory, "epoch"))
    except OSError as e:
        raise ConfigError(f"state directory {directory}: {e.strerror or e}", "give one that this user can write") from e


@main.command()
def token() -> None:
    """Print a new shared token."""
    click.echo(new_token())


@main.command()
@_asks_a_server
def ping(client: DirectoryClient) -> None:
    """Say whether the server answers, and how fast."""
    started = time.perf_counter()
    client.ping()
    elapsed_ms = (time.perf_counter() - started) * 1000
    welcome = client.connection.welcome
    assert welcome is not None  # the client said Hello when it was made
    click.echo(f"{welcome.server} ({welcome.backend}) epoch {client.epoch}: {elapsed_ms:.2f} ms")


@main.command()
@_FORMAT
@_asks_a_server
def stats(client: DirectoryClient, form: str) -> None:
    """Counters of the server process and its directory."""
    values: Row = {name: value for name, value in client.stats().items() if not name.startswith("ops.")}
    if form == Format.TABLE:
        click.echo(render([{"name": k, "value": v} for k, v in values.items()], Format.TABLE))
    else:
        click.echo(render([values], Format(form)))


@main.command()
@_FORMAT
@_asks_a_server
def ops(client: DirectoryClient, form: str) -> None:
    """Requests by verb since the server started, and their mean time inside it."""
    rows: dict[str, Row] = {}
    for name, value in client.stats().items():
        if name.startswith("ops."):
            _, verb, field = name.split(".")
            rows.setdefault(verb, {"verb": verb})[field] = value
    click.echo(render(list(rows.values()), Format(form), ["verb", "requests", "mean_seconds"]))


@main.command()
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--count", type=click.IntRange(min=0), default=0, help="Stop after this many (0: never).")
@_FORMAT
@_asks_a_server
def top(client: DirectoryClient, interval: float, count: int, form: str) -> None:
    """Usage by device, node and namespace, with rates, again and again."""
    before, then = client.stats(), time.monotonic()
    done = 0
    while count == 0 or done < count:
        time.sleep(interval)
        now, stamp = client.stats(), time.monotonic()
        rates: Row = {"time": time.strftime("%H:%M:%S"), "keys": now["keys"], "nodes": now["nodes"], "grants": now["grants"]}
        for name in ("requests", "keys_looked_up", "keys_found", "keys_registered"):
            total = f"{name}_total"
            rates[f"{name}_per_second"] = round((float(now[total]) - float(before[total])) / (stamp - then), 1)
        before, then, done = now, stamp, done + 1
        if form == Format.CSV:
            lines = render([rates], Format.CSV).splitlines()
            click.echo("\n".join(lines if done == 1 else lines[1:]))
        elif form == Format.JSON:
            click.echo(render([rates | {"usage": rows_of(client.usage())}], Format.JSON))
        else:
            if sys.stdout.isatty():
                click.clear()
            click.echo(
                render([rates], Format.TABLE) + "\n\n" + render(rows_of(client.usage()), Format.TABLE, ["kind", "name"]) + "\n"
            )


@main.command()
@_FORMAT
@_asks_a_server
def usage(client: DirectoryClient, form: str) -> None:
    """Regions, keys and bytes by device, node and namespace."""
    click.echo(render(rows_of(client.usage()), Format(form), ["kind", "name", "regions", "keys", "bytes", "capacity_bytes"]))


@main.command()
@_FORMAT
@_asks_a_server
def nodes(client: DirectoryClient, form: str) -> None:
    """Members and how long they have been silent."""
    columns = ["node", "incarnation", "state", "label", "regions", "keys", "silent_ms"]
    click.echo(render(rows_of(client.nodes()), Format(form), columns))


@main.command()
@_FORMAT
@_asks_a_server
def regions(client: DirectoryClient, form: str) -> None:
    """Region grants with their fencing tokens."""
    columns = ["device", "region", "state", "node", "incarnation", "token", "keys", "bytes"]
    click.echo(render(rows_of(client.regions()), Format(form), columns))


@main.command()
@click.option("--namespace", default="", help="Hex; without it the namespaces are listed.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--after", default="", help="Last key (hex) of the page before.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True)
@_FORMAT
@_asks_a_server
def keys(client: DirectoryClient, *, namespace: str, rank: int, after: str, limit: int, form: str) -> None:
    """A page of one namespace's keys, or the namespaces."""
    if not namespace:
        tables: list[Row] = [{"namespace": ns.hex(), "rank": r, "keys": n} for ns, r, n in client.tables()]
        click.echo(render(tables, Format(form), ["namespace", "rank", "keys"]))
        return
    page = client.page(_hex(namespace), rank, _hex(after), limit)
    by_id = {g.id: g for g in page.grants}
    rows: list[Row] = []
    for i in range(len(page.keys) // KEY_BYTES):
        key, place = page.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], page.places[i * 16 : (i + 1) * 16]
        grant = by_id.get(int.from_bytes(place[:4], "little"))
        if grant is None:
            continue  # it went while the page was made
        rows.append({
            "key": key.hex(), "node": grant.node, "device": grant.device.hex(), "region": grant.region,
            "slab": int.from_bytes(place[4:8], "little"), "generation": int.from_bytes(place[8:], "little"),
        })  # fmt: skip
    click.echo(render(rows, Format(form), ["key", "node", "device", "region", "slab", "generation"]))
    if page.more and form == Format.TABLE:
        click.echo(f"more: --after {page.keys[-KEY_BYTES:].hex()}", err=True)


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as e:
        raise ConfigError(f"{text!r} is not hex", "copy it from `maru-server keys`") from e


@main.command()
@click.option("--namespace", default="", help="Hex; without it every namespace.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_asks_a_server
def reset(client: DirectoryClient, *, namespace: str, yes: bool) -> None:
    """Forget every key that no reader has pinned. Nodes keep their slabs, others just do not find them."""
    if not yes:
        click.confirm(f"Forget the keys of {namespace or 'ALL namespaces'}?", abort=True)
    click.echo(f"{client.reset(_hex(namespace))} keys forgotten")
