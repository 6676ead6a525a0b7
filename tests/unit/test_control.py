"""Control messages over a real SEQPACKET pair: what is sent arrives, what is not a message is refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_shm import control
from maru_shm import messages as M
from maru_shm.errors import ProtocolViolation, SidecarUnavailable
from maru_shm.geometry import KvLayout, KvPlane, KvRegion, RegionKind
from maru_shm.layout import Role

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield a, b
    a.close()
    b.close()


def layout(**changes: object) -> KvLayout:
    fields: dict[str, object] = {
        "num_blocks": 10,
        "block_tokens": 16,
        "planes": (KvPlane(0, 0, 64, 64, 0), KvPlane(0, 640, 64, 64, 1)),
        "regions": (KvRegion(RegionKind.PROCESS_VM, 0x1000, 1280),),
        "signature": "test",
    }
    return KvLayout(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_message_and_its_descriptors_arrive(pair: Pair) -> None:
    message = M.Attach(Role.WORKER, "e", 0, 1, bytes(16), 256, 64, 100, 1000, layout())
    r, w = os.pipe()
    control.send(pair[0], message, [w])
    received = control.receive(pair[1], control.to_sidecar)
    assert received is not None
    got, fds = received
    assert got == message
    os.write(fds[0], b"x")
    assert os.read(r, 1) == b"x"
    for fd in (r, w, *fds):
        os.close(fd)


@pytest.mark.parametrize("n", [1, control.MAX_FDS + 1, 253])
def test_descriptors_of_garbage_are_not_closed_here_but_handed_over(pair: Pair, n: int) -> None:
    """All of them, however many: those the kernel had to drop would be closed by it, in the receiving thread."""
    r, w = os.pipe()
    socket.send_fds(pair[0], [b"\xc1"], [w] * n)
    os.close(w)
    kept: list[int] = []
    with pytest.raises(ProtocolViolation):
        control.receive(pair[1], control.to_sidecar, kept.extend)
    assert len(kept) == n
    control.close_all(kept)
    assert kept == []
    assert os.read(r, 1) == b""
    os.close(r)


def test_nesting_without_end_is_garbage(pair: Pair) -> None:
    pair[0].send(b"\x81\xa1x" * 20_000 + b"\xc0")
    with pytest.raises(ProtocolViolation):
        control.receive(pair[1], control.to_sidecar)


def test_whether_a_message_carries_descriptors_can_be_seen_without_taking_it(pair: Pair) -> None:
    control.send(pair[0], M.Ping())
    control.send(pair[0], M.Ping(), [pair[0].fileno()])
    for expected in (False, True):
        assert control.carries_descriptors(pair[1]) is expected
        received = control.receive(pair[1], control.to_sidecar)
        assert received is not None
        assert len(received[1]) == expected
        control.close_all(received[1])
    with pytest.raises(BlockingIOError):
        control.carries_descriptors(pair[1])


def test_end_of_file_is_none_and_an_empty_socket_blocks(pair: Pair) -> None:
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        control.receive(pair[1], control.to_sidecar)
    pair[0].close()
    assert control.receive(pair[1], control.to_sidecar) is None


@pytest.mark.parametrize("garbage", [b"\xff", b"hello", b"\x81\xa4type\xa4nope", os.urandom(300)])
def test_garbage_is_a_violation_and_leaks_no_descriptor(pair: Pair, garbage: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    r, w = os.pipe()
    socket.send_fds(pair[0], [garbage], [w])
    with pytest.raises(ProtocolViolation, match="not understood"):
        control.receive(pair[1], control.to_sidecar)
    os.close(r)
    os.close(w)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_packet_that_is_too_long_is_a_violation(pair: Pair) -> None:
    pair[0].send(bytes(M.MAX_MESSAGE + 2))
    with pytest.raises(ProtocolViolation, match="longer than"):
        control.receive(pair[1], control.to_sidecar)
    with pytest.raises(ProtocolViolation, match="fit in a message"):
        control.send(pair[0], M.Pin("", ["0" * 32] * 10_000))


def test_an_absent_sidecar_is_named_with_the_remedy(tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(SidecarUnavailable, match="start it: maru-sidecar run"):
        control.connect(os.path.join(tmp_path, "none.sock"), 1.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_blocks": 0},
        {"num_blocks": 1 << 40},
        {"planes": ()},
        {"planes": (KvPlane(1, 0, 64, 64),)},
        {"planes": (KvPlane(0, -64, 64, 64),)},
        {"planes": (KvPlane(0, 0, 32, 64),)},
        {"planes": (KvPlane(0, 700, 64, 64),)},
        {"regions": (KvRegion(RegionKind.PROCESS_VM, 0, 1280),)},
        {"regions": ()},
    ],
)
def test_a_layout_that_leaves_its_memory_is_refused(bad: dict[str, object]) -> None:
    layout().check()
    with pytest.raises(ProtocolViolation):
        layout(**bad).check()


def test_layouts_share_slabs_by_pieces_and_meaning_not_by_strides() -> None:
    a = layout()
    assert a.identity == layout(num_blocks=5, regions=(KvRegion(RegionKind.PROCESS_VM, 0x9000, 9999),)).identity
    assert a.identity != layout(signature="other").identity
    assert a.identity != layout(planes=(KvPlane(0, 0, 128, 128, 0),)).identity
    assert a.block_bytes == 128


def test_a_full_listener_is_waited_for_and_then_named(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "busy.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(0)
    queued = []
    try:

        def connect_sixteen_times() -> None:
            for _ in range(16):
                queued.append(control.connect(path, 0.05))

        with pytest.raises(SidecarUnavailable, match="does not accept connections"):
            connect_sixteen_times()
        while queued:
            queued.pop().close()
            listener.accept()[0].close()
        control.connect(path, 5.0).close()
    finally:
        for sock in (*queued, listener):
            sock.close()


def test_the_fallback_directory_must_be_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = "/tmp/maru-424242"
    os.mkdir(directory)
    try:
        monkeypatch.setattr(os, "getuid", lambda: 424242)  # whoever made it, it was somebody else
        with pytest.raises(SidecarUnavailable, match="belongs to uid"):
            control.connect(f"{directory}/maru.sock", 1.0)
    finally:
        os.rmdir(directory)


def test_what_is_no_sidecar_s_socket_is_told_from_a_stale_one(tmp_path: Path) -> None:
    file, streams, stale = tmp_path / "file", tmp_path / "streams", tmp_path / "stale"
    file.touch()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead,
    ):
        other.bind(str(streams))
        other.listen()
        dead.bind(str(stale))
        for path, reason in (
            (file, "it is a regular file; name the control socket"),
            (tmp_path, "it is a directory; name"),
            (Path("/dev/null"), "it is no socket; name"),
            (streams, "another program's socket"),
            (stale, "the socket is stale"),
        ):
            with pytest.raises(SidecarUnavailable, match=reason):
                control.connect(str(path), 1.0)


def test_the_command_that_is_advised_is_one_the_sidecar_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SidecarUnavailable, match=f"maru-sidecar run --socket {tmp_path}/rel.sock"):
        control.connect("rel.sock", 1.0)
