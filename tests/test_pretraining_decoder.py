"""The decoder's savings are exact: the same values and gradients as all blocks on all tokens of every image."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mae_bench.pretraining.decoder import CrossBlock, decode, self_block

WIDTH, HEADS = 24, 3


def blocks(depth: int, seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    made = nn.ModuleList(self_block(WIDTH, HEADS) for _ in range(depth)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def plain(layers: nn.ModuleList, known: Tensor, table: Tensor, hidden: Tensor, start: int) -> Tensor:
    """Every block on every token of every image, and then what is wanted."""
    x = torch.cat([known, torch.stack([table[row] for row in hidden])], dim=1)
    for block in layers:
        x = block(x)
    return x[:, start:]


@given(
    depth=st.integers(0, 3),
    kept=st.integers(0, 4),
    hidden=st.integers(0, 6),
    start=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_values_and_gradients_equal_the_plain_path(depth: int, kept: int, hidden: int, start: int, seed: int) -> None:
    layers = blocks(depth)
    torch.manual_seed(seed)
    start = min(start, kept + hidden)
    known = torch.randn(3, 1 + kept, WIDTH, dtype=torch.float64, requires_grad=True)
    table = torch.randn(kept + hidden + 1, WIDTH, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(len(table))[:hidden] for _ in range(3)])
    inputs = [known, table, *layers.parameters()]
    results = []
    for function in (decode, plain):
        out = function(layers, known, table, index, start)
        grads = torch.autograd.grad((out * out.detach().cos()).sum(), inputs, allow_unused=True, materialize_grads=True)
        results.append([out, *grads])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_cross_block_is_attention_of_pytorch() -> None:
    torch.manual_seed(1)
    block = CrossBlock(WIDTH, HEADS)
    x, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([block.q.weight, block.kv.weight]))
        attention.in_proj_bias.copy_(torch.cat([block.q.bias, block.kv.bias]))
        attention.out_proj.weight.copy_(block.proj.weight)
        attention.out_proj.bias.copy_(block.proj.bias)
    read = x + attention(block.norm1(x), memory, memory, need_weights=False)[0]
    torch.testing.assert_close(block(x, memory), read + block.mlp(block.norm2(read)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("other", [0, 4])
def test_mask_tokens_of_a_cross_block_do_not_see_each_other(other: int) -> None:
    torch.manual_seed(1)
    block = CrossBlock(WIDTH, HEADS)
    x, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    changed = x.clone()
    changed[:, other] += 1
    same = [place for place in range(5) if place != other]
    torch.testing.assert_close(block(changed, memory)[:, same], block(x, memory)[:, same], rtol=0, atol=1e-6)
