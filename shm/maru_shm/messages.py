"""The control socket's messages: AF_UNIX SOCK_SEQPACKET, one msgpack message per packet, file descriptors beside it.

A client says Hello first; the sidecar answers Welcome or Refused. Everything after is request → reply in order. The open
socket is the lease on the session: the kernel closes it when either side dies, and the other cleans up.

Peers are authorised by ``SO_PEERCRED``, not by anything in a message. Nothing here is executed, evaluated or unpickled; unknown
fields are ignored, unknown types refused, lengths bounded by ``MAX_MESSAGE``.
"""

from __future__ import annotations

import enum

import msgspec

from maru_shm.geometry import KvLayout
from maru_shm.layout import Role

PROTOCOL = 1  #: highest version this program speaks
PROTOCOL_MIN = 1
MAX_MESSAGE = 200_000  #: bytes; a default socket buffer of 212,992 takes it whole


class RefusalCode(enum.StrEnum):
    VERSION = "version"  #: no common protocol version
    NOT_AUTHORISED = "not_authorised"
    BAD_MESSAGE = "bad_message"
    BAD_GEOMETRY = "bad_geometry"  #: layout out of bounds or larger than a pool region
    UNREACHABLE_MEMORY = "unreachable_memory"  #: the engine's memory cannot be imported
    UNSUPPORTED_LAYOUT = "unsupported_layout"
    CONFLICT = "conflict"  #: same engine id and rank already attached, or geometry differs between ranks
    LIMIT = "limit"
    DRAINING = "draining"
    FAILED = "failed"  #: an operation that was understood could not be done


# --- client → sidecar -----------------------------------------------------------------------------------------------------
class Hello(msgspec.Struct, tag="hello"):
    protocol_min: int
    protocol_max: int
    client: str  #: name/version, for logs


class Attach(msgspec.Struct, tag="attach"):
    """Open a hot-path segment. A worker brings its KV layout; CUDA_VMM file descriptors travel beside the message."""

    role: Role
    engine_id: str  #: the same in all halves of one engine
    rank: int
    world_size: int
    root: bytes  #: keys.model_root, 16 bytes
    chunk_tokens: int
    max_records: int
    max_keys: int  #: per request
    max_blocks: int  #: per request
    layout: KvLayout | None = None
    label: str = ""  #: e.g. the model's name; metrics and status


class Detach(msgspec.Struct, tag="detach"):
    """An orderly end: the sidecar fences this session's copies, then answers Done."""


class Ping(msgspec.Struct, tag="ping"):
    pass


class GetStatus(msgspec.Struct, tag="get_status"):
    pass


class CacheClear(msgspec.Struct, tag="cache_clear"):
    """Drop every chunk that is not leased or in flight; of one namespace (hex), or all."""

    namespace: str = ""
    engine_id: str = ""  #: or: of the namespace this engine uses


class CacheList(msgspec.Struct, tag="cache_list"):
    """A page of the directory, ordered by key."""

    namespace: str = ""
    after: str = ""  #: last key of the page before, followed by its namespace (hex); or a key alone
    limit: int = 500


class Pin(msgspec.Struct, tag="pin"):
    """Exclude chunks from eviction (or end that); stops at the first key that is absent. Counted; kept in the pool."""

    namespace: str
    keys: list[str]
    pinned: bool = True


class Drain(msgspec.Struct, tag="drain"):
    """Refuse new work and finish what is in flight; the process goes on until it is told to stop."""


# --- sidecar → client -----------------------------------------------------------------------------------------------------
class Welcome(msgspec.Struct, tag="welcome"):
    protocol: int
    server: str  #: name/version
    pid: int
    generation: int
    instance: str


class Attached(msgspec.Struct, tag="attached"):
    """Beside it: [segment fd, doorbell eventfd, pool fd (read-only use; LOCATE's offsets count from its start)]."""

    session: int
    segment: str
    namespace: str  #: hex, empty for a scheduler whose workers are not there yet
    pool_bytes: int
    transfer: str  #: "cpu", "cuda" or "" for a scheduler


class Refused(msgspec.Struct, tag="refused"):
    code: RefusalCode
    what: str
    remedy: str = ""


class Pong(msgspec.Struct, tag="pong"):
    state: str  #: SidecarState's name


class Done(msgspec.Struct, tag="done"):
    n: int = 0  #: chunks affected
    #: CacheClear: chunks that stay, pinned, leased, in flight, or ahead of one that is. Pin that ends: chunks of ``n`` that had
    #: no pin to end
    left: int = 0


class Status(msgspec.Struct, tag="status"):
    """Sections of plain values, as `maru-sidecar status --format json` prints them."""

    sections: dict[str, object]


class ChunkInfo(msgspec.Struct, frozen=True):
    namespace: str
    key: str
    ranks: int  #: ranks present
    world: int
    bytes: int
    tokens: int
    leases: int
    pinned: bool
    age_s: float  #: since last use


class CachePage(msgspec.Struct, tag="cache_page"):
    chunks: list[ChunkInfo]
    more: bool


ClientMessage = Hello | Attach | Detach | Ping | GetStatus | CacheClear | CacheList | Pin | Drain
SidecarMessage = Welcome | Attached | Refused | Pong | Done | Status | CachePage
