"""What ``maru-ring tail`` follows: segments that come and go while it watches.

A segment's name is never used again, so whatever ends in one that was not there at the first look ended since, and is reported;
of those that were, what had ended is passed over. ``/dev/shm`` is listed again when it has changed (asking for its mtime takes
1 µs), for a new engine may use a record again within a millisecond; and about once a second besides, since two changes within
one tick of the clock look like one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from maru_shm import segment as S
from maru_shm.errors import MaruError, SegmentNotReady
from maru_sidecar.output import one_line
from maru_sidecar.ring_view import RecordView, SegmentView, open_named

POLL_S = 0.002
LIST_S = 1.0


class Following:
    """Segments of an instance, of all (None), or those of ``names`` alone. ``tell`` takes what is said beside the records.

    Close it, or use it as a context manager. Raises for a segment of ``names`` that cannot be read.
    """

    def __init__(self, instance: str | None, names: Iterable[str], tell: Callable[[str], None]) -> None:
        self._instance = instance
        self._names = tuple(dict.fromkeys(names))
        self._tell = tell
        self._views: dict[str, SegmentView] = {}
        self._unreadable: dict[str, str] = {}  #: name → why, as told
        self._listed_at = float("-inf")
        self._changed_ns = 0
        try:
            for name in self._names:
                self._views[name] = open_named(name)
            self._list()
            for view in self._views.values():
                view.skip_completed()
        except BaseException:
            self.close()
            raise
        if not self._views:
            self._tell("no segments; waiting for one")

    @property
    def over(self) -> bool:
        """Whether nothing can come any more: the segments that were named are gone."""
        return bool(self._names) and not self._views

    def completed(self) -> list[RecordView]:
        """What has ended since the last call. Waits for nothing."""
        gone = self._list() if self._due() else []
        found = [record for view in (*self._views.values(), *gone) for record in view.newly_completed()]
        for view in gone:
            view.close()
        if gone and not self._views:
            self._tell("the segments are gone" if self._names else "no segments any more; waiting for one")
        return found

    def _due(self) -> bool:
        return time.monotonic() - self._listed_at >= LIST_S or os.stat(S.SHM_DIR).st_mtime_ns != self._changed_ns

    def _list(self) -> list[SegmentView]:
        """Open what is new; returns what is to be closed: nothing can end in it any more.

        A session's name goes before its last answers are written, so a segment is followed as long as one may still come.
        """
        self._listed_at, self._changed_ns = time.monotonic(), os.stat(S.SHM_DIR).st_mtime_ns
        there = {name for name, *_ in S.list_names(self._instance)}
        for name in sorted(there - self._views.keys()) if not self._names else ():
            self._open(name)
        for name in self._unreadable.keys() - there:
            del self._unreadable[name]
        gone = [name for name, view in self._views.items() if name not in there and not view.answers_to_come]
        return [self._views.pop(name) for name in gone]

    def _open(self, name: str) -> None:
        try:
            self._views[name] = open_named(name)
        except MaruError as e:
            told = self._unreadable.get(name)
            if isinstance(e, SegmentNotReady) and told is None:  # most likely it is being made; or it is gone already
                self._unreadable[name] = ""
                self._listed_at = time.monotonic() - LIST_S + 5 * POLL_S
            elif told != (why := one_line(e)):
                self._unreadable[name] = why
                self._tell(f"{name}: {why}")
        else:
            self._unreadable.pop(name, None)

    def close(self) -> None:
        for view in self._views.values():
            view.close()
        self._views.clear()

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
