"""The commands against a real sidecar with attached clients: what operators see, before and after a crash."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.client import Client, KvCache, prompt_keys
from tests.support.sidecar_process import SidecarProcess, running_sidecar

from maru_shm import layout as L


@pytest.fixture
def sidecar() -> Iterator[SidecarProcess]:
    with running_sidecar(pool_bytes=32 << 20) as running:
        yield running


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=60, check=False)


def maru(sidecar: SidecarProcess, *arguments: str) -> object:
    """JSON output of a `maru-sidecar` command that must succeed."""
    done = command("maru_sidecar", *arguments, "--socket", sidecar.socket, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ring(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command("maru_sidecar.ring_cli", *arguments, "--format", "json")


def blocks(chunks: int) -> npt.NDArray[np.int32]:
    """Block ids of ``chunks`` chunks of four blocks."""
    return np.arange(4 * chunks, dtype=np.int32).reshape(chunks, 4)


def described(sidecar: SidecarProcess) -> tuple[str, list[str]]:
    """Instance, and the names of the live segments."""
    found = maru(sidecar, "describe")
    assert isinstance(found, dict)
    return found["sidecar"]["instance"], found["segments"]


def test_ping_status_and_describe_agree_on_who_runs(sidecar: SidecarProcess) -> None:
    ping, status, found = maru(sidecar, "ping"), maru(sidecar, "status"), maru(sidecar, "describe")
    assert isinstance(ping, dict)
    assert isinstance(status, dict)
    assert isinstance(found, dict)
    assert (ping["state"], ping["pid"]) == ("READY", sidecar.pid)
    assert found["sidecar"]["pid"] == sidecar.pid
    assert "pool" in status
    for everything in (("--all",), ("--section", "all")):
        shown = command("maru_sidecar", "status", "--socket", sidecar.socket, *everything).stdout
        assert [line[:-1] for line in shown.splitlines() if line.endswith(":") and line[0] != " "] == list(status)
    summary = command("maru_sidecar", "status", "--socket", sidecar.socket).stdout
    assert len(summary.splitlines()) <= 40
    assert f"pid       {sidecar.pid}" in summary
    assert f"--section {'|'.join(status)}" in summary


def test_stored_chunks_are_listed_pinned_and_cleared(sidecar: SidecarProcess) -> None:
    chunks = 5
    with Client(sidecar.socket, cache=KvCache()) as worker:
        worker.store(prompt_keys("a", chunks), blocks(chunks))
        listed = maru(sidecar, "cache", "ls")
        assert isinstance(listed, list)
        assert len(listed) == chunks
        assert {row["tokens"] for row in listed} == {64}
        assert [row["key"] for row in listed] == sorted(row["key"] for row in listed)
        page = maru(sidecar, "cache", "ls", "--after", listed[1]["key"], "--limit", "2")
        assert isinstance(page, list)
        assert [row["key"] for row in page] == [row["key"] for row in listed[2:4]]
        namespace, keys = listed[0]["namespace"], [row["key"] for row in listed[:2]]
        absent, last = "00" * 16, listed[2]["key"]
        some = ("cache", "pin", namespace, *keys, absent, last, "--socket", sidecar.socket)
        done = command("maru_sidecar", *some)
        assert (done.returncode, done.stdout) == (10, "2 of 4 chunks pinned\n")
        assert f"{absent} is not in the pool; not tried: 1" in done.stderr
        done = command("maru_sidecar", *some, "--format", "json")
        wanted = {"pinned": 2, "asked": 4, "not_found": absent, "not_tried": 1}
        assert (done.returncode, json.loads(done.stdout)) == (10, wanted)
        for _ in range(2):  # it was pinned twice
            unpinned = {"unpinned": 2, "asked": 2, "not_found": None, "not_tried": 0, "not_pinned": 0}
            assert maru(sidecar, "cache", "unpin", namespace, *keys) == unpinned
        once_more = command("maru_sidecar", "cache", "unpin", namespace, *keys, "--socket", sidecar.socket)
        assert (once_more.returncode, once_more.stdout) == (0, "0 of 2 chunks unpinned; 2 were not pinned\n")
        assert command("maru_sidecar", "cache", "unpin", namespace, absent, "--socket", sidecar.socket).returncode == 10
        assert "10 a key" in command("maru_sidecar", "cache", "pin", "--help").stdout
        assert maru(sidecar, "cache", "clear", "--engine", "engine") == {"dropped": chunks, "kept": 0}
        assert maru(sidecar, "cache", "ls") == []


def test_a_refusal_of_the_sidecar_names_what_and_remedy(sidecar: SidecarProcess) -> None:
    done = command("maru_sidecar", "cache", "pin", "xyz", "00", "--socket", sidecar.socket)
    assert (done.returncode, len(done.stderr.splitlines())) == (5, 1)
    assert "namespace 'xyz'; expected 32 hex digits" in done.stderr


def test_maru_ring_shows_a_requests_latency_breakdown(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, cache=KvCache()) as worker:
        worker.store(prompt_keys("a", 3), blocks(3))
        _, (segment,) = described(sidecar)
        (row,) = json.loads(ring("records", segment, "--all").stdout)
        assert (row["op"], row["code"], row["keys"], row["done"]) == ("STORE", "OK", 4, 3)
        assert row["bytes"] > 0
        assert row["total_us"] >= row["accept_us"] >= 0
        assert row["first_copy_us"] is not None
        (shown,) = [r for r in json.loads(ring("ls").stdout) if r["segment"] == segment]
        assert (shown["sidecar"], shown["client"], shown["state"]) == (str(sidecar.pid), str(os.getpid()), "READY")
        assert ring("stuck", "--instance", described(sidecar)[0]).returncode == 0


def test_after_a_crash_maru_ring_says_who_died_and_doctor_keeps_what_an_engine_still_holds(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, role=L.Role.SCHEDULER):
        instance, (segment,) = described(sidecar)
        sidecar.kill()
        stuck = ring("stuck", "--instance", instance)
        assert (stuck.returncode, json.loads(stuck.stdout)[0]["what"]) == (3, f"sidecar {sidecar.pid} is dead")
        where = ("--pool-path", sidecar.pool, "--pool-size", "32MiB", "--socket", sidecar.socket, "--format", "json")
        findings = json.loads(command("maru_sidecar", "doctor", "--fix", *where).stdout)
        assert any(segment in f["what"] and "its engine lives" in f["what"] for f in findings)
        assert any("nobody listens" in f["what"] for f in findings)
        assert [r["segment"] for r in json.loads(ring("ls", "--instance", instance).stdout)] == [segment]
    sidecar.start()
    assert json.loads(ring("ls", "--instance", instance).stdout) == []  # the new sidecar swept it


def test_drain_refuses_new_clients_and_the_process_stays(sidecar: SidecarProcess) -> None:
    assert maru(sidecar, "drain") == {"state": "DRAINING"}
    assert maru(sidecar, "ping")["state"] == "DRAINING"  # type: ignore[index]
    assert sidecar.stop() == 0
    assert command("maru_sidecar", "ping", "--socket", sidecar.socket).returncode == 4


def test_a_second_sidecar_on_the_same_socket_or_pool_is_exit_code_9(sidecar: SidecarProcess, tmp_path: Path) -> None:
    size = ("--pool-size", "32MiB")
    same_socket = command("maru_sidecar", "run", "--socket", sidecar.socket, "--pool-path", f"{sidecar.pool}-2", *size)
    assert (same_socket.returncode, same_socket.stderr.splitlines()[-1].partition(": ")[2].partition(";")[0]) == (
        9,
        f"another sidecar serves {sidecar.socket}",
    )
    same_pool = command("maru_sidecar", "run", "--socket", str(tmp_path / "s.sock"), "--pool-path", sidecar.pool, *size)
    assert same_pool.returncode == 9
    assert f"is held by process {sidecar.pid}" in same_pool.stderr
    assert sidecar.state() == "READY"


def test_http_serves_what_status_serves_once_it_is_configured() -> None:
    from urllib.request import urlopen

    with running_sidecar(pool_bytes=32 << 20, flags=("--http", "127.0.0.1:0")) as running:
        found = re.search(r"HTTP on 127\.0\.0\.1:(\d+)", running.log.read_text())
        assert found
        base = f"http://127.0.0.1:{found[1]}"
        assert urlopen(f"{base}/healthz", timeout=10).read() == b"ok\n"
        assert urlopen(f"{base}/readyz", timeout=10).status == 200
        with urlopen(f"{base}/status", timeout=10) as answer:
            assert set(json.load(answer)) == set(maru(running, "status"))  # type: ignore[call-overload]
        metrics = urlopen(f"{base}/metrics", timeout=10).read().decode()
        families = {line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE")}
        samples = [line for line in metrics.splitlines() if not line.startswith("#")]
        assert {"maru_info", "maru_requests_total", "maru_http_requests_total"} <= families
        assert all(re.fullmatch(r'[a-z_]+(\{([a-z_]+="[^"]*",?)*\})? [-+0-9.eNaInf]+', line) for line in samples)
        assert families == {re.split(r"[{ ]", line)[0] for line in samples}


def test_pins_outlive_the_sidecar_as_the_help_says(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, cache=KvCache()) as worker:
        worker.store(prompt_keys("a", 1), blocks(1))
        [chunk] = sidecar.chunks()
        assert maru(sidecar, "cache", "pin", chunk.namespace, chunk.key)["pinned"] == 1  # type: ignore[index]
        assert [c.pinned for c in sidecar.chunks()] == [True]
    for end in (sidecar.stop, sidecar.kill):
        end()
        sidecar.start()
        assert [(c.key, c.pinned) for c in sidecar.chunks()] == [(chunk.key, True)]
    assert maru(sidecar, "cache", "clear", "--all") == {"dropped": 0, "kept": 1}
    assert maru(sidecar, "cache", "unpin", chunk.namespace, chunk.key)["unpinned"] == 1  # type: ignore[index]
    sidecar.kill()
    sidecar.start()
    assert [(c.key, c.pinned) for c in sidecar.chunks()] == [(chunk.key, False)]
    assert "outlive the sidecar" in command("maru_sidecar", "cache", "pin", "--help").stdout
