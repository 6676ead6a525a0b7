"""Named points where a crash test stages a death: ``MARU_FAILPOINT=name[:n]`` kills this process there, the n-th time.

Off (the usual case) a point costs one dictionary lookup on an empty dictionary. The names in use are listed here, so that a
test can prove it covered them all.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "commit.before_writing",  # a slab is chosen, its header untouched
    "commit.after_writing",  # WRITING stored, no data yet
    "commit.after_data",  # data copied, header fields stale
    "commit.before_state",  # header and CRC written, state still WRITING
    "commit.after_state",  # COMMITTED stored, directory not told
    "evict.after_state",  # EVICTING stored, slab not yet free
    "region.before_format",
    "region.after_headers",  # slab headers cleared, region header stale
    "load.before_copy",
    "load.after_copy",  # bytes are there, the record not complete
    "store.before_complete",
)


def _parse(spec: str) -> dict[str, int]:
    armed: dict[str, int] = {}
    for item in filter(None, spec.split(",")):
        name, _, count = item.partition(":")
        armed[name] = int(count or 1)
    return armed


_armed = _parse(os.environ.get("MARU_FAILPOINT", ""))


def hit(name: str) -> None:
    """Die here by SIGKILL if this point is armed and its count has run down."""
    if not _armed:
        return
    left = _armed.get(name)
    if left is None:
        return
    if left <= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _armed[name] = left - 1
