"""`maru-sidecar doctor` on this machine, and on copies of files of machines that are not at hand."""

from __future__ import annotations

import grp
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from maru_shm import layout as L
from maru_shm import segment as S
from maru_sidecar import doctor as D
from maru_sidecar import pool_admin, stale
from maru_sidecar.config import load_config
from maru_sidecar.doctor import Finding, Host, Verdict
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec

GIB = 1 << 30
INSTANCE = f"{os.getpid() ^ 0xD0C7_0000:08x}"


def host(tmp_path: Path, **changes: object) -> Host:
    fields: dict[str, object] = {
        "pool_path": f"/dev/shm/maru-doctor-{os.getpid()}",
        "pool_bytes": 2 << 20,
        "socket_path": str(tmp_path / "control.sock"),
        **changes,
    }
    return Host(**fields)  # type: ignore[arg-type]


def the_one(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def elsewhere(root: Path, files: dict[str, str]) -> str:
    for path, text in files.items():
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (root / path.lstrip("/")).write_text(text)
    return str(root)


def test_every_check_finds_something_and_whatever_is_not_fine_has_a_remedy(tmp_path: Path) -> None:
    findings = D.examine(host(tmp_path))
    assert len({f.check for f in findings}) >= len(D.CHECKS)
    assert [f for f in findings if f.verdict is not Verdict.OK and not f.remedy] == []


# --- memory -----------------------------------------------------------------------------------------------------------------
def test_a_pool_larger_than_its_filesystem_is_bad_with_both_sizes(tmp_path: Path) -> None:
    finding = next(D.check_pool_space(host(tmp_path, pool_bytes=1 << 60)))
    assert finding.verdict is Verdict.BAD
    assert "the pool wants 1048576.0 TiB" in finding.what
    assert finding.remedy.startswith("mount -o remount,size=")


def test_what_an_existing_pool_already_holds_counts(tmp_path: Path) -> None:
    fs = os.statvfs("/dev/shm")
    pool = Path(f"/dev/shm/maru-doctor-held-{os.getpid()}")
    with pool.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 << 20)
    try:
        free = fs.f_frsize * fs.f_bavail
        wanted = host(tmp_path, pool_path=str(pool), pool_bytes=8 << 20, pool_backend="file")
        finding = next(D.check_pool_space(wanted))
        assert (finding.verdict, "holds 8.0 MiB" in finding.what) == (Verdict.OK, True)
        larger = host(tmp_path, pool_path=str(pool), pool_bytes=free + GIB, pool_backend="file")
        assert next(D.check_pool_space(larger)).verdict is Verdict.BAD
    finally:
        pool.unlink()


def bad(findings: Iterator[Finding]) -> list[str]:
    return [f"{f.what}; {f.remedy}" for f in findings if f.verdict is Verdict.BAD]


def test_a_shared_pool_that_nobody_initialised_is_bad_with_the_command(tmp_path: Path) -> None:
    path = str(tmp_path / "shared")
    here = host(tmp_path, pool_path=path, pool=PoolSpec(backend="file", path=path, size=4 << 30, shared=True))
    [what] = bad(D.check_pool_contents(here))
    assert what.endswith(f"initialise it first: maru-sidecar pool init {path} --size SIZE")
    pool_admin.initialise(path, 4 << 20, 1 << 20)
    finding = the_one(D.check_pool_contents(here))
    assert (finding.verdict, finding.what) == (Verdict.OK, f"{path} is a pool (shared), 4.0 MiB in 3 regions of 1.0 MiB")
    assert list(D.check_pool_space(here)) == []  # pool.size is not used
    assert D.pool_bytes(here) == 4 << 20
    alone = host(tmp_path, pool_path=path)
    assert "is shared; set pool.shared = true" in bad(D.check_pool_contents(alone))[0]


