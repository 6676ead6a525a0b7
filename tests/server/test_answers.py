"""Answers that no server of this protocol gives are refused by name, before anything is done with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from servers import FAST, Node, keys_of, until

from maru_server import protocol as P
from maru_server.announce import Slabs
from maru_server.answers import check_answer
from maru_server.client import DirectoryClient, places_of
from maru_server.lease import RegionLease
from maru_server.link_types import LinkConfig, LinkState
from maru_server.memory import MemoryBackend
from maru_server.node import NodeLink
from maru_server.protocol import ClaimVerdict, GrantInfo, GrantState
from maru_server.server import Server
from maru_server.service import Service
from maru_shm.errors import MaruError, ProtocolViolation

DEVICE, NAMESPACE = b"d" * 16, b"n" * 16
TWO = bytes(32)  # keys
PLACES = places_of(3, [0, 1], [5, 5])
GRANT = GrantInfo(3, DEVICE, 1, "n", 7, GrantState.GRANTED)
PIN = P.Pin(NAMESPACE, 0, TWO, 1000)
CLAIM = P.ClaimRegions([P.Region(DEVICE, 1, 7)])
HELLO = P.Hello(1, 1, "test")


def welcome(lease_ms: int, heartbeat_ms: int) -> P.Welcome:
    return P.Welcome(1, "server", "instance", "memory", lease_ms, heartbeat_ms, P.MAX_BATCH)


def claimed(**fields: object) -> P.Claimed:
    values = {"id": 3, "device": DEVICE, "region": 1, "node": "n", "token": 7, "state": GrantState.GRANTED} | fields
    return P.Claimed([P.ClaimResult(ClaimVerdict.GRANTED, GrantInfo(**values))])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (PIN, P.Places(PLACES, [GRANT], 9, 1000)),
        (PIN, P.Places(PLACES[:16], [], 9)),
        (PIN, P.Places(b"", [])),
        (CLAIM, claimed()),
        (CLAIM, P.Claimed([P.ClaimResult(ClaimVerdict.WAIT)])),
        (CLAIM, claimed(token=P.TOKEN_MAX, id=P.GRANT_MAX)),
        (P.AllocRegions("op", 2), P.Granted([GRANT])),
        (P.Register(NAMESPACE, 0, TWO, PLACES), P.Outcomes(bytes([1, 2]), P.NOWHERE + PLACES[:16], [GRANT])),
        (P.Delete(NAMESPACE, 0, TWO), P.Outcomes(bytes([5, 7]))),
        (P.Lookup(NAMESPACE, 0, TWO), P.Places(P.NOWHERE + PLACES[:16], [GRANT])),
        (P.Lookup(NAMESPACE, 0, TWO, P.Mode.LEADING), P.Places(PLACES[:16], [GRANT])),
        (P.Exists(NAMESPACE, 0, TWO), P.Present(b"\0\1")),
        (P.ListKeys(NAMESPACE, 0), P.KeyPage(TWO, PLACES, [], more=False)),
        (HELLO, welcome(*P.LEASE_MS[:1], 50)),
        (HELLO, welcome(P.LEASE_MS[1], 2000)),
        (P.Heartbeat(), P.Ok()),
    ],
)
def test_what_a_server_may_answer_is_taken(request_: P.Request, reply: P.Reply) -> None:
    check_answer(request_, reply)


@pytest.mark.parametrize(
    ("request_", "reply", "said"),
    [
        (PIN, P.Ok(), "answered Ok, not Places"),
        (PIN, P.Places(PLACES + b"x", [GRANT], 9), "Pin of 2 keys with 33 bytes of places"),
        (PIN, P.Places(PLACES + PLACES[:16], [GRANT], 9), "Pin of 2 keys with 48 bytes of places"),
        (PIN, P.Places(PLACES[:16] + P.NOWHERE, [GRANT], 9), "a chunk that lies nowhere"),
        (PIN, P.Places(PLACES, [GRANT], 0), "2 chunks under pin 0"),
        (PIN, P.Places(PLACES, [GRANT], -1), "2 chunks under pin -1"),
        (PIN, P.Places(b"", [], 9), "0 chunks under pin 9"),
        (PIN, P.Places(PLACES, [GRANT], 9, 1001), "for 1000 ms with 1001 ms"),
        (PIN, P.Places(PLACES, [GRANT], 9, -1), "for 1000 ms with -1 ms"),
        (PIN, P.Places(places_of(3, [0], [1 << 56]), [GRANT], 9), "a generation of more than 56 bits"),
        (PIN, P.Places(PLACES, [GrantInfo(3, DEVICE, 1, "n", -1, GrantState.GRANTED)], 9), "with token -1"),
        (CLAIM, P.Claimed([]), "a claim of 1 regions with 0 results"),
        (CLAIM, P.Claimed(claimed().results * 2), "a claim of 1 regions with 2 results"),
        (CLAIM, P.Claimed([P.ClaimResult(ClaimVerdict.GRANTED)]), "'granted' and no grant"),
        (CLAIM, claimed(region=2), "a claim of region 1 .* with region 2"),
        (CLAIM, claimed(device=b"e" * 16), f"with region 1 of device {(b'e' * 16).hex()}"),
        (CLAIM, claimed(token=-1), "with token -1"),
        (CLAIM, claimed(token=P.TOKEN_MAX + 1), "with token 9223372036854775809"),
        (CLAIM, claimed(id=0), "region 1 as grant 0"),
        (CLAIM, claimed(id=1 << 32), "region 1 as grant 4294967296"),
        (P.AllocRegions("op"), P.Granted([GRANT, GRANT]), "granted 2 regions, 1 asked for"),
        (P.Register(NAMESPACE, 0, TWO, PLACES), P.Outcomes(b"\1"), "Register of 2 keys with 1 outcomes"),
        (P.Register(NAMESPACE, 0, TWO, PLACES), P.Outcomes(b"\1\5"), "Register with outcome 5"),
        (P.Register(NAMESPACE, 0, TWO, PLACES), P.Outcomes(b"\1\2", PLACES[:31]), "Register of 2 keys with 31 bytes"),
        (P.Delete(NAMESPACE, 0, TWO), P.Outcomes(b""), "Delete of 2 keys with 0 outcomes"),
        (P.Delete(NAMESPACE, 0, TWO), P.Outcomes(b"\5\xff"), "Delete with outcome 255"),
        (P.Lookup(NAMESPACE, 0, TWO), P.Places(PLACES[:16], [GRANT]), "Lookup of 2 keys with 1 places"),
        (P.Exists(NAMESPACE, 0, TWO), P.Present(b"\1"), "Exists of 2 keys with 1 flags"),
        (P.ListKeys(NAMESPACE, 0), P.KeyPage(TWO, b"", [], more=False), "32 bytes of keys and 0 of places"),
        (HELLO, welcome(99, 10), "leases of 99 ms"),
        (HELLO, welcome(3_600_001, 2000), "leases of 3600001 ms"),
        (HELLO, welcome(10_000, 0), "a heartbeat every 0 ms"),
        (HELLO, welcome(10_000, 1 << 60), "a heartbeat every 1152921504606846976 ms"),
    ],
)
def test_what_no_server_answers_is_refused_by_name(request_: P.Request, reply: P.Reply, said: str) -> None:
    with pytest.raises(ProtocolViolation, match=said):
        check_answer(request_, reply)


# --- links and clients ------------------------------------------------------------------------------------------------------
class BentServer:
    """A server in this process. By verb: ``bends``, what becomes of a good answer; ``instead``, what is answered unasked."""

    def __init__(self) -> None:
        self.bends: dict[type[P.Request], Callable[[P.Reply], P.Reply]] = {}
        self.instead: dict[type[P.Request], P.Reply] = {}
        self.server = Server(MemoryBackend(FAST), FAST, ["tcp://127.0.0.1:*"])
        self.endpoint = self.server.endpoints[0]
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def close(self) -> None:
        self.server.stop()
        self._thread.join()


@pytest.fixture
def bent(monkeypatch: pytest.MonkeyPatch) -> Iterator[BentServer]:
    server = BentServer()
    dispatch = Service._dispatch

    def answer(self: Service, identity: bytes, epoch: int, m: P.Request) -> P.Reply:
        if type(m) in server.instead:
            return server.instead[type(m)]
        reply = dispatch(self, identity, epoch, m)
        return server.bends[type(m)](reply) if type(m) in server.bends else reply

    monkeypatch.setattr(Service, "_dispatch", answer)
    yield server
    server.close()


def made_link(endpoint: str, regions: list[P.Region] | None = None) -> NodeLink:
    link = NodeLink(LinkConfig(endpoint, "n", predecessor=P.Predecessor.ENDED), lambda _region: iter(()), regions)
    link.add_device(DEVICE, 5, 4096)
    link.start()
    return link


@pytest.fixture
def link(bent: BentServer) -> Iterator[NodeLink]:
    link = made_link(bent.endpoint)
    until("the link is ready", lambda: link.state is LinkState.READY)
    yield link
    link.close()


def granted(link: NodeLink) -> RegionLease:
    got: list[list[RegionLease] | MaruError] = []
    link.request_regions(1, got.append, device=DEVICE)
    until("a region is granted", lambda: got)
    assert isinstance(got[0], list), got[0]
    return got[0][0]


def one_slab(number: int = 0) -> Slabs:
    return Slabs(NAMESPACE, 0, keys_of(1), np.array([number], np.uint32), np.ones(1, np.uint64))


def test_a_claim_answered_wrongly_confirms_nothing_and_the_next_session_claims_again(
    bent: BentServer, caplog: pytest.LogCaptureFixture
) -> None:
    first = made_link(bent.endpoint)
    until("the link is ready", lambda: first.state is LinkState.READY)
    lease = granted(first)
    held = [P.Region(DEVICE, lease.region, lease.token)]
    first.close()
    bent.instead[P.ClaimRegions] = P.Claimed([])
    link = made_link(bent.endpoint, held)
    try:
        until("it is told", lambda: "a claim of 1 regions with 0 results" in link.stats().last_error)
        [again] = link.regions
        assert not again.writable()
        assert link.stats().error_stands
        bent.instead.clear()
        until("the claim is confirmed", again.writable)
        until("nothing is wrong any more", lambda: not link.stats().error_stands)
    finally:
        link.close()
    assert "server link failed" not in caplog.text, "not a traceback"


@pytest.mark.parametrize("times", [(100, 0), (1 << 60, 2000)], ids=str)
def test_a_lease_that_never_begins_or_never_ends_is_not_entered_upon(bent: BentServer, times: tuple[int, int]) -> None:
    bent.bends[P.Hello] = lambda _reply: welcome(*times)
    link = made_link(bent.endpoint)
    try:
        until("it is told", lambda: " ms" in link.stats().last_error and link.stats().reconnects > 1)
        assert (link.state, link.lease.held()) == (LinkState.CONNECTING, False)
        bent.bends.clear()
        until("the link is ready", lambda: link.state is LinkState.READY)
    finally:
        link.close()


def test_a_region_that_is_held_is_not_taken_a_second_time(bent: BentServer, link: NodeLink) -> None:
    first = granted(link)
    bent.bends[P.AllocRegions] = lambda _reply: P.Granted([GrantInfo(9, DEVICE, first.region, "n", 9, GrantState.GRANTED)])
    second = granted(link)
    assert (second.region, second.writable()) == (first.region, False)
    assert link.regions == [first]
    first.check()


@pytest.mark.parametrize(
    "codes_and_places", [(b"", b""), (b"\1\1", b""), (b"\2", b"x" * 15)], ids=["none", "too many", "places of odd length"]
)
def test_a_publication_answered_wrongly_is_told_again_in_the_next_session(
    bent: BentServer, link: NodeLink, caplog: pytest.LogCaptureFixture, codes_and_places: tuple[bytes, bytes]
) -> None:
    bent.bends[P.Register] = lambda _reply: P.Outcomes(*codes_and_places)
    answers: list[object] = []
    assert link.publish(granted(link), one_slab(), answers.append)
    until("it is told", lambda: link.stats().error_stands and "Register" in link.stats().last_error)
    assert not answers
    bent.bends.clear()
    until("it is published", lambda: answers)
    assert answers == [P.Outcomes(b"\1")]
    until("nothing is wrong any more", lambda: not link.stats().error_stands)
    assert "server link failed" not in caplog.text, "not a traceback"


def test_a_question_answered_wrongly_counts_as_not_answered(bent: BentServer, link: NodeLink) -> None:
    bent.bends[P.Delete] = lambda _reply: P.Outcomes(b"")
    answers: list[object] = []
    assert link.submit(P.Delete(NAMESPACE, 0, keys_of(1)), answers.append)
    until("it is answered", lambda: answers)
    assert isinstance(answers[0], ProtocolViolation)
    assert link.stats().refused == 1
    until("the link is back", lambda: link.state is LinkState.READY)
    assert "Delete of 1 keys with 0 outcomes" in link.stats().last_error
    assert link.stats().error_stands, "a new session alone proves nothing"


def test_a_client_refuses_a_wrong_answer_by_name(bent: BentServer) -> None:
    node = Node(bent.endpoint, "m")
    [grant] = node.alloc(device=node.device())
    keys = keys_of(2)
    node.register(NAMESPACE, keys, grant)
    bent.bends[P.Lookup] = lambda reply: P.Places(reply.places + b"x", reply.grants)  # type: ignore[union-attr]
    with DirectoryClient(bent.endpoint) as client, pytest.raises(ProtocolViolation, match="33 bytes of places"):
        client.lookup(NAMESPACE, 0, keys)
    node.client.close()
