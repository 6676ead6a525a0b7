"""Opening a pool: creation, reopening, locking, and every file that must be refused and left alone."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.limits import file_size_limit
from tests.support.pool_specs import SIZE, MiB, file_spec, shm_spec

from maru_shm import poolformat as F
from maru_shm.errors import PoolBusy, PoolCorrupt, PoolError, PoolTooLarge, PoolVersionMismatch
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_header import plan_regions
from maru_sidecar.pool_lock import lock_path
from maru_sidecar.pool_spec import PoolSpec


@pytest.fixture
def spec() -> Iterator[PoolSpec]:
    with shm_spec() as spec:
        yield spec


def header_of(path: str) -> tuple[int, ...]:
    return F.POOL_HEADER.unpack(Path(path).read_bytes()[: F.POOL_HEADER.size])


def rewrite_header(path: str, **changes: object) -> None:
    """Change header fields and give the header a right checksum again."""
    names = ("magic", "format", "flags", "uuid", "bytes", "region", "n", "created", "boot", "clean", "epoch")
    fields = dict(zip(names, header_of(path), strict=True)) | changes
    with open(path, "r+b") as f:
        f.write(F.with_crc(F.POOL_HEADER.pack(*fields.values())))


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "mnt"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "maru-test", mount], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield mount
    subprocess.run(["umount", mount], check=True)


# --- creating and reopening ---
def test_a_new_pool_has_its_full_size_allocated_and_mapped(spec: PoolSpec) -> None:
    pool = PoolFile.open(spec)
    info = os.stat(spec.file_path)
    assert pool.size == info.st_size == SIZE
    assert info.st_blocks * 512 >= SIZE
    assert info.st_mode & 0o777 == 0o600
    pool.bytes[SIZE - 5 :] = b"final"
    assert ctypes.string_at(pool.mapping.address + SIZE - 5, 5) == b"final"
    assert os.pread(pool.mapping.fd, 5, SIZE - 5) == b"final"
    pool.close(clean=True)


def test_a_reopened_pool_is_the_same_pool_in_a_later_epoch(spec: PoolSpec) -> None:
    first = PoolFile.open(spec)
    first.bytes[MiB : MiB + 4] = b"kept"
    first.close(clean=False)
    again = PoolFile.open(spec)
    assert again.uuid == first.uuid
    assert again.epoch == first.epoch + 1
    assert bytes(again.bytes[MiB : MiB + 4]) == b"kept"
    again.close(clean=True)


@pytest.mark.parametrize("name", ["{}", "/{}", "/dev/shm/{}"])
def test_posix_names_and_paths_in_dev_shm_name_the_same_file(spec: PoolSpec, name: str) -> None:
    assert PoolSpec(path=name.format(spec.path), size=1).file_path == spec.file_path


def test_an_empty_file_prepared_by_the_operator_becomes_a_pool_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.touch(mode=0o640)
    path.chmod(0o640)
    PoolFile.open(file_spec(path)).close(clean=True)
    assert path.stat().st_size == SIZE
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_new_pool_has_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        PoolFile.open(file_spec(tmp_path / "pool", mode=0o640)).close(clean=True)
    finally:
        os.umask(before)
    assert (tmp_path / "pool").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("how", ["removed", "replaced", "renamed"])
def test_a_pool_whose_file_is_taken_away_says_so(tmp_path: Path, how: str) -> None:
    path = tmp_path / "pool"
    pool = PoolFile.open(file_spec(path))
    try:
        opened = pool.warnings
        assert not any("pool_removed" in warning for warning in opened)
        if how == "removed":
            path.unlink()
        elif how == "replaced":
            (tmp_path / "other").touch()
            (tmp_path / "other").rename(path)
        else:
            path.rename(tmp_path / "elsewhere")
        assert pool.warnings[:-1] == opened
        assert pool.warnings[-1].startswith(f"pool_removed: {path} was removed or replaced; its memory stays taken")
        pool.bytes[MiB : MiB + 4] = b"kept"  # it works on
    finally:
        pool.close(clean=False)
    assert pool.warnings == opened  # closed: it has no file any more


def test_closing_twice_is_harmless_and_views_outlive_the_pool(spec: PoolSpec) -> None:
    pool = PoolFile.open(spec)
    view = pool.bytes[:8]
    pool.close(clean=True)
    pool.close(clean=True)
    assert int.from_bytes(view, "little") == F.POOL_MAGIC


def test_progress_is_told_while_the_file_is_sized(spec: PoolSpec) -> None:
    told: list[tuple[int, int]] = []
    PoolFile.open(spec, lambda done, total: told.append((done, total))).close(clean=True)
    assert told[0] == (0, SIZE)
    assert told[-1] == (SIZE, SIZE)


def test_a_pool_comes_from_a_memfd_and_outlives_its_first_user() -> None:
    fd = os.memfd_create("maru-test")
    spec = PoolSpec(path=f"maru-test-pool-{os.getpid()}-memfd", size=SIZE)
    first = PoolFile.from_fd(fd, spec)
    assert not any("pool_removed" in warning for warning in first.warnings)  # it never had a name
    first.bytes[MiB : MiB + 4] = b"kept"
    with pytest.raises(PoolBusy):
        PoolFile.from_fd(fd, spec)
    first.close(clean=False)
    again = PoolFile.from_fd(fd, spec)
    assert again.uuid == first.uuid
    assert bytes(again.bytes[MiB : MiB + 4]) == b"kept"
    again.close(clean=True)
    os.close(fd)


def test_the_read_only_descriptor_cannot_be_mapped_for_writing(spec: PoolSpec) -> None:
    pool = PoolFile.open(spec)
    fd = pool.open_readonly()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert int.from_bytes(mapped[:8], "little") == F.POOL_MAGIC
    os.close(fd)
    pool.close(clean=True)


def test_regions_are_planned_so_that_the_header_costs_at_most_a_sixteenth() -> None:
    assert plan_regions(64 << 30, 0) == (1 << 30, 64)
    assert plan_regions(2 << 30, 0) == (128 * MiB, 16)
    assert plan_regions(4 * MiB, 0) == (MiB, 4)
    assert plan_regions(10 * MiB, 4 * MiB) == (4 * MiB, 2)
    assert plan_regions(64 * MiB, 0, page_bytes=8 * MiB) == (8 * MiB, 8)


@pytest.mark.parametrize(
    ("size", "region"), [(0, 0), (MiB, 0), (-5, 0), (16 * MiB, 16 * MiB), (16 * MiB, 5000), (16 * MiB, -4096)]
)
def test_sizes_that_make_no_pool_are_named_errors(spec: PoolSpec, size: int, region: int) -> None:
    with pytest.raises(PoolError):
        PoolFile.open(PoolSpec(path=spec.path, size=size, region_size=region))
    assert not os.path.exists(spec.file_path)


# --- one owner ---
def test_a_second_opener_is_told_who_holds_the_pool(spec: PoolSpec) -> None:
    code = (
        "import sys; from maru_sidecar.pool import PoolFile; from maru_sidecar.pool_spec import PoolSpec; "
        "p = PoolFile.open(PoolSpec(path=sys.argv[1], size=int(sys.argv[2])));"
        "print('open', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, spec.path, str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    with pytest.raises(PoolBusy, match=f"process {holder.pid}"):
        PoolFile.open(spec)
    with pytest.raises(PoolBusy):  # recreating does not go over a live owner either
        PoolFile.open(PoolSpec(path=spec.path, size=SIZE, recreate=True))
    holder.kill()
    holder.communicate()
    PoolFile.open(spec).close(clean=True)


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_client_that_locks_its_descriptor_keeps_no_successor_out(spec: PoolSpec, kind: int) -> None:
    pool = PoolFile.open(spec)
    client_fd = pool.open_readonly()
    pool.close(clean=False)
    fcntl.flock(client_fd, kind)
    whole_file = struct.pack("@hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(client_fd, fcntl.F_OFD_SETLK, whole_file)
    successor = PoolFile.open(spec)
    successor.lock_node("node")
    with pytest.raises(PoolBusy):
        PoolFile.open(spec)
    successor.close(clean=True)
    os.close(client_fd)


def test_one_pool_under_two_names_is_not_had_twice(spec: PoolSpec) -> None:
    other = msgspec.structs.replace(spec, path=spec.path + "-b")
    PoolFile.open(spec).close(clean=True)
    os.link(spec.file_path, other.file_path)
    try:
        PoolFile.open(other).close(clean=True)  # each name has its lock's file now
        pool = PoolFile.open(spec)
        with pytest.raises(PoolBusy, match=f"process {os.getpid()}"):
            PoolFile.open(other)
        pool.close(clean=True)
        PoolFile.open(other).close(clean=True)
    finally:
        os.unlink(other.file_path)
        os.unlink(lock_path(other.file_path))


def test_a_lock_whose_file_was_replaced_does_not_let_two_in(spec: PoolSpec) -> None:
    pool = PoolFile.open(spec)
    os.unlink(lock_path(spec.file_path))
    os.close(os.open(lock_path(spec.file_path), os.O_CREAT | os.O_EXCL, 0o600))
    with pytest.raises(PoolBusy):
        PoolFile.open(spec)
    pool.close(clean=True)


def test_a_lock_that_was_cleaned_away_does_not_let_two_in(spec: PoolSpec) -> None:
    pool = PoolFile.open(spec)
    os.unlink(lock_path(spec.file_path))
    with pytest.raises(PoolBusy, match=f"process {os.getpid()}"):
        PoolFile.open(spec)
    pool.close(clean=True)
    PoolFile.open(spec).close(clean=True)


def test_the_lock_is_for_those_who_may_write_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    for mode, wanted in ((0o640, 0o600), (0o660, 0o660)):
        path.touch()
        path.chmod(mode)
        PoolFile.open(file_spec(path)).close(clean=True)
        assert os.stat(lock_path(str(path))).st_mode & 0o777 == wanted
        path.unlink()
        os.unlink(lock_path(str(path)))


def test_a_pool_that_is_refused_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "letter").write_bytes(b"no pool")
    with pytest.raises(PoolError):
        PoolFile.open(file_spec(tmp_path / "letter"))
    assert os.listdir(tmp_path) == ["letter"]


def test_descriptors_handed_out_do_not_keep_the_lock(spec: PoolSpec) -> None:
    pool = PoolFile.open(spec)
    engine_fd, reader_fd = os.dup(pool.mapping.fd), pool.open_readonly()
    pool.close(clean=False)
    PoolFile.open(spec).close(clean=True)
    os.close(engine_fd)
    os.close(reader_fd)


# --- what is refused, and stays as it was ---
@pytest.mark.parametrize("recreate", [False, True])
@pytest.mark.parametrize("content", [b"x", b"precious data" * 1000, bytes(SIZE)])
def test_a_file_that_is_no_pool_is_never_formatted(tmp_path: Path, content: bytes, recreate: bool) -> None:  # noqa: FBT001
    path = tmp_path / "letter"
    path.write_bytes(content)
    with pytest.raises(PoolError, match="no maru pool"):
        PoolFile.open(file_spec(path, recreate=recreate))
    assert path.read_bytes() == content


def test_an_unknown_format_is_refused_unchanged_unless_recreated(spec: PoolSpec) -> None:
    PoolFile.open(spec).close(clean=True)
    rewrite_header(spec.file_path, format=F.FORMAT + 1)
    before = Path(spec.file_path).read_bytes()
    with pytest.raises(PoolVersionMismatch, match=f"format {F.FORMAT + 1}"):
        PoolFile.open(spec)
    assert Path(spec.file_path).read_bytes() == before
    fresh = PoolFile.open(PoolSpec(path=spec.path, size=SIZE, recreate=True))
    assert header_of(spec.file_path)[1] == F.FORMAT
    fresh.close(clean=True)


@pytest.mark.parametrize("at", [20, 50, 90, F.POOL_HEADER.size])
def test_a_damaged_header_is_refused_unchanged_unless_recreated(spec: PoolSpec, at: int) -> None:
    PoolFile.open(spec).close(clean=True)
    with open(spec.file_path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x40]))
    before = Path(spec.file_path).read_bytes()
    with pytest.raises(PoolCorrupt):
        PoolFile.open(spec)
    assert Path(spec.file_path).read_bytes() == before
    PoolFile.open(PoolSpec(path=spec.path, size=SIZE, recreate=True)).close(clean=True)


def test_a_header_with_a_good_checksum_and_absurd_sizes_is_corrupt(spec: PoolSpec) -> None:
    PoolFile.open(spec).close(clean=True)
    rewrite_header(spec.file_path, n=3)
    with pytest.raises(PoolCorrupt, match="claims"):
        PoolFile.open(spec)


def test_a_truncated_pool_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    PoolFile.open(file_spec(path)).close(clean=True)
    os.truncate(path, SIZE // 2)
    with pytest.raises(PoolCorrupt, match="truncated"):
        PoolFile.open(file_spec(path))
    os.truncate(path, 50)
    with pytest.raises(PoolError):
        PoolFile.open(file_spec(path))


def test_another_size_is_refused_with_both_numbers_and_recreated_on_demand(spec: PoolSpec) -> None:
    PoolFile.open(spec).close(clean=True)
    with pytest.raises(PoolError, match=f"{SIZE} bytes, wanted are {2 * SIZE}.*--pool-recreate"):
        PoolFile.open(PoolSpec(path=spec.path, size=2 * SIZE))
    with pytest.raises(PoolError, match="regions of"):
        PoolFile.open(PoolSpec(path=spec.path, size=SIZE, region_size=8 * MiB))
    with pytest.raises(PoolError):  # a wish that cannot be met does not cost the old pool
        PoolFile.open(PoolSpec(path=spec.path, size=0, recreate=True))
    PoolFile.open(spec).close(clean=True)
    bigger = PoolFile.open(PoolSpec(path=spec.path, size=2 * SIZE, recreate=True))
    assert bigger.size == 2 * SIZE
    bigger.close(clean=True)


def test_recreating_leaves_a_mapping_of_the_old_pool_readable(spec: PoolSpec) -> None:
    pool = PoolFile.open(spec)
    pool.bytes[MiB : MiB + 3] = b"old"
    fd = pool.open_readonly()
    pool.close(clean=True)
    with mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        PoolFile.open(PoolSpec(path=spec.path, size=SIZE, recreate=True)).close(clean=True)
        assert mapped[MiB : MiB + 3] == b"old"
        assert mapped[SIZE - 1] == 0
    os.close(fd)


# --- too large ---
def test_a_pool_larger_than_its_filesystem_names_both_sizes_and_leaves_nothing(spec: PoolSpec) -> None:
    wanted = 1 << 50
    with pytest.raises(PoolTooLarge, match=rf"wants {wanted} bytes .* \d+ bytes .* are free.*pool\.size"):
        PoolFile.open(PoolSpec(path=spec.path, size=wanted))
    assert not os.path.exists(spec.file_path)


def test_a_pool_larger_than_a_small_tmpfs_is_refused_before_anything_is_allocated(small_tmpfs: Path) -> None:
    with pytest.raises(PoolTooLarge, match=f"wants {SIZE} bytes"):
        PoolFile.open(file_spec(small_tmpfs / "pool"))
    assert list(small_tmpfs.iterdir()) == []


def test_a_pool_past_this_processs_limit_on_files_is_refused_with_that_limit(spec: PoolSpec) -> None:
    with file_size_limit(1 << 20), pytest.raises(PoolTooLarge, match=r"limit on file sizes, 1048576 bytes .*LimitFSIZE"):
        PoolFile.open(spec)
    assert not os.path.exists(spec.file_path)
    PoolFile.open(spec).close(clean=True)


def test_space_that_vanishes_during_creation_is_refused_and_given_back(small_tmpfs: Path) -> None:
    other = small_tmpfs / "other"

    def somebody_fills_the_filesystem(_done: int, _total: int) -> None:
        other.write_bytes(bytes(4 * MiB))

    with pytest.raises(PoolTooLarge):
        PoolFile.open(file_spec(small_tmpfs / "pool", 6 * MiB), somebody_fills_the_filesystem)
    assert list(small_tmpfs.iterdir()) == [other]
    prepared = small_tmpfs / "prepared"
    prepared.touch()
    with pytest.raises(PoolTooLarge):
        PoolFile.open(file_spec(prepared, 6 * MiB))
    assert prepared.stat().st_size == 0


def test_a_creation_killed_half_way_is_resumed(spec: PoolSpec) -> None:
    code = (
        "import os, sys; from maru_sidecar.pool import PoolFile; from maru_sidecar.pool_spec import PoolSpec;"
        "PoolFile.open(PoolSpec(path=sys.argv[1], size=int(sys.argv[2])), lambda *_: os.kill(os.getpid(), 9))"
    )
    died = subprocess.run([sys.executable, "-c", code, spec.path, str(SIZE)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert 0 < os.stat(spec.file_path).st_size < SIZE
    pool = PoolFile.open(spec)
    assert os.stat(spec.file_path).st_blocks * 512 >= SIZE
    pool.close(clean=True)


# --- reboot ---
def test_after_a_reboot_contents_are_suspect_unless_the_stop_was_clean(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    spec = file_spec(path)
    PoolFile.open(spec).close(clean=True)
    rewrite_header(str(path), boot=b"another boot id!")
    pool = PoolFile.open(spec)
    assert not pool.suspect
    assert header_of(str(path))[9] == 0  # in use: no longer clean
    pool.close(clean=False)

    same_boot = PoolFile.open(spec)
    assert not same_boot.suspect
    same_boot.close(clean=False)

    rewrite_header(str(path), boot=b"another boot id!")
    for _ in range(2):  # dying before the contents are checked does not make them trusted
        pool = PoolFile.open(spec)
        assert pool.suspect
        pool.close(clean=True)
    pool = PoolFile.open(spec)
    pool.contents_checked()
    pool.close(clean=False)
    trusted = PoolFile.open(spec)
    assert not trusted.suspect
    trusted.close(clean=True)


# --- placement ---
def test_a_numa_node_that_does_not_exist_is_a_named_warning_not_a_failure(spec: PoolSpec) -> None:
    pool = PoolFile.open(PoolSpec(path=spec.path, size=SIZE, numa_node=1000))
    assert any(w.startswith("numa_refused: node 1000") for w in pool.warnings)
    pool.close(clean=True)


def test_numa_node_zero_is_obeyed_without_a_warning(spec: PoolSpec) -> None:
    pool = PoolFile.open(PoolSpec(path=spec.path, size=SIZE, numa_node=0))
    assert not any(w.startswith("numa") for w in pool.warnings)
    pool.close(clean=True)


def test_a_header_is_readable_by_the_written_format(spec: PoolSpec) -> None:
    pool = PoolFile.open(spec)
    raw = Path(spec.file_path).read_bytes()[: F.HEADER_BYTES]
    assert struct.unpack_from("<Q", raw)[0] == F.POOL_MAGIC
    assert F.crc_matches(raw, F.POOL_HEADER.size)
    pool.close(clean=True)


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "huge"
    mount.mkdir()
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if not free.exists() or int(free.read_text()) < 8:
        pytest.skip("needs 8 free huge pages (sysctl vm.nr_hugepages)")
    done = subprocess.run(["mount", "-t", "hugetlbfs", "maru-test", mount], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a hugetlbfs needs root")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_pool_on_hugetlbfs_has_huge_regions_and_survives_reopening(hugetlbfs: Path) -> None:
    spec = file_spec(hugetlbfs / "pool")
    pool = PoolFile.open(spec)
    assert (pool.region_bytes, pool.n_regions, pool.warnings) == (2 * MiB, 8, ())
    pool.bytes[SIZE - 4 :] = b"kept"
    pool.close(clean=True)
    again = PoolFile.open(spec)
    assert (again.uuid, again.epoch) == (pool.uuid, 2)
    assert bytes(again.bytes[SIZE - 4 :]) == b"kept"
    again.close(clean=True)
    with pytest.raises(PoolTooLarge, match="wants"):
        PoolFile.open(file_spec(hugetlbfs / "more", 1 << 40))
    os.unlink(hugetlbfs / "pool")
    assert list(hugetlbfs.iterdir()) == []
