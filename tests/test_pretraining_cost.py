"""Costs by formula: published totals, torch's counter on real models, their parameters, and measured memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers import SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from mae_bench.encoders.vit import Encoder, random_encoder
from mae_bench.errors import UserError
from mae_bench.pretraining.cost import (
    OURS,
    PLAIN,
    Cost,
    Shortcuts,
    encoder,
    grid_of,
    memory,
    pretraining,
    total,
    training_macs,
)
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.pretraining.objectives import build_model
from mae_bench.schema import Architecture, Input, PretrainingValues

SMALL = Architecture(patch=4, width=48, depth=2, heads=3, image_size=24)
STATISTICS = Input(mean=[0.5] * 3, std=[0.5] * 3)
BATCH = 8


def vit(width: int, depth: int, heads: int, patch: int) -> Architecture:
    return Architecture(patch=patch, width=width, depth=depth, heads=heads, image_size=224)


B, L, H = vit(768, 12, 12, 16), vit(1024, 24, 16, 16), vit(1280, 32, 16, 14)


def values(**changes: object) -> PretrainingValues:
    given = {"steps": 1, "batch": 8, "base_lr": 1e-3, "weight_decay": 0.05, "mask_ratio": 0.75, "norm_pix": True}
    return PretrainingValues.model_validate(given | changes)


def small(**changes: object) -> PretrainingValues:
    return values(**({"decoder_depth": 3, "decoder_width": 32, "decoder_heads": 4} | changes))


def macs(parts: dict[str, Cost]) -> int:
    return total(parts.values()).macs


def giga(count: float, digits: int) -> float:
    return round(count / 1e9, digits)


def flops(work: Callable[[], Any]) -> int:
    """By torch's counter, which sees neither the CPU's flash kernel nor anything that is no product of matrices: no
    biases, norms, activations, softmax, sums."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def sizes(module: nn.Module) -> tuple[int, int]:
    parameters = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(size for size, _ in parameters), sum(size for size, trains in parameters if not trains)


# GMACs per image at 224 px: encoder on all patches; the same on the visible ones, with the embedding of all; decoder
# embedding, blocks, head; the whole; decoder's share in %; MACs with mask tokens in the encoder over those without, and
# over those without and with a decoder of one block. Parameters of the encoder, of the whole.
TOTALS = [
    (B, 17.56, 4.41, 0.020, 5.28, 0.077, 9.78, 54.9, 2.35, 4.45, 85_798_656, 111_907_840),
    (L, 61.55, 15.38, 0.026, 5.28, 0.077, 20.76, 25.9, 3.23, 4.15, 303_301_632, 329_541_888),
    (H, 167.29, 41.43, 0.043, 7.01, 0.077, 48.56, 14.7, 3.59, 4.11, 630_764_800, 657_074_508),
]


@pytest.mark.parametrize("row", TOTALS)
def test_totals_of_the_paper_sizes(row: tuple[Any, ...]) -> None:
    architecture, everything, visible, embedding, blocks, head, forward, share, ratio, ratio_1, alone, both = row
    parts, whole = pretraining(architecture, values(), PLAIN), encoder(architecture, grid_of(architecture))
    seen = parts["patch embedding"].macs + parts["encoder"].macs
    assert giga(macs(whole), 2) == everything
    assert giga(seen, 2) == visible
    assert giga(parts["decoder embedding"].macs, 3) == embedding
    assert giga(parts["decoder"].macs, 2) == blocks
    assert giga(parts["prediction head"].macs, 3) == head
    assert giga(macs(parts), 2) == forward
    assert round(100 * (1 - seen / macs(parts)), 1) == share
    assert (total(whole.values()).parameters, total(parts.values()).parameters) == (alone, both)
    with_tokens = macs(pretraining(architecture, values(mask_tokens="encoder"), PLAIN))
    for depth, expected in ((8, ratio), (1, ratio_1)):
        without = macs(pretraining(architecture, values(decoder_depth=depth), PLAIN))
        assert round(with_tokens / without, 2) == expected


@pytest.mark.parametrize(
    ("architecture", "size", "expected"),
    [
        (B, 384, 55.5), (B, 448, 78.5), (B, 512, 107.0), (B, 1024, 659.8),
        (L, 384, 191.1), (L, 448, 268.0), (L, 512, 362.0), (L, 1024, 2065.5), (H, 448, 731.7),
    ],
)  # fmt: skip
def test_encoder_totals_at_other_sizes(architecture: Architecture, size: int, expected: float) -> None:
    assert giga(macs(encoder(architecture, grid_of(architecture, size, size))), 1) == expected


def test_parameters_of_a_block() -> None:
    for architecture, expected in ((B, 7_087_872), (L, 12_596_224), (H, 19_677_440)):
        deeper = architecture.model_copy(update={"depth": architecture.depth + 1})
        one, two = (encoder(a, grid_of(a))["encoder"].parameters for a in (architecture, deeper))
        assert two - one == expected


