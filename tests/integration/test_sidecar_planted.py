"""What others leave in ``/dev/shm`` or write into their segments neither keeps a sidecar from starting nor pins its pool."""

from __future__ import annotations

import os
import time

from tests.support.client import Client, blocks_table, prompt_keys
from tests.support.sidecar_process import running_sidecar
from tests.support.waiting import until

from maru_shm import layout as L
from maru_shm import messages as M
from maru_shm import segment as S


def test_a_planted_name_does_not_keep_the_next_sidecar_from_starting() -> None:
    with running_sidecar() as sidecar:
        with Client(sidecar.socket) as client:
            instance = client.segment.info.instance
        sidecar.stop()
        planted = [f"{S.SHM_DIR}{S.segment_name(instance, 1, n)}" for n in (1, 2, 3)]
        try:
            os.mkfifo(planted[0])
            os.symlink("/proc/self/mem", planted[1])
            os.mkdir(planted[2])
            sidecar.start()
            with Client(sidecar.socket) as worker:
                assert worker.store(prompt_keys("a", 1), blocks_table(0, 1)).n_done == 1
        finally:
            for path in planted:
                if os.path.isdir(path) and not os.path.islink(path):
                    os.rmdir(path)
                elif os.path.lexists(path):
                    os.unlink(path)


def test_a_forged_deadline_pins_nothing_for_longer_than_a_lease() -> None:
    with running_sidecar(flags=("--lease-ttl", "3")) as sidecar:
        keys = prompt_keys("forged", 2)
        with Client(sidecar.socket) as worker, Client(sidecar.socket, role=L.Role.SCHEDULER) as scheduler:
            worker.store(keys, blocks_table(0, 2))
            ticket, _ = scheduler.lookup(keys)
            base = scheduler.segment.shape.records_offset + (ticket & L.TICKET_INDEX_MASK) * L.RECORD_BYTES
            deadline = (base + L.REPLY_OFFSET + 40) // 8
            assert 0 < scheduler.segment.words[deadline] - time.monotonic_ns() < 4e9
            scheduler.segment.words[deadline] += 80_000 * 10**9
            sidecar.kill()
            sidecar.start()

            def leases() -> object:
                status = sidecar.ask(M.GetStatus())
                assert isinstance(status, M.Status)
                return status.sections["directory"]["leases"]  # type: ignore[index]

            until(lambda: leases() == 0, "the lease has ended")
