"""JSON by schema from the embedded target, many requests under drafts that are half wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from transformers import AutoTokenizer

from cluster.model_store import ensure_drafter
from cluster.wire import FINISH_STOP, Admission
from tests.frames import make_admission, make_sampling
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.conformance.targets import Target, chat_prompts, open_target
from tests.verifier_service.vllm.v0_32.conftest import OpenEngine
from verifier_service.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

NUM_PROMPTS: Final = 20
NUM_REQUESTS: Final = 200
MAX_NEW_TOKENS: Final = 128
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 16},
        "score": {"type": "integer", "minimum": 0, "maximum": 100},
        "mood": {"enum": ["calm", "glad", "sad"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        "final": {"type": "boolean"},
    },
    "required": ["title", "score", "mood", "tags", "final"],
    "additionalProperties": False,
}
_SAMPLINGS: Final = (
    {"temperature": 0.0},
    {"temperature": 1.0, "mode": "coupled"},
    {"temperature": 1.0, "mode": "rejection"},
)


@pytest.fixture(scope="module")
def embedded(smollm2_dir: Any) -> Target:
    drafter = ensure_drafter("default", "smollm2-135m")
    return open_target(smollm2_dir, drafter)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def smollm2(opened: OpenEngine, embedded: Target) -> Engine:
    return opened(
        embedded, max_model_len=512, max_requests=32, max_step_tokens=512, kv_tokens=16384
    )


class HalfRight:
    """Drafts along the greedy answers; in every other round one token of them is wrong.

    Args:
        answers: by prompt (number of the request modulo theirs): prompt and answer.
    """

    def __init__(self, answers: dict[int, list[int]], vocab_size: int) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._rounds: Counter[int] = Counter()

    def __call__(self, rid: int, ids: Sequence[int]) -> Draft:
        self._rounds[rid] += 1
        block = self._answers[rid % len(self._answers)][len(ids) :][:5]
        if block and self._rounds[rid] % 2:
            rng = np.random.default_rng([rid, len(ids)])
            block[int(rng.integers(len(block)))] = int(rng.integers(self._vocab_size))
        return Draft(ids=block)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_every_answer_fits_its_schema(smollm2: Engine, embedded: Target) -> None:
    """Whatever ends by itself is valid, nearly all do, and drafts leave greedy answers alone."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.folder)
    prompts = chat_prompts(embedded.reference, NUM_PROMPTS)

    def request(rid: int, **sampling: Any) -> Admission:
        return make_admission(
            rid,
            prompts[rid % NUM_PROMPTS],
            max_new_tokens=MAX_NEW_TOKENS,
            stop_ids=np.array([tokenizer.eos_token_id], np.int32),
            sampling=make_sampling(seed=rid, **sampling),
            constraint_kind="json_schema",
            constraint=json.dumps(SCHEMA),
        )

    greedy = Rounds(smollm2)
    greedy.run([request(rid) for rid in range(NUM_PROMPTS)])
    rounds = Rounds(smollm2)
    laws = {rid: _SAMPLINGS[rid // NUM_PROMPTS % len(_SAMPLINGS)] for rid in range(NUM_REQUESTS)}
    requests = [request(rid, **law) for rid, law in laws.items()]
    rounds.run(requests, HalfRight(greedy.ids, embedded.vocab_size))
    assert not rounds.refused
    assert rounds.num_accepted.total() > NUM_REQUESTS
    stopped = [rid for rid in range(NUM_REQUESTS) if rounds.finish[rid] == FINISH_STOP]
    for rid in stopped:
        jsonschema.validate(json.loads(tokenizer.decode(rounds.emitted(rid)[:-1])), SCHEMA)
    assert len(stopped) >= 0.95 * NUM_REQUESTS
    apart = {
        rid % NUM_PROMPTS
        for rid, law in laws.items()
        if law["temperature"] == 0.0 and rounds.emitted(rid) != greedy.emitted(rid % NUM_PROMPTS)
    }
    # Near-ties of the logits, which another batch may round otherwise.
    assert len(apart) <= 1
