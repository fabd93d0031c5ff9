"""What one step commits, gathered request by request, projected in one product.

Shape legend: T tokens of the batch or rows of a request, F raw feature width, D draft hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifier_service.engine import CommittedRows
from verifier_service.projection import Projects
from verifier_service.torch_engine.requests import Request, Work


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What a step has computed for one request that stays so."""

    request: Request
    rows: CommittedRows
    """All of them; features only once they are projected."""
    first_position: int
    """Of the first row that was computed; what lies before it was found."""
    num_computed: int
    offset: int
    """First computed row in the batch."""
    cached_TD: Tensor | None
    """Projected rows before ``first_position``."""
    computed_TD: Tensor | None = None
    """Projected rows from ``first_position`` on."""


def commit(work: Work, offset: int, num_rows: int, *, finished: bool) -> Commit:
    """Advance a request by ``num_rows`` computed rows, and by what was found before them.

    Args:
        offset: of its first row in the batch.
    """
    request, first = work.request, work.request.num_computed
    return Commit(
        request=request,
        rows=CommittedRows(
            rid=request.rid,
            first_position=first,
            ids=request.commit(work.num_cached + num_rows),
            digest=request.digest,
            features=None,
            prefill_done=request.prefilled,
            finished=finished,
        ),
        first_position=first + work.num_cached,
        num_computed=num_rows,
        offset=offset,
        cached_TD=work.cached_TD,
    )


def project(
    commits: list[Commit], features_TF: Tensor | None, projection: Projects | None
) -> list[Commit]:
    """Project the computed rows, all requests in one product, and hand each its own."""
    if projection is None or features_TF is None or not commits:
        return commits
    kept = [i for c in commits for i in range(c.offset, c.offset + c.num_computed)]
    index = torch.tensor(kept, device=features_TF.device)
    rows_TD = projection(features_TF.index_select(0, index)).cpu()
    parts = torch.split(rows_TD, [c.num_computed for c in commits])
    return [_with_rows(c, part_TD) for c, part_TD in zip(commits, parts, strict=True)]


def _with_rows(commit: Commit, computed_TD: Tensor) -> Commit:
    whole_TD = computed_TD
    if commit.cached_TD is not None:
        whole_TD = torch.cat([commit.cached_TD, computed_TD])
    rows = replace(commit.rows, features=whole_TD)
    return replace(commit, rows=rows, computed_TD=computed_TD)
