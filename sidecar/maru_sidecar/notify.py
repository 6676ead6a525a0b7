"""The service manager's side of the daemon: readiness, watchdog, socket activation and the descriptor store.

The protocol is systemd's (``sd_notify(3)``, ``sd_listen_fds(3)``): datagrams of ``NAME=value`` lines to the socket in
``$NOTIFY_SOCKET``, descriptors from 3 on at start. It needs no library: a message is one ``sendmsg``.

:class:`ServiceManager` reads the environment once and takes its variables out of it, so that no child process believes it was
activated. Outside a service manager every call is a no-op that answers False.

*Descriptor store*: the pool's descriptor is kept there under the name ``pool-0`` and comes back at the next start
(:func:`stored_pool`). The bytes outlive SIGKILL even where the file lost its name meanwhile (logind's RemoveIPC, a cleaned
``/dev/shm``) or never had one (a memfd).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING

from maru_shm.errors import ConfigError

if TYPE_CHECKING:
    from maru_sidecar.pool_spec import PoolSpec

FIRST_FD = 3  #: sd_listen_fds(3): SD_LISTEN_FDS_START
CONTROL_FD = "control"  #: FileDescriptorName= of the control socket's unit
POOL_FD = "pool-0"
#: A manager that does not read for this long is not worth blocking start or stop for (its buffer takes thousands of messages).
SEND_TIMEOUT_S = 2.0


def listen_fds(environ: MutableMapping[str, str]) -> dict[str, int]:
    """Descriptors handed over at start, by name; close-on-exec is set on each and the variables are removed.

    Several descriptors of one name are told apart as ``name``, ``name.2``, ``name.3``… in the manager's order. Empty unless
    ``LISTEN_PID`` is this process. Raises :class:`~maru_shm.errors.ConfigError` if the variables are not numbers.
    """
    pid, count, names = (environ.pop(key, "") for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    environ.pop("LISTEN_PIDFDID", None)  # systemd 258
    if _number("LISTEN_PID", pid) != os.getpid():
        return {}
    n = _number("LISTEN_FDS", count)
    given = names.split(":") if names else []
    found: dict[str, int] = {}
    for i in range(n):
        fd = FIRST_FD + i
        os.set_inheritable(fd, False)
        base = given[i] if i < len(given) and given[i] else "unknown"
        name, copy = base, 1
        while name in found:
            copy += 1
            name = f"{base}.{copy}"
        found[name] = fd
    return found


def _number(variable: str, text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{variable} is {text!r}", "a service manager sets it to a decimal number; unset it")
    return int(text)


def _address(path: str) -> str | bytes:
    """Socket address of ``$NOTIFY_SOCKET``: a path, or ``@name`` in the abstract namespace."""
    if path.startswith("@"):
        return b"\0" + os.fsencode(path[1:])
    if path.startswith("/"):
        return path
    raise ConfigError(f"NOTIFY_SOCKET is {path!r}", "expected an absolute path or @name; unset it to run without a manager")


class ServiceManager:
    """What the daemon tells its service manager, and what it got from it.

    Messages are never queued here: a call sends at once and says whether the manager's socket took the message. A manager that
    is gone or does not read is not an error of the daemon's; it is counted in :attr:`failures`.
    """

    def __init__(self, notify_socket: str = "", watchdog_us: int = 0, fds: dict[str, int] | None = None) -> None:
        self._address = _address(notify_socket) if notify_socket else None
        self._fds = dict(fds or {})
        self.failures = 0  #: messages the manager's socket did not take
        #: Seconds between two :meth:`watchdog` calls: half the manager's limit, as sd_watchdog_enabled(3) advises. None: off.
        self.watchdog_interval_s: float | None = watchdog_us / 2e6 if watchdog_us and notify_socket else None

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> ServiceManager:
        """Read and remove ``NOTIFY_SOCKET``, ``WATCHDOG_*`` and ``LISTEN_*``.

        Raises :class:`~maru_shm.errors.ConfigError` if a variable has no meaning in the protocol.
        """
        fds = listen_fds(environ)
        watchdog_us = _number("WATCHDOG_USEC", environ.pop("WATCHDOG_USEC", ""))
        watchdog_pid = _number("WATCHDOG_PID", environ.pop("WATCHDOG_PID", ""))
        if watchdog_pid not in (0, os.getpid()):
            watchdog_us = 0
        return cls(environ.pop("NOTIFY_SOCKET", ""), watchdog_us, fds)

    @property
    def active(self) -> bool:
        """Whether a manager listens at all."""
        return self._address is not None

    @property
    def fd_names(self) -> tuple[str, ...]:
        """Names of the descriptors not yet taken."""
        return tuple(self._fds)

    def take_fd(self, name: str) -> int | None:
        """Hand a received descriptor over: the caller owns it from now on. None if there is none of this name."""
        return self._fds.pop(name, None)

    def close_unused(self, keep: Iterable[str] = ()) -> list[str]:
        """Close the received descriptors nobody took and forget them in the manager's store; returns their names."""
        unused = [name for name in self._fds if name not in set(keep)]
        for name in unused:
            os.close(self._fds.pop(name))
            self.remove_fd(name)
        return unused

    # --- messages ---------------------------------------------------------------------------------------------------------
    def ready(self, status: str = "") -> bool:
        """The control socket answers; prefault and registration may still run."""
        return self._send("READY=1", *_status_lines(status))

    def status(self, text: str) -> bool:
        """One line for ``systemctl status``."""
        return self._send(*_status_lines(text))

    def watchdog(self) -> bool:
        """The main loop made progress. Never blocks: it is called from that loop."""
        return self._send("WATCHDOG=1", timeout=0.0)

    def stopping(self, status: str = "") -> bool:
        """Work is being finished; the process exits by itself."""
        return self._send("STOPPING=1", *_status_lines(status))

    def store_fd(self, name: str, fd: int) -> bool:
        """Keep ``fd`` in the manager's store over restarts.

        ``FDPOLL=0`` stops the manager from dropping it at a hang-up. What came from the store must not be stored again under
        a descriptor opened anew: the manager compares open files, not inodes, and would keep both.
        """
        if not name or ":" in name or not name.isprintable() or len(name) > 255:
            raise ConfigError(f"descriptor name {name!r}", "use 1 to 255 printable characters without a colon")
        return self._send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=(fd,))

    def remove_fd(self, name: str) -> bool:
        """Drop every stored descriptor of this name."""
        return self._send("FDSTOREREMOVE=1", f"FDNAME={name}")

    def _send(self, *lines: str, fds: Sequence[int] = (), timeout: float = SEND_TIMEOUT_S) -> bool:
        if self._address is None:
            return False
        # A socket per message (9 µs): nothing to re-open when the manager is re-executed and its socket replaced.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(timeout)
            try:
                sock.connect(self._address)
                socket.send_fds(sock, ["\n".join(lines).encode()], list(fds), socket.MSG_NOSIGNAL)
            except OSError:
                self.failures += 1
                return False
        return True


def _status_lines(text: str) -> tuple[str, ...]:
    """A STATUS line, or nothing; a line break inside would start another assignment."""
    return (f"STATUS={' '.join(text.split())}",) if text else ()


def stored_pool(manager: ServiceManager, spec: PoolSpec) -> int | None:
    """The stored descriptor of ``spec``'s pool, the caller's to close; None if there is none.

    It is this pool's if it is the file at its path, or was until somebody removed that, or never had one (a memfd). Any other
    is given up: ``pool.path`` was changed, or the file replaced, and whoever did it meant it; so is every one if
    ``spec.recreate`` asks for an empty pool.
    """
    fd = manager.take_fd(POOL_FD)
    if fd is None or (not spec.recreate and _is_pool_of(fd, spec.file_path)):
        return fd
    os.close(fd)
    manager.remove_fd(POOL_FD)
    return None


def _is_pool_of(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        target = os.readlink(f"/proc/self/fd/{fd}")  # the kernel marks a file without a name
        return target.startswith("/memfd:") or target == f"{os.path.realpath(path)} (deleted)"
