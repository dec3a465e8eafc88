"""Masks: exact counts, per sample, FAIR's order, invertible, functions of the noise alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mae_bench.errors import UserError
from mae_bench.pretraining.masking import Masking, keep_count

BATCHES = st.tuples(st.integers(1, 5), st.integers(2, 80), st.integers(0, 2**31))
RATIOS = st.floats(0, 0.99)


def _noise(batch: int, patches: int, seed: int) -> torch.Tensor:
    return torch.rand(batch, patches, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("patches", "ratio", "keep"),
    [(196, 0.75, 49), (196, 0.9, 19), (196, 0.8, 39), (196, 0.7, 58), (196, 0.6, 78), (256, 0.75, 64), (64, 0.75, 16)],
)
def test_keep_count_is_fairs(patches: int, ratio: float, keep: int) -> None:
    assert keep_count(patches, ratio) == keep


@pytest.mark.parametrize(("ratio", "what"), [(0.0, "masked"), (0.99, "visible")])
def test_a_ratio_that_leaves_nothing_is_refused(ratio: float, what: str) -> None:
    with pytest.raises(UserError, match=f"none of 64 patches {what}"):
        keep_count(64, ratio)


@given(BATCHES, st.data())
def test_mask_counts_and_order(shape: tuple[int, int, int], data: st.DataObject) -> None:
    noise = _noise(*shape)
    keep = data.draw(st.integers(1, shape[1] - 1))
    masking = Masking.from_noise(noise, keep)
    mask = masking.mask
    assert (mask.sum(1) == shape[1] - keep).all()
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    # The visible patches are those with the lowest noise, in rising order of noise.
    for row, shuffle, hidden in zip(noise, masking.shuffle, mask, strict=True):
        assert (row[shuffle].diff() >= 0).all()
        assert row[hidden == 0].max() <= row[hidden == 1].min()


@given(BATCHES, st.data())
def test_restoring_undoes_shuffling(shape: tuple[int, int, int], data: st.DataObject) -> None:
    masking = Masking.from_noise(_noise(*shape), data.draw(st.integers(1, shape[1] - 1)))
    tokens = torch.arange(shape[0] * shape[1] * 3.0).view(shape[0], shape[1], 3)
    shuffled = masking.shuffled(tokens)
    assert torch.equal(masking.restored(shuffled), tokens)
    # What stands first in the shuffle is what the mask calls visible.
    visible = masking.shuffled(masking.mask.unsqueeze(-1))[:, : masking.keep]
    assert (visible == 0).all()


@given(BATCHES)
def test_a_samples_mask_does_not_depend_on_its_batch(shape: tuple[int, int, int]) -> None:
    noise = _noise(*shape)
    together = Masking.from_noise(noise, 1).shuffle
    alone = torch.cat([Masking.from_noise(row[None], 1).shuffle for row in noise])
    assert torch.equal(together, alone)


def test_masks_of_a_batch_differ() -> None:
    masks = Masking.from_noise(_noise(64, 64, 0), 16).mask
    assert len({tuple(row.tolist()) for row in masks}) == 64


def test_ties_fall_to_the_lower_index() -> None:
    assert Masking.from_noise(torch.zeros(1, 9), 3).shuffle.tolist() == [list(range(9))]


def test_every_patch_is_hidden_equally_often() -> None:
    share = Masking.from_noise(_noise(4000, 16, 1), 4).mask.mean(0)
    # 4000 draws at 0.75: a standard deviation of 0.0068 per patch.
    assert (share - 0.75).abs().max() < 5 * 0.0068
