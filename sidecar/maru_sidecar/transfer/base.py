"""What a transfer engine must do. One conformance suite runs on every implementation.

A :class:`TransferEngine` moves whole chunks between the pool mapping and one worker's KV cache, imported once at attach as a
:class:`KvTarget`. Slabs are plane-major (``maru_shm.geometry``): for each plane the pieces of a chunk's blocks.

Rules
- ``submit`` returns at once or after a bounded host-side cost; the bytes are there when the :class:`Copy` is done.
- A ``SKIP_BLOCK`` id copies nothing for that block.
- Block ids were checked against the layout before; offsets come from the directory. An engine checks neither again.
- ``wait`` releases the GIL. It raises ``EngineGone`` if the peer died, else ``TransferError``; in both cases no
  byte of the engine's memory is touched after it has raised.
- In a shared pool a STORE comes with ``may_go_on``, which raises once a slab may not be written any more. It is called directly
  before each system call or submission that writes slabs; what it raises, ``submit`` or ``wait`` raises, and what has not
  begun by then never begins. What *has* begun cannot be taken back: it ends late if the process or the machine stops in it.
- Nothing is allocated, registered or created per copy that could be made once at attach.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from maru_shm.geometry import WHOLE, Direction, KvLayout, Share

#: Raises :class:`~maru_shm.errors.RegionNotHeld` once what is being written may be another's. About a microsecond.
MayGoOn = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Peer:
    """The process whose memory is the other end. The pidfd names it for good: pids are reused, pidfds are not.

    ``uid``: of its credentials when it connected.
    """

    pid: int
    pidfd: int
    uid: int = field(default_factory=os.geteuid)


@dataclass(frozen=True, slots=True)
class PoolMapping:
    """Where the pool lies in this process. ``address`` and ``size`` in bytes; offsets count from ``address``."""

    address: int
    size: int
    fd: int


class Copy(Protocol):
    """A copy in flight."""

    @property
    def nbytes(self) -> int: ...

    def done(self) -> bool:
        """Whether it has ended, well or not (non-blocking)."""
        ...

    def wait(self) -> None:
        """Block without the GIL until it has ended; raises what went wrong."""
        ...


class KvTarget(Protocol):
    """One worker's KV cache, imported."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def slice_hint(self) -> int:
        """Bytes a submission should hold at least, lest its overhead shows; 0 where any size is as good."""
        ...

    @property
    def parts(self) -> int:
        """Into how many parts a long span of chunks is best cut, each some planes of all its chunks; 1: into shorter spans."""
        ...

    def submit(
        self,
        direction: Direction,
        slab_offsets: npt.NDArray[np.uint64],
        blocks: npt.NDArray[np.int32],
        share: Share = WHOLE,
        may_go_on: MayGoOn | None = None,
    ) -> Copy:
        """Start copying ``n`` chunks. ``slab_offsets``: shape (n,), bytes from the pool's start. ``blocks``: shape
        (n, blocks per chunk), manager block ids or ``SKIP_BLOCK``. ``share``: of the planes; all shares together are the
        chunks. ``may_go_on``: of a STORE, see the module; None in a pool of one's own."""
        ...

    def checksum(self, blocks: npt.NDArray[np.int32]) -> int | None:
        """xxh3-64 of one chunk as it lies in the *engine's* memory now, in a slab's order: what no other writer of the pool can
        have touched. ``blocks``: shape (blocks per chunk,), none skipped. None where its bytes are not read by the CPU.

        Raises what ``wait`` does.
        """
        ...

    def close(self) -> None:
        """Forget the peer's memory; waits for copies in flight. Idempotent."""
        ...


class TransferEngine(Protocol):
    """One way of moving bytes. Made once per sidecar; owns nothing of a device until the first :meth:`attach`."""

    @property
    def name(self) -> str: ...

    def attach(self, layout: KvLayout, peer: Peer, fds: Sequence[int]) -> KvTarget:
        """Import a worker's KV cache. Raises :class:`~maru_shm.errors.AttachRefused` saying what is unreachable and why."""
        ...

    def close(self) -> None: ...