def test_a_pool_that_run_would_refuse_is_bad(tmp_path: Path) -> None:
    path = str(tmp_path / "own")
    own = PoolSpec(backend="file", path=path, size=2 << 20, region_size=1 << 20)
    PoolFile.open(own).close(clean=True)
    finding = the_one(D.check_pool_contents(host(tmp_path, pool_path=path, pool=own)))
    assert (finding.verdict, finding.what) == (Verdict.OK, f"{path} is a pool (own), 2.0 MiB in 1 regions of 1.0 MiB")
    larger = msgspec.structs.replace(own, size=4 << 20)
    assert "wanted are 4194304" in bad(D.check_pool_contents(host(tmp_path, pool_path=path, pool=larger)))[0]
    anew = msgspec.structs.replace(larger, recreate=True)
    assert bad(D.check_pool_contents(host(tmp_path, pool_path=path, pool=anew))) == []
    shared = msgspec.structs.replace(own, shared=True)
    assert "was not initialised for sharing" in bad(D.check_pool_contents(host(tmp_path, pool_path=path, pool=shared)))[0]
    Path(path).write_bytes(b"x" * 8192)
    assert "no maru pool" in bad(D.check_pool_contents(host(tmp_path, pool_path=path)))[0]
    assert "is a directory; name a file in it" in bad(D.check_pool_contents(host(tmp_path, pool_path=str(tmp_path))))[0].lower()
    assert list(D.check_pool_contents(host(tmp_path))) == []  # nothing is there yet


def test_a_pool_among_the_devices_is_bad_and_said_once() -> None:
    path = f"/dev/maru-doctor-{os.getpid()}"
    for spec in (PoolSpec(path=path, size=4 << 20), PoolSpec(backend="file", path=path, size=4 << 20, shared=True)):
        here = Host(path, 4 << 20, "/nonexistent", spec.backend, pool=spec)
        found = [*D.check_pool_space(here), *D.check_pool_file(here), *D.check_pool_contents(here)]
        assert [(f.check, f.verdict) for f in found] == [("pool", Verdict.BAD)]
        assert "no such device" in found[0].what


def test_the_mode_of_a_device_that_is_no_pool_is_left_alone() -> None:
    assert list(D.check_pool_file(Host("/dev/null", 4 << 20, "/nonexistent"))) == []


def test_a_pool_that_cannot_be_cut_into_regions_is_bad(tmp_path: Path) -> None:
    spec = PoolSpec(backend="file", path=str(tmp_path / "pool"), size=4 << 20, region_size=4 << 20)
    finding = the_one(D.check_pool_space(Host(spec.path, spec.size, "/nonexistent", "file", pool=spec)))
    assert (finding.verdict, "at least 2 are needed" in finding.remedy) == (Verdict.BAD, True)


def test_a_pool_removed_under_its_sidecar_is_bad_until_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    here = host(tmp_path, pool_path=str(path))
    pool = PoolFile.open(PoolSpec(backend="file", path=str(path), size=4 << 20))
    assert the_one(D.check_pool_file(here)).verdict is Verdict.OK
    path.unlink()
    finding = the_one(D.check_pool_file(here))
    assert (finding.verdict, "was removed under it" in finding.what) == (Verdict.BAD, True)
    pool.close(clean=False)
    assert the_one(D.check_pool_file(here)).what == f"{path} does not exist yet"


def test_a_missing_directory_is_bad(tmp_path: Path) -> None:
    finding = the_one(D.check_pool_space(host(tmp_path, pool_path=str(tmp_path / "no" / "pool"))))
    assert (finding.verdict, "No such file" in finding.what) == (Verdict.BAD, True)


def test_a_pool_larger_than_the_memory_left_is_bad_even_where_tmpfs_would_take_it(tmp_path: Path) -> None:
    root = elsewhere(tmp_path, {"/proc/meminfo": "MemTotal: 8192 kB\nMemAvailable:       512 kB\n"})
    findings = list(D.check_pool_space(host(tmp_path, root=root)))
    assert [(f.check, f.verdict) for f in findings] == [("pool space", Verdict.OK), ("memory", Verdict.BAD)]


ADVISE = "mount -o remount,huge=advise /dev/shm"
NO_THP = "allow THP for shmem in this kernel, or put the pool on hugetlbfs"


@pytest.mark.parametrize(
    ("mount", "shmem", "verdict", "remedy"),
    [
        ("tmpfs /dev/shm tmpfs rw,huge=always", "always within_size advise [never] deny force", Verdict.OK, ""),
        ("tmpfs /dev/shm tmpfs rw,huge=advise", "always within_size advise [never] deny force", Verdict.OK, ""),
        ("tmpfs /dev/shm tmpfs rw", "always within_size advise [never] deny force", Verdict.WARN, ADVISE),
        # the global switch is for memfds; a mounted tmpfs heeds only deny and force
        ("tmpfs /dev/shm tmpfs rw", "[always] within_size advise never deny force", Verdict.WARN, ADVISE),
        ("tmpfs /dev/shm tmpfs rw", "always within_size advise never deny [force]", Verdict.OK, ""),
        ("tmpfs /dev/shm tmpfs rw,huge=always", "always within_size advise never [deny] force", Verdict.WARN, NO_THP),
        ("tmpfs /dev/shm tmpfs rw,huge=always", "", Verdict.WARN, NO_THP),
        ("none /dev/shm hugetlbfs rw,pagesize=2M", "", Verdict.OK, ""),
    ],
)
def test_huge_pages_are_judged_by_mount_and_kernel(
    tmp_path: Path, mount: str, shmem: str, verdict: Verdict, remedy: str
) -> None:
    files = {"/proc/self/mounts": f"tmpfs / tmpfs rw 0 0\n{mount} 0 0\n"}
    if shmem:
        files["/sys/kernel/mm/transparent_hugepage/shmem_enabled"] = shmem + "\n"
    finding = next(D.check_huge_pages(host(tmp_path, root=elsewhere(tmp_path, files))))
    assert (finding.verdict, finding.remedy) == (verdict, remedy)


