"""Who may drive a verifier: one lane at a time, under an epoch that only rises."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigError, LeaseError
from verifier_service.lease import LeaseState


def make_lease(incarnation: int = 1000) -> LeaseState:
    return LeaseState(ttl_s=10.0, incarnation=incarnation)


def test_one_holder_at_a_time() -> None:
    lease = make_lease()
    assert lease.holder == ""
    grant = lease.acquire("a", 0.0)
    assert (grant.lane_id, grant.expires_s) == ("a", 10.0)
    with pytest.raises(LeaseError, match=r"leased to 'a' \(retry in 6\.0 s\)"):
        lease.acquire("b", 4.0)
    lease.check(grant.lane_epoch)
    assert lease.holder == "a"


def test_epochs_rise_with_every_grant_and_over_restarts() -> None:
    lease = make_lease(1000)
    epochs = [lease.acquire("a", 0.0).lane_epoch for _ in range(3)]
    lease.release(epochs[-1])
    epochs.append(lease.acquire("b", 0.0).lane_epoch)
    assert epochs == sorted(set(epochs))
    restarted = make_lease(1_000_000)
    assert restarted.acquire("a", 0.0).lane_epoch > max(epochs)


def test_asking_again_makes_the_old_epoch_stale() -> None:
    lease = make_lease()
    old = lease.acquire("a", 0.0).lane_epoch
    new = lease.acquire("a", 1.0).lane_epoch
    lease.check(new)
    with pytest.raises(LeaseError, match="stale"):
        lease.check(old)
    assert not lease.release(old)
    assert lease.holder == "a"


def test_renewal_and_expiry() -> None:
    lease = make_lease()
    epoch = lease.acquire("a", 0.0).lane_epoch
    lease.renew(epoch, 8.0)
    with pytest.raises(LeaseError):
        lease.acquire("b", 17.9)
    lease.renew(epoch - 1, 17.9)  # a stale holder keeps nobody's lease alive
    assert lease.grant is not None
    assert lease.grant.expires_s == 18.0
    assert lease.acquire("b", 18.0).lane_epoch > epoch, "its time is over"
    lease.release(lease.grant.lane_epoch)
    with pytest.raises(LeaseError, match="not held"):
        lease.check(epoch)
    lease.renew(epoch, 18.0)
    assert lease.grant is None


def test_an_expired_lease_can_be_taken_before_anyone_noticed() -> None:
    lease = make_lease()
    old = lease.acquire("a", 0.0).lane_epoch
    assert lease.acquire("b", 10.0).lane_epoch > old
    assert not lease.release(old)
    assert lease.holder == "b"


def test_release_frees() -> None:
    lease = make_lease()
    epoch = lease.acquire("a", 0.0).lane_epoch
    assert lease.release(epoch)
    assert not lease.release(epoch)
    assert lease.acquire("b", 0.1).lane_id == "b"


def test_a_ttl_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="lease_ttl_s"):
        LeaseState(ttl_s=0.0, incarnation=1)
