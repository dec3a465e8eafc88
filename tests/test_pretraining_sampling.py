"""Samplings of patches: exact counts on any grid, contiguous blocks, regular grids, functions of a generator."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import label

from mae_bench.errors import UserError
from mae_bench.pretraining.masking import Masking, keep_count
from mae_bench.pretraining.sampling import ASPECTS, LEAST_BLOCK, Kind, _sides, grid_step, noise

GRIDS = st.tuples(st.integers(1, 20), st.integers(1, 20)).filter(lambda grid: grid[0] * grid[1] > 1)
SEEDS = st.integers(0, 2**31)


def hidden(kind: Kind, grid: tuple[int, int], keep: int, seed: int) -> np.ndarray:
    """The mask (rows, columns) that the model sees, True = hidden."""
    drawn = noise(kind, grid, keep, torch.Generator().manual_seed(seed))
    return Masking.from_noise(drawn[None], keep).mask.view(grid).bool().numpy()


@given(st.sampled_from(["random", "block"]), GRIDS, st.floats(0, 0.99), SEEDS)
def test_counts_are_exact_on_any_grid_at_any_ratio(kind: Kind, grid: tuple[int, int], ratio: float, seed: int) -> None:
    patches = grid[0] * grid[1]
    keep = min(max(1, int(patches * (1 - ratio))), patches - 1)
    drawn = noise(kind, grid, keep, torch.Generator().manual_seed(seed))
    assert drawn.shape == (patches,)
    assert hidden(kind, grid, keep, seed).sum() == patches - keep
    if kind == "block":  # what is hidden is decided by the blocks, not by ties of the noise
        assert (drawn >= 1).sum() == patches - keep


@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 5), SEEDS)
def test_a_grid_keeps_the_same_place_of_every_cell(rows: int, columns: int, step: int, seed: int) -> None:
    grid = rows * step, columns * step
    mask = hidden("grid", grid, rows * columns, seed)
    cells = mask.reshape(rows, step, columns, step).swapaxes(1, 2)
    assert (cells == cells[0, 0]).all()
    assert (~cells[0, 0]).sum() == 1


@given(GRIDS, st.integers(1, 400), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_blocks_have_sixteen_patches_and_the_aspects_of_the_paper(
    grid: tuple[int, int], missing: int, area: float, aspect: float
) -> None:
    patches = grid[0] * grid[1]
    rows, columns = _sides(grid, min(missing, patches - 1), area, aspect)
    assert rows <= grid[0] and columns <= grid[1]
    assert rows * columns >= min(LEAST_BLOCK, patches)
    if min(grid) >= 8:  # smaller grids bound the aspect; the sides are rounded up, by less than a patch
        assert (rows - 1) / columns < ASPECTS[1] and rows / max(1, columns - 1) > ASPECTS[0]


@given(st.integers(4, 20), st.integers(4, 20), SEEDS)
def test_up_to_sixteen_patches_lie_in_one_block(rows: int, columns: int, seed: int) -> None:
    mask = hidden("block", (rows, columns), rows * columns - min(LEAST_BLOCK, rows * columns - 1), seed)
    assert label(mask)[1] == 1


@given(st.integers(8, 16), st.integers(8, 16), st.sampled_from([0.3, 0.5, 0.75]), SEEDS)
def test_blocks_are_contiguous(rows: int, columns: int, ratio: float, seed: int) -> None:
    """Hidden patches that touch are at least a block's; patches at random lie about in many pieces."""
    keep = keep_count(rows * columns, ratio)
    pieces, count = label(hidden("block", (rows, columns), keep, seed))
    assert np.bincount(pieces.ravel())[1:].min() >= LEAST_BLOCK
    if ratio == 0.3:
        assert count < label(hidden("random", (rows, columns), keep, seed))[1]


def test_what_a_last_block_leaves_out_is_on_any_side() -> None:
    """The share of hidden patches is the same up to the symmetries of the grid."""
    share = np.mean([hidden("block", (14, 14), 49, seed) for seed in range(3000)], axis=0)
    for image in (share[::-1], share[:, ::-1], share.T):
        assert np.abs(share - image).max() < 0.08
    assert share.mean() == pytest.approx(0.75)


@pytest.mark.parametrize(("kind", "keep"), [("random", 49), ("block", 49), ("block", 98), ("grid", 49)])
def test_masks_are_functions_of_the_global_generator(kind: Kind, keep: int) -> None:
    torch.manual_seed(3)
    first, second = noise(kind, (14, 14), keep), noise(kind, (14, 14), keep)
    torch.manual_seed(3)
    assert torch.equal(first, noise(kind, (14, 14), keep))
    assert torch.equal(second, noise(kind, (14, 14), keep, None))
    assert torch.equal(first, noise(kind, (14, 14), keep, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("kind", "different"), [("random", 60), ("block", 60), ("grid", 4)])
def test_samples_differ(kind: Kind, different: int) -> None:
    """A grid of every fourth patch has four places; the order of the patches differs all the same."""
    masks = {hidden(kind, (14, 14), 49, seed).tobytes() for seed in range(60)}
    assert len(masks) == different
    assert len({tuple(noise(kind, (14, 14), 49).tolist()) for _ in range(60)}) == 60


def test_random_noise_is_torchs_uniform() -> None:
    torch.manual_seed(0)
    drawn = noise("random", (8, 8), 16)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(64))


@given(GRIDS, st.integers(1, 399))
def test_a_grid_fits_or_the_ratios_that_do_are_named(grid: tuple[int, int], keep: int) -> None:
    patches = grid[0] * grid[1]
    try:
        assert patches == keep * grid_step(grid, keep) ** 2
    except UserError as error:
        words = str(error).replace("(", "").split()
        named = [
            (float(words[at - 1]), int(words[at + 1].strip(")")))
            for at, word in enumerate(words)
            if word == "keeps" and at > 3
        ]
        assert bool(named) == (math.gcd(*grid) > 1)
        for ratio, count in named:  # each of them works
            assert keep_count(patches, ratio) == count
            assert grid_step(grid, count) ** 2 * count == patches


def test_the_refusal_of_a_grid_reads_well() -> None:
    with pytest.raises(UserError) as refusal:
        grid_step((14, 14), 98)
    assert str(refusal.value) == (
        "sampling 'grid' keeps one patch of every k x k, which is never 98 of 14 x 14; "
        "set mask_ratio to 0.75 (keeps 49) or 0.979 (keeps 4) or 0.99 (keeps 1)"
    )
    with pytest.raises(UserError, match="no k divides both sides"):
        grid_step((7, 5), 9)


def test_a_block_mask_costs_less_than_a_crop() -> None:
    """0.1 ms on one core; a crop of a photograph to 224 pixels takes several."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(40):
            noise("block", (14, 14), 49)
        times.append((time.perf_counter() - start) / 40)
    assert min(times) < 1e-3
