"""The `maru-server` command as a user calls it."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from servers import Node, ServerProcess, keys_of, server_process

from maru_server.cli import main
from maru_server.client import DirectoryClient


def call(endpoint: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--server", endpoint])


@pytest.fixture
def busy(memory_server: ServerProcess) -> tuple[str, bytes]:
    """A server with one node, one region and five keys: its endpoint and the namespace."""
    node = Node(memory_server.endpoint, "n1")
    [grant] = node.alloc(device=node.device())
    namespace = os.urandom(16)
    node.register(namespace, keys_of(5), grant)
    return memory_server.endpoint, namespace


def test_ping_says_release_backend_and_epoch(memory_server: ServerProcess) -> None:
    result = call(memory_server.endpoint, "ping")
    assert result.exit_code == 0
    assert result.output.startswith("maru-server/0.1.0 (memory) epoch ")


def test_no_server_is_one_line_and_exit_status_4() -> None:
    result = call("tcp://127.0.0.1:1", "ping", "--timeout", "0.2")
    assert result.exit_code == 4
    assert result.output.startswith("Error: no metadata server at tcp://127.0.0.1:1")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("command", ["nodes", "regions", "usage", "stats", "keys"])
def test_every_view_comes_as_table_json_and_csv_with_the_same_content(busy: tuple[str, bytes], command: str) -> None:
    endpoint, _ = busy
    rows = json.loads(call(endpoint, command, "--format", "json").output)
    assert rows
    text = list(csv.DictReader(io.StringIO(call(endpoint, command, "--format", "csv").output)))
    assert [list(r) for r in text] == [list(r) for r in rows]
    table = call(endpoint, command).output.splitlines()
    assert len(table) >= len(rows) + 1


def test_operations_are_counted_by_verb_with_their_time(busy: tuple[str, bytes]) -> None:
    endpoint, _ = busy
    rows = {row["verb"]: row for row in json.loads(call(endpoint, "ops", "--format", "json").output)}
    assert rows["Register"]["requests"] == 1
    assert rows["Register"]["mean_seconds"] > 0
    assert "Pin" not in rows
    text = list(csv.DictReader(io.StringIO(call(endpoint, "ops", "--format", "csv").output)))
    assert {row["verb"] for row in text} >= {"Hello", "AllocRegions", "Register", "GetStats"}
    assert call(endpoint, "ops").output.startswith("verb")


def test_keys_of_a_namespace_say_where_they_lie(busy: tuple[str, bytes]) -> None:
    endpoint, namespace = busy
    rows = json.loads(call(endpoint, "keys", "--namespace", namespace.hex(), "--format", "json", "--limit", "3").output)
    assert [(r["node"], r["region"]) for r in rows] == [("n1", 1)] * 3
    more = call(endpoint, "keys", "--namespace", namespace.hex(), "--after", rows[-1]["key"], "--format", "csv").output
    assert len(more.splitlines()) == 1 + 2


def test_an_empty_view_is_an_empty_list_or_a_header(memory_server: ServerProcess) -> None:
    assert json.loads(call(memory_server.endpoint, "nodes", "--format", "json").output) == []
    assert call(memory_server.endpoint, "nodes", "--format", "csv").output.startswith("node,incarnation,state")


def test_top_counts_what_pins_ask_for(busy: tuple[str, bytes]) -> None:
    endpoint, namespace = busy
    with ThreadPoolExecutor(1) as pool:
        top = pool.submit(call, endpoint, "top", "--interval", "1", "--count", "1", "--format", "json")
        node, n = Node(endpoint, "reader"), 0
        while not top.done():
            n += 1
            node.client.pin(namespace, 0, keys_of(8), 1000)
        node.client.close()
    assert n, "something was asked meanwhile"
    row = json.loads(top.result().output)[0]
    assert row["keys_looked_up_per_second"] > 0
    assert row["keys_found_per_second"] == 0


def test_top_prints_rates_line_by_line_as_csv(busy: tuple[str, bytes]) -> None:
    endpoint, _ = busy
    lines = call(endpoint, "top", "--interval", "0.1", "--count", "2", "--format", "csv").output.splitlines()
    assert lines[0].startswith("time,keys,nodes,grants,requests_per_second")
    assert [line.split(",")[1] for line in lines[1:]] == ["5", "5"]


def test_reset_asks_and_then_forgets(busy: tuple[str, bytes]) -> None:
    endpoint, namespace = busy
    refused = CliRunner().invoke(main, ["reset", "--server", endpoint], input="n\n")
    assert refused.exit_code == 1
    assert call(endpoint, "reset", "--namespace", namespace.hex(), "--yes").output == "5 keys forgotten\n"


def test_a_namespace_that_is_not_hex_is_named(memory_server: ServerProcess) -> None:
    result = call(memory_server.endpoint, "keys", "--namespace", "xyz")
    assert result.exit_code == 2
    assert "'xyz' is not hex" in result.output


def test_token_prints_a_fresh_one_each_time() -> None:
    one, two = (CliRunner().invoke(main, ["token"]).output.strip() for _ in range(2))
    assert len(one) == 64
    assert one != two


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    result = CliRunner().invoke(main, ["run", "--lease-ms", "1000", "--heartbeat-ms", "900"])
    assert result.exit_code == 2
    assert "two heartbeats" in result.output


def test_an_address_in_use_is_named(memory_server: ServerProcess) -> None:
    result = CliRunner().invoke(main, ["run", "--listen", memory_server.endpoint])
    assert result.exit_code == 2
    assert memory_server.endpoint in result.output


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(memory_server: ServerProcess, how: signal.Signals) -> None:
    memory_server.process.send_signal(how)
    assert memory_server.process.wait(10) == 0


def test_a_state_directory_keeps_epochs_rising(tmp_path: Path) -> None:
    epochs = []
    (tmp_path / "epoch").write_text("3999999999999\n")  # a server whose clock was 70 years ahead
    for _ in range(2):
        with server_process(extra=("--state-dir", str(tmp_path))) as server, DirectoryClient(server.endpoint) as client:
            epochs.append(client.epoch)
    assert epochs == [4_000_000_000_000, 4_000_000_000_001]


def test_a_state_file_with_an_absurd_epoch_is_named(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("99999999999999\n")
    result = CliRunner().invoke(main, ["run", "--state-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "99999999999999" in result.output


@pytest.mark.parametrize(
    "wrong",
    [
        ("--http", "127.0.0.1:19464x"),
        ("--listen", "tcp://0.0.0.0:1"),
        ("--listen", "udp://127.0.0.1:1"),
        ("--listen", "nonsense"),
        ("--token-file", "/nonexistent/token"),
        ("--lease-ms", "many"),
        ("--max-pin-ms", "2999"),
        ("--max-pinned-keys", "0"),
        ("--lease-ms", "3600001"),
        ("--backend", "postgres://db"),
        ("--state-dir", "/proc/none"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_with_the_command_line_ends_with_2_and_is_named(wrong: tuple[str, str]) -> None:
    result = CliRunner().invoke(main, ["run", *wrong])
    assert result.exit_code == 2
    assert wrong[1] in result.output
    assert "Traceback" not in result.output


def test_the_exit_codes_are_documented_in_the_help() -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    assert "2 wrong flag, address or file; 4 no server answers" in text


def test_what_a_server_refuses_ends_with_5(busy: tuple[str, bytes]) -> None:
    endpoint, _ = busy
    result = call(endpoint, "keys", "--namespace", "abcd")
    assert (result.exit_code, "namespace of 2 bytes" in result.output) == (5, True)


def test_an_address_without_a_scheme_is_tcp() -> None:
    with server_process(listen="127.0.0.1:*") as server:
        assert server.endpoint.startswith("tcp://127.0.0.1:")
        assert call(server.endpoint.removeprefix("tcp://"), "ping").exit_code == 0


@pytest.mark.parametrize("variable", ["MARU_SERVER", "MARU_SERVER_ENDPOINT"])
def test_the_commands_find_the_server_under_both_names(
    memory_server: ServerProcess, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, memory_server.endpoint)
    assert CliRunner().invoke(main, ["ping"]).exit_code == 0


def test_of_both_names_the_one_of_the_commands_counts(memory_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARU_SERVER", memory_server.endpoint)
    monkeypatch.setenv("MARU_SERVER_ENDPOINT", "tcp://127.0.0.1:1")
    assert CliRunner().invoke(main, ["ping"]).exit_code == 0


@pytest.mark.parametrize(
    ("package", "words"), [("zmq", ["--help"]), ("zmq", ["ping"]), ("redis", ["run", "--backend", "redis://127.0.0.1:1"])]
)
def test_without_the_extra_it_says_what_to_install(tmp_path: Path, package: str, words: list[str]) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name='{package}')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-m", "maru_server", *words], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode in (1, 2)
    assert "pip install '.[server]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_installed_command_is_the_one_that_says_so() -> None:
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as f:
        assert tomllib.load(f)["project"]["scripts"]["maru-server"] == "maru_server.entry:main"
