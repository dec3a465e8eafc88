"""Absolute positions and relative position tables, and their way to another grid.

Sources: He et al. (arXiv 2111.06377) and its code, ``util/pos_embed.py`` of facebookresearch/mae; timm's
``resample_abs_pos_embed``; ``interpolate_pos_encoding`` of facebookresearch/dino and facebookresearch/dinov2; BEiT's
``run_class_finetuning.py`` (microsoft/unilm). An absolute table has shape (1, prefix + h*w, D): the rows of the prefix
tokens (the class token) first, then the grid row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mae_bench.errors import UserError
from mae_bench.schema import Resize

Grid = tuple[int, int]  # (rows, columns), in patches
BIAS_EXTRAS = 3  # last rows of a BEiT bias table: class to token, token to class, class to class


@dataclass(frozen=True)
class Convention:
    """How a publisher's code resizes its position table: always bicubic with ``align_corners=False``."""

    antialias: bool
    # Added to the new grid before dividing by the old one; None: the size itself is asked for. The sum is cut off to
    # whole patches, so an offset of 0.1 changes no size.
    offset: float | None


# The name goes into the recipe and so into every record.
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
        raise UserError(f"positions 'sincos' need a width that is a multiple of 4, not {width}; declare 'learned' ones")
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
    rows_1ND = map_1Dhw.flatten(2).transpose(1, 2).to(table.dtype)
    return torch.cat([table[:, :prefix], rows_1ND], dim=1)


def resize_bias_table(table: Tensor, from_grid: Grid, to_grid: Grid) -> Tensor:
    """BEiT's relative position bias for another grid, ((2h-1)(2w-1) + 3, heads) -> the same of the new grid; float32.

    As in BEiT's fine-tuning code: along each axis the old offsets are laid out as 0, 1, 1+q, 1+q+q^2, … with q chosen
    so that the last one falls on the largest new offset, and a cubic spline through them is read at the new offsets.
    So near offsets keep their values and far ones are stretched. The rows of the class token stay as they are; the same
    grid gives the table itself. Raises UserError for a grid that is too small for a cubic spline.
    """
    if from_grid == to_grid:
        return table
    if min(from_grid) < 3:
        raise UserError(
            f"a relative position bias for {from_grid[0]} x {from_grid[1]} patches is too small to be interpolated to "
            f"{to_grid[0]} x {to_grid[1]}: give images of the backbone's own size"
        )
    h, w = (2 * side - 1 for side in from_grid)
    bias_HWA = table[:-BIAS_EXTRAS].double().view(h, w, -1)
    rows, columns = (torch.from_numpy(_spline(*sides)) for sides in zip(from_grid, to_grid, strict=True))
    resized_HWA = torch.einsum("rh,cw,hwa->rca", rows, columns, bias_HWA)
    return torch.cat([resized_HWA.flatten(0, 1).float(), table[-BIAS_EXTRAS:].float()])


def _spline(old: int, new: int) -> NDArray[np.float64]:
    """(2*new-1, 2*old-1): the linear map from a bias per old offset to one per new offset, along one axis."""
    from scipy.interpolate import make_interp_spline  # slow to import, and wanted by BEiT's tables alone

    low, high = 1.01, 1.5
    while high - low > 1e-6:  # BEiT's bisection, including where it ends
        q = (low + high) / 2
        low, high = (low, q) if (1 - q ** (old - 1)) / (1 - q) > new - 1 else (q, high)
    far = np.cumsum(q ** np.arange(old - 1))
    at = np.concatenate([-far[::-1], [0], far])
    # Beyond the last old offset (q is at most 1.5) the spline is not continued: the outermost value holds.
    wanted = np.clip(np.arange(1 - new, new), at[0], at[-1])
    matrix: NDArray[np.float64] = make_interp_spline(at, np.eye(len(at)), k=3)(wanted)
    return matrix


def resize_decomposed_table(table_LC: Tensor, side: int) -> Tensor:
    """One of ViTDet's tables, (2*old-1, C) -> (2*side-1, C): linearly, as detectron2's ``get_rel_pos``, also for
    smaller sides. The same side gives the table itself."""
    if table_LC.shape[0] == 2 * side - 1:
        return table_LC
    return F.interpolate(table_LC.T[None], size=2 * side - 1, mode="linear")[0].T
