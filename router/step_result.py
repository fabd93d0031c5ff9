"""Reading of one `StepResult` frame: checked, then row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cluster import digest
from cluster.errors import FrameError
from cluster.wire import StepResult
from router.lane_request import LaneRequest
from router.step_load import StepLoad


class ResultRow(NamedTuple):
    """What a step gave one request."""

    rid: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_accepted: int
    anchor: int
    digest: int
    finish: int

    def follows(self, request: LaneRequest, num_draft: int) -> bool:
        """Whether this can be the outcome of ``num_draft`` drafts behind the request's anchor.

        The digest makes that a check of the whole prefix: the pools agree on every token.
        """
        num_emitted = len(self.token_ids)
        return (
            1 <= num_emitted <= min(num_draft + 1, request.remaining)
            and 0 <= self.num_accepted <= min(num_draft, num_emitted)
            and self.anchor == request.anchor + num_emitted
            and self.digest == digest.extend(request.digest, self.token_ids)
        )


def read_result(result: StepResult, *, vocab_size: int) -> Iterator[ResultRow]:
    """The rows of a well-formed result.

    Raises:
        FrameError: at once, if it holds token ids that do not exist.
    """
    if len(result.token_ids) and result.token_ids.max() >= vocab_size:
        raise FrameError(f"StepResult: token id {result.token_ids.max()} of {vocab_size}")
    return _rows(result)


def load_of(result: StepResult, *, num_rows: int) -> StepLoad:
    """How large the executed step was.

    Args:
        num_rows: verify rows that it was sent with.
    """
    return StepLoad(
        num_rows=num_rows,
        num_tokens=max(result.num_padded_tokens, result.num_real_tokens),
        num_prefill=result.num_prefill_tokens,
        sum_context=result.sum_context,
        num_pairs=result.num_pairs,
    )


def _rows(result: StepResult) -> Iterator[ResultRow]:
    token_ids, logprobs = result.token_ids.tolist(), result.logprobs.tolist()
    columns = (
        result.rid.tolist(),
        result.num_emitted.tolist(),
        result.num_accepted.tolist(),
        result.anchor.tolist(),
        result.digest.tolist(),
        result.finish.tolist(),
    )
    first = 0
    for rid, num_emitted, num_accepted, anchor, prefix, finish in zip(*columns, strict=True):
        last = first + num_emitted
        ids, logs = tuple(token_ids[first:last]), tuple(logprobs[first:last])
        yield ResultRow(rid, ids, logs, num_accepted, anchor, prefix, finish)
        first = last
