"""Reading of one `StepResult` frame: checked, then row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster import digest
from cluster.errors import FrameError
from cluster.wire import StepResult
from router.lane_request import LaneRequest


@dataclass(frozen=True, kw_only=True)
class ResultRow:
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


def _rows(result: StepResult) -> Iterator[ResultRow]:
    first = 0
    for n, num_emitted in enumerate(result.num_emitted.tolist()):
        last = first + num_emitted
        yield ResultRow(
            rid=int(result.rid[n]),
            token_ids=tuple(result.token_ids[first:last].tolist()),
            logprobs=tuple(result.logprobs[first:last].tolist()),
            num_accepted=int(result.num_accepted[n]),
            anchor=int(result.anchor[n]),
            digest=int(result.digest[n]),
            finish=int(result.finish[n]),
        )
        first = last
