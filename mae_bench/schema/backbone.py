"""A backbone recipe: architecture, weights and the normalisation that belongs to them.

The idea of keeping what a weight file needs beside it (address, hash, mean and std, licence) is timm's
``PretrainedCfg``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mae_bench.schema.base import NAME, Init, Size, Strict

Triple = Annotated[list[float], Field(min_length=3, max_length=3)]


class Architecture(Strict):
    """Shape of a plain ViT encoder (Dosovitskiy et al., arXiv 2010.11929, Table 1)."""

    patch: int = Field(gt=0)
    width: int = Field(gt=0)
    depth: int = Field(gt=0)
    heads: int = Field(gt=0)
    mlp_ratio: float = Field(4.0, gt=0)
    image_size: int = Field(gt=0)  # side in pixels at pre-training; the position table has (image_size / patch)^2 rows
    norm_eps: float = Field(1e-6, gt=0)
    positions: Literal["sincos", "learned"] = "sincos"  # how the table is initialised; sincos is fixed in pre-training

    @model_validator(mode="after")
    def _divisible(self) -> Architecture:
        if self.image_size % self.patch:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch {self.patch}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self

    @property
    def grid(self) -> int:
        """Patches along one side at the pre-training size."""
        return self.image_size // self.patch


class Input(Strict):
    """Per-channel RGB statistics, in units of pixel values scaled to [0, 1], that the weights expect."""

    mean: Triple
    std: Triple


class NoWeights(Strict):
    """A from-scratch baseline: the encoder starts random, and the record says so."""

    kind: Literal["none"]


class FileWeights(Strict):
    """Published weights: a file that the user has, or fetches, and that must match."""

    kind: Literal["file"]
    file: str  # name below the weights folder
    layout: Literal["fair_mae", "deit", "fair_mae_finetuned"]  # key layout that the file must turn out to have
    url: str
    licence: str
    # Hash of the file, or its first digits, as published; both empty = unverified, and the record says so.
    sha256: str = Field("", pattern="^[0-9a-f]{0,64}$")
    md5_prefix: str = Field("", pattern="^[0-9a-f]{0,32}$")
    target: Literal["norm_pix", "pixel", "labels"]
    pretrain_data: str
    pretrain_epochs: int
    source: str


class MadeWeights(Strict):
    """Weights that we train ourselves on demand, cached by the hash of everything that goes into them."""

    kind: Literal["made"]
    task: str  # the task recipe that makes them (engine `pretraining` or `classification`)


Weights = Annotated[NoWeights | FileWeights | MadeWeights, Field(discriminator="kind")]


class Backbone(Strict):
    """A backbone recipe file, ``backbones/<family>/<name>.toml``."""

    name: str = Field(pattern=NAME)
    size: Size
    init: Init
    summary: str
    architecture: Architecture
    input: Input
    weights: Weights
    refused: str = ""  # why this name cannot be run; empty = it can