@pytest.mark.parametrize("changes", [{}, {"decoder_depth": 1}, {"mask_ratio": 0.6}, {"decoder_width": 64}])
@pytest.mark.parametrize("norm_pix", [False, True])
def test_the_plain_step_equals_transformers(changes: dict[str, Any], norm_pix: bool) -> None:
    """The published step: every patch is embedded, decoded and predicted, the class token included."""
    given = small(norm_pix=norm_pix, **changes)
    model = ViTMAEForPreTraining(
        ViTMAEConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=192, image_size=24,
            patch_size=4, decoder_hidden_size=given.decoder_width, decoder_num_hidden_layers=given.decoder_depth,
            decoder_num_attention_heads=4, decoder_intermediate_size=4 * given.decoder_width,
            mask_ratio=given.mask_ratio, norm_pix_loss=norm_pix,
        )
    )  # fmt: skip
    images = torch.randn(BATCH, 3, 24, 24)
    parts = pretraining(SMALL, given, PLAIN)
    assert flops(lambda: model(images)) == 2 * BATCH * macs(parts)
    assert flops(lambda: model(images).loss.backward()) == 2 * BATCH * training_macs(parts)
    assert total(parts.values()).parameters == sizes(model)[0]


WHOLE = {"mask_ratio": 0.0, "loss_on": "all"}
STEPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"norm_pix": False}),
    ({}, {"decoder_depth": 0}),
    ({}, {"decoder_depth": 1}),
    ({}, {"decoder_depth": 2}),
    ({}, {"mask_ratio": 0.4}),
    ({}, {"loss_on": "all"}),
    ({}, {"mask_tokens": "encoder"}),
    ({}, {"mask_tokens": "encoder", "loss_on": "all", "decoder_depth": 1}),
    ({}, {"decoder": "cross"}),
    ({}, {"decoder": "cross", "predict": 0.4, "decoder_depth": 1}),
    ({}, {"height": 32, "width": 16}),
    ({}, {"target": "pca", "pca": 7, "norm_pix": False}),
    ({}, {"objective": "autoencoder", **WHOLE}),
    ({}, {"objective": "denoising", "noise": 0.1, **WHOLE}),
    ({}, {"objective": "vae", "latent": 6, "kl_weight": 0.1, **WHOLE}),
    ({"mlp": "swiglu", "mlp_ratio": 8 / 3, "layer_scale": True}, {}),
    ({"class_position": False}, {}),
]


def model_of(features: dict[str, Any], given: PretrainingValues) -> tuple[Architecture, MaskedAutoencoder]:
    architecture = SMALL.model_copy(update=features)
    grid = grid_of(architecture, given.height, given.width)
    made = random_encoder(architecture, 0, grid=grid, frozen_positions=True)
    return architecture, build_model(made, STATISTICS, given, 0)


def batch_of(model: MaskedAutoencoder, given: PretrainingValues, count: int = BATCH) -> dict[str, Tensor]:
    h, w = model.encoder.grid
    patch = model.encoder.patch
    data = {"inputs": torch.randn(count, 3, h * patch, w * patch), "data_samples": torch.rand(count, h * w)}
    if given.objective == "denoising":
        data["extra"] = torch.rand(count, 4, h * patch, w * patch)
    if given.objective == "vae":
        data["extra"] = torch.randn(count, h * w, given.latent)
    return data


@pytest.mark.parametrize(("features", "changes"), STEPS)
def test_our_step_by_torchs_counter(features: dict[str, Any], changes: dict[str, Any]) -> None:
    """Exactly, forward and backward; a block's projections of mask tokens once for the whole batch."""
    given = small(**changes)
    architecture, model = model_of(features, given)
    data = batch_of(model, given)
    parts = pretraining(architecture, given)
    once = total(parts.values()).macs_per_step
    assert flops(lambda: model(**data, mode="loss")) == 2 * (BATCH * macs(parts) + once)
    backward = flops(lambda: model(**data, mode="loss")["loss"].backward())
    assert backward == 2 * (BATCH * training_macs(parts) + 3 * once)
    assert (total(parts.values()).parameters, total(parts.values()).frozen) == sizes(model)


@pytest.mark.parametrize(
    "shortcuts", [Shortcuts(**{name: False}) for name in ("embedding", "head", "last_block", "first_block")]
)
def test_every_shortcut_saves(shortcuts: Shortcuts) -> None:
    def once_and_each(which: Shortcuts) -> int:
        whole = total(pretraining(B, values(), which).values())
        return whole.macs + whole.macs_per_step // 4096

    assert once_and_each(OURS) < once_and_each(shortcuts) < once_and_each(PLAIN)


