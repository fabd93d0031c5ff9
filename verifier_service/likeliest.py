"""The likeliest tokens of each row, found in one cheap pass.

``topk`` over a whole vocabulary costs many times what reading it does, and leaves ties at its
border to the implementation. Here each row is cut into chunks; the ``num``-th largest chunk
maximum is a floor that at least ``num`` tokens reach. All tokens that reach it are taken (some
more than ``num``; all that are tied): a set that depends on the row alone, whatever the batch.

Shape legend: N rows, V vocabulary, M tokens taken over all rows, J chunks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cluster.errors import DSparkError

_MAX_CHUNK: Final = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Likeliest:
    """Tokens taken, row by row and in id order within a row; tokens at -inf never are."""

    rows: NDArray[np.int64]  # M
    ids: NDArray[np.int64]  # M
    log_weights: NDArray[np.float64]  # M
    bounds: NDArray[np.int64]  # N + 1, row n's tokens are bounds[n] .. bounds[n + 1] - 1
    peaks: NDArray[np.float64]  # N, largest log weight of each row
    rest_bounds: NDArray[np.float64]  # N
    """No less than the mass of the tokens left out, over exp(peak)."""
    complete: NDArray[np.bool_]  # N, surely all finite tokens of the row were taken


def likeliest(law_NV: Tensor, num: int) -> Likeliest:
    """Take at least the ``num`` likeliest tokens of each row (all finite ones where fewer).

    Args:
        law_NV: log weights; -inf is allowed, but not throughout a row.

    Raises:
        DSparkError: NaN, +inf or nothing but -inf in a row: the model's fault, not a law.
    """
    vocab_size = law_NV.shape[1]
    size = max(1, min(_MAX_CHUNK, vocab_size // num))
    padding = -vocab_size % size
    padded = functional.pad(law_NV, (0, padding), value=-torch.inf) if padding else law_NV
    maxima_NJ = padded.view(len(law_NV), -1, size).amax(dim=2)
    peak_N1 = maxima_NJ.amax(dim=1, keepdim=True)
    lowest = torch.finfo(law_NV.dtype).min
    if maxima_NJ.shape[1] <= num:
        floor_N1 = torch.full_like(peak_N1, lowest)
        bound_N = torch.zeros_like(peak_N1[:, 0])
    else:
        rank = maxima_NJ.shape[1] - num + 1  # counted from the smallest
        floor_N1 = maxima_NJ.kthvalue(rank, dim=1, keepdim=True).values
        capped_NJ = torch.minimum(maxima_NJ, floor_N1)
        bound_N = size * (capped_NJ - peak_N1).exp().sum(dim=1)
        floor_N1 = floor_N1.clamp(min=lowest)
    peak_N = peak_N1[:, 0].double().cpu().numpy()
    require_finite(peak_N)
    flat_M = _where(law_NV >= floor_N1)
    row_M, id_M = np.divmod(flat_M, vocab_size)
    at = torch.as_tensor(flat_M, device=law_NV.device)
    return Likeliest(
        rows=row_M,
        ids=id_M,
        log_weights=law_NV.flatten()[at].double().cpu().numpy(),
        bounds=np.searchsorted(row_M, np.arange(len(law_NV) + 1)),
        peaks=peak_N,
        rest_bounds=bound_N.double().cpu().numpy(),
        complete=(floor_N1[:, 0] == lowest).cpu().numpy(),
    )


def argmax(law_NV: Tensor) -> NDArray[np.int64]:
    """Index of each row's largest entry, the lowest one on a tie.

    Raises:
        DSparkError: NaN or +inf in a row.
    """
    if law_NV.device.type == "cpu" and law_NV.dtype in (torch.float32, torch.float64):
        best_N = torch.from_numpy(law_NV.numpy().argmax(axis=1))  # 10 times as fast as torch's
    else:
        best_N = law_NV.argmax(dim=1)  # lands on a NaN where there is one
    require_finite(law_NV.gather(1, best_N[:, None])[:, 0].double().cpu().numpy())
    return np.asarray(best_N.cpu().numpy())


def require_finite(values_N: NDArray[np.float64]) -> None:
    """Refuse to draw tokens from a model that has broken down."""
    if not np.isfinite(values_N).all():
        rows = np.flatnonzero(~np.isfinite(values_N)).tolist()
        raise DSparkError(f"the target's logits are not finite in rows {rows[:8]}")


def _where(mask_NV: Tensor) -> NDArray[np.int64]:
    if mask_NV.device.type == "cpu":
        return np.flatnonzero(mask_NV.numpy())
    return np.asarray(mask_NV.flatten().nonzero()[:, 0].cpu().numpy())
