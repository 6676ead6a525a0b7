"""What operators do to the directory, and what they ask it: clear, pin, list, count.

Every call takes the directory's lock, :meth:`DirectoryAdmin.clear` anew for each batch; sorting is done outside it.
"""

from __future__ import annotations

import threading
import time

from maru_shm.layout import KEY_BYTES
from maru_shm.messages import ChunkInfo
from maru_sidecar import directory_view as view
from maru_sidecar.holdings import Holdings
from maru_sidecar.leases import LeaseTable
from maru_sidecar.room import RoomMaker

_CLEAR_BATCH = 256  #: chunks evicted per hold of the lock in clear(): about 1 ms


class DirectoryAdmin:
    """Made by the directory from its own parts, as ``Directory.admin``."""

    def __init__(self, lock: threading.Lock, held: Holdings, room: RoomMaker, leases: LeaseTable, counts: view.Counts) -> None:
        self._lock = lock
        self._held = held
        self._room = room
        self._leases = leases
        self._counts = counts

    def clear(self, namespace: bytes | None = None) -> int:
        """Evict every chunk that is not pinned and has no pinned descendant; returns how many chunks went."""
        with self._lock:
            names = [namespace] if namespace is not None else list(self._held.namespaces)
        return sum(self._clear_one(name) for name in names)

    def _clear_one(self, name: bytes) -> int:
        done, limit = 0, None
        while True:
            with self._lock:  # taken anew for each batch: lookups go on in between
                ns = self._held.namespaces.get(name)
                if ns is None:
                    return done
                limit = len(ns.chunks) if limit is None else limit  # what is stored meanwhile may stay
                for _ in range(min(_CLEAR_BATCH, limit - done)):
                    chunk = self._held.coldest(ns)
                    if chunk is None:
                        return done
                    self._held.remove(chunk)
                    self._counts.cleared += 1
                    done += 1
                if done >= limit:
                    return done

    def count(self, namespace: bytes | None = None) -> int:
        """Chunks of one namespace, or of all."""
        with self._lock:
            return sum(len(ns.chunks) for ns in self._held.namespaces.values() if namespace in (None, ns.id))

    def pin(self, namespace: bytes, keys: bytes, *, pinned: bool) -> tuple[int, int]:
        """Exclude leading chunks from eviction, or undo that once; stops at the first absent key. Counted; kept in the slabs.

        Returns how many chunks were there and, of those to unpin, how many had no pin.
        """
        done = bare = 0
        with self._lock:
            ns = self._held.namespaces.get(namespace)
            for i in range(0, len(keys), KEY_BYTES):
                chunk = ns.chunks.get(keys[i : i + KEY_BYTES]) if ns is not None else None
                if chunk is None:
                    break
                if pinned:
                    self._held.keep_pins(chunk, chunk.admin_pins + 1)
                elif chunk.admin_pins:
                    self._held.keep_pins(chunk, chunk.admin_pins - 1)
                else:
                    bare += 1
                done += 1
        return done, bare

    def page(self, namespace: bytes | None, after: bytes, limit: int) -> tuple[list[ChunkInfo], bool]:
        """Chunks ordered by key (then namespace) beyond ``after``, at most ``limit``, and whether there are more.

        ``after`` is the last key of the page before; with ``namespace`` None (all), that key followed by its namespace.
        """
        with self._lock:
            names = view.all_names(self._held, namespace)
        if namespace is not None and after:
            after = after[:KEY_BYTES] + namespace
        chosen, more = view.page_names(names, after, limit)
        with self._lock:
            return view.chunk_infos(self._held, chosen, time.monotonic_ns()), more

    def stats(self) -> dict[str, object]:
        """Plain values for status and metrics; ``*_total`` count since the sidecar's start.

        Hit ratio: ``chunks_hit_total / chunks_asked_total``. ``rebuild``: what the last restart kept and dropped.
        """
        with self._lock:
            return {
                **view.usage(self._held, self._room),
                "leases": len(self._leases),
                "slabs_copying": self._counts.copying,
                "evicted_total": self._held.evicted,
                "regions_taken_total": self._room.regions_taken,
                **self._counts.totals(),
                "rebuild": self._counts.rebuild.as_dict(),
            }
