"""Memory that is taken away under the daemon, in a process of its own: what would kill it is an event."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

_SETUP = """
import ctypes, mmap, os, sys, threading
import numpy as np
from maru_shm.layout import SegmentShape, Role
from maru_shm import segment as S
from maru_sidecar.bus_guard import BUS_GUARD

shape = SegmentShape(64, 64, 1 << 16, 1 << 10)
name = S.segment_name("0badcafe", int.from_bytes(os.urandom(8), "little"), 1)
info = S.SegmentInfo(int(name.split(".")[2], 16), 1, shape, os.getpid(), os.getpid(), 1, 0, "0badcafe", Role.WORKER)
segment = S.create(info)
S.unlink(name)
told = []
BUS_GUARD.install()
BUS_GUARD.add(segment, lambda: told.append(threading.current_thread().name))
view = np.frombuffer(segment.bytes, np.uint8)
view[:] = 7
size = len(view)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    script = _SETUP + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


ACCESSES = {
    "a word is read": "got = segment.words[size // 8 - 1]",
    "a word is written": "segment.words[size // 8 - 1] = 1; got = segment.words[0]",
    "bytes are copied": "got = bytes(segment.bytes[size - 4096 :])[0]",
    "an array is summed": "got = int(view[::-1].sum())",
    "the C library copies": "got = ctypes.string_at(view.ctypes.data + size - 9, 9)[0]",
}


@pytest.mark.parametrize("left", ["0", "4096"])
@pytest.mark.parametrize("access", ACCESSES.values(), ids=list(ACCESSES))
def test_a_segment_cut_short_reads_as_zeros_and_its_owner_is_told_once(access: str, left: str) -> None:
    done = run(f"""
        os.ftruncate(segment.fd, {left})
        {access}
        assert got == 0, got
        assert told == ["MainThread"], told
        {access}
        assert view.sum() <= 1
        assert len(told) == 1
    """)
    assert done.returncode == 0, done.stderr


def test_an_owner_that_cannot_be_told_does_not_end_the_guard() -> None:
    done = run("""
        BUS_GUARD.add(segment, lambda: 1 // 0)
        os.ftruncate(segment.fd, 0)
        assert segment.words[0] == 0
        fd = os.memfd_create("another")
        os.ftruncate(fd, size)
        another = S.Segment(mmap.mmap(fd, size), info)
        BUS_GUARD.add(another, lambda: told.append("another"))
        os.ftruncate(fd, 0)
        assert another.words[0] == 0
        assert told == ["another"]
    """)
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_threads_that_fault_together_all_go_on() -> None:
    done = run("""
        os.ftruncate(segment.fd, 0)
        sums = []
        threads = [threading.Thread(target=lambda: sums.append(int(view.sum()))) for _ in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert sums == [0] * 8, sums
        assert told
    """)
    assert done.returncode == 0, done.stderr


def test_a_segment_is_guarded_as_long_as_a_view_of_it_is_held() -> None:
    done = run("""
        BUS_GUARD.close(segment)
        assert segment.mapped and BUS_GUARD._guarded
        assert view[0] == 7
    """)
    assert done.returncode == 0, done.stderr
    done = run("""
        del view
        BUS_GUARD.close(segment)
        assert not segment.mapped and not BUS_GUARD._guarded
    """)
    assert done.returncode == 0, done.stderr


def test_a_fault_in_other_memory_ends_the_process_as_before() -> None:
    done = run("""
        fd = os.memfd_create("other")
        os.ftruncate(fd, 4096)
        other = mmap.mmap(fd, 4096)
        os.ftruncate(fd, 0)
        other[0]
    """)
    assert done.returncode == -signal.SIGBUS, done.stderr
