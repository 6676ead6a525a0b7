"""A DAX device to test on: the real one that ``MARU_TEST_DEVDAX`` names, and a stand-in for machines that have none.

The stand-in is a file in /dev/shm. It is taken for a device at two places only: which inode counts as a character device
(``devdax.number_of``) and where sysfs lies (``devdax.SYS_CHAR``). What the kernel's driver refuses is refused for it too: read,
write, truncate, fallocate, fsync, and mappings that are no multiples of the alignment. Opening, mapping, locking, permissions
and everything above them are real.

Tests on the real device overwrite what it holds.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from maru_sidecar import devdax

VARIABLE = "MARU_TEST_DEVDAX"
KINDS = ("stand-in", "real")
MiB = 1 << 20
NUMBER = "252:7"
_REFUSED = ("read", "write", "pread", "pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync")
_SITE = """import json, os
from tests.support import dax_device
dax_device.patch(**json.loads(os.environ["MARU_TEST_STAND_IN"]))
"""
_serial = itertools.count()


@dataclass
class DaxUnderTest:
    path: str
    size: int
    align: int

    @property
    def region(self) -> int:
        """A small region's bytes: one that it can map and that holds slabs."""
        return max(self.align, MiB)

    def page(self) -> bytes:
        """The first 4 KiB, read as only a mapping can."""
        with self.mapped() as m:
            return m[:4096]

    @contextlib.contextmanager
    def mapped(self) -> Iterator[mmap.mmap]:
        fd = os.open(self.path, os.O_RDWR)
        try:
            with mmap.mmap(fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as m:
                yield m
        finally:
            os.close(fd)

    def wipe(self) -> None:
        """As it comes from the vendor: zeros where anybody looks."""
        with self.mapped() as m:
            for at in range(0, self.size, self.region):
                m[at : at + 4096] = bytes(4096)


class StandIn(DaxUnderTest):
    """``size`` and ``align`` in bytes. Its sysfs entry is a folder; :meth:`tell` changes it."""

    def __init__(self, size: int = 16 * MiB, align: int = 2 * MiB) -> None:
        super().__init__(f"/dev/shm/maru-test-pool-{os.getpid()}-dax-{next(_serial)}", size, align)
        with open(self.path, "xb") as f:
            os.posix_fallocate(f.fileno(), 0, size)
        self.sys = tempfile.mkdtemp(prefix="maru-test-sysfs-")
        self.entry = Path(self.sys, "devices", "region0", "dax0.7")
        self.entry.mkdir(parents=True)
        Path(self.sys, NUMBER).symlink_to(self.entry)
        (self.entry / "subsystem").symlink_to("../../../bus/dax")
        self.drive("device_dax")
        self.tell("size", str(size))
        self.tell("align", str(align))

    def tell(self, attribute: str, value: str | None) -> None:
        """Set an attribute, or take it away."""
        path = self.entry / attribute
        if value is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(value + "\n")

    def drive(self, driver: str) -> None:
        """The driver that serves it; none if empty."""
        (self.entry / "driver").unlink(missing_ok=True)
        if driver:
            (self.entry / "driver").symlink_to(f"../../../bus/dax/drivers/{driver}")

    def environment(self) -> dict[str, str]:
        """What makes Python processes take it for a device, too."""
        site = Path(self.sys, "site")
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(_SITE)
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([str(site), root, *filter(None, [os.environ.get("PYTHONPATH")])])
        told = {"path": self.path, "sys": self.sys, "align": self.align}
        return {"PYTHONPATH": path, "MARU_TEST_STAND_IN": json.dumps(told)}

    def remove(self) -> None:
        os.unlink(self.path)
        shutil.rmtree(self.sys)


def patch(path: str, sys: str, align: int, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Take the file at ``path`` for a DAX device in this process."""
    device = os.stat(path)
    number_of, new_map = devdax.number_of, mmap.mmap

    def stands_in(fd: int) -> bool:
        return os.path.samestat(os.fstat(fd), device)

    def number(info: os.stat_result) -> str | None:
        return NUMBER if os.path.samestat(info, device) else number_of(info)

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            if stands_in(fd):
                raise OSError(errno.EINVAL, f"{real.__name__} on a DAX device")
            return real(fd, *args)

        return call

    class AlignedMap(new_map):  # type: ignore[misc,valid-type]
        def __new__(cls, fd: int, length: int, *args: Any, **kwargs: Any) -> AlignedMap:
            if fd >= 0 and stands_in(fd) and length % align:
                raise OSError(errno.EINVAL, "unaligned vma")
            return super().__new__(cls, fd, length, *args, **kwargs)  # type: ignore[no-any-return]

    put(devdax, "number_of", number)
    put(devdax, "SYS_CHAR", sys)
    put(mmap, "mmap", AlignedMap)
    for name in _REFUSED:
        put(os, name, refusing(getattr(os, name)))


def real_device() -> DaxUnderTest:
    """The device that the environment names; skips the test if there is none."""
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"{VARIABLE} names no DAX device (e.g. /dev/dax0.0; its contents would be lost)")
    fd = devdax.open_device(path, os.O_RDWR)
    try:
        found = devdax.of(fd)
    finally:
        os.close(fd)
    assert found is not None
    return DaxUnderTest(path, found.size, found.align)


@contextlib.contextmanager
def dax_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaxUnderTest]:
    """A wiped device of one of ``KINDS``."""
    if kind == "real":
        device = real_device()
        device.wipe()
        yield device
        device.wipe()
        return
    stand_in = StandIn()
    try:
        patch(stand_in.path, stand_in.sys, stand_in.align, monkeypatch.setattr)
        for name, value in stand_in.environment().items():
            monkeypatch.setenv(name, value)
        yield stand_in
    finally:
        stand_in.remove()
