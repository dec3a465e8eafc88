"""Protocol values of each pipeline. A task recipe's layers fill exactly one of these models.

``engine = "…"`` in a task recipe picks the model from ``VALUES`` and the pipeline from ``mae_bench.runs.PIPELINES``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from mae_bench.schema.optimisation import Optimisation

Range = tuple[float, float]


def check_crop_scale(scale: Range) -> None:
    """Raises ValueError unless ``scale`` is a range of area fractions."""
    low, high = scale
    if not 0 < low <= high <= 1:
        raise ValueError(f"crop_scale [{low}, {high}] is not a range of area fractions between 0 and 1")


class ClassificationValues(Optimisation):
    """Linear probe, fine-tuning and supervised training on class folders."""

    mode: Literal["linear", "finetune"]  # linear: frozen encoder; finetune: everything trains (also from scratch)
    image_size: int = Field(gt=0)
    pool: Literal["cls", "mean"]  # cls: final norm, then cls token; mean: mean of patch tokens, then a new fc_norm
    head_norm: bool = False  # affine-free BatchNorm1d (eps 1e-6) before the linear head
    head_init_std: float = Field(gt=0)
    crop_scale: Range = Field((0.08, 1.0), strict=False)  # area fraction of RandomResizedCrop
    crop_retry: bool = True  # torchvision's retry loop, or the one-shot crop of MAE's probe
    flip: bool = True
    randaug: str = ""  # timm's notation, e.g. rand-m9-mstd0.5-inc1
    color_jitter: float = Field(0.0, ge=0)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)
    erasing: float = Field(0.0, ge=0, le=1)
    eval_crop: float = Field(0.875, ge=0.05, le=1)  # image_size / resized shorter side, bicubic, then centre crop

    @model_validator(mode="after")
    def _can_crop(self) -> ClassificationValues:
        check_crop_scale(self.crop_scale)
        return self


class DetectionValues(Optimisation):
    """Mask R-CNN on a simple feature pyramid (ViTDet, arXiv 2203.16527)."""

    image_size: int = Field(gt=0)  # side of the square, padded input
    patch: int = Field(0, ge=0)  # resample the patch embedding to this size; 0 = the backbone's own
    window: int = Field(ge=0)  # window side in patches of the windowed blocks; 0 = every block attends globally
    global_blocks: tuple[int, ...] = Field((), strict=False)  # 0-based blocks that attend globally
    rel_pos: bool  # decomposed relative positions, zero-initialised
    pyramid_width: int = Field(256, gt=0)
    box_fc: int = Field(1024, gt=0)
    head_convs: int = Field(256, gt=0)
    scale: Range = Field((0.1, 2.0), strict=False)  # large-scale jitter
    rpn_batch: int = Field(256, gt=0)
    rpn_topk_train: int = Field(2000, gt=0)
    rpn_topk_test: int = Field(1000, gt=0)
    proposals_train: int = Field(1000, gt=0)
    proposals_test: int = Field(1000, gt=0)
    roi_batch: int = Field(512, gt=0)
    score_threshold: float = Field(0.05, ge=0, le=1)
    detections: int = Field(100, gt=0)


class SegmentationValues(Optimisation):
    """UperNet (arXiv 1807.10221) on four taps of the encoder."""

    image_size: int = Field(gt=0)  # training crop, and window of sliding inference
    resize: tuple[int, int] = Field(strict=False)  # (long, short) bound of the keep-ratio resize, w x h
    resize_ratio: Range = Field((0.5, 2.0), strict=False)
    max_class_share: float = Field(0.75, gt=0, le=1)  # crops dominated by one class are drawn again
    photometric: bool = True
    taps: tuple[int, ...] = Field(strict=False, min_length=4, max_length=4)  # 0-based blocks
    rel_pos: bool  # relative position bias per block, zero-initialised (BEiT's table, cls entries included)
    layer_scale: float = Field(0.0, ge=0)  # initial value of a learnable layer scale; 0 = none
    head_width: int = Field(gt=0)
    pool_scales: tuple[int, ...] = Field((1, 2, 3, 6), strict=False)
    dropout: float = Field(0.1, ge=0, lt=1)
    auxiliary_width: int = Field(256, gt=0)
    auxiliary_weight: float = Field(0.4, ge=0)
    test_mode: Literal["slide", "whole"]
    stride: int = Field(0, ge=0)  # of the sliding window, in pixels


class PretrainingValues(Optimisation):
    """MAE pre-training (He et al., arXiv 2111.06377), the axes of its ablations (Table 1), and the autoencoders that it
    is compared with."""

    FEATURES: ClassVar[frozenset[str]] = Optimisation.FEATURES | {
        "objective", "mask_tokens", "sampling", "loss_on", "target", "pca", "tokenizer", "decoder", "predict", "crop",
        "color_jitter", "noise", "drop", "latent", "kl_weight", "height", "width", "repeats", "scaled_decode",
    }  # fmt: skip

    mask_ratio: float = Field(ge=0, lt=1)  # keep count is floor(N (1 - mask_ratio))
    norm_pix: bool  # targets normalised per patch (unbiased variance, eps 1e-6)
    decoder_depth: int = Field(8, ge=0)
    decoder_width: int = Field(512, gt=0)
    decoder_heads: int = Field(16, gt=0)
    crop_scale: Range = Field((0.2, 1.0), strict=False)  # area fraction of RandomResizedCrop
    flip: bool = True

    # masked: predict hidden patches; the others see the whole image, as it is, with noise, or through a Gaussian code.
    objective: Literal["masked", "autoencoder", "denoising", "vae"] = "masked"
    mask_tokens: Literal["decoder", "encoder"] = "decoder"  # where hidden patches are mask tokens (Table 1c)
    sampling: Literal["random", "block", "grid"] = "random"  # which patches are hidden (Table 1f, Figure 6)
    loss_on: Literal["masked", "all"] = "masked"
    target: Literal["pixels", "pca", "tokens"] = "pixels"  # Table 1d
    pca: int = Field(96, gt=0)  # coefficients of a patch, target "pca"
    tokenizer: str = ""  # target "tokens": name of an installed entry point of the group `mae_bench.tokenizers`
    # self: blocks over all tokens; cross: hidden patches read the encoder's (CrossMAE, arXiv 2401.14391).
    decoder: Literal["self", "cross"] = "self"
    predict: float = Field(1.0, gt=0, le=1)  # share of the hidden patches that a cross decoder predicts
    crop: Literal["random_size", "fixed_size", "centre"] = "random_size"  # Table 1e
    color_jitter: float = Field(0.0, ge=0)
    noise: float = Field(0.0, ge=0)  # denoising: standard deviation added to normalised pixels
    drop: float = Field(0.0, ge=0, lt=1)  # denoising: share of pixels set to the mean colour
    latent: int = Field(0, ge=0)  # vae: dimensions of each patch's code
    kl_weight: float = Field(0.0, ge=0)  # vae: weight of the divergence, in nats per target value
    height: int = Field(0, ge=0)  # of the images, in pixels; 0 = the backbone's image_size
    width: int = Field(0, ge=0)
    repeats: int = Field(1, gt=0)  # crops that are taken of a picture each time it is decoded
    # JPEGs are decoded at 1/2, 1/4 or 1/8 of their size where a training crop keeps its pixels: docs/input.md.
    scaled_decode: bool = False

    @model_validator(mode="after")
    def _can_be_built(self) -> PretrainingValues:
        if self.decoder_width % self.decoder_heads or self.decoder_width % 4:
            raise ValueError(
                f"decoder_width {self.decoder_width} is not a multiple of decoder_heads {self.decoder_heads} and of 4"
            )
        check_crop_scale(self.crop_scale)
        return self


Values = ClassificationValues | DetectionValues | SegmentationValues | PretrainingValues

VALUES: dict[str, type[Optimisation]] = {
    "classification": ClassificationValues,
    "detection": DetectionValues,
    "segmentation": SegmentationValues,
    "pretraining": PretrainingValues,
}
