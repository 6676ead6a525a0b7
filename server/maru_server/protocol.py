"""The metadata server's wire: ROUTER/DEALER, two frames per message, both bounded.

::

    frame 1   header   24 B   magic "MARU" | protocol u16 | reserved u16 | request id u64 | epoch u64   (little-endian)
    frame 2   body            one msgpack map, tagged with the verb

A client says Hello first; the server answers Welcome or Error. Everything after is request → reply, matched by request id, so
requests may be pipelined. An Error names the code, the thing and the remedy; a message that cannot be decoded gets one too.

*Epoch*: names one life of the directory's contents. Requests carry the epoch the client knows, replies the current one. Under
another epoch grant ids mean nothing, so such a request is refused with WRONG_EPOCH and the client announces itself again.
Hello and Ping carry 0.

*Batches*: keys travel as n × 16 raw bytes, places as n × 16 raw bytes (:data:`PLACE`), codes as n bytes: 256 keys decode in
4 µs, a msgpack list of them in 25.

*Table*: a chunk of an engine with W ranks is W slabs. ``(namespace, rank)`` names the table a slab's key is in.
"""

from __future__ import annotations

import enum
import struct

import msgspec
import numpy as np

from maru_shm.layout import KEY_BYTES

PROTOCOL = 1  #: highest version this program speaks
PROTOCOL_MIN = 1
MAGIC = b"MARU"
HEADER = struct.Struct("<4sHHQQ")

MAX_BATCH = 8192  #: keys in a message
MAX_MESSAGE = 1 << 20  #: bytes of body; a longer one is refused by name
MAX_FRAME = 8 << 20  #: bytes; libzmq drops the connection of a peer that sends more
MAX_NAME = 128  #: characters of a node name, label or op id
MAX_RANKS = 4096
MAX_REGIONS = 1 << 20  #: per device
MAX_GRANTS_PER_CALL = 4096
MAX_PAGE = 10_000
UUID_BYTES = 16
TOKEN_MAX = 1 << 63  #: fencing tokens start at 0
GRANT_MAX = (1 << 32) - 1  #: PLACE carries them as a u32; 0 is nowhere
LEASE_MS = (100, 3_600_000)  #: shortest and longest lease: a dead node keeps its regions from others for that long
HEARTBEAT_MS_MIN = 10

#: Where a chunk lies: grant id (0: nowhere), slab index in the region, the slab's generation (upper 56 bits of its state word).
PLACE = np.dtype([("grant", "<u4"), ("slab", "<u4"), ("generation", "<u8")])
PLACE_BYTES = PLACE.itemsize
PLACE_STRUCT = struct.Struct("<IIQ")
NOWHERE = bytes(PLACE_BYTES)


class ErrorCode(enum.StrEnum):
    VERSION = "version"  #: no common protocol version
    NO_SESSION = "no_session"  #: Hello has to come first (again, after a restart)
    WRONG_EPOCH = "wrong_epoch"  #: the directory was made anew since; announce again
    BAD_MESSAGE = "bad_message"  #: not decodable, or a field out of bounds
    TOO_LARGE = "too_large"
    NODE_DEAD = "node_dead"  #: this incarnation's lease ended; join with a new incarnation
    STALE_INCARNATION = "stale_incarnation"  #: a newer incarnation of this node has joined
    NOT_A_NODE = "not_a_node"  #: this verb needs a session that joined as a node
    NO_SPACE = "no_space"  #: no free region
    HOLDING = "holding"  #: leases of the epoch before may still run: nothing is granted yet
    UNKNOWN_DEVICE = "unknown_device"
    DEVICE_MISMATCH = "device_mismatch"  #: same UUID, other shape
    LIMIT = "limit"
    BACKEND = "backend"  #: the store behind the server does not answer
    INTERNAL = "internal"


class Outcome(enum.IntEnum):
    """Per-key result of Register and Delete (one byte each)."""

    REGISTERED = 1  #: it is yours (also when it was, at the same place)
    EXISTS = 2  #: another slab was first; its place is in the reply
    NOT_OWNER = 3  #: the place named is not in a region granted to this node; the entry is another node's
    FULL = 4  #: the directory's key limit is reached
    DELETED = 5
    ABSENT = 6
    PINNED = 7  #: a reader holds it


class Mode(enum.StrEnum):
    ALL = "all"  #: every key's place, NOWHERE where absent
    LEADING = "leading"  #: cut at the first absent key


class GrantState(enum.StrEnum):
    """Life of a region grant. A region without a grant is free. See ``cluster.py``."""

    GRANTED = "granted"  #: owner may write while its node lease runs
    PROVISIONAL = "provisional"  #: claimed after a server restart; an older claim may yet be displaced by a newer one
    ORPHANED = "orphaned"  #: owner's lease ended: readable, adoptable by the same node, not writable
    DRAINING = "draining"  #: given back or reaped: no longer found; reused when no reader can be left


