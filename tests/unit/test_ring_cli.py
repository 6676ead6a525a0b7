"""`maru-ring` on real segments in /dev/shm: what it shows, that it cannot disturb, that one bad segment hides no other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from maru_shm import __version__
from maru_shm import layout as L
from maru_shm import segment as S
from maru_shm.records import ClientRecords, SidecarRecords
from maru_shm.ring import SubmissionProducer
from maru_sidecar.listener import instance_of
from maru_sidecar.ring_cli import cli
from maru_sidecar.ring_view import SegmentView, open_named

INSTANCE = f"{os.getpid() & 0xFFFFFFFF:08x}"
SHAPE = L.SegmentShape.for_limits(8, 16, 64)


class Pair:
    """A segment with both ends in this process."""

    def __init__(self, session: int, **changes: object) -> None:
        own = S.process_start_time(os.getpid())
        info = S.SegmentInfo(
            0x1234, session, SHAPE, os.getpid(), os.getpid(), own, time.time_ns(), INSTANCE, L.Role.WORKER
        )  # fmt: skip
        self.segment = S.create(replace(info, **changes))  # type: ignore[arg-type]
        self.name = self.segment.info.name
        self.ring = SubmissionProducer(self.segment)
        self.client = ClientRecords(self.segment, self.ring)
        self.sidecar = SidecarRecords(self.segment)

    def post(self, op: L.Op = L.Op.LOAD, label: str = "req-1", chunks: int = 2) -> int:
        ticket = self.client.post(op, bytes(range(16)) * chunks, bytes(8 * chunks), depth=3, fence=9, label=label)
        self.ring.publish()
        return ticket

    def finish(self, ticket: int, state: L.State = L.State.DONE, code: L.Code = L.Code.OK) -> None:
        self.sidecar.accept(ticket)
        self.sidecar.complete(ticket, state, code, n_done=2, n_bytes=8192, t_first_copy=time.monotonic_ns())

    def close(self) -> None:
        S.unlink(self.name)
        self.segment.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(1)
    yield made
    made.close()


def ring(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def rows(*arguments: str) -> list[dict[str, object]]:
    return json.loads(ring(*arguments, "--format", "json").stdout)  # type: ignore[no-any-return]


def dead_process() -> tuple[int, int]:
    """Pid and start time of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = S.process_start_time(child.pid)
    child.communicate(b"\n")
    return child.pid, start


