"""The runs of an evaluation, and plans that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.errors import BadSamplingParameter, ConfigError
from deploy.offline.evaluation import Plan, measure
from deploy.offline.prompts import Prompt
from deploy.offline.rounds import LocalPair
from tests.deploy.random_drafter import write_random_drafter
from tests.verifier_service.torch_targets import prompt, save_llama


def make_plan(**changes: Any) -> Plan:
    return Plan(**{"drafters": ("random", "ngram"), "max_new_tokens": 10, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"temperatures": (-0.5,)}, BadSamplingParameter, "temperature -0.5"),
        ({"temperatures": (float("nan"),)}, BadSamplingParameter, "temperature nan"),
        ({"temperatures": (1e9,)}, BadSamplingParameter, "temperature 1000000000.0"),
        ({"temperatures": (1.0, 1.0)}, ConfigError, "temperatures"),
        ({"drafters": ("a", "a")}, ConfigError, "drafters"),
        ({"seed": 1 << 32}, ConfigError, "seed 4294967296"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        ({"concurrency": 0}, ConfigError, "concurrency"),
        ({"batch_prompts": 0}, ConfigError, "batch_prompts"),
        ({"batch_sizes": (0,)}, ConfigError, "batch size: 0"),
        ({"batch_sizes": (64,), "concurrency": 8}, ConfigError, "over the concurrency"),
    ],
)
def test_impossible_plans_are_refused(
    changes: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        make_plan(**changes)


def test_greedy_runs_once_and_sampling_in_each_mode() -> None:
    plan = make_plan(temperatures=(0.0, 0.7))
    assert [regime.title for regime in plan.regimes] == [
        "greedy",
        "T=0.7, coupled",
        "T=0.7, rejection",
    ]
    assert [r.name for r in make_plan(modes=("rejection",)).regimes] == ["greedy", "rejection"]


def test_all_drafters_run_in_all_regimes_and_batches(tmp_path: Path) -> None:
    """Progress reaches exactly what the plan said, and coupled text is one for all drafters."""
    target = tmp_path / "target"
    save_llama(target)
    checkpoint = write_random_drafter(tmp_path / "drafter", target)
    prompts = [
        Prompt(ids=tuple(prompt(5 + 3 * i, seed=i)), source="s", domain="d") for i in range(6)
    ]
    plan = make_plan(batch_sizes=(1, 2), batch_prompts=3, concurrency=4)
    advanced: list[int] = []

    def open_pair(name: str) -> LocalPair:
        return LocalPair.open(target, checkpoint if name == "random" else name, device="cpu")

    found = list(measure(plan, prompts, open_pair, lambda what, tokens: advanced.append(tokens)))
    assert sum(advanced) == plan.num_tokens(len(prompts))
    assert [(one.drafter, one.regime.name, one.draft_batch) for one in found] == [
        (drafter, *run)
        for drafter in ("random", "ngram")
        for run in (
            ("greedy", None),
            ("coupled", None),
            ("rejection", None),
            ("greedy", 1),
            ("greedy", 2),
        )
    ]
    for one in found:
        assert one.num_lost == 0
        num_prompts = 6 if one.draft_batch is None else 3
        assert len(set(one.table.prompt.tolist())) == num_prompts
        # The prefill gives the first of the ten tokens.
        assert one.table.num_emitted.sum() == 9 * num_prompts
    greedy, smaller, small = found[0], found[3], found[4]
    spread = greedy.table.of(greedy.table.prompt % 2 == 0)
    for one in (smaller, small):  # batch size changes nothing
        assert sorted(one.table.anchor.tolist()) == sorted(spread.anchor.tolist())
    assert "random, greedy, batches of 1: accepted length 1." in smaller.summary