@pytest.mark.parametrize(
    ("features", "options"),
    [
        ({}, {}),
        ({"registers": 4, "class_position": False, "layer_scale": True}, {"init_values": 1.0, "reg_tokens": 4}),
        ({"mlp": "swiglu", "mlp_ratio": 8 / 3}, {"mlp_ratio": 16 / 3, "mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}),
    ],
)
def test_the_encoder_equals_timm(features: dict[str, Any], options: dict[str, Any]) -> None:
    architecture = SMALL.model_copy(update=features)
    model = VisionTransformer(
        img_size=(24, 32), patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=0,
        no_embed_class=not architecture.class_position, **options,
    )  # fmt: skip
    images = torch.randn(BATCH, 3, 24, 32)
    parts = encoder(architecture, (6, 8))
    assert flops(lambda: model(images)) == 2 * BATCH * macs(parts)
    assert flops(lambda: model(images).sum().backward()) == 2 * BATCH * training_macs(parts)
    assert total(parts.values()).parameters == sizes(model)[0]


@pytest.mark.parametrize("relative", [False, True])
def test_windows_equal_detectron2(relative: bool) -> None:
    """Windows that do not divide the map, global blocks, decomposed relative positions."""
    from detectron2.modeling.backbone.vit import ViT

    model = ViT(
        img_size=40, patch_size=4, embed_dim=48, depth=3, num_heads=3, window_size=4, window_block_indexes=(0, 2),
        use_rel_pos=relative, pretrain_img_size=24,
    )  # fmt: skip
    architecture = SMALL.model_copy(update={"depth": 3})
    kind: Any = "decomposed" if relative else "none"
    options: dict[str, Any] = {"window": 4, "global_blocks": (1,), "rel_pos": kind, "class_token": False}
    parts = encoder(architecture, (10, 10), table=(6, 6), final_norm=False, **options)
    images = torch.randn(BATCH, 3, 40, 40)
    assert flops(lambda: model(images)) == 2 * BATCH * macs(parts)
    ours = Encoder(architecture, final_norm=False, rel_pos_grid=(10, 10), **options)
    assert total(parts.values()).parameters == sizes(ours)[0] == sizes(model)[0] - 48  # its row of the class token


def test_taps_leave_out_the_last_blocks() -> None:
    model = Encoder(SMALL.model_copy(update={"depth": 4}), final_norm=False, rel_pos="bias", layer_scale=1.0)
    parts = encoder(model.architecture, (6, 6), blocks=3, final_norm=False, rel_pos="bias", layer_scale=True)
    assert flops(lambda: model.maps(torch.randn(BATCH, 3, 24, 24), [0, 2])) == 2 * BATCH * macs(parts)
    assert total(parts.values()).parameters == sizes(model)[0]


def kept(work: Callable[[], Any], besides: nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass, each piece of memory once, parameters left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*besides.parameters(), *besides.buffers())}
    found: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(found.values())


@pytest.mark.parametrize(("features", "changes"), STEPS)
def test_kept_for_the_backward_pass(features: dict[str, Any], changes: dict[str, Any]) -> None:
    """Within 6 %, though the pictures are a large part of so narrow a model: a slice of them is kept as a view or as a
    copy, by the kernel. What is kept once for all images of a batch is not in the formula."""
    given = small(**changes)
    architecture, model = model_of(features, given)
    data = batch_of(model, given)
    measured = kept(lambda: model(**data, mode="loss"), model)
    each = memory(pretraining(architecture, given).values(), given, "fp32")[1]
    assert BATCH * each == pytest.approx(measured, rel=0.06)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.live)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        self._known.discard(key)


@pytest.mark.parametrize("count", [2, 32])
def test_the_peak_of_a_real_step(count: int) -> None:
    """With gradients of an earlier micro batch in place: up to 6 % above the estimate, for what lives but briefly."""
    given = values(decoder_width=96, decoder_depth=4, decoder_heads=4)
    features = {"width": 192, "depth": 6, "patch": 8, "image_size": 64}
    architecture, model = model_of(features, given)
    data = batch_of(model, given, count)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])

    def step() -> None:
        model(**data, mode="loss")["loss"].backward()
        optimizer.step()

    step()
    state = [tensor for moments in optimizer.state.values() for tensor in moments.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    standing = sum(tensor.nbytes for tensor in (*model.parameters(), *state, *gradients))
    with Peak() as peak:
        step()
    fixed, each = memory(pretraining(architecture, given).values(), given, "fp32")
    assert fixed == pytest.approx(standing, rel=1e-3)  # AdamW counts its steps in a tensor per parameter
    assert 0.99 < (standing + peak.most) / (fixed + count * each) < 1.06


def test_memory_by_optimiser_and_precision() -> None:
    parts = pretraining(B, values()).values()
    whole = total(parts)
    trained = whole.parameters - whole.frozen
    assert memory(parts, values(), "fp32")[0] == 4 * whole.parameters + 12 * trained
    assert memory(parts, values(optimizer="lars"), "fp32")[0] == 4 * whole.parameters + 8 * trained
    assert memory(parts, values(ema=0.99), "fp16")[0] == 8 * whole.parameters + 14 * trained
    assert memory(parts, values(), "fp32")[1] == 4 * (whole.kept + whole.kept_float)
    assert memory(parts, values(), "bf16")[1] == 2 * whole.kept + 4 * whole.kept_float


def test_sizes_that_are_no_patches_are_refused() -> None:
    with pytest.raises(UserError, match="225 pixels are no whole number of patches of 16; choose a multiple of 16"):
        pretraining(B, values(height=225))
    with pytest.raises(UserError, match="leaves none"):
        pretraining(B, values(mask_ratio=0.999))
