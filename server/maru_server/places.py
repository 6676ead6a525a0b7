"""Arrays of places: which grants occur in them, which of them can be read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from maru_server import protocol as P


def grant_ids(places: bytes) -> set[int]:
    """The grant ids that occur in places, without 0."""
    ids = set(np.unique(np.frombuffer(places, P.PLACE)["grant"]).tolist())
    ids.discard(0)
    return ids


def n_found(places: bytes) -> int:
    """How many places are not NOWHERE."""
    return int(np.count_nonzero(np.frombuffer(places, P.PLACE)["grant"]))


class ReadableMask:
    """Which grant ids are readable, as an array: a batch of places is filtered in a few µs."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._mask = np.zeros(2 * max(ids, default=0) + 1024, np.bool_)
        self._mask[list(ids)] = True

    def add(self, grant: int) -> None:
        if grant >= len(self._mask):
            self._mask = np.concatenate([self._mask, np.zeros(grant + 1, np.bool_)])
        self._mask[grant] = True

    def discard(self, grant: int) -> None:
        if grant < len(self._mask):
            self._mask[grant] = False

    def has(self, grant: int) -> bool:
        return grant < len(self._mask) and bool(self._mask[grant])

    def flags(self, places: bytes) -> npt.NDArray[np.bool_]:
        """shape (n,): whether each place can be read."""
        grants = np.frombuffer(places, P.PLACE)["grant"]
        if len(grants) and int(grants.max()) >= len(self._mask):
            known = grants < len(self._mask)
            return np.asarray(known & self._mask[np.where(known, grants, 0)])
        return np.asarray(self._mask[grants])

    def filter(self, places: bytes) -> bytes:
        """The places with unreadable ones made NOWHERE."""
        array = np.frombuffer(places, P.PLACE)
        stale = ~self.flags(places) & (array["grant"] != 0)
        if not stale.any():
            return places
        array = array.copy()
        array[stale] = np.zeros((), P.PLACE)
        return array.tobytes()

    def leading(self, places: bytes) -> int:
        """How many leading places can be read."""
        flags = self.flags(places)
        return len(flags) if flags.all() else int(flags.argmin())
