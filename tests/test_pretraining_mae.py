"""The model: parity with transformers' ViTMAE, initialisation, frozen tables, targets, and the exact shortcuts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from mae_bench.encoders.positions import sincos_table
from mae_bench.encoders.vit import Encoder
from mae_bench.engine.optim import parameter_groups
from mae_bench.pretraining.mae import MaskedAutoencoder, patchify, unpatchify
from mae_bench.schema import Architecture, Input, PretrainingValues

ARCHITECTURE = Architecture(patch=4, width=48, depth=3, heads=3, image_size=24)
STATISTICS = Input(mean=[0.48, 0.45, 0.40], std=[0.23, 0.22, 0.225])


def values(**changes: object) -> PretrainingValues:
    given = {
        "steps": 2,
        "batch": 4,
        "base_lr": 1e-3,
        "weight_decay": 0.05,
        "mask_ratio": 0.75,
        "norm_pix": True,
        "decoder_depth": 2,
        "decoder_width": 32,
        "decoder_heads": 4,
    }
    return PretrainingValues.model_validate(given | changes)


def build(architecture: Architecture = ARCHITECTURE, seed: int = 0, **changes: object) -> MaskedAutoencoder:
    encoder = Encoder(architecture, frozen_positions=True)
    encoder.initialise(seed)
    return MaskedAutoencoder(encoder, STATISTICS, values(**changes), seed)


def perturbed(model: MaskedAutoencoder) -> MaskedAutoencoder:
    """Biases and norms away from 0 and 1, so that a wrong one is seen."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def batch(size: int = 24, count: int = 5, patches: int = 36) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, size, size, generator=generator), torch.rand(count, patches, generator=generator)


