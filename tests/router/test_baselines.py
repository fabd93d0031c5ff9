"""Baseline drafters end to end: trained by our tool, served by real nodes, judged by a real target.

Router, verifier (with the drafter's own projection of the target's features) and drafter run in one
event loop over loopback streams; text must be that of plain greedy decoding.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.config import DrafterConfig, ModelConfig, VerifierConfig
from cluster.fingerprint import drafter_fingerprint, folder_fingerprint
from drafter_service.node import DrafterNode
from drafter_service.opening import open_drafter
from drafter_service.training.config import DrafterShape, Schedule, TrainConfig
from drafter_service.training.trainer import train
from router.admission import ModelLimits
from router.node import RouterNode
from tests.drafter_service.training.conftest import VOCAB, reply, write_target
from tests.router.harness import PROFILE, CharTokenizer, Cluster, ask, cluster, make_request
from verifier_service.node import VerifierNode
from verifier_service.torch_engine import load_engine

MAX_LEN = 128
NUM_TOKENS = 60
SHAPES = {
    "DFlash": DrafterShape(head="none", markov_rank=0, gamma=3, draft_vocab_size=VOCAB),
    "EAGLE-3": DrafterShape(
        kind="autoregressive", head="none", markov_rank=0, gamma=3, draft_vocab_size=40
    ),
    "MTP-1": DrafterShape(
        kind="autoregressive",
        head="none",
        markov_rank=0,
        gamma=1,
        draft_vocab_size=VOCAB,
        target_layer_ids=(3,),
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A target that reads only the last id, so that a few steps of training get somewhere."""
    folder = tmp_path_factory.mktemp("baselines")
    model = write_target(folder / "target", seed=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(folder / "target")
    rows = []
    for number in range(20):
        prompt = [3 + 2 * number, 5 + number]
        response = reply(model, prompt, greedy=True, length=24)
        rows.append({"prompt": prompt, "response": response, "t": 0.0})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, model


def trained(folder: Path, shape: DrafterShape, scratch: Path) -> Path:
    schedule = Schedule(
        num_steps=40,
        sequences_per_step=4,
        anchors_per_sequence=8,
        learning_rate=5e-3,
        evaluate_every=40,
        checkpoint_every=40,
    )
    config = TrainConfig(
        target=folder / "target",
        data=folder / "data.jsonl",
        work=scratch / "work",
        output=scratch / "drafter",
        num_held_out=4,
        shape=shape,
        schedule=schedule,
    )
    train(config)
    return config.output


async def start(c: Cluster, target: Path, drafter: Path) -> tuple[RouterNode, DrafterNode]:
    model, name = folder_fingerprint(target), drafter_fingerprint(drafter, c.config.drafter.lookup)
    engine = load_engine(
        target,
        model=ModelConfig(max_model_len=MAX_LEN, device="cpu"),
        verifier=VerifierConfig(kv_tokens=2048),
        drafter=drafter,
    )
    common: dict[str, Any] = {"config": c.config, "directory": c.directory}
    verifier = VerifierNode(
        member_id="verifier-0", engine=engine, drafter=name, profile=PROFILE, **common
    )
    await verifier.start()
    c.verifiers["verifier-0"] = verifier
    node = DrafterNode(
        member_id="drafter-0",
        engine=open_drafter(drafter, target, DrafterConfig()),
        model=model,
        drafter=name,
        **common,
    )
    await node.start()
    router = RouterNode(
        member_id="router-0",
        tokenizer=CharTokenizer(),
        limits=ModelLimits(
            vocab_size=VOCAB, max_model_len=MAX_LEN, eos_ids=(2,), fingerprint=model
        ),
        **common,
    )
    await router.start()
    c.routers.append(router)
    await c.ready(router, drafters=1)
    return router, node


@pytest.mark.parametrize("name", SHAPES)
async def test_text_is_that_of_plain_greedy_decoding(
    name: str, data: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    folder, model = data
    drafter = await asyncio.to_thread(trained, folder, SHAPES[name], tmp_path)
    prompts = [(7 + i, 11, 40 - i) for i in range(5)]
    async with cluster() as c:
        router, node = await start(c, folder / "target", drafter)
        requests = [make_request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts]
        answers = await asyncio.gather(*(ask(router, request) for request in requests))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == reply(model, list(prompt), greedy=True, length=NUM_TOKENS)
        figures = router.metrics()
        assert figures["num_accepted"] > 0.1 * NUM_TOKENS * len(prompts)
        assert figures["num_malformed"] == figures["num_rebinds"] == 0
        # Late blocks are a matter of load; blocks of another text would be a fault.
        assert not {"stale.digest", "stale.epoch", "stale.drafter"} & figures.keys()
        await c.settle()
        await node.stop(grace_s=5.0)
