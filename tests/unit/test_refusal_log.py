"""Refusals are all counted; the log hears of each reason at once, and then not too often."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest

from maru_shm import control
from maru_shm import messages as M
from maru_shm.layout import Role
from maru_sidecar.config import Control
from maru_sidecar.connection import Connection
from maru_sidecar.control_server import ControlServer
from maru_sidecar.descriptors import close_later
from maru_sidecar.engines import Refusal
from maru_sidecar.poller import Poller
from maru_sidecar.refusal_log import LOG_EVERY_S, Refusals

TOO_LARGE = M.Refused(M.RefusalCode.BAD_GEOMETRY, "a chunk is too large", "lower it")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_client_that_tries_again_and_again_is_one_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    for _ in range(4):
        refusals.note("engine a", TOO_LARGE)
        clock.now += 2
    assert caplog.messages == ["engine a refused (bad_geometry): a chunk is too large; lower it"]
    clock.now = 1000.0 + LOG_EVERY_S
    refusals.say()  # nobody asks any more; the last ones are not forgotten
    assert caplog.messages[1:] == [f"{caplog.messages[0]} (2 more before it for this reason)"]
    clock.now += 10 * LOG_EVERY_S
    refusals.say()
    assert len(caplog.messages) == 2
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_one_reason_does_not_hide_another(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(Clock())
    for _ in range(100):
        refusals.note("a flood", M.Refused(M.RefusalCode.BAD_MESSAGE, "garbage"))
    refusals.note("engine a", TOO_LARGE)
    assert [message.partition(" refused")[0] for message in caplog.messages] == ["a flood", "engine a"]


def test_the_status_counts_by_reason_and_holds_the_last_one_with_its_age() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    assert (refusals.status(), refusals.total) == ({}, 0)
    refusals.note("b", M.Refused(M.RefusalCode.LIMIT, "3 engines are attached", "raise limits.max_engines"))
    refusals.note("a", TOO_LARGE)
    refusals.note("a", TOO_LARGE)
    clock.now += 3
    assert refusals.status() == {
        "bad_geometry": 2, "limit": 1, "last": "a refused (bad_geometry): a chunk is too large; lower it", "last_age_s": 3.0,
    }  # fmt: skip
    assert refusals.total == 3
    assert set(refusals.counts) == set(M.RefusalCode)


def test_what_a_client_calls_itself_makes_no_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    Refusals(Clock()).note("x\nWARNING all is well\x1b[2J", M.Refused(M.RefusalCode.FAILED, "y" * 10_000))
    (line,) = caplog.messages
    assert line.isprintable()
    assert len(line) < 1000


class Refusing:
    """Refuses one kind at once, and another later, as an attach is by its thread."""

    server: ControlServer

    def welcome(self) -> M.Welcome:
        return M.Welcome(M.PROTOCOL, "test", 1, 1, "0badcafe")

    def request(self, connection: Connection, message: M.ClientMessage, fds: list[int]) -> M.SidecarMessage | None:
        close_later(fds)
        if isinstance(message, M.Drain):
            raise Refusal(M.RefusalCode.NOT_AUTHORISED, "you may not", "ask root")
        if isinstance(message, M.Attach):
            self.server.defer(connection)
            self.server.reply(connection, M.Refused(M.RefusalCode.UNREACHABLE_MEMORY, "no such memory", "see ptrace_scope"))
            return None
        return M.Pong("READY")

    def disconnected(self, connection: Connection) -> None: ...


def test_every_refusal_is_counted_and_logged_with_who_asked_for_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, poller, service = str(tmp_path / "control.sock"), Poller(), Refusing()
    server = service.server = ControlServer(Control(socket=path), poller, service)
    attach = M.Attach(Role.SCHEDULER, "llm-7", 0, 1, b"r" * 16, 64, 8, 8, 8)
    with contextlib.closing(control.connect(path, 5.0)) as sock:
        for message in (M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "engine"), M.Ping(), M.Drain(), attach, M.Hello(1, 1, "again")):
            control.send(sock, message)
            while poller.poll(0.2):
                pass
    server.close()
    poller.close()
    assert server.refusals.total == 3
    counted = {code.value for code, n in server.refusals.counts.items() if n}
    assert counted == {"not_authorised", "unreachable_memory", "bad_message"}
    said = [message.replace("engine (pid ", "") for message in caplog.messages if " refused (" in message]
    assert "Drain, refused (not_authorised): you may not; ask root" in said[0]
    assert "scheduler 0 of engine 'llm-7', refused (unreachable_memory): no such memory; see ptrace_scope" in said[1]
    assert "refused (bad_message): Hello where a (single) Hello was expected" in said[2]
