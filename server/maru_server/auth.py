"""Who may talk to the server: anyone on this machine's loopback, elsewhere only holders of the shared token.

The token is turned into two CURVE25519 key pairs, one for the server and one for clients, and libzmq's CURVE mechanism does the
rest: both sides prove that they know the token, nothing of it crosses the wire, every message is encrypted, authenticated and
protected against replay within its connection. Everyone who holds the token is trusted alike (it is the cluster's secret, not
a user's), so a client could also pose as the server.

A token must be random, not a password: a recorded handshake allows guessing offline, which 32 random bytes put out of reach.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from maru_shm.endpoint import is_local
from maru_shm.errors import ConfigError

TOKEN_CHARS_MIN = 32
_DOMAIN = "maru"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 keys (40 bytes each) that follow from a token."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def new_token() -> str:
    """256 random bits in hex."""
    return secrets.token_hex(32)


def derive(token: str) -> CurveKeys:
    """Key pairs of a token. Raises :class:`ConfigError` if it is too short to be random."""
    if len(token) < TOKEN_CHARS_MIN:
        raise ConfigError(f"server token has {len(token)} characters", f"use at least {TOKEN_CHARS_MIN}: maru-server token")

    def pair(person: bytes) -> tuple[bytes, bytes]:
        secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=person).digest())
        return zmq.curve_public(secret), secret

    server_public, server_secret = pair(b"maru-curve-srv")
    client_public, client_secret = pair(b"maru-curve-cli")
    return CurveKeys(server_public, server_secret, client_public, client_secret)


def read_token(path: str | None) -> str | None:
    """The token in a file, or of ``$MARU_SERVER_TOKEN_FILE``, or of systemd's credential ``maru-token``; None if there is none.

    Raises :class:`ConfigError` if the file cannot be read or others may read it.
    """
    credential = os.path.join(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"), "maru-token")
    chosen = path or os.environ.get("MARU_SERVER_TOKEN_FILE") or (credential if os.path.exists(credential) else None)
    return None if chosen is None else token_in(chosen)


def token_in(path: str) -> str:
    """The token in a file. Raises :class:`ConfigError` if it cannot be read, is too short, or others may read it."""
    try:
        mode = os.stat(path).st_mode
        with open(path, encoding="utf-8") as f:
            token = f.read().strip()
    except OSError as e:
        raise ConfigError(f"token file {path}: {e.strerror or e}", "create it: maru-server token > FILE") from e
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"token file {path} has mode {stat.S_IMODE(mode):o}", f"chmod 600 {path}")
    if len(token) < TOKEN_CHARS_MIN:
        raise ConfigError(
            f"the token in {path} has {len(token)} characters", f"use at least {TOKEN_CHARS_MIN}: maru-server token"
        )
    return token


def require_token(endpoint: str, token: str | None) -> None:
    """Raise :class:`ConfigError` for an endpoint that other machines reach and no token guards."""
    if token is None and not is_local(endpoint):
        raise ConfigError(
            f"endpoint {endpoint} is not on loopback and no token is set",
            "make one with `maru-server token > FILE` and give it as --token-file on every node",
        )


class _OneKey:
    """Credentials provider that admits a single client key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == _DOMAIN and secrets.compare_digest(key, self._key)


def guard_server(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], token: str) -> ThreadAuthenticator:
    """Make a socket (before bind) accept holders of ``token`` only. The caller stops the returned authenticator."""
    keys = derive(token)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=_OneKey(keys.client_public))
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret
    socket.curve_publickey = keys.server_public
    socket.zap_domain = _DOMAIN.encode()
    return authenticator


def guard_client(socket: zmq.Socket[bytes], token: str) -> None:
    """Make a socket (before connect) prove ``token`` and demand the same of the server."""
    keys = derive(token)
    socket.curve_secretkey = keys.client_secret
    socket.curve_publickey = keys.client_public
    socket.curve_serverkey = keys.server_public
