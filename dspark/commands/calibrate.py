"""`dspark calibrate`: fit a drafter's confidence to what its target accepts.

Rounds of the real pair in the three regimes, a scaling for each (`drafter_service.calibration`),
``calibration.json`` and ``reliability.png`` beside the checkpoint. The drafter pool applies the
file from its next start.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cluster.errors import CheckpointError, ConfigError
from cluster.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE

if TYPE_CHECKING:
    from rich.table import Table

    from deploy.offline.rounds import LocalPair, Prompt, Round
    from drafter_service.calibration.calibration import RegimeCalibration
    from drafter_service.calibration.fitting import Fitted

_FIGURES: Final = ("ECE\nraw", "ECE", "chance", "AUC\nraw", "AUC", "Brier\nraw", "Brier")
_FOOTNOTE: Final = """\
Figures are of the survival of the first k drafts. Each half of the prompts was judged by a fit to
the other half; the values stored are fitted to all. Chance is the ECE to expect of a perfect
confidence over so many rounds: to see less, give more prompts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--target", required=True, help="model name, folder or hub id")
    parser.add_argument(
        "--drafter", required=True, help="checkpoint folder or bundled name; files go beside it"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL; must be held out: on prompts that it was trained on a drafter is better "
        "than it will be, and no file says which those were; at least 8 prompts, and answers that "
        "give 200 rounds in each regime",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="use N prompts, spread evenly over the file"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled regimes")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests at once")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: its own choice")


