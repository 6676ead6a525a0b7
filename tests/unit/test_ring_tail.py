"""`maru-ring tail` while engines come and go: everything that ends is shown, once, and nothing that is gone is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO

import pytest
from tests.support.waiting import until
from tests.unit.test_ring_cli import INSTANCE as PAIRS
from tests.unit.test_ring_cli import Pair, dead_process

from maru_shm import layout as L
from maru_shm import segment as S
from maru_shm.errors import SegmentNotReady
from maru_sidecar.ring_tail import Following

INSTANCE = f"{int(PAIRS, 16) ^ 0x80000000:08x}"
Make = Callable[..., Pair]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes segments of one instance that are removed at the end."""
    made: list[Pair] = []

    def one(session: int, **changes: object) -> Pair:
        made.append(Pair(session, **{"instance": INSTANCE, **changes}))
        return made[-1]

    yield one
    for pair in made:
        pair.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def following(said: list[str]) -> Iterator[Following]:
    with Following(INSTANCE, (), said.append) as following:
        yield following


def end(pair: Pair, label: str) -> None:
    pair.finish(pair.post(label=label))


def labels(following: Following, n: int) -> list[str]:
    """Of the next ``n`` that are reported, in their order; more if there are."""
    found: list[str] = []

    def enough() -> bool:
        found.extend(record.label for record in following.completed())
        return len(found) >= n

    until(enough, f"{n} are reported")
    return found


def mapped(name: str) -> bool:
    """Whether this process maps the segment read-only."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        return any(name in line and "r--s" in line for line in maps)


def test_it_waits_for_the_first_engine_and_says_so_once(following: Following, said: list[str], make: Make) -> None:
    assert following.completed() == following.completed() == []
    assert said == ["no segments; waiting for one"]
    end(make(1), "first")
    assert labels(following, 1) == ["first"]


def test_what_ended_before_the_segment_was_found_is_shown_and_what_ended_before_the_tool_began_is_not(
    said: list[str], make: Make
) -> None:
    old = make(1)
    end(old, "before")
    with Following(INSTANCE, (), said.append) as following:
        end(old, "after")
        new = make(2)
        ticket = new.post(label="at once")
        new.finish(ticket)
        new.client.free(ticket)
        assert sorted(labels(following, 2)) == ["after", "at once"]
        assert following.completed() == []
    assert said == []


def test_a_segment_that_vanished_is_closed_and_its_successor_followed(
    following: Following, said: list[str], make: Make
) -> None:
    first = make(1)
    end(first, "first")
    assert labels(following, 1) == ["first"]
    end(first, "last")
    S.unlink(first.name)
    assert labels(following, 1) == ["last"]
    until(lambda: following.completed() == [] and not mapped(first.name), "it is unmapped")
    assert said == ["no segments; waiting for one", "no segments any more; waiting for one"]
    end(make(2), "second")
    assert labels(following, 1) == ["second"]


def test_an_answer_that_comes_after_the_name_is_gone_is_shown(following: Following, make: Make) -> None:
    """A session's name goes first; what a copy of it still moved is answered afterwards."""
    pair, other = make(1), make(2)
    late = pair.post(label="late")
    pair.sidecar.accept(late)
    end(other, "other")
    assert labels(following, 1) == ["other"]
    S.unlink(pair.name)
    make(3)  # has the directory listed again
    end(other, "listed since")
    assert labels(following, 1) == ["listed since"]
    assert mapped(pair.name)
    pair.sidecar.complete(late, L.State.FAILED, L.Code.ENGINE_GONE)
    assert labels(following, 1) == ["late"]
    until(lambda: following.completed() == [] and not mapped(pair.name), "it is unmapped")


def test_nobody_waits_for_the_answer_of_a_dead_sidecar(following: Following, make: Make) -> None:
    pid, start = dead_process()
    pair = make(1, sidecar_pid=pid, sidecar_start=start)
    pair.sidecar.accept(pair.post())
    until(lambda: following.completed() == [] and mapped(pair.name), "it is followed")
    S.unlink(pair.name)
    until(lambda: following.completed() == [] and not mapped(pair.name), "it is unmapped")


def test_across_many_restarts_everything_is_shown_once(following: Following, make: Make) -> None:
    engines, each = 20, 5
    shown: list[str] = []

    def restart() -> None:
        before: Pair | None = None
        for session in range(engines):
            pair = make(session)
            for i in range(each):
                end(pair, f"{session}-{i}")
            if before is not None:  # the next engine is there before the last one's segment goes
                until(lambda last=f"{session - 1}-0": last in shown, "the one before was seen")  # type: ignore[misc]
                end(before, f"{session - 1}-late")
                S.unlink(before.name)
            before = pair

    def enough() -> bool:
        shown.extend(record.label for record in following.completed())
        return len(shown) >= len(wanted)

    wanted = [f"{s}-{i}" for s in range(engines) for i in [*range(each), *(["late"] if s < engines - 1 else [])]]
    thread = threading.Thread(target=restart)
    thread.start()
    try:
        until(enough, f"{len(wanted)} are shown")
    finally:
        thread.join()
    assert following.completed() == []
    assert sorted(shown) == sorted(wanted)


def test_segments_that_were_named_are_not_waited_for_when_they_are_gone(said: list[str], make: Make) -> None:
    named, other = make(1), make(2)
    with Following(None, [named.name, named.name], said.append) as following:
        end(other, "other")
        end(named, "named")
        assert labels(following, 1) == ["named"]
        assert not following.over
        S.unlink(named.name)
        until(lambda: following.completed() == [] and following.over, "it ends")
    assert said == ["the segments are gone"]
    with pytest.raises(SegmentNotReady):
        Following(None, [named.name], said.append)


def test_one_that_cannot_be_read_is_told_of_once_and_followed_when_it_can(
    following: Following, said: list[str], make: Make
) -> None:
    pair = make(1)
    pair.segment.words[L.WORD_MAGIC] = 0  # as while it is being filled
    until(lambda: following.completed() == [] and len(said) == 2, "it is told of")
    make(2)
    assert following.completed() == []
    assert "segment magic is 0x0000000000000000" in said[1]
    assert len(said) == 2
    end(pair, "filled")
    pair.segment.words[L.WORD_MAGIC] = L.SEGMENT_MAGIC
    assert labels(following, 1) == ["filled"]


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def test_the_command_started_before_any_engine_shows_the_first_one_and_after_its_restart_the_next(make: Make) -> None:
    argv = [sys.executable, "-m", "maru_sidecar.ring_cli", "tail", "--instance", INSTANCE, "--seconds", "60", "--count", "2"]
    with subprocess.Popen(
        [*argv, "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as tail:
        assert line(tail.stderr) == "maru-ring: no segments; waiting for one\n"
        first = make(1)
        end(first, "one")
        assert json.loads(line(tail.stdout))["label"] == "one"
        S.unlink(first.name)
        assert line(tail.stderr) == "maru-ring: no segments any more; waiting for one\n"
        end(make(2), "two")
        assert json.loads(line(tail.stdout))["label"] == "two"
        assert tail.wait(30) == 0
