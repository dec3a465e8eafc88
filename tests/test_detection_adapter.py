"""Our Mask R-CNN against detectron2's own: same maps, losses and detections from the same weights, same parameters."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import detectron2
import pytest
import torch
from detection_cases import backbone, values
from detectron2.config import LazyConfig, instantiate
from detectron2.modeling.backbone.vit import get_vit_lr_decay_rate
from detectron2.solver.build import get_default_optimizer_params
from detectron2.structures import Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import nn

from mae_bench.detection.adapter import ENCODER_PREFIX, build_model, load_encoder, smoke
from mae_bench.engine.optim import parameter_groups
from mae_bench.errors import UserError
from mae_bench.recipes import load_backbone, resolve_task
from mae_bench.schema import Backbone, DetectionValues

CLASSES = 5
GLOBAL = [2, 5, 8, 11]
# ViT-B's depth, heads and 16-pixel patches at width 24; 5 x 5 patches in pre-training, 16 x 16 here, windows of 14.
NARROW = {"patch": 16, "width": 24, "depth": 12, "heads": 12, "image_size": 80}
VITDET: dict[str, Any] = {
    "image_size": 256,
    "window": 14,
    "global_blocks": GLOBAL,
    "pyramid_width": 16,
    "box_fc": 24,
    "head_convs": 8,
    "rpn_batch": 32,
    "rpn_topk_train": 60,
    "rpn_topk_test": 50,
    "proposals_train": 40,
    "proposals_test": 30,
    "roi_batch": 16,
    "score_threshold": 0.01,
    "detections": 7,
    "drop_path": 0.1,
    "layer_decay": 0.7,
    "weight_decay": 0.1,
    "no_decay": ["norm", "positions"],
}


def theirs(settings: DetectionValues, recipe: Backbone) -> nn.Module:
    """detectron2's ``common/models/mask_rcnn_vitdet.py`` at the sizes of ``settings``."""
    file = Path(detectron2.__file__).parent / "model_zoo/configs/common/models/mask_rcnn_vitdet.py"
    model = copy.deepcopy(LazyConfig.load(str(file)).model)
    net, shape = model.backbone.net, recipe.architecture
    net.img_size = model.backbone.square_pad = settings.image_size
    net.embed_dim, net.depth, net.num_heads = shape.width, shape.depth, shape.heads
    net.pretrain_img_size, net.drop_path_rate, net.window_size = shape.image_size, settings.drop_path, settings.window
    net.window_block_indexes = [block for block in range(shape.depth) if block not in settings.global_blocks]
    model.backbone.out_channels = model.proposal_generator.head.in_channels = settings.pyramid_width
    model.proposal_generator.batch_size_per_image = settings.rpn_batch
    model.proposal_generator.pre_nms_topk = (settings.rpn_topk_train, settings.rpn_topk_test)
    model.proposal_generator.post_nms_topk = (settings.proposals_train, settings.proposals_test)
    heads = model.roi_heads
    heads.num_classes, heads.batch_size_per_image = CLASSES, settings.roi_batch
    heads.box_head.input_shape.channels = heads.mask_head.input_shape.channels = settings.pyramid_width
    heads.box_head.conv_dims, heads.box_head.fc_dims = [settings.head_convs] * 4, [settings.box_fc]
    heads.mask_head.conv_dims = [settings.head_convs] * 5
    heads.box_predictor.input_shape.channels = settings.box_fc
    heads.box_predictor.test_score_thresh = settings.score_threshold
    heads.box_predictor.test_topk_per_image = settings.detections
    built: nn.Module = instantiate(model)
    return built


def ours(settings: DetectionValues, recipe: Backbone) -> nn.Module:
    encoder, _ = load_encoder(recipe, settings, None, 0)
    return build_model(encoder, settings, CLASSES, recipe.input)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module, DetectionValues]:
    """Both models with the same random weights, every tensor away from its initial value."""
    settings, recipe = values(**VITDET), backbone(**NARROW)
    mine, other = ours(settings, recipe), theirs(settings, recipe)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in mine.state_dict().items()
    }
    mine.load_state_dict(state)
    renamed = {name.replace(ENCODER_PREFIX, "backbone.net."): value for name, value in state.items()}
    table = renamed["backbone.net.pos_embed"]
    # detectron2 keeps the class token's row of the table and drops it at use.
    renamed["backbone.net.pos_embed"] = torch.cat([torch.full_like(table[:, :1], 9.0), table], dim=1)
    other.load_state_dict(renamed)  # every key and shape matches
    return mine, other, settings


def test_pyramid_maps_equal_detectron2s(pair: tuple[nn.Module, nn.Module, DetectionValues]) -> None:
    mine, other, settings = pair
    images = torch.randn(2, 3, settings.image_size, settings.image_size, generator=torch.Generator().manual_seed(1))
    mine.eval(), other.eval()
    with torch.no_grad():
        maps, expected = mine.backbone(images), other.backbone(images)
    assert list(maps) == list(expected) == ["p2", "p3", "p4", "p5", "p6"]
    for level, map_BDhw in maps.items():
        assert expected[level].std() > 0.1, "a map of zeros would show nothing"
        torch.testing.assert_close(map_BDhw, expected[level], atol=1e-5, rtol=1e-5)


