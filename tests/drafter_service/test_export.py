"""Export: the other format holds the same drafter, and nothing is lost on the way or on a failure.

That the real `speculators` package agrees is for ``tests/interop``.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import CheckpointError, ConfigError, StorageFull
from drafter_service.autoregressive.loading import load_autoregressive, save_autoregressive
from drafter_service.backbone import DSparkModel
from drafter_service.export import FORMATS, export_drafter
from drafter_service.loading import load_drafter, save_drafter
from tests import autoregressive
from tests.drafter_service.test_loading import HEADS, assert_same
from tests.drafters import make_model, make_spec, write_target


def saved(folder: Path, *, tied: bool = False, **changes: Any) -> tuple[DSparkModel, Path, Path]:
    """A random drafter, its checkpoint and its target."""
    model = make_model(make_spec(**changes))
    model.d2t = model.d2t.sort().values
    save_drafter(model, folder / "drafter")
    return model, folder / "drafter", write_target(folder / "target", model, tied=tied)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def add_tensors(checkpoint: Path, **tensors: torch.Tensor) -> None:
    path = checkpoint / "model.safetensors"
    named = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    save_file({**load_file(path), **named}, path)


@pytest.mark.parametrize("changes", HEADS)
def test_both_formats_load_as_the_same_drafter(tmp_path: Path, changes: dict[str, Any]) -> None:
    model, checkpoint, target = saved(tmp_path, **changes)
    there = export_drafter(checkpoint, target, tmp_path / "there", format="speculators")
    back = export_drafter(there.folder, target, tmp_path / "back", format="deepspec")
    for exported in (there, back):
        assert exported.notes == ()
        assert_same(load_drafter(exported.folder, target), model)
    assert contents(back.folder) == contents(checkpoint)


def test_the_config_names_the_target_and_says_how_to_draft(tmp_path: Path) -> None:
    _, checkpoint, target = saved(tmp_path, sample_from_anchor=False, draft_vocab_size=20)
    export_drafter(checkpoint, target, tmp_path / "a", format="speculators")
    export_drafter(checkpoint, target, tmp_path / "b", format="speculators", verifier="own/er")
    here, named = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    verifier = here["speculators_config"]["verifier"]
    assert verifier == {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target)}
    assert named["speculators_config"]["verifier"]["name_or_path"] == "own/er"
    (proposal,) = here["speculators_config"]["proposal_methods"]
    assert (here["block_size"], proposal["speculative_tokens"]) == (5, 4)
    assert here["aux_hidden_state_layer_ids"] == [2, 4]
    assert here["dtype"] == "float32"


def test_a_drafter_without_heads_is_dflash_only_if_its_anchor_is_unused(tmp_path: Path) -> None:
    plain = {
        "head": "none",
        "markov_rank": 0,
        "has_confidence": False,
        "confidence_with_markov": False,
    }
    for from_anchor, kind in ((False, "dflash"), (True, "dspark")):
        _, checkpoint, target = saved(tmp_path / kind, **plain, sample_from_anchor=from_anchor)
        export_drafter(checkpoint, target, tmp_path / kind / "out", format="speculators")
        config = json.loads((tmp_path / kind / "out" / "config.json").read_text())
        assert config["speculators_model_type"] == kind


def test_draft_ids_in_any_order_are_renumbered(tmp_path: Path) -> None:
    model = make_model(make_spec(draft_vocab_size=20))
    assert not torch.equal(model.d2t, model.d2t.sort().values)
    save_drafter(model, tmp_path / "drafter")
    target = write_target(tmp_path / "target", model)
    exported = export_drafter(tmp_path / "drafter", target, tmp_path / "out", format="speculators")
    assert "renumbered" in exported.notes[0]
    loaded = load_drafter(tmp_path / "out", target)
    order = model.d2t.argsort()
    assert torch.equal(loaded.d2t, model.d2t[order])
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight[order])
    assert loaded.markov_head is not None
    assert model.markov_head is not None
    assert torch.equal(
        loaded.markov_head.markov_w2.weight, model.markov_head.markov_w2.weight[order]
    )
    assert torch.equal(loaded.markov_head.markov_w1.weight, model.markov_head.markov_w1.weight)


def test_tensors_keep_their_dtype_and_the_targets_head_is_not_rounded(tmp_path: Path) -> None:
    model, _, target = saved(tmp_path, draft_vocab_size=20)
    save_drafter(model, tmp_path / "half", dtype=torch.bfloat16)
    export_drafter(tmp_path / "half", target, tmp_path / "out", format="speculators")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(stored["lm_head.weight"], model.lm_head.weight)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("format", FORMATS)
def test_copies_of_the_targets_tensors_are_left_out(tmp_path: Path, format: Any) -> None:
    model, checkpoint, target = saved(tmp_path)
    copies = {"embed_tokens": model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    add_tensors(checkpoint, **{name: t.detach().bfloat16() for name, t in copies.items()})
    export_drafter(checkpoint, target, tmp_path / "out", format=format)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored.keys()


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_tensors_of_its_own_are_kept_or_refused(tmp_path: Path, name: str) -> None:
    _, checkpoint, target = saved(tmp_path)
    own = torch.rand(60, 32)
    add_tensors(checkpoint, **{name: own})
    export_drafter(checkpoint, target, tmp_path / "out", format="deepspec")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[f"{name}.weight"], own)
    with pytest.raises(CheckpointError, match=rf"{name}\.weight: .*no place"):
        export_drafter(checkpoint, target, tmp_path / "no", format="speculators")
    assert not (tmp_path / "no").exists()


def test_a_reduced_head_of_its_own_goes_along(tmp_path: Path) -> None:
    _, checkpoint, target = saved(tmp_path, draft_vocab_size=20)
    add_tensors(checkpoint, lm_head=torch.rand(20, 32))
    export_drafter(checkpoint, target, tmp_path / "there", format="speculators")
    export_drafter(tmp_path / "there", target, tmp_path / "back", format="deepspec")
    loaded = load_drafter(checkpoint, target)
    for name in ("there", "back"):
        assert_same(load_drafter(tmp_path / name, target), loaded)


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    for number, (changes, named) in enumerate(
        [
            ({"target_layer_ids": (1, 5)}, "target_layer_ids: layer 5 is the target's last"),
            ({"num_target_layers": 7}, "num_target_layers: drafter"),
        ]
    ):
        _, checkpoint, _ = saved(tmp_path / str(number), **changes)
        target = write_target(tmp_path / "target", make_model(make_spec()))
        with pytest.raises(CheckpointError, match=named):
            export_drafter(checkpoint, target, tmp_path / "out", format="speculators")
    assert not (tmp_path / "out").exists()


def test_a_tap_of_the_last_layer_is_refused_with_a_way_out(tmp_path: Path) -> None:
    _, checkpoint, target = saved(tmp_path, target_layer_ids=(1, 5))
    with pytest.raises(CheckpointError, match="is the target's last") as caught:
        export_drafter(checkpoint, target, tmp_path / "out", format="speculators")
    assert "--taps" in caught.value.hint


@pytest.mark.parametrize(
    "changes", [{}, {"has_confidence": False, "draft_vocab_size": 20, "norms_heads": True}]
)
def test_an_autoregressive_drafter_goes_there_and_back(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = autoregressive.make_model(autoregressive.make_spec(**changes))
    model.d2t = model.d2t.sort().values
    save_autoregressive(model, tmp_path / "drafter")
    target = write_target(tmp_path / "target", model)
    there = export_drafter(tmp_path / "drafter", target, tmp_path / "there", format="speculators")
    assert ["confidence head" in note for note in there.notes] == [True] * (not changes)
    export_drafter(there.folder, target, tmp_path / "back", format="deepspec")
    back = load_autoregressive(tmp_path / "back", target)
    assert back.spec == dataclasses.replace(model.spec, has_confidence=False)
    assert torch.equal(back.d2t, model.d2t)
    expected = model.state_dict()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert "lm_head.weight" not in load_file(tmp_path / "back" / "model.safetensors")


def test_a_calibration_stays_behind_and_is_reported(tmp_path: Path) -> None:
    _, checkpoint, target = saved(tmp_path)
    (checkpoint / "calibration.json").write_text("{}")
    exported = export_drafter(checkpoint, target, tmp_path / "out", format="deepspec")
    assert "dspark calibrate" in exported.notes[0]
    assert sorted(contents(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_an_existing_drafter_is_replaced_only_by_force_and_whole(tmp_path: Path) -> None:
    _, checkpoint, target = saved(tmp_path)
    output = tmp_path / "out"
    output.mkdir()  # an empty folder is as good as none
    export_drafter(checkpoint, target, output, format="speculators")
    (output / "calibration.json").write_text("{}")
    before = contents(output)
    with pytest.raises(ConfigError, match="already holds a drafter") as caught:
        export_drafter(checkpoint, target, output, format="deepspec")
    assert "--force" in caught.value.hint
    assert contents(output) == before
    export_drafter(checkpoint, target, output, format="deepspec", force=True)
    assert contents(output) == contents(checkpoint)


def test_anything_else_is_never_replaced(tmp_path: Path) -> None:
    _, checkpoint, target = saved(tmp_path)
    file, notes, nested = (tmp_path / name for name in ("file", "notes", "nested"))
    file.write_text("text")
    for folder in (notes, nested):
        folder.mkdir()
        (folder / "important.txt").write_text("text")
    (nested / "config.json").write_text(json.dumps({"speculators_model_type": "dspark"}))
    (nested / "important.txt").unlink()
    (nested / "below").mkdir()
    _, mixed, _ = saved(tmp_path / "mixed")
    (mixed / "important.txt").write_text("text")
    for output in (file, notes, nested, target, mixed):
        with pytest.raises(ConfigError, match="output: "):
            export_drafter(checkpoint, target, output, format="speculators", force=True)
    with pytest.raises(ConfigError, match="the checkpoint itself"):
        export_drafter(checkpoint, target, checkpoint, format="speculators", force=True)
    assert file.read_text() == "text"
    assert (notes / "important.txt").exists()
    assert (nested / "below").exists()
    assert (mixed / "important.txt").exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    _, checkpoint, target = saved(tmp_path)
    output = tmp_path / "deep" / "out"
    if force:
        export_drafter(checkpoint, target, output, format="speculators")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = contents(output) if force else None
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="no room"):
        export_drafter(checkpoint, target, output, format="deepspec", force=force)
    assert (contents(output) if output.exists() else None) == before
    assert [path.name for path in output.parent.iterdir()] == (["out"] if force else [])


def test_a_failed_swap_puts_the_old_drafter_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoint, target = saved(tmp_path)
    output = tmp_path / "out"
    export_drafter(checkpoint, target, output, format="speculators")
    before, rename = contents(output), Path.rename

    def refuse_new(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(ConfigError, match=r"cannot write .*Input/output error"):
        export_drafter(checkpoint, target, output, format="deepspec", force=True)
    assert contents(output) == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    _, checkpoint, target = saved(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file/out"):
        export_drafter(checkpoint, target, tmp_path / "file" / "out", format="deepspec")