def test_several_numa_nodes_are_listed_with_their_gpus(tmp_path: Path) -> None:
    root = elsewhere(
        tmp_path,
        {
            "/sys/devices/system/node/node0/cpulist": "0",
            "/sys/devices/system/node/node1/cpulist": "1",
            "/proc/driver/nvidia/gpus/0000:c8:00.0/information": "Model: x",
            "/sys/bus/pci/devices/0000:c8:00.0/numa_node": "1\n",
        },
    )
    finding = the_one(D.check_numa(host(tmp_path, root=root)))
    assert (finding.verdict, finding.what) == (Verdict.WARN, "2 nodes: GPU 0000:c8:00.0 on node 1")


@pytest.mark.parametrize(("node", "verdict"), [(None, Verdict.OK), (0, Verdict.OK), (2, Verdict.OK), (1, Verdict.WARN)])
def test_a_node_that_is_not_there_is_warned_about(tmp_path: Path, node: int | None, verdict: Verdict) -> None:
    root = elsewhere(tmp_path, {f"/sys/devices/system/node/node{n}/cpulist": "0" for n in (0, 2)})
    here = host(tmp_path, root=root, pool=PoolSpec(path="x", size=1 << 20, numa_node=node))
    finding = the_one(D.check_node(here))
    assert (finding.verdict, bool(finding.remedy)) == (verdict, verdict is Verdict.WARN)
    assert the_one(D.check_numa(here)).verdict is (Verdict.WARN if node is None else Verdict.OK)


# --- kernel -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("release", "verdict"), [("5.10.0-28-amd64", Verdict.WARN), ("6.1.0", Verdict.OK), ("5.14", Verdict.OK)]
)
def test_an_old_kernel_is_named(tmp_path: Path, release: str, verdict: Verdict) -> None:
    root = elsewhere(tmp_path, {"/proc/sys/kernel/osrelease": release + "\n"})
    finding = the_one(D.check_kernel(host(tmp_path, root=root)))
    assert (finding.verdict, finding.what) == (verdict, f"Linux {release}")


@pytest.mark.parametrize(
    ("uid", "scope", "verdict"),
    [
        (998, None, Verdict.OK),
        (998, "0", Verdict.OK),
        (998, "1", Verdict.OK),
        (998, "2", Verdict.WARN),
        (0, "2", Verdict.OK),
        (0, "3", Verdict.WARN),
    ],
)
def test_ptrace_scope_is_judged_by_who_asks(tmp_path: Path, uid: int, scope: str | None, verdict: Verdict) -> None:
    root = elsewhere(tmp_path, {} if scope is None else {"/proc/sys/kernel/yama/ptrace_scope": scope})
    assert the_one(D.check_ptrace(host(tmp_path, root=root, uid=uid))).verdict is verdict


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from maru_sidecar import doctor as D
host = D.Host("/dev/shm/x", 1 << 30, "/nonexistent", uid=998)
for check in (D.check_memlock, D.check_descriptors):
    for finding in check(host):
        print(finding.verdict, finding.what)
