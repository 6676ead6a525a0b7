"""What ended leases leave behind: nothing that grows with their number."""

from __future__ import annotations

from maru_sidecar.leases import LeaseTable

TTL_NS = 60_000_000_000


def test_ended_leases_do_not_pile_up_until_their_deadline() -> None:
    table = LeaseTable()
    kept = [table.grant([], "owner", TTL_NS + i) for i in range(10)]
    for i in range(50_000):
        table.end(table.grant([], "owner", TTL_NS + i).id)
        assert len(table._deadlines) <= 2 * len(table) + 1100
    assert table.expired(TTL_NS + 4) == [lease.id for lease in kept[:5]]
    assert sorted(table.expired(2 * TTL_NS)) == [lease.id for lease in kept[5:]]
