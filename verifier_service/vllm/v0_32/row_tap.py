"""What we add to vLLM's model runner: our acceptance in place of its sampler, and features out.

The runner's logits, grammar masks already applied, go to `verifier_service.acceptance`, the one
implementation of both engines, so vLLM's samplers and generators are never used. A draft that a
grammar forbids has probability 0 there: a refusal like any other.

Shape legend: N flat rows of logits (drafts + 1 of each request, in batch order), V vocabulary,
T tokens of the batch, F raw feature width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from cluster.errors import DSparkError
from verifier_service.acceptance import RowVerdict, VerifyRow, accept
from verifier_service.projection import Projects
from verifier_service.vllm.v0_32.orders import Law, Orders, Ran, StepRan

_NO_TOKEN = -1
"""vLLM's padding of sampled tokens."""


@dataclass(kw_only=True)
class _Request:
    law: Law
    ids: list[int]


class RowTap:
    """Judges and taps for one runner.

    Args:
        runner: vLLM's, with its ``_sample`` replaced by `sample`.
        projection: None to hand out no features.
        num_layers: of the target: its last layer is reported after the final norm.
    """

    def __init__(self, runner: Any, projection: Projects | None, num_layers: int) -> None:
        self._runner = runner
        self._projection = projection
        self._num_layers = num_layers
        self._requests: dict[str, _Request] = {}
        self._orders = Orders()
        self._step: Any = None
        self._verdicts: dict[str, RowVerdict] = {}
        self._broken: set[str] = set()
        self._stuck: set[str] = set()
        self._ran: dict[str, Ran] = {}
        self._num_padded = 0

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers to tap as vLLM counts them: its layer i is the input of layer i."""
        if self._projection is None:
            return ()
        ids = self._projection.target_layer_ids
        return tuple(sorted(i + 1 for i in set(ids) if i + 1 < self._num_layers))

    def begin(self, scheduler_output: Any) -> None:
        """Take the orders of a step; forget requests that ended."""
        self._orders = scheduler_output.dspark_orders
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._requests[new.req_id] = _Request(
                law=self._orders.laws[new.req_id], ids=list(new.prompt_token_ids)
            )
        self._step = scheduler_output
        self._verdicts, self._ran = {}, {}
        self._broken, self._stuck = set(), set()
        self._num_padded = 0

    def sample(self, logits_NV: Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """In place of the runner's ``_sample``."""
        del spec_decode_metadata  # rows lie as `_rows` says, with drafts and without
        batch = self._runner.input_batch
        ids = list(batch.req_ids)
        unfinished = self._runner.discard_request_mask.np[: len(ids)]
        judged: list[tuple[str, VerifyRow]] = []
        flat: list[int] = []
        start = 0
        for request_id, in_prefill in zip(ids, unfinished.tolist(), strict=True):
            row = self._row(request_id)
            if not in_prefill:
                judged.append((request_id, row))
                flat.extend(range(start, start + row.num_laws))
            start += row.num_laws
        assert start == len(logits_NV), (start, logits_NV.shape)
        if 0 < len(flat) < start:
            logits_NV = logits_NV[torch.tensor(flat, device=logits_NV.device)]
        if judged:
            self._judge(logits_NV, judged)
        return SamplerOutput(
            sampled_token_ids=self._padded(ids).to(self._runner.device), logprobs_tensors=None
        )

    def finish(self, state: Any, firsts: Mapping[str, int]) -> None:
        """Project and keep what the step computed.

        Args:
            state: the runner's state of the step: hidden states.
            firsts: position of each request's first token.
        """
        num_tokens = self._step.num_scheduled_tokens
        self._num_padded = len(state.hidden_states)
        spans, offset = [], 0
        for request_id in firsts:
            verdict = self._verdicts.get(request_id)
            num = num_tokens[request_id]
            drafts = len(self._step.scheduled_spec_decode_tokens.get(request_id, ()))
            kept = num if verdict is None else num - drafts + verdict.num_accepted
            spans.append((request_id, offset, kept))
            offset += num
        features = self._features(state, [(first, num) for _, first, num in spans])
        for (request_id, _, _), rows in zip(spans, features, strict=True):
            self._ran[request_id] = Ran(
                first=firsts[request_id],
                num_tokens=num_tokens[request_id],
                verdict=self._verdicts.get(request_id),
                broken=request_id in self._broken,
                stuck=request_id in self._stuck,
                features=rows,
            )

    def take(self) -> StepRan:
        """What the latest step computed; nothing the second time."""
        ran = StepRan(requests=self._ran, num_padded=self._num_padded)
        self._ran, self._num_padded = {}, 0
        return ran

    # --- judging ------------------------------------------------------------------------------

    def _row(self, request_id: str) -> VerifyRow:
        request = self._requests[request_id]
        drafts = self._step.scheduled_spec_decode_tokens.get(request_id, ())
        q = self._orders.qs.get(request_id)
        return VerifyRow(
            sampling=request.law.sampling,
            ids=request.ids,
            num_prompt=request.law.num_prompt,
            draft_ids=tuple(drafts),
            q=q,
        )

    def _judge(self, logits_NV: Tensor, judged: Sequence[tuple[str, VerifyRow]]) -> None:
        try:
            verdicts = accept(logits_NV, [row for _, row in judged])
        except DSparkError:  # somebody's logits are not finite: one by one, to spare the others
            self._judge_singly(logits_NV, judged)
            return
        for (request_id, _), verdict in zip(judged, verdicts, strict=True):
            self._take_verdict(request_id, verdict)

    def _judge_singly(self, logits_NV: Tensor, judged: Sequence[tuple[str, VerifyRow]]) -> None:
        start = 0
        for request_id, row in judged:
            own_NV = logits_NV[start : start + row.num_laws]
            try:
                verdict = accept(own_NV, [row])[0]
            except DSparkError:
                # A mask does not hide a NaN: who has nothing but -inf was masked to the last token.
                stuck = bool(torch.isneginf(own_NV).all(dim=-1).any())
                (self._stuck if stuck else self._broken).add(request_id)
            else:
                self._take_verdict(request_id, verdict)
            start += row.num_laws

    def _take_verdict(self, request_id: str, verdict: RowVerdict) -> None:
        self._verdicts[request_id] = verdict
        # Past a stop the scheduler cuts, and the request is over.
        self._requests[request_id].ids.extend(verdict.token_ids)

    def _padded(self, request_ids: Sequence[str]) -> Tensor:
        """Tokens as vLLM's rejection sampler gives them; two columns at least, so that a row
        without tokens is read as one."""
        tokens = [
            verdict.token_ids if (verdict := self._verdicts.get(request_id)) else ()
            for request_id in request_ids
        ]
        width = max(2, *map(len, tokens))
        rows = [[*ids, *[_NO_TOKEN] * (width - len(ids))] for ids in tokens]
        return torch.tensor(rows, dtype=torch.int32)

    # --- features -----------------------------------------------------------------------------

    def _features(self, state: Any, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor | None]:
        """Projected rows of each span (offset, length), all in one product."""
        if self._projection is None or not spans:
            return [None] * len(spans)
        tapped = dict(zip(self.aux_layers, state.aux_hidden_states or (), strict=True))
        # The last layer is tapped behind the final norm, as transformers reports it.
        layers = [
            tapped[i + 1] if i + 1 < self._num_layers else state.hidden_states
            for i in self._projection.target_layer_ids
        ]
        rows = [offset + n for offset, num in spans for n in range(num)]
        at = torch.tensor(rows, device=state.hidden_states.device)
        features_TF = torch.cat([layer.index_select(0, at) for layer in layers], dim=-1)
        projected = self._projection(features_TF).cpu()
        return torch.split(projected, [num for _, num in spans])
