"""The ragged forward computes what transformers computes, for every architecture we take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verifier_service.torch_targets import (
    prompt,
    reference_logits,
    save_llama,
    save_qwen3,
)
from verifier_service.torch_engine.attention import Span
from verifier_service.torch_engine.batch import lay_out
from verifier_service.torch_engine.kv import BlockAllocator, KVCache
from verifier_service.torch_engine.loading import load_target
from verifier_service.torch_engine.model import TargetModel

TOLERANCE = 1e-4

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
TARGETS: dict[str, Callable[[Path], Any]] = {
    "llama": save_llama,
    "llama, own head": lambda p: save_llama(p, tie_word_embeddings=False),
    "llama, biases": lambda p: save_llama(p, attention_bias=True, mlp_bias=True),
    "llama, no groups": lambda p: save_llama(p, num_key_value_heads=6),
    "llama, llama3 rope": lambda p: save_llama(p, rope_parameters={"rope_theta": 1e4, **LLAMA3}),
    "llama, yarn rope": lambda p: save_llama(p, rope_parameters={"rope_theta": 1e4, **YARN}),
    "llama, linear rope": lambda p: save_llama(
        p, rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    ),
    "qwen3": save_qwen3,
    "qwen3, biases": lambda p: save_qwen3(p, attention_bias=True),
    "qwen3, sliding window": lambda p: save_qwen3(p, **SLIDING),
}


class Runner:
    """Feeds spans of named sequences to a model, keeping their KV."""

    def __init__(self, folder: Path, dtype: str = "auto") -> None:
        self.model: TargetModel = load_target(folder, device=torch.device("cpu"), dtype=dtype)
        spec = self.model.spec
        self.allocator = BlockAllocator(num_blocks=64, block_tokens=16)
        self.cache = KVCache(
            num_layers=spec.num_layers,
            num_slots=1024,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.model.dtype,
            device=self.model.device,
        )

    def start(self, ids: Sequence[int], end: int, first: int = 0, room: int = 128) -> Span:
        """Positions first..end-1 of a sequence with blocks of its own."""
        reservation = self.allocator.reserve(room)
        assert reservation is not None
        return self.span(ids, first, end, reservation)

    def span(self, ids: Sequence[int], first: int, end: int, reservation: Any) -> Span:
        return Span(
            ids=ids[first:end], first=first, reservation=reservation, num_logits=end - first
        )

    def logits(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Logits of each span's tokens."""
        layout = lay_out(spans, self.model)
        logits = self.model.forward(layout.batch, self.cache).logits
        parts = torch.split(logits, [spans[i].num_logits for i in layout.order])
        return [parts[layout.order.index(i)] for i in range(len(spans))]


@pytest.mark.parametrize("name", TARGETS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """Whole prompts, then in chunks, then verify rows of many sizes mixed with a chunk."""
    reference = TARGETS[name](tmp_path)
    runner = Runner(tmp_path)
    sequences = [prompt(length, seed=length) for length in (70, 33, 25, 41, 60)]
    expected = [reference_logits(reference, ids) for ids in sequences]

    (whole,) = runner.logits([runner.start(sequences[0], 70)])
    assert (whole - expected[0]).abs().max() < TOLERANCE

    started = [runner.start(ids, 20) for ids in sequences]
    for span, logits, want in zip(started, runner.logits(started), expected, strict=True):
        assert (logits - want[: len(span.ids)]).abs().max() < TOLERANCE

    ends = [21, 23, 25, 28, 60]  # rows of 1, 3, 5, 8 tokens and a chunk of 40
    mixed = [
        runner.span(ids, 20, end, span.reservation)
        for ids, end, span in zip(sequences, ends, started, strict=True)
    ]
    for end, logits, want in zip(ends, runner.logits(mixed), expected, strict=True):
        assert (logits - want[20:end]).abs().max() < TOLERANCE


def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    save_llama(tmp_path)
    together, alone = Runner(tmp_path), Runner(tmp_path)
    sequences = [prompt(30 + seed, seed) for seed in range(6)]
    for runner in (together, alone):
        runner.spans = [runner.start(ids, 24) for ids in sequences]
        runner.logits(runner.spans)
    rows = [
        together.span(ids, 24, 26 + i % 3, span.reservation)
        for i, (ids, span) in enumerate(zip(sequences, together.spans, strict=True))
    ]
    for row, batched in zip(rows, together.logits(rows), strict=True):
        (single,) = alone.logits([row])
        assert (batched - single).abs().max() < 1e-5 * single.abs().max()


def test_scattered_blocks_equal_a_run(tmp_path: Path) -> None:
    reference = save_qwen3(tmp_path)
    runner = Runner(tmp_path)
    held = [runner.allocator.reserve(16) for _ in range(64)]
    for reservation in held[::2]:
        assert reservation is not None
        runner.allocator.release(reservation)
    ids = prompt(60)
    span = runner.start(ids, 50, room=64)
    assert not span.reservation.is_contiguous
    got = torch.cat(
        [*runner.logits([span]), *runner.logits([runner.span(ids, 50, 60, span.reservation)])]
    )
    assert (got - reference_logits(reference, ids)).abs().max() < TOLERANCE


def test_taps_are_hidden_states_one_above_the_layer_id(tmp_path: Path) -> None:
    """The last layer's is taken behind the final norm, as transformers reports it."""
    reference = save_llama(tmp_path)
    runner, ids = Runner(tmp_path), prompt(12)
    layout = lay_out([runner.start(ids, 12)], runner.model)
    taps = (0, 2, 3)
    features = runner.model.forward(layout.batch, runner.cache, taps).features
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    want = torch.cat([states[i + 1][0] for i in taps], dim=-1)
    assert features is not None
    assert (features - want).abs().max() < TOLERANCE


def test_only_wanted_logits_are_computed(tmp_path: Path) -> None:
    reference = save_llama(tmp_path)
    runner, ids = Runner(tmp_path), prompt(12)
    reservation = runner.allocator.reserve(64)
    assert reservation is not None
    last = Span(ids=ids, first=0, reservation=reservation, num_logits=1)
    none = Span(ids=ids, first=0, reservation=runner.allocator.reserve(64), num_logits=0)
    got, nothing = runner.logits([last, none])
    assert nothing.shape == (0, runner.model.spec.vocab_size)
    assert (got - reference_logits(reference, ids)[-1:]).abs().max() < TOLERANCE