def test_losses_equal_detectron2s(pair: tuple[nn.Module, nn.Module, DetectionValues]) -> None:
    losses = []
    for model in pair[:2]:
        model.train()
        for module in model.modules():
            if type(module).__name__ == "DropPath":  # random, and drawn in another order
                module.eval()
        torch.manual_seed(3)  # both sample their regions from the same state
        with EventStorage():
            losses.append({name: loss.item() for name, loss in model(pictures()).items()})
    assert losses[0].keys() == losses[1].keys()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_detections_equal_detectron2s(pair: tuple[nn.Module, nn.Module, DetectionValues]) -> None:
    mine, other, settings = pair
    mine.eval(), other.eval()
    with torch.no_grad():
        found, expected = mine(pictures()), other(pictures())
    for one, two in zip(found, expected, strict=True):
        assert len(one["instances"]) == len(two["instances"]) == settings.detections
        torch.testing.assert_close(
            one["instances"].pred_boxes.tensor, two["instances"].pred_boxes.tensor, atol=1e-2, rtol=1e-4
        )
        assert torch.equal(one["instances"].pred_classes, two["instances"].pred_classes)


def pictures() -> list[dict[str, Any]]:
    """Two pictures that are not square, with two objects each."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for height, width in ((256, 200), (150, 256)):
        truth = Instances((height, width))
        truth.gt_boxes = Boxes(torch.tensor([[10.0, 20, 90, 80], [100, 40, 180, 140]]))
        truth.gt_classes = torch.tensor([1, 4])
        truth.gt_masks = PolygonMasks([[[10.0, 20, 90, 20, 50, 80]], [[100.0, 40, 180, 40, 180, 140]]])
        image = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
        made.append({"image": image, "instances": truth, "height": height, "width": width})
    return made


def test_optimiser_groups_follow_vitdets(pair: tuple[nn.Module, nn.Module, DetectionValues]) -> None:
    """Norms of maps included: detectron2's optimiser does not know its own LayerNorm as a norm, and so decays it."""
    mine, other, settings = pair
    expected = {}
    for group in get_default_optimizer_params(
        other,
        base_lr=settings.lr,
        weight_decay=settings.weight_decay,
        weight_decay_norm=0.0,
        lr_factor_func=partial(get_vit_lr_decay_rate, num_layers=12, lr_decay_rate=settings.layer_decay),
        overrides={"pos_embed": {"weight_decay": 0.0}},
    ):
        expected |= {id(parameter): (group["lr"], group["weight_decay"]) for parameter in group["params"]}
    found = {}
    for group in parameter_groups(mine, settings, encoder_prefix=ENCODER_PREFIX, depth=12):
        found |= {id(parameter): (group["lr"], group["weight_decay"]) for parameter in group["params"]}
    theirs_by_name = dict(other.named_parameters())
    for name, parameter in mine.named_parameters():
        twin = theirs_by_name[name.replace(ENCODER_PREFIX, "backbone.net.")]
        assert found[id(parameter)] == pytest.approx(expected[id(twin)]), name


def test_full_size_has_the_published_number_of_parameters() -> None:
    """ViTDet Table 9: 111M parameters for Mask R-CNN with ViT-B on 80 classes."""
    recipe = load_backbone("vit_b_scratch")
    settings = resolve_task("coco", recipe).values
    model = build_model(load_encoder(recipe, settings, None, 0)[0], settings, 80, recipe.input)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 111


def test_strides_anchors_and_pooling_follow_the_patch() -> None:
    settings = values(image_size=64)
    model = ours(settings, backbone())
    shapes = model.backbone.output_shape()
    assert [shape.stride for shape in shapes.values()] == [1, 2, 4, 8, 16]
    maps = model.backbone(torch.zeros(1, 3, 64, 64))
    assert [map_BDhw.shape[-1] for map_BDhw in maps.values()] == [64, 32, 16, 8, 4]
    generator = model.proposal_generator.anchor_generator
    widths = [anchors.tensor[1] for anchors in generator(list(maps.values()))]  # aspect ratio 1
    assert [float(box[2] - box[0]) for box in widths] == [8, 16, 32, 64, 128]
    pooler = model.roi_heads.box_pooler
    assert (pooler.canonical_box_size, pooler.canonical_level) == (56, 2)


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        ({"patch": 14, "image_size": 28}, {"image_size": 56}, "set patch=16"),
        ({}, {"image_size": 36}, "not a multiple of 8"),
        ({}, {"global_blocks": [2]}, "blocks 0 to 1"),
        ({}, {"window": 0}, "no effect with window=0"),
    ],
)
def test_values_that_cannot_work_are_refused(shape: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_encoder(backbone(**shape), values(**change), None, 0)


def test_a_smoke_run_only_becomes_smaller() -> None:
    recipe = load_backbone("vit_h_mae")
    settings = resolve_task("coco", recipe).values
    reduced = smoke(settings, recipe)
    assert reduced.pop("image_size") == 256  # 16 x 16 patches of 16: windows of 14 need padding
    assert all(size < getattr(settings, key) for key, size in reduced.items())
    small = values()
    assert all(size <= getattr(small, key) for key, size in smoke(small, backbone()).items() if key != "image_size")
