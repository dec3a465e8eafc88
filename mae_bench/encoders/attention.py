"""Self-attention with optional relative positions, and window partition.

Sources: decomposed relative positions as in ViTDet (Li et al., arXiv 2203.16527; ``detectron2.modeling.backbone.vit``)
and the relative position bias of BEiT (Bao et al., arXiv 2106.08254), including its three entries for the class token.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_bench.encoders.positions import BIAS_EXTRAS, Grid, resize_decomposed_table
from mae_bench.errors import UserError

RelPos = Literal["none", "decomposed", "bias"]


class Attention(nn.Module):
    """Multi-head self-attention, with the parameter names of FAIR's and timm's ViT.

    ``span`` is the grid (rows, columns) that the relative position tables are made for: ``rel_pos_h`` and ``rel_pos_w``
    of shape (2*rows-1, head_dim) and (2*columns-1, head_dim), or ``relative_position_bias_table`` of shape
    ((2*rows-1)*(2*columns-1) + 3, heads). Tables start at zero, so that they leave a pre-trained function as it is.
    """

    def __init__(self, width: int, heads: int, rel_pos: RelPos = "none", span: Grid = (0, 0)) -> None:
        super().__init__()
        self.heads = heads
        self.span = span
        self.rel_pos = rel_pos
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        rows, columns = 2 * span[0] - 1, 2 * span[1] - 1
        if rel_pos == "decomposed":
            self.rel_pos_h = nn.Parameter(torch.zeros(rows, width // heads))
            self.rel_pos_w = nn.Parameter(torch.zeros(columns, width // heads))
        elif rel_pos == "bias":
            self.relative_position_bias_table = nn.Parameter(torch.zeros(rows * columns + BIAS_EXTRAS, heads))

    def forward(self, x_BND: Tensor, grid: Grid | None = None) -> Tensor:
        """(B,N,D) -> (B,N,D). Relative positions need the ``grid`` (h, w) of the h*w last tokens; bias also takes a
        prefix."""
        B, N, D = x_BND.shape
        qkv = self.qkv(x_BND).view(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        q_BHNC, k_BHNC, v_BHNC = qkv.unbind(0)
        bias_HNN, scale = None, q_BHNC.shape[-1] ** -0.5
        if self.rel_pos != "none" and grid is None:
            raise ValueError("relative positions need the grid of the tokens")
        if self.rel_pos == "decomposed" and grid is not None:
            (q_BHNC, k_BHNC, v_BHNC), scale = self._with_decomposed(q_BHNC, k_BHNC, v_BHNC, grid), 1.0
        elif self.rel_pos == "bias" and grid is not None:
            index_NN = bias_index(grid, self.span, N - grid[0] * grid[1], x_BND.device)
            bias_HNN = F.embedding(index_NN, self.relative_position_bias_table).permute(2, 0, 1).to(q_BHNC.dtype)
        y_BHNC = F.scaled_dot_product_attention(q_BHNC, k_BHNC, v_BHNC, attn_mask=bias_HNN, scale=scale)
        y_BND: Tensor = self.proj(y_BHNC[..., : D // self.heads].transpose(1, 2).flatten(2))
        return y_BND

    def _with_decomposed(
        self, q_BHNC: Tensor, k_BHNC: Tensor, v_BHNC: Tensor, grid: Grid
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys whose product is the scaled q.k plus the decomposed bias q.R_h + q.R_w, and padded values.

        The bias of a query depends on a key only through the key's row and column. So it rides in the product: the
        query is extended by its bias for every row and every column, the key by a one-hot code of its own row and
        column. No N x N mask is stored, which at 64 x 64 tokens is most of the memory of a block. The flash kernels
        want equally many channels in all three, in multiples of 8: the rest is filled with zeros.
        """
        h, w = grid
        q_BHhwC = q_BHNC.reshape(*q_BHNC.shape[:2], h, w, -1)
        bias_h = torch.einsum("bnhwc,hkc->bnhwk", q_BHhwC, self._offsets(self.rel_pos_h, h)).flatten(2, 3)
        bias_w = torch.einsum("bnhwc,wkc->bnhwk", q_BHhwC, self._offsets(self.rel_pos_w, w)).flatten(2, 3)
        row_hwR = torch.eye(h, device=q_BHNC.device, dtype=q_BHNC.dtype)[:, None].expand(h, w, h)
        column_hwC = torch.eye(w, device=q_BHNC.device, dtype=q_BHNC.dtype)[None].expand(h, w, w)
        code_NE = torch.cat([row_hwR, column_hwC], dim=2).flatten(0, 1)
        channels = q_BHNC.shape[-1]
        q_BHNE = torch.cat([q_BHNC * channels**-0.5, bias_h, bias_w], dim=-1)
        k_BHNE = torch.cat([k_BHNC, code_NE.expand(*k_BHNC.shape[:2], -1, -1)], dim=-1)
        spare = -q_BHNE.shape[-1] % 8
        v_BHNE = F.pad(v_BHNC, (0, h + w + spare))
        return F.pad(q_BHNE, (0, spare)), F.pad(k_BHNE, (0, spare)), v_BHNE

    @staticmethod
    def _offsets(table_LC: Tensor, size: int) -> Tensor:
        """(size, size, C): the table's row for every pair of coordinates."""
        at = torch.arange(size, device=table_LC.device)
        return resize_decomposed_table(table_LC, size)[at[:, None] - at[None] + size - 1]


