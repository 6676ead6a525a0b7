"""Where a pool may lie: what is no file, lies nowhere or is a stranger's is refused by name, with the remedy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tests.support.pool_specs import SIZE, file_spec, shm_spec

from maru_shm.errors import PoolError
from maru_sidecar import pool_admin
from maru_sidecar.cli import cli
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_path import refuse_place
from maru_sidecar.pool_spec import PoolSpec

ABSENT = f"maru-absent-{os.getpid()}"


@pytest.fixture
def spec() -> Iterator[PoolSpec]:
    with shm_spec() as spec:
        yield spec


@pytest.mark.parametrize("what", ["directory", "symlink", "missing directory"])
def test_what_is_not_a_regular_file_is_a_named_error(tmp_path: Path, what: str) -> None:
    path = tmp_path / "pool"
    if what == "directory":
        path.mkdir()
    elif what == "symlink":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path = tmp_path / "absent" / "pool"
    with pytest.raises(PoolError):
        PoolFile.open(file_spec(path))
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_is_no_pool_and_the_remedy_names_a_file_in_it(tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path.parent))
    for attempt in (
        lambda: PoolFile.open(file_spec(tmp_path)),
        lambda: PoolFile.open(msgspec.structs.replace(file_spec(tmp_path), shared=True)),
        lambda: pool_admin.initialise(str(tmp_path), SIZE),
        lambda: pool_admin.clear(str(tmp_path)),
        lambda: pool_admin.inspect(str(tmp_path)),
    ):
        with pytest.raises(PoolError, match=f"Is a directory; name a file in it, e.g. {tmp_path}/maru-pool"):
            attempt()
    assert sorted(os.listdir(tmp_path.parent)) == before  # no lock beside it either
    absent = tmp_path / "absent" / "pool"
    with pytest.raises(PoolError, match=f"pool {absent}: No such file or directory; create the directory {absent.parent}"):
        PoolFile.open(file_spec(absent))


@pytest.fixture
def no_new_device() -> Iterator[None]:
    """Nothing is made in /dev itself."""
    yield
    assert [name for name in os.listdir("/dev") if name.startswith(ABSENT)] == []


@pytest.mark.parametrize(
    "path", [f"/dev/{ABSENT}", f"/dev/shm/../{ABSENT}", f"/dev/pts/{ABSENT}", f"/dev/{ABSENT}/pool", "/dev/pts"]
)
@pytest.mark.usefixtures("no_new_device")
def test_no_file_is_made_among_the_devices(path: str) -> None:
    whole = PoolSpec(backend="file", path=path, size=SIZE)
    for attempt in (
        lambda: PoolFile.open(whole),
        lambda: PoolFile.open(msgspec.structs.replace(whole, backend="shm")),
        lambda: PoolFile.open(msgspec.structs.replace(whole, backend="devdax")),
        lambda: PoolFile.open(msgspec.structs.replace(whole, shared=True)),
        lambda: pool_admin.initialise(path, SIZE),
        lambda: pool_admin.clear(path),
        lambda: pool_admin.inspect(path),
    ):
        with pytest.raises(PoolError, match=r"name a DAX device .*, or a file in /dev/shm") as caught:
            attempt()
        assert ("no such device" in str(caught.value)) == (path != "/dev/pts")


@pytest.mark.skipif(os.geteuid() != 0, reason="making a file or a device in /dev needs root")
@pytest.mark.usefixtures("no_new_device")
def test_what_lies_in_dev_by_mistake_or_is_a_disk_is_named() -> None:
    path = f"/dev/{ABSENT}"
    for make, what in (
        (["touch", path], "is a file among the devices in /dev; remove it"),
        (["mknod", path, "b", "7", "255"], "is a block device; name a DAX device"),
    ):
        subprocess.run(make, check=True)
        try:
            for attempt in (lambda: PoolFile.open(file_spec(Path(path))), lambda: pool_admin.initialise(path, SIZE)):
                with pytest.raises(PoolError, match=f"pool {path} {what}"):
                    attempt()
            assert not os.path.exists(f"{path}.lock")
        finally:
            os.unlink(path)


@pytest.mark.parametrize("kind", ["tmpfs", "hugetlbfs"])
@pytest.mark.usefixtures("no_new_device")
def test_a_filesystem_for_data_mounted_below_dev_takes_pools(kind: str) -> None:
    mount = f"/dev/{ABSENT}"
    try:
        os.mkdir(mount)
    except OSError:
        pytest.skip("making a directory in /dev needs root")
    try:
        if subprocess.run(["mount", "-t", kind, "maru-test", mount], capture_output=True, check=False).returncode:
            pytest.skip(f"{kind} cannot be mounted")
        try:
            refuse_place(f"{mount}/pool")
            if kind == "tmpfs":
                PoolFile.open(file_spec(Path(mount) / "pool")).close(clean=True)
        finally:
            subprocess.run(["umount", mount], check=True)
    finally:
        os.rmdir(mount)


def test_init_reads_a_mode_as_the_configuration_does(tmp_path: Path) -> None:
    for i, text in enumerate(("640", "0640", "0o640")):
        path = tmp_path / f"pool{i}"
        done = CliRunner().invoke(cli, ["pool", "init", str(path), "--size", "4MiB", "--mode", text], catch_exceptions=False)
        assert (done.exit_code, path.stat().st_mode & 0o7777) == (0, 0o640)
    for text in ("99999", "7777", "-1", "rw"):
        done = CliRunner().invoke(cli, ["pool", "init", str(tmp_path / "no"), "--size", "4MiB", f"--mode={text}"])
        assert (done.exit_code, "expected octal permission bits up to 777" in done.output) == (2, True)
    assert not (tmp_path / "no").exists()


def test_a_pool_may_be_named_from_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pool_admin.initialise("here", SIZE)
    assert (tmp_path / "here").stat().st_size == SIZE


@pytest.mark.skipif(os.geteuid() != 0, reason="changing a file's owner needs root")
def test_a_pool_in_dev_shm_that_belongs_to_someone_else_is_not_trusted(spec: PoolSpec) -> None:
    PoolFile.open(spec).close(clean=True)
    os.chown(spec.file_path, 12345, 12345)
    with pytest.raises(PoolError, match="belongs to uid 12345"):
        PoolFile.open(spec)


def test_a_closed_descriptor_is_a_named_error() -> None:
    with pytest.raises(PoolError, match="descriptor"):
        PoolFile.from_fd(999_999, PoolSpec(path="x", size=SIZE))
