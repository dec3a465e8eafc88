"""Our encoder inside mmsegmentation's UperNet.

UperNet: Xiao et al., arXiv 1807.10221. On a plain ViT, as in BEiT's and MAE's ADE20K protocol (MAE appendix A.4): four
taps of the encoder become a pyramid (deconvolution-norm-GELU-deconvolution, deconvolution, identity, 2x2 max pooling;
mmseg's ``Feature2Pyramid``), read by mmseg's ``UPerHead`` and, in training, by an auxiliary ``FCNHead`` on the third
level. The encoder arrives loaded; mmseg neither builds nor loads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from mmengine.config import ConfigDict
from mmseg.models import EncoderDecoder, SegDataPreProcessor
from mmseg.models.decode_heads import FCNHead, UPerHead
from mmseg.models.losses import CrossEntropyLoss
from mmseg.models.necks import Feature2Pyramid
from mmseg.models.utils import resize
from torch import Tensor, nn

from mae_bench.encoders.vit import Encoder, refuse_vitdet
from mae_bench.errors import UserError
from mae_bench.schema import Backbone, Input, SegmentationValues

IGNORE = 255  # label of pixels that neither the loss nor the metric counts
ENCODER_PREFIX = "backbone.encoder."  # where the encoder's parameters stand in the segmenter
_AUXILIARY_LEVEL = 2  # the identity level, as in every published config of this family
_CLASSES_AT_ONCE = 8  # classes brought to the native size together: bounds memory, changes no result

Norm = Literal["BN", "SyncBN"]


class Taps(nn.Module):
    """The encoder as mmseg sees a backbone: images (B,3,H,W) -> four maps (B,D,H/P,W/P), raw block outputs."""

    def __init__(self, encoder: Encoder, taps: Sequence[int]) -> None:
        super().__init__()
        self.encoder = encoder
        self.taps = tuple(taps)

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.encoder.maps(images_BCHW, self.taps))


class Segmenter(EncoderDecoder):
    """mmseg's ``EncoderDecoder``; only the last step of prediction, at the native size, is ours.

    mmseg resizes the logits of all classes to the native size at once: 7 GB for 150 classes and a picture of
    4000 x 3000, the usual reason why training fits and validation does not. Here classes come a few at a time and the
    running maximum stays; interpolation treats channels separately, so labels are the same.
    """

    def postprocess_result(self, seg_logits: Tensor, data_samples: list[Any]) -> list[Tensor]:
        """Logits (B,C,h,w) at the network's size, padding included -> one (H,W) uint8 label map per image, each at
        the native size of its picture. Raises UserError on logits that are not finite."""
        labels = []
        for logits_CHW, sample in zip(seg_logits, data_samples, strict=True):
            if not logits_CHW.isfinite().all():
                raise UserError(f"the model gives NaN or infinite logits for {sample.metainfo['img_path']}")
            left, right, top, bottom = sample.metainfo.get("img_padding_size", (0, 0, 0, 0))
            height, width = logits_CHW.shape[-2:]
            inner_CHW = logits_CHW[:, top : height - bottom, left : width - right]
            labels.append(label_map(inner_CHW, sample.metainfo["ori_shape"][:2], self.align_corners))
        return labels


def label_map(logits_CHW: Tensor, size: tuple[int, int], align_corners: bool = False) -> Tensor:
    """(C,h,w) logits -> (H,W) uint8: argmax of the bilinear resize to ``size``, a few classes at a time.

    Equal to ``argmax`` over all resized classes, ties (the lowest class wins) included.
    """
    best_HW = torch.full(size, -torch.inf, device=logits_CHW.device)
    label_HW = torch.zeros(size, dtype=torch.uint8, device=logits_CHW.device)
    for start in range(0, logits_CHW.shape[0], _CLASSES_AT_ONCE):
        chunk_1CHW = logits_CHW[None, start : start + _CLASSES_AT_ONCE].float()
        value_HW, index_HW = resize(chunk_1CHW, size=size, mode="bilinear", align_corners=align_corners)[0].max(0)
        label_HW = torch.where(value_HW > best_HW, (index_HW + start).to(torch.uint8), label_HW)
        best_HW = torch.maximum(best_HW, value_HW)
    return label_HW


def check_values(values: SegmentationValues, backbone: Backbone, classes: int) -> None:
    """Refuse values that do not fit each other, the encoder or the data. Raises UserError naming value and edit."""
    architecture = backbone.architecture
    size, patch, depth = values.image_size, architecture.patch, architecture.depth
    refuse_vitdet(backbone)
    if values.rel_pos and not architecture.class_token:
        raise UserError(
            f"'{backbone.name}' has no class token (class_token = false), which the relative position bias of the task "
            "is defined with; --set rel_pos=false"
        )
    if classes < 2:
        raise UserError(
            f"the data set has {classes} class; segmentation needs 2 or more (zero_is_other ignores label 0)"
        )
    if not 0 < values.resize_ratio[0] <= values.resize_ratio[1]:
        raise UserError(f"resize_ratio {list(values.resize_ratio)}: expected [low, high] with 0 < low <= high")
    if min(*values.resize, *values.pool_scales) < 1:
        raise UserError(f"resize {list(values.resize)} and pool_scales {list(values.pool_scales)} must be 1 or more")
    if size % patch:
        raise UserError(f"image_size {size} is not a multiple of the backbone's patch {patch}; set image_size to one")
    if size // patch < 2:
        raise UserError(f"image_size {size} is one patch of {patch}: the pyramid needs 2 or more; raise image_size")
    if list(values.taps) != sorted(set(values.taps)) or values.taps[-1] != depth - 1 or values.taps[0] < 0:
        raise UserError(
            f"taps {list(values.taps)} do not fit an encoder of {depth} blocks: expected four rising block numbers of "
            f"which the last is {depth - 1} (a block above it would get no gradient)"
        )
    if values.test_mode == "slide" and not 0 < values.stride <= size:
        raise UserError(f'stride {values.stride}: test_mode "slide" needs 0 < stride <= image_size ({size})')
    if values.test_mode == "whole" and values.stride:
        raise UserError(f'stride {values.stride} has no effect with test_mode "whole"; set stride to 0')
    own = architecture.rel_pos == "bias"
    if values.test_mode == "whole" and (values.rel_pos or own) and max(values.resize) > size:
        whose, edit = ("of the backbone", "") if own else ("of the task", ", or rel_pos to false")
        raise UserError(
            f'resize {list(values.resize)} with test_mode "whole" gives pictures larger than image_size {size}, for '
            f'which the relative position bias {whose} has no entries; set test_mode to "slide"{edit}'
        )


def build_segmenter(
    encoder: Encoder, values: SegmentationValues, statistics: Input, classes: int, *, norm: Norm, seed: int
) -> Segmenter:
    """Wrap a loaded encoder into UperNet.

    ``statistics`` are the backbone's mean and std. ``norm`` is the batch norm of neck and heads. New parameters are
    a function of ``seed`` alone; the global random state is left as it was. ``classes`` is 2 to 255.
    """
    width = encoder.width
    common: dict[str, Any] = {
        "num_classes": classes,
        "out_channels": classes,  # two classes are two logits as well: no special case for binary data
        "dropout_ratio": values.dropout,
        "norm_cfg": {"type": norm},
        "align_corners": False,
        "ignore_index": IGNORE,
    }
    decode = {
        "type": UPerHead,
        "in_channels": [width] * 4,
        "in_index": [0, 1, 2, 3],
        "pool_scales": values.pool_scales,
        "channels": values.head_width,
        "loss_decode": {"type": CrossEntropyLoss},
    }
    auxiliary = {
        "type": FCNHead,
        "in_channels": width,
        "in_index": _AUXILIARY_LEVEL,
        "channels": values.auxiliary_width,
        "num_convs": 1,
        "concat_input": False,
        "loss_decode": {"type": CrossEntropyLoss, "loss_weight": values.auxiliary_weight},
    }
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # The loss is a mean over all pixels, ignored ones included: mmseg's default, so every published run's.
        warnings.filterwarnings("ignore", message="Default ``avg_non_ignore`` is False", category=UserWarning)
        torch.default_generator.manual_seed(seed)
        segmenter = Segmenter(
            backbone={"type": Taps, "encoder": encoder, "taps": values.taps},
            neck={"type": Feature2Pyramid, "embed_dim": width, "norm_cfg": {"type": norm}},
            decode_head=decode | common,
            auxiliary_head=auxiliary | common if values.auxiliary_weight else None,
            data_preprocessor=_preprocessor(values, encoder.patch, statistics),
            test_cfg=_test_config(values),
        )
        # mmseg's own initial values; `Taps` has no `init_weights`, so the encoder stays as it was loaded.
        segmenter.init_weights()
    return segmenter


def _preprocessor(values: SegmentationValues, patch: int, statistics: Input) -> SegDataPreProcessor:
    """Normalisation and padding. Test pictures are padded with the mean colour, never stretched: to at least one window
    where windows slide (mmseg would hand a smaller one to an encoder with fixed positions), else to whole patches."""
    crop = (values.image_size, values.image_size)
    return SegDataPreProcessor(
        mean=[255 * value for value in statistics.mean],
        std=[255 * value for value in statistics.std],
        bgr_to_rgb=True,  # mmcv decodes to BGR
        size=crop,
        pad_val=0,
        seg_pad_val=IGNORE,
        test_cfg={"size": crop} if values.test_mode == "slide" else {"size_divisor": patch},
    )


def _test_config(values: SegmentationValues) -> ConfigDict:
    if values.test_mode == "whole":
        return ConfigDict(mode="whole")
    side, stride = values.image_size, values.stride
    return ConfigDict(mode="slide", crop_size=(side, side), stride=(stride, stride))
