"""The writer's side of fencing: a region is written only while the node's own clock says it may be."""

from __future__ import annotations

import pytest
from servers import until

from maru_server.errors import LeaseExpired
from maru_server.lease import DRIFT, NodeLease, RegionLease, boottime_ns

MS = 1_000_000


def region_of(lease: NodeLease) -> RegionLease:
    region = RegionLease(lease, bytes(16), 3)
    region.confirm(token=42, grant=1)
    return region


def test_a_lease_counts_from_when_the_heartbeat_was_sent_and_ends_before_the_servers() -> None:
    lease, sent = NodeLease(), boottime_ns()
    lease.renew(sent, 10_000)
    assert lease.deadline_ns == sent + int(10_000 * (1 - DRIFT)) * MS
    assert lease.held(lease.deadline_ns - 1)
    assert not lease.held(lease.deadline_ns)


def test_a_confirmation_that_came_too_late_renews_nothing() -> None:
    lease = NodeLease()
    lease.renew(boottime_ns() - 20_000 * MS, 10_000)
    assert not lease.held()
    assert lease.term == 0


def test_confirmations_out_of_order_never_shorten_a_lease() -> None:
    lease, now = NodeLease(), boottime_ns()
    lease.renew(now, 10_000)
    lease.renew(now - 1000 * MS, 10_000)
    assert lease.deadline_ns == now + 9_900 * MS


def test_a_write_needs_its_whole_duration_left() -> None:
    lease = NodeLease()
    lease.renew(boottime_ns(), 10_000)
    region = region_of(lease)
    region.check(need_ms=5000)
    with pytest.raises(LeaseExpired, match=r"token 42.*20000 ms are needed"):
        region.check(need_ms=20_000)


def test_an_expired_lease_refuses_and_a_late_renewal_does_not_bring_the_region_back() -> None:
    lease = NodeLease()
    lease.renew(boottime_ns(), 50)
    region = region_of(lease)
    until("the lease ends", lambda: not region.writable())
    lease.renew(boottime_ns(), 10_000)
    assert lease.held()
    with pytest.raises(LeaseExpired, match="broken"):
        region.check()
    region.confirm(token=43, grant=1)
    region.check()


def test_a_region_never_confirmed_or_given_back_refuses() -> None:
    lease = NodeLease()
    lease.renew(boottime_ns(), 10_000)
    with pytest.raises(LeaseExpired):
        RegionLease(lease, bytes(16), 1).check()
    region = region_of(lease)
    region.revoked = True
    with pytest.raises(LeaseExpired, match="given back"):
        region.check()


def test_ending_a_lease_stops_every_region_at_once() -> None:
    lease = NodeLease()
    lease.renew(boottime_ns(), 10_000)
    regions = [region_of(lease) for _ in range(3)]
    lease.end()
    assert not any(r.writable() for r in regions)
