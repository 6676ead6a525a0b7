"""What a new sidecar does with the segments of those before it: honour their leases, and remove them when these have run out.

The lease table lives in the clients' segments (records that are DONE with a deadline), so a lookup that was answered before a
crash or an orderly stop keeps its chunks pinned until its deadline, as promised. A segment stays as long as one of its leases
does and its client lives: the next sidecar, should this one end before, reads the same records. The caller holds the instance's
lock: every segment of the instance is of an earlier generation. A segment is read as untrusted memory; one that makes no sense
is removed.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field

from maru_shm import layout as L
from maru_shm import segment as S
from maru_shm.errors import SegmentError
from maru_sidecar.bus_guard import BUS_GUARD
from maru_sidecar.directory import Directory

log = logging.getLogger(__name__)
_LEASING = (L.Op.LOOKUP, L.Op.LOCATE)


@dataclass(frozen=True, slots=True)
class Kept:
    """A segment of an earlier generation with leases that were renewed here."""

    client_pid: int
    until_ns: int  #: CLOCK_MONOTONIC, of the last of them


@dataclass(slots=True)
class Harvest:
    """What was found."""

    leases: int = 0
    chunks: int = 0
    kept: dict[str, Kept] = field(default_factory=dict)  #: by the segment's name

    def prune(self, directory: Directory, now_ns: int) -> None:
        """Remove the segments whose leases have run out or whose client is gone, with what that one held. Costs 30 µs each."""
        for name, kept in list(self.kept.items()):
            there = os.path.exists(S.SHM_DIR + name)  # a client that ends in order removes it
            if there and now_ns < kept.until_ns and S.process_runs(kept.client_pid):
                continue
            del self.kept[name]
            directory.release_owner(_owner(name))
            _unlink(name)


def sweep(instance: str, directory: Directory, *, max_ttl_s: float = 3600.0, max_bytes: int = 1 << 30) -> Harvest:
    """Renew the live leases of every segment of ``instance``; unlink those without any.

    Clients could write to these segments: a lease lasts at most ``max_ttl_s`` from now, one over ``max_bytes`` is not read.
    What may not be opened or removed is logged and left: it cannot keep a sidecar from starting.
    """
    result = Harvest()
    for name, *_ in list(S.list_names(instance)):
        until = 0
        try:
            segment = S.open_readonly(name, owner=os.geteuid())
        except SegmentError as e:
            log.warning("stale segment %s: %s", name, e)
        else:
            with BUS_GUARD.guarding(segment):
                client = segment.info.client_pid
                if S.process_runs(client) and segment.shape.total_bytes <= max_bytes:
                    until = _renew(segment, directory, _owner(name), int(max_ttl_s * 1e9), result)
        if until:
            result.kept[name] = Kept(client, until)
        else:
            _unlink(name)
    return result


def _owner(name: str) -> tuple[str, str]:
    return "segment", name


def _unlink(name: str) -> None:
    try:
        S.unlink(name)
    except SegmentError as e:
        log.warning("%s", e)


def _renew(segment: S.Segment, directory: Directory, owner: tuple[str, str], max_ttl_ns: int, result: Harvest) -> int:
    """Returns when the last of the leases ends (CLOCK_MONOTONIC ns), 0 if there is none."""
    world = segment.words[L.WORD_WORLD]
    if not 0 < world <= 1 << 16:
        return 0
    until = 0
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
            until = max(until, lease.deadline_ns)
    return until
