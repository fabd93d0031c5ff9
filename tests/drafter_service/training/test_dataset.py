from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from cluster.errors import DatasetError
from drafter_service.training.dataset import (
    Record,
    load_records,
    response_bigrams,
    response_frequencies,
    split,
)


def _record(prompt: tuple[int, ...], response: tuple[int, ...]) -> Record:
    return Record(prompt=prompt, response=response, temperature=0.0, source="")


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_records_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    row = {"prompt": [1, 5], "response": [6, 7, 2], "t": 0.7, "source": "x"}
    plain = _write(tmp_path / "a.jsonl", row)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    (record,) = load_records(plain, vocab_size=8, max_length=10)
    assert record == Record(prompt=(1, 5), response=(6, 7, 2), temperature=0.7, source="x")
    assert load_records(packed, vocab_size=8, max_length=10) == [record]


def test_long_sequences_are_cut_and_hopeless_ones_left_out(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "a.jsonl",
        {"prompt": [1, 2], "response": [3, 4, 5, 6]},
        {"prompt": [1, 2, 3, 4], "response": [3, 4]},  # room for one token: no anchor fits
        {"prompt": [1], "response": [3]},  # nothing after the anchor
    )
    (record,) = load_records(path, vocab_size=8, max_length=5)
    assert record.ids == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no usable record"),
        ("not json\n", ":1 is not a record"),
        ('{"prompt": [1]}\n', "response"),
        ('{"prompt": [1], "response": []}\n', "empty"),
        ('{"prompt": [1], "response": [3, 8]}\n', "id 8, outside"),
        ('{"prompt": [1], "response": [3, -1]}\n', "id -1, outside"),
        ('{"prompt": [1], "response": [3, 0.5]}\n', "id 0.5, outside"),
    ],
)
def test_bad_files_are_named_with_line_and_value(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DatasetError, match=message):
        load_records(path, vocab_size=8, max_length=10)


def test_a_missing_or_truncated_file_is_a_dataset_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no training data"):
        load_records(tmp_path / "none.jsonl", vocab_size=8, max_length=10)
    cut = tmp_path / "a.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"prompt": [1], "response": [3, 4]}\n' * 100)[:-12])
    with pytest.raises(DatasetError, match="cannot read"):
        load_records(cut, vocab_size=8, max_length=10)


def test_split_keeps_samples_of_one_prompt_together_and_depends_on_the_seed_only() -> None:
    records = [_record((n,), (n, sample)) for n in range(30) for sample in range(3)]
    training, held_out = split(records, num_held_out=5, seed=1)
    assert len(held_out) == 15
    assert len(training) == 75
    assert not {r.prompt for r in training} & {r.prompt for r in held_out}
    assert (training, held_out) == split(records, num_held_out=5, seed=1)
    assert held_out != split(records, num_held_out=5, seed=2)[1]
    with pytest.raises(DatasetError, match="hold out 30 of 30"):
        split(records, num_held_out=30, seed=1)


def test_frequencies_and_bigrams_count_responses_only() -> None:
    records = [_record((9, 9), (1, 2, 1)), _record((9,), (2, 3))]
    assert response_frequencies(records) == {1: 2, 2: 2, 3: 1}
    t2d = torch.tensor([-1, 0, 1, -1])  # 3 is outside the draft vocabulary
    assert response_bigrams(records, t2d).tolist() == [[1, 1], [2, 0]]
