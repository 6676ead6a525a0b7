"""A shared pool: initialised by an operator, opened by many, written by those who were granted a region."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner
from tests.support.switched_lease import SwitchedLease

from maru_server.cluster_state import PIN_FLOOR_MS
from maru_shm import poolformat as F
from maru_shm.errors import ConfigError, PlatformUnsupported, PoolBusy, PoolError, PoolFull, PoolTooLarge, RegionNotHeld
from maru_shm.layout import LEASE_MARGIN_NS
from maru_sidecar import pool_admin
from maru_sidecar.cli import cli
from maru_sidecar.config import Config, Server, load_config
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.sharing import owner
from maru_sidecar.sharing.node import Node
from maru_sidecar.sharing.rights import GrantedRegions
from maru_sidecar.slab_handles import Presence, Reservation
from maru_sidecar.slab_reader import SlabReader

SIZE, REGION = 4 << 20, 1 << 20
NAMESPACE, KEY, ROOT = b"n" * 16, b"k" * 16, b"r" * 16
NBYTES = 8192


@pytest.fixture
def path() -> Iterator[str]:
    path = f"/dev/shm/maru-test-pool-{os.getpid()}-unit-shared"
    pool_admin.initialise(path, SIZE, REGION)
    yield path
    os.unlink(path)


@pytest.fixture
def pool(path: str) -> Iterator[PoolFile]:
    pool = PoolFile.open(spec(path))
    yield pool
    pool.close(clean=True)


def spec(path: str, **changes: object) -> PoolSpec:
    return msgspec.structs.replace(PoolSpec(backend="file", path=path, size=SIZE, shared=True), **changes)  # type: ignore[arg-type]


def reserve(directory: Directory, key: bytes = KEY) -> Reservation:
    got = directory.reserve(NAMESPACE, key, parent=ROOT, rank=0, world=1, depth=0, tokens=64, nbytes=NBYTES)
    assert isinstance(got, Reservation)
    return got


# --- initialising ---------------------------------------------------------------------------------------------------------
def test_a_pool_is_made_of_a_new_or_empty_file_only(path: str, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="holds 4194304 bytes already"):
        pool_admin.initialise(path, SIZE)
    somebodys = tmp_path / "somebodys"
    somebodys.write_bytes(b"\0" * 4096)
    with pytest.raises(PoolError, match="holds 4096 bytes already"):
        pool_admin.initialise(str(somebodys), SIZE)
    assert somebodys.read_bytes() == b"\0" * 4096
    empty = tmp_path / "empty"
    empty.touch()
    assert pool_admin.initialise(str(empty), SIZE, REGION).n_regions == 4


def test_opening_a_shared_pool_writes_nothing(path: str) -> None:
    before = Path(path).read_bytes()
    PoolFile.open(spec(path)).close(clean=True)
    assert Path(path).read_bytes() == before


def test_a_file_that_nobody_initialised_is_not_opened(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    for attempt in (lambda: PoolFile.open(spec(str(absent))), lambda: pool_admin.clear(str(absent))):
        with pytest.raises(PoolError, match=f"initialise it first: maru-sidecar pool init {absent} --size SIZE"):
            attempt()
    assert not absent.exists()
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"x" * 8192)
    with pytest.raises(PoolError, match="no maru pool"):
        PoolFile.open(spec(str(foreign)))
    assert foreign.read_bytes() == b"x" * 8192


def test_a_shared_pool_and_a_pool_of_ones_own_are_not_mistaken_for_each_other(path: str, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="is shared"):
        PoolFile.open(spec(path, shared=False))
    own = str(tmp_path / "own")
    PoolFile.open(PoolSpec(backend="file", path=own, size=SIZE)).close(clean=True)
    with pytest.raises(PoolError, match="not initialised for sharing"):
        PoolFile.open(spec(own))


def test_several_open_it_at_once_under_different_node_names(path: str, pool: PoolFile) -> None:
    other = PoolFile.open(spec(path))
    pool.lock_node("a")
    other.lock_node("b")
    with pytest.raises(PoolBusy, match="node 'a'"):
        other.lock_node("a")
    other.close(clean=True)


def test_a_size_that_does_not_fit_is_named_as_it_was_given(tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli, ["pool", "init", str(tmp_path / "huge"), "--size", "9000TiB"])
    assert isinstance(refused.exception, PoolTooLarge)
    assert "; lower --size" in str(refused.exception)
    with pytest.raises(PoolTooLarge, match=r"; lower pool\.size"):
        PoolFile.open(PoolSpec(backend="file", path=str(tmp_path / "huge"), size=9 << 50))


def test_a_pool_in_use_is_not_cleared_and_all_who_use_it_are_named(path: str, pool: PoolFile) -> None:
    code = (
        "from maru_sidecar.pool import PoolFile; from maru_sidecar.pool_spec import PoolSpec; "
        f"pool = PoolFile.open(PoolSpec(backend='file', path={path!r}, size=1, shared=True))"
    )
    words = [sys.executable, "-c", f"{code}; print('open', flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        both = ", ".join(map(str, sorted((os.getpid(), other.pid))))
        with pytest.raises(PoolBusy, match=f"held by processes {both}; stop them"):
            pool_admin.clear(path)
        other.communicate("\n")
    asked = CliRunner().invoke(cli, ["pool", "clear", path])
    assert isinstance(asked.exception, PoolBusy)
    assert f"held by process {os.getpid()}; stop it" in str(asked.exception)
    assert "Forget everything" not in asked.output  # there is nothing to decide yet


def test_coherence_by_flushing_is_refused(path: str) -> None:
    with pytest.raises(PlatformUnsupported, match="native helper"):
        PoolFile.open(spec(path, coherence="flush"))


def test_the_commands_init_inspect_and_clear(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    run = CliRunner()
    made = run.invoke(cli, ["pool", "init", path, "--size", "4MiB", "--region-size", "1MiB", "--format", "json"])
    assert made.exit_code == 0, made.output
    first = msgspec.json.decode(made.output)
    assert (first["regions"], first["region_bytes"]) == (3, REGION)
    shown = msgspec.json.decode(run.invoke(cli, ["pool", "inspect", path, "--format", "json"]).output)
    assert shown["pool"]["uuid"] == first["uuid"]
    assert shown["pool"]["shared"]
    assert "no region is in use" in run.invoke(cli, ["pool", "inspect", path]).output
    assert run.invoke(cli, ["pool", "clear", path], input="n\n").exit_code != 0
    cleared = msgspec.json.decode(run.invoke(cli, ["pool", "clear", path, "--yes", "--format", "json"]).output)
    assert cleared["uuid"] != first["uuid"]


# --- regions --------------------------------------------------------------------------------------------------------------
def test_without_a_granted_region_nothing_is_stored(pool: PoolFile) -> None:
    directory = Directory(pool, rights=GrantedRegions(0), mine=())
    with pytest.raises(PoolFull):
        reserve(directory)


def test_only_granted_regions_are_written(path: str, pool: PoolFile) -> None:
    rights = GrantedRegions(0)
    directory = Directory(pool, rights=rights, mine=())
    rights.add(2, SwitchedLease())
    assert directory.shared.add(2)
    before = Path(path).read_bytes()
    reservation = reserve(directory)
    pool.bytes[reservation.offset : reservation.offset + NBYTES] = b"d" * NBYTES
    reservation.commit(None)
    after = Path(path).read_bytes()
    assert before[: 2 * REGION] == after[: 2 * REGION]
    assert before[3 * REGION :] == after[3 * REGION :]
    assert directory.lookup(NAMESPACE, KEY, world=1) == 1


class Growing:
    """``PoolEvents`` of a node that may have asked for a region."""

    def __init__(self) -> None:
        self.asked = True

    def committed(self, namespace: bytes, key: bytes, rank: int, *, region: int, number: int, generation: int) -> None: ...

    def removed(self, namespace: bytes, key: bytes, ranks: list[int]) -> None: ...

    def low(self, stride: int) -> None: ...

    def growing(self) -> bool:
        return self.asked


def test_a_store_waits_for_a_region_that_is_on_its_way_rather_than_evict(pool: PoolFile) -> None:
    rights, events = GrantedRegions(0), Growing()
    directory = Directory(pool, rights=rights, mine=(), events=events)
    rights.add(1, SwitchedLease())
    directory.shared.add(1)
    stored = 0
    while not isinstance(got := take(directory, stored), Presence):
        got.commit(None)
        stored += 1
    assert got is Presence.PENDING
    rights.add(2, SwitchedLease())
    directory.shared.add(2)
    reserve(directory, stored.to_bytes(16, "big")).commit(None)
    assert all(directory.lookup(NAMESPACE, i.to_bytes(16, "big"), world=1) for i in range(stored + 1)), "none was evicted"
    events.asked = False  # the server has no more
    for i in range(stored + 1, 2 * stored + 1):
        reserve(directory, i.to_bytes(16, "big")).commit(None)
    assert directory.admin.stats()["evicted_total"]


def take(directory: Directory, number: int) -> Reservation | Presence:
    key = number.to_bytes(16, "big")
    return directory.reserve(NAMESPACE, key, parent=ROOT, rank=0, world=1, depth=0, tokens=64, nbytes=NBYTES)


def test_a_slab_whose_region_was_lost_before_the_commit_is_never_published(pool: PoolFile) -> None:
    rights, lease = GrantedRegions(0), SwitchedLease()
    rights.add(1, lease)
    directory = Directory(pool, rights=rights, mine=())
    directory.shared.add(1)
    reservation = reserve(directory)
    region = bytes(pool.bytes[REGION : 2 * REGION])
    lease.held = False
    with pytest.raises(RegionNotHeld):
        reservation.commit(None)
    assert bytes(pool.bytes[REGION : 2 * REGION]) == region
    assert directory.lookup(NAMESPACE, KEY, world=1) == 0


def test_a_lost_region_takes_its_chunks_along_and_is_not_written(pool: PoolFile) -> None:
    rights, lease = GrantedRegions(0), SwitchedLease()
    rights.add(1, lease)
    directory = Directory(pool, rights=rights, mine=())
    directory.shared.add(1)
    reserve(directory).commit(None)
    region = bytes(pool.bytes[REGION : 2 * REGION])
    lease.revoked = True
    assert directory.shared.lose(1) == 1
    assert bytes(pool.bytes[REGION : 2 * REGION]) == region
    assert directory.lookup(NAMESPACE, KEY, world=1) == 0
    assert directory.admin.stats()["regions"] == 0


def test_a_region_granted_again_starts_empty_with_higher_generations(pool: PoolFile) -> None:
    rights = GrantedRegions(0)
    rights.add(1, SwitchedLease())
    first = Directory(pool, rights=rights, mine=())
    first.shared.add(1)
    reserve(first).commit(None)
    [(_, _, _, number, generation)] = first.shared.committed_in(1)
    reader = SlabReader(pool)
    assert reader.locate(1, number, generation, F.slab_stride(NBYTES)) is not None
    second = Directory(pool, rights=rights, mine=())
    second.shared.add(1)
    assert reader.locate(1, number, generation, F.slab_stride(NBYTES)) is None
    assert second.lookup(NAMESPACE, KEY, world=1) == 0
    reserve(second).commit(None)
    [(_, _, _, again, later)] = second.shared.committed_in(1)
    assert (again, later > generation) == (number, True)


def test_a_restarted_node_finds_its_regions_and_reads_them_before_it_may_write(pool: PoolFile) -> None:
    rights, lease = GrantedRegions(0), SwitchedLease()
    rights.add(3, lease)
    directory = Directory(pool, rights=rights, mine=())
    directory.shared.add(3)
    owner.write(pool, 3, F.node_id("me"), 77)
    reserve(directory).commit(None)
    half_written = reserve(directory, b"w" * 16)
    assert half_written.offset
    [(region, record)] = owner.of_node(pool, F.node_id("me"))
    assert (region, record.token) == (3, 77)
    assert owner.of_node(pool, F.node_id("other")) == []
    before = bytes(pool.bytes)
    lease.held = False
    again = Directory(pool, rights=rights, mine=[region])
    report = again.rebuild()
    assert (report.kept, report.dropped_writing) == (1, 1)
    assert again.lookup(NAMESPACE, KEY, world=1) == 1
    assert bytes(pool.bytes) == before
    with pytest.raises(PoolFull):
        reserve(again, b"x" * 16)


def test_a_reader_takes_no_slab_for_another(pool: PoolFile) -> None:
    rights = GrantedRegions(0)
    rights.add(1, SwitchedLease())
    directory = Directory(pool, rights=rights, mine=())
    directory.shared.add(1)
    reserve(directory).commit(None)
    [(_, _, _, number, generation)] = directory.shared.committed_in(1)
    reader, stride = SlabReader(pool), F.slab_stride(NBYTES)
    ref = reader.locate(1, number, generation, stride)
    assert ref is not None
    assert reader.leading_sound([ref], NAMESPACE, KEY, rank=0, nbytes=NBYTES) == (1, [None])
    for namespace, key, rank, nbytes in (
        (b"m" * 16, KEY, 0, NBYTES), (NAMESPACE, b"j" * 16, 0, NBYTES), (NAMESPACE, KEY, 1, NBYTES), (NAMESPACE, KEY, 0, 4096),
    ):  # fmt: skip
        assert reader.leading_sound([ref], namespace, key, rank=rank, nbytes=nbytes).n == 0
    for place in ((0, number), (9, number), (1, 1 << 31), (2, number)):
        assert reader.locate(*place, generation, stride) is None
    assert reader.locate(1, number, generation, 2 * stride) is None
    assert reader.leading_unchanged([ref]) == 1
    directory.admin.clear()
    assert reader.leading_unchanged([ref]) == 0
    assert reader.leading_sound([ref], NAMESPACE, KEY, rank=0, nbytes=NBYTES).n == 0


# --- configuration --------------------------------------------------------------------------------------------------------
def test_a_shared_pool_and_a_server_are_configured_together() -> None:
    for flags in ({"pool.shared": "true"}, {"server.endpoint": "tcp://127.0.0.1:7420"}):
        with pytest.raises(ConfigError, match="go together"):
            load_config(environ={}, flags=flags)
    both = load_config(environ={}, flags={"pool.shared": "true", "server.endpoint": "tcp://127.0.0.1:7420"})
    assert both.pool.shared
    assert both.server.endpoint == "tcp://127.0.0.1:7420"


def test_the_shortest_pin_leaves_a_lease_that_an_engine_builds_upon() -> None:
    longest_wait_ms = 1000
    load_config(environ={}, flags={"server.lookup_wait_ms": str(longest_wait_ms)})
    with pytest.raises(ConfigError):
        load_config(environ={}, flags={"server.lookup_wait_ms": str(longest_wait_ms + 1)})
    assert longest_wait_ms + LEASE_MARGIN_NS / 1e6 <= PIN_FLOOR_MS


def test_nothing_of_the_server_is_imported_unless_it_is_configured() -> None:
    import subprocess
    import sys

    code = "import sys, maru_sidecar.daemon; print([m for m in sys.modules if m.startswith(('zmq', 'maru_server'))])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_missing_client_of_the_server_is_named_with_its_remedy(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "zmq.py").write_text("raise ImportError('not installed')\n")
    run = subprocess.run(
        [sys.executable, "-m", "maru_sidecar", "run", "--set", "pool.shared=true", "--set", "server.endpoint=tcp://127.0.0.1:1",
         "--socket", str(tmp_path / "s")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert "pip install '.[server]'" in run.stderr


def test_a_burst_that_uses_up_a_region_as_it_is_granted_waits_for_the_next(pool: PoolFile) -> None:
    """The region's first slab asks for nothing while the grant is under way; its last may be taken before anybody looks."""
    flushes: list[object] = []
    asked: list[Callable[[list[object]], None]] = []
    stock = SimpleNamespace(n_free=0)
    node = Node(Config(pool.spec, server=Server(endpoint="tcp://127.0.0.1:9")), pool, "0badcafe", flushes.append)
    try:
        node._directory = SimpleNamespace(shared=stock)  # type: ignore[assignment]
        node.link.request_regions = lambda n, granted, **_: asked.append(granted)  # type: ignore[method-assign,assignment]
        node.want_region(4096)
        node._grow()
        node.want_region(4096)
        asked[0]([])
        assert node.growing
        node._grow()
        assert len(asked) == 2
        assert node.growing
        stock.n_free = 9
        asked[1]([])
        node._grow()
        assert not node.growing
    finally:
        node.link.close()