def test_ls_shows_ring_positions_processes_and_state(pair: Pair) -> None:
    pair.segment.words[L.WORD_SIDECAR_STATE] = L.SidecarState.DRAINING
    pair.segment.words[L.WORD_CLIENT_STEP], pair.segment.words[L.WORD_FENCE] = 12, 11
    pair.segment.words[L.WORD_ARMED] = 1
    pair.post()
    (row,) = rows("ls", "--instance", INSTANCE)
    expected = {
        "segment": pair.name, "role": "worker", "sidecar": str(os.getpid()), "state": "DRAINING", "head": 0, "tail": 1,
        "queued": 1, "in_flight": 1, "armed": True, "step": 12, "fence": 11, "problem": "",
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert pair.name in ring("ls", "--instance", INSTANCE).stdout


def test_show_counts_records_by_state(pair: Pair) -> None:
    pair.finish(pair.post())
    pair.post()
    sections = json.loads(ring("show", pair.name, "--format", "json").stdout)
    assert sections["records"] == {"FREE": 6, "DONE": 1, "POSTED": 1}
    assert sections["shape"]["total_bytes"] == SHAPE.total_bytes
    assert "generation  0000000000001234" in ring("show", pair.name).stdout


def test_records_show_the_request_and_how_long_each_step_took(pair: Pair) -> None:
    pair.finish(pair.post(label="req-done"), L.State.FAILED, L.Code.NOT_FOUND)
    pair.post(L.Op.STORE, label="req-new", chunks=1)
    done, new = rows("records", pair.name)
    assert (done["op"], done["state"], done["code"], done["label"]) == ("LOAD", "FAILED", "NOT_FOUND", "req-done")
    assert (done["keys"], done["blocks"], done["depth"], done["done"], done["bytes"]) == (2, 4, 3, 2, 8192)
    steps = [done["accept_us"], done["first_copy_us"], done["copy_us"]]
    assert all(isinstance(step, float) and step >= 0 for step in steps)
    assert done["total_us"] == pytest.approx(sum(steps), abs=1)  # type: ignore[arg-type]
    assert (new["op"], new["state"], new["accept_us"], new["total_us"], new["code"]) == ("STORE", "POSTED", None, None, "")


def test_a_reused_record_does_not_show_the_answer_to_its_previous_ticket(pair: Pair) -> None:
    ticket = pair.post()
    pair.finish(ticket)
    pair.client.free(ticket)
    pair.post(label="second")
    (row,) = rows("records", pair.name)
    assert (row["label"], row["done"], row["bytes"], row["total_us"]) == ("second", 0, 0, None)


def test_freed_records_keep_their_answer_for_those_who_ask(pair: Pair) -> None:
    ticket = pair.post()
    pair.finish(ticket)
    pair.client.free(ticket)
    assert rows("records", pair.name) == []
    (row,) = rows("records", pair.name, "--all")
    assert (row["state"], row["code"], row["bytes"]) == ("FREE", "OK", 8192)


def test_a_session_number_is_enough_where_only_one_segment_has_it(pair: Pair) -> None:
    other = Pair(77_001)
    try:
        other.post(label="by-number")
        assert [row["label"] for row in rows("records", "77001")] == ["by-number"]
    finally:
        other.close()


def test_the_kernel_lets_it_read_only(pair: Pair) -> None:
    with open_named(pair.name), open("/proc/self/maps", encoding="ascii") as maps:
        modes = [line.split()[1] for line in maps if line.rstrip().endswith(pair.name)]
    assert sorted(modes) == ["r--s", "rw-s"]  # the tool's, and the pair's own


def test_tail_follows_what_completes_and_nothing_older(pair: Pair) -> None:
    pair.finish(pair.post(label="before"))
    view = SegmentView(S.open_readonly(pair.name), pair.name)
    view.skip_completed()
    first, second = pair.post(label="first"), pair.post(label="second")
    assert view.newly_completed() == []
    pair.finish(second)
    pair.finish(first)
    pair.client.free(second)  # freed before the next look: the answer is still there
    assert [r.label for r in view.newly_completed()] == ["second", "first"]
    assert view.newly_completed() == []
    pair.finish(pair.post(label="reuse"))
    assert [r.label for r in view.newly_completed()] == ["reuse"]
    view.close()


def test_tail_ends_at_its_count(pair: Pair) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            ticket = pair.post(label="busy")
            pair.finish(ticket)
            pair.client.free(ticket)
            stop.wait(0.002)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        lines = ring("tail", pair.name, "--count", "3", "--seconds", "30", "--format", "json").stdout.splitlines()
    finally:
        stop.set()
        worker.join()
    assert [json.loads(line)["label"] for line in lines] == ["busy"] * 3


def test_tail_ends_at_its_time_when_nothing_happens(pair: Pair) -> None:
    assert ring("tail", pair.name, "--seconds", "0").stdout == ""


def test_nothing_is_stuck_while_tickets_are_young(pair: Pair) -> None:
    pair.post()
    pair.sidecar.begin_copy(pair.post(label="copying"))
    result = ring("stuck", "--instance", INSTANCE, "--seconds", "3600")
    assert (result.exit_code, result.stdout) == (0, "nothing is stuck\n")


def test_old_tickets_are_stuck_with_what_they_wait_for(pair: Pair) -> None:
    pair.post(label="unseen")
    accepted = pair.post(label="slow")
    pair.sidecar.accept(accepted)
    pair.sidecar.begin_copy(accepted)
    pair.client.set_cancel(accepted)
    result = ring("stuck", "--instance", INSTANCE, "--seconds", "0", "--format", "json")
    assert result.exit_code == 3
    assert {row["label"]: row["what"] for row in json.loads(result.stdout)} == {
        "unseen": "not accepted",
        "slow": "accepted, not answered, a copy may still touch the client's memory, cancel asked",
    }


def test_a_copy_left_open_on_an_answered_ticket_is_stuck_at_any_age(pair: Pair) -> None:
    ticket = pair.post()
    pair.sidecar.accept(ticket)
    pair.sidecar.begin_copy(ticket)
    pair.sidecar.complete(ticket, L.State.FAILED, L.Code.COPY_FAILED)
    result = ring("stuck", "--instance", INSTANCE, "--seconds", "3600")
    assert result.exit_code == 3
    assert "a copy may still touch the client's memory" in result.stdout


def test_dead_processes_make_a_segment_stuck() -> None:
    pid, start = dead_process()
    pair = Pair(2, sidecar_pid=pid, sidecar_start=start, client_pid=pid)
    try:
        pair.post(label="orphan")
        result = ring("stuck", "--instance", INSTANCE, "--seconds", "3600", "--format", "json")
        whats = [row["what"] for row in json.loads(result.stdout)]
        assert (result.exit_code, whats) == (3, [f"sidecar {pid} is dead, client {pid} is dead", "not accepted"])
    finally:
        pair.close()


def test_a_killed_process_that_nobody_waited_for_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pair = Pair(4, sidecar_pid=child.pid, sidecar_start=S.process_start_time(child.pid), client_pid=child.pid)
    try:
        (row,) = rows("ls", "--instance", INSTANCE)
        assert (row["sidecar"], row["client"]) == (str(child.pid), str(child.pid))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        (row,) = rows("ls", "--instance", INSTANCE)
        assert (row["sidecar"], row["client"]) == (f"{child.pid} dead", f"{child.pid} dead")
        assert ring("stuck", "--instance", INSTANCE).exit_code == 3
    finally:
        child.communicate()
        pair.close()


def test_a_pid_that_was_given_to_another_process_counts_as_dead() -> None:
    pair = Pair(3, sidecar_start=S.process_start_time(os.getpid()) - 1)
    try:
        (row,) = rows("ls", "--instance", INSTANCE)
        assert row["sidecar"] == f"{os.getpid()} dead"
    finally:
        pair.close()


def test_segments_are_chosen_by_the_socket_of_their_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    mine, other = Pair(5, instance=instance_of(str(path))), Pair(6)
    try:
        mine.post(label="mine")
        other.post(label="other")
        link = tmp_path / "link"
        link.symlink_to(tmp_path)
        for place in (path, link / "control.sock"):  # nobody needs to answer there
            assert [row["segment"] for row in rows("ls", "--socket", str(place))] == [mine.name]
            assert [row["label"] for row in rows("records", "--socket", str(place))] == ["mine"]
            stuck = json.loads(ring("stuck", "--socket", str(place), "--seconds", "0", "--format", "json").stdout)
            assert {row["segment"] for row in stuck} == {mine.name}
        assert ring("tail", "--socket", str(path), "--seconds", "0").exit_code == 0
        with contextlib.closing(socket_at(tmp_path / "another.sock")):  # a sidecar without engines
            assert rows("ls", "--socket", str(tmp_path / "another.sock")) == []
        both = CliRunner().invoke(cli, ["ls", "--socket", str(path), "--instance", INSTANCE])
        assert (both.exit_code, "give one of them" in both.stderr) == (2, True)
    finally:
        mine.close()
        other.close()


def socket_at(path: Path) -> socket.socket:
    """A socket that lies there; nobody serves it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(str(path))
    return made


@pytest.mark.parametrize("verb", [("ls",), ("records",), ("stuck",), ("tail", "--seconds", "0")])
def test_a_path_where_no_sidecar_is_or_was_does_not_look_as_if_all_were_well(tmp_path: Path, verb: tuple[str, ...]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path, why in ((tmp_path / "none.sock", "No such file or directory"), (file, "it is no socket")):
        result = run_ring(*verb, "--socket", str(path))
        assert (result.returncode, result.stdout) == (4, "")
        assert result.stderr == f"maru-ring: no sidecar at {path}: {why}; nor has one left segments; name the right socket\n"
    with contextlib.closing(socket_at(tmp_path / "idle.sock")):
        assert run_ring(*verb, "--socket", str(tmp_path / "idle.sock")).returncode == 0
    assert "4 no sidecar" in run_ring("--help").stdout


@pytest.mark.parametrize("verb", ["ls", "records", "stuck", "tail"])
@pytest.mark.parametrize("instance", ["zz", "", "0badcaf", "0badcafe0", "/0badcafe"])
def test_what_is_no_instance_is_a_wrong_flag(verb: str, instance: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--instance", instance])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{instance!r} is no instance: 8 hex digits" in result.stderr


def test_an_instance_may_be_written_in_capitals() -> None:
    pair = Pair(7, instance="abcdef01")
    try:
        assert [row["segment"] for row in rows("ls", "--instance", "ABCDEF01")] == [pair.name]
    finally:
        pair.close()


def test_it_says_its_version() -> None:
    assert ring("--version").stdout == f"maru-ring, version {__version__}\n"


def spoil_magic(pair: Pair) -> None:
    pair.segment.words[L.WORD_MAGIC] = 0


def spoil_header(pair: Pair) -> None:
    pair.segment.bytes[L.STATIC_OFFSET + 40] ^= 0xFF


def spoil_size(pair: Pair) -> None:
    os.truncate(S.SHM_DIR + pair.name, 100)


def spoil_abi(pair: Pair) -> None:
    pair.segment.bytes[L.STATIC_OFFSET + 8] = 9


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (spoil_magic, "segment magic is 0x0000000000000000"),
        (spoil_header, "segment header checksum"),
        (spoil_size, "segment has 100 bytes"),
        (spoil_abi, "segment has ABI 9.0, this program 1.0"),
    ],
)
def test_a_segment_that_cannot_be_read_is_named_and_hides_no_other(pair: Pair, spoil: object, problem: str) -> None:
    broken = Pair(0)  # sorts before the good one
    try:
        spoil(broken)  # type: ignore[operator]
        listed = {row["segment"]: str(row["problem"]) for row in rows("ls", "--instance", INSTANCE)}
        assert problem in listed[broken.name]
        assert listed[pair.name] == ""
        result = ring("stuck", "--instance", INSTANCE, "--seconds", "3600")
        assert (result.exit_code, problem in result.stdout) == (6, True)
        pair.post(label="waiting")
        assert ring("stuck", "--instance", INSTANCE, "--seconds", "0").exit_code == 3
        pair.post(label="fine")
        result = ring("records")
        assert "fine" in result.stdout
        assert problem in result.stderr
    finally:
        broken.close()


def test_garbage_in_a_record_is_shown_not_raised(pair: Pair) -> None:
    ticket = pair.post()
    base = SHAPE.records_offset + (ticket & L.TICKET_INDEX_MASK) * L.RECORD_BYTES
    pair.segment.words[base // 8 + L.STATE_WORD] = ticket << 8 | 99
    pair.segment.bytes[base + 8] = 200
    (row,) = rows("records", pair.name)
    assert (row["state"], row["op"]) == ("?99", "?200")
    result = ring("stuck", "--instance", INSTANCE)
    assert "state is none of the protocol's" in result.stdout


def run_ring(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "maru_sidecar.ring_cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_an_unknown_segment_is_one_line_and_its_own_exit_code() -> None:
    result = run_ring("show", "maru.00000000.0000000000000000.0")
    assert (result.returncode, result.stdout) == (6, "")
    assert result.stderr == (
        "maru-ring: segment maru.00000000.0000000000000000.0 does not exist; list live segments with `maru-ring ls`\n"
    )


def test_the_exit_code_of_stuck_reaches_the_shell(pair: Pair) -> None:
    pair.post()
    assert run_ring("stuck", "--instance", INSTANCE, "--seconds", "0").returncode == 3
