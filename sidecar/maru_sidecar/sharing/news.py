"""What is logged of stores into a shared pool: that they stop, and that they go on; once each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: A start without stores is logged after this long: a first session takes one answer of the server, which has 2 s for it.
START_S = 3.0


class StoreNews:
    """``now``: seconds of a clock that does not go back."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()  # of the state that ``_can`` tells
        self._can: bool | None = None  #: None: none was possible yet, and nothing was said of it

    def look(self, no_stores: Callable[[], str]) -> None:
        """``no_stores``: why nothing can be stored now, empty if something can."""
        why = no_stores()
        if why and self._can is None and self._now() - self._since < START_S:
            return
        if self._can is not None and self._can == (not why):
            return
        now = self._now()
        if why:
            log.warning("%s: %s", "stores stop" if self._can else "nothing can be stored yet", why)
            self._since = now if self._can else self._since
        elif self._can is None:
            log.info("stores are possible")
        else:
            log.info("stores are possible again, after %.1f s without", now - self._since)
        self._can = not why
