"""What a schedule must not look at, each with the bias that it would cause (DESIGN section 5).

Every test gives the production functions an input that a lane never gives them, and finds the law
of the text off by a known amount. The allowed counterpart is exact in the same setting. Where not
said otherwise p(A) = 0.7 and q(A) = 0.5 whatever came before: a drafted A always passes, a drafted
B with probability 0.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.noise import Stream
from drafter_service.sampling import Block
from router.lane_request import LaneRequest
from router.policies import PolicyInput
from router.policies.causal import causal_lengths
from router.policies.fixed import Fixed, Threshold
from router.policies.knee import cutting_gain
from router.policies.lagged import Lagged
from router.policies.retrospective import retrospective_lengths
from tests.exactness.joint import Joint, Production, Texts
from tests.exactness.players import Player, verdict_law
from tests.exactness.test_policies import MOST
from tests.exactness.test_rejection import APPENDIX_SPS, appendix_pair, one_request, round_law
from tests.exactness.tiny import Injected, Pair, Schedule, gap, sampling, step_of, survival

A, B = 0, 1
ROOM_FOR_ONE = np.array([1, 1, 1, 0.8, 0.1])
"""Steps per second: beside two anchors, one draft pays."""


def first_is_a(schedule: Schedule, pair: Pair | None = None) -> float:
    law, _ = one_request(pair or appendix_pair(), schedule)
    return sum(weight for ids, weight in law.items() if ids[0] == A)


def first_share(law: dict[Texts, float]) -> float:
    """Probability that the first request's first token is A."""
    return sum(share for texts, share in law.items() if texts[0][0] == A)


def of_step(rule: Callable[[PolicyInput], np.ndarray]) -> Schedule:
    """A rule about a step that is told the truth: the drafts are sampled."""
    return lambda survival_RG, block: rule(step_of(survival_RG, APPENDIX_SPS))


def remembering(survival_RG: list[list[float]]) -> Lagged:
    """`Lagged` after a step of these blocks, and another one, so that it may be looked at."""
    policy = Lagged()
    for _ in range(2):
        policy.remember(step_of(np.array(survival_RG), np.ones(9)))
    return policy


def test_the_retrospective_rule_on_a_sampled_draft() -> None:
    """Paper, Appendix A."""

    def told_otherwise(step: PolicyInput) -> np.ndarray:
        lie = step_of(step.survival_RG, APPENDIX_SPS, deterministic=True)
        return retrospective_lengths(lie)

    assert first_is_a(of_step(told_otherwise)) == pytest.approx(0.85, abs=1e-12)
    assert first_is_a(of_step(causal_lengths)) == pytest.approx(0.7, abs=1e-12)


def test_the_retrospective_rule_on_a_mixed_batch() -> None:
    """One sampled draft among deterministic ones is enough to be biased."""
    players = (Player(0, "rejection"), Player(1, "greedy"), Player(2, "one-hot"))
    costs = [1.0, 1.0, 1.0, *[2.67] * (MOST - 3)]  # all six drafts pay if the sampled one is A

    class HidesQ(Production):
        def rows(self, *args: Any) -> list[LaneRequest]:
            rows = super().rows(*args)
            for row in rows:
                assert row.block is not None
                row.block = replace(row.block, q=None)
            return rows

    right, wrong = Joint(players, [(0, 1, 2)]), Joint(players, [(0, 1, 2)])
    assert gap(right.law(Production("adaptive", costs)), right.target()) < 1e-12
    law, target = wrong.law(HidesQ("retrospective", costs)), wrong.target()
    assert first_share(law) - first_share(target) == pytest.approx(0.25 * 0.61, abs=1e-12)


def test_a_threshold_on_what_follows_a_token() -> None:
    """c_2 is a function of x_1, so it must not decide about x_1."""

    def own_value(survival_RG: np.ndarray, block: Block) -> np.ndarray:
        return (block.confidence[:, 1] >= 0.5).astype(np.int64)

    assert first_is_a(own_value) == pytest.approx(0.85, abs=1e-12)
    for least in (0.5, 0.85, 0.95):
        allowed = of_step(Threshold("threshold", least).lengths)
        assert first_is_a(allowed) == pytest.approx(0.7, abs=1e-12)


def test_a_budget_from_the_blocks_at_hand() -> None:
    """`lagged` whose memory holds the very step that it decides about."""

    def live(step: PolicyInput) -> np.ndarray:
        return remembering(step.survival_RG.tolist()).lengths(step)

    assert first_is_a(of_step(live)) == pytest.approx(0.85, abs=1e-12)
    for before in ([[0.8, 0.72]], [[0.8, 0.0]]):
        assert first_is_a(of_step(remembering(before).lengths)) == pytest.approx(0.7, abs=1e-12)


