"""Every allowed policy, enumerated over mixed batches: the joint law of all texts is the target's.

Two successive rounds of the same requests over the same positions, with a step of another request
between them, so that what the first round showed decides in the second (policies look two steps
back). Production drafts, schedules and judges; see `tests.exactness.players` and ``joint``.
"""

from __future__ import annotations

import numpy as np
import pytest

from cluster.policy_text import PLAIN_POLICIES
from router.throughput import ThroughputProfile
from tests.exactness.joint import Joint, Production
from tests.exactness.players import GAMMA, Player
from tests.exactness.tiny import gap

SAMPLED = (
    Player(0, "rejection"),
    Player(1, "rejection", first=1),
    Player(2, "greedy"),
    Player(3, "greedy", first=1),
)
MIXED = (
    Player(0, "coupled"),
    Player(1, "rejection"),
    Player(2, "one-hot"),
    Player(3, "greedy"),
)
DETERMINISTIC = (
    Player(0, "coupled"),
    Player(1, "one-hot", first=1),
    Player(2, "greedy"),
    Player(3, "greedy", first=1),
)
BATCHES = {"sampled": SAMPLED, "mixed": MIXED, "deterministic": DETERMINISTIC}
STEPS = ((0, 1, 2), (3,), (0, 1, 2))
MOST = 3 * (GAMMA + 1)
ALL = (*PLAIN_POLICIES, "fixed:1", "threshold:0.8")
READS_BLOCKS = ("causal", "lagged", "adaptive", "threshold:0.8")


def cliffs(seed: int) -> np.ndarray:
    """Seconds of steps of 1..MOST tokens, with cliffs where drafts begin."""
    rng = np.random.default_rng(seed)
    rises = rng.uniform(0.0, 0.12, MOST)
    rises[3 + rng.integers(0, MOST - 4, 2)] += rng.uniform(0.3, 0.8)
    return 1.0 + rises.cumsum()


def distance(joint: Joint, scheduler: Production) -> float:
    law = joint.law(scheduler)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    return gap(law, joint.target())


@pytest.mark.parametrize("policy", [p for p in ALL if p != "retrospective"])
@pytest.mark.parametrize("batch", ["sampled", "mixed"])
def test_joint_laws_of_batches_with_sampled_drafts(batch: str, policy: str) -> None:
    varied = set()
    for seed in (1, 2):
        joint = Joint(BATCHES[batch], STEPS)
        assert distance(joint, Production(policy, cliffs(seed))) < 1e-12
        varied |= joint.seen[2]
    if policy in READS_BLOCKS:
        assert len(varied) > 3, "the schedule hardly varied: nothing was tested"


@pytest.mark.parametrize("policy", ["retrospective", "adaptive", "causal", "lagged"])
def test_joint_laws_of_batches_in_which_nothing_is_drawn(policy: str) -> None:
    varied = set()
    for seed in (1, 2, 3):
        joint = Joint(DETERMINISTIC, STEPS)
        assert distance(joint, Production(policy, cliffs(seed))) < 1e-12
        varied |= joint.seen[2]
    assert len(varied) > 1


def test_retrospective_verifies_no_draft_rather_than_a_biased_one() -> None:
    joint = Joint(MIXED, STEPS)
    lane = Production("retrospective", cliffs(1))
    assert distance(joint, lane) < 1e-12
    assert joint.seen[0] == joint.seen[2] == {(0, 0, 0)}
    assert lane.counters.num_refused_steps > 0


@pytest.mark.parametrize("policy", ["causal", "lagged", "adaptive"])
def test_weights_that_follow_what_was_emitted(policy: str) -> None:
    """Targets and tiers: a long first round makes a request wait in the second."""
    players = (
        Player(0, "rejection", target_rate=1.2),
        Player(1, "rejection", first=1, tier="interactive"),
        Player(2, "greedy", tier="batch"),
        Player(3, "greedy", first=1),
    )
    joint = Joint(players, STEPS)
    assert distance(joint, Production(policy, cliffs(2))) < 1e-12
    plain = Joint(SAMPLED, STEPS)
    plain.law(Production(policy, cliffs(2)))
    assert joint.seen[2] != plain.seen[2], "the weights decided nothing"


@pytest.mark.parametrize(("slope", "min_gain"), [(0.15, 0.05), (0.2, 0.1)])
def test_the_knee_decides_by_earlier_rounds(slope: float, min_gain: float) -> None:
    """The first round's blocks settle whether the second one is cut at all."""
    joint = Joint(SAMPLED, STEPS)
    line = 1.0 + slope * np.arange(MOST)
    assert distance(joint, Production("adaptive", line, min_gain=min_gain)) < 1e-12
    whole = 3 * GAMMA
    sizes = {sum(lengths) for lengths in joint.seen[2]}
    assert whole in sizes
    assert min(sizes) < whole - 1


def test_earlier_rounds_set_the_budget_of_lagged() -> None:
    """The enumerations above are no trivial ones: every block has survival over 0, so the lengths
    add up to the budget, and in the second round that was another after other first rounds."""
    joint = Joint(SAMPLED, STEPS)
    joint.law(Production("lagged", 1.0 + 0.2 * np.arange(MOST)))
    assert len({sum(lengths) for lengths in joint.seen[2]}) > 1
    assert len({sum(lengths) for lengths in joint.seen[0]}) == 1


@pytest.mark.parametrize("policy", ["causal", "lagged", "adaptive"])
@pytest.mark.parametrize("offset", [-1, 1])
def test_steps_that_explore_a_neighbouring_tier(
    policy: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThroughputProfile, "explore", lambda _, n: offset * (n == 3))
    joint = Joint(SAMPLED, STEPS)
    lane = Production(policy, 1.0 + 0.2 * np.arange(MOST), live=True)
    assert distance(joint, lane) < 1e-12
    assert lane.counters.num_explored_steps > 0
    # The step before had whole blocks; a larger tier would take drafts that are not there.
    sizes = {sum(lengths) for lengths in joint.seen[2]}
    assert sizes == {min(3 * GAMMA + offset, 3 * GAMMA)}
    assert len(joint.seen[2]) == (3 if offset < 0 else 1)
