from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.errors import CheckpointError, StorageFull
from drafter_service.training.dataset import Record, load_records
from drafter_service.training.features import (
    FeatureStore,
    StoreKey,
    compute_features,
)
from drafter_service.training.shards import FeatureSequence, GeneratedFeatures
from drafter_service.training.target import Target

TAPS = (0, 2)
Compute = Callable[[Sequence[Record]], list[FeatureSequence]]
KEY = StoreKey(target="t", data="d", target_layer_ids=TAPS, shard_size=8)


@pytest.fixture(scope="module")
def records(tiny: Path) -> list[Record]:
    return load_records(tiny / "data.jsonl", vocab_size=64, max_length=40)


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return Target(tiny / "target")


@pytest.fixture(scope="module")
def compute(target: Target) -> Compute:
    return partial(compute_features, target, target_layer_ids=TAPS)


def _refuse(records: Sequence[Record]) -> list[FeatureSequence]:
    raise AssertionError("no shard should be computed")


def test_features_are_the_outputs_of_the_tapped_layers(
    tiny: Path, target: Target, records: list[Record]
) -> None:
    sequence = compute_features(target, records[:1], TAPS)[0]
    model = AutoModelForCausalLM.from_pretrained(tiny / "target", dtype=torch.float32)
    with torch.no_grad():
        out = model(torch.tensor([records[0].ids]), output_hidden_states=True)
    expected = torch.cat([out.hidden_states[layer + 1][0] for layer in TAPS], dim=-1)
    torch.testing.assert_close(sequence.features.float(), expected, rtol=2**-7, atol=1e-3)
    assert sequence.ids.tolist() == list(records[0].ids)
    assert sequence.num_prompt == len(records[0].prompt)


def test_log_normaliser_rebuilds_full_vocabulary_probabilities(
    tiny: Path, target: Target, records: list[Record]
) -> None:
    sequence = compute_features(target, records[:1], TAPS)[0]
    model = AutoModelForCausalLM.from_pretrained(tiny / "target", dtype=torch.float32)
    with torch.no_grad():
        law = model(torch.tensor([records[0].ids])).logits[0].softmax(-1)
    first = sequence.num_prompt - 1
    rows = slice(first, None)
    rebuilt = (
        sequence.hidden[rows].float() @ target.head.T - sequence.log_normaliser[rows, None]
    ).exp()
    torch.testing.assert_close(rebuilt.sum(-1), torch.ones(len(rebuilt)), rtol=0, atol=1e-5)
    torch.testing.assert_close(rebuilt, law[rows], rtol=0.05, atol=2e-3)  # fp16 storage
    assert torch.isinf(sequence.log_normaliser[:first]).all()


def test_a_store_computes_each_shard_once_and_only_what_is_missing(
    tmp_path: Path, compute: Compute, records: list[Record]
) -> None:
    store = FeatureStore(tmp_path, records, KEY, compute)
    assert store.num_shards == 3
    first = [store.shard(i) for i in range(3)]
    assert [len(shard) for shard in first] == [8, 8, 4]
    again = FeatureStore(tmp_path, records, KEY, _refuse)
    for old, new in zip(first[1], again.shard(1), strict=True):
        for field in dataclasses.fields(old):
            a, b = getattr(old, field.name), getattr(new, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(AssertionError, match="no shard should be computed"):
        again.shard(1)


@pytest.mark.parametrize(
    "other",
    [{"target": "u"}, {"data": "e"}, {"target_layer_ids": (0, 1)}, {"shard_size": 4}],
)
def test_shards_of_another_run_are_refused(
    tmp_path: Path, records: list[Record], other: dict[str, object]
) -> None:
    FeatureStore(tmp_path, records, KEY, _refuse)
    with pytest.raises(CheckpointError, match=f"differs in {next(iter(other))}"):
        FeatureStore(tmp_path, records, dataclasses.replace(KEY, **other), _refuse)


def test_a_damaged_shard_is_an_error_that_says_what_to_do(
    tmp_path: Path, compute: Compute, records: list[Record]
) -> None:
    store = FeatureStore(tmp_path, records, KEY, compute)
    store.shard(0)
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="delete it"):
        store.shard(0)


def test_a_full_disk_leaves_no_partial_shard(
    tmp_path: Path, compute: Compute, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FeatureStore(tmp_path, records, KEY, compute)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="shard-00000"):
        store.shard(0)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_sequences_padded_in_one_forward_give_what_each_gives_alone(
    target: Target, records: list[Record]
) -> None:
    together = compute_features(target, records, TAPS, at_once=7)
    alone = compute_features(target, records, TAPS, at_once=1)
    assert len(together) == len(alone) == 20
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.ids, b.ids)
        torch.testing.assert_close(a.features, b.features, rtol=2**-6, atol=1e-3)
        torch.testing.assert_close(a.hidden, b.hidden, rtol=2**-8, atol=1e-3)
        torch.testing.assert_close(a.log_normaliser, b.log_normaliser, rtol=1e-4, atol=1e-4)


def test_kept_features_are_taken_and_only_the_rest_is_computed(
    tmp_path: Path, compute: Compute, records: list[Record]
) -> None:
    kept = GeneratedFeatures(tmp_path / "kept", target="t", target_layer_ids=TAPS)
    kept.add(compute(records[:10]))
    asked: list[Record] = []

    def watched(missing: Sequence[Record]) -> list[FeatureSequence]:
        asked.extend(missing)
        return compute(missing)

    store = FeatureStore(tmp_path / "store", records, KEY, watched, kept)
    store.fill(range(3))
    assert asked == records[10:]
    # A shard that was kept whole is not written again.
    assert [path.name for path in sorted((tmp_path / "store").glob("*.safetensors"))] == [
        "shard-00001.safetensors",
        "shard-00002.safetensors",
    ]
    plain = FeatureStore(tmp_path / "plain", records, KEY, compute)
    for a, b in zip(store.all(), plain.all(), strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.features, b.features)
        assert torch.equal(a.log_normaliser, b.log_normaliser)


def test_a_damaged_shard_of_kept_features_is_named(
    tmp_path: Path, compute: Compute, records: list[Record]
) -> None:
    kept = GeneratedFeatures(tmp_path, target="t", target_layer_ids=TAPS)
    kept.add(compute(records[:2]))
    [path] = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a feature shard"):
        GeneratedFeatures(tmp_path, target="t", target_layer_ids=TAPS)
