"""A backbone recipe: architecture, weights and the normalisation that belongs to them.

The idea of keeping what a weight file needs beside it (address, hash, mean and std, licence) is timm's
``PretrainedCfg``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mae_bench.schema.base import NAME, Init, Size, Sparse, Strict

# Conventions of interpolating a position table; `mae_bench.encoders.positions.RESIZE` says what each one does.
Resize = Literal["fair", "timm", "dino", "dinov2", "dinov2_registers"]
Triple = Annotated[list[float], Field(min_length=3, max_length=3)]


class Architecture(Sparse):
    """Shape of a ViT encoder (Dosovitskiy et al., arXiv 2010.11929, Table 1) and what published variants add to it.

    Every field says what the *weight file* holds. What a task adds on top (windows, relative positions that start at
    zero) is a value of the task.
    """

    FEATURES = frozenset(
        ["resize", "class_token", "class_position", "registers", "mlp", "layer_scale", "rel_pos", "final_norm"]
    )

    patch: int = Field(gt=0, le=256)
    width: int = Field(gt=0, le=1 << 14)
    depth: int = Field(gt=0, le=256)
    heads: int = Field(gt=0, le=256)
    mlp_ratio: float = Field(4.0, gt=0, le=64)
    image_size: int = Field(
        gt=0, le=1 << 12
    )  # side in pixels at pre-training; the position table has (image_size / patch)^2 rows
    norm_eps: float = Field(1e-6, gt=0)
    # How the table is initialised; sincos is fixed in pre-training. none: no absolute positions (BEiT).
    positions: Literal["sincos", "learned", "none"] = "sincos"

    # Features of variants.
    resize: Resize = "fair"  # how the position table goes to another grid (`mae_bench.encoders.positions.RESIZE`)
    class_token: bool = True
    class_position: bool = True  # the class token has a row in the position table (DeiT III: no)
    registers: int = Field(0, ge=0, le=64)  # tokens after the class token, without positions (DINOv2: 4)
    mlp: Literal["gelu", "swiglu"] = "gelu"
    layer_scale: bool = False  # per-channel factor at the end of both branches of a block (BEiT, DeiT III, DINOv2)
    # bias: BEiT's table per block; decomposed: ViTDet's two tables per block.
    rel_pos: Literal["none", "bias", "decomposed"] = "none"
    # tokens: a norm on every token; pooled: on the mean of the patch tokens (fine-tuned files); none: ViTDet, mmseg.
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"

    @model_validator(mode="after")
    def _fits(self) -> Architecture:
        if self.image_size % self.patch:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch {self.patch}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.positions == "none" and self.resize != "fair":
            raise ValueError(f"resize '{self.resize}' has no effect with positions 'none'; leave it out")
        if self.rel_pos == "bias" and (self.registers or not self.class_token):
            raise ValueError("rel_pos 'bias' is defined for a class token and no registers")
        if self.rel_pos == "decomposed" and self.class_token:
            raise ValueError("rel_pos 'decomposed' is defined without a class token: class_token = false")
        if self.registers and not self.class_token:
            raise ValueError("registers follow a class token, but class_token = false")
        return self

    @property
    def grid(self) -> int:
        """Patches along one side at the pre-training size."""
        return self.image_size // self.patch

    @property
    def hidden(self) -> int:
        """Channels inside an MLP; of a SwiGLU those of the gate and of the value each."""
        return round(self.width * self.mlp_ratio)

    @property
    def prefix(self) -> int:
        """Tokens before the patch tokens: the class token and the registers."""
        return int(self.class_token) + self.registers

    @property
    def plain(self) -> bool:
        """Whether this is ViT's own architecture, without any variant's feature."""
        return not self.model_dump().keys() & (self.FEATURES - {"resize"}) and self.positions != "none"


class Input(Strict):
    """Per-channel RGB statistics, in units of pixel values scaled to [0, 1], that the weights expect."""

    mean: Triple
    std: Triple

    @model_validator(mode="after")
    def _in_units(self) -> Input:
        if not all(0 <= mean <= 1 for mean in self.mean) or not all(0 < std <= 1 for std in self.std):
            raise ValueError("mean and std are in units of pixel values in [0, 1]: divide those of [0, 255] by 255")
        return self


# What pre-training predicts or compares. labels: human labels were seen.
Target = Literal["norm_pix", "pixel", "labels", "visual_tokens", "contrastive", "self_distillation"]
Layout = Literal[
    "fair_mae",
    "fair_mae_finetuned",
    "vit",
    "vit_classifier",
    "deit3",
    "moco_v3",
    "dino",
    "dinov2",
    "beit",
    "beit_finetuned",
    "augreg",
    "hf_vit_mae",
    "hf_vit",
    "hf_beit",
    "hf_dinov2",
    "vitdet",
    "mmpretrain",
    "mmseg",
]


# Layouts of classifiers: their encoders were trained on labels, the last of all.
LABELLED = ("fair_mae_finetuned", "vit_classifier", "deit3", "augreg", "beit_finetuned")


class NoWeights(Strict):
    """A from-scratch baseline: the encoder starts random, and the record says so."""

    kind: Literal["none"]


class FileWeights(Strict):
    """Published weights: a file that the user has, or fetches, and that must match."""

    kind: Literal["file"]
    # Name below the weights folder, which it cannot leave.
    file: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+@-]*(/[A-Za-z0-9_][A-Za-z0-9_.+@-]*)*$", max_length=200)
    layout: Layout  # what the file must turn out to hold (`mae_bench.checkpoints.layouts.LAYOUTS`)
    url: str = Field(pattern=r"^(https?|hf|file)://[!-~]+$")  # hf://owner/repository[@revision]/path
    licence: str = Field(pattern="^[ -~]+$")
    # Hash of the file, or its first digits, as published; both empty = unverified, and the record says so.
    sha256: str = Field("", pattern="^([0-9a-f]{8,64})?$")
    md5_prefix: str = Field("", pattern="^([0-9a-f]{6,32})?$")
    target: Target
    pretrain_data: str
    pretrain_epochs: int = Field(ge=0)  # 0: the publisher does not say
    source: str

    @model_validator(mode="after")
    def _fits(self) -> FileWeights:
        if self.layout in LABELLED and self.target != "labels":
            raise ValueError(f"layout '{self.layout}' has seen labels: target is \"labels\"")
        if self.sha256 and self.md5_prefix:
            raise ValueError("sha256 and md5_prefix are both given; keep sha256, the stronger one")
        if self.file.endswith((".lock", ".part", ".json")):
            raise ValueError("file names the weights themselves; .lock, .part and .json are kept beside them")
        return self

    @property
    def pretraining(self) -> str:
        """Data and length in words."""
        length = f"{self.pretrain_epochs} epochs" if self.pretrain_epochs else "a length that nobody states"
        return f"{self.pretrain_data}, {length}"


class MadeWeights(Strict):
    """Weights that we train ourselves on demand, cached by the hash of everything that goes into them."""

    kind: Literal["made"]
    task: str  # the task recipe that makes them (engine `pretraining` or `classification`)


Weights = Annotated[NoWeights | FileWeights | MadeWeights, Field(discriminator="kind")]


class PublishedUse(Strict):
    """How the publisher evaluates the weights, and what came out. Facts for people: no task reads them."""

    crop: float = Field(gt=0, le=1)  # image size / resized shorter side at evaluation
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    pool: Literal["cls", "mean", "cls+mean"]
    source: str
    # Rows of results/published that were made with these weights: "file.csv: task; protocol; metric = value".
    numbers: list[str] = Field(default_factory=list)


class Backbone(Strict):
    """A backbone recipe file, ``backbones/<family>/<name>.toml``."""

    name: str = Field(pattern=NAME)
    size: Size
    init: Init
    summary: str
    architecture: Architecture
    input: Input
    weights: Weights
    # Features of the fixed picture (`mae_bench.checkpoints.proof.fingerprint`), where the real file has been seen.
    fingerprint: list[float] = Field(default_factory=list, max_length=64)
    published: PublishedUse | None = None
    refused: str = ""  # why this name cannot be run; empty = it can
