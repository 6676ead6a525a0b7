"""``maru-sidecar pool``: initialise, inspect and clear a pool that several sidecars share, or one on a DAX device."""

from __future__ import annotations

import click

from maru_sidecar.output import Format, echo_json, echo_rows, echo_sections, format_option

COLUMNS = ("region", "owner", "token", "slab_bytes", "slabs", "committed", "writing")


@click.group("pool")
def pool() -> None:
    """Pools that several sidecars share, and pools on DAX devices: no sidecar ever initialises one by itself."""


def _size(text: str, flag: str) -> int:
    from maru_shm.errors import ConfigError
    from maru_sidecar.config_values import parse_size

    try:
        return parse_size(text)
    except ValueError as e:
        raise ConfigError(f"{flag} {text}", "sizes read as '64GiB'") from e


@pool.command("init")
@click.argument("path")
@click.option("--size", default="0", help="Pool size, e.g. 64GiB (default on a device: all of it).")
@click.option("--region-size", default="0", help="What one node is granted at a time (default: 1 GiB, less for a small pool).")
@click.option("--mode", default="660", show_default=True, metavar="OCTAL", help="Permission bits of a file.")
@click.option("--own", is_flag=True, help="On a device: for one sidecar alone, not shared.")
@click.option("--overwrite", is_flag=True, help="On a device: whatever it holds now. That is lost.")
@format_option
def init(path: str, size: str, region_size: str, mode: str, fmt: Format, *, own: bool, overwrite: bool) -> None:
    """Make an empty shared pool at PATH: a new or empty file, or a DAX device such as /dev/dax0.0."""
    from maru_sidecar.config_values import MODE_MAX, parse_mode
    from maru_sidecar.pool_admin import initialise

    try:
        bits = parse_mode(mode)
    except ValueError as e:
        raise click.UsageError(f"--mode {mode}: expected octal permission bits up to {MODE_MAX:o}, e.g. 660") from e
    header = initialise(
        path, _size(size, "--size"), _size(region_size, "--region-size"), mode=bits, own=own, overwrite=overwrite
    )
    values = {"path": path, "uuid": header.uuid.hex(), "regions": header.n_regions - 1, "region_bytes": header.region_bytes}
    if fmt == "json":
        echo_json(values)
    else:
        click.echo(f"{path}: pool {values['uuid']}, {values['regions']} regions of {values['region_bytes']} bytes")


@pool.command("inspect")
@click.argument("path")
@format_option
def inspect(path: str, fmt: Format) -> None:
    """Show a pool's header and regions. It may be in use; nothing is written."""
    import dataclasses

    from maru_shm import poolformat as F
    from maru_sidecar import pool_admin

    header, regions = pool_admin.inspect(path)
    values = {
        "path": path, "uuid": header.uuid.hex(), "shared": bool(header.flags & F.FLAG_SHARED),
        "bytes": header.pool_bytes, "region_bytes": header.region_bytes, "regions": header.n_regions - 1,
    }  # fmt: skip
    rows = [dataclasses.asdict(view) for view in regions]
    if fmt == "json":
        echo_json({"pool": values, "regions": rows})
        return
    echo_sections({"pool": values}, fmt)
    echo_rows([row for row in rows if row["slab_bytes"] or row["owner"]], fmt, COLUMNS, empty="no region is in use")


@pool.command("clear")
@click.argument("path")
@click.option("--yes", is_flag=True, help="Do not ask: no sidecar of any machine uses the pool.")
@format_option
def clear(path: str, fmt: Format, *, yes: bool) -> None:
    """Forget everything in a shared pool, or in one on a device. Stop every sidecar that uses it first, on all machines."""
    from maru_sidecar import pool_admin

    if not yes:
        pool_admin.check_clearable(path)
        click.confirm(f"Forget everything in {path}? Sidecars of other machines must have been stopped", abort=True, err=True)
    header = pool_admin.clear(path)
    echo_json({"uuid": header.uuid.hex()}) if fmt == "json" else click.echo(f"{path}: empty, now pool {header.uuid.hex()}")