class MemberState(enum.StrEnum):
    ALIVE = "alive"
    SUPERSEDED = "superseded"  #: a newer incarnation joined; its write lease may still be running


class Predecessor(enum.StrEnum):
    """What a joining node knows of its earlier incarnation."""

    UNKNOWN = "unknown"  #: it may still be running: its lease is waited out
    ENDED = "ended"  #: it is dead for certain (this process holds the pool's lock): its regions may be claimed at once


# --- values -----------------------------------------------------------------------------------------------------------------
class Region(msgspec.Struct, frozen=True, array_like=True):
    """One region under one token. ``token`` is the fencing token: it rises with every grant in the cluster, for ever."""

    device: bytes  #: UUID, 16 bytes
    index: int
    token: int


class GrantInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a grant id stands for, within one epoch."""

    id: int
    device: bytes
    region: int
    node: str
    token: int
    state: GrantState
    slab_bytes: int = 0


class ClaimVerdict(enum.StrEnum):
    GRANTED = "granted"
    PROVISIONAL = "provisional"  #: readable and announceable; writable only by a holder whose lease never broke; claim again
    WAIT = "wait"  #: the incarnation before may still be writing; claim again
    LOST = "lost"  #: the region is someone else's now; forget its slabs


class ClaimResult(msgspec.Struct, frozen=True, array_like=True):
    verdict: ClaimVerdict
    grant: GrantInfo | None = None


class NodeInfo(msgspec.Struct, frozen=True):
    node: str
    incarnation: int
    state: MemberState
    label: str
    regions: int
    keys: int
    silent_ms: int  #: since its last heartbeat was seen by this server process


class RegionInfo(msgspec.Struct, frozen=True):
    device: str  #: hex
    region: int
    state: str  #: GrantState's value
    node: str
    incarnation: int
    token: int
    keys: int
    bytes: int


class UsageRow(msgspec.Struct, frozen=True):
    """One line of usage. ``kind``: node, device or namespace."""

    kind: str
    name: str
    regions: int
    keys: int
    bytes: int  #: keys × slab bytes; 0 for a namespace
    capacity_bytes: int  #: 0 where it has none


# --- client → server --------------------------------------------------------------------------------------------------------
class Hello(msgspec.Struct, tag="hello"):
    """Open a session. With ``node`` it joins as a node; without, it observes and administers."""

    protocol_min: int
    protocol_max: int
    client: str  #: name/version, for logs
    node: str = ""
    incarnation: int = 0  #: rises with every start of the node
    predecessor: Predecessor = Predecessor.UNKNOWN
    label: str = ""  #: free text, e.g. the host's name


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Renews the node's write lease, counted from the moment the client *sent* this."""


class Leave(msgspec.Struct, tag="leave"):
    """An orderly end: this node writes no more. Its regions stay readable and can be claimed by its successor at once."""


class AddDevice(msgspec.Struct, tag="add_device"):
    """Make a shared device known. Idempotent; a different shape under the same UUID is refused."""

    device: bytes
    n_regions: int
    region_bytes: int
    first: int = 0  #: index of the first region that may be granted (0 may hold the pool header)
    label: str = ""


class AllocRegions(msgspec.Struct, tag="alloc_regions"):
    """Grant ``count`` free regions, all or none, filling devices in the order they were added. ``op`` makes it idempotent."""

    op: str
    count: int = 1
    device: bytes = b""  #: empty: any
    slab_bytes: int = 0  #: bytes per slab, for usage; 0: not known yet


class FreeRegions(msgspec.Struct, tag="free_regions"):
    """Give regions back. The token makes it idempotent: a region granted anew is not touched by an old message."""

    regions: list[Region]


class ClaimRegions(msgspec.Struct, tag="claim_regions"):
    """Say which regions this node holds from before (own restart or the server's)."""

    regions: list[Region]
    slab_bytes: int = 0


class Register(msgspec.Struct, tag="register"):
    """Publish committed slabs; the first writer of a key wins.

    ``slab_bytes``: of the regions named in ``places``, for usage. A region is granted before it is known what its slabs will
    be, and may be laid out anew, so what is published last counts; 0 says nothing.
    """

    namespace: bytes
    rank: int
    keys: bytes
    places: bytes
    slab_bytes: int = 0


class Lookup(msgspec.Struct, tag="lookup"):
    namespace: bytes
    rank: int
    keys: bytes
    mode: Mode = Mode.ALL


class Leading(msgspec.Struct, tag="leading"):
    """How many leading keys are present on all of ranks 0 … world-1."""

    namespace: bytes
    world: int
    keys: bytes


class Exists(msgspec.Struct, tag="exists"):
    namespace: bytes
    rank: int
    keys: bytes


