"""The daemon as a process: signals, logging, the service manager's notifications and the HTTP endpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from maru_shm import __version__
from maru_shm import messages as M
from maru_sidecar.bus_guard import BUS_GUARD
from maru_sidecar.config import Config
from maru_sidecar.daemon import Sidecar
from maru_sidecar.notify import CONTROL_FD, POOL_FD, ServiceManager, stored_pool
from maru_sidecar.progress import StartReport

log = logging.getLogger(__name__)

_STOPPING = (signal.SIGTERM, signal.SIGINT)


def run(config: Config) -> int:
    """See :func:`maru_sidecar.daemon.run_foreground`."""
    logging.basicConfig(
        level=config.daemon.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sys.setswitchinterval(config.daemon.switch_interval_s)
    _raise_descriptor_limit()
    BUS_GUARD.install()
    manager = ServiceManager.from_environment()
    pool_fd = stored_pool(manager, config.pool) if not config.pool.shared else None
    with contextlib.ExitStack() as undo:
        stop = undo.enter_context(_signals_stop())
        sidecar = Sidecar(config, manager.take_fd(CONTROL_FD), pool_fd)
        never_ran = undo.enter_context(contextlib.ExitStack())
        never_ran.callback(sidecar.close)
        for name in manager.close_unused():
            log.warning("descriptor %r from the service manager is not used", name)
        if pool_fd is None and not config.pool.shared:  # a shared pool is not this service's alone to keep
            sidecar.on_ready.append(lambda: _store_pool(manager, sidecar))
        sidecar.on_progress.append(StartReport(sidecar, manager.status, sys.stderr if sys.stderr.isatty() else None))
        sidecar.on_stopping.append(lambda: _stopping(manager))
        if (interval := manager.watchdog_interval_s) is not None:
            sidecar.on_progress.append(_every(interval, manager.watchdog))
        undo.enter_context(_http(config.http.address, sidecar))
        manager.ready("opening the pool")  # the socket answers already; attaches wait for the pool
        log.info("listening on %s, instance %s", config.control.socket, sidecar.instance)
        never_ran.pop_all()
        stop.tell(sidecar)
        sidecar.run()
    if not sidecar.settled:  # the interpreter would wait for the threads that hang, and be killed in the end
        log.error("threads hang in copies or attaches; ending without them")
        logging.shutdown()
        os._exit(1)
    log.info("stopped")
    return 0


def _store_pool(manager: ServiceManager, sidecar: Sidecar) -> None:
    """Keep the pool in the manager's descriptor store: it outlives this process even if its file is unlinked meanwhile."""
    if manager.active and sidecar.pool is not None:
        manager.store_fd(POOL_FD, sidecar.pool.mapping.fd)


def _stopping(manager: ServiceManager) -> None:
    manager.stopping("draining")


def _every(interval_s: float, call: Callable[[], object]) -> Callable[[], None]:
    """A hook that calls at most every ``interval_s`` seconds."""
    due = 0.0

    def hook() -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + interval_s
            call()

    return hook


class _Stop:
    """What SIGTERM and SIGINT do: stop the daemon, or be remembered until there is one."""

    def __init__(self) -> None:
        self._sidecar: Sidecar | None = None
        self._asked = 0

    def ask(self, _number: int, _frame: object) -> None:
        """The handler. No logging here: it may interrupt the log's own write."""
        self._asked += 1
        if self._sidecar is not None:
            self._sidecar.stop()

    def tell(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        if self._asked:
            sidecar.stop()


@contextlib.contextmanager
def _signals_stop() -> Iterator[_Stop]:
    """SIGTERM and SIGINT stop the daemon, from before its socket is made; afterwards they are ignored.

    The interpreter restores the default action while it exits, for signals that have a handler: one more SIGTERM then would
    make an orderly stop look like a kill.
    """
    stop = _Stop()
    for number in _STOPPING:
        signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _http(address: str, sidecar: Sidecar) -> Iterator[None]:
    """The HTTP endpoint, where one is configured."""
    if not address:
        yield
        return
    from maru_shm.http import parse_address
    from maru_sidecar.http import HttpServer, Sources

    def healthy() -> tuple[bool, str]:
        health = sidecar.health()
        return health.good, health.text if health.reason else ""

    def version() -> dict[str, object]:
        return {"version": __version__, "protocol": M.PROTOCOL, "pid": os.getpid(), "instance": sidecar.instance}

    server = HttpServer(parse_address(address), Sources(sidecar.metrics, sidecar.status, healthy, sidecar.ready, version))
    server.start()
    log.info("HTTP on %s:%d", *server.address)
    try:
        yield
    finally:
        server.close()


def _raise_descriptor_limit() -> None:
    """As many descriptors as the kernel allows: a session takes about five."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
