"""The engine replays the reference implementation's rounds: logits, raw and projected features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cluster.drafter_checkpoint import load_projection
from tests.frames import Row, make_step
from tests.verifier_service.torch_targets import Lane, admission, make_engine
from verifier_service.projection import FeatureProjection
from verifier_service.torch_engine import TorchEngine
from verifier_service.torch_engine.attention import Span
from verifier_service.torch_engine.batch import lay_out

pytestmark = pytest.mark.shared

TOLERANCE = 1e-4
NUM_ROUNDS = 5


@pytest.fixture(params=["vanilla", "rnn"])
def golden(request: pytest.FixtureRequest, shared_dir: Path) -> Path:
    return shared_dir / "golden" / str(request.param)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max())


def test_logits_and_raw_features(golden: Path) -> None:
    """The forward alone, fed the golden blocks, committing as many rows as the golden says."""
    expected = load_file(golden / "expected.safetensors")
    engine = make_engine(golden / "target", drafter=golden / "drafter")
    ids = expected["prompt_ids"].tolist()
    reservation = engine._allocator.reserve(512)
    assert reservation is not None

    def run(new: list[int], first: int) -> tuple[torch.Tensor, torch.Tensor]:
        span = Span(ids=new, first=first, reservation=reservation, num_logits=len(new))
        batch = lay_out([span], engine._model).batch
        output = engine._model.forward(batch, engine._cache, engine._taps)
        assert output.features is not None
        return output.logits, output.features

    logits, features = run(ids, 0)
    ids.append(int(logits[-1].argmax()))
    for r in range(NUM_ROUNDS):
        block = {k: expected[f"round{r}.{k}"] for k in ("draft_tokens", "anchor_token")}
        anchor = int(expected[f"round{r}.anchor_position"])
        assert (anchor, ids[-1]) == (len(ids) - 1, int(block["anchor_token"][0]))
        assert error(features, expected[f"round{r}.context_features"]) < TOLERANCE
        logits, features = run([ids[-1], *block["draft_tokens"].tolist()], anchor)
        assert error(logits, expected[f"round{r}.target_logits"]) < TOLERANCE
        num_rows = int(expected[f"round{r}.num_committed_rows"])
        ids += block["draft_tokens"][: num_rows - 1].tolist()
        ids.append(int(logits[num_rows - 1].argmax()))
        assert ids[-1] == int(expected[f"round{r}.next_token"])
        features = features[:num_rows]


def test_projection(golden: Path) -> None:
    expected = load_file(golden / "expected.safetensors")
    projection = FeatureProjection(
        load_projection(golden / "drafter", golden / "target"), device=torch.device("cpu")
    )
    for r in range(NUM_ROUNDS):
        got = projection(expected[f"round{r}.context_features"])
        assert error(got, expected[f"round{r}.projected_context"]) < 1e-5


@pytest.mark.parametrize("prefill_budget", [9, 64])
def test_engine_ships_the_projected_context(golden: Path, prefill_budget: int) -> None:
    """Through `Engine.step`, with the prompt in chunks and beside other requests.

    Where the golden commits drafts that the target did not accept, the text here goes its own
    way, so rounds are compared up to there.
    """
    expected = load_file(golden / "expected.safetensors")
    engine: TorchEngine = make_engine(golden / "target", drafter=golden / "drafter")
    ids = expected["prompt_ids"].tolist()
    lane = Lane(engine)
    others = [admission(rid, [rid, 2, 3], 64) for rid in (1, 2)]
    lane.step([others[0], admission(0, ids, 64), others[1]], prefill_budget=prefill_budget)
    while 0 not in lane.decoding:
        lane.step(rids=[], prefill_budget=prefill_budget)
    shipped = [c for o in lane.outcomes for c in o.committed if c.rid == 0]
    for r in range(NUM_ROUNDS):
        features = torch.cat([c.features for c in shipped if c.features is not None])
        assert error(features, expected[f"round{r}.projected_context"]) < TOLERANCE
        assert lane.ids[0][-1] == int(expected[f"round{r}.anchor_token"][0])
        drafts = expected[f"round{r}.draft_tokens"].tolist()
        result = lane.step(drafter=lambda rid, known, d=drafts: d if rid == 0 else d[:2])
        index = result.rid.tolist().index(0)
        accepted = int(result.num_accepted[index])
        assert accepted == int(expected[f"round{r}.num_accepted"])
        if accepted + 1 != int(expected[f"round{r}.num_committed_rows"]):
            break
        shipped = [c for c in lane.outcomes[-1].committed if c.rid == 0]
    assert r >= 1


def test_finished_requests_ship_what_was_kept(golden: Path) -> None:
    engine = make_engine(golden / "target", drafter=golden / "drafter")
    lane = Lane(engine)
    lane.step([admission(0, [5, 6, 7], 3)])
    step = make_step([Row(rid=0, ids=lane.ids[0], draft_ids=[1, 2, 3])])
    while True:
        outcome = engine.step(step)
        (rows,) = outcome.committed
        assert rows.features is not None
        assert rows.features.shape == (len(rows.ids), 64)
        assert np.isfinite(rows.features.numpy()).all()
        if rows.finished:
            break
        lane._apply(outcome.result)
        step = make_step([Row(rid=0, ids=lane.ids[0])])
