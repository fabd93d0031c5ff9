"""The peer's real library, both ways: what it writes drafts here as it does there, and back.

Compared are the logits of every draft slot (sequential bias included, draft ids mapped to target
ids), the confidence logits, and the greedy tokens; of blocks at several depths, which our engine
drafts in one batch and the package computes in one packed forward.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from drafter_service.autoregressive.loading import save_autoregressive
from drafter_service.deepspec_format import deepspec_config
from drafter_service.export import export_drafter
from drafter_service.loading import load_drafter, save_drafter
from drafter_service.speculators_format import VERSION, Verifier, speculators_config
from tests import autoregressive
from tests.conftest import REPO
from tests.drafters import make_model, make_spec
from tests.interop import ours, peer

ANCHORS = (1, 8, 15, 40)
"""Context depths; the second and third are around the window of 9 that some drafters have."""
LENGTH = 50
TOLERANCE = 1e-4

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "max_position_embeddings": 512,
}


def qwen(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SIZES, "rms_norm_eps": 1e-5, **changes})


def sliding(*, non_causal: bool) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    decoder = qwen(sliding_window=9, use_sliding_window=True, layer_types=kinds)
    return {"decoder": decoder, "sliding_window_non_causal": non_causal}


WRITTEN: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no head": {"markov_rank": 0, "confidence_head_with_markov": False},
    "confidence without markov": {"confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False},
    "reduced": {"draft_vocab_size": 20},
    "reduced gated": {"draft_vocab_size": 20, "markov_head_type": "gated"},
    "reduced rnn": {"draft_vocab_size": 20, "markov_head_type": "rnn"},
    "unused anchor": {"sample_from_anchor": False},
    "unused anchor, gated": {"sample_from_anchor": False, "markov_head_type": "gated"},
    "unused anchor, reduced": {"sample_from_anchor": False, "draft_vocab_size": 20},
    "dflash": {"kind": "dflash"},
    "dflash reduced": {"kind": "dflash", "draft_vocab_size": 20},
    "dflash from anchor": {"kind": "dflash", "sample_from_anchor": True},
    "window, causal": sliding(non_causal=False),
    "window, both ways": sliding(non_causal=True),
    "llama": {"decoder": LlamaConfig(**SIZES), "draft_vocab_size": 20},
    "other rope": {"decoder": qwen(rope_parameters={"rope_type": "default", "rope_theta": 500.0})},
    "one tap": {"aux_hidden_state_layer_ids": [5]},
}
"""What the package is asked to build."""

EXPORTED: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"head": "gated"},
    "rnn": {"head": "rnn"},
    "no head": {"head": "none", "markov_rank": 0, "confidence_with_markov": False},
    "confidence without markov": {"confidence_with_markov": False},
    "no confidence": {"has_confidence": False, "confidence_with_markov": False},
    "reduced": {"draft_vocab_size": 20},
    "reduced rnn": {"draft_vocab_size": 20, "head": "rnn"},
    "unused anchor": {"sample_from_anchor": False},
    "unused anchor, reduced": {"sample_from_anchor": False, "draft_vocab_size": 20},
    "dflash": {
        "head": "none",
        "markov_rank": 0,
        "has_confidence": False,
        "confidence_with_markov": False,
        "sample_from_anchor": False,
    },
    "window, causal": {"sliding_windows": (9, None), "causal_sliding_blocks": True},
    "window, both ways": {"sliding_windows": (9, None)},
}
"""Changes to `make_spec`."""


def random_features(width: int) -> Tensor:
    return torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(1))


def assert_same_blocks(
    monkeypatch: pytest.MonkeyPatch,
    package: Any,
    mine: ours.OurBlocks,
    features_TF: Tensor,
    tolerance: float = TOLERANCE,
) -> None:
    """The package, given our drafts, must find our logits at every slot."""
    theirs = peer.blocks(
        monkeypatch,
        package,
        features_TF,
        ANCHORS,
        [text[-1] for text in mine.texts],
        mine.draft_ids,
    )
    d2t = mine.d2t
    if package.d2t is not None:
        d2t = package.d2t + torch.arange(len(package.d2t))
    order, same = mine.d2t.argsort(), d2t.argsort()
    assert torch.equal(mine.d2t[order], d2t[same])
    got_NGW, want_NGW = mine.logits[..., order], theirs.logits[..., same]
    assert got_NGW.shape == want_NGW.shape
    assert want_NGW.std() > 0.5, "logits all alike would fit anything"
    assert (got_NGW - want_NGW).abs().max() < tolerance
    assert torch.equal(d2t[theirs.logits.argmax(dim=-1)], mine.draft_ids)
    if theirs.confidence is None:
        assert mine.confidence_logits is None
    else:
        assert mine.confidence_logits is not None
        assert (mine.confidence_logits - theirs.confidence).abs().max() < tolerance
        assert (mine.confidence - theirs.confidence.sigmoid()).abs().max() < tolerance


def assert_same_rollouts(
    monkeypatch: pytest.MonkeyPatch, package: Any, mine: ours.OurBlocks, features_TF: Tensor
) -> None:
    """As `assert_same_blocks`, with a forward of the package for each text: unlike a block of
    DSpark's, an autoregressive draft depends on the ids before its anchor."""
    order = mine.d2t.argsort()
    for text, drafts_G, got_GW in zip(mine.texts, mine.draft_ids, mine.logits, strict=True):
        ids = [*text, *drafts_G.tolist()]
        want_GW = peer.rollout(monkeypatch, package, features_TF, ids, len(drafts_G))
        assert want_GW.std() > 0.2, "logits all alike would fit anything"
        assert (got_GW[:, order] - want_GW).abs().max() < TOLERANCE  # theirs rise already
        assert torch.equal(mine.d2t[order][want_GW.argmax(dim=-1)], drafts_G)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_package_writes_drafts_the_same_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"kind": "dspark", **WRITTEN[name]}
    decoder: PretrainedConfig = fields.pop("decoder", None) or qwen()
    kind = fields.pop("kind")
    target = peer.whole_target(tmp_path / "target", make_model(make_spec()))
    package = peer.write_drafter(tmp_path / "drafter", target, decoder, kind, **fields)
    features_TF = random_features(package.fc.in_features)
    mine = ours.blocks(tmp_path / "drafter", target, features_TF, ANCHORS)
    assert_same_blocks(monkeypatch, package, mine, features_TF)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"draft_vocab_size": 20},
        {"norm_before_residual": True},
        {"norm_output": True},
    ],
)
@pytest.mark.parametrize("decoder", [LlamaConfig, Qwen3Config])
def test_an_eagle3_that_the_package_writes_drafts_the_same_here(
    decoder: type[PretrainedConfig],
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = peer.whole_target(tmp_path / "target", make_model(make_spec()))
    layer = decoder(**{**SIZES, "num_hidden_layers": 1})
    package = peer.write_drafter(tmp_path / "drafter", target, layer, "eagle3", **fields)
    features_TF = random_features(package.fc.in_features)
    mine = ours.blocks(tmp_path / "drafter", target, features_TF, ANCHORS)
    assert_same_rollouts(monkeypatch, package, mine, features_TF)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norms_heads": True, "draft_vocab_size": 20},
        {"norm_before_residual": True, "draft_vocab_size": 20},
        {"norm_output": True, "has_confidence": False},
    ],
)
def test_an_eagle3_that_we_export_drafts_the_same_there(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = autoregressive.make_model(autoregressive.make_spec(**changes))
    target = peer.whole_target(tmp_path / "target", model)
    save_autoregressive(model, tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", target, tmp_path / "exported", format="speculators")
    features_TF = random_features(model.spec.feature_width)
    package = peer.open_drafter(tmp_path / "exported")
    for checkpoint in ("drafter", "exported"):
        mine = ours.blocks(tmp_path / checkpoint, target, features_TF, ANCHORS)
        assert_same_rollouts(monkeypatch, package, mine, features_TF)


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_what_its_trainer_sets_up_drafts_the_same_here(
    architecture: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = peer.whole_target(tmp_path / "target", make_model(make_spec()))
    package = peer.begin_training(tmp_path / "drafter", target, architecture, kind)
    features_TF = random_features(package.fc.in_features)
    mine = ours.blocks(tmp_path / "drafter", target, features_TF, ANCHORS)
    assert_same_blocks(monkeypatch, package, mine, features_TF)


def test_tapped_layers_are_counted_as_the_packages_converter_counts_them(tmp_path: Path) -> None:
    spec = make_spec()
    target = peer.whole_target(tmp_path / "target", make_model(spec))
    config = speculators_config(spec, Verifier(name="target", architectures=()))
    assert peer.tapped_layers(deepspec_config(spec), target) == config["aux_hidden_state_layer_ids"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_what_we_export_drafts_the_same_there(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(make_spec(**EXPORTED[name]))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    target = peer.whole_target(tmp_path / "target", model, tied=tied)
    save_drafter(model, tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", target, tmp_path / "exported", format="speculators")
    features_TF = random_features(model.spec.feature_width)
    package = peer.open_drafter(tmp_path / "exported")
    for checkpoint in ("drafter", "exported"):
        mine = ours.blocks(tmp_path / checkpoint, target, features_TF, ANCHORS)
        assert_same_blocks(monkeypatch, package, mine, features_TF)


def test_a_round_trip_through_the_package_changes_nothing(tmp_path: Path) -> None:
    """Ours, exported, loaded and saved by the package, exported back: bit for bit the same."""
    model = make_model(make_spec(draft_vocab_size=20))
    model.d2t = model.d2t.sort().values
    target = peer.whole_target(tmp_path / "target", model)
    save_drafter(model, tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", target, tmp_path / "exported", format="speculators")
    peer.open_drafter(tmp_path / "exported").save_pretrained(tmp_path / "resaved")
    export_drafter(tmp_path / "resaved", target, tmp_path / "back", format="deepspec")
    back = load_drafter(tmp_path / "back", target)
    assert back.spec == model.spec
    expected = {**model.state_dict(), "d2t": model.d2t}
    for tensor_name, tensor in {**back.state_dict(), "d2t": back.d2t}.items():
        assert torch.equal(tensor, expected[tensor_name]), tensor_name


@pytest.mark.model
def test_the_shipped_drafter_drafts_the_same_there(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = REPO / "drafter_service" / "weights" / "smollm2-135m"
    export_drafter(shipped, smollm2_dir, tmp_path / "exported", format="speculators")
    package = peer.open_drafter(tmp_path / "exported")
    features_TF = random_features(package.fc.in_features)
    mine = ours.blocks(shipped, smollm2_dir, features_TF, ANCHORS)
    # Sums over 576 numbers, logits up to 25: fp32 rounds them to 6e-5 on one machine.
    assert_same_blocks(monkeypatch, package, mine, features_TF, tolerance=5e-4)


def test_the_version_is_the_one_that_we_name() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert version("speculators") == VERSION
    assert project["optional-dependencies"]["interop"] == [f"speculators=={VERSION}"]
