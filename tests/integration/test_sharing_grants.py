"""What a sidecar does with a region that no server should have granted: nothing, and it says so."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.server.servers import ServerProcess, free_port
from tests.support.bent_server import bend
from tests.support.client import blocks_table, prompt_keys
from tests.support.shared_sidecars import SharedSidecar, shared_pool, start_engine, start_server, start_sidecar
from tests.support.waiting import until

from maru_server.client import DirectoryClient
from maru_sidecar.config import Config, Server
from maru_sidecar.directory import Directory
from maru_sidecar.pool import PoolFile
from maru_sidecar.pool_spec import PoolSpec
from maru_sidecar.sharing.node import Node
from maru_sidecar.slab_handles import Reservation

SIZE, REGION = 12 << 20, 4 << 20  # regions 1 and 2 behind the header's
KEYS, SOURCE = prompt_keys("granted", 4), blocks_table(0, 4)


@pytest.fixture
def path() -> Iterator[str]:
    with shared_pool(SIZE, REGION) as pool:
        yield pool


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as held:
        yield held


def bent_server(stack: contextlib.ExitStack, how: tuple[str, ...], listen: str = "tcp://127.0.0.1:*") -> ServerProcess:
    server = ServerProcess(listen=listen, inside=how)
    stack.callback(server.stop)
    return server


def start(stack: contextlib.ExitStack, path: str, endpoint: str) -> SharedSidecar:
    """A started sidecar, whether it can store or not."""
    sidecar = SharedSidecar(path, endpoint, "a")
    stack.callback(sidecar.close)
    sidecar.start()
    return sidecar


def wait(sidecar: SharedSidecar, condition: Callable[[], bool], what: str) -> None:
    """Until it holds, of a sidecar that stays alive."""

    def holds() -> bool:
        assert not sidecar.ended(), f"the sidecar has ended:\n{sidecar.log.read_text()[-3000:]}"
        return condition()

    until(holds, what, 30)


@pytest.mark.parametrize("first", [0, 40])
def test_a_pool_that_a_stranger_described_otherwise_is_not_written(path: str, stack: contextlib.ExitStack, first: int) -> None:
    before = Path(path).read_bytes()
    listen = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(stack, listen=listen)
    with DirectoryClient(server.endpoint, node="stranger", incarnation=1) as stranger:
        stranger.add_device(before[16:32], 64, REGION, first=first)
    sidecar = start(stack, path, server.endpoint)
    why = "no regions are asked for, the metadata server knows another pool of this UUID: "
    wait(sidecar, lambda: str(sidecar.sharing().get("cannot_store_because", "")).startswith(why), "it says what is wrong")
    seen = sidecar.sharing()
    assert "has 64 regions" in seen["cannot_store_because"]
    assert "not 3 of 4194304 from 1" in seen["region_refused"]
    assert (seen["can_store"], seen["regions"]) == (False, 0)
    wait(sidecar, lambda: sidecar.sharing()["requests_refused"] >= seen["requests_refused"] + 2, "it looked again, twice")
    assert sidecar.sharing()["grants_refused"] == seen["grants_refused"], "it asked for regions all the same"
    assert sidecar.log.read_text().count("no regions are asked for: the metadata server knows another") == 1
    assert Path(path).read_bytes() == before
    server.kill()
    start_server(stack, listen=listen)
    wait(sidecar, lambda: bool(sidecar.sharing()["can_store"]), "a server that knows the pool grants a region")
    assert start_engine(stack, sidecar).store(KEYS, SOURCE).n_done == 4


@pytest.mark.parametrize(
    "fields", [{"region": 0}, {"region": 3}, {"region": -1}, {"region": 1 << 40}, {"device": "ab" * 16}], ids=str
)
def test_a_grant_of_what_is_no_region_of_the_pool_is_given_back_untouched(
    path: str, stack: contextlib.ExitStack, fields: dict[str, object]
) -> None:
    before = Path(path).read_bytes()
    sidecar = start(stack, path, bent_server(stack, bend("AllocRegions", **fields)).endpoint)  # type: ignore[arg-type]
    wait(sidecar, lambda: sidecar.sharing()["grants_refused"] >= 2, "it asked again")
    seen = sidecar.sharing()
    assert not seen["can_store"]
    assert seen["cannot_store_because"].startswith("the metadata server's grant was refused: region ")
    assert (seen["regions"], seen["state"]) == (0, "ready")
    assert sidecar.log.read_text().count("nothing was done with it") == 1
    assert start_engine(stack, sidecar).store(KEYS, SOURCE).n_done == 0
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"token": -1}, "granted a region with token -1"),
        ({"id": 0}, "granted region 1 as grant 0"),
        ({"id": 1 << 40}, "granted region 1 as grant 1099511627776"),
        ({"copies": 2}, "granted 2 regions, 1 asked for"),
    ],
    ids=str,
)
def test_an_answer_that_no_server_gives_ends_the_session_and_the_next_one_is_good(
    path: str, stack: contextlib.ExitStack, how: dict[str, object], said: str
) -> None:
    server = bent_server(stack, bend("AllocRegions", times=1, **how))  # type: ignore[arg-type]
    sidecar = start(stack, path, server.endpoint)
    wait(sidecar, lambda: bool(sidecar.sharing()["can_store"]), "the second answer was used")
    seen = sidecar.sharing()
    assert seen["reconnects"] >= 1
    assert said in sidecar.log.read_text()
    assert "Traceback" not in sidecar.log.read_text()
    assert start_engine(stack, sidecar).store(KEYS, SOURCE).n_done == 4


def test_a_region_granted_a_second_time_while_it_is_held_is_used_no_more(path: str, stack: contextlib.ExitStack) -> None:
    server = bent_server(stack, bend("AllocRegions", first=1, region=1))
    sidecar = start_sidecar(stack, path, server.endpoint, "a")
    engine = start_engine(stack, sidecar)
    engine.store(KEYS, SOURCE)  # its first slab makes the node ask for another region; how far it comes is a race
    wait(sidecar, lambda: sidecar.sharing()["regions"] == 0, "the region was dropped")
    wait(sidecar, lambda: "which this node holds already" in sidecar.sharing().get("cannot_store_because", ""), "it says why")
    assert engine.hits(KEYS) == 0


def test_a_claim_confirmed_with_a_token_that_cannot_be_recorded_leaves_the_sidecar_running(
    path: str, stack: contextlib.ExitStack
) -> None:
    listen = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(stack, listen=listen)
    sidecar = start_sidecar(stack, path, server.endpoint, "a")
    server.kill()
    bent_server(stack, bend("ClaimRegions", token=-1), listen)
    wait(sidecar, lambda: "with token -1" in sidecar.log.read_text(), "the token was refused")
    wait(sidecar, lambda: sidecar.state() == "READY", "it goes on")


def test_a_region_lost_and_granted_anew_between_two_ticks_has_forgotten_its_chunks(
    path: str, stack: contextlib.ExitStack
) -> None:
    server = bent_server(stack, bend("AllocRegions", region=1))
    pool = PoolFile.open(PoolSpec(backend="file", path=path, size=SIZE, shared=True))
    stack.callback(pool.close, clean=False)
    soon: deque[Callable[[], None]] = deque()
    node = Node(Config(pool.spec, server=Server(endpoint=server.endpoint, node="a")), pool, "0badcafe", soon.append)
    stack.callback(node.link.close)
    directory = Directory(pool, rights=node.rights, mine=node.claimed, events=node.events)
    node.bind(directory, lease_ttl_s=5)

    def go_on() -> None:
        while soon:
            soon.popleft()()

    def granted() -> bool:
        go_on()
        return node.rights.writable == 1

    node.start()
    until(granted, "the first grant came", 30)
    store(directory, b"1" * 16)
    assert directory.lookup(b"n" * 16, b"1" * 16, world=1) == 1
    [lease] = node.link.regions
    lease.revoked = True  # as the link says that it is another node's
    until(granted, "the second grant came")
    assert directory.lookup(b"n" * 16, b"1" * 16, world=1) == 0
    assert node.status()["regions_lost"] == 1
    store(directory, b"2" * 16)
    assert directory.lookup(b"n" * 16, b"2" * 16, world=1) == 1


def store(directory: Directory, key: bytes) -> None:
    got = directory.reserve(b"n" * 16, key, parent=b"r" * 16, rank=0, world=1, depth=0, tokens=64, nbytes=8192)
    assert isinstance(got, Reservation)
    got.commit(None)
