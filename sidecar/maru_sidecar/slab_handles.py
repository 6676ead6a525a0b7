"""What the directory hands out, slabs to read and slabs to write, and what it tells those who share its pool."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

from maru_shm.errors import PoolError
from maru_sidecar.chunk_index import Chunk, Namespace
from maru_sidecar.slab_header import SlabHeader


class Presence(enum.Enum):
    """Why :meth:`~maru_sidecar.directory.Directory.reserve` gave no slab; in each case the caller stores nothing."""

    PRESENT = "present"  #: this rank's slab is committed
    PENDING = "pending"  #: somebody is writing it now, or room for it is on its way: ask again
    DECLINED = "declined"  #: the admission policy does not want it


class SlabRef(NamedTuple):
    """A slab's data offset (bytes from the pool's start), its state word when it was looked up, its header's offset.

    ``checksummed``: a checksum was stored with it, so a header without one is not its.
    """

    offset: int
    state_word: int
    header: int = 0
    checksummed: bool = False


class PoolEvents(Protocol):
    """Who shares the pool hears of changes. Called under the directory's lock: note it and return."""

    def committed(self, namespace: bytes, key: bytes, rank: int, *, region: int, number: int, generation: int) -> None: ...

    def removed(self, namespace: bytes, key: bytes, ranks: list[int]) -> None:
        """The chunk's slabs are about to be reused."""
        ...

    def low(self, stride: int) -> None:
        """The last empty region is in use; ``stride`` bytes were asked for."""
        ...

    def growing(self) -> bool:
        """Whether another region may be here in a moment: waiting for it is better than evicting."""
        ...


class Acquired:
    """Slabs pinned for a copy: ``refs[i]`` belongs to key ``i``; leading keys only. Also a context manager."""

    __slots__ = ("_chunks", "_unpin", "refs")

    def __init__(self, chunks: list[Chunk], refs: list[SlabRef], unpin: Callable[[list[Chunk]], None]) -> None:
        self._chunks = chunks
        self._unpin = unpin
        self.refs = refs

    @property
    def n_found(self) -> int:
        return len(self.refs)

    def release(self) -> None:
        """Unpin (idempotent). No copy may touch the slabs afterwards."""
        chunks, self._chunks = self._chunks, []
        self._unpin(chunks)

    def __enter__(self) -> Acquired:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation:
    """A slab in WRITING state that one writer owns. End it once, by :meth:`commit` or :meth:`abort`."""

    __slots__ = ("_commit", "_ended", "_give_back", "header", "namespace", "needed", "offset", "slab")

    def __init__(
        self,
        namespace: Namespace,
        header: SlabHeader,
        needed: list[Chunk],
        slab: int,
        offset: int,
        *,
        commit: Callable[[Reservation, int | None], None],
        give_back: Callable[[Reservation], None],
    ) -> None:
        self.namespace = namespace
        self.header = header
        self.needed = needed  #: chunks pinned until the end
        self.slab = slab
        self.offset = offset  #: of the data, bytes from the pool's start
        self._commit = commit
        self._give_back = give_back
        self._ended = False

    def commit(self, checksum: int | None) -> None:
        """The data is there: publish it. ``checksum``: xxh3-64 of the data, None if not taken.

        Whatever this raises, the slab has been given back.
        """
        self._end()
        self._commit(self, checksum)

    def abort(self) -> None:
        """Give the slab back (no effect once ended). No copy may write to it afterwards."""
        if not self._ended:
            self._end()
            self._give_back(self)

    def _end(self) -> None:
        if self._ended:
            raise PoolError("this reservation has ended", "commit or abort it once")
        self._ended = True
