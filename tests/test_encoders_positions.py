"""Position tables and patch kernels, against transformers, detectron2 and timm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import resample_patch_embed

from mae_bench.encoders.patches import resample_kernel
from mae_bench.encoders.positions import resize, sincos_table

SIDE = st.integers(1, 9)
GRID = st.tuples(SIDE, SIDE)


@pytest.mark.parametrize(("width", "side"), [(8, 3), (64, 7), (768, 14)])
def test_table_equals_transformers(width: int, side: int) -> None:
    from transformers import ViTMAEConfig
    from transformers.models.vit_mae.modeling_vit_mae import ViTMAEEmbeddings

    embeddings = ViTMAEEmbeddings(ViTMAEConfig(hidden_size=width, image_size=side * 4, patch_size=4))
    embeddings.initialize_weights()
    torch.testing.assert_close(
        sincos_table(width, (side, side), class_token=True), embeddings.position_embeddings.data, atol=1e-6, rtol=0
    )


def test_first_half_of_the_channels_encodes_the_column() -> None:
    table = sincos_table(8, (2, 3), class_token=False).view(2, 3, 8)
    assert torch.equal(table[0, :, :4], table[1, :, :4])
    assert torch.equal(table[:, 0, 4:], table[:, 2, 4:])
    assert not torch.equal(table[0, 1, :4], table[0, 2, :4])
    # sin and cos of the column times 1 and 1/100
    expected = torch.tensor([2.0, 0.02])
    torch.testing.assert_close(table[0, 2, :4], torch.cat([expected.sin(), expected.cos()]))


def test_class_row_is_zero() -> None:
    with_row = sincos_table(16, (3, 5), class_token=True)
    assert torch.equal(with_row[:, :1], torch.zeros(1, 1, 16))
    assert torch.equal(with_row[:, 1:], sincos_table(16, (3, 5), class_token=False))


def test_width_must_be_a_multiple_of_four() -> None:
    with pytest.raises(ValueError, match="multiple of 4, not 6"):
        sincos_table(6, (2, 2), class_token=True)


@given(grid=GRID, to=GRID, prefix=st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_resize_keeps_the_prefix_and_treats_rows_and_columns_alike(
    grid: tuple[int, int], to: tuple[int, int], prefix: int
) -> None:
    generator = torch.Generator().manual_seed(grid[0] * 10 + grid[1])
    table = torch.randn(1, prefix + grid[0] * grid[1], 6, generator=generator)
    out = resize(table, grid, to, prefix)
    assert out.shape == (1, prefix + to[0] * to[1], 6)
    assert torch.equal(out[:, :prefix], table[:, :prefix])

    def turned(rows: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        return rows[:, prefix:].view(1, *shape, 6).transpose(1, 2).reshape(1, -1, 6)

    other = resize(turned(table, grid), grid[::-1], to[::-1], 0)
    torch.testing.assert_close(turned(out, to), other, atol=1e-5, rtol=1e-5)


@given(grid=GRID, prefix=st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_resize_is_the_identity_at_its_own_grid(grid: tuple[int, int], prefix: int) -> None:
    table = torch.randn(1, prefix + grid[0] * grid[1], 4)
    assert resize(table, grid, grid, prefix) is table


def test_resize_compares_grids_not_token_counts() -> None:
    table = torch.randn(1, 17, 4)
    out = resize(table, (2, 8), (4, 4), prefix=1)
    assert out.shape == table.shape
    assert not torch.allclose(out, table)
    with pytest.raises(ValueError, match="3x3 grid"):
        resize(table, (3, 3), (4, 4), prefix=1)


@pytest.mark.parametrize("to", [(4, 4), (5, 5), (9, 4), (3, 11)])
def test_resize_equals_detectron2(to: tuple[int, int]) -> None:
    from detectron2.modeling.backbone.utils import get_abs_pos

    table = torch.randn(1, 1 + 16, 8)
    ours = resize(table, (4, 4), to, prefix=1)[:, 1:]
    torch.testing.assert_close(ours, get_abs_pos(table, True, to).reshape(1, -1, 8), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("old", "new"), [(14, 16), (16, 8), (4, 4), (5, 7)])
def test_kernel_resampling_equals_timm(old: int, new: int) -> None:
    kernel = torch.randn(6, 3, old, old)
    expected = resample_patch_embed(kernel, [new, new])
    torch.testing.assert_close(resample_kernel(kernel, new), expected, atol=1e-5, rtol=1e-4)
