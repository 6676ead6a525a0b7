"""The far end of the connector's wire, for tests: a control socket, segments and records, scripted by the test.

Everything is real (socket, shared memory, rings, descriptors) but the decisions: the test says how each request ends.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable

from maru_shm import control
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as segments
from maru_shm.records import Request, SidecarRecords
from maru_shm.ring import SubmissionConsumer

INSTANCE = "c0ffee00"


class PeerSession:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.attach: M.Attach | None = None
        self.segment: segments.Segment | None = None
        self.fds: list[int] = []

    def open(self, attach: M.Attach, generation: int, number: int, pool: int) -> None:
        shape = L.SegmentShape.for_limits(attach.max_records, attach.max_keys, attach.max_blocks)
        pid = os.getpid()
        info = segments.SegmentInfo(
            generation, number, shape, pid, pid, segments.process_start_time(pid), time.time_ns(), INSTANCE, attach.role
        )
        self.attach = attach
        self.segment = segments.create(info)
        self.segment.words[L.WORD_SIDECAR_STATE] = L.SidecarState.READY
        self.ring = SubmissionConsumer(self.segment)
        self.records = SidecarRecords(self.segment)
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fds = [self.segment.fd, bell]
        control.send(self.sock, M.Attached(number, info.name, "", 0, "cpu"), [self.segment.fd, bell, pool])

    def close(self, *, unlink: bool) -> None:
        self.sock.close()
        if self.segment is not None:
            os.close(self.fds[1])
            if unlink:
                segments.unlink(self.segment.info.name)
            self.segment.close()
            self.segment = None


class Peer:
    """``answer(session, request)`` is called for each submitted request, on the peer's thread, and may complete it or not."""

    def __init__(self, path: str, answer: Callable[[PeerSession, Request], None], *, generation: int = 1) -> None:
        self.path = path
        self.generation = generation
        self.answer = answer
        self.refuse: M.Refused | None = None
        self.sessions: list[PeerSession] = []
        self.lingers = False  #: keep a dropped session's memory: its copies still run
        self.lingering: list[PeerSession] = []
        self.released: list[int] = []
        self.requests: list[Request] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._pool = os.memfd_create("pool")
        self._stop = threading.Event()
        # It shares an interpreter with a scheduler that spins for its answers: at the usual 5 ms it would hardly get a turn.
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        while not self._stop.is_set():
            for key, _ in selector.select(0.0002):
                if key.fileobj is self._listener:
                    session = PeerSession(self._listener.accept()[0])
                    self.sessions.append(session)
                    selector.register(session.sock, selectors.EVENT_READ, session)
                elif not self._message(key.data):
                    selector.unregister(key.fileobj)
                    self.sessions.remove(key.data)
                    if self.lingers:
                        key.data.sock.close()
                        self.lingering.append(key.data)
                    else:
                        key.data.close(unlink=True)
            for session in self.sessions:
                self._ring(session)

    def _message(self, session: PeerSession) -> bool:
        received = control.receive(session.sock, control.to_sidecar)
        if received is None:
            return False
        message = received[0]
        if isinstance(message, M.Hello):
            control.send(session.sock, M.Welcome(M.PROTOCOL, "peer", os.getpid(), self.generation, INSTANCE))
        elif isinstance(message, M.Attach):
            if self.refuse is not None:
                control.send(session.sock, self.refuse)
                return False
            session.open(message, self.generation, len(self.sessions), self._pool)
        elif isinstance(message, M.Detach):
            control.send(session.sock, M.Done())
        return True

    def _ring(self, session: PeerSession) -> None:
        if session.segment is None:
            return
        n = session.ring.ready()
        for _ in range(n):
            ticket, verb = session.ring.pop()
            if verb is L.Verb.SUBMIT:
                request = session.records.accept(ticket)
                self.requests.append(request)
                self.answer(session, request)
            elif verb is L.Verb.RELEASE:
                self.released.append(ticket)
        if n:
            session.ring.release()

    def of(self, role: L.Role) -> PeerSession:
        return next(s for s in self.sessions if s.attach is not None and s.attach.role == role)

    def close(self, *, unlink: bool = True) -> None:
        """Stop and drop every session, as a sidecar that exits does. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_interval)
        for session in self.sessions + self.lingering:
            session.close(unlink=unlink)
        self.sessions.clear()
        self.lingering.clear()
        self._listener.close()
        os.close(self._pool)
        if os.path.exists(self.path):
            os.unlink(self.path)
