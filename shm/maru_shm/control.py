"""Sending and receiving control messages (types in ``messages.py``) on a SEQPACKET socket, with file descriptors."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from maru_shm import messages as M
from maru_shm.errors import ProtocolViolation, SidecarUnavailable
from maru_shm.socket_path import default_socket_path, user_directory

__all__ = ["carries_descriptors", "close_all", "connect", "default_socket_path", "receive", "send", "to_client", "to_sidecar"]

MAX_FDS = 64  #: beside one message
_SCM_MAX_FD = 253  #: what the kernel lets a packet carry; it closes those without room here, and a close may block
_BUSY_RETRY_S = 0.01
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")

to_sidecar: msgspec.msgpack.Decoder[M.ClientMessage] = msgspec.msgpack.Decoder(M.ClientMessage)
to_client: msgspec.msgpack.Decoder[M.SidecarMessage] = msgspec.msgpack.Decoder(M.SidecarMessage)


def send(sock: socket.socket, message: M.ClientMessage | M.SidecarMessage, fds: Sequence[int] = ()) -> None:
    """Send one message. Raises ``OSError`` as the socket does; :class:`ProtocolViolation` if it is too long to send."""
    data = _encoder.encode(message)
    if len(data) > M.MAX_MESSAGE:
        raise ProtocolViolation(f"{type(message).__name__} of {len(data)} bytes", f"at most {M.MAX_MESSAGE} fit in a message")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def close_all(fds: list[int]) -> None:
    """Close descriptors; the list is empty afterwards."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    fds.clear()


def receive(
    sock: socket.socket, decoder: msgspec.msgpack.Decoder[T], discard: Callable[[list[int]], None] = close_all
) -> tuple[T, list[int]] | None:
    """Receive one message and its descriptors (the caller's to close); None at end of file.

    Raises ``BlockingIOError`` on an empty non-blocking socket, :class:`ProtocolViolation` for garbage or a truncated
    packet. Its descriptors go to ``discard``, for those to whom a close that takes its time is one too many.
    """
    data, ancillary, flags, _ = sock.recvmsg(M.MAX_MESSAGE + 1, socket.CMSG_SPACE(_SCM_MAX_FD * 4), socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
    fds = list(received)
    try:
        if not data and not fds:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > MAX_FDS:
            raise ProtocolViolation(f"control packet longer than {M.MAX_MESSAGE} bytes or {MAX_FDS} descriptors", "")
        return decoder.decode(data), fds
    except ProtocolViolation:
        discard(fds)
        raise
    except (msgspec.MsgspecError, RecursionError) as e:
        discard(fds)
        raise ProtocolViolation(f"control message not understood: {e}", "run the same release on both sides") from e


def carries_descriptors(sock: socket.socket) -> bool:
    """Whether the next message has descriptors beside it; it is not received. Raises as ``recvmsg`` does."""
    _, _, flags, _ = sock.recvmsg(1, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return bool(flags & socket.MSG_CTRUNC)


def _refuse_foreign_directory(path: str) -> None:
    """The per-user fallback lies in ``/tmp``, where anybody may make the directory first: it must be this user's."""
    directory = os.path.dirname(path)
    if directory != user_directory():
        return
    with contextlib.suppress(FileNotFoundError):
        info = os.stat(directory, follow_symlinks=False)
        if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
            raise SidecarUnavailable(f"{directory} belongs to uid {info.st_uid}", "set MARU_SOCKET, or remove that directory")


def connect(path: str, timeout: float | None) -> socket.socket:
    """Connect to the sidecar's control socket. Raises :class:`SidecarUnavailable` naming path and reason."""
    _refuse_foreign_directory(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout)
    deadline = time.monotonic() + (timeout or 0)
    try:
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError as e:  # the listener's queue is full
                if time.monotonic() >= deadline:
                    sock.close()
                    raise SidecarUnavailable(
                        f"the sidecar at {path} does not accept connections", "it is busy; try again"
                    ) from e
                time.sleep(_BUSY_RETRY_S)
    except OSError as e:
        sock.close()
        raise _unreachable(path, e) from e
    return sock


def _unreachable(path: str, error: OSError) -> SidecarUnavailable:
    """The kernel refuses a connection to anything that is no socket as it does to a stale one: what lies there is looked at."""
    reason, start = error.strerror or str(error), f"maru-sidecar run --socket {os.path.abspath(path)}"
    if error.errno == errno.ENOENT:
        return SidecarUnavailable(f"no sidecar at {path}: {reason}", f"start it: {start}, or name the right socket")
    if error.errno == errno.EACCES:
        return SidecarUnavailable(f"no sidecar at {path}: {reason}", "join the socket's group, or run as the sidecar's user")
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        if not stat.S_ISSOCK(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "a regular file" if stat.S_ISREG(mode) else "no socket"
            return SidecarUnavailable(f"no sidecar at {path}: it is {kind}", "name the control socket")
    if error.errno == errno.ECONNREFUSED:
        return SidecarUnavailable(f"no sidecar at {path}: {reason}", f"the socket is stale; start the sidecar: {start}")
    if error.errno == errno.EPROTOTYPE:
        return SidecarUnavailable(f"no sidecar at {path}: {reason}", "it is another program's socket: name the control socket")
    return SidecarUnavailable(f"no sidecar at {path}: {reason}", "check the socket path")
