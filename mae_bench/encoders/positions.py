"""Absolute positions: MAE's fixed sin-cos table, and resizing a table to another grid.

Source: He et al. (arXiv 2111.06377) and its code, ``util/pos_embed.py`` of facebookresearch/mae. A table has shape
(1, prefix + h*w, D): the rows of the prefix tokens (the class token) first, then the grid row by row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]  # (rows, columns), in patches


def sincos_table(width: int, grid: Grid, class_token: bool) -> Tensor:
    """MAE's fixed table, (1, [1 +] h*w, width), float32; the class token's row is zero.

    The first half of the channels encodes the column and the second half the row, each as [sin | cos] of the
    coordinate times 1 / 10000^(k / (width / 4)). MoCo v3 and mmpretrain exchange the halves, so a table must never be
    made anew for weights that bring their own.
    """
    if width % 4:
        raise ValueError(f"a sin-cos table needs a width that is a multiple of 4, not {width}")
    quarter = width // 4
    frequency_K = 1.0 / 10000 ** (torch.arange(quarter, dtype=torch.float64) / quarter)

    def code(length: int) -> Tensor:
        angle_LK = torch.arange(length, dtype=torch.float64)[:, None] * frequency_K
        return torch.cat([angle_LK.sin(), angle_LK.cos()], dim=1)

    h, w = grid
    column_hwC = code(w)[None].expand(h, w, -1)
    row_hwC = code(h)[:, None].expand(h, w, -1)
    table_ND = torch.cat([column_hwC, row_hwC], dim=2).reshape(h * w, width)
    if class_token:
        table_ND = torch.cat([table_ND.new_zeros(1, width), table_ND])
    return table_ND[None].float()


def resize(table: Tensor, from_grid: Grid, to_grid: Grid, prefix: int) -> Tensor:
    """A (1, prefix + h*w, D) table for another grid; the ``prefix`` rows stay as they are.

    Bicubic, ``align_corners=False``, no antialiasing: what facebookresearch/mae, detectron2's ViTDet and mmsegmentation
    do (timm antialiases). The grids are compared, not their token counts, since 2 x 8 and 4 x 4 both have 16 tokens.
    """
    h, w = from_grid
    if table.shape[1] != prefix + h * w:
        raise ValueError(
            f"a {h}x{w} grid and {prefix} prefix rows make {prefix + h * w} positions, not {table.shape[1]}"
        )
    if from_grid == to_grid:
        return table
    map_1Dhw = table[:, prefix:].reshape(1, h, w, -1).permute(0, 3, 1, 2)
    map_1Dhw = F.interpolate(map_1Dhw, size=to_grid, mode="bicubic", align_corners=False)
    return torch.cat([table[:, :prefix], map_1Dhw.flatten(2).transpose(1, 2)], dim=1)
