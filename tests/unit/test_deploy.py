"""The container examples against the program: configuration, ports, paths and time limits agree."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from maru_shm.http import parse_address
from maru_sidecar.config import Config, load_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFEST = (DEPLOY / "daemonset.yaml").read_text()


def value(key: str) -> str:
    """The first value of a key in the manifest."""
    found = re.search(rf"\b{re.escape(key)}: ?\{{?(.+?)\}}?$", MANIFEST, re.MULTILINE)
    assert found, key
    return found[1].strip()


def config(tmp_path: Path) -> Config:
    block = re.search(r"sidecar\.toml: \|\n((?:    .*\n)+)", MANIFEST)
    assert block
    path = tmp_path / "sidecar.toml"
    path.write_text(textwrap.dedent(block[1]))
    return load_config(str(path), environ={})


def test_the_embedded_configuration_is_accepted_and_its_port_exposed(tmp_path: Path) -> None:
    host, port = parse_address(config(tmp_path).http.address)
    assert host == "0.0.0.0"  # the kubelet probes the pod's address
    assert f"containerPort: {port}" in MANIFEST


def test_the_pod_is_given_longer_than_the_drain_takes_and_more_memory_than_the_pool(tmp_path: Path) -> None:
    loaded = config(tmp_path)
    assert int(value("terminationGracePeriodSeconds")) > loaded.daemon.drain_timeout_s
    limits = [int(n) << 30 for n in re.findall(r"memory: (\d+)Gi", MANIFEST)]
    assert limits
    assert min(limits) > loaded.pool.size


def test_shared_memory_socket_and_namespaces_are_the_hosts(tmp_path: Path) -> None:
    loaded = config(tmp_path)
    for path in (str(Path(loaded.pool.path).parent), str(Path(loaded.control.socket).parent)):
        assert f"hostPath: {{path: {path}," in MANIFEST
        assert f"mountPath: {path}}}" in MANIFEST
    assert value("hostIPC") == "true"
    assert value("hostPID") == "true"


def test_image_and_manifest_agree_on_the_user_and_the_probes_on_paths_that_exist() -> None:
    containerfile = (DEPLOY / "Containerfile").read_text()
    uid = re.search(r"--uid (\d+)", containerfile)
    assert uid
    assert f"runAsUser: {uid[1]}, runAsGroup: {uid[1]}" in MANIFEST
    assert set(re.findall(r"path: (/\w+z)\b", MANIFEST)) == {"/healthz", "/readyz"}
