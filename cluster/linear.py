"""A linear layer whose weights are laid out once for the device that runs it.

On a CPU in fp32 a stock matrix product re-reads its weights in a layout that suits neither one
token nor eight: two cost nearly twice one. oneDNN with weights reordered at load was about twice as
fast from 5 rows up and not slower below, so it is used where this torch build has it; anything else
goes through ``functional.linear``.

Shape legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

_LAYOUT_ROWS: Final = 8
"""Batch size that oneDNN is told to choose the weight layout for."""


class PackedLinear(nn.Module):
    """``x W^T + b`` for serving: no gradients, no state dict, only a fast call.

    Args:
        linear: the layer to take over; its weight is copied where it can be packed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OI = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = can_pack(weight_OI)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._weight: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _LAYOUT_ROWS)
            if self.packed
            else weight_OI
        )

    def forward(self, x_NI: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if self.packed and x_NI.numel():
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x_NI, self._weight, self._bias, "none", [], ""
            )
            return out
        if self.packed:
            return x_NI.new_empty(*x_NI.shape[:-1], self.out_features)
        return functional.linear(x_NI, self._weight, self._bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight in a layout of its own."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and bool(torch._C._has_mkldnn)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_linears(module: nn.Module, *, keep: frozenset[str] = frozenset()) -> None:
    """Replace every `nn.Linear` below ``module``, except children named in ``keep``."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            if name not in keep:
                setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child, keep=keep)
