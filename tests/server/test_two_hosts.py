"""Server and node on two hosts (network namespaces joined by a veth pair), the link cut and healed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import ServerProcess, keys_of, until

_SERVER, _NODE = "10.213.0.1", "10.213.0.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class TwoHosts:
    def __init__(self) -> None:
        tag = os.urandom(3).hex()
        self.server, self.node = f"maru-s-{tag}", f"maru-n-{tag}"
        self._veth = (f"ms{tag}", f"mn{tag}")

    def up(self) -> None:
        for name in (self.server, self.node):
            ip("netns", "add", name)
        ip("link", "add", self._veth[0], "type", "veth", "peer", "name", self._veth[1])
        for name, veth, address in zip((self.server, self.node), self._veth, (_SERVER, _NODE), strict=True):
            ip("link", "set", veth, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", veth)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", veth, "up")

    def cut(self) -> None:
        ip("-n", self.node, "link", "set", self._veth[1], "down")

    def heal(self) -> None:
        ip("-n", self.node, "link", "set", self._veth[1], "up")

    def down(self) -> None:
        for name in (self.server, self.node):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if shutil.which("ip") is None:
        pytest.skip("no ip command (package iproute2)")
    hosts = TwoHosts()
    try:
        try:
            hosts.up()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"network namespaces are not permitted here: {e.stderr.decode().strip()}")
        yield hosts
    finally:
        hosts.down()


class FarNode:
    """The node's process; ``last`` is the newest state it printed."""

    def __init__(self, inside: tuple[str, ...], *arguments: str) -> None:
        script = str(Path(__file__).with_name("linked_node.py"))
        self.process = subprocess.Popen([*inside, sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True)
        self.last: dict[str, Any] = {"state": "", "announced": 0, "writable": False}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last = json.loads(line)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_cut_link_stops_the_node_and_a_healed_one_brings_its_chunks_back(hosts: TwoHosts, token_file: Path) -> None:
    at_server, at_node = ("ip", "netns", "exec", hosts.server), ("ip", "netns", "exec", hosts.node)
    device, namespace, keys = os.urandom(16), os.urandom(16), keys_of(20)

    def ask(*command: str) -> Any:
        line = [
            *at_server,
            sys.executable,
            "-m",
            "maru_server",
            *command,
            "--server",
            server.endpoint,
            "--token-file",
            str(token_file),
        ]
        return json.loads(subprocess.run([*line, "--format", "json"], check=True, capture_output=True, timeout=30).stdout)

    server = ServerProcess(
        listen=f"tcp://{_SERVER}:7420", token_file=token_file, extra=("--reap-ms", "600000"), inside=at_server
    )
    node = FarNode(at_node, server.endpoint, str(token_file), device.hex(), namespace.hex(), keys.hex())
    try:
        until("the far node has announced", lambda: node.last["announced"] == 20 and node.last["writable"])
        [before] = ask("regions")

        hosts.cut()
        until("the node stops by its own clock", lambda: not node.last["writable"])
        until("the server declares it dead", lambda: ask("nodes") == [])
        assert [(r["state"], r["keys"]) for r in ask("regions")] == [("orphaned", 20)]

        hosts.heal()
        until("the node writes again", lambda: node.last["writable"] and node.last["state"] == "ready")
        [after] = ask("regions")
        assert (after["region"], after["state"], after["node"], after["keys"]) == (before["region"], "granted", "far", 20)
        assert after["token"] > before["token"]
        assert len(ask("keys", "--namespace", namespace.hex())) == 20
    finally:
        node.stop()
        server.stop()
