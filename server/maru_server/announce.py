"""What a node publishes: slabs of its regions, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maru_server import protocol as P
from maru_server.lease import RegionLease
from maru_shm.layout import KEY_BYTES

BATCH = 4096  #: keys in one announcement: 128 KiB, so that a heartbeat behind it waits about 3 ms


class Slabs(NamedTuple):
    """Committed slabs of one region and one table. ``slabs``: shape (n,) uint32 index in the region; ``generations``: shape
    (n,) uint64; ``slab_bytes``: bytes from slab to slab in that region, for usage (0: not known).
    """

    namespace: bytes
    rank: int
    keys: bytes  #: n × 16
    slabs: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]
    slab_bytes: int = 0


#: Gives the committed slabs of a region as they are now; called on the link's thread after the directory was made anew.
SlabSource = Callable[[RegionLease], Iterable[Slabs]]


def places(region: RegionLease, s: Slabs) -> bytes:
    """Wire form of the places, under the region's current grant id."""
    out = np.zeros(len(s.slabs), P.PLACE)
    out["grant"], out["slab"], out["generation"] = region.grant, s.slabs, s.generations
    return out.tobytes()


def batches(s: Slabs) -> Iterator[Slabs]:
    """``s`` in pieces of at most :data:`BATCH` keys."""
    for i in range(0, len(s.slabs), BATCH):
        j = i + BATCH
        yield s._replace(keys=s.keys[i * KEY_BYTES : j * KEY_BYTES], slabs=s.slabs[i:j], generations=s.generations[i:j])


def announcements(regions: Iterable[RegionLease], source: SlabSource) -> Iterator[tuple[RegionLease, Slabs]]:
    """Everything the regions hold, in batches, read lazily."""
    for region in regions:
        for slabs in source(region):
            for batch in batches(slabs):
                yield region, batch
