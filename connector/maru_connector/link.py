"""The connector's connection to the sidecar: a state machine that never blocks.

::

    DISCONNECTED ──connect, Hello──▶ GREETING ──Welcome, Attach──▶ ATTACHING ──Attached──▶ ATTACHED
         ▲                              │                             │                      │
         └────────── back-off ──────────┴──── end of file, refusal, timeout ─────────────────┘

``poll`` runs once per engine step and costs one ``poll(2)`` while attached. The open socket is the liveness lease; what becomes
of tickets when it closes is in ``session.py``. A sidecar that comes back is a new generation with a new segment.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable

from maru_connector.log import OnceLogger, get_logger
from maru_connector.session import Session, SidecarProcess
from maru_shm import control
from maru_shm import messages as M
from maru_shm import segment as segments
from maru_shm.errors import MaruError, ProtocolViolation, SegmentError, SidecarUnavailable

logger = get_logger("maru_connector")

CLIENT = "maru-connector/0.1.0"
BACKOFF_S = (0.05, 5.0)  #: first and longest pause between attempts
REFUSED_BACKOFF_S = 5.0  #: a refusal seldom changes its mind sooner
GREETING_TIMEOUT_S = 5.0
ATTACH_TIMEOUT_S = 120.0  #: importing a large KV cache and mapping a large pool take their time
DETACH_TIMEOUT_S = 5.0
_PR_SET_PTRACER = 0x59616D61


class LinkState(enum.Enum):
    DISCONNECTED = "disconnected"
    GREETING = "greeting"
    ATTACHING = "attaching"
    ATTACHED = "attached"
    CLOSED = "closed"


class SidecarLink:
    """Owns the control socket and the current :class:`Session`, and keeps lost sessions until their tickets are settled.

    ``attach_request`` is called at each attach: the message, and descriptors that travel beside it. ``on_attached`` and
    ``on_lost`` are told about each session once.
    """

    def __init__(
        self,
        path: str,
        attach_request: Callable[[], tuple[M.Attach, list[int]]],
        *,
        on_attached: Callable[[Session], None] | None = None,
        on_lost: Callable[[Session], None] | None = None,
    ) -> None:
        self.path = path
        self.state = LinkState.DISCONNECTED
        self.session: Session | None = None
        self.namespace = ""  #: hex, as the sidecar computed it; empty until then
        self.transfer = ""
        self._attach_request = attach_request
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._sock: socket.socket | None = None
        self._poller = select.poll()
        self._process: SidecarProcess | None = None
        self._welcome_generation = 0
        self._lost: list[Session] = []
        self._lost_names: set[str] = set()
        self._backoff = BACKOFF_S[0]
        self._next_try = 0.0
        self._deadline = 0.0
        self._began = 0.0
        self._once = OnceLogger(logger)

    # --- every step -------------------------------------------------------------------------------------------------------
    def poll(self) -> Session | None:
        """Advance without blocking; the usable session, or None."""
        if self._lost:
            self._settle_lost()
        session = self.session
        if session is not None:
            if not session.connected:
                self._drop("the segment was corrupted")
            elif self._poller.poll(0):
                self._receive()
            return self.session
        if self.state is LinkState.CLOSED:
            return None
        now = time.monotonic()
        if self.state is LinkState.DISCONNECTED:
            if now >= self._next_try:
                self._connect(now)
        elif self._poller.poll(0):
            self._receive()
        elif now >= self._deadline:
            self._drop(f"no answer while {self.state.value}")
        return self.session

    def nudge(self) -> None:
        """A real request is here: do not sit out a long back-off."""
        if self.state is LinkState.DISCONNECTED and self._backoff > 0.5:
            self._backoff = 0.5
            self._next_try = min(self._next_try, time.monotonic() + self._backoff)

    def wait_attached(self, timeout: float) -> bool:
        """Poll until attached or ``timeout`` seconds have passed (engine start only; never on the request path)."""
        end = time.monotonic() + timeout
        while self.poll() is None and self.state is not LinkState.CLOSED:
            left = end - time.monotonic()
            if left <= 0:
                break
            if self.state is LinkState.DISCONNECTED:
                time.sleep(min(left, max(0.0, self._next_try - time.monotonic()), 0.05))
            else:
                self._poller.poll(min(left, 0.05) * 1000)
        return self.session is not None

    def attaching_for(self) -> float:
        """Seconds since the current attachment, or the attempt under way, began; infinity without one."""
        if self.state in (LinkState.DISCONNECTED, LinkState.CLOSED):
            return math.inf
        return time.monotonic() - self._began

    @property
    def has_lost_sessions(self) -> bool:
        return bool(self._lost)

    # --- connecting -------------------------------------------------------------------------------------------------------
    def _connect(self, now: float) -> None:
        try:
            sock = control.connect(self.path, 0)
            control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, CLIENT))
        except (SidecarUnavailable, OSError) as e:
            self._once.warning("absent", "maru: %s. The engine runs without cache until it appears.", e)
            self._back_off(now)
            return
        self._sock = sock
        self._poller = select.poll()
        self._poller.register(sock.fileno(), select.POLLIN)
        self._began = now
        self._enter(LinkState.GREETING, now + GREETING_TIMEOUT_S)

    def _enter(self, state: LinkState, deadline: float = 0.0) -> None:
        self.state = state
        self._deadline = deadline

    def _back_off(self, now: float) -> None:
        self._enter(LinkState.DISCONNECTED)
        self._next_try = now + self._backoff
        self._backoff = min(self._backoff * 2, BACKOFF_S[1])

    def _receive(self) -> None:
        assert self._sock is not None
        try:
            received = control.receive(self._sock, control.to_client)
        except BlockingIOError:
            return
        except (OSError, ProtocolViolation) as e:
            self._drop(str(e))
            return
        if received is None:
            self._drop("it closed the connection")
            return
        message, fds = received
        try:
            self._handle(message, fds)
        except (MaruError, OSError) as e:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._drop(str(e))

    def _handle(self, message: M.SidecarMessage, fds: list[int]) -> None:
        if isinstance(message, M.Refused):
            self._once.warning(
                f"refused {message.what}",
                "maru: the sidecar at %s refuses this engine: %s (%s). The engine runs without cache.",
                self.path, message.what, message.remedy or message.code.value,
            )  # fmt: skip
            self._backoff = max(self._backoff, REFUSED_BACKOFF_S)
            self._drop("")
        elif self.state is LinkState.GREETING and isinstance(message, M.Welcome):
            self._process = SidecarProcess(message.pid)
            self._welcome_generation = message.generation
            for session in self._lost:
                if session.generation != message.generation:
                    session.process.presume_gone()
            _allow_process_vm(message.pid)
            request, request_fds = self._attach_request()
            assert self._sock is not None
            control.send(self._sock, request, request_fds)
            self._enter(LinkState.ATTACHING, time.monotonic() + ATTACH_TIMEOUT_S)
        elif self.state is LinkState.ATTACHING and isinstance(message, M.Attached):
            self._attached(message, fds)
        elif self.state is not LinkState.ATTACHED:
            raise ProtocolViolation(f"{type(message).__name__} while {self.state.value}", "run the same release on both sides")

    def _attached(self, message: M.Attached, fds: list[int]) -> None:
        if len(fds) < 2:
            raise ProtocolViolation(f"Attached came with {len(fds)} descriptors", "run the same release on both sides")
        assert self._process is not None
        segment = segments.map_fd(fds[0], writable=True)
        if segment.info.generation != self._welcome_generation:
            segment.close()
            raise ProtocolViolation("the segment is of another generation", "run the same release on both sides")
        os.close(fds.pop(0))
        self._process.verify(segment.info.sidecar_start)
        session = Session(
            segment, self._process, doorbell=fds[0], pool_fd=fds[1] if len(fds) > 1 else -1, pool_bytes=message.pool_bytes,
            namespace=message.namespace,
        )  # fmt: skip
        for fd in fds[2:]:
            os.close(fd)
        fds.clear()
        self._process = None
        self.session = session
        self.namespace = message.namespace
        self.transfer = message.transfer
        self._backoff = BACKOFF_S[0]
        self._enter(LinkState.ATTACHED)
        self._once.again("absent")
        self._once.again("lost")
        logger.info(
            "maru: attached to the sidecar at %s (session %d, pool %d bytes)", self.path, session.id, message.pool_bytes
        )
        if self._on_attached is not None:
            self._on_attached(session)

    # --- losing -----------------------------------------------------------------------------------------------------------
    def _drop(self, why: str) -> None:
        """Close the socket; keep the session's segment until its tickets are settled."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.close()
            self._process = None
        session, self.session = self.session, None
        if session is not None:
            session.connected = False
            self._lost.append(session)
            self._lost_names.add(session.segment.info.name)
            self._once.log(logging.WARNING, "lost", "maru: lost the sidecar at %s: %s. Hits are recomputed.", self.path, why)
            if self._on_lost is not None:
                self._on_lost(session)
        elif why:
            self._once.warning("failed " + why, "maru: cannot attach to the sidecar at %s: %s.", self.path, why)
        if self.state is not LinkState.CLOSED:
            self._back_off(time.monotonic())
            if session is not None:  # an idle engine notices when a request comes: a successor may be long there
                self._next_try = 0.0

    def _settle_lost(self) -> None:
        for session in self._lost:
            session.sweep()
            if session.idle:
                session.close()
        self._lost = [s for s in self._lost if not s.idle]

    def close(self) -> None:
        """Detach in order: the sidecar fences this session's copies before it answers. Idempotent; waits a bounded time."""
        if self.state is LinkState.CLOSED:
            return
        session, sock = self.session, self._sock
        detached = False
        if session is not None and sock is not None:
            with contextlib.suppress(OSError, ProtocolViolation):
                session.flush()
                sock.settimeout(DETACH_TIMEOUT_S)
                control.send(sock, M.Detach())
                while (received := control.receive(sock, control.to_client)) is not None:
                    for fd in received[1]:
                        os.close(fd)
                    if isinstance(received[0], M.Done):
                        detached = True
                        break
        self.state = LinkState.CLOSED
        if sock is not None:
            sock.close()
        self._sock = None
        if self._process is not None:
            self._process.close()
            self._process = None
        for old in [*self._lost, *([session] if session is not None else [])]:
            if self._on_lost is not None and old is session:
                self._on_lost(old)
            if not detached or old is not session:
                self._lost_names.add(old.segment.info.name)
            old.close()
        for name in self._lost_names:  # nobody may be left to do it; a sidecar that is takes no harm
            with contextlib.suppress(SegmentError):  # another user's: its next sidecar removes it
                segments.unlink(name)
        self._lost = []
        self.session = None


def _allow_process_vm(pid: int) -> None:
    """Let the sidecar reach this process's memory where yama restricts ptrace to ancestors; best effort (a CPU engine needs
    it).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(pid), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