class Pin(msgspec.Struct, tag="pin"):
    """Keep the leading present keys from being deleted or their regions reused, for ``ttl_ms`` at most.

    A server grants no more than its maximum; the reply's ``pin_ms`` says what it granted.
    """

    namespace: bytes
    rank: int
    keys: bytes
    ttl_ms: int


class Unpin(msgspec.Struct, tag="unpin"):
    """End a pin of this node's; any other is left as it is (0 keys)."""

    pin: int


class Delete(msgspec.Struct, tag="delete"):
    """Withdraw keys. A node withdraws its own only. Pinned keys stay."""

    namespace: bytes
    rank: int
    keys: bytes


class ListTables(msgspec.Struct, tag="list_tables"):
    pass


class ListKeys(msgspec.Struct, tag="list_keys"):
    """A page of one table, in key order."""

    namespace: bytes
    rank: int
    after: bytes = b""  #: last key of the page before
    limit: int = 500


class GetStats(msgspec.Struct, tag="get_stats"):
    pass


class GetUsage(msgspec.Struct, tag="get_usage"):
    pass


class GetNodes(msgspec.Struct, tag="get_nodes"):
    pass


class GetRegions(msgspec.Struct, tag="get_regions"):
    pass


class Reset(msgspec.Struct, tag="reset"):
    """Forget every key that is not pinned, of one namespace or (empty) of all. Nodes and regions stay."""

    namespace: bytes = b""


class Ping(msgspec.Struct, tag="ping"):
    """Needs no session."""


# --- server → client --------------------------------------------------------------------------------------------------------
class Welcome(msgspec.Struct, tag="welcome"):
    protocol: int
    server: str  #: name/version
    instance: str  #: this server process
    backend: str
    lease_ms: int
    heartbeat_ms: int
    max_batch: int


class Error(msgspec.Struct, tag="error"):
    code: ErrorCode
    what: str
    remedy: str = ""
    retry_ms: int = 0


class Ok(msgspec.Struct, tag="ok"):
    n: int = 0


class Granted(msgspec.Struct, tag="granted"):
    grants: list[GrantInfo]


class Claimed(msgspec.Struct, tag="claimed"):
    results: list[ClaimResult]  #: in the order asked


class Outcomes(msgspec.Struct, tag="outcomes"):
    """``places``: n × 16 bytes, the winner's place where the outcome is EXISTS, else NOWHERE (empty if there is none)."""

    codes: bytes
    places: bytes = b""
    grants: list[GrantInfo] = []


class Places(msgspec.Struct, tag="places"):
    """``places``: n × 16 bytes; ``grants`` explains every grant id in them. ``pin`` is set by Pin (0: nothing pinned).

    ``pin_ms``: for how long, counted from when the Pin was sent. 0: as long as asked; so says a server of before there was
    this field, which refuses a longer time than its own.
    """

    places: bytes
    grants: list[GrantInfo]
    pin: int = 0
    pin_ms: int = 0


class Present(msgspec.Struct, tag="present"):
    flags: bytes  #: n × 0 or 1


class Tables(msgspec.Struct, tag="tables"):
    tables: list[tuple[bytes, int, int]]  #: namespace, rank, keys


class KeyPage(msgspec.Struct, tag="key_page"):
    keys: bytes
    places: bytes
    grants: list[GrantInfo]
    more: bool


class Stats(msgspec.Struct, tag="stats"):
    values: dict[str, int | float | str]


class Usage(msgspec.Struct, tag="usage"):
    rows: list[UsageRow]


class Nodes(msgspec.Struct, tag="nodes"):
    nodes: list[NodeInfo]


class Regions(msgspec.Struct, tag="regions"):
    regions: list[RegionInfo]


Request = (
    Hello | Heartbeat | Leave | AddDevice | AllocRegions | FreeRegions | ClaimRegions | Register | Lookup | Leading | Exists
    | Pin | Unpin | Delete | ListTables | ListKeys | GetStats | GetUsage | GetNodes | GetRegions | Reset | Ping
)  # fmt: skip
Reply = (
    Welcome | Error | Ok | Granted | Claimed | Outcomes | Places | Present | Tables | KeyPage | Stats | Usage | Nodes | Regions
)

encoder = msgspec.msgpack.Encoder()
to_server: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
to_client: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

_key_structs: dict[int, struct.Struct] = {}


def split_keys(raw: bytes) -> tuple[bytes, ...]:
    """n × 16 bytes → n keys (3.8 µs for 256; slicing takes 21)."""
    n = len(raw) // KEY_BYTES
    unpacker = _key_structs.get(n)
    if unpacker is None:
        unpacker = _key_structs[n] = struct.Struct(f"{KEY_BYTES}s" * n)  # at most MAX_BATCH of them
    return unpacker.unpack(raw)
