"""The pure part of opening a lane: its state, made for a lease. Servers and simulator share it."""

from __future__ import annotations

from cluster.config import RouterConfig
from cluster.wire import Lease
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths
from router.drafter_book import DrafterBook
from router.gating import DraftGate
from router.recalibration import RecalibratorBook
from router.rounds import LaneState
from router.throughput import ThroughputProfile


def lane_state(
    lease: Lease,
    *,
    fingerprint: str,
    config: RouterConfig,
    book: DrafterBook,
    counters: LaneCounters,
    recalibrators: RecalibratorBook,
    device: str = "",
) -> LaneState:
    """A lane without requests over the verifier that granted this lease.

    Args:
        fingerprint: of the drafter projection that the verifier holds; empty: it cannot be drafted.
        device: identity of the verifier's device; empty: it does not say.

    Raises:
        FrameError: the lease holds no usable profile.
    """
    profile = ThroughputProfile.of_lease(lease)
    lengths = DraftLengths(
        recalibrator=recalibrators.of(fingerprint),
        profile=profile,
        counters=counters,
        explore_fraction=config.explore_fraction,
        scheduling=config.scheduling,
    )
    gate = DraftGate(
        book=book,
        recalibrator=recalibrators.of(fingerprint),
        counters=counters,
        scheduling=config.scheduling,
        device=device,
    )
    return LaneState(
        lease=lease,
        fingerprint=fingerprint,
        prefill_budget=config.prefill_budget,
        profile=profile,
        book=book,
        counters=counters,
        lengths=lengths,
        gate=gate,
        device=device,
        scheduling=config.scheduling,
    )
