"""A node in a process of its own, for tests that put it somewhere else (a network namespace). Prints its state as JSON lines.

Arguments: endpoint, token file, device (hex), namespace (hex), keys (hex).
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np

from maru_server.announce import Slabs
from maru_server.auth import read_token
from maru_server.lease import RegionLease
from maru_server.link_types import LinkConfig, LinkState
from maru_server.node import NodeLink
from maru_shm.errors import MaruError


def main() -> None:
    endpoint, token_file, device, namespace, raw = sys.argv[1:]
    keys = bytes.fromhex(raw)
    n = len(keys) // 16

    def source(_region: RegionLease) -> Iterator[Slabs]:
        yield Slabs(bytes.fromhex(namespace), 0, keys, np.arange(n, dtype=np.uint32), np.ones(n, np.uint64))

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    link = NodeLink(LinkConfig(endpoint, "far", token=read_token(token_file), timeout_ms=500), source)
    link.add_device(bytes.fromhex(device), 2, 4096)
    link.start()
    got: list[RegionLease] = []

    def on_granted(result: list[RegionLease] | MaruError) -> None:
        if isinstance(result, list):
            got.extend(result)
            for region in result:
                for slabs in source(region):
                    link.publish(region, slabs)

    asked = False
    while not ended.wait(0.05):
        if link.state is LinkState.READY and not asked:
            asked = True
            link.request_regions(1, on_granted)
        stats = link.stats()
        line = {"state": stats.state, "announced": stats.keys_announced, "writable": bool(got) and got[0].writable()}
        print(msgspec.json.encode(line).decode(), flush=True)
    link.close()


if __name__ == "__main__":
    main()
