"""The `maru-sidecar` command: what it asks, what it prints, how it ends. A socket with canned answers stands for the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.responder import Responder

from maru_shm import messages as M
from maru_sidecar.cli import RUN_FLAGS, cli
from maru_sidecar.config import SECTIONS
from maru_sidecar.output import cell, human_bytes, table

STATUS: dict[str, object] = {
    "pool": {"bytes": 1 << 30, "used": 0.25},
    "engines": [{"id": "a", "ranks": 2}, {"id": "b", "note": "late"}],
    "state": "READY",
}


def chunk(i: int) -> M.ChunkInfo:
    return M.ChunkInfo("ab" * 16, f"{i:032x}", 1, 2, 4096, 256, 0, pinned=i == 1, age_s=1.5)


@pytest.fixture
def responder(tmp_path: Path) -> Iterator[Responder]:
    with Responder(tmp_path / "control.sock") as server:
        server.answers |= {
            M.Ping: lambda _: M.Pong("READY"),
            M.GetStatus: lambda _: M.Status(STATUS),
            M.Drain: lambda _: M.Done(),
            M.CacheClear: lambda _: M.Done(12),
            M.CacheList: lambda _: M.CachePage([chunk(1), chunk(2)], more=False),
            M.Pin: lambda _: M.Done(1),
        }
        yield server


def command(*arguments: str, environment: dict[str, str] | None = None, text: str = "") -> subprocess.CompletedProcess[str]:
    """The program as a shell runs it."""
    return subprocess.run(
        [sys.executable, "-m", "maru_sidecar", *arguments],
        capture_output=True, text=True, timeout=60, check=False, input=text, env={**os.environ, **(environment or {})},
    )  # fmt: skip


def ask(responder: Responder, *arguments: str) -> str:
    """Standard output of a command that must succeed."""
    result = CliRunner().invoke(cli, [*arguments, "--socket", responder.path], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def ask_json(responder: Responder, *arguments: str) -> object:
    return json.loads(ask(responder, *arguments, "--format", "json"))


# --- asking -----------------------------------------------------------------------------------------------------------------
def test_ping_names_who_answers(responder: Responder) -> None:
    assert ask(responder, "ping") == "maru-sidecar/test (pid 4242) is READY\n"
    assert ask_json(responder, "ping") == {"state": "READY", "server": "maru-sidecar/test", "pid": 4242}


def test_status_prints_every_section_or_those_asked_for(responder: Responder) -> None:
    for everything in ((), ("--all",), ("--section", "all")):
        assert ask_json(responder, "status", *everything) == STATUS
    assert ask_json(responder, "status", "--section", "pool") == {"pool": STATUS["pool"]}
    assert ask(responder, "status", "--all").splitlines() == [
        "pool:", "  bytes  1073741824", "  used   0.25", "",
        "engines:", "  id  ranks  note", "  a       2  -", "  b       -  late", "",
        "state:", "  READY",
    ]  # fmt: skip
    wrong = command("status", "--socket", responder.path, "--section", "poole")
    assert (wrong.returncode, wrong.stderr) == (2, "maru-sidecar: no section 'poole'; there are: pool, engines, state, all\n")


def test_status_is_a_screenful_unless_more_is_asked_for(responder: Responder) -> None:
    engine = {"world": 1, "registered": 1, "complete": True, "namespace": "ab" * 16, "chunk_tokens": 256, "sessions": 2}
    responder.answers[M.GetStatus] = lambda _: M.Status(
        {
            "sidecar": {"version": "1", "pid": 7, "state": "READY", "health": "good", "uptime_s": 1.5, "socket": "/s"}
            | {"instance": "0a", "handlers_failed": 0, "engines_hanging": 3},
            "pool": {"path": "/dev/shm/p", "bytes_total": 4 << 30, "bytes_used": 1 << 30, "prefault": "done", "warnings": []},
            "directory": {"chunks": 12, "pins": 1, "leases": 0, "evicted_total": 5, "full_total": 2}
            | {f"counter_{i}": i for i in range(50)},
            "cache": {"hit_ratio": 0.5, "load_success_ratio": 1.0, "chunks_asked": 10},
            "sharing": {"node": "a", "server": "tcp://h:1", "state": "joined", "can_store": False, "regions": 0}
            | {"keys_announced": 9, "region_refused": "the directory is full", "last_error": ""},
            "engines": [{"engine_id": f"e{i}"} | engine for i in range(11)],
            "sessions": [{"session": i} for i in range(50)],
            "queues": [{"device": "cpu", "queue": "load", "jobs": 0, "bytes_in_flight": 0, "alive": True}],
            "transfers": [
                {"op": "load", "tickets": 4, "failed": 1, "cancelled": 0, "chunks": 8, "bytes": 99},
                {"op": "store", "tickets": 0},
            ],
            "failures": {"NOT_FOUND": 1},
        }
    )
    shown = ask(responder, "status")
    lines = {tuple(line.split()) for line in shown.splitlines()}
    assert len(shown.splitlines()) <= 60
    assert {("engines_hanging", "3"), ("full_total", "2"), ("used", "1.0", "GiB", "of", "4.0", "GiB", "(25", "%)")} <= lines
    assert {("can_store", "no"), ("region_refused", "the", "directory", "is", "full"), ("NOT_FOUND", "1")} <= lines
    assert not {"handlers_failed", "counter_3", "keys_announced", "e8", "store", "queues:", "sessions:"} & set(shown.split())
    assert "e7" in shown.split()
    assert "3 more engines; everything: --all; one section: --section sidecar|pool|directory|" in shown


@pytest.mark.parametrize(
    ("directory", "shown"),
    [
        (
            {"regions_free": 0, "size_classes": [{"stride": 11_796_480, "regions": 3, "slabs": 15, "used": 15}]},
            "15 of 15 of 11.2 MiB (100 %)",
        ),
        (
            {
                "regions_free": 2,
                "size_classes": [
                    {"stride": 4096, "regions": 1, "slabs": 200, "used": 1},
                    {"stride": 1 << 20, "regions": 2, "slabs": 6, "used": 4},
                ],
            },
            "1 of 600 of 4.0 KiB (0 %),4 of 12 of 1.0 MiB (33 %)",
        ),
        ({"regions_free": 3, "size_classes": []}, None),
        ({}, None),
    ],
)
def test_the_summary_shows_slabs_beside_bytes_for_eviction_goes_by_slabs(
    responder: Responder, directory: dict[str, object], shown: str | None
) -> None:
    pool = {"path": "/dev/shm/p", "bytes_total": 192 << 20, "bytes_used": 15 * 11_796_480}
    responder.answers[M.GetStatus] = lambda _: M.Status({"pool": pool, "directory": directory})
    lines = dict(line.strip().split("  ", 1) for line in ask(responder, "status").splitlines() if line.startswith("  "))
    assert lines["used"].strip() == "168.8 MiB of 192.0 MiB (88 %)"
    assert lines.get("slabs", "").strip() == (shown or "")


def test_the_summary_shows_who_was_refused_and_lookups_of_engines_without_workers(responder: Responder) -> None:
    refusals = {"bad_geometry": 7, "last": "maru-connector (pid 4, uid 0) refused: too large", "last_age_s": 2.5}
    status = {"refusals": refusals, "cache": {"hit_ratio": 0.0, "lookups_not_registered": 2636}}
    responder.answers[M.GetStatus] = lambda _: M.Status(status)
    shown = ask(responder, "status")
    assert "refusals:\n  bad_geometry  7\n  last          maru-connector (pid 4, uid 0) refused: too large\n" in shown
    assert "lookups_not_registered  2636" in shown
    responder.answers[M.GetStatus] = lambda _: M.Status({"refusals": {}, "cache": {"lookups_not_registered": 0}})
    shown = ask(responder, "status")
    assert "refusals:" not in shown
    assert "lookups_not_registered" not in shown


def test_describe_shows_protocol_and_generation(responder: Responder) -> None:
    described = ask_json(responder, "describe")
    assert described == {
        "sidecar": {
            "server": "maru-sidecar/test", "pid": 4242, "state": "READY", "protocol": 1, "instance": "0a1b2c3d",
            "generation": "0000000000abcdef",
        },
        "segments": [],
    }  # fmt: skip


def test_drain_drains_and_shows_the_state_that_follows(responder: Responder) -> None:
    responder.answers[M.Ping] = lambda _: M.Pong("DRAINING")
    assert ask(responder, "drain") == "DRAINING\n"
    assert [type(m) for m in responder.heard] == [M.Hello, M.Drain, M.Ping]


def test_cache_ls_is_a_table_or_json_and_says_where_it_stopped(responder: Responder) -> None:
    assert [row["key"] for row in ask_json(responder, "cache", "ls")] == [chunk(1).key, chunk(2).key]  # type: ignore[attr-defined]
    lines = ask(responder, "cache", "ls", "--namespace", "cd").splitlines()
    assert lines[0].split() == ["namespace", "key", "ranks", "world", "bytes", "tokens", "leases", "pinned", "age_s"]
    assert len(lines) == 3
    assert responder.heard[-1] == M.CacheList("cd", "", 500)
    stopped = command("cache", "ls", "--socket", responder.path, "--limit", "2", "--after", "00")
    assert stopped.stderr == f"there may be more: --after {chunk(2).key}{chunk(2).namespace}\n"
    assert responder.heard[-1] == M.CacheList("", "00", 2)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("--all",), M.CacheClear()),
        (("--namespace", "ab"), M.CacheClear(namespace="ab")),
        (("--engine", "e1"), M.CacheClear(engine_id="e1")),
    ],
)
def test_cache_clear_says_how_many_went(responder: Responder, arguments: tuple[str, ...], asked: M.CacheClear) -> None:
    assert ask(responder, "cache", "clear", *arguments) == "12 chunks dropped\n"
    assert responder.heard[-1] == asked


@pytest.mark.parametrize("arguments", [(), ("--all", "--engine", "e"), ("--namespace", ""), ("--engine", "")])
def test_cache_clear_never_clears_everything_by_omission(responder: Responder, arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["cache", "clear", "--socket", responder.path, *arguments], standalone_mode=True)
    assert result.exit_code == 2
    assert responder.heard == []


def test_keys_to_pin_come_from_the_line_or_standard_input(responder: Responder) -> None:
    done = command("cache", "pin", "ab", "k1", "-", "--socket", responder.path, text="k2\nk3\n")
    assert (done.returncode, done.stdout) == (10, "1 of 3 chunks pinned\n")
    assert "k2 is not in the pool; not tried: 1" in done.stderr
    assert responder.heard[-1] == M.Pin("ab", ["k1", "k2", "k3"])
    unpinned = {"unpinned": 1, "asked": 1, "not_found": None, "not_tried": 0, "not_pinned": 0}
    assert ask_json(responder, "cache", "unpin", "ab", "k1") == unpinned
    assert responder.heard[-1] == M.Pin("ab", ["k1"], pinned=False)


def test_unpinning_what_is_not_pinned_says_so(responder: Responder) -> None:
    responder.answers[M.Pin] = lambda m: M.Done(len(m.keys), 1)  # type: ignore[union-attr]
    assert ask(responder, "cache", "unpin", "ab", "k1") == "0 of 1 chunks unpinned; 1 was not pinned\n"
    assert ask(responder, "cache", "unpin", "ab", "k1", "k2") == "1 of 2 chunks unpinned; 1 was not pinned\n"
    unpinned = {"unpinned": 1, "asked": 2, "not_found": None, "not_tried": 0, "not_pinned": 1}
    assert ask_json(responder, "cache", "unpin", "ab", "k1", "k2") == unpinned


@pytest.mark.parametrize("verb", ["pin", "unpin"])
@pytest.mark.parametrize("given", [(), ("ab" * 16,)])
def test_a_chunk_s_two_names_are_asked_for_together(verb: str, given: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["cache", verb, *given])
    assert result.exit_code == 2
    assert f"cache {verb} [OPTIONS] NAMESPACE KEY..." in result.stderr
    assert "give NAMESPACE and then at least one KEY: together they name a chunk, as `cache ls` lists it" in result.stderr


def test_the_socket_comes_from_the_environment_too(responder: Responder) -> None:
    for name in ("MARU_SOCKET", "MARU_CONTROL_SOCKET"):
        assert command("ping", environment={name: responder.path}).returncode == 0
    both = command("ping", environment={"MARU_SOCKET": responder.path, "MARU_CONTROL_SOCKET": "/else"})
    assert (both.returncode, "unset one" in both.stderr) == (2, True)


@pytest.mark.parametrize("path", ["ping", "status", "run", "doctor", "cache ls"])
def test_the_help_names_every_place_a_socket_is_searched_in(path: str) -> None:
    words = CliRunner().invoke(cli, [*path.split(), "--help"]).stdout.split()
    for place in ("$MARU_SOCKET", "$MARU_CONTROL_SOCKET),", "/run/maru/control.sock", "$XDG_RUNTIME_DIR/maru.sock"):
        assert place in words
    assert any(word.startswith("/tmp/maru-UID/maru.sock") for word in words)


# --- how it ends --------------------------------------------------------------------------------------------------------------
def test_no_sidecar_is_one_line_and_exit_code_4(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    done = command("status", "--socket", path)
    assert (done.returncode, done.stdout) == (4, "")
    remedy = f"start it: maru-sidecar run --socket {path}, or name the right socket"
    assert done.stderr == f"maru-sidecar: no sidecar at {path}: No such file or directory; {remedy}\n"


def test_a_refusal_is_exit_code_5(responder: Responder) -> None:
    responder.answers[M.Drain] = lambda _: M.Refused(M.RefusalCode.NOT_AUTHORISED, "uid 12 may not drain", "ask root")
    done = command("drain", "--socket", responder.path)
    assert (done.returncode, done.stderr) == (5, "maru-sidecar: refused (not_authorised): uid 12 may not drain; ask root\n")


def test_a_wrong_setting_is_exit_code_2_and_names_key_and_origin(tmp_path: Path) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text("[pool]\nsize = 'huge'\n")
    for arguments in (("--config", str(config)), ("--pool-size", "huge"), ("--set", "pool.size=huge")):
        done = command("run", *arguments, "--check")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "pool.size is 'huge'" in done.stderr
    assert command("run", "--set", "pool.size").returncode == 2
    assert command("run", "--no-such-flag").returncode == 2


def test_an_unexpected_end_of_the_reader_is_no_traceback(responder: Responder) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "maru_sidecar", "status", "--socket", responder.path],
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(write)
    assert "Traceback" not in done.stderr


# --- run ----------------------------------------------------------------------------------------------------------------------
def test_flags_beat_the_environment_and_the_environment_the_file(tmp_path: Path) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text("[pool]\nsize = '64MiB'\npath = '/dev/shm/from-file'\n[daemon]\nspin_us = 1.0\n")
    done = command(
        "run", "--config", str(config), "--pool-size", "32MiB", "--pool-recreate", "--set", "limits.max_keys=99", "--check",
        environment={"MARU_POOL_SIZE": "48MiB", "MARU_DAEMON_SPIN_US": "7"},
    )  # fmt: skip
    effective = json.loads(done.stdout)
    assert effective["pool"]["size"] == 32 << 20
    assert effective["pool"]["path"] == "/dev/shm/from-file"
    assert effective["pool"]["recreate"] is True
    assert effective["daemon"]["spin_us"] == 7.0
    assert effective["limits"]["max_keys"] == 99


def test_the_help_says_what_a_watermark_is_a_share_of() -> None:
    text = " ".join(CliRunner().invoke(cli, ["run", "--help"]).stdout.split())
    assert "Share of the slabs of one size above which a store evicts." in text
    assert "Share of the pool" not in text


def test_every_flag_of_run_sets_a_key_that_exists() -> None:
    known = {f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.__struct_fields__}
    assert {key for _, key, _ in RUN_FLAGS} <= known


# --- help and version -------------------------------------------------------------------------------------------------------
def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom maru_sidecar.cli import cli\nimport maru_sidecar.ring_cli\n"
        "cli.main(['run', '--help'], standalone_mode=False)\n"
        "print('heavy:', *sorted({'numpy', 'msgspec', 'posix_ipc', 'psutil', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_every_command_takes_format_and_documents_exit_codes() -> None:
    assert "Exit codes: 0 done;" in command("--help").stdout
    for path in (
        "ping",
        "status",
        "describe",
        "drain",
        "doctor",
        "version",
        "cache ls",
        "cache clear",
        "cache pin",
        "cache unpin",
    ):
        assert "--format [table|json]" in CliRunner().invoke(cli, [*path.split(), "--help"]).stdout


def test_version_names_all_that_must_match() -> None:
    versions = json.loads(CliRunner().invoke(cli, ["version", "--format", "json"]).stdout)
    assert set(versions) == {"maru-sidecar", "protocol", "segment_abi", "pool_format", "python"}
    assert CliRunner().invoke(cli, ["version"]).stdout.startswith("maru-sidecar ")


# --- tables -------------------------------------------------------------------------------------------------------------------
def test_columns_are_aligned_and_numbers_right() -> None:
    assert table(["name", "n"], [["a", "1"], ["long", "-"], ["b", "12.5"]]) == [
        "name     n",
        "a        1",
        "long     -",
        "b     12.5",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ("", "-"),
        (True, "yes"),
        (0, "0"),
        (0.12345, "0.123"),
        (123.456, "123.5"),
        ({"a": 1}, "a=1"),
        ([1, 2], "1,2"),
        ([], "-"),
    ],
)
def test_a_cell_shows_no_more_than_matters(value: object, text: str) -> None:
    assert cell(value) == text


def test_bytes_have_binary_units() -> None:
    assert [human_bytes(n) for n in (512, 1536, 3 << 30, 1 << 50)] == ["512 B", "1.5 KiB", "3.0 GiB", "1024.0 TiB"]
