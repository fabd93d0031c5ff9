"""A replica over two processes: the same texts, and the same rows for drafters."""

from __future__ import annotations

import pytest
import torch

from cluster.config import VllmConfig
from cluster.errors import ConfigError
from cluster.wire import Sampling
from tests.frames import make_admission, make_sampling
from tests.verifier_service.conformance.drafts import leaning
from tests.verifier_service.conformance.engines import open_engine
from tests.verifier_service.conformance.oracle import near_ties
from tests.verifier_service.conformance.rounds import Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.conformance.test_features import TOLERANCE, check_rows
from tests.verifier_service.torch_targets import prompt
from tests.verifier_service.vllm.v0_32.conftest import OpenEngine
from verifier_service.engine import Engine

NUM_REQUESTS = 12
NUM_NEW = 16


def sampling(rid: int) -> Sampling:
    """Greedy, and seeded at two temperatures, by turns."""
    return make_sampling(temperature=(0.0, 1.0, 0.7)[rid % 3], seed=2000 + rid)


def say(engine: Engine, texts: dict[int, list[int]] | None = None) -> Rounds:
    """All requests, drafted where their texts are known."""
    rounds = Rounds(engine)
    rounds.run(
        [
            make_admission(
                rid, prompt(6 + 3 * rid, 950 + rid), max_new_tokens=NUM_NEW, sampling=sampling(rid)
            )
            for rid in range(NUM_REQUESTS)
        ],
        *([leaning(texts)] if texts else []),
    )
    return rounds


def bind(monkeypatch: pytest.MonkeyPatch, cores: str) -> None:
    """Which cores each process gets. Left alone, vLLM gives each a NUMA node of its own, and
    machines for tests have one. (It reads the variable once, before the first engine.)"""
    import vllm.envs

    monkeypatch.setattr(vllm.envs, "VLLM_CPU_OMP_THREADS_BIND", cores, raising=False)


@pytest.mark.slow
def test_two_processes(opened: OpenEngine, tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are equal up to near-ties of the logits, rows within 1e-4."""
    single = say(opened(tiny, drafter=tiny.drafter))
    bind(monkeypatch, "nobind")
    settings = VllmConfig(tensor_parallel=2, executor="mp")
    parallel = opened(tiny, drafter=tiny.drafter, vllm=settings)
    assert " x2 " in parallel.limits.platform
    assert parallel.limits.kv_blocks == single.engine.limits.kv_blocks
    double = say(parallel, single.ids)
    assert double.num_accepted.total() > NUM_REQUESTS
    check_rows(double, tiny)
    ties = 0
    for rid in range(NUM_REQUESTS):
        if single.ids[rid] == double.ids[rid]:
            rows = [torch.cat([r.features for r in run.committed[rid]]) for run in (single, double)]
            scale_T = rows[0].abs().amax(dim=1, keepdim=True)
            assert float(((rows[0] - rows[1]) / scale_T).abs().max()) < TOLERANCE
        else:
            texts = (single.ids[rid], double.ids[rid])
            num_prompt = 6 + 3 * rid
            apart = sum(near_ties(tiny, text, num_prompt, sampling(rid)) for text in texts)
            assert apart > 0, f"texts of request {rid} differ without a near-tie"
            ties += apart
    assert ties <= 1, "near-ties are rare: this many means that something is off"


def test_processes_without_cores(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM asserts about the machine is an error of the configuration."""
    bind(monkeypatch, "0")
    with pytest.raises(
        ConfigError, match="vLLM refuses this configuration: Given number of CPU id list"
    ):
        open_engine(
            "vllm", tiny.folder, kv_tokens=1024, vllm=VllmConfig(tensor_parallel=2, executor="mp")
        )
