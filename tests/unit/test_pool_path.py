"""Where a pool may lie: what is no file, lies nowhere or is a stranger's is refused by name, with the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.pool_specs import SIZE, file_spec, shm_spec

from maru_shm.errors import PoolError
from maru_sidecar import pool_admin
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec


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


@pytest.mark.skipif(os.geteuid() != 0, reason="changing a file's owner needs root")
def test_a_pool_in_dev_shm_that_belongs_to_someone_else_is_not_trusted(spec: PoolSpec) -> None:
    PoolFile.open(spec).close(clean=True)
    os.chown(spec.file_path, 12345, 12345)
    with pytest.raises(PoolError, match="belongs to uid 12345"):
        PoolFile.open(spec)


def test_a_closed_descriptor_is_a_named_error() -> None:
    with pytest.raises(PoolError, match="descriptor"):
        PoolFile.from_fd(999_999, PoolSpec(path="x", size=SIZE))
