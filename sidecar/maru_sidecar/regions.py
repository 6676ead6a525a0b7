"""Regions and slabs on the mapping: formatting, allocation, and the two-phase commit of one slab.

Nothing here knows keys or policies. :class:`RegionTable` is driven by ``directory.py`` under its lock, except for
:meth:`RegionTable.write_header`, which touches one slab that its writer owns alone.

A *slab* is named by the offset of its header from the pool's start (one int: the index keeps one per chunk and rank).
Slabs of one stride form a *size class*. Allocation takes the lowest region of the class that has room, so that the others
run empty; an empty region belongs to no class and may be formatted for another.

State words go through a ``memoryview.cast("Q")`` of the whole pool: one aligned ``mov``, where a numpy structured assignment
may copy by bytes and tear. Everything else in a header is written while the state says WRITING.
"""

from __future__ import annotations

import bisect
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from maru_shm import failpoints
from maru_shm import poolformat as F
from maru_shm.atomics import order_fence
from maru_shm.errors import PoolCorrupt, PoolError
from maru_sidecar.pool import PoolFile

_STATE_BITS = 8
_GENERATION_MASK = (1 << 56) - 1
#: Generations of a newly formatted region start at epoch << 24: above anything an earlier sidecar reached in under 16 million
#: reuses of one slab, even where a damaged header hides what it had reached.
_EPOCH_SHIFT = 24


class SlabHeader(NamedTuple):
    """What a slab says of itself, apart from its state. Keys are 16 bytes; ``created_ns`` is ns since the epoch."""

    namespace: bytes
    key: bytes
    parent: bytes
    rank: int
    world: int
    data_bytes: int
    checksum: int | None  #: xxh3-64 of the data, None if not taken
    tokens: int
    created_ns: int
    depth: int


@dataclass(slots=True)
class Region:
    """One region. ``stride`` 0: never formatted (or its header was damaged)."""

    index: int
    base: int  #: offset from the pool's start
    stride: int = 0
    n_slabs: int = 0
    data_offset: int = 0  #: from the region's base
    used: int = 0  #: slabs not free
    fresh: int = 0  #: slabs from here on have not been taken since the region was last empty
    freed: list[int] = field(default_factory=list)  #: slabs below ``fresh`` that are free
    #: who uses each slab: what :meth:`RegionTable.allocate` was given, later a chunk
    owners: list[object] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.n_slabs - self.used


@dataclass(slots=True)
class SizeClass:
    """All regions formatted for one stride that hold at least one used slab."""

    stride: int
    per_region: int  #: slabs a region of this class has
    regions: set[int] = field(default_factory=set)
    open: list[int] = field(default_factory=list)  #: sorted; those with room
    slabs: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class ScannedRegion:
    """What :meth:`RegionTable.scan` found in one region."""

    region: Region
    committed: list[tuple[int, SlabHeader]]  #: (slab, header), CRC good
    writing: int
    evicting: int
    corrupt: int  #: COMMITTED with a bad CRC, magic or size, or an unknown state