def test_how_many_drafts_there_are_read_off_their_survival() -> None:
    """After B the second draft has survival 0, as one that is not there: the budget would know."""

    def nonzero(step: PolicyInput) -> np.ndarray:
        fewer = PolicyInput(
            **(vars(step) | {"num_drafts_R": np.count_nonzero(step.survival_RG, axis=1)})
        )
        return remembering([[0.8, 0.72]]).lengths(fewer)

    assert first_is_a(of_step(nonzero)) == pytest.approx(0.85, abs=1e-12)
    honest = of_step(remembering([[0.8, 0.72]]).lengths)
    assert first_is_a(honest) == pytest.approx(0.7, abs=1e-12)


def test_a_minimum_gain_of_the_blocks_at_hand() -> None:
    """Whole blocks where cutting gains little now: after A it gains nothing, after B 0.23."""

    def guarded(step: PolicyInput) -> np.ndarray:
        gain = cutting_gain(step)
        assert gain is not None
        return Fixed("full", None).lengths(step) if gain < 0.02 else causal_lengths(step)

    assert first_is_a(of_step(guarded)) == pytest.approx(0.85, abs=1e-12)


def joint_first(schedule: Schedule) -> dict[tuple[int, int], float]:
    """Joint law of the first tokens of two requests."""
    law, _ = round_law(appendix_pair(), schedule, 2)
    firsts: dict[tuple[int, int], float] = {}
    for (one, other), weight in law.items():
        key = (one[0], other[0])
        firsts[key] = firsts.get(key, 0.0) + weight
    return firsts


def test_each_others_tokens_outside_a_common_order() -> None:
    """Each is verified if the other drafted A: both marginals are right, the joint law is not."""
    law = joint_first(lambda survival_RG, block: (block.ids[::-1, 0] == A).astype(np.int64))
    assert law[A, A] + law[A, B] == pytest.approx(0.7, abs=1e-12)
    assert law[A, A] == pytest.approx(0.5125, abs=1e-12)


def test_ties_that_a_drawn_value_breaks() -> None:
    """Two drafts of equal survival, room for one: it goes to the row that drew A."""

    def favourite(survival_RG: np.ndarray, block: Block) -> np.ndarray:
        order = np.argsort(block.ids[:, 0], kind="stable")
        lengths = np.zeros(2, np.int64)
        lengths[order] = causal_lengths(step_of(survival_RG[order, :1], ROOM_FOR_ONE))
        assert lengths.sum() == 1
        return lengths

    law = joint_first(favourite)
    assert law[A, A] + law[A, B] == pytest.approx(0.775, abs=1e-12)
    assert law[A, A] == pytest.approx(0.595, abs=1e-12)

    def lower_row(survival_RG: np.ndarray, block: Block) -> np.ndarray:
        return causal_lengths(step_of(survival_RG[:, :1], ROOM_FOR_ONE))

    law = joint_first(lower_row)
    assert law[A, A] + law[A, B] == pytest.approx(0.7, abs=1e-12)
    assert law[A, A] == pytest.approx(0.49, abs=1e-12)


# --- keys of random numbers ----------------------------------------------------------------------


def revealing_pair() -> Pair:
    """Blocks of three; c_3 is 0.88 if x_2 is A, else 0.12, and nothing else says much."""
    return Pair(
        p=np.array([[0.7, 0.3]] * 2),
        q=np.full((2, 2), 0.5),
        a=np.array([4.0, 9.0, 0.0]),
        f=np.array([2.0, -2.0]),
    )


@pytest.mark.parametrize(("by_position", "wanted"), [(False, 0.7), (True, 0.85)])
def test_numbers_keyed_by_position_alone(by_position: bool, wanted: float) -> None:
    """A position that is drafted again would be drawn with the number that the first round's
    survival has revealed, and the budget of `lagged` comes from that survival.

    The first round emits one token plainly, so the second block's x_1 is at the place of the first
    one's x_2. Whole blocks pay if the latter was A. If both are one draw, B is never verified.
    """
    pair = revealing_pair()
    probability = 0.0
    for draws in np.ndindex((2,) * 6):
        halves = 0.25 + 0.5 * np.array(draws)  # A below a half, B above
        table = np.zeros((1, 2, 4))
        table[0, 0, 1:] = halves[:3]
        table[0, 1, 1:] = [*halves[1:3], halves[3]] if by_position else halves[3:]
        randomness = Injected({Stream.DRAFT: table})
        settings = [sampling(mode="rejection")]
        sps = 1 / np.array([9.0, 1.0, 3.5, 3.5, 3.5])
        policy = Lagged()
        earlier = step_of(survival(pair.draft([(A,)], settings, randomness)), sps)
        assert policy.lengths(earlier).tolist() == [0]
        policy.remember(earlier)
        policy.remember(step_of(np.zeros((0, 3)), np.ones(9)))  # a step without this request
        block = pair.draft([(A, A)], settings, randomness)
        (length,) = policy.lengths(step_of(survival(block), sps))
        assert length in (0, 3)
        law = verdict_law(pair, "rejection", A, block, length)
        probability += sum(share for ids, share in law.items() if ids[0] == A) / 2**6
    assert probability == pytest.approx(wanted, abs=1e-12)
