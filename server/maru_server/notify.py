"""Telling the service manager how it goes (sd_notify's protocol: one datagram to ``$NOTIFY_SOCKET``)."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """Send e.g. ``READY=1``. Does nothing without a service manager."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
        try:
            s.connect(address)
            s.sendall(state.encode())
        except OSError:
            return  # the manager is gone; there is nobody to tell


def watchdog_ms() -> int:
    """How often the manager wants to hear WATCHDOG=1 (half its limit), 0 if never."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0
    return int(os.environ.get("WATCHDOG_USEC", "0")) // 2000
