"""A control socket that gives canned answers, for tests of what asks the sidecar where the sidecar is not the subject."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from maru_shm import control
from maru_shm import messages as M

WELCOME = M.Welcome(M.PROTOCOL, "maru-sidecar/test", 4242, 0xABCDEF, "0a1b2c3d")
Answer = Callable[[M.ClientMessage], M.SidecarMessage | None]


class Responder:
    """Listens on ``path``; ``answers`` maps a message type to its answer, None closes the connection."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.heard: list[M.ClientMessage] = []
        self.answers: dict[type[object], Answer] = {M.Hello: lambda _: WELCOME}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Responder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                while (received := control.receive(sock, control.to_sidecar)) is not None:
                    self.heard.append(received[0])
                    answer = self.answers[type(received[0])](received[0])
                    if answer is None:
                        break
                    control.send(sock, answer)
