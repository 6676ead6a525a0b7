"""Outlive a client that takes memory away: it holds its segment's descriptor, and may cut the file short.

What is then read or written beyond its end is SIGBUS, by default the end of the daemon and of every engine's cache. (POSIX
shared memory cannot be sealed. A sealed memfd could not be cut, but has no name by which the next daemon finds its leases.)
The handler puts memory of this process's own, zeros, in place of the whole segment and tells its owner, who ends the session;
the access that faulted is repeated and succeeds. A fault anywhere else does what it does without this module.

The handler is Python, called by ``ctypes`` in the thread that faulted, in the middle of an access to the segment: as from any C
function that calls back. It takes no lock. ``mmap`` and ``sigaction`` are the C library's, with its ``struct sigaction`` for
64-bit Linux (the kernel's differs).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import signal
from collections.abc import Callable, Iterator

import numpy as np

from maru_shm.segment import Segment

_SA_SIGINFO, _SA_NODEFER = 4, 0x40000000
_MAP_FIXED = 0x10
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAPPING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
_SI_ADDR = 16  #: offset in siginfo_t


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_Torn = Callable[[], None]


class BusGuard:
    """Install it once, from the main thread. ``on_torn`` callbacks run inside the handler: they must not block. What one raises
    is printed, and changes nothing else."""

    def __init__(self) -> None:
        self._guarded: dict[int, tuple[int, _Torn]] = {}  # address → size, whom to tell
        library = ctypes.CDLL(None, use_errno=True)
        self._mmap = library.mmap
        self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._mmap.restype = ctypes.c_void_p
        self._sigaction = library.sigaction
        self._before = _SigAction()
        self._entry = _Handler(self._fault)  # kept: the kernel holds a pointer to it
        self._installed = False

    def install(self) -> None:
        if self._installed:
            return
        action = _SigAction(ctypes.cast(self._entry, ctypes.c_void_p).value, (ctypes.c_ulong * 16)(), _SA_SIGINFO | _SA_NODEFER)
        if self._sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(self._before)):
            raise OSError(ctypes.get_errno(), "sigaction(SIGBUS)")
        self._installed = True

    def add(self, segment: Segment, on_torn: _Torn) -> None:
        """Guard ``segment`` until :meth:`close`."""
        self._guarded[_address(segment)] = len(segment.bytes), on_torn

    def close(self, segment: Segment) -> None:
        """Close a guarded segment. While a thread holds a view of it, it stays mapped, and guarded."""
        address = _address(segment)
        segment.close()
        if not segment.mapped:
            self._guarded.pop(address, None)

    @contextlib.contextmanager
    def guarding(self, segment: Segment) -> Iterator[None]:
        """For a look at a segment whose owner need not be told; closes it."""
        self.add(segment, _nobody)
        try:
            yield
        finally:
            self.close(segment)

    def _fault(self, signo: int, info: int, _context: int) -> None:
        """The signal handler."""
        on_torn: _Torn | None = None
        try:
            on_torn = self._replace(ctypes.c_uint64.from_address(info + _SI_ADDR).value)
        finally:
            if on_torn is None:  # not ours: it comes again, and ends the process as before
                self._sigaction(signo, ctypes.byref(self._before), None)
        if on_torn is not None:
            on_torn()

    def _replace(self, address: int) -> _Torn | None:
        """Whom to tell that the segment around ``address`` is zeros now; None if that is no guarded memory."""
        for start, (size, on_torn) in tuple(self._guarded.items()):
            if start <= address < start + size and self._mmap(start, size, _PROTECTION, _MAPPING, -1, 0) == start:
                return on_torn
        return None


def _address(segment: Segment) -> int:
    return int(np.frombuffer(segment.bytes, np.uint8).ctypes.data)


def _nobody() -> None:
    pass


BUS_GUARD = BusGuard()  #: one per process, as the signal
