"""Which segments in ``/dev/shm`` have lost their sidecar, and removing those.

A sidecar is named by pid and start time, as in ``/proc``. A sidecar in another pid namespace (a container that shares
``/dev/shm``) has neither here, but its beat goes on: where a dead pid meets a fresh beat, the beat decides.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Iterator

from maru_shm import layout as L
from maru_shm import segment as S
from maru_shm.errors import MaruError, SegmentNotReady

#: No sidecar beats more slowly (daemon.heartbeat_s is at most 5 s).
BEAT_LIMIT_S = 6.0
_POLL_S = 0.05


class Liveness(enum.Enum):
    """What became of the sidecar that made a segment."""

    LIVE = "live"
    ELSEWHERE = "elsewhere"  #: it runs, but not in this pid namespace
    #: It has ended, its client lives: the next sidecar, which may run already, honours the leases in the segment and removes
    #: it after the last of them.
    AWAITED = "awaited"
    STALE = "stale"  #: nobody is left


def survey_segments(instance: str | None = None) -> Iterator[tuple[str, Liveness | MaruError]]:
    """Every segment (of one instance) with its sidecar's fate, or the error that says why it cannot be told.

    Blocks for up to ``BEAT_LIMIT_S`` in all where a sidecar died, or seems to have, that recently.
    """
    for name, *_ in list(S.list_names(instance)):
        try:
            segment = S.open_readonly(name)
        except SegmentNotReady as e:
            if os.path.exists(S.SHM_DIR + name):
                yield name, e
            continue
        except MaruError as e:
            yield name, e
            continue
        try:
            yield name, _liveness(segment)
        finally:
            segment.close()


def _liveness(segment: S.Segment) -> Liveness:
    if S.process_runs(segment.info.sidecar_pid, segment.info.sidecar_start):
        return Liveness.LIVE
    first = segment.words[L.WORD_SIDECAR_BEAT]
    while time.monotonic_ns() - first < BEAT_LIMIT_S * 1e9:
        time.sleep(_POLL_S)
        if segment.words[L.WORD_SIDECAR_BEAT] != first:
            return Liveness.ELSEWHERE
    return Liveness.AWAITED if S.process_runs(segment.info.client_pid) else Liveness.STALE


def remove_stale(instance: str | None = None) -> list[str]:
    """Unlink the segments whose sidecar and client are dead, and nothing else; returns their names.

    While the client lives its leases count: every later sidecar reads them from the segment, until they have run out.
    """
    return [name for name, fate in survey_segments(instance) if fate is Liveness.STALE and S.unlink(name)]
