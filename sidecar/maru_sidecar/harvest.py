"""What a new sidecar does with the segments of dead ones: honour their leases, then remove them.

The lease table lives in the clients' segments (records that are DONE with a deadline), so a lookup that was answered before a
crash keeps its chunks pinned until its deadline, as promised. The caller holds the instance's lock: every segment of the
instance is of a dead generation. A segment is read as untrusted memory; one that makes no sense is removed all the same.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from maru_shm import layout as L
from maru_shm import segment as S
from maru_shm.errors import SegmentError
from maru_sidecar.directory import Directory

log = logging.getLogger(__name__)
_LEASING = (L.Op.LOOKUP, L.Op.LOCATE)


@dataclass(slots=True)
class Harvest:
    """What was found."""

    segments: int = 0
    leases: int = 0
    chunks: int = 0


def sweep(instance: str, directory: Directory, *, max_ttl_s: float = 3600.0, max_bytes: int = 1 << 30) -> Harvest:
    """Renew the live leases of every segment of ``instance``, owner ``("generation", g)``, and unlink it.

    Clients could write to these segments: a lease lasts at most ``max_ttl_s`` from now, one over ``max_bytes`` is not read.
    What may not be opened or removed is logged and left: it cannot keep a sidecar from starting.
    """
    result = Harvest()
    for name, _, generation, _ in list(S.list_names(instance)):
        try:
            segment = S.open_readonly(name, owner=os.geteuid())
        except SegmentError as e:
            log.warning("stale segment %s: %s", name, e)
        else:
            try:
                if _alive(segment.info.client_pid) and segment.shape.total_bytes <= max_bytes:
                    _renew(segment, directory, ("generation", generation), int(max_ttl_s * 1e9), result)
            finally:
                segment.close()
        try:
            result.segments += S.unlink(name)
        except SegmentError as e:
            log.warning("%s", e)
    return result


def _renew(segment: S.Segment, directory: Directory, owner: tuple[str, int], max_ttl_ns: int, result: Harvest) -> None:
    world = segment.words[L.WORD_WORLD]
    if not 0 < world <= 1 << 16:
        return
    namespace = bytes(segment.bytes[L.NAMESPACE_OFFSET : L.NAMESPACE_OFFSET + L.KEY_BYTES])
    shape, now = segment.shape, time.monotonic_ns()
    for index in range(shape.n_records):
        base = shape.records_offset + index * L.RECORD_BYTES
        if segment.words[base // 8 + L.STATE_WORD] & 0xFF != L.State.DONE:
            continue
        op, n_keys = (L.REQUEST.unpack_from(segment.bytes, base)[i] for i in (1, 7))
        reply = L.REPLY.unpack_from(segment.bytes, base + L.REPLY_OFFSET)
        n_done, deadline = reply[1], reply[6]
        held = op in _LEASING and 0 < n_done <= n_keys and n_done * L.KEY_BYTES <= shape.cell_bytes
        if not held or deadline <= now:
            continue
        deadline = min(deadline, now + max_ttl_ns)
        cell = shape.cells_offset + index * shape.cell_bytes
        keys = bytes(segment.bytes[cell : cell + n_done * L.KEY_BYTES])
        lease = directory.lease(namespace, keys, world=world, ttl_s=(deadline - now) / 1e9, owner=owner)
        if lease is not None:
            result.leases += 1
            result.chunks += lease.n


def _alive(pid: int) -> bool:
    return pid > 0 and os.path.exists(f"/proc/{pid}")
