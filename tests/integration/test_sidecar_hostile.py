"""Clients that lie, stall or send garbage: each loses its own session and nobody else notices."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import psutil
import pytest
from tests.support.client import ROOT, Client, KvCache, blocks_table, prompt_keys
from tests.support.sidecar_process import SidecarProcess, running_sidecar
from tests.support.waiting import until

from maru_shm import control
from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as segments
from maru_shm.errors import AttachRefused
from maru_shm.geometry import KvLayout, KvPlane, KvRegion, RegionKind


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarProcess]:
    flags = ("--set", "control.handshake_timeout_s=0.5", "--set", "control.max_connections=24")
    with running_sidecar(flags=flags) as process:
        yield process


@pytest.fixture
def bystander(sidecar: SidecarProcess) -> Iterator[Client]:
    """Another engine, whose work must go on whatever the test does."""
    with Client(sidecar.socket, engine_id="bystander") as client:
        assert client.cache is not None
        client.cache.fill(1)
        held = client.post_store(prompt_keys("held", 2), blocks_table(0, 2), fence=1)
        yield client
        client.set_fence(1)
        assert client.finish(held).state is L.State.DONE
        assert client.store(prompt_keys(os.urandom(4).hex(), 2), blocks_table(8, 2)).n_done == 2
        client.detach()


def connect(sidecar: SidecarProcess) -> socket.socket:
    return control.connect(sidecar.socket, 10.0)


def hello(sock: socket.socket) -> None:
    control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "hostile"))
    received = control.receive(sock, control.to_client)
    assert received is not None
    assert isinstance(received[0], M.Welcome)


def answer(sock: socket.socket) -> M.SidecarMessage | None:
    """The next message, None at end of file or reset."""
    with contextlib.suppress(ConnectionError):
        received = control.receive(sock, control.to_client)
        return received[0] if received is not None else None
    return None


# --- the ring and the records -------------------------------------------------------------------------------------------------
def record_word(client: Client, ticket: int, word: int) -> int:
    index = ticket & L.TICKET_INDEX_MASK
    return (client.segment.shape.records_offset + index * L.RECORD_BYTES) // 8 + word


def request_field(client: Client, ticket: int, offset: int, value: int) -> None:
    """Overwrite a u32 of a posted request before the sidecar can see it."""
    base = record_word(client, ticket, 0) * 8
    client.segment.bytes[base + offset : base + offset + 4] = value.to_bytes(4, "little")


def tail_beyond_the_ring(c: Client) -> None:
    c.segment.words[L.WORD_SQ_TAIL] = c.segment.shape.n_slots + 1


def tail_behind_the_head(c: Client) -> None:
    c.store(prompt_keys("x", 1), blocks_table(0, 1))
    c.segment.words[L.WORD_SQ_TAIL] = 0


def tail_of_all_ones(c: Client) -> None:
    c.segment.words[L.WORD_SQ_TAIL] = (1 << 64) - 1


def slot_stamped_wrongly(c: Client) -> None:
    c.segment.words[L.RING_OFFSET // 8 + L.SLOT_SEQ] = 77
    c.segment.words[L.WORD_SQ_TAIL] = 1


def unknown_verb(c: Client) -> None:
    c.ring.push(1 << 16, 99)  # type: ignore[arg-type]
    c.ring.publish()


def ticket_of_no_record(c: Client) -> None:
    c.ring.push(1 << 16 | 0xFFFF, L.Verb.SUBMIT)
    c.ring.publish()


def ticket_that_was_never_posted(c: Client) -> None:
    c.ring.push(5 << 16 | 3, L.Verb.SUBMIT)
    c.ring.publish()


def ticket_submitted_twice(c: Client) -> None:
    ticket = c.post_load(prompt_keys("x", 1), blocks_table(0, 1), fence=99)
    until(lambda: c.records.state(ticket) is L.State.ACCEPTED, "accepted")
    c.segment.words[record_word(c, ticket, L.STATE_WORD)] = ticket << 8 | L.State.POSTED
    c.ring.push(ticket, L.Verb.SUBMIT)
    c.ring.publish()


def lengths_beyond_the_cell(c: Client) -> None:
    ticket = c.records.post(L.Op.LOOKUP, prompt_keys("x", 2))
    request_field(c, ticket, 40, 1 << 30)  # n_keys
    c.ring.publish()


def blocks_that_do_not_divide(c: Client) -> None:
    ticket = c.records.post(L.Op.LOAD, prompt_keys("x", 2), blocks_table(0, 2).tobytes())
    request_field(c, ticket, 44, 7)  # n_blocks
    c.ring.publish()


def unknown_operation(c: Client) -> None:
    ticket = c.records.post(L.Op.LOOKUP, prompt_keys("x", 2))
    request_field(c, ticket, 8, 250)  # op
    c.ring.publish()


def block_beyond_the_cache(c: Client) -> None:
    c.post_load(prompt_keys("x", 1), np.array([[0, 1, 2, 64]]))


def negative_block(c: Client) -> None:
    c.post_load(prompt_keys("x", 1), np.array([[0, 1, 2, -2]]))


def store_of_a_hole(c: Client) -> None:
    c.post_store(prompt_keys("x", 1), np.array([[0, 1, L.SKIP_BLOCK, 2]]))


def store_without_a_parent_s_row(c: Client) -> None:
    c.post(L.Op.STORE, ROOT + prompt_keys("x", 1), np.arange(8).reshape(2, 4))


ATTACKS = [
    tail_beyond_the_ring, tail_behind_the_head, tail_of_all_ones, slot_stamped_wrongly, unknown_verb, ticket_of_no_record,
    ticket_that_was_never_posted, ticket_submitted_twice, lengths_beyond_the_cell, blocks_that_do_not_divide, unknown_operation,
    block_beyond_the_cache, negative_block, store_of_a_hole, store_without_a_parent_s_row,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda f: f.__name__)
def test_a_client_that_breaks_the_ring_is_detached_and_others_go_on(
    sidecar: SidecarProcess, bystander: Client, attack: Callable[[Client], None]
) -> None:
    with Client(sidecar.socket, engine_id="hostile") as client:
        attack(client)
        os.eventfd_write(client.doorbell, 1)
        until(client.hung_up, "the sidecar has hung up")
        assert client.segment.words[L.WORD_SIDECAR_STATE] == L.SidecarState.STOPPED
        assert client.attached.segment not in {name for name, *_ in segments.list_names()}
    with Client(sidecar.socket, engine_id="hostile"):
        pass  # its place is free again


def test_a_scheduler_that_asks_for_transfers_is_detached(sidecar: SidecarProcess, bystander: Client) -> None:
    with Client(sidecar.socket, engine_id="bystander", role=L.Role.SCHEDULER) as scheduler:
        scheduler.post_load(prompt_keys("x", 1), blocks_table(0, 1))
        until(scheduler.hung_up, "the sidecar has hung up")


def test_releases_and_cancels_of_tickets_nobody_knows_are_ignored(sidecar: SidecarProcess, bystander: Client) -> None:
    with Client(sidecar.socket, engine_id="odd") as client:
        for number in (0, 1 << 16, (1 << 56) - 1):
            client.ring.push(number, L.Verb.RELEASE)
            client.ring.push(number, L.Verb.CANCEL)
        client.publish()
        assert client.store(prompt_keys("odd", 1), blocks_table(0, 1)).state is L.State.DONE


def test_a_client_that_scribbles_over_its_whole_segment_is_detached(sidecar: SidecarProcess, bystander: Client) -> None:
    for seed in range(8):
        with Client(sidecar.socket, engine_id="scribbler") as client:
            size = client.segment.shape.total_bytes
            noise = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
            client.post_load(prompt_keys("x", 1), blocks_table(0, 1), fence=1 << 40)
            client.segment.bytes[L.WORD_SQ_TAIL * 8 :] = noise[L.WORD_SQ_TAIL * 8 :].tobytes()
            os.eventfd_write(client.doorbell, 1)
            until(client.hung_up, "the sidecar has hung up")


# --- the control socket -------------------------------------------------------------------------------------------------------
def test_garbage_is_answered_with_a_refusal_and_the_connection_ends(sidecar: SidecarProcess, bystander: Client) -> None:
    for garbage in (
        b"\x00",
        b"\xc1" * 100,
        os.urandom(5000),
        msgspec.msgpack.encode({"type": "attach"}),
        b"[]",
        b"\x81\xa4type",
    ):
        with connect(sidecar) as sock:
            sock.send(garbage)
            refused = answer(sock)
            assert isinstance(refused, M.Refused)
            assert refused.code is M.RefusalCode.BAD_MESSAGE
            assert answer(sock) is None


def test_a_packet_that_is_too_long_ends_the_connection(sidecar: SidecarProcess, bystander: Client) -> None:
    with connect(sidecar) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with contextlib.suppress(OSError):
            sock.send(b"\xc0" * (M.MAX_MESSAGE + 2))
            refused = answer(sock)
            assert isinstance(refused, M.Refused)
            assert "longer" in refused.what


def test_anything_before_hello_is_refused(sidecar: SidecarProcess, bystander: Client) -> None:
    for message in (M.Ping(), M.Detach(), M.GetStatus()):
        with connect(sidecar) as sock:
            control.send(sock, message)
            assert isinstance(answer(sock), M.Refused)
            assert answer(sock) is None


def test_a_second_hello_is_refused(sidecar: SidecarProcess) -> None:
    with connect(sidecar) as sock:
        hello(sock)
        control.send(sock, M.Hello(1, 1, "again"))
        assert isinstance(answer(sock), M.Refused)


def test_a_client_of_another_protocol_is_told_both_versions(sidecar: SidecarProcess) -> None:
    with connect(sidecar) as sock:
        control.send(sock, M.Hello(90, 99, "future"))
        refused = answer(sock)
        assert isinstance(refused, M.Refused)
        assert refused.code is M.RefusalCode.VERSION
        assert "90-99" in refused.what


def test_descriptors_nobody_asked_for_are_closed(sidecar: SidecarProcess, bystander: Client) -> None:
    process = psutil.Process(sidecar.pid)
    before = process.num_fds()
    with connect(sidecar) as sock:
        hello(sock)
        fds = [os.memfd_create("flood") for _ in range(60)]
        for _ in range(20):
            control.send(sock, M.Ping(), fds)
            assert isinstance(answer(sock), M.Pong)
        for fd in fds:
            os.close(fd)
        until(lambda: process.num_fds() <= before + 10, "the descriptors are closed")
    with connect(sidecar) as sock:  # more than a message may carry
        hello(sock)
        fds = [os.memfd_create("flood") for _ in range(200)]
        with contextlib.suppress(OSError):
            control.send(sock, M.Ping(), fds)
            answer(sock)
        for fd in fds:
            os.close(fd)
    until(lambda: process.num_fds() <= before + 2, "every descriptor is closed")


def test_a_peer_that_says_nothing_gives_its_place_back(sidecar: SidecarProcess, bystander: Client) -> None:
    with connect(sidecar) as silent:
        assert answer(silent) is None  # dropped after the handshake's 0.5 s


def test_connections_are_bounded_and_the_surplus_is_told(sidecar: SidecarProcess, bystander: Client) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(sidecar)) for _ in range(60)]
        for sock in socks:
            with contextlib.suppress(OSError):  # those far beyond the limit are closed at once
                control.send(sock, M.Hello(M.PROTOCOL_MIN, M.PROTOCOL, "one of many"))
        refusals = [m for m in map(answer, socks) if isinstance(m, M.Refused)]
        assert refusals
        assert refusals[0].code is M.RefusalCode.LIMIT
    until(lambda: sidecar.state() == "READY", "there is room again")


def test_a_peer_that_does_not_read_its_answers_is_dropped(sidecar: SidecarProcess, bystander: Client) -> None:
    with connect(sidecar) as sock:
        hello(sock)
        sock.settimeout(5)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(10_000):
                control.send(sock, M.GetStatus())
            pytest.fail("10,000 answers were kept for a peer that reads none")


# --- attach -------------------------------------------------------------------------------------------------------------------
def test_halves_of_an_engine_that_disagree_are_refused_with_both_values(sidecar: SidecarProcess) -> None:
    with Client(sidecar.socket, engine_id="tp", world=2):
        with pytest.raises(AttachRefused, match=r"conflict.*chunk_tokens is '64'.*'128'"):
            Client(sidecar.socket, engine_id="tp", rank=1, world=2, chunk_tokens=128)
        with pytest.raises(AttachRefused, match=r"conflict.*world size is '2'.*'4'"):
            Client(sidecar.socket, engine_id="tp", rank=1, world=4)
        with pytest.raises(AttachRefused, match=r"conflict.*geometry"):
            Client(sidecar.socket, engine_id="tp", rank=1, world=2, cache=KvCache(piece=8192))
        with pytest.raises(AttachRefused, match=r"conflict.*worker 0 of engine 'tp' is attached already"):
            Client(sidecar.socket, engine_id="tp", rank=0, world=2)
        Client(sidecar.socket, engine_id="tp", rank=1, world=2).close()


def test_a_chunk_larger_than_a_region_is_refused_with_both_sizes(sidecar: SidecarProcess) -> None:
    huge = KvCache(num_blocks=4, layers=1, piece=4 << 20)
    with pytest.raises(AttachRefused, match=r"bad_geometry.*16777216 bytes, a pool region 4194304"):
        Client(sidecar.socket, engine_id="huge", cache=huge)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_tokens": 40}, "bad_geometry.*40 tokens, blocks of 16"),
        ({"rank": 3}, "bad_message.*rank 3 of 1"),
        ({"world": 0}, "bad_message"),
        ({"root": b"short"}, "bad_message.*root of 5 bytes"),
        ({"engine_id": ""}, "bad_message.*engine id"),
        ({"max_records": 0}, "limit.*max_records is 0"),
        ({"max_keys": 1 << 30}, "limit.*max_keys"),
        ({"max_records": 4096, "max_keys": 1 << 14}, "limit.*segment of"),
    ],
)
def test_an_attach_with_absurd_numbers_is_refused(sidecar: SidecarProcess, options: dict[str, object], words: str) -> None:
    with pytest.raises(AttachRefused, match=words):
        Client(sidecar.socket, **{"engine_id": "odd", **options})  # type: ignore[arg-type]


def test_memory_that_is_not_the_client_s_is_refused(sidecar: SidecarProcess) -> None:
    cache = KvCache()
    (region,) = cache.layout.regions
    for wrong, words in (
        (msgspec.structs.replace(region, address=4096), "unreachable_memory.*0x1000"),
        (msgspec.structs.replace(region, size=region.size // 2), "bad_geometry.*leaves its region"),
        (msgspec.structs.replace(region, address=(1 << 63) - 1), "bad_geometry"),
        (KvRegion(RegionKind.CUDA_IPC, region.address, region.size, b"\1" * 64, "GPU-none"), "unreachable_memory"),
    ):
        cache.layout = msgspec.structs.replace(cache.layout, regions=(wrong,))
        with pytest.raises(AttachRefused, match=words):
            Client(sidecar.socket, engine_id="odd", cache=cache)


def test_planes_that_leave_their_region_are_refused(sidecar: SidecarProcess) -> None:
    cache = KvCache()
    (region,) = cache.layout.regions
    for plane in (KvPlane(1, 0, 4096, 4096), KvPlane(0, -1, 4096, 4096), KvPlane(0, 0, 1, 4096), KvPlane(0, 0, 1 << 62, 4096)):
        cache.layout = KvLayout(64, 16, (plane,), (region,), "odd")
        with pytest.raises(AttachRefused, match="bad_geometry"):
            Client(sidecar.socket, engine_id="odd", cache=cache)


def test_a_client_that_hangs_up_during_its_attach_leaves_nothing(sidecar: SidecarProcess, bystander: Client) -> None:
    before = {name for name, *_ in segments.list_names()}
    for _ in range(20):
        with connect(sidecar) as sock:
            hello(sock)
            layout = KvCache().layout
            control.send(sock, M.Attach(L.Role.WORKER, "fleeting", 0, 1, ROOT, 64, 32, 256, 1024, layout))
    until(lambda: {name for name, *_ in segments.list_names()} <= before, "no segment is left")
    with Client(sidecar.socket, engine_id="fleeting"):
        pass


# --- memory that is taken away ------------------------------------------------------------------------------------------------
def violations(sidecar: SidecarProcess) -> int:
    status = sidecar.ask(M.GetStatus())
    assert isinstance(status, M.Status)
    return int(status.sections["sidecar"]["protocol_violations"])  # type: ignore[index, call-overload]


@pytest.mark.parametrize("role", [L.Role.SCHEDULER, L.Role.WORKER])
@pytest.mark.parametrize("left", [0, L.RING_OFFSET])
def test_a_client_that_cuts_its_segment_short_ends_its_own_session(
    sidecar: SidecarProcess, bystander: Client, role: L.Role, left: int
) -> None:
    before = violations(sidecar)
    client = Client(sidecar.socket, role=role, engine_id=f"cutter-{role.value}-{left}")
    if role is L.Role.WORKER:
        client.post_store(prompt_keys("cut", 2), blocks_table(0, 2), fence=1)  # it waits for its fence in the segment
    os.truncate("/dev/shm" + client.attached.segment, left)
    if left:
        client.segment.words[L.WORD_SQ_TAIL] += 1  # a request that lies where nothing is any more
    os.eventfd_write(client.doorbell, 1)
    until(client.hung_up, "the session has ended")
    assert violations(sidecar) == before + 1
    assert bystander.store(prompt_keys(f"by-{role.value}-{left}", 1), blocks_table(20, 1)).n_done == 1
    client.sock.close()


def test_clients_that_cut_their_segments_while_copies_run_cost_nobody_else(sidecar: SidecarProcess, bystander: Client) -> None:
    for i in range(10):
        client = Client(sidecar.socket, engine_id=f"copier-{i}")
        for j in range(8):
            client.post_store(prompt_keys(f"copied-{i}-{j}", 4), blocks_table(4 * j, 4))
        os.truncate("/dev/shm" + client.attached.segment, 0)
        os.eventfd_write(client.doorbell, 1)
        until(client.hung_up, "the session has ended")
        client.sock.close()
    assert bystander.store(prompt_keys("after the copiers", 1), blocks_table(24, 1)).n_done == 1
