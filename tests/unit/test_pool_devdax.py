"""A pool on a DAX device. The first part runs on the real device that ``MARU_TEST_DEVDAX`` names, too."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tests.support.dax_device import KINDS, DaxUnderTest, MiB, StandIn, dax_device

from maru_shm import poolformat as F
from maru_shm.errors import PoolBusy, PoolCorrupt, PoolError, PoolTooLarge
from maru_sidecar import devdax, doctor, pool_admin
from maru_sidecar.cli import cli
from maru_sidecar.directory import Directory
from maru_sidecar.output import human_bytes
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_header import read_header, write_header
from maru_sidecar.pool_lock import FLOCK
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.prefault import Prefault, PrefaultState
from maru_sidecar.slab_handles import Reservation

NAMESPACE, KEY, ROOT = b"n" * 16, b"k" * 16, b"r" * 16
NBYTES = 8192


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaxUnderTest]:
    with dax_device(request.param, monkeypatch) as device:
        yield device


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with dax_device("stand-in", monkeypatch) as device:
        assert isinstance(device, StandIn)
        yield device


def own(device: DaxUnderTest, **changes: object) -> PoolSpec:
    spec = PoolSpec(backend="devdax", path=device.path, size=1)
    return msgspec.structs.replace(spec, **changes)  # type: ignore[arg-type]


def store(pool: PoolFile, key: bytes, *, checksum: int | None = None) -> None:
    directory = Directory(pool)
    directory.rebuild()
    got = directory.reserve(NAMESPACE, key, parent=ROOT, rank=0, world=1, depth=0, tokens=64, nbytes=NBYTES)
    assert isinstance(got, Reservation)
    pool.bytes[got.offset : got.offset + NBYTES] = b"d" * NBYTES
    got.commit(checksum)


def kept(pool: PoolFile, key: bytes = KEY) -> bool:
    directory = Directory(pool)
    directory.rebuild()
    return directory.lookup(NAMESPACE, key, world=1) == 1


# --- on any device, the real one included ---------------------------------------------------------------------------------
def test_a_sidecar_never_formats_a_device(device: DaxUnderTest) -> None:
    for spec in (own(device), own(device, shared=True), own(device, backend="shm"), own(device, backend="file")):
        with pytest.raises(PoolError, match="holds no maru pool; maru-sidecar pool init"):
            PoolFile.open(spec)
    assert device.page() == bytes(4096)


def test_the_whole_device_becomes_a_pool_in_regions_that_it_can_map(device: DaxUnderTest) -> None:
    header = pool_admin.initialise(device.path, 0, own=True)
    assert header.region_bytes % device.align == 0
    assert device.size - header.region_bytes < header.pool_bytes <= device.size
    assert not header.flags & (F.FLAG_CREATING | F.FLAG_SHARED)
    pool = PoolFile.open(own(device))
    assert (pool.uuid, pool.size, pool.filesystem.kind) == (header.uuid, header.pool_bytes, "devdax")
    pool.close(clean=True)


def test_a_pool_of_ones_own_keeps_its_chunks_over_a_restart(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, device.region, own=True)
    pool = PoolFile.open(own(device))
    store(pool, KEY)
    epoch = pool.epoch
    pool.close(clean=True)
    again = PoolFile.open(own(device, backend="file"))
    assert kept(again)
    assert again.epoch == epoch + 1
    again.close(clean=True)


def test_one_process_at_a_time_has_a_pool_of_its_own(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, own=True)
    pool = PoolFile.open(own(device))
    code = (
        "import sys; from maru_sidecar.pool import PoolFile; from maru_sidecar.pool_spec import PoolSpec; "
        "PoolFile.open(PoolSpec(backend='devdax', path=sys.argv[1], size=1))"
    )
    second = subprocess.run([sys.executable, "-c", code, device.path], capture_output=True, text=True, check=False, timeout=60)
    assert f"is held by process {os.getpid()}" in second.stderr
    with pytest.raises(PoolBusy):
        pool_admin.initialise(device.path, 0, overwrite=True)
    with pytest.raises(PoolBusy):
        pool_admin.clear(device.path)
    pool.close(clean=True)
    PoolFile.open(own(device)).close(clean=True)


def test_several_open_a_shared_one_each_under_a_name_and_write_no_header(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0)
    before = device.page()
    one, two = PoolFile.open(own(device, shared=True)), PoolFile.open(own(device, shared=True))
    one.lock_node("a")
    two.lock_node("b")
    with pytest.raises(PoolBusy, match="node 'a'"):
        two.lock_node("a")
    one.close(clean=True)
    two.close(clean=True)
    assert device.page() == before


def test_a_shared_device_and_one_of_ones_own_are_not_mistaken_for_each_other(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0)
    with pytest.raises(PoolError, match="is shared"):
        PoolFile.open(own(device))
    pool_admin.initialise(device.path, 0, own=True, overwrite=True)
    with pytest.raises(PoolError, match="not initialised for sharing"):
        PoolFile.open(own(device, shared=True))


def test_what_a_device_holds_is_overwritten_only_when_that_is_asked_for(device: DaxUnderTest) -> None:
    with device.mapped() as m:
        m[100:104] = b"data"
    with pytest.raises(PoolError, match="holds data, and not of a pool"):
        pool_admin.initialise(device.path, 0)
    assert device.page()[100:104] == b"data"
    first = pool_admin.initialise(device.path, 0, device.region, own=True, overwrite=True)
    pool = PoolFile.open(own(device))
    store(pool, KEY)
    pool.close(clean=True)
    with pytest.raises(PoolError, match="holds a pool already"):
        pool_admin.initialise(device.path, 0)
    second = pool_admin.initialise(device.path, 0, device.region, own=True, overwrite=True)
    assert second.uuid != first.uuid
    pool = PoolFile.open(own(device))
    assert not kept(pool)
    pool.close(clean=True)


def test_clearing_empties_it_under_a_new_uuid(device: DaxUnderTest) -> None:
    first = pool_admin.initialise(device.path, 0, device.region, own=True)
    pool = PoolFile.open(own(device))
    store(pool, KEY)
    [view] = [v for v in pool_admin.inspect(device.path)[1] if v.committed]
    assert (view.committed, view.slab_bytes) == (1, NBYTES)
    pool.close(clean=True)
    cleared = pool_admin.clear(device.path)
    assert (cleared.uuid != first.uuid, cleared.flags) == (True, 0)
    pool = PoolFile.open(own(device))
    assert not kept(pool)
    pool.close(clean=True)


def test_sizes_that_do_not_fit_are_named_and_write_nothing(device: DaxUnderTest) -> None:
    with pytest.raises(PoolTooLarge, match=f"which has {device.size}"):
        pool_admin.initialise(device.path, device.size + device.align)
    with pytest.raises(PoolError, match=f"use a positive multiple of {device.align} bytes"):
        pool_admin.initialise(device.path, 0, device.align // 2)
    with pytest.raises(PoolError, match="at least 2 are needed"):
        pool_admin.initialise(device.path, 0, device.size)
    assert device.page() == bytes(4096)
    pool_admin.initialise(device.path, 0, device.region, own=True)
    with pytest.raises(PoolError, match=r"leave pool\.region_size out"):
        PoolFile.open(own(device, region_size=2 * device.region))


def test_no_sidecar_recreates_it(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, own=True)
    before = device.page()
    with pytest.raises(PoolError, match="maru-sidecar pool clear"):
        PoolFile.open(own(device, recreate=True))
    assert device.page() == before


def test_after_a_reboot_it_is_suspect_even_if_the_stop_was_clean(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, device.region, own=True)
    pool = PoolFile.open(own(device))
    store(pool, KEY)
    pool.close(clean=True)
    fd = os.open(device.path, os.O_RDWR)
    header = read_header(fd, device.path)
    assert header.clean == 0
    write_header(fd, replace(header, boot_id=b"another boot of "))
    os.close(fd)
    pool = PoolFile.open(own(device))
    assert pool.suspect
    assert not kept(pool), "nothing vouches for a slab without a checksum"
    pool.contents_checked()
    pool.close(clean=True)
    pool = PoolFile.open(own(device))
    assert not pool.suspect
    pool.close(clean=True)


@pytest.mark.parametrize("torn_at", [0, 8, 50, F.POOL_HEADER.size])
def test_a_header_torn_by_a_kill_is_read_from_its_copy(device: DaxUnderTest, torn_at: int) -> None:
    header = pool_admin.initialise(device.path, 0, own=True)
    with device.mapped() as m:
        at = F.POOL_HEADER_COPY_OFFSET
        m[at + torn_at] ^= 0xFF  # torn while the copy was written
    assert pool_admin.inspect(device.path)[0] == header
    with device.mapped() as m:
        m[at + torn_at] ^= 0xFF
        m[max(8, torn_at)] ^= 0xFF  # torn while the header was; its magic is never another
    assert pool_admin.inspect(device.path)[0] == header
    PoolFile.open(own(device)).close(clean=True)
    assert pool_admin.inspect(device.path)[0].epoch == header.epoch + 1
    with device.mapped() as m:
        m[60] ^= 0xFF
        m[at + 60] ^= 0xFF
    with pytest.raises(PoolCorrupt, match="pool init --overwrite"):
        PoolFile.open(own(device))


def test_prefault_touches_all_of_it_and_changes_nothing(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, own=True)
    pool = PoolFile.open(own(device))
    before = bytes(pool.bytes[: 2 * device.region])
    touch = Prefault(pool, threads=2)
    touch.start()
    assert touch.join(60)
    assert (touch.progress().state, touch.progress().done_bytes) == (PrefaultState.DONE, pool.size)
    assert bytes(pool.bytes[: 2 * device.region]) == before
    pool.close(clean=True)


def test_an_engine_gets_it_for_reading_only(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, own=True)
    pool = PoolFile.open(own(device))
    fd = pool.open_readonly()
    with mmap.mmap(fd, pool.size, mmap.MAP_SHARED, mmap.PROT_READ) as m:
        assert m[:8] == F.POOL_MAGIC.to_bytes(8, "little")
    with pytest.raises(PermissionError):
        mmap.mmap(fd, pool.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    pool.close(clean=True)


def test_a_stored_descriptor_of_it_is_used_after_a_restart(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, device.region, own=True)
    pool = PoolFile.open(own(device))
    store(pool, KEY)
    stored = os.dup(pool.mapping.fd)
    pool.close(clean=True)
    again = PoolFile.from_fd(stored, own(device))
    os.close(stored)
    assert kept(again)
    again.close(clean=True)


def test_the_commands_init_inspect_and_clear(device: DaxUnderTest) -> None:
    run = CliRunner()
    made = run.invoke(cli, ["pool", "init", device.path, "--region-size", str(device.region), "--format", "json"])
    assert made.exit_code == 0, made.output
    first = msgspec.json.decode(made.output)
    assert first["region_bytes"] == device.region
    shown = msgspec.json.decode(run.invoke(cli, ["pool", "inspect", device.path, "--format", "json"]).output)
    assert (shown["pool"]["uuid"], shown["pool"]["shared"]) == (first["uuid"], True)
    again = run.invoke(cli, ["pool", "init", device.path, "--own", "--overwrite"])
    assert again.exit_code == 0, again.output
    shown = msgspec.json.decode(run.invoke(cli, ["pool", "inspect", device.path, "--format", "json"]).output)
    assert not shown["pool"]["shared"]
    assert run.invoke(cli, ["pool", "clear", device.path, "--yes"]).exit_code == 0


# --- what is no such device, or not usable as one -------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
@pytest.mark.parametrize("backend", ["shm", "file", "devdax"])
def test_another_character_device_is_refused(path: str, backend: str) -> None:
    for shared in (False, True):
        with pytest.raises(PoolError, match=r"is no DAX device; name a /dev/daxX\.Y"):
            PoolFile.open(PoolSpec(backend=backend, path=path, size=MiB, shared=shared))  # type: ignore[arg-type]
    with pytest.raises(PoolError, match="is no DAX device"):
        pool_admin.initialise(path, 0)
    with pytest.raises(PoolError, match="is no DAX device"):
        pool_admin.inspect(path)


def test_the_kernel_keeps_write_locks_on_a_character_device_apart_from_read_locks() -> None:
    one, two, client = (os.open("/dev/zero", mode) for mode in (os.O_RDWR, os.O_RDWR, os.O_RDONLY))
    whole = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(client, fcntl.F_OFD_SETLK, whole)
    assert FLOCK.unpack(fcntl.fcntl(two, fcntl.F_OFD_GETLK, whole))[0] == fcntl.F_UNLCK
    os.close(client)
    fcntl.fcntl(one, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 1 << 61, 1, 0))
    assert FLOCK.unpack(fcntl.fcntl(two, fcntl.F_OFD_GETLK, whole))[0] == fcntl.F_WRLCK
    os.close(one)
    os.close(two)


def test_no_lock_of_a_client_keeps_a_successor_off_a_device(device: DaxUnderTest) -> None:
    pool_admin.initialise(device.path, 0, own=True)
    pool = PoolFile.open(own(device))
    client = pool.open_readonly()
    pool.close(clean=False)
    fcntl.flock(client, fcntl.LOCK_EX)
    fcntl.fcntl(client, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    successor = PoolFile.open(own(device))
    successor.close(clean=False)
    os.close(client)


def test_a_file_is_no_device_and_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"backend is devdax, and .* is no character device"):
        PoolFile.open(PoolSpec(backend="devdax", path=str(tmp_path / "absent"), size=MiB))
    assert not (tmp_path / "absent").exists()
    with pytest.raises(PoolError, match="without --own"):
        pool_admin.initialise(str(tmp_path / "file"), 4 * MiB, own=True)
    with pytest.raises(PoolError, match="give --size"):
        pool_admin.initialise(str(tmp_path / "file"), 0)
    assert not (tmp_path / "file").exists()


def test_a_device_that_the_kernel_uses_as_memory_is_named_with_the_way_back(stand_in: StandIn) -> None:
    stand_in.drive("kmem")
    with pytest.raises(PoolError, match=r"system-ram mode.*daxctl reconfigure-device --mode=devdax dax0\.7"):
        PoolFile.open(own(stand_in))
    stand_in.drive("")
    with pytest.raises(PoolError, match=r"no driver; daxctl enable-device dax0\.7"):
        pool_admin.initialise(stand_in.path, 0)


def test_missing_rights_are_named_with_the_udev_rule(stand_in: StandIn) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody without rights")
    os.chmod(stand_in.path, 0o600)
    os.chmod(stand_in.sys, 0o755)  # as sysfs is readable by everybody
    os.seteuid(65534)
    try:
        with pytest.raises(PoolError, match='Permission denied; a udev rule opens it: SUBSYSTEM=="dax"'):
            PoolFile.open(own(stand_in))
    finally:
        os.seteuid(0)


def test_what_sysfs_does_not_tell_is_named(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute, value, said in (
        ("size", "0", "tells no size"),
        ("size", None, "tells no size"),
        ("align", "0", "an alignment of 0 bytes"),
        ("align", "1000", "an alignment of 1000 bytes"),
        ("align", None, "an alignment of 0 bytes"),
    ):
        before = (stand_in.entry / attribute).read_text().strip()
        stand_in.tell(attribute, value)
        with pytest.raises(PoolError, match=said):
            pool_admin.initialise(stand_in.path, 0)
        stand_in.tell(attribute, before)
    monkeypatch.setattr(devdax, "SYS_CHAR", "/nonexistent/char")
    with pytest.raises(PoolError, match="mount sysfs"):
        pool_admin.initialise(stand_in.path, 0)


@pytest.mark.parametrize("where", ["dax_region/align", "../dax_region/align"])
def test_the_alignment_is_found_where_older_kernels_tell_it(stand_in: StandIn, where: str) -> None:
    stand_in.tell("align", None)
    stand_in.tell(where, str(4 * MiB))
    assert pool_admin.initialise(stand_in.path, 0).region_bytes == 4 * MiB


def test_a_device_that_shrank_or_maps_larger_units_than_its_regions_is_refused(stand_in: StandIn) -> None:
    pool_admin.initialise(stand_in.path, 0, 2 * MiB, own=True)
    stand_in.tell("size", str(8 * MiB))
    with pytest.raises(PoolCorrupt, match="there are 8388608"):
        PoolFile.open(own(stand_in))
    stand_in.tell("size", str(stand_in.size))
    stand_in.tell("align", str(4 * MiB))
    with pytest.raises(PoolCorrupt, match="maps multiples of 4194304"):
        PoolFile.open(own(stand_in))


# --- doctor -----------------------------------------------------------------------------------------------------------------
def test_doctor_measures_the_device_and_not_the_filesystem_of_its_node(device: DaxUnderTest) -> None:
    host = doctor.Host(device.path, 1 << 60, "/nonexistent", pool_backend="devdax")
    [finding] = doctor.check_pool_space(host)
    assert finding.verdict is doctor.Verdict.OK
    assert f"a DAX device of {human_bytes(device.size)}" in finding.what


def test_doctor_names_what_is_wrong_with_a_device(stand_in: StandIn) -> None:
    [finding] = doctor.check_pool_space(doctor.Host("/dev/null", 1 << 30, "/nonexistent"))
    assert finding.verdict is doctor.Verdict.BAD
    assert "/dev/null" in finding.what
    assert finding.remedy
