"""A node that was paused and wakes up late writes nothing into a region that went to another node."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paused_writer import REGION_BYTES
from servers import Node, ServerProcess, until


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("stage", ["before the write", "before the commit"])
def test_a_paused_node_that_wakes_up_late_refuses_to_write(memory_server: ServerProcess, tmp_path: Path, stage: str) -> None:
    device, shared = os.urandom(16), tmp_path / "shared"
    shared.write_bytes(bytes(2 * REGION_BYTES))
    writer = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("paused_writer.py")),
            memory_server.endpoint,
            device.hex(),
            str(shared),
            stage,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "stopping\n"
        until("the writer has stopped", lambda: process_state(writer.pid) == "T")
        heir = Node(memory_server.endpoint, "heir")
        [grant] = heir.alloc(device=device)  # waits for lease + grace + reap time
        with shared.open("r+b") as f, mmap.mmap(f.fileno(), 0) as memory:
            region = slice(grant.region * REGION_BYTES, (grant.region + 1) * REGION_BYTES)
            memory[region] = mine = grant.token.to_bytes(8, "little") + b"h" * (REGION_BYTES - 8)
            os.kill(writer.pid, signal.SIGCONT)
            assert writer.stdout.readline() == "refused\n"
            assert writer.stdout.readline() == "revoked\n"
            assert memory[region] == mine
        assert writer.wait(20) == 0
        heir.client.close()
    finally:
        if writer.poll() is None:
            writer.kill()
        writer.wait()
        writer.stdout.close()
