"""The encoder inside mmsegmentation: equal to mmseg's own MAE + UperNet, values consumed, impossible ones refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger
from mmseg.models import EncoderDecoder, SegDataPreProcessor
from mmseg.models.backbones import MAE
from mmseg.models.decode_heads import FCNHead, UPerHead
from mmseg.models.necks import Feature2Pyramid
from mmseg.structures import SegDataSample
from segmentation_cases import backbone, values

from mae_bench.encoders.vit import Encoder
from mae_bench.errors import UserError
from mae_bench.schema import SegmentationValues
from mae_bench.segmentation.adapter import Norm, Segmenter, build_segmenter, check_values, label_map
from mae_bench.segmentation.run import _encoder_options

CLASSES = 5


def segmenter(
    settings: SegmentationValues, *, depth: int = 4, norm: Norm = "BN", seed: int = 0, noise: bool = True
) -> Segmenter:
    """A segmenter whose encoder starts from a fixed seed, in eval mode; ``noise`` also moves what starts at a constant:
    relative positions, layer scales, norms."""
    recipe = backbone(depth=depth)
    encoder = Encoder(recipe.architecture, **_encoder_options(settings, recipe.architecture.patch))
    encoder.initialise(0)
    MMLogger.get_current_instance().setLevel("ERROR")
    model = build_segmenter(encoder, settings, recipe.input, CLASSES, norm=norm, seed=seed)
    if noise:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def mmseg_upernet(settings: SegmentationValues) -> EncoderDecoder:
    """The same network written down with mmseg's parts alone: its MAE backbone, neck and heads."""
    width, norm = 32, {"type": "BN"}
    common = {"num_classes": CLASSES, "norm_cfg": norm, "align_corners": False, "dropout_ratio": settings.dropout}
    loss = {"type": "CrossEntropyLoss", "use_sigmoid": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Default ``avg_non_ignore``")
        return EncoderDecoder(
            backbone={
                "type": MAE,
                "img_size": settings.image_size,
                "patch_size": 4,
                "embed_dims": width,
                "num_layers": 6,
                "num_heads": 2,
                "out_indices": settings.taps,
                "norm_cfg": {"type": "LN", "eps": 1e-6},
                "init_values": settings.layer_scale,
            },
            neck={"type": Feature2Pyramid, "embed_dim": width, "rescales": [4, 2, 1, 0.5], "norm_cfg": norm},
            decode_head={
                "type": UPerHead,
                "in_channels": [width] * 4,
                "in_index": [0, 1, 2, 3],
                "pool_scales": settings.pool_scales,
                "channels": settings.head_width,
                "loss_decode": loss | {"loss_weight": 1.0},
                **common,
            },
            auxiliary_head={
                "type": FCNHead,
                "in_channels": width,
                "in_index": 2,
                "channels": settings.auxiliary_width,
                "num_convs": 1,
                "concat_input": False,
                "loss_decode": loss | {"loss_weight": settings.auxiliary_weight},
                **common,
            },
            data_preprocessor={
                "type": SegDataPreProcessor,
                "mean": [123.675, 116.28, 103.53],
                "std": [58.395, 57.12, 57.375],
                "bgr_to_rgb": True,
                "size": (settings.image_size, settings.image_size),
            },
            test_cfg=ConfigDict(mode="slide", crop_size=(settings.image_size,) * 2, stride=(settings.stride,) * 2),
        ).eval()


def mmseg_name(name: str) -> str:
    """Our parameter name -> mmseg's (the map of mmseg's own converter, `beit2mmseg`)."""
    name = name.replace("backbone.encoder.", "backbone.")
    for ours, theirs in (
        (r"patch_embed\.proj\.", "patch_embed.projection."),
        (r"blocks\.(\d+)\.norm([12])\.", r"layers.\1.ln\2."),
        (r"blocks\.(\d+)\.mlp\.fc1\.", r"layers.\1.ffn.layers.0.0."),
        (r"blocks\.(\d+)\.mlp\.fc2\.", r"layers.\1.ffn.layers.1."),
        (r"blocks\.(\d+)\.ls([12])\.gamma", r"layers.\1.gamma_\2"),
        (r"blocks\.(\d+)\.attn\.", r"layers.\1.attn."),
    ):
        name = re.sub(ours, theirs, name)
    return name


@pytest.fixture(scope="module")
def pair() -> tuple[Segmenter, EncoderDecoder]:
    """Ours and mmseg's with the same weights."""
    chosen = values(layer_scale=0.5, dropout=0.0, pool_scales=[1, 2, 4], taps=[0, 2, 3, 5])
    ours, theirs = segmenter(chosen, depth=6), mmseg_upernet(chosen)
    state = {mmseg_name(name): tensor for name, tensor in ours.state_dict().items()}
    index = {name for name in theirs.state_dict() if name.endswith("relative_position_index")}  # a constant of theirs
    assert set(theirs.state_dict()) - set(state) == index
    theirs.load_state_dict(state | {name: theirs.state_dict()[name] for name in index}, strict=True)
    return ours, theirs


def batch(size: int = 32, count: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(count):
        sample = SegDataSample(metainfo={"img_path": "x", "ori_shape": (size, size), "img_shape": (size, size)})
        labels = torch.randint(0, CLASSES, (1, size, size), generator=generator)
        labels[:, :4] = 255
        sample.set_data({"gt_sem_seg": _pixels(labels)})
        samples.append(sample)
    inputs = [torch.randint(0, 256, (3, size, size), generator=generator, dtype=torch.uint8) for _ in range(count)]
    return {"inputs": inputs, "data_samples": samples}


def _pixels(labels: torch.Tensor) -> Any:
    from mmengine.structures import PixelData

    return PixelData(data=labels)


def test_pyramid_logits_and_losses_equal_mmsegs_own(pair: tuple[Segmenter, EncoderDecoder]) -> None:
    """Taps, positions, relative bias with its class-token entries, layer scale, neck and heads, normalisation."""
    data = [model.data_preprocessor(batch(), training=True) for model in pair]
    torch.testing.assert_close(data[0]["inputs"], data[1]["inputs"], atol=1e-5, rtol=0)
    pyramids = [model.extract_feat(part["inputs"]) for model, part in zip(pair, data, strict=True)]
    assert [tuple(level.shape[1:]) for level in pyramids[0]] == [(32, 32, 32), (32, 16, 16), (32, 8, 8), (32, 4, 4)]
    for our_level, their_level in zip(*pyramids, strict=True):
        assert our_level.std() > 0.1
        torch.testing.assert_close(our_level, their_level, atol=1e-5, rtol=1e-5)
    our_losses, their_losses = (
        model(part["inputs"], part["data_samples"], mode="loss") for model, part in zip(pair, data, strict=True)
    )
    assert set(our_losses) == {"decode.loss_ce", "decode.acc_seg", "aux.loss_ce", "aux.acc_seg"}
    for name, loss in our_losses.items():
        torch.testing.assert_close(loss, their_losses[name], atol=1e-5, rtol=1e-5)
    assert torch.isfinite(pair[0].parse_losses(our_losses)[0])


def test_sliding_prediction_equals_mmsegs_own(pair: tuple[Segmenter, EncoderDecoder]) -> None:
    """Pictures larger than the window, scored at another, native size."""
    data = batch(size=52, count=1)
    data["data_samples"][0].set_metainfo({"ori_shape": (75, 61)})
    with torch.no_grad():
        (ours,) = pair[0].val_step(data)
        (theirs,) = pair[1].val_step(data)
    assert ours.shape == (75, 61)
    assert len(ours.unique()) > 2
    assert torch.equal(ours, theirs.pred_sem_seg.data[0].to(ours))


@given(
    shape=st.tuples(st.integers(2, 20), st.integers(1, 9), st.integers(1, 9)),
    size=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
)
@settings(max_examples=60)
def test_label_map_is_argmax_of_all_classes(
    shape: tuple[int, int, int], size: tuple[int, int], seed: int, ties: bool
) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if ties:
        logits = logits.round()
    whole = torch.nn.functional.interpolate(logits[None], size=size, mode="bilinear", align_corners=False)[0]
    assert torch.equal(label_map(logits, size), whole.argmax(0).to(torch.uint8))


def test_label_map_keeps_native_size_memory_small() -> None:
    """150 classes on a 1200 x 1000 picture are 690 MiB of logits at once; a few classes at a time are not."""
    logits = torch.randn(150, 64, 48, generator=torch.Generator().manual_seed(0))
    label_map(logits, (200, 150))
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        pytest.skip("needs Linux's /proc to measure a peak of memory")
    before = memory_mib("VmRSS")
    assert label_map(logits, (1200, 1000)).shape == (1200, 1000)
    assert memory_mib("VmHWM") - before < 250


def memory_mib(key: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def test_sliding_equals_whole_when_the_picture_is_the_crop() -> None:
    data = batch(count=1)
    slide = segmenter(values())
    whole = segmenter(values(test_mode="whole", stride=0, resize=[32, 32]))
    whole.load_state_dict(slide.state_dict())
    with torch.no_grad():
        (a,), (b,) = slide.val_step(data), whole.val_step(data)
    assert torch.equal(a, b)
    assert len(a.unique()) > 1


@pytest.mark.parametrize(("mode", "stride"), [("slide", 20), ("whole", 0)])
def test_pictures_smaller_than_the_crop_keep_their_native_size(mode: str, stride: int) -> None:
    """Padding on the right and below never reaches the label map, and is the mean colour, not an edge of pixels."""
    model = segmenter(values(test_mode=mode, stride=stride, resize=[32, 32]))
    data = batch(count=1)
    data["inputs"][0] = data["inputs"][0][:, :21, :30]
    data["data_samples"][0].set_metainfo({"ori_shape": (42, 60), "img_shape": (21, 30)})
    prepared = model.data_preprocessor(data, training=False)["inputs"]
    assert prepared.shape[-2:] == ((32, 32) if mode == "slide" else (24, 32))
    assert not prepared[..., 21:, :].any() and not prepared[..., 30:].any()
    with torch.no_grad():
        assert model.val_step(data)[0].shape == (42, 60)


def test_training_batches_are_padded_with_ignored_labels() -> None:
    data = batch(count=1)
    data["inputs"][0] = data["inputs"][0][:, :20, :28]
    data["data_samples"][0].gt_sem_seg = _pixels(data["data_samples"][0].gt_sem_seg.data[:, :20, :28])
    out = segmenter(values()).data_preprocessor(data, training=True)
    labels = out["data_samples"][0].gt_sem_seg.data[0]
    assert out["inputs"].shape[-2:] == labels.shape == (32, 32)
    assert (labels[20:] == 255).all() and (labels[:, 28:] == 255).all()
    assert (labels[4:20, :28] < CLASSES).all()


def test_normalisation_is_the_backbones_on_rgb() -> None:
    """A BGR picture as mmcv decodes it: channels are swapped and scaled with the backbone's own mean and std."""
    model = segmenter(values())
    blue_green_red = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 32, 32)
    out = model.data_preprocessor({"inputs": [blue_green_red], "data_samples": batch(count=1)["data_samples"]}, True)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(out["inputs"][0, :, 0, 0], (torch.tensor([30, 20, 10]) / 255 - mean) / std)


def test_building_keeps_the_encoder_and_the_random_state() -> None:
    settings = values()
    recipe = backbone()
    encoder = Encoder(recipe.architecture, **_encoder_options(settings, 4))
    encoder.initialise(0)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    state = torch.get_rng_state()
    model = build_segmenter(encoder, settings, recipe.input, CLASSES, norm="BN", seed=5)
    assert torch.equal(state, torch.get_rng_state())
    kept = model.backbone.encoder.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in before.items())


def test_new_parameters_depend_on_the_seed_alone() -> None:
    models = [segmenter(values(), seed=seed, noise=False) for seed in (0, 0, 1)]
    first, again, other = (model.decode_head.conv_seg.weight for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.005 < first.std() < 0.02  # mmseg's own N(0, 0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"image_size": 64, "stride": 20},
        {"rel_pos": False},
        {"layer_scale": 0.0},
        {"head_width": 8},
        {"pool_scales": [1, 2]},
        {"dropout": 0.3},
        {"auxiliary_width": 4},
        {"auxiliary_weight": 0.1},
        {"auxiliary_weight": 0.0},
        {"drop_path": 0.2},
        {"stride": 11},
        {"test_mode": "whole", "stride": 0, "resize": [32, 32]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_value_reaches_the_model(change: dict[str, Any]) -> None:
    """(The values of the data pipeline are tested with it.)"""

    def describe(model: Segmenter) -> tuple[Any, ...]:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        weight = model.auxiliary_head.loss_decode.loss_weight if model.with_auxiliary_head else None
        scale = model.state_dict().get("backbone.encoder.blocks.0.ls1.gamma")
        return shapes, repr(model), weight, None if scale is None else scale.tolist(), model.test_cfg

    assert describe(segmenter(values(), noise=False)) != describe(segmenter(values(**change), noise=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 34}, "multiple of the backbone's patch 4"),
        ({"image_size": 4, "stride": 4}, "one patch"),
        ({"taps": [0, 1, 2, 4]}, "taps"),
        ({"taps": [0, 1, 1, 3]}, "taps"),
        ({"taps": [0, 2, 1, 3]}, "taps"),
        ({"taps": [-1, 1, 2, 3]}, "taps"),
        ({"stride": 0}, "0 < stride"),
        ({"stride": 33}, "0 < stride"),
        ({"test_mode": "whole"}, "no effect"),
        ({"test_mode": "whole", "stride": 0}, "relative position bias"),
        ({"resize_ratio": [2.0, 0.5]}, "low <= high"),
        ({"resize_ratio": [0.0, 0.5]}, "low <= high"),
        ({"pool_scales": [0, 2]}, "1 or more"),
        ({"resize": [0, 2]}, "1 or more"),
    ],
)
def test_values_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    check_values(values(), backbone(), 8)
    with pytest.raises(UserError, match=message) as caught:
        check_values(values(**change), backbone(), 8)
    assert "\n" not in str(caught.value)


def test_a_single_class_is_refused() -> None:
    with pytest.raises(UserError, match="1 class"):
        check_values(values(), backbone(), 1)


def test_whole_pictures_of_another_grid_interpolate_positions() -> None:
    """Without the relative bias any grid goes; the position table is resized, not cut."""
    model = segmenter(values(test_mode="whole", stride=0, resize=[64, 64], rel_pos=False))
    check_values(values(test_mode="whole", stride=0, resize=[64, 64], rel_pos=False), backbone(), 8)
    data = batch(size=48, count=1)
    with torch.no_grad():
        assert model.val_step(data)[0].shape == (48, 48)


def test_logits_that_are_not_finite_are_told() -> None:
    model = segmenter(values())
    with torch.no_grad():
        model.decode_head.conv_seg.bias.fill_(float("nan"))
        with pytest.raises(UserError, match="NaN"):
            model.val_step(batch(count=1))


def test_two_classes_are_two_logits() -> None:
    recipe = backbone()
    encoder = Encoder(recipe.architecture, **_encoder_options(values(), 4))
    encoder.initialise(0)
    model = build_segmenter(encoder, values(), recipe.input, 2, norm="BN", seed=0)
    assert model.decode_head.conv_seg.out_channels == 2
