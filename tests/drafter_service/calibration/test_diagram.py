"""The reliability diagram shows every regime before and after, with points where they belong."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from drafter_service.calibration.diagram import reliability_points, write_diagram
from drafter_service.calibration.fitting import fit_regime
from tests.drafter_service.calibration.planted import planted


def test_a_picture_with_a_row_per_regime(tmp_path: Path) -> None:
    from matplotlib.image import imread

    fitted = {
        name: fit_regime(planted(300, (2.0, 1.0), seed=0), temperature=1.0)
        for name in ("greedy", "coupled")
    }
    shapes = []
    for names in (("greedy",), ("greedy", "coupled")):
        write_diagram(tmp_path / "r.png", {name: fitted[name] for name in names})
        picture = imread(BytesIO((tmp_path / "r.png").read_bytes()), format="png")
        assert picture[..., :3].std() > 0.05, "blank"
        shapes.append(picture.shape)
    assert shapes[1][0] == pytest.approx(2 * shapes[0][0], rel=0.05)
    assert shapes[1][1] == shapes[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["r.png"]


def test_points_are_means_of_equally_filled_bins() -> None:
    stated = np.linspace(0, 1, 120)
    happened = np.arange(120) >= 60
    shuffle = np.random.default_rng(0).permutation(120)
    x, y = reliability_points(stated[shuffle], happened[shuffle])
    assert x == pytest.approx([stated[:40].mean(), stated[40:80].mean(), stated[80:].mean()])
    assert y.tolist() == [0.0, 0.5, 1.0]


def test_few_rounds_make_one_point() -> None:
    x, y = reliability_points(np.array([0.2, 0.4]), np.array([False, True]))
    assert (x.tolist(), y.tolist()) == (pytest.approx([0.3]), [0.5])
