"""What a cluster's state consists of, and how long a fact has been true: the values that ``cluster.py`` works on."""

from __future__ import annotations

import time

import msgspec

from maru_server.protocol import GrantInfo, GrantState, MemberState

OPS_REMEMBERED = 16  #: idempotency window of a member; a client has one allocation in flight
#: Shortest ``--max-pin-ms``. A scheduler builds on no lease with less than 2 s left, and a lookup waits 1 s at most for the
#: server: of a shorter pin nothing may be left.
PIN_FLOOR_MS = 3_000
READABLE = (GrantState.GRANTED, GrantState.PROVISIONAL, GrantState.ORPHANED)
_TOKENS_PER_MS = 1 << 20  # epochs are ms since 1970, so tokens of a later epoch are larger
EPOCH_END = (1 << 63) // _TOKENS_PER_MS  #: in the year 2248 tokens would leave 63 bits


class Settings(msgspec.Struct, frozen=True):
    """Times in ms. ``lease_ms`` + ``grace_ms`` is how long a silent node keeps its regions from others."""

    lease_ms: int = 10_000
    grace_ms: int = 2_000
    heartbeat_ms: int = 2_000
    reap_ms: int = 600_000  #: a dead node's chunks stay readable this long
    max_pin_ms: int = 60_000  #: longest pin; one asked for longer lasts this long
    max_keys: int = 200_000_000
    #: One member's. 32 lookups of 8192 keys under way on 4 ranks, or 256 requests of 128 Ki tokens (512 chunks) on 8 that wait
    #: for their loads; 75 MiB of memory.
    max_pinned_keys: int = 1 << 20
    max_members: int = 10_000
    max_devices: int = 1024
    max_tables: int = 16_384

    @property
    def silence_ms(self) -> int:
        return self.lease_ms + self.grace_ms


class Member(msgspec.Struct):
    node: str
    incarnation: int
    label: str
    state: MemberState = MemberState.ALIVE
    ops: dict[str, list[int]] = {}  #: op id → grant ids it got


class Device(msgspec.Struct):
    n_regions: int
    region_bytes: int
    first: int
    label: str


class Grant(msgspec.Struct):
    id: int
    device: bytes
    region: int
    node: str
    incarnation: int
    token: int
    state: GrantState
    slab_bytes: int

    def info(self) -> GrantInfo:
        return GrantInfo(self.id, self.device, self.region, self.node, self.token, self.state, self.slab_bytes)


class ClusterState(msgspec.Struct):
    """What is stored. ``unswept``: ended grants whose keys may still be in the directory's tables."""

    epoch: int
    hold: bool
    next_token: int
    next_grant: int = 1
    members: dict[str, Member] = {}
    devices: dict[bytes, Device] = {}
    grants: dict[int, Grant] = {}
    last_incarnation: dict[str, int] = {}
    last_token: dict[str, int] = {}
    unswept: list[int] = []

    @staticmethod
    def new(after_epoch: int = 0) -> ClusterState:
        """The state of a new epoch, larger than ``after_epoch`` even if the wall clock went back."""
        epoch = max(time.time_ns() // 1_000_000, after_epoch + 1)
        return ClusterState(epoch=epoch, hold=True, next_token=epoch * _TOKENS_PER_MS)


class Due(msgspec.Struct):
    """What time has made due; applied by :meth:`~maru_server.cluster.Cluster.apply`."""

    dead: dict[str, int] = {}  #: member → the heartbeat count it stopped at
    reap: list[int] = []
    drained: list[int] = []
    hold_over: bool = False

    def __bool__(self) -> bool:
        return bool(self.dead or self.reap or self.drained or self.hold_over)


class Observer:
    """How long this process has seen each fact unchanged."""

    def __init__(self) -> None:
        self._seen: dict[object, tuple[object, int]] = {}

    def unchanged_ms(self, fact: object, value: object, now_ns: int) -> int:
        seen = self._seen.get(fact)
        if seen is None or seen[0] != value:
            self._seen[fact] = (value, now_ns)
            return 0
        return (now_ns - seen[1]) // 1_000_000

    def keep(self, facts: set[object]) -> None:
        """Forget every other fact."""
        for gone in self._seen.keys() - facts:
            del self._seen[gone]
