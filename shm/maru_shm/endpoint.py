"""Where a metadata server listens, as people write it: the same forms for the server, its commands and the sidecar."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from maru_shm.errors import ConfigError

#: ``*`` and an interface's name are for listening only; a host with a colon is an address in brackets.
_TCP = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/\[\]@?#]+):(?P<port>\d{1,5}|\*)")
_FORM = "write tcp://HOST:PORT (or HOST:PORT), an IPv6 address in brackets, or ipc:///PATH"


def normal_endpoint(text: str, *, listens: bool = False) -> str:
    """``tcp://host:port`` or ``ipc://path``; a bare ``host:port`` is TCP. Raises :class:`ConfigError` for anything else.

    ``listens``: it is to listen on, so host and port may be ``*`` and the port 0 (any free one).
    """
    scheme, separator, rest = text.strip().rpartition("://")
    if not separator:
        scheme = "tcp"
    if scheme == "ipc" and rest:
        return f"ipc://{rest}"
    match = _TCP.fullmatch(rest) if scheme == "tcp" else None
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        raise ConfigError(f"{text!r} is no address of a metadata server", _FORM)
    if not listens and (match["host"] == "*" or match["port"] == "*" or int(match["port"]) == 0):
        raise ConfigError(f"{text!r} is an address to listen on, not one to connect to", "name the server's host and port")
    return f"tcp://{rest}"


def is_local(endpoint: str) -> bool:
    """Whether an endpoint can only be reached from this machine (loopback TCP, or ipc, whose file permissions decide)."""
    url = urlsplit(endpoint)
    if url.scheme == "ipc":
        return True
    try:
        host = url.hostname or ""
        return url.scheme == "tcp" and (host == "localhost" or ipaddress.ip_address(host).is_loopback)
    except ValueError:
        return False
