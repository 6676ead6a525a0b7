"""Regions on the mapping: laid out for slabs of one stride, and read again after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from maru_shm import failpoints
from maru_shm import poolformat as F
from maru_shm.atomics import order_fence
from maru_shm.errors import PoolCorrupt
from maru_sidecar.pool import PoolFile
from maru_sidecar.sharing.rights import WriteRights
from maru_sidecar.slab_header import SlabHeader, decode, region_layout, slab_offset
from maru_sidecar.slab_states import STATE_BITS, SlabStates

#: Generations of a newly formatted region start at epoch << 24: above anything an earlier sidecar reached in under 16 million
#: reuses of one slab, even where a damaged header hides what it had reached.
_EPOCH_SHIFT = 24


@dataclass(slots=True)
class Region:
    """One region. ``stride`` 0: never formatted (or its header was damaged)."""

    index: int
    base: int  #: offset from the pool's start
    stride: int = 0
    n_slabs: int = 0
    data_offset: int = 0  #: from the region's base
    used: int = 0  #: slabs not free
    fresh: int = 0  #: slabs below this one have not been taken since the region was last empty
    freed: list[int] = field(default_factory=list)  #: slabs from ``fresh`` on that are free
    #: who uses each slab: what ``RegionTable.allocate`` was given, later a chunk
    owners: list[object] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.n_slabs - self.used

    def slab(self, number: int) -> int:
        """The slab of that index in the region."""
        return slab_offset(self.base, number)

    def number(self, slab: int) -> int:
        """Index of the slab in the region."""
        return (slab - self.base - F.HEADER_BYTES) // F.SLAB_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class ScannedRegion:
    """What :meth:`RegionFormat.scan` found in one region."""

    region: Region
    committed: list[tuple[int, SlabHeader]]  #: (slab, header), CRC good
    writing: int
    evicting: int
    corrupt: int  #: COMMITTED with a bad CRC, magic or size, or an unknown state


class RegionFormat:
    """Region headers and the slab headers behind them, of one pool. ``rights`` says which regions may be written now."""

    def __init__(self, pool: PoolFile, rights: WriteRights, slabs: SlabStates) -> None:
        self._pool = pool
        self._rights = rights
        self._slabs = slabs
        self._bytes = pool.bytes
        self._region_bytes = pool.region_bytes

    def lay_out(self, region: Region, stride: int) -> None:
        """Lay an empty region out for another stride.

        Slab headers first, region header last. Killed in between, the old header still stands over slabs that are all
        FREE: headers lie at the same places in every format, and an empty region has no other contents.

        Raises :class:`~maru_shm.errors.RegionNotHeld`; asked before each of the two, so that one who was stopped in between
        does not lay out what is another's. The region counts as never formatted then.
        """
        failpoints.hit("region.before_format")
        n, data_offset = F.region_plan(self._region_bytes, stride)
        generation = self._pool.epoch << _EPOCH_SHIFT
        if region.n_slabs:
            generation = max(generation, int(self._headers(region)["state"].max()) >> STATE_BITS)
        headers = np.zeros(n, F.SLAB_HEADER)
        headers["state"] = generation << STATE_BITS | F.SlabState.FREE
        self._rights.check(region.index)
        region.stride, region.n_slabs, region.data_offset = 0, n, data_offset
        self._headers(region)[:] = headers
        failpoints.hit("region.after_headers")
        order_fence()
        self._rights.check(region.index)
        region.stride = stride
        self._write_header(region)

    def mend(self, region: Region) -> None:
        """Store a region's header again if it was damaged: sound slabs in it, and later ones, are readable then."""
        layout = region_layout(self._read(region), self._region_bytes)
        if layout != (region.stride, region.n_slabs, region.data_offset) and self._rights.may_write(region.index):
            self._write_header(region)

    def forget(self, region: Region) -> None:
        """Of a region just granted: nothing of what lies in it counts, but the generations that were reached."""
        raw = self._read(region)
        _, region.n_slabs, region.data_offset = region_layout(raw, self._region_bytes) or (0, 0, 0)
        region.stride = 0  # formatted before its first slab; n_slabs says which generations are there to be exceeded
        self._rights.check(region.index)
        self._bytes[region.base : region.base + len(raw)] = bytes(len(raw))

    # --- after a restart ----------------------------------------------------------------------------------------------
    def scan(self, region: Region) -> ScannedRegion | None:
        """Read a region's headers as a dead sidecar left them, freeing in memory whatever is not a sound COMMITTED slab.

        None for a region never formatted. Raises :class:`PoolCorrupt` if its header is damaged: the slabs cannot be found then,
        and the region counts as never formatted. What is to be kept goes to ``RegionTable.adopt_scanned``.
        """
        raw = self._read(region)
        if not any(raw):
            return None
        self._take_layout(region, raw)
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
            slab = region.slab(number)
            packed = bytes(self._bytes[slab : slab + F.SLAB_HEADER_BYTES])
            if F.slab_crc_matches(packed):
                committed.append((slab, decode(packed)))
            else:
                sound[number] = False
        corrupt = ~sound & (candidates | (states > F.SlabState.EVICTING))
        for number in np.flatnonzero(writing | evicting | corrupt).tolist():
            self._slabs.mark(region.slab(number), F.SlabState.FREE)
        return ScannedRegion(region, committed, int(writing.sum()), int(evicting.sum()), int(corrupt.sum()))

    def count_committed(self, region: Region) -> int:
        """How many slab headers of a region with a damaged header look COMMITTED: for the report only."""
        most = (self._region_bytes - F.HEADER_BYTES) // (F.SLAB_HEADER_BYTES + F.DATA_ALIGN)
        headers = np.frombuffer(self._bytes, F.SLAB_HEADER, most, region.base + F.HEADER_BYTES)
        return int(((headers["magic"] == F.SLAB_MAGIC) & (headers["state"] & 0xFF == F.SlabState.COMMITTED)).sum())

    # --- steps ------------------------------------------------------------------------------------------------------
    def _read(self, region: Region) -> bytes:
        """A region header with its CRC, packed."""
        return bytes(self._bytes[region.base : region.base + F.REGION_HEADER.size + F.CRC.size])

    def _write_header(self, region: Region) -> None:
        raw = F.with_crc(
            F.REGION_HEADER.pack(F.REGION_MAGIC, F.FORMAT, 0, region.stride, region.stride, region.n_slabs, region.data_offset)
        )
        self._bytes[region.base : region.base + len(raw)] = raw

    def _take_layout(self, region: Region, raw: bytes) -> None:
        found = region_layout(raw, self._region_bytes)
        region.stride, region.n_slabs, region.data_offset = found or (0, 0, 0)
        if found is None:
            raise PoolCorrupt(f"region {region.index} has a damaged header", "its slabs are dropped; nothing to do")

    def _headers(self, region: Region) -> npt.NDArray[Any]:
        return np.frombuffer(self._bytes, F.SLAB_HEADER, region.n_slabs, region.base + F.HEADER_BYTES)
