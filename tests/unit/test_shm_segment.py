"""Segments: published last, refused when they contradict themselves, read-only for tools."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_shm_ring_records import SHAPE, make_info
from tests.support.limits import file_size_limit
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import segment as S
from maru_shm.errors import SegmentCorrupt, SegmentError, SegmentNotReady, SegmentVersionMismatch


@pytest.fixture
def segment() -> Iterator[S.Segment]:
    s = S.create(make_info(session=7))
    yield s
    s.close()
    with contextlib.suppress(SegmentError):
        S.unlink(s.info.name)


def test_what_was_created_is_what_is_mapped(segment: S.Segment) -> None:
    mapped = S.map_fd(segment.fd, writable=True)
    assert mapped.info == segment.info
    mapped.close()
    assert [n for n, *_ in S.list_names("0123abcd")] == [segment.info.name]
    assert not list(S.list_names("ffffffff"))


def test_a_read_only_view_cannot_be_written(segment: S.Segment) -> None:
    view = S.open_readonly(segment.info.name)
    with pytest.raises(TypeError):
        view.words[L.WORD_SQ_TAIL] = 1
    view.close()


def test_the_same_name_is_not_created_twice(segment: S.Segment) -> None:
    with pytest.raises(SegmentError, match="exists"):
        S.create(segment.info)


def test_a_segment_past_this_processs_limit_on_files_is_refused_with_that_limit() -> None:
    with file_size_limit(4096), pytest.raises(SegmentError, match=r"limit on file sizes, 4096 bytes .*LimitFSIZE"):
        S.create(make_info(session=8))
    assert not list(S.list_names("0123abcd"))


def test_a_segment_without_its_magic_is_not_ready(segment: S.Segment) -> None:
    segment.words[L.WORD_MAGIC] = 0
    with pytest.raises(SegmentNotReady, match="magic"):
        S.map_fd(segment.fd, writable=False)


def test_another_abi_is_refused_with_both_numbers(segment: S.Segment) -> None:
    segment.bytes[L.STATIC_OFFSET + 8] = 9
    with pytest.raises(SegmentVersionMismatch, match=r"ABI 9\.0, this program 1\.0"):
        S.map_fd(segment.fd, writable=False)


def test_any_flipped_byte_of_the_static_block_is_noticed(segment: S.Segment) -> None:
    for offset in range(L.STATIC_OFFSET, L.STATIC_CRC_OFFSET + 4):
        segment.bytes[offset] ^= 0x40
        with pytest.raises(SegmentError):
            S.map_fd(segment.fd, writable=False)
        segment.bytes[offset] ^= 0x40
    S.map_fd(segment.fd, writable=False).close()


def test_a_truncated_segment_is_refused_before_it_is_touched(segment: S.Segment) -> None:
    os.ftruncate(segment.fd, 8192 + mmap.PAGESIZE)
    with pytest.raises(SegmentCorrupt, match="its header says"):
        S.map_fd(segment.fd, writable=False)
    os.ftruncate(segment.fd, 100)
    with pytest.raises(SegmentNotReady, match="100 bytes"):
        S.map_fd(segment.fd, writable=False)


def test_absurd_shapes_are_refused() -> None:
    for shape in (
        L.SegmentShape(3, 4, 64, 0),
        L.SegmentShape(4, 0, 64, 0),
        L.SegmentShape(4, 1 << 17, 64, 0),
        L.SegmentShape(4, 4, 0, 0),
    ):
        with pytest.raises(SegmentCorrupt):
            shape.check()


def test_sections_do_not_overlap_and_fill_the_segment() -> None:
    assert L.RING_OFFSET + SHAPE.n_slots * L.SLOT_BYTES <= SHAPE.records_offset
    assert SHAPE.records_offset + SHAPE.n_records * L.RECORD_BYTES <= SHAPE.cells_offset
    assert SHAPE.cells_offset + SHAPE.n_records * SHAPE.cell_bytes <= SHAPE.replies_offset
    assert SHAPE.replies_offset + SHAPE.n_records * SHAPE.reply_bytes <= SHAPE.total_bytes
    assert L.REQUEST.size <= L.CANCEL_WORD * 8 < L.LABEL_OFFSET
    assert L.STATE_WORD * 8 < L.COPYING_WORD * 8 < L.REPLY_OFFSET
    assert L.REPLY_OFFSET + L.REPLY.size <= L.RECORD_BYTES


def test_a_dead_process_has_no_start_time() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert S.process_start_time(pid) == 0
    assert S.process_start_time(os.getpid()) > 0


def zombie() -> int:
    """Pid of a child that has ended and was not waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_a_process_that_ended_and_was_not_waited_for_does_not_run() -> None:
    own = S.process_start_time(os.getpid())
    assert S.process_runs(os.getpid())
    assert S.process_runs(os.getpid(), own)
    assert not S.process_runs(os.getpid(), own + 1)
    assert not S.process_runs(os.getpid(), 0)
    pid = zombie()
    try:
        start = S.process_start_time(pid)
        assert start > 0  # its name is still its own
        assert not S.process_runs(pid)
        assert not S.process_runs(pid, start)
    finally:
        os.waitpid(pid, 0)
    assert not S.process_runs(pid, 0)


LEADERLESS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall(60, 0)  # exit(2): of this thread alone
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of exit(2)")
def test_a_process_whose_main_thread_alone_has_ended_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdin=subprocess.PIPE) as child:
        until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "the main thread ended")
        assert S.process_runs(child.pid, S.process_start_time(child.pid))
        child.kill()


@pytest.mark.parametrize("plant", ["fifo", "symlink", "directory", "giant"])
def test_what_somebody_else_put_under_a_segments_name_is_a_named_error_at_once(plant: str) -> None:
    name = "/maru.0123abcd.0000000000000001.1"
    path = S.SHM_DIR + name
    try:
        if plant == "fifo":
            os.mkfifo(path)  # opening one to read would wait for a writer
        elif plant == "symlink":
            os.symlink("/etc/hostname", path)
        elif plant == "directory":
            os.mkdir(path)
        else:
            with open(path, "wb") as f:
                f.truncate(1 << 62)
        with pytest.raises(SegmentError):
            S.open_readonly(name)
        if plant == "directory":
            with pytest.raises(SegmentError, match="cannot be removed"):
                S.unlink(name)
        else:
            assert S.unlink(name)
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def test_a_segment_of_another_user_is_not_mapped_for_its_leases(segment: S.Segment) -> None:
    with pytest.raises(SegmentError, match=f"belongs to uid {os.geteuid()}"):
        S.open_readonly(segment.info.name, owner=os.geteuid() + 1)
    S.open_readonly(segment.info.name, owner=os.geteuid()).close()
