"""Absolute positions and relative position tables, and their way to another grid.

Sources: He et al. (arXiv 2111.06377) and its code, ``util/pos_embed.py`` of facebookresearch/mae; timm's
``resample_abs_pos_embed``; ``interpolate_pos_encoding`` of facebookresearch/dino and facebookresearch/dinov2; BEiT's
``run_class_finetuning.py`` (microsoft/unilm). An absolute table has shape (1, prefix + h*w, D): the rows of the prefix
tokens (the class token) first, then the grid row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mae_bench.schema import Resize

Grid = tuple[int, int]  # (rows, columns), in patches


@dataclass(frozen=True)
class Convention:
    """How a publisher's code resizes its position table: always bicubic with ``align_corners=False``."""

    antialias: bool
    offset: float | None  # added to the grid before dividing by the old one; None: the size itself is asked for


# The name goes into the recipe and so into every record. They differ by up to some percent of a table's entries.
RESIZE: dict[Resize, Convention] = {
    "fair": Convention(antialias=False, offset=None),  # facebookresearch/mae, detectron2's ViTDet, mmsegmentation
    "timm": Convention(antialias=True, offset=None),
    "dino": Convention(antialias=False, offset=0.1),
    "dinov2": Convention(antialias=False, offset=0.1),  # torch.hub, models without registers
    "dinov2_registers": Convention(antialias=True, offset=None),  # torch.hub, models with registers
}


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


def resize(table: Tensor, from_grid: Grid, to_grid: Grid, prefix: int, how: Resize = "fair") -> Tensor:
    """A (1, prefix + h*w, D) table for another grid; the ``prefix`` rows stay as they are.

    The same grid gives the table itself in every convention. Grids are compared, not their token counts, since 2 x 8
    and 4 x 4 both have 16 tokens.
    """
    h, w = from_grid
    if table.shape[1] != prefix + h * w:
        raise ValueError(
            f"a {h}x{w} grid and {prefix} prefix rows make {prefix + h * w} positions, not {table.shape[1]}"
        )
    if from_grid == to_grid:
        return table
    convention = RESIZE[how]
    map_1Dhw = table[:, prefix:].float().reshape(1, h, w, -1).permute(0, 3, 1, 2)
    target: dict[str, object] = {"size": to_grid}
    if convention.offset is not None:
        # The coordinates follow the factor with the offset in it, not the sizes: this is what moves the values.
        factors = tuple((new + convention.offset) / old for new, old in zip(to_grid, from_grid, strict=True))
        target = {"scale_factor": factors}
    map_1Dhw = F.interpolate(map_1Dhw, mode="bicubic", align_corners=False, antialias=convention.antialias, **target)  # type: ignore[arg-type]
    if tuple(map_1Dhw.shape[2:]) != to_grid:
        raise ValueError(f"convention '{how}' makes {tuple(map_1Dhw.shape[2:])} of {from_grid}, not {to_grid}")
    rows_1ND = map_1Dhw.flatten(2).transpose(1, 2).to(table.dtype)
    return torch.cat([table[:, :prefix], rows_1ND], dim=1)
