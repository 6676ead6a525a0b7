"""What the daemon says of itself, over the socket and over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.support.client import Client, KvCache, admin, blocks_table, prompt_keys
from tests.support.sidecar_process import SidecarProcess
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.errors import AttachRefused, MaruError


@pytest.fixture
def sidecar() -> Iterator[SidecarProcess]:
    process = SidecarProcess(flags=("--http", "127.0.0.1:0"))
    process.start()
    yield process
    process.close()


def port(sidecar: SidecarProcess) -> int:
    (line,) = [line for line in sidecar.log.read_text().splitlines() if "HTTP on" in line]
    return int(line.rpartition(":")[2])


def get(sidecar: SidecarProcess, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port(sidecar)}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def metrics(sidecar: SidecarProcess) -> dict[str, float]:
    lines = get(sidecar, "/metrics")[1].splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def sections(sidecar: SidecarProcess) -> dict[str, Any]:
    answer = sidecar.ask(M.GetStatus())
    assert isinstance(answer, M.Status)
    return answer.sections


def test_every_metric_is_there_at_zero_before_the_first_request_and_counts_afterwards(sidecar: SidecarProcess) -> None:
    before = metrics(sidecar)
    for name in (
        "maru_directory_chunks_asked_total", "maru_directory_chunks_hit_total", "maru_directory_evicted_total",
        'maru_requests_total{op="load",outcome="done"}', 'maru_requests_total{op="lookup",outcome="failed"}',
        'maru_transfer_bytes_total{op="store"}', 'maru_queue_jobs{device="cpu",queue="load"}',
        'maru_failures_total{code="POOL_FULL"}', "maru_protocol_violations_total", "maru_pending_chunks",
    ):  # fmt: skip
        assert before[name] == 0, name
    assert before['maru_state{state="READY"}'] == 1
    with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        worker.store(prompt_keys("m", 3), blocks_table(0, 3))
        scheduler.hits(prompt_keys("m", 5))
        worker.load(prompt_keys("m", 3), blocks_table(0, 3))
        after = metrics(sidecar)
        slab = 4 * 3 * 4096
        assert after["maru_directory_chunks_asked_total"] == 5
        assert after["maru_directory_chunks_hit_total"] == 3
        assert after['maru_transfer_bytes_total{op="store"}'] == 3 * slab
        assert after['maru_transfer_bytes_total{op="load"}'] == 3 * slab
        assert after['maru_requests_total{op="load",outcome="done"}'] == 1
        assert after["maru_pool_used_bytes"] == 3 * slab
        assert after['maru_sessions{role="worker"}'] == 1
    assert set(before) <= set(after)
    for name in before:
        assert name.split("{")[0].endswith("_total") or before[name] >= 0


def test_sections_name_engines_sessions_queues_and_health(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, engine_id="llm"):
        said = sections(sidecar)
        assert said["sidecar"]["state"] == "READY"
        assert said["sidecar"]["health"] == "good"
        (engine,) = said["engines"]
        assert (engine["engine_id"], engine["complete"], engine["label"]) == ("llm", True, "test model")
        (session,) = said["sessions"]
        assert (session["pid"], session["transfer"]) == (os.getpid(), "cpu")
        assert {(q["device"], q["queue"], q["alive"]) for q in said["queues"]} == {
            ("cpu", "load", True),
            ("cpu", "store", True),
        }
        assert {t["op"] for t in said["transfers"]} == {op.name.lower() for op in L.Op}
    assert json.loads(get(sidecar, "/status")[1])["sidecar"]["pid"] == sidecar.pid


def test_an_engine_that_is_refused_is_in_the_log_the_status_and_the_metrics(sidecar: SidecarProcess) -> None:
    """At once (a chunk that fits no region) and late, from the attach's thread (memory that is not there)."""
    assert sections(sidecar)["refusals"] == {}
    huge, away = KvCache(num_blocks=4, layers=1, piece=4 << 20), KvCache()
    (region,) = away.layout.regions
    away.layout = msgspec.structs.replace(away.layout, regions=(msgspec.structs.replace(region, address=4096),))
    for engine_id, cache in (("too large", huge), ("too large", huge), ("elsewhere", away)):
        with pytest.raises(AttachRefused):
            Client(sidecar.socket, engine_id=engine_id, cache=cache)
    said = sections(sidecar)
    assert said["sidecar"]["connections_refused"] == 3
    counts = {"bad_geometry": 2, "unreachable_memory": 1}
    assert said["refusals"].items() >= counts.items()
    assert "worker 0 of engine 'elsewhere', refused (unreachable_memory): " in said["refusals"]["last"]
    assert 0 <= said["refusals"]["last_age_s"] < 600
    log = sidecar.log.read_text()
    for engine_id, code in (("too large", "bad_geometry"), ("elsewhere", "unreachable_memory")):
        assert log.count(f"worker 0 of engine '{engine_id}', refused ({code}): ") == 1  # the second time within 10 s
    assert "or make the pool anew with pool.region_size = 32MiB or pool.size = 512MiB, or more" in log
    shown = subprocess.run(
        [sys.executable, "-m", "maru_sidecar", "status", "--socket", sidecar.socket],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    lines = [line.split() for line in shown.splitlines()]
    for words in (["connections_refused", "3"], ["bad_geometry", "2"], ["unreachable_memory", "1"]):
        assert words in lines
    assert "engine 'elsewhere', refused" in shown
    counted = metrics(sidecar)
    assert {code: counted[f'maru_refused_total{{code="{code}"}}'] for code in (*counts, "limit")} == {**counts, "limit": 0}


def test_lookups_of_an_engine_without_workers_are_misses_with_a_reason_and_no_failures(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
        assert [scheduler.hits(prompt_keys("early", 2)) for _ in range(3)] == [0, 0, 0]
    said = sections(sidecar)
    (lookups,) = [row for row in said["transfers"] if row["op"] == "lookup"]
    assert (lookups["tickets"], lookups["failed"], said["failures"]) == (3, 0, {})
    assert said["cache"]["lookups_not_registered"] == 3


def test_readiness_follows_the_drain_and_health_does_not(sidecar: SidecarProcess) -> None:
    assert get(sidecar, "/readyz")[0] == get(sidecar, "/healthz")[0] == 200
    admin(sidecar.socket, M.Drain())
    assert get(sidecar, "/readyz") == (503, "DRAINING\n")
    assert get(sidecar, "/healthz")[0] == 200


def test_the_socket_answers_while_a_pool_is_being_opened_and_attaches_wait_for_it() -> None:
    """A pool of 3 GiB takes a second or so to size; the daemon says STARTING, and an early attach succeeds when it is there."""
    with tempfile.TemporaryDirectory(prefix="maru-test-") as directory:
        socket, pool = f"{directory}/s", f"/dev/shm/maru-test-pool-{os.getpid()}-slow"
        argv = [sys.executable, "-m", "maru_sidecar", "run", "--socket", socket, "--pool-path", pool, "--pool-size", "3GiB"]
        with open(f"{directory}/log", "wb") as log:
            process = subprocess.Popen(argv, stderr=log)
        try:
            until(lambda: os.path.exists(socket), "it listens")
            states = [state_of(socket)]
            with Client(socket, role=L.Role.SCHEDULER) as client:
                states.append(state_of(socket))
                assert client.segment.words[L.WORD_SIDECAR_STATE] == L.SidecarState.READY
            assert states[0] in ("STARTING", "READY")
            assert states[1] == "READY"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(30)
            if os.path.exists(pool):
                os.unlink(pool)


def state_of(socket: str) -> str:
    try:
        answer = admin(socket, M.Ping())
    except MaruError as e:
        return str(e)
    assert isinstance(answer, M.Pong)
    return answer.state


def test_sigterm_while_the_pool_is_being_opened_ends_the_daemon() -> None:
    with tempfile.TemporaryDirectory(prefix="maru-test-") as directory:
        socket, pool = f"{directory}/s", f"/dev/shm/maru-test-pool-{os.getpid()}-early"
        argv = [sys.executable, "-m", "maru_sidecar", "run", "--socket", socket, "--pool-path", pool, "--pool-size", "3GiB"]
        with open(f"{directory}/log", "wb") as log:
            process = subprocess.Popen(argv, stderr=log)
        try:
            until(lambda: os.path.exists(socket), "it listens")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(30)
            if os.path.exists(pool):
                os.unlink(pool)
