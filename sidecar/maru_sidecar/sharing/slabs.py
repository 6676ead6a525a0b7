"""Where a load's slabs come from when the pool is shared: our own, pinned, and those of other sidecars, which may reuse theirs.

A foreign slab is a miss at worst, never a wrong byte: what ``slab_reader.py`` checks before and after each copy says whether it
was reused. Where the CPU moves the bytes, every slab's checksum is compared *after* the copy, our own slabs' too: that also
catches a writer that was paused in mid-copy, lost its lease and went on.
"""

from __future__ import annotations

from maru_shm import poolformat as F
from maru_shm.layout import KEY_BYTES
from maru_shm.records import Request
from maru_sidecar.copy_thread import WorkerPort
from maru_sidecar.directory import Directory
from maru_sidecar.sharing.foreign import ForeignLeases
from maru_sidecar.slab_handles import Acquired, SlabRef
from maru_sidecar.slab_reader import SlabReader


class MixedSlabs:
    """Slabs for one load: our own, pinned until :meth:`release`, and foreign ones, which nothing here can pin."""

    def __init__(self) -> None:
        self.refs: list[SlabRef] = []
        self._held: list[Acquired] = []

    @property
    def n_found(self) -> int:
        return len(self.refs)

    def add(self, acquired: Acquired) -> None:
        self._held.append(acquired)
        self.refs += acquired.refs

    def release(self) -> None:
        """Unpin our own (idempotent)."""
        held, self._held = self._held, []
        for acquired in held:
            acquired.release()


class SharedSlabs:
    """Where a load's bytes come from when the pool is shared. Loaders of all devices use it."""

    def __init__(self, directory: Directory, reader: SlabReader, leases: ForeignLeases) -> None:
        self._directory = directory
        self._reader = reader
        self._leases = leases
        self.vanished = 0  #: slabs that were gone or reused when a load wanted them, or during its copy

    def acquire(self, port: WorkerPort, request: Request) -> MixedSlabs:
        """The leading slabs of a LOAD that are here or held by the foreign part of its lease."""
        found, keys = MixedSlabs(), request.keys
        foreign = self._leases.find(request.lease_session, request.lease)
        stride = F.slab_stride(port.slab_bytes)
        at = 0
        while at < request.n_keys:
            acquired = self._directory.acquire(port.namespace, keys[at * KEY_BYTES :], rank=port.rank)
            if acquired.n_found:
                found.add(acquired)
                at += acquired.n_found
                continue
            place = foreign.places.get((request.key(at), port.rank)) if foreign is not None else None
            ref = self._reader.locate(*place, stride) if place is not None else None
            if ref is None:
                self.vanished += place is not None
                break
            found.refs.append(ref)
            at += 1
        return found
