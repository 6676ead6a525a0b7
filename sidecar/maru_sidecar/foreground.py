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
from maru_sidecar.config import Config
from maru_sidecar.daemon import Sidecar
from maru_sidecar.notify import CONTROL_FD, POOL_FD, ServiceManager, stored_pool
from maru_sidecar.progress import StartReport

log = logging.getLogger(__name__)


def run(config: Config) -> int:
    """See :func:`maru_sidecar.daemon.run_foreground`."""
    logging.basicConfig(
        level=config.daemon.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sys.setswitchinterval(config.daemon.switch_interval_s)
    _raise_descriptor_limit()
    manager = ServiceManager.from_environment()
    pool_fd = stored_pool(manager, config.pool) if not config.pool.shared else None
    sidecar = Sidecar(config, manager.take_fd(CONTROL_FD), pool_fd)
    for name in manager.close_unused():
        log.warning("descriptor %r from the service manager is not used", name)
    if pool_fd is None and not config.pool.shared:  # a shared pool is not this service's alone to keep
        sidecar.on_ready.append(lambda: _store_pool(manager, sidecar))
    sidecar.on_progress.append(StartReport(sidecar, manager.status, sys.stderr if sys.stderr.isatty() else None))
    sidecar.on_stopping.append(lambda: _stopping(manager))
    if (interval := manager.watchdog_interval_s) is not None:
        sidecar.on_progress.append(_every(interval, manager.watchdog))
    with _signals_stop(sidecar), _http(config.http.address, sidecar):
        manager.ready("opening the pool")  # the socket answers already; attaches wait for the pool
        log.info("listening on %s, instance %s", config.control.socket, sidecar.instance)
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


@contextlib.contextmanager
def _signals_stop(sidecar: Sidecar) -> Iterator[None]:
    """SIGTERM and SIGINT stop the daemon; afterwards they are ignored.

    The interpreter restores the default action while it exits, for signals that have a handler: one more SIGTERM then would
    make an orderly stop look like a kill.
    """

    def on_signal(_number: int, _frame: object) -> None:
        sidecar.stop()  # no logging here: the handler may interrupt the log's own write

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _http(address: str, sidecar: Sidecar) -> Iterator[None]:
    """The HTTP endpoint, where one is configured."""
    if not address:
        yield
        return
    from maru_sidecar.http import HttpServer, Sources, parse_address

    def healthy() -> tuple[bool, str]:
        health = sidecar.health()
        return health.good, health.reason

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
