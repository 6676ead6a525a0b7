"""What the server refused of a link's requests: counted, logged once per kind, and known for as long as it is so.

Nothing else tells. The link is up and its lease is renewed while every lookup, say, is answered with an error: that looks like
a cluster in which nobody has anything.

An answer that is none is worse: it ends the session. It is counted too, and stands until a request of its kind is answered as
asked: the next session is with the same server, most likely.

Not counted: what ends the session (the link tells of that itself), and allocations that wait for a region. A pool that is
full is no error.
"""

from __future__ import annotations

import logging

from maru_server import protocol as P
from maru_server.errors import ServerRefused
from maru_server.lease import boottime_ns
from maru_server.protocol import ErrorCode
from maru_shm.errors import ProtocolViolation

log = logging.getLogger(__name__)

_LOG_AGAIN_NS = 600 * 1_000_000_000  # a kind that goes on for hours is found in the log of any ten minutes
_ENDS_THE_SESSION = (P.Hello, P.Heartbeat, P.ClaimRegions)
_WAITING = (ErrorCode.NO_SPACE, ErrorCode.HOLDING)


class Refusals:
    """The link's thread writes, any thread reads."""

    def __init__(self) -> None:
        self.total = 0
        self._standing: dict[type[P.Request], tuple[int, str]] = {}  # when and why a verb was refused when last sent
        self._broken: dict[type[P.Request], tuple[int, str]] = {}  # the same of answers that were none
        self._logged_ns: dict[tuple[type[P.Request], ErrorCode], int] = {}

    def refused(self, verb: type[P.Request], why: ServerRefused) -> str:
        """A request was answered with an error; what to say of it, empty if it does not count."""
        if why.code in _WAITING:
            self.answered(verb)
            return ""
        if verb in _ENDS_THE_SESSION:
            return ""
        self.total += 1
        now, text = boottime_ns(), f"the metadata server refused {verb.__name__}: {why}"
        self._standing[verb] = now, text
        last = self._logged_ns.get((verb, why.code))
        if last is None or now - last >= _LOG_AGAIN_NS:
            self._logged_ns[verb, why.code] = now
            log.warning("%s", text)
        return text

    def broken(self, verb: type[P.Request], why: ProtocolViolation) -> None:
        """The answer to a request was none; the link tells of it, since its session ends."""
        self.total += 1
        self._broken[verb] = boottime_ns(), str(why)

    def answered(self, verb: type[P.Request]) -> None:
        """A request was answered as asked: this verb is refused no more."""
        self._standing.pop(verb, None)
        self._broken.pop(verb, None)

    def new_session(self) -> None:
        """What the server before refused, this one may not."""
        self._standing.clear()

    @property
    def standing(self) -> tuple[int, str]:
        """The latest refusal that nothing has proved wrong since: when (CLOCK_BOOTTIME, ns) and what; (0, "") if none."""
        return max([*list(self._standing.values()), *list(self._broken.values())], default=(0, ""))
