"""The encoder on its own: shapes, initialisation, options, refusals, and its parameters at the published sizes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import DropPath

from mae_bench.encoders import Encoder
from mae_bench.encoders.vit import EncoderOptions, random_encoder
from mae_bench.errors import UserError
from mae_bench.schema import Architecture

SMALL = Architecture(patch=4, width=24, depth=3, heads=3, image_size=20)
PUBLISHED = {
    "b": ("vit_base_patch16_224", Architecture(patch=16, width=768, depth=12, heads=12, image_size=224), 85_798_656),
    "l": ("vit_large_patch16_224", Architecture(patch=16, width=1024, depth=24, heads=16, image_size=224), 303_301_632),
    "h": ("vit_huge_patch14_224", Architecture(patch=14, width=1280, depth=32, heads=16, image_size=224), 630_764_800),
}


def small(**options: Any) -> Encoder:
    return random_encoder(SMALL, 0, **options).eval()


@pytest.mark.parametrize("size", PUBLISHED)
def test_names_and_shapes_are_timms_at_the_published_sizes(size: str) -> None:
    name, architecture, parameters = PUBLISHED[size]
    with torch.device("meta"):
        ours = Encoder(architecture).state_dict()
        theirs = timm.create_model(name, num_classes=0).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    assert sum(value.numel() for value in ours.values()) == parameters  # reference table of the MAE encoders


def test_the_options_are_the_constructors() -> None:
    assert list(inspect.signature(Encoder).parameters)[1:] == list(EncoderOptions.__annotations__)


def test_shapes() -> None:
    encoder = small()
    images = torch.randn(2, 3, 20, 12)
    assert encoder.embed(images).shape == (2, 15, 24)
    assert encoder.tokens(images).shape == (2, 16, 24)
    maps = encoder.maps(images, [2, 0])
    assert [tuple(one.shape) for one in maps] == [(2, 24, 5, 3)] * 2
    assert small(class_token=False).tokens(images).shape == (2, 15, 24)


def test_maps_are_raw_block_outputs_in_the_order_of_the_taps() -> None:
    encoder = small()
    images = torch.randn(1, 3, 20, 20)
    last, first = encoder.maps(images, [2, 0])
    tokens = encoder.blocks[0](encoder.with_prefix(encoder.embed(images)))
    torch.testing.assert_close(first, tokens[:, 1:].transpose(1, 2).reshape(1, 24, 5, 5))
    normed = encoder.norm(last.flatten(2).transpose(1, 2))
    torch.testing.assert_close(normed, encoder.tokens(images)[:, 1:])


def test_a_subset_of_tokens_runs_through_the_blocks() -> None:
    """What MAE does with visible patches; without relative positions, no grid is needed."""
    encoder = small()
    tokens = encoder.with_prefix(encoder.embed(torch.randn(2, 3, 20, 20))[:, ::3])
    assert encoder.encode(tokens).shape == (2, 10, 24)


def test_initialise_sets_every_parameter_from_the_seed_alone() -> None:
    options: dict[str, Any] = {"class_token": False, "window": 3, "rel_pos": "decomposed", "layer_scale": 0.1}
    for kwargs in ({}, options, {"rel_pos": "bias"}):
        encoders = [Encoder(SMALL, **kwargs) for _ in range(3)]
        before = torch.get_rng_state()
        for encoder, seed in zip(encoders, (0, 0, 1), strict=True):
            for parameter in encoder.parameters():
                torch.nn.init.constant_(parameter, float("nan"))
            encoder.initialise(seed)
            assert all(parameter.isfinite().all() for parameter in encoder.parameters())
        assert torch.equal(before, torch.get_rng_state())
        first, second, third = (encoder.state_dict() for encoder in encoders)
        assert all(torch.equal(value, second[key]) for key, value in first.items())
        assert not torch.equal(first["blocks.0.mlp.fc1.weight"], third["blocks.0.mlp.fc1.weight"])


def test_initialise_follows_mae() -> None:
    wide = Encoder(Architecture(patch=4, width=96, depth=2, heads=3, image_size=20))
    wide.initialise(0)
    state = wide.state_dict()

    def is_uniform(tensor: torch.Tensor, bound: float) -> bool:
        return 0.95 * bound < tensor.abs().max() <= bound and abs(tensor.std() / bound * 3**0.5 - 1) < 0.1

    assert is_uniform(state["patch_embed.proj.weight"], (6 / (96 + 3 * 16)) ** 0.5)
    assert is_uniform(state["patch_embed.proj.bias"], 48**-0.5)
    assert is_uniform(state["blocks.1.attn.qkv.weight"], (6 / (96 + 288)) ** 0.5)
    assert is_uniform(state["blocks.1.mlp.fc2.weight"], (6 / (96 + 384)) ** 0.5)
    assert abs(state["cls_token"].std() - 0.02) < 0.005
    assert all(not value.any() for key, value in state.items() if key.endswith("bias") and "blocks" in key)
    assert all((value == 1).all() for key, value in state.items() if "norm" in key and key.endswith("weight"))


def test_learned_positions_start_random() -> None:
    encoder = Encoder(SMALL.model_copy(update={"positions": "learned"}))
    encoder.initialise(0)
    assert abs(encoder.pos_embed.std() - 0.02) < 0.002


def test_option_tensors_start_neutral() -> None:
    """Zero tables and a layer scale of 1 leave the pre-trained function as it is."""
    plain, images = small(class_token=False), torch.randn(1, 3, 20, 20)
    adapted = small(class_token=False, rel_pos="decomposed", layer_scale=1.0)
    assert adapted.option_tensors().keys() == adapted.state_dict().keys() - plain.state_dict().keys()
    torch.testing.assert_close(adapted.tokens(images), plain.tokens(images))
    torch.testing.assert_close(small(rel_pos="bias").tokens(images), small().tokens(images))


def test_drop_path_grows_linearly() -> None:
    rates = [
        block.drop_path2.drop_prob if isinstance(block.drop_path2, DropPath) else 0.0
        for block in small(drop_path=0.3).blocks
    ]
    assert rates == pytest.approx([0.0, 0.15, 0.3])


def test_frozen_positions_get_no_gradient() -> None:
    assert not small(frozen_positions=True).pos_embed.requires_grad
    encoder = small()
    encoder.tokens(torch.randn(1, 3, 20, 12)).sum().backward()
    assert encoder.pos_embed.grad is not None


def test_a_smaller_grid_uses_the_same_offsets_of_the_bias() -> None:
    encoder = small(rel_pos="bias")
    table = encoder.blocks[0].attn.relative_position_bias_table
    torch.nn.init.normal_(table)
    from mae_bench.encoders.attention import bias_index

    full = bias_index((5, 5), (5, 5), 1, table.device)[1:, 1:].view(5, 5, 5, 5)
    part = bias_index((2, 3), (5, 5), 1, table.device)[1:, 1:].view(2, 3, 2, 3)
    assert torch.equal(part, full[:2, :3, :2, :3])
    assert encoder.tokens(torch.randn(1, 3, 8, 12)).shape == (1, 7, 24)
    with pytest.raises(UserError, match="no entries for 6 x 5"):
        encoder.tokens(torch.randn(1, 3, 24, 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_token": False, "window": 2, "global_blocks": (1, 3)}, "names block 3, but the encoder has blocks 0"),
    ],
)
def test_options_of_a_recipe_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Encoder(SMALL, **options)


@pytest.mark.parametrize(
    "options", [{"window": 2}, {"rel_pos": "decomposed"}, {"rel_pos": "bias", "class_token": False}]
)
def test_undefined_combinations_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="defined"):
        Encoder(SMALL, **options)


def test_bad_images_and_taps_are_refused() -> None:
    with pytest.raises(UserError, match="20 x 18 pixels cannot be cut into patches of 4"):
        small().tokens(torch.randn(1, 3, 20, 18))
    for taps in ([], [3], [-1]):
        with pytest.raises(UserError, match="must name blocks 0 to 2"):
            small().maps(torch.randn(1, 3, 20, 20), taps)


def test_the_forward_pass_works_under_autocast() -> None:
    images = torch.randn(1, 3, 20, 20)
    for options in ({"rel_pos": "bias"}, {"class_token": False, "rel_pos": "decomposed", "window": 2}):
        encoder = small(**options)
        exact = encoder.tokens(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = encoder.tokens(images)
        torch.testing.assert_close(rough.float(), exact, atol=0.1, rtol=0.1)