"""


def test_tight_limits_are_seen_in_the_process_that_has_them() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "warn RLIMIT_MEMLOCK is 64.0 KiB, the pool 1.0 GiB: it may not be pinned for the GPU",
        "warn RLIMIT_NOFILE is 256 (hard 256)",
    ]


def test_root_is_not_bound_by_memlock(tmp_path: Path) -> None:
    assert the_one(D.check_memlock(host(tmp_path, uid=0))).verdict is Verdict.OK
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)  # the check reads the real limit


# --- files --------------------------------------------------------------------------------------------------------------------
def listening(path: str, mode: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    sock.listen()
    os.chmod(path, mode)
    return sock


def test_the_control_socket_is_tried(tmp_path: Path) -> None:
    here = host(tmp_path)
    assert "no sidecar runs there" in the_one(D.check_socket(here)).what
    with listening(here.socket_path, 0o660):
        assert the_one(D.check_socket(here)) == Finding("control socket", Verdict.OK, f"{here.socket_path} (mode 0660) answers")
        os.chmod(here.socket_path, 0o666)
        assert "every local user may attach" in the_one(D.check_socket(here)).what
        os.chmod(here.socket_path, 0o600)
    assert "nobody listens" in the_one(D.check_socket(here)).what
    os.unlink(here.socket_path)
    Path(here.socket_path).touch()
    finding = the_one(D.check_socket(here))
    assert (finding.verdict, finding.what) == (Verdict.BAD, f"{here.socket_path} is no socket")


def test_a_socket_in_a_directory_that_is_not_there_is_bad(tmp_path: Path) -> None:
    finding = the_one(D.check_socket_place(host(tmp_path, socket_path=str(tmp_path / "no" / "s.sock"))))
    assert (finding.verdict, finding.remedy) == (Verdict.BAD, f"create {tmp_path}/no, or set control.socket to another path")


def test_a_group_that_does_not_exist_is_bad(tmp_path: Path) -> None:
    mine = grp.getgrgid(os.getgid()).gr_name
    verdicts = {
        group: [(f.check, f.verdict) for f in D.check_socket_place(host(tmp_path, socket_group=group))]
        for group in ("", mine, "maru-nosuch")
    }
    place = ("socket place", Verdict.OK)
    assert verdicts == {
        "": [place],
        mine: [place, ("socket group", Verdict.OK)],
        "maru-nosuch": [place, ("socket group", Verdict.BAD)],
    }


def test_what_run_would_refuse_is_found_without_a_look_at_the_pool(tmp_path: Path) -> None:
    settings = {"control.socket": f"{tmp_path}/no/s.sock", "control.group": "maru-nosuch", "pool.numa_node": "777"}
    found = D.examine(Host.of(load_config(None, {}, settings)), D.SETTINGS)
    assert {f.check: f.verdict for f in found} == {
        "NUMA node": Verdict.WARN, "socket place": Verdict.BAD, "socket group": Verdict.BAD,
    }  # fmt: skip


def test_a_pool_every_user_can_read_is_warned_about(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    pool.touch()
    for mode, verdict in ((0o600, Verdict.OK), (0o640, Verdict.OK), (0o644, Verdict.WARN), (0o602, Verdict.WARN)):
        pool.chmod(mode)
        assert the_one(D.check_pool_file(host(tmp_path, pool_path=str(pool)))).verdict is verdict


@pytest.mark.parametrize(
    ("uid", "files", "verdict"),
    [
        (998, {"/run/systemd/system/x": ""}, Verdict.OK),
        (1000, {"/run/systemd/system/x": ""}, Verdict.WARN),
        (1000, {}, Verdict.OK),
        (1000, {"/run/systemd/system/x": "", "/etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, Verdict.WARN),
        (1000, {"/run/systemd/system/x": "", "/etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, Verdict.OK),
        (1000, {"/run/systemd/system/x": "", "/etc/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC = no\n"}, Verdict.OK),
    ],
)
def test_remove_ipc_concerns_ordinary_users_only(tmp_path: Path, uid: int, files: dict[str, str], verdict: Verdict) -> None:
    root = elsewhere(tmp_path, files)
    assert the_one(D.check_remove_ipc(host(tmp_path, root=root, uid=uid))).verdict is verdict


# --- segments -----------------------------------------------------------------------------------------------------------------
def dead_process() -> tuple[int, int]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = S.process_start_time(child.pid)
    child.communicate(b"\n")
    return child.pid, start


@pytest.fixture
def make_segment() -> Iterator[Callable[..., S.Segment]]:
    made: list[S.Segment] = []

    gone, _ = dead_process()

    def make(session: int, pid: int, start: int, *, beat_age_s: float = 3600.0, client: int = gone) -> S.Segment:
        shape = L.SegmentShape.for_limits(2, 2, 2)
        info = S.SegmentInfo(0x77, session, shape, pid, client, start, time.time_ns(), INSTANCE, L.Role.WORKER)
        segment = S.create(info)
        segment.words[L.WORD_SIDECAR_BEAT] = max(0, time.monotonic_ns() - int(beat_age_s * 1e9))
        made.append(segment)
        return segment

    yield make
    for segment in made:
        S.unlink(segment.info.name)
        segment.close()


def mine() -> list[str]:
    return [name for name, *_ in S.list_names(INSTANCE)]


def test_fix_unlinks_the_segments_of_dead_pairs_and_only_those(make_segment: Callable[..., S.Segment]) -> None:
    own, (pid, start) = S.process_start_time(os.getpid()), dead_process()
    live = make_segment(1, os.getpid(), own).info.name
    dead = make_segment(2, pid, start).info.name
    recycled = make_segment(3, os.getpid(), own - 1).info.name  # the pid belongs to another process now
    awaited = make_segment(4, pid, start, client=os.getpid()).info.name  # the next sidecar reads its leases
    corrupt = make_segment(5, pid, start)
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    unreaped = make_segment(6, zombie.pid, S.process_start_time(zombie.pid), client=zombie.pid).info.name
    corrupt.bytes[L.STATIC_OFFSET + 40] ^= 0xFF
    foreign = Path(f"/dev/shm/maru.notours-{os.getpid()}")
    foreign.touch()
    try:
        removed = stale.remove_stale(INSTANCE)
        assert removed == [dead, recycled, unreaped]
        assert mine() == [live, awaited, corrupt.info.name]
        assert foreign.exists()
    finally:
        foreign.unlink()
        zombie.wait()


def test_a_sidecar_in_another_pid_namespace_is_known_by_its_beat(make_segment: Callable[..., S.Segment]) -> None:
    segment = make_segment(6, *dead_process(), beat_age_s=0.0)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            segment.words[L.WORD_SIDECAR_BEAT] = time.monotonic_ns()

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        assert dict(stale.survey_segments(INSTANCE))[segment.info.name] is stale.Liveness.ELSEWHERE
        assert segment.info.name not in stale.remove_stale(INSTANCE)
    finally:
        stop.set()
        beating.join()


def test_a_sidecar_that_died_just_now_is_waited_for(
    make_segment: Callable[..., S.Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale, "BEAT_LIMIT_S", 0.3)
    segment = make_segment(7, *dead_process(), beat_age_s=0.0)
    assert segment.info.name in stale.remove_stale(INSTANCE)


# --- the command ------------------------------------------------------------------------------------------------------------
def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "maru_sidecar", "doctor", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_exits_1_if_anything_is_bad_and_says_what(tmp_path: Path) -> None:
    where = ("--pool-path", f"/dev/shm/maru-doctor-{os.getpid()}", "--socket", str(tmp_path / "s.sock"))
    good = doctor("--pool-size", "2MiB", *where, "--format", "json")
    bad = doctor("--pool-size", "9999TiB", *where, "--format", "json")
    assert (good.returncode, bad.returncode) == (0, 1)
    assert [f for f in json.loads(good.stdout) if f["verdict"] == "bad"] == []
    verdicts = {f["check"]: f["verdict"] for f in json.loads(bad.stdout)}
    assert verdicts["pool space"] == "bad"
    assert "pool space" in doctor("--pool-size", "2MiB", *where).stdout


def test_a_shared_pool_s_configuration_is_examined_with_its_server(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    from tests.server.servers import ServerProcess

    pool, config, token = tmp_path / "shared", tmp_path / "s.toml", tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)

    def findings(endpoint: str, settings: str = "") -> dict[str, tuple[str, str]]:
        config.write_text(
            f"[pool]\nbackend = 'file'\npath = '{pool}'\nshared = true\n[control]\nsocket = '{tmp_path}/s.sock'\n"
            f"[server]\nendpoint = '{endpoint}'\n{settings}"
        )
        done = doctor("--config", str(config), "--format", "json")
        return {f["check"]: (f["verdict"], f["what"]) for f in json.loads(done.stdout)}

    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    down = findings(f"tcp://127.0.0.1:{port}")
    assert (down["pool"][0], down["metadata server"][0]) == ("bad", "bad")
    assert f"127.0.0.1:{port}" in down["metadata server"][1]
    pool_admin.initialise(str(pool), 4 << 20, 1 << 20)
    server = ServerProcess(token_file=token)
    try:
        up = findings(server.endpoint, f"token_file = '{token}'\n")
        assert (up["pool"][0], up["metadata server"]) == ("ok", ("ok", f"{server.endpoint} answers"))
        assert "pool space" not in up
        assert findings(server.endpoint)["metadata server"][0] == "bad"  # without the token
        assert findings(server.endpoint, f"token_file = '{tmp_path}/absent'\n")["metadata server"][0] == "bad"
    finally:
        server.stop()
