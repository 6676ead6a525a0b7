"""The error tree. Every error names the thing, the offending value and the remedy.

``MaruError`` is the only base. A subclass says *whose* fault it is: the caller's configuration, this platform, the
bytes in a shared segment, the peer on the other side of a ring or socket, the pool, or a transfer.
"""

from __future__ import annotations


class MaruError(Exception):
    """Base of every error this project raises.

    ``what`` names the thing and the value; ``remedy`` says what to do about it (empty only where nothing can be done).
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class ConfigError(MaruError):
    """A flag, environment variable or configuration file is wrong (the caller's side)."""


class PlatformUnsupported(MaruError):
    """This machine cannot give the memory ordering or kernel feature that correctness needs."""


class SegmentError(MaruError):
    """A shared-memory segment cannot be used."""


class SegmentNotReady(SegmentError):
    """The segment's magic is not there (yet): its creator is still filling it, or it is not ours."""


class SegmentVersionMismatch(SegmentError):
    """The segment was written by an incompatible version."""


class SegmentCorrupt(SegmentError):
    """The segment's static header contradicts itself, its checksum or its size."""


class RingFull(MaruError):
    """The submission ring or the record table has no free slot. Raised at once; the caller treats it as a miss."""


class ProtocolViolation(MaruError):
    """The peer sent something no correct peer sends (Broken: *their* side). Its session is detached."""


class ProtocolVersionMismatch(MaruError):
    """No common protocol version with the peer."""


class SidecarUnavailable(MaruError):
    """No sidecar answers on the control socket, or it went away (Closed)."""


class SocketBusy(MaruError):
    """Another sidecar serves this control socket."""


class AttachRefused(MaruError):
    """The sidecar answered an attach with a refusal; the engine runs without cache."""


class PoolError(MaruError):
    """The pool file or device cannot be used as asked."""


class PoolVersionMismatch(PoolError):
    """The pool was formatted by an incompatible version."""


class PoolCorrupt(PoolError):
    """A pool or region header contradicts its checksum or its size."""


class PoolBusy(PoolError):
    """Another sidecar holds this pool."""


class PoolTooLarge(PoolError):
    """The pool does not fit on its filesystem or device."""


class PoolFull(PoolError):
    """No slab is free and nothing may be evicted."""


class RegionNotHeld(PoolFull):
    """A region of a shared pool may not be written (any more): it was not granted, or its lease is over."""


class TransferError(MaruError):
    """Bytes could not be moved between the pool and an engine's KV cache."""


class EngineGone(TransferError):
    """The engine whose KV cache was the other end of a transfer has died."""
