"""Which requests are taken, which are refused and by what name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cluster.errors import (
    BadSamplingParameter,
    DSparkError,
    InvalidRequest,
    PromptTooLong,
    TokenOutOfVocabulary,
)
from tests.frames import make_admission, make_sampling, make_step
from tests.verifier_service.conformance.rounds import Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.torch_targets import VOCAB_SIZE, prompt
from verifier_service.engine import Engine


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"ids": []}, InvalidRequest),
        ({"num_prompt": 0}, InvalidRequest),
        ({"num_prompt": 6}, InvalidRequest),
        ({"ids": [1, VOCAB_SIZE]}, TokenOutOfVocabulary),
        ({"ids": [-1, 1]}, TokenOutOfVocabulary),
        ({"ids": [1] * 64}, PromptTooLong),
        ({"max_new_tokens": 0}, InvalidRequest),
        ({"num_prompt": 2, "max_new_tokens": 3}, InvalidRequest),
        ({"sampling": make_sampling(temperature=-1.0)}, BadSamplingParameter),
        ({"sampling": make_sampling(mode="guess")}, BadSamplingParameter),
    ],
)
def test_bad_admissions_are_refused_by_name(
    changes: dict[str, Any], error: type[DSparkError], engine: Engine
) -> None:
    changes = dict(changes)
    ids = changes.pop("ids", [1, 2, 3, 4, 5])
    bad = dataclasses.replace(make_admission(0, ids), **changes)
    with pytest.raises(error):
        engine.check(bad)
    rounds = Rounds(engine)
    rounds.add(bad, make_admission(1, prompt(5)))
    assert rounds.step().rid.tolist() == [1]
    assert rounds.refused == {0: error.__name__}


def test_the_same_request_twice_is_refused(engine: Engine) -> None:
    rounds = Rounds(engine)
    rounds.add(make_admission(0, prompt(5)))
    rounds.step()
    again = make_step(admissions=(make_admission(0, prompt(6)),))
    assert [failure.code for failure in engine.step(again).result.failures] == ["FrameError"]
    assert rounds.step().rid.tolist() == [0]


def test_more_requests_than_it_holds_is_overload(engine: Engine) -> None:
    """Refused at once; admitted when one has left, in the very step of the release."""
    most = engine.limits.max_requests
    step = make_step(
        admissions=tuple(make_admission(rid, prompt(3, rid)) for rid in range(most + 1))
    )
    assert [(f.rid, f.code) for f in engine.step(step).result.failures] == [(most, "Overloaded")]
    step = make_step(
        admissions=(make_admission(most, prompt(3, most)),), releases=np.array([4], np.int64)
    )
    assert not engine.step(step).result.failures


def test_continuation_after_a_fault(engine: Engine, tiny: Target) -> None:
    """Admitted with what it had emitted, it says the same rest, counted from the prompt."""
    ids = prompt(9, 80)
    text = tiny.greedy(ids, 20)
    rounds = Rounds(engine)
    admission = make_admission(7, [*ids, *text[:12]], max_new_tokens=20)
    rounds.run([dataclasses.replace(admission, num_prompt=len(ids))])
    assert rounds.emitted(7) == text