class RegionTable:
    """Every region of one pool, and who may take which slab."""

    def __init__(self, pool: PoolFile) -> None:
        self._pool = pool
        self._bytes = pool.bytes
        self._words = pool.words
        self.region_bytes = pool.region_bytes
        self._regions = [Region(i, i * pool.region_bytes) for i in range(pool.n_regions)]
        self._free = list(range(1, pool.n_regions))  #: sorted indices of empty regions
        self._classes: dict[int, SizeClass] = {}

    # --- looking -----------------------------------------------------------------------------------------------------
    @property
    def free_regions(self) -> int:
        return len(self._free)

    @property
    def n_regions(self) -> int:
        """Regions that can hold slabs."""
        return len(self._regions) - 1

    def largest_free_run(self) -> int:
        """Most neighbouring empty regions."""
        best = run = 0
        last = -1
        for index in self._free:
            run = run + 1 if index == last + 1 else 1
            best, last = max(best, run), index
        return best

    def classes(self) -> list[SizeClass]:
        return [c for c in self._classes.values() if c.regions]

    def size_class(self, stride: int) -> SizeClass:
        """The class of ``stride``. Raises :class:`PoolError` if no region can hold even one such slab."""
        found = self._classes.get(stride)
        if found is None:
            per_region, _ = F.region_plan(self.region_bytes, stride)
            if per_region == 0:
                raise PoolError(
                    f"a slab of {stride} bytes does not fit in a region of {self.region_bytes} bytes",
                    "recreate the pool with a larger region_size",
                )
            found = self._classes[stride] = SizeClass(stride, per_region)
        return found

    def capacity(self, size_class: SizeClass) -> int:
        """Slabs the class has, plus those it could have in empty regions."""
        return size_class.slabs + len(self._free) * size_class.per_region

    def region_of(self, slab: int) -> Region:
        return self._regions[slab // self.region_bytes]

    def data_offset(self, slab: int) -> int:
        """Where the slab's data starts, bytes from the pool's start."""
        region = self._regions[slab // self.region_bytes]
        return region.base + region.data_offset + _number(region, slab) * region.stride

    def slab_at(self, data_offset: int) -> int:
        """The slab whose data starts at ``data_offset``: the inverse of :meth:`data_offset`."""
        region = self._regions[data_offset // self.region_bytes]
        return _slab(region, (data_offset - region.base - region.data_offset) // region.stride)

    def state_word(self, slab: int) -> int:
        return self._words[slab >> 3]

    def set_owner(self, slab: int, owner: object) -> None:
        region = self.region_of(slab)
        region.owners[_number(region, slab)] = owner

    def read_header(self, slab: int) -> SlabHeader:
        return _decode(bytes(self._bytes[slab : slab + F.SLAB_HEADER_BYTES]))

    # --- allocation ---------------------------------------------------------------------------------------------------
    def allocate(self, stride: int, owner: object) -> int | None:
        """Take a free slab of the class, formatting an empty region if there is none; None if the pool has no room.

        Only this process knows it is taken until :meth:`begin_write`.
        """
        size_class = self.size_class(stride)
        if not size_class.open and not self._adopt_region(size_class):
            return None
        region = self._regions[size_class.open[0]]
        if region.freed:
            number = region.freed.pop()
        else:
            number = region.fresh
            region.fresh += 1
        region.used += 1
        size_class.used += 1
        region.owners[number] = owner
        if region.room == 0:
            del size_class.open[0]
        return _slab(region, number)

    def _adopt_region(self, size_class: SizeClass) -> bool:
        if not self._free:
            return False
        at = next((i for i, r in enumerate(self._free) if self._regions[r].stride == size_class.stride), 0)
        region = self._regions[self._free[at]]
        if region.stride != size_class.stride:
            self._format(region, size_class.stride)
        del self._free[at]
        region.fresh = region.used = 0
        region.freed = []
        region.owners = [None] * region.n_slabs
        self._join(size_class, region)
        return True

    def _join(self, size_class: SizeClass, region: Region) -> None:
        size_class.regions.add(region.index)
        size_class.slabs += region.n_slabs
        size_class.used += region.used
        if region.room:
            bisect.insort(size_class.open, region.index)

    def free(self, slab: int) -> None:
        """FREE in memory and here. The generation stays; it rises when the slab is taken again."""
        self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | F.SlabState.FREE
        region = self.region_of(slab)
        size_class = self._classes[region.stride]
        number = _number(region, slab)
        region.owners[number] = None
        region.freed.append(number)
        region.used -= 1
        size_class.used -= 1
        if region.room == 1:
            bisect.insort(size_class.open, region.index)
        if region.used == 0:
            size_class.open.remove(region.index)
            size_class.regions.remove(region.index)
            size_class.slabs -= region.n_slabs
            region.owners = []
            bisect.insort(self._free, region.index)

    def _format(self, region: Region, stride: int) -> None:
        """Lay an empty region out for another stride.

        Slab headers first, region header last. Killed in between, the old header still stands over slabs that are all
        FREE: headers lie at the same places in every format, and an empty region has no other contents.
        """
        failpoints.hit("region.before_format")
        n, data_offset = F.region_plan(self.region_bytes, stride)
        generation = self._pool.epoch << _EPOCH_SHIFT
        if region.n_slabs:
            generation = max(generation, int(self._headers(region)["state"].max()) >> _STATE_BITS)
        region.stride, region.n_slabs, region.data_offset = stride, n, data_offset
        headers = self._headers(region)
        start = region.base + F.HEADER_BYTES
        np.frombuffer(self._bytes, np.uint8, n * F.SLAB_HEADER_BYTES, start)[:] = 0
        headers["state"] = generation << _STATE_BITS | F.SlabState.FREE
        failpoints.hit("region.after_headers")
        order_fence()
        raw = F.with_crc(F.REGION_HEADER.pack(F.REGION_MAGIC, F.FORMAT, 0, stride, stride, n, data_offset))
        self._bytes[region.base : region.base + len(raw)] = raw

    def _headers(self, region: Region) -> npt.NDArray[Any]:
        return np.frombuffer(self._bytes, F.SLAB_HEADER, region.n_slabs, region.base + F.HEADER_BYTES)

    # --- the two-phase commit of one slab ---------------------------------------------------------------------------------
    def begin_write(self, slab: int) -> None:
        """WRITING under a new generation; after this the data may be written."""
        failpoints.hit("commit.before_writing")
        generation = (self._words[slab >> 3] >> _STATE_BITS) + 1 & _GENERATION_MASK
        self._words[slab >> 3] = generation << _STATE_BITS | F.SlabState.WRITING
        order_fence()  # SYNC POINT: a reader that sees new data also sees that the slab changed
        failpoints.hit("commit.after_writing")

    def write_header(self, slab: int, header: SlabHeader) -> None:
        """Everything but the state word; the slab stays WRITING."""
        failpoints.hit("commit.after_data")
        self._bytes[slab + 8 : slab + F.SLAB_HEADER_BYTES] = _encode(header)[8:]
        failpoints.hit("commit.before_state")

    def publish(self, slab: int) -> None:
        """COMMITTED, stored last."""
        order_fence()  # SYNC POINT: release
        self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | F.SlabState.COMMITTED
        failpoints.hit("commit.after_state")

    def begin_evict(self, slab: int) -> None:
        """EVICTING: no reader may start on it, and a restart frees it."""
        self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | F.SlabState.EVICTING
        failpoints.hit("evict.after_state")

    # --- after a restart ----------------------------------------------------------------------------------------------
    def scan(self, region: Region) -> ScannedRegion | None:
        """Read a region's headers as a dead sidecar left them, freeing in memory whatever is not a sound COMMITTED slab.

        None for a region never formatted. Raises :class:`PoolCorrupt` if its header is damaged: the slabs cannot be found then,
        and the region counts as never formatted. Call :meth:`adopt_scanned` with what is to be kept.
        """
        raw = bytes(self._bytes[region.base : region.base + F.REGION_HEADER.size + F.CRC.size])
        if not any(raw):
            return None
        self._read_region_header(region, raw)
        headers = self._headers(region)
        words = headers["state"].copy()
        states = words & 0xFF
        writing = states == F.SlabState.WRITING
        evicting = states == F.SlabState.EVICTING
        candidates = states == F.SlabState.COMMITTED
        sound = (
            candidates
            & (headers["magic"] == F.SLAB_MAGIC)
            & (headers["format"] == F.FORMAT)
            & (headers["data_bytes"] > 0)
            & (headers["data_bytes"] <= region.stride)
            & (headers["rank"] < headers["world"])
        )
        committed = []
        for number in np.flatnonzero(sound).tolist():
            slab = _slab(region, number)
            packed = bytes(self._bytes[slab : slab + F.SLAB_HEADER_BYTES])
            if int.from_bytes(packed[20:24], "little") == zlib.crc32(packed[F.SLAB_CRC_FROM : F.SLAB_CRC_TO]):
                committed.append((slab, _decode(packed)))
            else:
                sound[number] = False
        corrupt = ~sound & (candidates | (states > F.SlabState.EVICTING))
        for number in np.flatnonzero(writing | evicting | corrupt).tolist():
            slab = _slab(region, number)
            self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | F.SlabState.FREE
        return ScannedRegion(region, committed, int(writing.sum()), int(evicting.sum()), int(corrupt.sum()))

    def _read_region_header(self, region: Region, raw: bytes) -> None:
        magic, version, _, slab_bytes, stride, n, data_offset = F.REGION_HEADER.unpack_from(raw)
        good = (
            magic == F.REGION_MAGIC
            and version == F.FORMAT
            and F.crc_matches(raw, F.REGION_HEADER.size)
            and 0 < slab_bytes <= self.region_bytes
            and stride == F.slab_stride(slab_bytes)
            and n > 0
            and (n, data_offset) == F.region_plan(self.region_bytes, slab_bytes)
        )
        if not good:
            region.stride = region.n_slabs = region.data_offset = 0
            raise PoolCorrupt(f"region {region.index} has a damaged header", "its slabs are dropped; nothing to do")
        region.stride, region.n_slabs, region.data_offset = stride, n, data_offset

    def count_committed(self, region: Region) -> int:
        """How many slab headers of a region with a damaged header look COMMITTED: for the report only."""
        most = (self.region_bytes - F.HEADER_BYTES) // (F.SLAB_HEADER_BYTES + F.DATA_ALIGN)
        headers = np.frombuffer(self._bytes, F.SLAB_HEADER, most, region.base + F.HEADER_BYTES)
        return int(((headers["magic"] == F.SLAB_MAGIC) & (headers["state"] & 0xFF == F.SlabState.COMMITTED)).sum())

    def adopt_scanned(self, region: Region, kept: list[tuple[int, object]]) -> None:
        """Take a scanned region into its class with ``kept`` (slab, owner) in use; every other slab becomes free."""
        if not kept:
            return
        region.owners = [None] * region.n_slabs
        for slab, owner in kept:
            region.owners[_number(region, slab)] = owner
        region.used = len(kept)
        region.fresh = region.n_slabs
        region.freed = [i for i in range(region.n_slabs - 1, -1, -1) if region.owners[i] is None]
        self._free.remove(region.index)
        self._join(self.size_class(region.stride), region)

    def drop_scanned(self, slab: int) -> None:
        """Free, in memory, a slab that :meth:`scan` returned and the caller does not keep."""
        self._words[slab >> 3] = self._words[slab >> 3] & ~0xFF | F.SlabState.FREE

    def regions(self) -> list[Region]:
        """The regions that can hold slabs, in order."""
        return self._regions[1:]


def _slab(region: Region, number: int) -> int:
    return region.base + F.HEADER_BYTES + number * F.SLAB_HEADER_BYTES


def _number(region: Region, slab: int) -> int:
    return (slab - region.base - F.HEADER_BYTES) // F.SLAB_HEADER_BYTES


def _encode(h: SlabHeader) -> bytes:
    flags = 0 if h.checksum is None else F.FLAG_CHECKSUM
    record = np.zeros(1, F.SLAB_HEADER)
    record[0] = (
        0, F.SLAB_MAGIC, F.FORMAT, 0, h.namespace, h.key, h.parent, h.rank, h.world, h.data_bytes, h.checksum or 0, flags,
        h.tokens, h.created_ns, h.depth, b"", b"",
    )  # fmt: skip
    raw = bytearray(record.tobytes())
    struct.pack_into("<I", raw, 20, zlib.crc32(raw[F.SLAB_CRC_FROM : F.SLAB_CRC_TO]))
    return bytes(raw)


def _decode(packed: bytes) -> SlabHeader:
    r = np.frombuffer(packed, F.SLAB_HEADER, 1)[0]
    return SlabHeader(
        namespace=r["namespace"].tobytes(),
        key=r["key"].tobytes(),
        parent=r["parent"].tobytes(),
        rank=int(r["rank"]),
        world=int(r["world"]),
        data_bytes=int(r["data_bytes"]),
        checksum=int(r["checksum"]) if int(r["flags"]) & F.FLAG_CHECKSUM else None,
        tokens=int(r["tokens"]),
        created_ns=int(r["created_ns"]),
        depth=int(r["depth"]),
    )