def _block(ours: str, theirs: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One transformer block under transformers' names (version 5)."""
    renamed: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        for name, part in zip("qkv", state[f"{ours}.attn.qkv.{kind}"].chunk(3), strict=True):
            renamed[f"{theirs}.attention.{name}_proj.{kind}"] = part
        for inner, outer in (
            ("norm1", "layernorm_before"),
            ("attn.proj", "attention.o_proj"),
            ("norm2", "layernorm_after"),
            ("mlp.fc1", "mlp.fc1"),
            ("mlp.fc2", "mlp.fc2"),
        ):
            renamed[f"{theirs}.{outer}.{kind}"] = state[f"{ours}.{inner}.{kind}"]
    return renamed


def transformers_twin(model: MaskedAutoencoder) -> ViTMAEForPreTraining:
    """transformers' model with every weight and table of ours: its own start zeroes the decoder's positions."""
    encoder, decoder = model.encoder, model.decoder_blocks
    twin = ViTMAEForPreTraining(
        ViTMAEConfig(
            hidden_size=encoder.width,
            num_hidden_layers=encoder.depth,
            num_attention_heads=encoder.heads,
            intermediate_size=4 * encoder.width,
            layer_norm_eps=1e-6,  # transformers' default is 1e-12
            image_size=encoder.architecture.image_size,
            patch_size=encoder.patch,
            decoder_hidden_size=model.decoder_embed.out_features,
            decoder_num_hidden_layers=len(decoder),
            decoder_num_attention_heads=4,
            decoder_intermediate_size=4 * model.decoder_embed.out_features,
            mask_ratio=0.75,
            norm_pix_loss=model.norm_pix,
        )
    )
    state = model.state_dict()
    theirs = {
        "vit.embeddings.cls_token": state["encoder.cls_token"],
        "vit.embeddings.position_embeddings": state["encoder.pos_embed"],
        "decoder.mask_token": state["mask_token"],
        "decoder.decoder_pos_embed": state["decoder_pos_embed"],
    }
    for kind in ("weight", "bias"):
        theirs[f"vit.embeddings.patch_embeddings.projection.{kind}"] = state[f"encoder.patch_embed.proj.{kind}"]
        theirs[f"vit.layernorm.{kind}"] = state[f"encoder.norm.{kind}"]
        for name in ("decoder_embed", "decoder_norm", "decoder_pred"):
            theirs[f"decoder.{name}.{kind}"] = state[f"{name}.{kind}"]
    for i in range(encoder.depth):
        theirs |= _block(f"encoder.blocks.{i}", f"vit.layers.{i}", state)
    for i in range(len(decoder)):
        theirs |= _block(f"decoder_blocks.{i}", f"decoder.decoder_layers.{i}", state)
    twin.load_state_dict(theirs, strict=True)
    return twin.eval()


@pytest.mark.parametrize("norm_pix", [False, True])
def test_loss_and_predictions_equal_transformers(norm_pix: bool) -> None:
    model = perturbed(build(norm_pix=norm_pix))
    images, noise = batch()
    twin = transformers_twin(model)(images, noise=noise)
    assert torch.equal(model.masking(noise).mask, twin.mask)
    assert torch.equal(model.masking(noise).restore, twin.ids_restore)
    torch.testing.assert_close(model(images, noise), twin.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(images, noise, mode="loss")["loss"], twin.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm_pix", [False, True])
def test_gradients_equal_transformers(norm_pix: bool) -> None:
    model = perturbed(build(norm_pix=norm_pix))
    images, noise = batch()
    twin = transformers_twin(model)
    twin(images, noise=noise).loss.backward()
    model(images, noise, mode="loss")["loss"].backward()
    for ours, theirs in (
        (model.mask_token, twin.decoder.mask_token),
        (model.encoder.cls_token, twin.vit.embeddings.cls_token),
        (model.encoder.patch_embed.proj.weight, twin.vit.embeddings.patch_embeddings.projection.weight),
        (model.decoder_pred.weight, twin.decoder.decoder_pred.weight),
        (model.encoder.blocks[0].mlp.fc1.weight, twin.vit.layers[0].mlp.fc1.weight),
    ):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


FITTING = [{}, {"class_position": False}, {"mlp": "swiglu", "layer_scale": True}, {"positions": "learned"}]


@pytest.mark.parametrize("features", FITTING)
def test_only_visible_patches_are_embedded_and_to_the_same_tokens(features: dict[str, object]) -> None:
    model = perturbed(build(ARCHITECTURE.model_copy(update=features)))
    images, noise = batch()
    masking, encoder = model.masking(noise), model.encoder
    visible = masking.shuffled(patchify(images, 4))[:, : masking.keep]
    embedded = masking.shuffled(encoder.embed(images))[:, : masking.keep]
    plain = encoder.encode(encoder.with_prefix(embedded))
    torch.testing.assert_close(model.encode(visible, masking), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("features", FITTING)
def test_features_of_variants_train(features: dict[str, object]) -> None:
    """Those that MAE pre-training takes (`pretraining.run` refuses the others)."""
    model = build(ARCHITECTURE.model_copy(update=features))
    model(*batch(), mode="loss")["loss"].backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.abs().sum() > 0, name


def test_hidden_pixels_reach_no_prediction() -> None:
    model = perturbed(build())
    images, noise = batch()
    hidden = unpatchify(model.masking(noise).mask.unsqueeze(-1).expand(-1, -1, 48), (6, 6)) > 0
    assert torch.equal(model(images, noise), model(images.masked_fill(hidden, 9.0), noise))


def test_loss_by_hand() -> None:
    """Sum over pixels of a patch, mean; then the mean over masked patches; variance unbiased, plus 1e-6."""
    for norm_pix in (False, True):
        model = perturbed(build(norm_pix=norm_pix))
        images, noise = batch()
        predicted, masking = model(images, noise), model.masking(noise)
        losses = []
        for image in range(len(images)):
            for patch in range(36):
                if masking.mask[image, patch]:
                    row, column = divmod(patch, 6)
                    pixels = images[image, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].permute(1, 2, 0)
                    target = pixels.flatten()
                    if norm_pix:
                        variance = ((target - target.mean()) ** 2).sum() / 47
                        target = (target - target.mean()) / math.sqrt(variance + 1e-6)
                    losses.append(((predicted[image, patch] - target) ** 2).mean())
        assert len(losses) == 5 * 27
        expected = torch.stack(losses).mean()
        torch.testing.assert_close(model(images, noise, mode="loss")["loss"], expected, rtol=0, atol=1e-5)


def test_a_flat_patch_has_a_zero_target() -> None:
    assert torch.equal(build().target.of(torch.full((1, 1, 48), 0.5)), torch.zeros(1, 1, 48))


def test_patches_are_rows_of_row_column_rgb() -> None:
    images = torch.arange(2 * 3 * 8 * 12).view(2, 3, 8, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    assert torch.equal(patches[1, 4], images[1, :, 4:8, 4:8].permute(1, 2, 0).flatten())
    assert torch.equal(unpatchify(patches, (2, 3)), images)


def test_uint8_is_normalised_with_the_backbones_statistics() -> None:
    images = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    ours = build().data_preprocessor({"inputs": images, "data_samples": torch.zeros(2, 36)})["inputs"]
    mean, std = torch.tensor(STATISTICS.mean).view(3, 1, 1), torch.tensor(STATISTICS.std).view(3, 1, 1)
    torch.testing.assert_close(ours, (images / 255 - mean) / std, rtol=0, atol=1e-5)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'predict'"):
        build()(*batch(), mode="predict")


def test_initial_values_follow_fair() -> None:
    model = build(ARCHITECTURE.model_copy(update={"width": 192, "heads": 3}), decoder_width=128)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            bound = math.sqrt(6 / (module.in_features + module.out_features))  # qkv counts as one matrix
            assert module.weight.abs().max() <= bound, name
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
            assert not module.bias.any(), name
        elif isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-6, name
            assert (module.weight == 1).all(), name
            assert not module.bias.any(), name
    for token in (model.mask_token, model.encoder.cls_token):
        assert token.std().item() == pytest.approx(0.02, rel=0.25)
        assert token.mean().abs().item() < 0.006
    bound = math.sqrt(6 / (48 + 192))
    assert model.encoder.patch_embed.proj.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert torch.equal(model.encoder.pos_embed, sincos_table(192, (6, 6), class_token=True))
    assert torch.equal(model.decoder_pos_embed, sincos_table(128, (6, 6), class_token=True))


def test_initial_values_are_a_function_of_the_seed() -> None:
    first, again, other = (build(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["decoder_pred.weight"], other["decoder_pred.weight"])
    blocks = [first[f"decoder_blocks.{i}.attn.qkv.weight"] for i in (0, 1)]
    assert not torch.equal(*blocks)


def test_predictions_of_a_fresh_model_differ_from_patch_to_patch() -> None:
    assert (build()(*batch()).std(dim=1) > 0.01).all()


def test_position_tables_get_no_gradient_no_decay_and_no_step() -> None:
    model = build()
    model(*batch(), mode="loss")["loss"].backward()
    tables = [model.encoder.pos_embed, model.decoder_pos_embed]
    assert all(table.grad is None and not table.requires_grad for table in tables)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    groups = parameter_groups(model, values(), encoder_prefix="encoder.", depth=model.encoder.depth)
    grouped = {id(parameter) for group in groups for parameter in group["params"]}
    assert not grouped & {id(table) for table in tables}
    # FAIR decays what is not one-dimensional, class and mask token included.
    decayed = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decayed == {id(p) for p in model.parameters() if p.requires_grad and p.ndim > 1}


def test_names_beside_the_encoder_are_fairs() -> None:
    names = {name.split(".")[0] for name in build().state_dict()}
    assert names == {
        "encoder",
        "mask_token",
        "decoder_embed",
        "decoder_pos_embed",
        "decoder_blocks",
        "decoder_norm",
        "decoder_pred",
    }


def test_parameter_counts_are_the_published_ones() -> None:
    """ViT-B/16 with FAIR's decoder; built on the meta device, so that it costs no memory."""
    architecture = Architecture(patch=16, width=768, depth=12, heads=12, image_size=224)
    with torch.device("meta"):
        encoder = Encoder(architecture, frozen_positions=True)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 85_798_656
    model = build(architecture, decoder_width=512, decoder_depth=8, decoder_heads=16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 111_907_840