def run(args: argparse.Namespace) -> int:
    """Calibrate, print the figures, write the files."""
    _check(args)
    from deploy.replica import set_threads

    set_threads(args.threads)  # before torch is imported
    from rich.console import Console

    from cluster.fingerprint import folder_fingerprint
    from cluster.model_store import ensure_model
    from deploy.offline.opening import resolve_drafter
    from drafter_service.calibration.calibration import Calibration
    from drafter_service.calibration.calibration_file import (
        CALIBRATION_FILE,
        DIAGRAM_FILE,
        save_calibration,
    )
    from drafter_service.calibration.diagram import check_matplotlib, write_diagram

    check_matplotlib()
    target, checkpoint = ensure_model(args.target), resolve_drafter(args.drafter, args.target)
    if not isinstance(checkpoint, Path):
        raise ConfigError(f"--drafter {args.drafter}: has no checkpoint to calibrate")
    _check_writable(checkpoint, CALIBRATION_FILE, DIAGRAM_FILE)
    fingerprint = folder_fingerprint(checkpoint)
    fitted = _fit(args, target, checkpoint)
    console = Console()
    for regime, one in fitted.items():
        console.print(_table(regime, one.calibration))
    if folder_fingerprint(checkpoint) != fingerprint:
        raise CheckpointError(f"{checkpoint} was rewritten meanwhile", hint="calibrate again")
    write_diagram(checkpoint / DIAGRAM_FILE, fitted)
    regimes = {regime: one.calibration for regime, one in fitted.items()}
    save_calibration(checkpoint, Calibration(fingerprint=fingerprint, regimes=regimes))
    print(_FOOTNOTE)
    print(f"written beside {checkpoint}: {CALIBRATION_FILE}, {DIAGRAM_FILE}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for a flag out of range."""
    for name in ("limit", "max_new_tokens", "concurrency"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {value}", hint="at least 1")
    if not MIN_TEMPERATURE <= args.temperature <= MAX_TEMPERATURE:
        raise ConfigError(
            f"--temperature: {args.temperature}",
            hint=f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}: temperature 0 is a regime of its own "
            "and always calibrated",
        )


def _check_writable(checkpoint: Path, *names: str) -> None:
    """Find out before the work, not after it, whether its files can be written.

    Raises:
        ConfigError: they cannot.
    """
    try:
        with tempfile.TemporaryFile(dir=checkpoint):
            pass
    except OSError as error:
        raise ConfigError(
            f"--drafter: cannot write to {checkpoint}: {error.strerror}",
            hint="the files go beside the checkpoint: calibrate a copy of the folder",
        ) from error
    for name in names:
        if (checkpoint / name).is_dir():
            raise ConfigError(f"--drafter: {checkpoint / name} is a folder", hint="delete it")


def _fit(args: argparse.Namespace, target: Path, checkpoint: Path) -> dict[str, Fitted]:
    """Run the rounds of every regime, with raw confidence, and fit each regime by itself."""
    from rich.progress import Progress

    from cluster.sampling import REGIMES
    from deploy.offline.opening import kv_tokens_for
    from deploy.offline.prompts import load_prompts
    from deploy.offline.rounds import LocalPair
    from deploy.text_model import load_text_model
    from drafter_service.calibration.fitting import fit_regime
    from drafter_service.calibration.samples import to_samples
    from dspark.progress import erased_on_failure

    text = load_text_model(target)
    prompts = _spread(load_prompts(args.prompts, text), args.limit)
    kv_tokens = kv_tokens_for(
        prompts,
        max_new_tokens=args.max_new_tokens,
        max_positions=text.max_positions,
        concurrency=args.concurrency,
    )
    pair = LocalPair.open(target, checkpoint, calibrated=False, kv_tokens=kv_tokens)
    fitted = {}
    with erased_on_failure(Progress()) as bar:
        for regime in REGIMES:
            task = bar.add_task(regime, total=len(prompts))
            rounds = list(_rounds(pair, prompts, regime, args, partial(bar.advance, task)))
            if not rounds:
                raise ConfigError(
                    f"{regime}: no round had a draft", hint="longer answers: --max-new-tokens"
                )
            bar.update(task, description=f"{regime}, fitting")
            samples = to_samples(rounds, stop_ids=text.eos_ids)
            fitted[regime] = fit_regime(samples, temperature=_temperature(regime, args))
            bar.update(task, description=regime)
    return fitted


def _rounds(
    pair: LocalPair,
    prompts: list[Prompt],
    regime: str,
    args: argparse.Namespace,
    answered: Callable[[], None],
) -> Iterator[Round]:
    """The regime's rounds that had a block; ``answered`` is called after each prompt's last."""
    from deploy.offline.rounds import Round

    for event in pair.play(
        prompts,
        temperature=_temperature(regime, args),
        mode="rejection" if regime == "rejection" else "coupled",
        max_new_tokens=args.max_new_tokens,
        concurrency=args.concurrency,
        seed=args.seed,
    ):
        if not isinstance(event, Round):
            answered()
        elif event.draft_ids:
            yield event


def _temperature(regime: str, args: argparse.Namespace) -> float:
    temperature: float = args.temperature
    return 0.0 if regime == "greedy" else temperature


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """``limit`` prompts at even distances: files are often sorted by data set."""
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _table(regime: str, calibration: RegimeCalibration) -> Table:
    """Values and figures, position by position."""
    from rich import box
    from rich.table import Table

    scaling, judgement = calibration.scaling, calibration.judgement
    assert judgement is not None
    before, after = judgement.before, judgement.after
    bend = f" {scaling.bend:g}" if scaling.bend != 1.0 else ""
    table = Table(
        title=f"{regime}: {scaling.method}{bend}, {judgement.num_prompts} prompts, pooled AUC "
        f"{_number(before.pooled_auc)} raw, {_number(after.pooled_auc)} now",
        caption="* too few rounds: the values of the position before" if scaling.borrowed else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    for name in ("k", "rounds", "reached", "T", "offset", *_FIGURES):
        table.add_column(name, justify="right")
    for k, (temperature, offset) in enumerate(
        zip(scaling.temperatures, scaling.offsets, strict=True)
    ):
        figures = [before.ece, after.ece, after.ece_noise]
        figures += [before.auc, after.auc, before.brier, after.brier]
        table.add_row(
            f"{k + 1}{'*' if k + 1 in scaling.borrowed else ''}",
            str(judgement.num_rounds[k]),
            str(judgement.num_reached[k]),
            f"{temperature:.2f}",
            f"{offset:+.2f}" if offset else "",
            *(_number(column[k]) for column in figures),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
