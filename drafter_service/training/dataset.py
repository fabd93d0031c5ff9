"""Training data: prompts and the target's own responses, as token ids.

One JSON object per line (optionally gzipped): ``prompt`` and ``response`` are lists of target ids
(chat template applied, end token included where the target gave one), ``t`` the temperature the
response was drawn at, ``source`` a free label used only in reports.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from cluster.errors import DatasetError


@dataclass(frozen=True, kw_only=True)
class Record:
    """One prompt with one response, both in target ids."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    temperature: float
    source: str

    @property
    def ids(self) -> tuple[int, ...]:
        """The whole sequence; position i holds ``ids[i]``."""
        return self.prompt + self.response


def load_records(path: Path, *, vocab_size: int, max_length: int) -> list[Record]:
    """Read every record; responses are cut so that a sequence has at most ``max_length`` ids.

    Raises:
        DatasetError: the file is missing, empty, or a line is not a record of this target.
    """
    if not path.is_file():
        raise DatasetError(f"no training data at {path}", hint="pass a .jsonl or .jsonl.gz file")
    records = []
    for number, line in enumerate(_lines(path), start=1):
        record = _parse(line, f"{path}:{number}", vocab_size)
        room = max_length - len(record.prompt)
        if min(room, len(record.response)) < 2:
            continue  # an anchor needs a response token, and one after it
        records.append(
            Record(
                prompt=record.prompt,
                response=record.response[:room],
                temperature=record.temperature,
                source=record.source,
            )
        )
    if not records:
        raise DatasetError(
            f"{path} holds no usable record",
            hint=f"each needs a response of 2 ids or more after a prompt below {max_length - 1}",
        )
    return records


def split(
    records: Sequence[Record], *, num_held_out: int, seed: int
) -> tuple[list[Record], list[Record]]:
    """Shuffle by ``seed`` and split into (training, held out); no prompt is on both sides.

    Raises:
        DatasetError: nothing would be left on one of the two sides.
    """
    by_prompt: dict[tuple[int, ...], list[Record]] = {}
    for record in records:
        by_prompt.setdefault(record.prompt, []).append(record)
    groups = list(by_prompt.values())
    if not 0 < num_held_out < len(groups):
        raise DatasetError(
            f"cannot hold out {num_held_out} of {len(groups)} prompts",
            hint="hold out at least one prompt and keep one for training",
        )
    random.Random(seed).shuffle(groups)
    return _flatten(groups[num_held_out:]), _flatten(groups[:num_held_out])


def response_frequencies(records: Iterable[Record]) -> Counter[int]:
    """How often each id occurs in the responses."""
    counts: Counter[int] = Counter()
    for record in records:
        counts.update(record.response)
    return counts


def response_bigrams(records: Iterable[Record], t2d: Tensor) -> Tensor:
    """int64 [M, 2]: (response id, draft id of the one after it), where that has one."""
    pairs = [pair for record in records for pair in pairwise(record.response)]
    bigrams = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    bigrams[:, 1] = t2d[bigrams[:, 1]]
    return bigrams[bigrams[:, 1] >= 0]


def _flatten(groups: Iterable[list[Record]]) -> list[Record]:
    return [record for group in groups for record in group]


def _lines(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    yield line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


def _parse(line: str, where: str, vocab_size: int) -> Record:
    try:
        raw = json.loads(line)
        record = Record(
            prompt=tuple(raw["prompt"]),
            response=tuple(raw["response"]),
            temperature=float(raw.get("t", 0.0)),
            source=str(raw.get("source", "")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"{where} is not a record ({type(error).__name__}: {error})",
            hint="a line is a JSON object with id lists `prompt` and `response`",
        ) from error
    if not record.prompt or not record.response:
        raise DatasetError(f"{where} has an empty prompt or response")
    for token in record.ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise DatasetError(
                f"{where} has id {token!r}, outside the target's vocabulary of {vocab_size}",
                hint="the data must come from the target that is trained for",
            )
    return record
