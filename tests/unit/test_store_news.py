"""What is logged of stores into a shared pool."""

from __future__ import annotations

import logging

import pytest

from maru_sidecar.sharing.news import START_S, StoreNews


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    caplog.clear()
    return lines


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_each_turn_is_logged_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    news = StoreNews(clock)
    for _ in range(3):
        news.look(lambda: "")
    assert said(caplog) == ["INFO stores are possible"]
    for why in ("the lease has run out", "the lease has run out", "another reason"):
        news.look(lambda why=why: why)  # type: ignore[misc]
    assert said(caplog) == ["WARNING stores stop: the lease has run out"]
    clock.now += 7
    for _ in range(3):
        news.look(lambda: "")
    assert said(caplog) == ["INFO stores are possible again, after 7.0 s without"]


def test_a_start_without_stores_is_logged_when_it_lasts(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    news = StoreNews(clock)
    news.look(lambda: "connecting")
    assert said(caplog) == []
    clock.now += START_S
    news.look(lambda: "nobody listens")
    news.look(lambda: "nobody listens")
    assert said(caplog) == ["WARNING nothing can be stored yet: nobody listens"]
    news.look(lambda: "")
    assert said(caplog) == [f"INFO stores are possible again, after {START_S:.1f} s without"]
