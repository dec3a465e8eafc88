"""Which patches of a picture are hidden: at random, in blocks, or all but a regular grid.

He et al., arXiv 2111.06377, Table 1f and Figure 6. A sampling is noise, one number per patch: the ``keep`` patches of
lowest noise are visible (`masking.Masking`), so every sampling hides an exact number of patches, and within the visible
and within the hidden ones the order is random.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mae_bench.encoders.positions import Grid
from mae_bench.errors import UserError
from mae_bench.pretraining.masking import keep_count

Kind = Literal["random", "block", "grid"]
Hidden = NDArray[np.bool_]  # (rows, columns)

LEAST_BLOCK = 16  # patches
ASPECTS = (0.3, 1 / 0.3)  # rows over columns of a block


def noise(kind: Kind, grid: Grid, keep: int, generator: torch.Generator | None = None) -> Tensor:
    """Noise (N,) of one picture, in raster order, from torch's global generator unless another one is given.

    random: uniform in [0, 1). block, grid: visible patches uniform in [0, 1), hidden ones in [1, 2].

    Raises:
        UserError: ``grid`` cannot keep exactly ``keep`` patches.
    """
    uniform = torch.rand(grid[0] * grid[1], generator=generator)
    if kind == "random":
        return uniform
    hidden = blocks(grid, keep, generator) if kind == "block" else all_but_grid(grid, keep, generator)
    return uniform + torch.from_numpy(hidden.ravel())


def blocks(grid: Grid, keep: int, generator: torch.Generator | None = None) -> Hidden:
    """BEiT's block-wise masking (Bao et al., arXiv 2106.08254, Algorithm 1), brought to an exact number of patches.

    Blocks are hidden until all but ``keep`` patches are. A block's area is uniform between ``LEAST_BLOCK`` and what is
    still to be hidden; its aspect is uniform in the logarithm (as in microsoft/unilm's ``masking_generator.py``) among
    those that fit into the grid; its sides are rounded up to whole patches. The last block, which may hold too many,
    is filled row by row from a corner that is drawn; fewer patches than a block's are added to another block's alone.
    """
    rows, columns = grid
    hidden = np.zeros(grid, np.bool_)
    missing = wanted = rows * columns - keep
    while missing > 0:
        area, aspect, top, left, side = torch.rand(5, generator=generator).tolist()
        height, width = _sides(grid, missing, area, aspect)
        first, start = int(top * (rows - height + 1)), int(left * (columns - width + 1))
        block = np.rot90(hidden[first : first + height, start : start + width], int(4 * side))  # a view
        fresh = np.nonzero(~block)
        if missing < min(LEAST_BLOCK, wanted, len(fresh[0])) and not block[0, 0]:
            continue  # its first patches could stand alone
        block[fresh[0][:missing], fresh[1][:missing]] = True
        missing -= len(fresh[0])
    return hidden


def _sides(grid: Grid, missing: int, area: float, aspect: float) -> Grid:
    """Rows and columns of a block; ``area`` and ``aspect`` are uniform in [0, 1)."""
    rows, columns = grid
    patches = min(LEAST_BLOCK + area * max(0, missing - LEAST_BLOCK), rows * columns)
    low, high = map(math.log, ASPECTS)
    ratio = math.exp(low + aspect * (high - low))
    ratio = min(max(ratio, patches / columns**2), rows**2 / patches)  # the area fits into the grid
    return min(rows, math.ceil(math.sqrt(patches * ratio))), min(columns, math.ceil(math.sqrt(patches / ratio)))


def all_but_grid(grid: Grid, keep: int, generator: torch.Generator | None = None) -> Hidden:
    """One patch of every k x k stays visible, at the same place in each; the place is drawn.

    The paper keeps one of every four (75 % hidden) and does not say which.
    """
    step = grid_step(grid, keep)
    row, column = torch.randint(step, (2,), generator=generator).tolist()
    hidden = np.ones(grid, np.bool_)
    hidden[row::step, column::step] = False
    return hidden


@cache
def grid_step(grid: Grid, keep: int) -> int:
    """The k of which one patch in k x k is ``keep`` patches.

    Raises:
        UserError: there is none; names the ratios that fit the grid.
    """
    patches, divisor = grid[0] * grid[1], math.gcd(*grid)
    kept = {patches // step**2: step for step in range(2, divisor + 1) if divisor % step == 0}
    if keep not in kept:
        ratios = " or ".join(f"{_ratio(patches, count):g} (keeps {count})" for count in kept)
        raise UserError(
            f"sampling 'grid' keeps one patch of every k x k, which is never {keep} of {grid[0]} x {grid[1]}; "
            + (f"set mask_ratio to {ratios}" if kept else "no k divides both sides: choose another height or width")
        )
    return kept[keep]


def _ratio(patches: int, keep: int) -> float:
    """The shortest decimal mask ratio that keeps ``keep`` patches."""
    exact, scale = 1 - keep / patches, 10
    while keep_count(patches, math.floor(exact * scale) / scale) != keep:
        scale *= 10
    return math.floor(exact * scale) / scale
