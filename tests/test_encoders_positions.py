"""Position tables of both kinds and patch kernels: against timm, transformers, detectron2, scipy and plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from encoders_cases import Interp2d
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import RectBivariateSpline
from scipy.optimize import brentq
from timm.layers import pos_embed_rel, resample_abs_pos_embed, resample_patch_embed, resize_rel_pos_bias_table
from torch import Tensor

from mae_bench.encoders.patches import resample_kernel
from mae_bench.encoders.positions import (
    RESIZE,
    resize,
    resize_bias_table,
    resize_decomposed_table,
    sincos_table,
)
from mae_bench.errors import UserError
from mae_bench.schema import Resize

SIDE = st.integers(1, 9)
GRID = st.tuples(SIDE, SIDE)
HOW = st.sampled_from(sorted(RESIZE))
GRIDS = [((4, 4), (4, 4)), ((4, 4), (7, 7)), ((5, 5), (3, 8)), ((7, 7), (2, 4)), ((3, 6), (6, 5)), ((2, 8), (4, 4))]


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
    with pytest.raises(UserError, match="multiple of 4, not 6"):
        sincos_table(6, (2, 2), class_token=True)


@given(grid=GRID, to=GRID, prefix=st.integers(0, 2), how=HOW)
@settings(max_examples=100)
def test_resize_keeps_the_prefix_and_treats_rows_and_columns_alike(
    grid: tuple[int, int], to: tuple[int, int], prefix: int, how: Resize
) -> None:
    generator = torch.Generator().manual_seed(grid[0] * 10 + grid[1])
    table = torch.randn(1, prefix + grid[0] * grid[1], 6, generator=generator)
    out = resize(table, grid, to, prefix, how)
    assert out.shape == (1, prefix + to[0] * to[1], 6)
    assert torch.equal(out[:, :prefix], table[:, :prefix])

    def turned(rows: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        return rows[:, prefix:].view(1, *shape, 6).transpose(1, 2).reshape(1, -1, 6)

    other = resize(turned(table, grid), grid[::-1], to[::-1], 0, how)
    torch.testing.assert_close(turned(out, to), other, atol=1e-5, rtol=1e-5)


@given(grid=GRID, prefix=st.integers(0, 2), how=HOW)
@settings(max_examples=25)
def test_resize_is_the_identity_at_its_own_grid(grid: tuple[int, int], prefix: int, how: Resize) -> None:
    table = torch.randn(1, prefix + grid[0] * grid[1], 4)
    assert resize(table, grid, grid, prefix, how) is table


def cubic(values_LN: Any, length: int, factor: float) -> Any:
    """Cubic convolution (Keys' kernel, a = -0.75) along the first axis, in float64: sample i is taken at
    (i + 0.5) / factor - 0.5 of the old ones, of which the outermost go on beyond the border."""
    at = (np.arange(length) + 0.5) / factor - 0.5
    first = np.floor(at).astype(int)
    out = np.zeros((length, *values_LN.shape[1:]))
    for step in (-1, 0, 1, 2):
        d = np.abs(at - (first + step))
        near, far = 1.25 * d**3 - 2.25 * d**2 + 1, -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
        weight = np.where(d <= 1, near, np.where(d < 2, far, 0.0))
        out += weight.reshape(-1, *[1] * (values_LN.ndim - 1)) * values_LN[np.clip(first + step, 0, len(values_LN) - 1)]
    return out


@pytest.mark.parametrize(("grid", "to"), GRIDS)
@pytest.mark.parametrize(("how", "offset"), [("fair", 0.0), ("dino", 0.1), ("dinov2", 0.1)])
def test_conventions_without_antialias_follow_the_formula(how: Resize, offset: float, grid: Any, to: Any) -> None:
    """facebookresearch/mae asks for a size; /dino and /dinov2 for the factors (h0 + 0.1) / sqrt(N), (w0 + 0.1) /
    sqrt(N), except at the pre-training size, which is left alone."""
    table = 0.2 * torch.randn(1, 2 + grid[0] * grid[1], 8, generator=torch.Generator().manual_seed(0))
    map_hwC = table[0, 2:].view(*grid, 8).double().numpy()
    if grid != to:
        map_hwC = cubic(map_hwC, to[0], (to[0] + offset) / grid[0])
        map_hwC = np.swapaxes(cubic(np.swapaxes(map_hwC, 0, 1), to[1], (to[1] + offset) / grid[1]), 0, 1)
    expected = torch.cat([table[:, :2], torch.tensor(map_hwC).reshape(1, -1, 8).float()], dim=1)
    torch.testing.assert_close(resize(table, grid, to, 2, how), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("grid", "to"), GRIDS)
@pytest.mark.parametrize("how", ["timm", "dinov2_registers"])
def test_conventions_with_antialias_equal_timm(how: Resize, grid: Any, to: Any) -> None:
    """DINOv2 with registers: offset 0 and antialias in torch.hub's models, which is what timm does for all."""
    table = torch.randn(1, 1 + grid[0] * grid[1], 8, generator=torch.Generator().manual_seed(0))
    expected = resample_abs_pos_embed(table, list(to), list(grid), num_prefix_tokens=1)
    torch.testing.assert_close(resize(table, grid, to, 1, how), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("to", [(5, 5), (9, 4), (3, 11)])
@pytest.mark.parametrize(
    ("name", "how"), [("Dinov2", "fair"), ("Dinov2WithRegisters", "dinov2_registers"), ("Dinov2", "dinov2")]
)
def test_conventions_beside_transformers(name: str, how: Resize, to: tuple[int, int]) -> None:
    """transformers follows DINOv2's code for models with registers. For the others it asks for a size, without the
    offset of 0.1: that is MAE's convention, and far from DINOv2's own."""
    import transformers
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings
    from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersEmbeddings

    config = getattr(transformers, f"{name}Config")(hidden_size=8, image_size=24, patch_size=4)
    theirs: Any = {"Dinov2": Dinov2Embeddings, "Dinov2WithRegisters": Dinov2WithRegistersEmbeddings}[name](config)
    torch.nn.init.normal_(theirs.position_embeddings, generator=torch.Generator().manual_seed(0))
    table = theirs.position_embeddings.data
    expected = theirs.interpolate_pos_encoding(torch.zeros(1, 1 + to[0] * to[1], 8), 4 * to[0], 4 * to[1]).detach()
    difference = (resize(table, (6, 6), to, 1, how) - expected).abs().max()
    assert difference > 0.01 if how == "dinov2" else difference <= 1e-6


def test_conventions_give_the_size_that_is_asked_for() -> None:
    """An offset goes into factors, which are multiplied and cut off again: no grid may come out one patch short."""
    for old in range(1, 65):
        table = torch.zeros(1, old, 1)
        for new in range(1, 65):
            for how in RESIZE:
                assert resize(table, (old, 1), (new, 1), 0, how).shape[1] == new, (how, old, new)


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


# BEiT: 224 px -> 384 and 512 px at patch 16, and smaller, not square and extreme ones.
BIASES = [
    ((14, 14), (24, 24)),
    ((14, 14), (32, 32)),
    ((14, 14), (4, 4)),
    ((5, 3), (4, 9)),
    ((6, 6), (2, 11)),
    ((3, 3), (40, 1)),
]


def bias_table(grid: tuple[int, int], heads: int = 3) -> Tensor:
    rows = (2 * grid[0] - 1) * (2 * grid[1] - 1) + 3
    return torch.randn(rows, heads, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("grid", "to"), BIASES)
def test_bias_tables_equal_timms(grid: Any, to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's version of BEiT's code, with scipy's cubic spline as there (timm's own default is linear)."""
    monkeypatch.setattr(pos_embed_rel, "_USE_SCIPY", True)
    monkeypatch.setattr("scipy.interpolate.interp2d", Interp2d, raising=False)
    table = bias_table(grid)
    expected = resize_rel_pos_bias_table(table, to, bias_table(to).shape, grid)
    found = resize_bias_table(table, grid, to)
    assert found.shape == bias_table(to).shape and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("grid", "to"), [((14, 14), (24, 24)), ((14, 14), (32, 32)), ((9, 7), (10, 15))])
def test_bias_tables_lie_on_a_geometric_progression(grid: Any, to: Any) -> None:
    """Independent of BEiT's bisection: the ratio is solved for. A smooth table, so that the 1e-6 at which the bisection
    ends hardly shows."""
    axes = []
    for old, new in zip(grid, to, strict=True):
        q = brentq(lambda q, old=old, new=new: sum(q**i for i in range(old - 1)) - (new - 1), 1.001, 1.5)
        far = [sum(q**i for i in range(k)) for k in range(1, old)]
        assert far[-1] == pytest.approx(new - 1)
        axes.append(np.array([-one for one in reversed(far)] + [0.0, *far]))
    y, x = axes
    z = np.cos(y[:, None] / 9) * np.sin(x[None] / 7 + 1)
    spline = RectBivariateSpline(y, x, z)
    expected = spline(np.arange(1 - to[0], to[0]), np.arange(1 - to[1], to[1]))
    table = torch.cat([torch.tensor(z).view(-1, 1).float(), torch.zeros(3, 1)])
    found = resize_bias_table(table, grid, to)[:-3].view(expected.shape)
    torch.testing.assert_close(found, torch.tensor(expected).float(), atol=1e-4, rtol=0)


@given(grid=st.tuples(st.integers(3, 9), st.integers(3, 9)), to=st.tuples(st.integers(2, 20), st.integers(2, 20)))
@settings(max_examples=60)
def test_bias_tables_keep_near_offsets_symmetry_and_the_class_tokens_rows(grid: Any, to: Any) -> None:
    table = bias_table(grid)
    assert resize_bias_table(table, grid, grid) is table
    found = resize_bias_table(table, grid, to)
    if grid == to:
        return
    assert torch.equal(found[-3:], table[-3:])
    old, new = (one[:-3].view(2 * h - 1, 2 * w - 1, 3) for one, (h, w) in ((table, grid), (found, to)))
    near = (slice(grid[0] - 2, grid[0] + 1), slice(grid[1] - 2, grid[1] + 1))
    close = new[to[0] - 2 : to[0] + 1, to[1] - 2 : to[1] + 1]
    torch.testing.assert_close(close, old[near], atol=1e-5, rtol=1e-5)
    flipped = torch.cat([old.flip(0, 1).flatten(0, 1), table[-3:]])
    again = resize_bias_table(flipped, grid, to)[:-3].view(new.shape)
    torch.testing.assert_close(again.flip(0, 1), new, atol=1e-4, rtol=1e-4)


def test_a_bias_table_too_small_for_a_cubic_spline_is_refused() -> None:
    with pytest.raises(UserError, match="2 x 6 patches is too small to be interpolated to 4 x 6"):
        resize_bias_table(bias_table((2, 6)), (2, 6), (4, 6))


@pytest.mark.parametrize(("old", "new"), [(14, 14), (14, 9), (7, 64), (1, 3)])
def test_decomposed_tables_equal_detectron2s(old: int, new: int) -> None:
    from detectron2.modeling.backbone.utils import get_rel_pos

    table = torch.randn(2 * old - 1, 8)
    pairs = torch.arange(new)[:, None] - torch.arange(new)[None] + new - 1
    torch.testing.assert_close(resize_decomposed_table(table, new)[pairs], get_rel_pos(new, new, table))
