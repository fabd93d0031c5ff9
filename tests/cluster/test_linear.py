"""Packed linear layers compute what plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cluster.linear import PackedLinear, can_pack, pack_linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 24), (7, 24), (2, 3, 24), (0, 24)])
def test_equals_the_plain_layer(bias: bool, shape: tuple[int, ...]) -> None:
    linear = nn.Linear(24, 10, bias=bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        packed = PackedLinear(linear)(x)
        torch.testing.assert_close(packed, linear(x), atol=1e-5, rtol=1e-5)


def test_other_dtypes_are_not_packed_and_still_right() -> None:
    linear = nn.Linear(24, 10).to(torch.bfloat16)
    packed = PackedLinear(linear)
    assert not packed.packed
    assert not can_pack(linear.weight)
    x = torch.randn(3, 24, dtype=torch.bfloat16)
    assert torch.equal(packed(x), linear(x))


def test_a_tree_is_packed_but_for_what_it_keeps() -> None:
    tree = nn.Sequential(
        nn.Linear(4, 4), nn.ModuleDict({"fc": nn.Linear(4, 4), "up": nn.Linear(4, 4)})
    )
    pack_linears(tree, keep=frozenset({"fc"}))
    inner = tree[1]
    assert isinstance(tree[0], PackedLinear)
    assert isinstance(inner, nn.ModuleDict)
    assert isinstance(inner["fc"], nn.Linear)
    assert isinstance(inner["up"], PackedLinear)
