"""The units as systemd reads them: understood without a complaint, hardened, able to reach GPU, DAX and shared memory."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from maru_sidecar.config import load_config
from maru_sidecar.notify import CONTROL_FD
from maru_sidecar.output import ExitCode

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
SERVICE = "maru-sidecar.service"
SOCKET = "maru-sidecar.socket"
FDSTORE_VERSION = 254
MAX_EXPOSURE = 3.0  #: an unhardened unit has 9.6

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def keys(unit: str) -> dict[str, list[str]]:
    """Key → values of a unit file, all sections together."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / unit).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            found.setdefault(key, []).append(value)
    return found


def run(*command: str) -> str:
    """Everything a command prints; it must succeed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def systemd_version() -> int:
    found = re.match(r"systemd (\d+)", run("systemd-analyze", "--version"))
    assert found
    return int(found[1])


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """A copy of the units whose program exists; the drop-in where this systemd knows its key."""
    for name in (SERVICE, SOCKET):
        text = (SYSTEMD / name).read_text()
        (tmp_path / name).write_text(text.replace("/usr/bin/maru-sidecar", "/bin/true"))
    if systemd_version() >= FDSTORE_VERSION:
        shutil.copytree(SYSTEMD / f"{SERVICE}.d", tmp_path / f"{SERVICE}.d")
    return tmp_path


@needs_systemd
def test_systemd_understands_every_key(units: Path) -> None:
    # an unknown key is a complaint and exit status 0: any output fails
    assert run("systemd-analyze", "verify", str(units / SERVICE), str(units / SOCKET)) == ""


@needs_systemd
def test_an_unknown_key_would_be_noticed(units: Path) -> None:
    service = units / SERVICE
    service.write_text(service.read_text().replace("[Service]", "[Service]\nNoSuchKey=1"))
    assert "NoSuchKey" in run("systemd-analyze", "verify", str(service))


@needs_systemd
def test_the_service_is_hardened(units: Path) -> None:
    report = run("systemd-analyze", "security", "--offline=yes", "--no-pager", str(units / SERVICE))
    exposure = re.search(r"Overall exposure level for maru-sidecar\.service: ([\d.]+)", report)
    assert exposure, report
    assert float(exposure[1]) <= MAX_EXPOSURE


@pytest.mark.parametrize(
    "key",
    [
        "MemoryDenyWriteExecute", "PrivateDevices", "PrivateIPC", "PrivateNetwork", "PrivateUsers", "ProtectKernelTunables",
        "ProcSubset", "DynamicUser", "InaccessiblePaths", "TemporaryFileSystem", "RootDirectory", "RootImage", "IPAddressDeny",
    ],
)  # fmt: skip
def test_no_key_is_set_that_hides_gpu_dax_or_shared_memory(key: str) -> None:
    assert key not in keys(SERVICE)


def test_gpu_and_dax_devices_are_allowed_and_nothing_else() -> None:
    service = keys(SERVICE)
    assert service["DevicePolicy"] == ["closed"]
    assert set(service["DeviceAllow"]) == {
        "char-nvidia rw", "char-nvidia-frontend rw", "char-nvidiactl rw", "char-nvidia-uvm rw", "char-nvidia-caps rw",
        "/dev/nvidiactl rw", "/dev/nvidia-uvm rw", "char-dax rw",
    }  # fmt: skip


@needs_systemd
@pytest.mark.parametrize(
    "call",
    ["process_vm_readv", "process_vm_writev", "mbind", "set_mempolicy", "mlock", "memfd_create", "fallocate", "pidfd_open"],
)
def test_the_system_call_filter_leaves_what_the_daemon_lives_on(call: str) -> None:
    allowed, denied = set(), set()
    for value in keys(SERVICE)["SystemCallFilter"]:
        (denied if value.startswith("~") else allowed).update(value.removeprefix("~").split())
    assert call in closure(allowed)
    assert call not in closure(denied)


def closure(groups: set[str]) -> set[str]:
    """The system calls of some groups, as systemd defines them."""
    calls: set[str] = set()
    seen: set[str] = set()
    waiting = list(groups)
    while waiting:
        group = waiting.pop()
        if group in seen:
            continue
        seen.add(group)
        words = [
            w.strip() for w in run("systemd-analyze", "syscall-filter", group).splitlines() if not w.strip().startswith("#")
        ]
        calls.update(w for w in words if w and not w.startswith("@"))
        waiting += [w for w in words if w.startswith("@") and w != group]
    return calls


def test_the_unit_and_the_program_agree() -> None:
    service, sock = keys(SERVICE), keys(SOCKET)
    config = load_config(str(SYSTEMD / "sidecar.toml"), environ={})
    assert service["ExecStart"] == ["/usr/bin/maru-sidecar run --config /etc/maru/sidecar.toml"]
    assert sock["ListenSequentialPacket"] == [config.control.socket]
    assert sock["FileDescriptorName"] == [CONTROL_FD]
    assert int(sock["SocketMode"][0], 8) == config.control.mode
    assert config.daemon.drain_timeout_s < float(service["TimeoutStopSec"][0].removesuffix("s"))
    assert service["RestartPreventExitStatus"] == [f"{ExitCode.USAGE:d} {ExitCode.PLATFORM:d}"]
    assert service["LimitMEMLOCK"] == ["infinity"]  # the pool is pinned for the copy engine


def test_newer_keys_are_in_the_drop_in_only() -> None:
    assert keys(f"{SERVICE}.d/10-fdstore.conf") == {"FileDescriptorStorePreserve": ["yes"]}
    assert "FileDescriptorStorePreserve" not in keys(SERVICE)
    assert keys(SERVICE)["Type"] == ["notify"]


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can create files of another user")
def test_the_user_is_a_system_user_and_its_directories_are_made(tmp_path: Path) -> None:
    for kind in ("sysusers.d", "tmpfiles.d"):
        (tmp_path / "etc" / kind).mkdir(parents=True)
        shutil.copy(SYSTEMD / kind / "maru-sidecar.conf", tmp_path / "etc" / kind)
    run("systemd-sysusers", f"--root={tmp_path}")
    passwd = dict(line.split(":", 1) for line in (tmp_path / "etc" / "passwd").read_text().splitlines())
    uid = int(passwd["maru"].split(":")[1])
    assert 0 < uid <= 999
    run("systemd-tmpfiles", f"--root={tmp_path}", "--create", "maru-sidecar.conf")
    for path, owner in (("run/maru", uid), ("etc/maru", 0)):
        found = (tmp_path / path).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o750, owner)
