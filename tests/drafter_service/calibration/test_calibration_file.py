"""calibration.json: written whole, read back equal, refused beside other weights or with a number
that is none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from cluster.errors import CheckpointError
from cluster.fingerprint import folder_fingerprint
from drafter_service.calibration.calibration import Calibration
from drafter_service.calibration.calibration_file import (
    CALIBRATION_FILE,
    DIAGRAM_FILE,
    load_calibration,
    remove_stale_calibration,
    save_calibration,
)
from drafter_service.calibration.fitting import fit_regime
from drafter_service.calibration.scaling import Method
from drafter_service.loading import save_drafter
from tests.drafter_service.calibration.planted import planted
from tests.drafter_service.calibration.values import calibration_of
from tests.drafters import make_model, make_spec

GAMMA = 4


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_drafter(make_model(make_spec()), tmp_path)
    return tmp_path


def test_no_file_is_no_calibration(checkpoint: Path) -> None:
    assert load_calibration(checkpoint) is None


def test_round_trip(checkpoint: Path) -> None:
    calibration = calibration_of(checkpoint, GAMMA)
    save_calibration(checkpoint, calibration)
    assert load_calibration(checkpoint) == calibration
    assert {path.name for path in checkpoint.iterdir()} == {
        CALIBRATION_FILE,
        "config.json",
        "model.safetensors",
    }


def test_what_was_measured_is_kept(checkpoint: Path) -> None:
    fitted = fit_regime(planted(400, (1.5,) * GAMMA, seed=0), temperature=1.0).calibration
    calibration = calibration_of(checkpoint, GAMMA)
    measured = Calibration(
        fingerprint=calibration.fingerprint, regimes={**calibration.regimes, "coupled": fitted}
    )
    save_calibration(checkpoint, measured)
    assert load_calibration(checkpoint) == measured
    raw = json.loads((checkpoint / CALIBRATION_FILE).read_text())["regimes"]["coupled"]
    assert raw["method"] in get_args(Method)
    assert len(raw["measured"]["before"]["ece"]) == GAMMA


def test_the_file_is_not_part_of_the_model(checkpoint: Path) -> None:
    """A verifier that loads the same weights without it has the same fingerprint."""
    before = folder_fingerprint(checkpoint)
    save_calibration(checkpoint, calibration_of(checkpoint, GAMMA))
    assert folder_fingerprint(checkpoint) == before


def test_other_weights_refuse_it(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    save_calibration(checkpoint, calibration_of(checkpoint, GAMMA))
    other = tmp_path_factory.mktemp("other")
    save_drafter(make_model(make_spec(), seed=1), other)
    (other / "model.safetensors").replace(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="other weights") as caught:
        load_calibration(checkpoint)
    assert "dspark calibrate" in caught.value.hint


def test_saving_other_weights_removes_it(checkpoint: Path) -> None:
    save_calibration(checkpoint, calibration_of(checkpoint, GAMMA))
    (checkpoint / DIAGRAM_FILE).write_bytes(b"picture")
    save_drafter(make_model(make_spec(), seed=1), checkpoint)
    assert {path.name for path in checkpoint.iterdir()} == {"config.json", "model.safetensors"}


def test_saving_the_same_weights_keeps_it(checkpoint: Path) -> None:
    calibration = calibration_of(checkpoint, GAMMA)
    save_calibration(checkpoint, calibration)
    save_drafter(make_model(make_spec()), checkpoint)
    assert load_calibration(checkpoint) == calibration


def _damage(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0, -1.0, 1e9, True, None, "1"])
def test_no_temperature_but_a_sane_number(checkpoint: Path, number: object) -> None:
    save_calibration(checkpoint, calibration_of(checkpoint, GAMMA))

    def edit(value: dict[str, Any]) -> None:
        value["regimes"]["coupled"]["temperatures"][2] = number

    _damage(checkpoint / CALIBRATION_FILE, edit)
    with pytest.raises(CheckpointError, match=r"regimes\.coupled\.temperatures") as caught:
        load_calibration(checkpoint)
    assert caught.value.hint


EDITS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    (r"regimes\.greedy\.offsets", lambda v: v["regimes"]["greedy"]["offsets"].append(0.0)),
    (r"regimes\.greedy\.offsets", lambda v: v["regimes"]["greedy"].update(offsets=[9.0] * GAMMA)),
    (r"regimes\.greedy\.temperatures", lambda v: v["regimes"]["greedy"].update(temperatures=[])),
    (r"regimes\.greedy\.method", lambda v: v["regimes"]["greedy"].update(method="magic")),
    (r"regimes\.greedy\.method", lambda v: v["regimes"]["greedy"].update(method="temperature")),
    (r"regimes\.greedy\.bend", lambda v: v["regimes"]["greedy"].update(bend=0.0)),
    (r"regimes\.greedy\.bend", lambda v: v["regimes"]["greedy"].pop("bend")),
    (
        r"regimes\.greedy\.bend",
        lambda v: v["regimes"]["greedy"].update(method="temperature+offset", bend=0.5),
    ),
    (r"regimes\.greedy\.borrowed", lambda v: v["regimes"]["greedy"].update(borrowed=[5])),
    (r"regimes\.greedy\.borrowed", lambda v: v["regimes"]["greedy"].update(borrowed=[1.5])),
    (r"regimes\.greedy\.borrowed", lambda v: v["regimes"]["greedy"].update(borrowed=[True])),
    (r"regimes\.greedy\.more: 'unknown'", lambda v: v["regimes"]["greedy"].update(more=1)),
    (r"regimes\.rejection", lambda v: v["regimes"].pop("rejection")),
    (r"regimes\.warm", lambda v: v["regimes"].update(warm={})),
    ("fingerprint", lambda v: v.pop("fingerprint")),
    ("version: 'unknown'", lambda v: v.update(version=1)),
    (r"greedy\.measured", lambda v: v["regimes"]["greedy"].update(measured={})),
]


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "null"])
def test_a_file_that_is_no_object_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / CALIBRATION_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"calibration\.json") as caught:
        load_calibration(checkpoint)
    assert caught.value.hint


def test_a_folder_in_its_place_is_not_taken_for_none(checkpoint: Path) -> None:
    (checkpoint / CALIBRATION_FILE).mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        load_calibration(checkpoint)


@pytest.mark.parametrize("count", [-1, 10**400, float("nan"), 7.5])
def test_a_count_is_a_count(checkpoint: Path, count: float) -> None:
    fitted = fit_regime(planted(400, (1.5,) * GAMMA, seed=0), temperature=1.0).calibration
    calibration = calibration_of(checkpoint, GAMMA)
    regimes = dict.fromkeys(calibration.regimes, fitted)
    save_calibration(checkpoint, dataclasses.replace(calibration, regimes=regimes))

    def edit(value: dict[str, Any]) -> None:
        value["regimes"]["greedy"]["measured"]["num_reached"][0] = count

    _damage(checkpoint / CALIBRATION_FILE, edit)
    with pytest.raises(CheckpointError, match=r"measured\.num_reached"):
        load_calibration(checkpoint)


@pytest.mark.parametrize(("named", "edit"), EDITS)
def test_a_damaged_file_names_the_field(
    checkpoint: Path, named: str, edit: Callable[[dict[str, Any]], object]
) -> None:
    save_calibration(checkpoint, calibration_of(checkpoint, GAMMA))
    _damage(checkpoint / CALIBRATION_FILE, edit)
    with pytest.raises(CheckpointError, match=named):
        load_calibration(checkpoint)


@pytest.mark.parametrize("value", [1.5, float("nan"), -0.1, "x"])
def test_measured_figures_are_checked(checkpoint: Path, value: object) -> None:
    fitted = fit_regime(planted(400, (1.5,) * GAMMA, seed=0), temperature=1.0).calibration
    calibration = calibration_of(checkpoint, GAMMA)
    regimes = dict.fromkeys(calibration.regimes, fitted)
    save_calibration(checkpoint, dataclasses.replace(calibration, regimes=regimes))

    def edit(raw: dict[str, Any]) -> None:
        raw["regimes"]["greedy"]["measured"]["after"]["ece"][0] = value

    _damage(checkpoint / CALIBRATION_FILE, edit)
    with pytest.raises(CheckpointError, match=r"measured\.after\.ece"):
        load_calibration(checkpoint)


def test_regimes_of_unequal_length_are_refused(checkpoint: Path) -> None:
    calibration = calibration_of(checkpoint, GAMMA)
    longer = calibration_of(checkpoint, GAMMA + 1).regimes["greedy"]
    regimes = {**calibration.regimes, "greedy": longer}
    save_calibration(checkpoint, dataclasses.replace(calibration, regimes=regimes))
    with pytest.raises(CheckpointError, match="unequal"):
        load_calibration(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_what_is_no_object_is_refused_and_removable(checkpoint: Path, text: str) -> None:
    (checkpoint / CALIBRATION_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        load_calibration(checkpoint)
    remove_stale_calibration(checkpoint)
    assert load_calibration(checkpoint) is None
