"""Our encoder inside detectron2's Mask R-CNN, as ViTDet builds it (Li et al., arXiv 2203.16527, Sec. 3 and App. A.2).

The graph is the one of detectron2's ``common/models/mask_rcnn_vitdet.py``: simple feature pyramid from the last map
alone, 2-conv RPN, 4conv1fc box head, LN in pyramid and heads, no final norm and no class token in the encoder. What
that file fixes for 16-pixel patches (strides, anchors, the box size that is read from the encoder's own level) is
written here as a multiple of the patch, so that a 4-pixel encoder meets the same graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.backbone import Backbone as DetectronBackbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.vit import SimpleFeaturePyramid
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN, StandardRPNHead
from detectron2.modeling.roi_heads import (
    FastRCNNConvFCHead,
    FastRCNNOutputLayers,
    MaskRCNNConvUpsampleHead,
    StandardROIHeads,
)
from torch import Tensor

from mae_bench.checkpoints.load import LoadReport, build_encoder
from mae_bench.encoders.vit import Encoder, EncoderOptions
from mae_bench.errors import UserError
from mae_bench.schema import Backbone, DetectionValues
from mae_bench.schema.backbone import Input

SCALES = (4.0, 2.0, 1.0, 0.5)  # of the encoder's map, per pyramid level
ENCODER_PREFIX = "backbone.net.encoder."  # of the encoder's parameters in the model
ANCHOR_STRIDES = 8  # side of a level's anchors, in strides of that level
CANONICAL_PATCHES = 14  # a box of this many patches a side (224 px at patch 16) is pooled from the encoder's own level


class EncoderBackbone(DetectronBackbone):
    """`Encoder` behind detectron2's backbone interface: (B, 3, H, W), normalised -> {"last_feat": (B, D, H/P, W/P)}."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self._out_features = ["last_feat"]
        self._out_feature_channels = {"last_feat": encoder.width}
        self._out_feature_strides = {"last_feat": encoder.patch}

    def forward(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        (last_BDHW,) = self.encoder.maps(images_BCHW, (self.encoder.depth - 1,))
        return {"last_feat": last_BDHW}


def load_encoder(
    backbone: Backbone, values: DetectionValues, file: Path | None, seed: int
) -> tuple[Encoder, LoadReport]:
    """The encoder of a detection run with the weights of ``file``, or random from ``seed``.

    The position table keeps the pre-training grid and is interpolated in every forward pass, as detectron2 does it;
    relative positions of the global blocks span the grid of the square input.
    """
    return build_encoder(backbone, file, seed=seed, **_options(backbone, values))


def untrained_encoder(backbone: Backbone, values: DetectionValues) -> Encoder:
    """The same encoder, to be filled from a trained model's file."""
    return Encoder(backbone.architecture, **_options(backbone, values))


def _options(backbone: Backbone, values: DetectionValues) -> EncoderOptions:
    check(values, backbone)
    patch = values.patch or backbone.architecture.patch
    side = values.image_size // patch
    return {
        "patch": patch,
        "class_token": False,
        "final_norm": False,
        "drop_path": values.drop_path,
        "window": values.window,
        "global_blocks": values.global_blocks,
        "rel_pos": "decomposed" if values.rel_pos else "none",
        "rel_pos_grid": (side, side),
    }


def check(values: DetectionValues, backbone: Backbone) -> None:
    """Refuse backbones and sizes that the model cannot be built for, and values that would have no effect."""
    rel_pos = backbone.architecture.rel_pos
    if rel_pos == "bias":
        raise UserError(
            f"'{backbone.name}' has a relative position bias for all patches and a class token (rel_pos = bias), but "
            "detection has windows and no class token; choose a backbone without such a bias"
        )
    if rel_pos == "decomposed" and not (values.rel_pos and values.window):
        raise UserError(
            f"'{backbone.name}' is a ViTDet encoder (rel_pos = decomposed, in windows): set rel_pos=true, window and "
            "global_blocks as it was trained"
        )
    patch = values.patch or backbone.architecture.patch
    if patch < 4 or patch & (patch - 1):
        raise UserError(
            f"detection needs a patch of 4, 8, 16, … pixels, because pyramid strides are patch/4 to 4 patch; "
            f"'{backbone.name}' has {patch}: resample its patch embedding with --set patch=16"
        )
    if values.image_size % (2 * patch):
        raise UserError(
            f"image_size {values.image_size} is not a multiple of {2 * patch}, the stride of the coarsest convolved "
            f"pyramid level at patch {patch}; set the nearest multiple"
        )
    if values.global_blocks and not values.window:
        raise UserError("global_blocks has no effect with window=0, where every block attends globally; empty it")


def build_pyramid(encoder: Encoder, values: DetectionValues) -> SimpleFeaturePyramid:
    """(B, 3, H, W) -> maps at strides patch/4, patch/2, patch, 2 patch, 4 patch, each `pyramid_width` channels."""
    top = LastLevelMaxPool()
    top.in_feature = f"p{int(math.log2(2 * encoder.patch))}"  # detectron2 says p5, true of patch 16 alone
    return SimpleFeaturePyramid(
        net=EncoderBackbone(encoder),
        in_feature="last_feat",
        out_channels=values.pyramid_width,
        scale_factors=SCALES,
        top_block=top,
        norm="LN",
        square_pad=values.image_size,
    )


def build_model(encoder: Encoder, values: DetectionValues, classes: int, pixels: Input) -> GeneralizedRCNN:
    """ViTDet's Mask R-CNN around ``encoder``.

    It takes detectron2's dicts with ``image`` (3, H, W), RGB in [0, 255]; normalises with the backbone's statistics
    ``pixels`` (x 255) and then pads with zeros, that is with the mean colour, to a square of ``image_size``.
    """
    pyramid = build_pyramid(encoder, values)
    shapes = pyramid.output_shape()
    levels = list(shapes)  # finest first; the last one is max-pooled and serves the RPN only
    return GeneralizedRCNN(
        backbone=pyramid,
        proposal_generator=_proposals(values, levels, [shapes[level].stride for level in levels]),
        roi_heads=_heads(values, classes, levels[:-1], [shapes[level].stride for level in levels[:-1]], encoder.patch),
        pixel_mean=[255 * value for value in pixels.mean],
        pixel_std=[255 * value for value in pixels.std],
        input_format="RGB",
    )


def _proposals(values: DetectionValues, levels: list[str], strides: list[int]) -> RPN:
    return RPN(
        in_features=levels,
        head=StandardRPNHead(in_channels=values.pyramid_width, num_anchors=3, conv_dims=[-1, -1]),
        anchor_generator=DefaultAnchorGenerator(
            sizes=[[ANCHOR_STRIDES * stride] for stride in strides],
            aspect_ratios=[0.5, 1.0, 2.0],
            strides=strides,
            offset=0.0,
        ),
        anchor_matcher=Matcher(thresholds=[0.3, 0.7], labels=[0, -1, 1], allow_low_quality_matches=True),
        box2box_transform=Box2BoxTransform(weights=[1.0, 1.0, 1.0, 1.0]),
        batch_size_per_image=values.rpn_batch,
        positive_fraction=0.5,
        pre_nms_topk=(values.rpn_topk_train, values.rpn_topk_test),
        post_nms_topk=(values.proposals_train, values.proposals_test),
        nms_thresh=0.7,
    )


def _heads(
    values: DetectionValues, classes: int, levels: list[str], strides: Sequence[int], patch: int
) -> StandardROIHeads:
    def pooler(size: int) -> ROIPooler:
        return ROIPooler(
            output_size=size,
            scales=tuple(1.0 / stride for stride in strides),
            sampling_ratio=0,
            pooler_type="ROIAlignV2",
            canonical_box_size=CANONICAL_PATCHES * patch,
            canonical_level=int(math.log2(patch)),
        )

    def pooled(size: int) -> ShapeSpec:
        return ShapeSpec(channels=values.pyramid_width, height=size, width=size)

    return StandardROIHeads(
        num_classes=classes,
        batch_size_per_image=values.roi_batch,
        positive_fraction=0.25,
        proposal_matcher=Matcher(thresholds=[0.5], labels=[0, 1], allow_low_quality_matches=False),
        box_in_features=levels,
        box_pooler=pooler(7),
        box_head=FastRCNNConvFCHead(
            pooled(7), conv_dims=[values.head_convs] * 4, fc_dims=[values.box_fc], conv_norm="LN"
        ),
        box_predictor=FastRCNNOutputLayers(
            ShapeSpec(channels=values.box_fc),
            box2box_transform=Box2BoxTransform(weights=(10, 10, 5, 5)),
            num_classes=classes,
            test_score_thresh=values.score_threshold,
            test_topk_per_image=values.detections,
        ),
        mask_in_features=levels,
        mask_pooler=pooler(14),
        mask_head=MaskRCNNConvUpsampleHead(
            pooled(14), num_classes=classes, conv_dims=[values.head_convs] * 5, conv_norm="LN"
        ),
    )


def smoke(values: DetectionValues, backbone: Backbone) -> dict[str, Any]:
    """Reductions for a smoke run: a map of 16 x 16 patches, which 14-patch windows still have to pad, and few regions.

    Weights, windows, relative positions, heads and losses stay those of the recipe.
    """
    patch = values.patch or backbone.architecture.patch
    return {
        "image_size": 16 * patch,
        "rpn_batch": min(values.rpn_batch, 64),
        "rpn_topk_train": min(values.rpn_topk_train, 200),
        "rpn_topk_test": min(values.rpn_topk_test, 100),
        "proposals_train": min(values.proposals_train, 100),
        "proposals_test": min(values.proposals_test, 20),
        "roi_batch": min(values.roi_batch, 32),
        "detections": min(values.detections, 10),
    }
