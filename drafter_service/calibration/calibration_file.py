"""``calibration.json`` beside a checkpoint.

The file names the weights that it was fitted to by the checkpoint's fingerprint, which does not
cover the file itself. Beside other weights it is refused: temperatures of another head would do
harm silently. So is a file with a number out of bounds.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final, get_args

from cluster.atomic_file import write_json
from cluster.errors import CheckpointError
from cluster.fingerprint import folder_fingerprint
from cluster.json_text import parse_json
from cluster.sampling import REGIMES
from drafter_service.calibration.calibration import Calibration, RegimeCalibration
from drafter_service.calibration.figures import Figures, Judgement
from drafter_service.calibration.scaling import (
    MAX_BEND,
    MAX_OFFSET,
    MIN_BEND,
    Method,
    Scaling,
)

CALIBRATION_FILE: Final = "calibration.json"
DIAGRAM_FILE: Final = "reliability.png"

_TEMPERATURES: Final = (1e-2, 1e2)
_COUNTS: Final = (0, 1 << 62)
_HINT: Final = "run `dspark calibrate` on this drafter, or delete the file to use raw confidences"


def save_calibration(checkpoint: Path, calibration: Calibration) -> None:
    """Write ``calibration.json`` into the folder; a reader sees the old file or the new one.

    Raises:
        StorageFull: the disk is full; what was there before stays.
    """
    regimes = {
        name: {
            **dataclasses.asdict(regime.scaling),
            "measured": regime.judgement and dataclasses.asdict(regime.judgement),
        }
        for name, regime in calibration.regimes.items()
    }
    value = {"fingerprint": calibration.fingerprint, "regimes": regimes}
    write_json(checkpoint / CALIBRATION_FILE, value)


def load_calibration(checkpoint: Path) -> Calibration | None:
    """The calibration beside a checkpoint, None if there is none.

    Raises:
        CheckpointError: the file is of other weights, is damaged, or holds a number out of bounds.
    """
    path = checkpoint / CALIBRATION_FILE
    if not path.exists():
        return None
    fields = _Fields(path, _read(path), "")
    calibration = Calibration(
        fingerprint=fields.word("fingerprint"),
        regimes={name: _regime(fields.inner("regimes").inner(name)) for name in REGIMES},
    )
    fields.only("fingerprint", "regimes")
    fields.inner("regimes").only(*REGIMES)
    if len({len(r.scaling.temperatures) for r in calibration.regimes.values()}) != 1:
        raise CheckpointError(f"{path}: regimes with unequal numbers of positions", hint=_HINT)
    if calibration.fingerprint != folder_fingerprint(checkpoint):
        raise CheckpointError(
            f"{path} was fitted to other weights than those beside it", hint=_HINT
        )
    return calibration


def remove_stale_calibration(checkpoint: Path) -> None:
    """Delete a calibration (and its diagram) that is not of the weights in the folder."""
    path = checkpoint / CALIBRATION_FILE
    if not path.is_file():
        return
    try:
        load_calibration(checkpoint)
    except CheckpointError:
        path.unlink(missing_ok=True)
        (checkpoint / DIAGRAM_FILE).unlink(missing_ok=True)


def _read(path: Path) -> object:
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}", hint=_HINT) from error


def _regime(fields: _Fields) -> RegimeCalibration:
    method = fields.word("method")
    temperatures = fields.numbers("temperatures", *_TEMPERATURES)
    num = len(temperatures)
    if not num:
        raise fields.wrong("temperatures", [])
    offsets = fields.numbers("offsets", -MAX_OFFSET, MAX_OFFSET, num)
    if method not in get_args(Method) or (method == "temperature" and any(offsets)):
        raise fields.wrong("method", method)
    bend = fields.number("bend", MIN_BEND, MAX_BEND)
    if bend != 1.0 and not method.endswith("bend"):
        raise fields.wrong("bend", bend)
    borrowed = fields.counts("borrowed", 1, num)
    fields.only("method", "temperatures", "offsets", "bend", "borrowed", "measured")
    judgement = None
    if fields.value["measured"] is not None:
        judgement = _judgement(fields.inner("measured"), num)
    return RegimeCalibration(
        scaling=Scaling(
            method=method,  # type: ignore[arg-type]  # checked above
            temperatures=temperatures,
            offsets=offsets,
            bend=bend,
            borrowed=borrowed,
        ),
        judgement=judgement,
    )


def _judgement(fields: _Fields, num: int) -> Judgement:
    fields.only(*(field.name for field in dataclasses.fields(Judgement)))
    return Judgement(
        temperature=fields.number("temperature", 0, 1e3),
        num_prompts=fields.count("num_prompts", *_COUNTS),
        num_rounds=fields.counts("num_rounds", *_COUNTS, num),
        num_reached=fields.counts("num_reached", *_COUNTS, num),
        before=_figures(fields.inner("before"), num),
        after=_figures(fields.inner("after"), num),
    )


def _figures(fields: _Fields, num: int) -> Figures:
    fields.only(*(field.name for field in dataclasses.fields(Figures)))
    return Figures(
        ece=fields.column("ece", num),
        auc=fields.column("auc", num),
        brier=fields.column("brier", num),
        ece_noise=fields.column("ece_noise", num),
        pooled_auc=fields.share("pooled_auc"),
        pooled_conditional_auc=fields.share("pooled_conditional_auc"),
    )


class _Fields:
    """A JSON object whose values are checked as they are taken out."""

    def __init__(self, path: Path, value: object, where: str) -> None:
        self.path, self.where = path, where
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: {where or 'the file'} is no object", hint=_HINT)
        self.value: dict[str, Any] = value

    def only(self, *names: str) -> None:
        """Refuse fields that are missing or unknown."""
        for name in {*names} ^ self.value.keys():
            raise self.wrong(name, "unknown" if name in self.value else "missing")

    def inner(self, name: str) -> _Fields:
        return _Fields(self.path, self.value.get(name), f"{self.where}{name}.")

    def word(self, name: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, value)
        return value

    def number(self, name: str, low: float, high: float) -> float:
        return self._bounded(name, self.value.get(name), low, high)

    def numbers(
        self, name: str, low: float, high: float, count: int | None = None
    ) -> tuple[float, ...]:
        """A list of ``count`` numbers, of any length by default."""
        value = self.value.get(name)
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise self.wrong(name, value)
        return tuple(self._bounded(name, number, low, high) for number in value)

    def count(self, name: str, low: int, high: int) -> int:
        return self._whole(name, self.value.get(name), low, high)

    def counts(self, name: str, low: int, high: int, size: int | None = None) -> tuple[int, ...]:
        """A list of ``size`` whole numbers, of any length by default."""
        value = self.value.get(name)
        if not isinstance(value, list) or (size is not None and len(value) != size):
            raise self.wrong(name, value)
        return tuple(self._whole(name, number, low, high) for number in value)

    def column(self, name: str, count: int) -> tuple[float | None, ...]:
        value = self.value.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(name, value)
        return tuple(None if v is None else self._bounded(name, v, 0, 1) for v in value)

    def share(self, name: str) -> float | None:
        value = self.value.get(name)
        return None if value is None else self._bounded(name, value, 0, 1)

    def wrong(self, name: str, value: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.where}{name}: {value!r}", hint=_HINT)

    def _whole(self, name: str, value: object, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, value)
        return value

    def _bounded(self, name: str, value: object, low: float, high: float) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, value)
        if not low <= value <= high:  # False for NaN too
            raise self.wrong(name, value)
        return value
