"""The daemon: wiring, main loop, start and stop.

*Threads.* The main thread runs one loop over the control socket, the clients, their rings and the clock. It answers lookups
itself and never waits for anything but its epoll. Each GPU, and each worker in host memory, has a loader and a writer;
importing and forgetting KV caches, cache administration, opening the pool and touching its pages run in threads of their own.

*Sleeping.* After a request the loop spins for ``spin_us``, since the next step of an engine often follows at once; then it arms
every ring, fences once, looks at every ring again, and sleeps in epoll. A ring armed when its client publishes gets a doorbell.
Idle, it wakes four times a second, for the heartbeat.

*Start.* The socket answers from the first moment. A pool is opened behind it; attaches wait for that, everything else is
answered with the state STARTING.

*Stop.* SIGTERM: DRAINING (new work is refused, what is in flight ends, bounded by ``drain_timeout_s``), then every session is
ended as if it had detached (but leases of clients that live are left to the successor, in their segments), then the threads,
then the pool is closed clean.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maru_shm import __version__
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm.atomics import full_fence, require_supported_platform
from maru_shm.errors import ConfigError, ProtocolViolation
from maru_shm.segment import process_start_time
from maru_sidecar import harvest
from maru_sidecar import status as reports
from maru_sidecar.attaching import Identity
from maru_sidecar.config import Config
from maru_sidecar.control_server import ControlServer
from maru_sidecar.directory import Directory
from maru_sidecar.dispatch import KEYS_PER_TURN, Dispatcher
from maru_sidecar.lanes import Lanes
from maru_sidecar.listener import instance_of
from maru_sidecar.opener import Found, GivenUp, Opening, PoolOpener
from maru_sidecar.poller import Poller
from maru_sidecar.pool import PoolFile
from maru_sidecar.prefault import Prefault
from maru_sidecar.service import ControlService
from maru_sidecar.sessions import Session, Sessions
from maru_sidecar.tickets import Counters

if TYPE_CHECKING:
    from maru_sidecar.sharing.node import Node

log = logging.getLogger(__name__)

MAX_HANGING = 16  #: engines whose memory does not answer; with more, a restart is the better way to get their threads back
STOP_TIMEOUT_S = 10.0  #: for ending sessions and threads, after the drain


@dataclass(frozen=True, slots=True)
class Health:
    """Whether every thread the daemon needs is alive and gets on, and if not, which does not.

    Good with a reason is *degraded*: something from outside is missing, a restart would not help, what is here is served.
    """

    good: bool
    reason: str = ""

    @property
    def degraded(self) -> bool:
        return self.good and bool(self.reason)

    @property
    def text(self) -> str:
        """``good``, ``degraded: …`` or what is wrong."""
        return f"degraded: {self.reason}" if self.degraded else self.reason or "good"


class Sidecar:
    """One daemon. :meth:`run` in one thread; :meth:`stop`, :meth:`health`, :meth:`status` and :meth:`metrics` from any.

    ``on_ready`` is called once when lookups are answered from the pool, ``on_progress`` about four times a second while the
    loop turns and :meth:`health` is good, ``on_stopping`` when the drain begins; all in the main thread, so they must not
    block.
    """

    def __init__(self, config: Config, activated_fd: int | None = None, pool_fd: int | None = None) -> None:
        """Take the instance's lock and listen.

        ``activated_fd``: a listening control socket, ``pool_fd``: the pool, both from a service manager and consumed here.
        Raises :class:`~maru_shm.errors.SocketBusy`, ``ConfigError`` or ``PlatformUnsupported``.
        """
        require_supported_platform()
        if config.server.endpoint:
            _require_server_client()
        self.config = config
        self.state = L.SidecarState.STARTING
        self.instance = instance_of(config.control.socket)
        self.generation = time.time_ns()
        self.started_s = time.monotonic()
        self.counters = Counters()
        self.opening = Opening()  #: how far the pool is
        self.harvested = harvest.Harvest()
        self.settled = True  #: False after :meth:`run` if copies or attaches hung at the end: their threads cannot be joined
        self.violations = 0  #: sessions ended for what their client wrote into the segment
        self.pool: PoolFile | None = None
        self.directory: Directory | None = None
        self.lanes: Lanes | None = None
        self.sessions: Sessions | None = None
        self.prefault: Prefault | None = None
        self.node: Node | None = None  #: where the pool is shared
        self.on_ready: list[Callable[[], None]] = []
        self.on_progress: list[Callable[[], None]] = []
        self.on_stopping: list[Callable[[], None]] = []
        self._dispatcher: Dispatcher | None = None
        self._failure: BaseException | None = None
        self._stop_asked = 0
        self._stop_deadline = 0.0
        self._next_tick = 0
        self._told = Health(True)
        self.poller = Poller()
        self.service = ControlService(self, self.poller)
        try:
            self.server = ControlServer(config.control, self.poller, self.service, activated_fd)
        except BaseException:
            self.poller.close()
            raise
        self.service.server = self.server
        self._opener = PoolOpener(
            config, self.instance, pool_fd, self.opening, call_soon=self.poller.call_soon, ended=self._open_ended
        )

    def close(self) -> None:
        """End without having run: everything that the constructor made is gone again."""
        self.service.close()
        self.server.close()
        self.poller.close()
        self._opener.close()

    # --- any thread -----------------------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Drain and end; a second call ends without waiting for work in flight."""
        self._stop_asked += 1
        self._opener.give_up()
        self.poller.call_soon(lambda: None)

    def health(self) -> Health:
        """Dead threads by name, or those whose copy does not end.

        A thread that ends by itself leaves its queue answered; in both cases the daemon should be restarted.
        """
        lanes = self.lanes
        if lanes is None or self.state is L.SidecarState.STOPPED:
            return Health(True)
        if dead := lanes.dead_threads():
            return Health(False, f"not running: {', '.join(dead)}")
        if hanging := lanes.hanging_threads():
            return Health(False, f"a copy does not end: {', '.join(hanging)}")
        if self.sessions is not None and (n := self.sessions.hanging) > MAX_HANGING:
            return Health(False, f"the memory of {n} engines does not answer, their threads hang")
        troubles = (self.node.trouble() if self.node is not None else "", self.pool.lost() if self.pool is not None else "")
        return Health(True, "; ".join(filter(None, troubles)))

    def ready(self) -> tuple[bool, str]:
        """Whether lookups are answered from the pool, else the state."""
        return self.state is L.SidecarState.READY, self.state.name

    def status(self) -> dict[str, object]:
        """Sections of plain values."""
        return reports.sections(self)

    def metrics(self) -> list[reports.Metric]:
        """A flat snapshot; every name is there from the first second."""
        return reports.metrics(self)

    # --- what the control messages need -----------------------------------------------------------------------------------
    def welcome(self) -> M.Welcome:
        return M.Welcome(M.PROTOCOL, f"maru-sidecar/{__version__}", os.getpid(), self.generation, self.instance)

    def drain(self) -> None:
        """Refuse new work from now on (idempotent)."""
        if self.state is L.SidecarState.READY:
            log.info("draining: %d tickets in flight", self.sessions.in_flight() if self.sessions is not None else 0)
            self._set_state(L.SidecarState.DRAINING)

    def _set_state(self, state: L.SidecarState) -> None:
        self.state = state
        if self._dispatcher is not None:
            self._dispatcher.draining = state is not L.SidecarState.READY
        if self.sessions is not None:
            self.sessions.set_state(state)

    # --- start ----------------------------------------------------------------------------------------------------------------
    def _open_ended(self, found: Found | BaseException) -> None:
        if isinstance(found, BaseException):
            self._failure = found
            return
        try:
            self._pool_opened(found)
        except Exception as e:  # noqa: BLE001 - raised again by run()
            self._failure = e

    def _pool_opened(self, found: Found) -> None:
        config, pool, directory = self.config, found.pool, found.directory
        self.pool, self.directory, self.node, self.harvested = pool, directory, found.node, found.harvested
        self.lanes = Lanes(pool, directory, config.transfer, self.node.slabs if self.node is not None else None)
        identity = Identity(self.instance, self.generation, os.getpid(), process_start_time(os.getpid()))
        self.sessions = Sessions(
            identity=identity, pool=pool, directory=directory, lanes=self.lanes, poller=self.poller, limits=config.limits,
            counters=self.counters, reply=self.server.reply, hang_up=self.server.close_connection, broken=self._broken,
        )  # fmt: skip
        self._dispatcher = Dispatcher(directory, config.cache.lease_ttl_s, self.node.lookups if self.node is not None else None)
        if self.node is not None:
            self.node.start()
        self.prefault = Prefault(pool)
        self.prefault.start()
        if not self._stop_asked:
            self._set_state(L.SidecarState.READY)
            for hook in self.on_ready:
                hook()
        self.service.pool_ready()

    # --- the loop -------------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Serve until stopped. Raises what kept the pool from being opened."""
        self._opener.start()
        try:
            self._loop()
        finally:
            self._shut_down()
        if self._failure is not None and not isinstance(self._failure, GivenUp):
            raise self._failure

    def _loop(self) -> None:
        spin_ns = int(self.config.daemon.spin_us * 1000)
        tick_ns = int(self.config.daemon.heartbeat_s * 1e9)
        spin_until = 0
        while not self._finished():
            served = self._serve_rings()
            now = time.monotonic_ns()
            if now >= self._next_tick:
                self._next_tick = now + tick_ns
                self._tick(now)
            wake = self._next_tick
            if self.node is not None and self.sessions is not None:
                self.node.lookups.expire(now)
                wake = min(wake, self.node.lookups.next_deadline_ns or wake)
            if served:
                spin_until = now + spin_ns
            if now < spin_until:
                self.poller.poll(0)
            else:
                self._sleep(max(0.0, (wake - now) / 1e9))

    def _serve_rings(self) -> int:
        served = 0
        if self.sessions is None or self._dispatcher is None:
            return 0
        sessions = tuple(self.sessions.live.values())
        for session in sessions:
            try:
                served += self._dispatcher.serve(session, KEYS_PER_TURN // len(sessions) + 1)
            except ProtocolViolation as e:
                self._broken(session, e)
            except Exception as e:  # whatever a client's bytes provoke ends that client's session, not the daemon
                log.exception("%s", session.name)
                self._broken(session, e)
        return served

    def _broken(self, session: Session, error: Exception) -> None:
        assert self.sessions is not None
        self.violations += 1
        log.warning("%s broke the protocol: %s", session.name, error)
        self.sessions.end(session, f"protocol violation: {error}")

    def _sleep(self, timeout_s: float) -> None:
        """Arm, fence once, look again, sleep."""
        sessions = tuple(self.sessions.live.values()) if self.sessions is not None else ()
        for session in sessions:
            session.consumer.arm()
        full_fence()  # SYNC POINT: a client that published before it could see "armed" is seen here
        waiting = any(_has_work(session) for session in sessions)
        self.poller.poll(0 if waiting else timeout_s)
        for session in sessions:
            if session.id in self.sessions.live:  # type: ignore[union-attr]
                session.consumer.disarm()

    def _tick(self, now: int) -> None:
        if self.sessions is not None and self.directory is not None:
            for session in self.sessions.live.values():
                session.segment.words[L.WORD_SIDECAR_BEAT] = now
            self.directory.expire(now)
            self.harvested.prune(self.directory, now)
            self.sessions.give_up_hanging(self.config.transfer.copy_timeout_s)
            if self.node is not None:
                self.node.lookups.leases.sweep(self.sessions.live.__contains__, now)
                self.node.tick()
        self.server.tick()
        health = self.health()
        if health.good:
            for hook in self.on_progress:
                hook()
        elif health != self._told:
            log.error("unhealthy: %s; the watchdog is not fed any more", health.reason)
        self._told = health

    def _finished(self) -> bool:
        """Whether the loop may end; begins the drain when a stop was asked for."""
        if self._failure is not None:
            return True
        if not self._stop_asked:
            return False
        now = time.monotonic()
        if not self._stop_deadline:
            self._stop_deadline = now + self.config.daemon.drain_timeout_s
            for hook in self.on_stopping:
                hook()
            self.drain()
        if self.sessions is None:
            return not self._opener.alive
        return not self.sessions.in_flight() or now > self._stop_deadline or self._stop_asked > 1

    # --- stop -----------------------------------------------------------------------------------------------------------------
    def _shut_down(self) -> None:
        self.server.stop_listening()
        settled = self._end_sessions()
        self._set_state(L.SidecarState.STOPPED)
        if self.prefault is not None:
            self.prefault.stop()
        if self.lanes is not None:
            settled = self.lanes.close(STOP_TIMEOUT_S) and settled
        if self.node is not None and self.sessions is not None:
            self.node.close()
        if self.sessions is not None:
            self.sessions.close()
        self.service.close()
        self.server.close()
        if self.pool is not None:
            if settled:
                self.pool.close(clean=True)
            else:  # a copy hangs: the mapping must outlive it, so the process's end unmaps
                log.error("copies were still in flight at the end; the pool is not marked clean")
        self.settled = settled
        self.poller.close()

    def _end_sessions(self) -> bool:
        """End every session and wait, bounded, until their copies are fenced."""
        if self.sessions is None:
            return True
        if self.node is not None:
            self.node.lookups.close()
        if self.directory is not None:
            now = time.monotonic_ns()
            self.directory.expire(now)
            self.harvested.prune(self.directory, now)
        for session in tuple(self.sessions.live.values()):
            self.sessions.end(session, "the sidecar stops", hand_over=True)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not self.sessions.only_hanging and time.monotonic() < deadline:
            self.poller.poll(0.05)
            for session in tuple(self.sessions.live.values()):  # attached meanwhile
                self.sessions.end(session, "the sidecar stops")
        return self.sessions.settled


def _require_server_client() -> None:
    """Raise unless the metadata server's client can be imported."""
    try:
        import maru_server.node  # noqa: F401
    except ImportError as e:
        from maru_server.extra import REMEDY

        raise ConfigError(f"server.endpoint is set, and the metadata server's client cannot be imported ({e})", REMEDY) from e


def _has_work(session: Session) -> bool:
    try:
        return session.consumer.ready() > 0
    except ProtocolViolation:
        return True  # serving it says what is wrong


def run_foreground(config: Config) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the process's exit code. For the main thread of a process.

    Raises :class:`~maru_shm.errors.MaruError` if it cannot start.
    """
    from maru_sidecar.foreground import run

    return run(config)
