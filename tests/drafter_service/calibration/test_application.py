"""A drafter reports what its calibration makes of its confidence, and drafts what it drafted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster.config import DrafterConfig
from cluster.errors import CheckpointError
from drafter_service.calibration.calibration import Calibration
from drafter_service.calibration.calibration_file import CALIBRATION_FILE, save_calibration
from drafter_service.calibration.samples import LOGIT_LIMIT
from drafter_service.loading import save_drafter
from drafter_service.opening import open_drafter
from drafter_service.sampling import Block
from tests.drafter_service.calibration.values import calibration_of, make_calibration
from tests.drafter_service.test_sampling import GAMMA, draw, model_for
from tests.drafters import Feed, make_engine, make_model, make_spec, write_target
from tests.exactness.tiny import sampling

SETTINGS = [
    sampling(mode="rejection", temperature=0.8),
    sampling(mode="rejection", temperature=0.0),
    sampling(mode="coupled"),
]
REGIME_OF = ["rejection", "greedy", "coupled"]


def expected(raw: np.ndarray, calibration: Calibration, regimes: list[str]) -> np.ndarray:
    """Written out from the definition, in fp64."""
    rows = []
    for row, regime in zip(raw.astype(np.float64), regimes, strict=True):
        scaling = calibration.regimes[regime].scaling
        logit = np.clip(np.log(row / (1 - row)), -LOGIT_LIMIT, LOGIT_LIMIT)
        bent = logit + (scaling.bend - 1) * np.log1p(np.exp(logit))
        x = bent / np.array(scaling.temperatures) + np.array(scaling.offsets)
        rows.append(1 / (1 + np.exp(-x)))
    return np.array(rows)


@pytest.mark.parametrize("has_confidence", [True, False])
def test_each_session_of_a_mixed_batch_has_its_regimes_values(has_confidence: bool) -> None:
    model = model_for(has_confidence=has_confidence)
    calibration = make_calibration(GAMMA)
    raw = draw(model, SETTINGS)
    got = draw(model, SETTINGS, calibration=calibration)
    assert got.confidence.dtype == np.float32
    want = expected(raw.confidence, calibration, REGIME_OF)
    assert got.confidence == pytest.approx(want, abs=2e-5)
    assert np.abs(got.confidence - raw.confidence).min(axis=1).max() > 0.01


def test_nothing_but_confidence_changes() -> None:
    raw, got = (draw(model_for(), SETTINGS, calibration=c) for c in (None, make_calibration(GAMMA)))
    assert (got.ids == raw.ids).all()
    assert (got.q_ids == raw.q_ids).all()
    assert (got.q_probs == raw.q_probs).all()
    assert (got.has_q == raw.has_q).all()


def test_a_saturated_head_stays_a_probability() -> None:
    model = model_for()
    assert model.confidence_head is not None
    model.confidence_head.proj.bias.fill_(200.0)
    block = draw(model, SETTINGS, calibration=make_calibration(GAMMA))
    assert np.isfinite(block.confidence).all()
    assert ((block.confidence > 0.95) & (block.confidence <= 1)).all()


def blocks(checkpoint: Path, target: Path, *, calibrated: bool) -> Block:
    """A greedy session's block from a folder, opened as a replica opens it."""
    drafter = open_drafter(checkpoint, target, DrafterConfig(), calibrated=calibrated)
    feed = Feed(0, make_spec())
    block = drafter.run([feed.open(), feed.commit(9)], 0.0).block
    assert block is not None
    return block


def test_a_folders_calibration_reaches_the_blocks(tmp_path: Path) -> None:
    model = make_model(make_spec())
    target = write_target(tmp_path / "target", model)
    save_drafter(model, tmp_path / "drafter")
    raw = blocks(tmp_path / "drafter", target, calibrated=True)
    calibration = calibration_of(tmp_path / "drafter", 4)
    save_calibration(tmp_path / "drafter", calibration)
    got = blocks(tmp_path / "drafter", target, calibrated=True)
    want = expected(raw.confidence, calibration, ["greedy"])
    assert got.confidence == pytest.approx(want, abs=2e-5)
    assert (got.ids == raw.ids).all()
    again = blocks(tmp_path / "drafter", target, calibrated=False)
    assert (again.confidence == raw.confidence).all()


def test_a_foreign_calibration_stops_the_drafter(tmp_path: Path) -> None:
    model = make_model(make_spec())
    target = write_target(tmp_path / "target", model)
    save_drafter(model, tmp_path / "drafter")
    save_calibration(tmp_path / "drafter", make_calibration(4))
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        blocks(tmp_path / "drafter", target, calibrated=True)
    blocks(tmp_path / "drafter", target, calibrated=False)  # how `dspark calibrate` opens it


def test_a_calibration_of_other_blocks_is_refused() -> None:
    with pytest.raises(CheckpointError, match="3 positions"):
        make_engine(make_model(make_spec()), calibration=make_calibration(3))
