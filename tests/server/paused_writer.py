"""A node that writes to a shared region and stops itself (SIGSTOP) at a named point: run by test_server_fencing.

Arguments: endpoint, device (hex), path of the file that plays the shared memory, stage. Says what happens on stdout, one word
a line.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading

from maru_server.errors import LeaseExpired
from maru_server.lease import RegionLease
from maru_server.link_types import LinkConfig
from maru_server.node import NodeLink
from maru_shm.errors import MaruError

REGION_BYTES = 4096


def say(word: str) -> None:
    print(word, flush=True)


def stop_here() -> None:
    say("stopping")
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    endpoint, device, path, stage = sys.argv[1:]
    link = NodeLink(LinkConfig(endpoint, "paused", timeout_ms=500), lambda _region: iter(()))
    link.add_device(bytes.fromhex(device), 2, REGION_BYTES)
    link.start()
    got: list[list[RegionLease] | MaruError] = []
    answered = threading.Event()

    def on_granted(result: list[RegionLease] | MaruError) -> None:
        got.append(result)
        answered.set()

    link.request_regions(1, on_granted)
    answered.wait(20)
    assert isinstance(got[0], list), got
    [region] = got[0]
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as memory:
        base = region.region * REGION_BYTES
        try:
            if stage == "before the write":
                stop_here()
            region.check(need_ms=50)
            memory[base + 64 : base + 80] = b"written by paused"[:16]
            if stage == "before the commit":
                stop_here()
            region.check()
            memory[base : base + 8] = region.token.to_bytes(8, "little")
            say("committed")
        except LeaseExpired:
            say("refused")
        while not region.revoked:  # the link comes back and hears that the region is another node's
            if region.writable():
                say("writable")
            threading.Event().wait(0.01)
        say("revoked")
    link.close()


if __name__ == "__main__":
    main()
