"""Where the control socket is, for whoever was not told: the sidecar, its commands and the engines search alike."""

from __future__ import annotations

import os
from collections.abc import Mapping

from maru_shm.errors import ConfigError

#: The same variable under two names: the short one, and the one that follows from the key ``control.socket``.
VARIABLES = ("MARU_SOCKET", "MARU_CONTROL_SOCKET")
SYSTEM_DIRECTORY = "/run/maru"
#: The rule of :func:`default_socket_path` in words, for help texts.
SEARCH = (
    "$MARU_SOCKET (also named $MARU_CONTROL_SOCKET), else /run/maru/control.sock if /run/maru exists, else "
    "$XDG_RUNTIME_DIR/maru.sock if that is set, else /tmp/maru-UID/maru.sock"
)


def socket_variable(environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """``(name, path)`` from the environment; an empty variable counts as unset.

    Raises :class:`ConfigError` for a relative path, which would name another socket in each working directory, and where the
    two names disagree: whichever won, somebody would look in the wrong place.
    """
    env = os.environ if environ is None else environ
    found = [(name, path) for name in VARIABLES if (path := env.get(name))]
    if not found:
        return None
    if len({path for _, path in found}) > 1:
        raise ConfigError(
            " and ".join(f"{name} is {path!r}" for name, path in found), "unset one: both name the control socket"
        )
    name, path = found[0]
    if not os.path.isabs(path):
        raise ConfigError(f"{name} is {path!r}", "expected an absolute path")
    return name, path


def default_socket_path(environ: Mapping[str, str] | None = None) -> str:
    """The path by :data:`SEARCH`. Raises :class:`ConfigError` as :func:`socket_variable` does."""
    env = os.environ if environ is None else environ
    if (given := socket_variable(env)) is not None:
        return given[1]
    if os.path.isdir(SYSTEM_DIRECTORY):
        return f"{SYSTEM_DIRECTORY}/control.sock"
    return os.path.join(env.get("XDG_RUNTIME_DIR") or user_directory(), "maru.sock")


def user_directory() -> str:
    """The last place of the search, the only one whose directory the sidecar makes."""
    return f"/tmp/maru-{os.getuid()}"
