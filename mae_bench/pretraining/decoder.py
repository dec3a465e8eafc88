"""The decoder's blocks, computed on no more tokens than the loss needs, with the result of computing all of them.

Two savings are exact. In the first block a mask token is its position and nothing else, so its queries, keys and values
are computed once per position and not once per image. In the last block only the tokens that the loss looks at are
needed as queries; all others serve as keys and values. The cross-attention decoder is another model: CrossMAE (Fu et
al., arXiv 2401.14391), whose mask tokens read the encoder's tokens and not each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from mae_bench.engine.onednn import linear

MLP_RATIO = 4
LAYER_NORM = partial(nn.LayerNorm, eps=1e-6)


def self_block(width: int, heads: int) -> Block:
    """timm's pre-norm block, as in FAIR's decoder."""
    return Block(width, heads, MLP_RATIO, qkv_bias=True, norm_layer=LAYER_NORM)


def decode(blocks: Sequence[Block], known_BKD: Tensor, table_ND: Tensor, hidden_BM: Tensor, start: int) -> Tensor:
    """Tokens after all blocks, from place ``start`` on: (B, K+M-start, D).

    The tokens are ``known_BKD``, then for each image the rows of ``table_ND`` (a mask token at every position) that
    ``hidden_BM`` names.
    """
    hidden_BMD = F.embedding(hidden_BM, table_ND)
    x_BND = torch.cat([known_BKD, hidden_BMD], dim=1)
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        if number == 0 and hidden_BM.shape[1]:
            qkv = torch.cat([_project(block, known_BKD), F.embedding(hidden_BM, _project(block, table_ND))], dim=1)
            from_here = start if last else 0
            D = x_BND.shape[-1]
            x_BND = _finish(block, x_BND[:, from_here:], qkv[:, from_here:, :D], qkv[..., D:])
        elif last and start:
            x_BND = _last(block, x_BND, start)
        else:
            x_BND = block(x_BND)
    return x_BND if len(blocks) else x_BND[:, start:]


def _project(block: Block, x: Tensor) -> Tensor:
    """(…,D) -> queries, keys and values (…,3D) of the block's attention."""
    projected: Tensor = block.attn.qkv(block.norm1(x))
    return projected


def _last(block: Block, x_BND: Tensor, start: int) -> Tensor:
    """The block for the tokens from ``start`` on, the others being keys and values only."""
    D = x_BND.shape[-1]
    normed_BND = block.norm1(x_BND)
    weight, bias = block.attn.qkv.weight, block.attn.qkv.bias
    queries_BQD = linear(normed_BND[:, start:], weight[:D], bias[:D])
    return _finish(block, x_BND[:, start:], queries_BQD, linear(normed_BND, weight[D:], bias[D:]))


def _finish(block: Block, x_BQD: Tensor, queries_BQD: Tensor, keys_values_BNE: Tensor) -> Tensor:
    """The rest of a block: attention of the projected queries, and the MLP, both on top of ``x_BQD``."""
    heads = block.attn.num_heads
    x_BQD = x_BQD + block.attn.proj(_attend(queries_BQD, keys_values_BNE, heads))
    return x_BQD + block.mlp(block.norm2(x_BQD))  # type: ignore[no-any-return]


def _attend(queries_BQD: Tensor, keys_values_BNE: Tensor, heads: int) -> Tensor:
    """Multi-head attention of projected queries (B,Q,D), and keys and values side by side (B,N,2D) -> (B,Q,D)."""
    q, k, v = (
        x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in (queries_BQD, *keys_values_BNE.chunk(2, dim=-1))
    )
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class CrossBlock(nn.Module):
    """Mask tokens (B,M,D) read the encoder's tokens (B,K,D), then an MLP, both pre-norm (CrossMAE, section 3.2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = LAYER_NORM(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = LAYER_NORM(width)
        self.mlp = Mlp(width, MLP_RATIO * width)

    def forward(self, x_BMD: Tensor, memory_BKD: Tensor) -> Tensor:
        queries_BMD = self.q(self.norm1(x_BMD))
        x_BMD = x_BMD + self.proj(_attend(queries_BMD, self.kv(memory_BKD), self.heads))
        return x_BMD + self.mlp(self.norm2(x_BMD))  # type: ignore[no-any-return]