def bias_index(grid: Grid, span: Grid, prefix: int, device: torch.device) -> Tensor:
    """(prefix+N, prefix+N) rows of a BEiT bias table made for ``span``, for the prefix and the N tokens of ``grid``.

    A grid that is smaller than the span uses the same offsets; a larger one has offsets that the table lacks.
    The last three rows of the table are: class to token, token to class, class to class. Registers, which have no
    place in the image either, share them.
    """
    (h, w), (rows, columns) = grid, span
    if h > rows or w > columns:
        raise UserError(
            f"a relative position bias for {rows} x {columns} patches has no entries for {h} x {w}: give the encoder "
            "images of at most its own size (test_mode = slide), or switch off a bias of the task's (rel_pos = false)"
        )
    y_N = torch.arange(h, device=device).repeat_interleave(w)
    x_N = torch.arange(w, device=device).repeat(h)
    dy_NN = y_N[:, None] - y_N[None] + rows - 1
    dx_NN = x_N[:, None] - x_N[None] + columns - 1
    size = (2 * rows - 1) * (2 * columns - 1)
    index = torch.empty(prefix + h * w, prefix + h * w, dtype=torch.long, device=device)
    index[prefix:, prefix:] = dy_NN * (2 * columns - 1) + dx_NN
    index[:prefix] = size
    index[:, :prefix] = size + 1
    index[:prefix, :prefix] = size + 2
    return index


def split_windows(x_BND: Tensor, grid: Grid, window: int) -> Tensor:
    """(B, h*w, D) -> (B*windows, window*window, D), padded with zeros below and on the right.

    The padded tokens take part in attention, as in detectron2: nothing masks them.
    """
    (B, _, D), (h, w) = x_BND.shape, grid
    x_BhwD = F.pad(x_BND.view(B, h, w, D), (0, 0, 0, -w % window, 0, -h % window))
    rows, columns = x_BhwD.shape[1] // window, x_BhwD.shape[2] // window
    x = x_BhwD.view(B, rows, window, columns, window, D).transpose(2, 3)
    return x.reshape(B * rows * columns, window * window, D)


def join_windows(x_VND: Tensor, grid: Grid, window: int) -> Tensor:
    """The inverse of ``split_windows``: (B*windows, window*window, D) -> (B, h*w, D), padding dropped."""
    (V, _, D), (h, w) = x_VND.shape, grid
    rows, columns = -(-h // window), -(-w // window)
    B = V // (rows * columns)
    x = x_VND.view(B, rows, columns, window, window, D).transpose(2, 3)
    return x.reshape(B, rows * window, columns * window, D)[:, :h, :w].flatten(1, 2)
