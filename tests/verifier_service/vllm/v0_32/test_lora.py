"""Adapters of the target: each request has the text of its own, whoever shares its step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError, UnknownAdapter
from tests.frames import make_admission
from tests.verifier_service.conformance.engines import open_engine
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.conformance.test_features import TOLERANCE
from tests.verifier_service.torch_targets import prompt, reference_greedy
from tests.verifier_service.vllm.lora import Lora, random_lora
from tests.verifier_service.vllm.v0_32.conftest import OpenEngine
from verifier_service.engine import Engine

NUM_NEW = 10


@pytest.fixture(scope="module")
def models(tiny: Target, loras: dict[str, Lora]) -> dict[str, object]:
    """transformers' models, the changes merged into the weights by hand."""
    merged = {name: lora.merged(tiny.reference.model) for name, lora in loras.items()}
    return {"": tiny.reference.model, **merged}


def test_any_mix_in_one_step(engine: Engine, models: dict[str, object]) -> None:
    """With drafts, right and wrong, in every order of neighbours; KV of one prompt is not shared
    between adapters."""
    order = ["", "law", "poem", "law", "", "poem", "poem", "", "law"]
    texts = {
        name: reference_greedy(model, prompt(40, 7), NUM_NEW) for name, model in models.items()
    }
    assert len({tuple(text) for text in texts.values()}) == 3

    def drafter(rid: int, ids: list[int]) -> Draft:
        text = texts[order[rid]][len(ids) - 40 :][:4]
        return Draft(ids=[*text[:2], *[5 for _ in text[2:]]])

    rounds = Rounds(engine)
    rounds.run(
        [
            make_admission(rid, prompt(40, 7), max_new_tokens=NUM_NEW, adapter=name)
            for rid, name in enumerate(order)
        ],
        drafter,
    )
    for rid, name in enumerate(order):
        assert rounds.emitted(rid) == texts[name], (rid, name)
    assert rounds.num_accepted.total() > 20


def test_prefixes_are_found_by_adapter(engine: Engine, models: dict[str, object]) -> None:
    ids = prompt(40, 8)
    for turn in range(2):
        for name, model in models.items():
            rounds = Rounds(engine)
            rounds.run([make_admission(0, ids, max_new_tokens=4, adapter=name)])
            assert rounds.num_cached == 32 * turn, (turn, name)
            assert rounds.emitted(0) == reference_greedy(model, ids, 4)


def test_features_are_the_adapters(engine: Engine, tiny: Target, loras: dict[str, Lora]) -> None:
    """Projected from the hidden states of the changed model."""
    rounds = Rounds(engine)
    rounds.run([make_admission(0, prompt(12, 9), adapter="poem")])
    reference = dataclasses.replace(
        tiny, reference=Merged(loras["poem"].merged(tiny.reference.model))
    )
    rows_TD = torch.cat([rows.features for rows in rounds.committed[0]])
    want_TD = reference.features(rounds.ids[0][:-1])
    assert worst(rows_TD, want_TD) < TOLERANCE
    assert worst(rows_TD, tiny.features(rounds.ids[0][:-1])) > 0.1


def worst(got_TD: torch.Tensor, want_TD: torch.Tensor) -> float:
    """Largest error of a row over the largest entry of the row."""
    error_T = (got_TD - want_TD).abs().amax(dim=1) / want_TD.abs().amax(dim=1)
    return float(error_T.max())


@dataclasses.dataclass(frozen=True)
class Merged:
    """As much of `tests.deploy.reference.ReferenceTarget` as features need."""

    model: object


def test_an_unknown_adapter(engine: Engine) -> None:
    bad = make_admission(0, [1, 2], adapter="prose")
    with pytest.raises(UnknownAdapter, match="prose") as caught:
        engine.check(bad)
    assert caught.value.hint == "one of law, poem"
    rounds = Rounds(engine)
    rounds.run([bad, make_admission(1, [1, 2])])
    assert rounds.refused == {0: "UnknownAdapter"}


def test_adapters_that_vllm_refuses(opened: OpenEngine, tiny: Target, tmp_path: Path) -> None:
    """At load, by name: not when the first request asks for one."""
    empty = tmp_path / "empty"
    random_lora(tiny.reference.model, seed=1, rank=2).save(empty)
    (empty / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"verifier\.adapters\.law: vLLM refuses it"):
        open_engine("vllm", tiny.folder, adapters={"law": str(empty)})
    dora = random_lora(tiny.reference.model, seed=1, rank=2).save(tmp_path / "dora")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ConfigError, match=r"verifier\.adapters\.law: vLLM refuses it: .*DoRA"):
        open_engine("vllm", tiny.folder, adapters={"law": str(dora)})


def test_a_rank_past_vllms(tiny: Target, tmp_path: Path) -> None:
    folder = random_lora(tiny.reference.model, seed=1, rank=2).save(tmp_path / "law")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 1000}))
    with pytest.raises(ConfigError, match="rank 1000 is over 512"):
        open_engine("vllm", tiny.folder, adapters={"law": str(folder)})
