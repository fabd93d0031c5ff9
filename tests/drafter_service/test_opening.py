"""One function opens every kind of drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config import DrafterConfig, LookupConfig, load_config
from cluster.errors import CheckpointError, ConfigError, ModelNotFound
from cluster.fingerprint import drafter_fingerprint, folder_fingerprint
from cluster.model_store import ensure_drafter
from drafter_service.engine import DraftEngine
from drafter_service.loading import save_drafter
from drafter_service.opening import open_drafter
from drafter_service.prompt_lookup import PromptLookup
from tests.drafters import make_model, make_spec, write_target


def write_config(folder: Path, **fields: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_prompt_lookup_needs_nothing_but_the_targets_configuration(tmp_path: Path) -> None:
    target = write_config(tmp_path / "target", vocab_size=321, max_position_embeddings=99)
    config = DrafterConfig(lookup=LookupConfig(gamma=3, min_ngram=1, max_ngram=2))
    drafter = open_drafter("ngram", target, config)
    assert isinstance(drafter, PromptLookup)
    assert (drafter.limits.gamma, drafter.limits.vocab_size) == (3, 321)
    assert drafter.limits.feature_size == 0


def test_a_target_that_does_not_say_its_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        open_drafter("ngram", write_config(tmp_path / "t", vocab_size=321), DrafterConfig())
    with pytest.raises(ModelNotFound):
        open_drafter("ngram", tmp_path / "nowhere", DrafterConfig())


@pytest.mark.parametrize("head", ["vanilla", "none"])
def test_dspark_and_dflash(tmp_path: Path, head: str) -> None:
    changes = {} if head == "vanilla" else {"markov_rank": 0, "confidence_with_markov": False}
    model = make_model(make_spec(head=head, **changes))
    save_drafter(model, tmp_path / "drafter")
    target = write_target(tmp_path / "target", model)
    drafter = open_drafter(tmp_path / "drafter", target, DrafterConfig(max_pending_bytes=77))
    assert isinstance(drafter, DraftEngine)
    assert drafter.spec == model.spec
    assert drafter.pending.max_bytes == 77


def test_fingerprints_name_what_drafts(tmp_path: Path) -> None:
    model = make_model(make_spec())
    save_drafter(model, tmp_path / "drafter")
    lookup = LookupConfig()
    assert drafter_fingerprint(None, lookup) == ""
    folder = tmp_path / "drafter"
    assert drafter_fingerprint(folder, lookup) == folder_fingerprint(folder)
    names = {
        drafter_fingerprint("ngram", settings)
        for settings in (lookup, LookupConfig(gamma=3), LookupConfig(min_ngram=1))
    }
    assert len(names) == 3


def test_ngram_is_a_name_for_any_target() -> None:
    assert ensure_drafter("ngram", "any/target") == "ngram"


def test_a_shortest_match_above_the_longest_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.lookup\.min_ngram"):
        load_config({"drafter": {"lookup": {"min_ngram": 5, "max_ngram": 4}}})
    with pytest.raises(ConfigError, match=r"drafter\.lookup\.gamma"):
        load_config({"drafter": {"lookup": {"gamma": 0}}})
