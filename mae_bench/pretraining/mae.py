"""The Masked Autoencoder: encoder on visible patches, decoder on all, loss on masked pixels.

He et al., arXiv 2111.06377, section 3 and appendix A.1; names and initialisation follow FAIR's ``models_mae.py``.

Tokens stay in shuffled order (`masking.Masking`): transformer blocks treat tokens as a set once positions are added,
so visible patches are a slice, masked ones are another, and no activation is gathered or un-shuffled.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.model import BaseDataPreprocessor, BaseModel
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from mae_bench.encoders.positions import sincos_table
from mae_bench.encoders.vit import Encoder, initialise_linears_and_norms
from mae_bench.engine.seeds import Stream, generator
from mae_bench.pretraining.masking import Masking, keep_count
from mae_bench.schema import Input, PretrainingValues

DECODER_MLP_RATIO = 4
TARGET_EPS = 1e-6  # added to a patch's variance
LAYER_NORM = partial(nn.LayerNorm, eps=1e-6)


def patchify(images_BCHW: Tensor, patch: int) -> Tensor:
    """(B,3,H,W) -> (B,N,patch*patch*3): patches in raster order, each as row, column, RGB (fastest)."""
    B, C, H, W = images_BCHW.shape
    x = images_BCHW.reshape(B, C, H // patch, patch, W // patch, patch)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, patch * patch * C)


def unpatchify(patches_BNP: Tensor, grid: tuple[int, int]) -> Tensor:
    """Inverse of ``patchify`` for a (rows, columns) grid of square RGB patches."""
    B, _, P = patches_BNP.shape
    h, w = grid
    patch = round((P // 3) ** 0.5)
    x = patches_BNP.reshape(B, h, w, patch, patch, 3)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(B, 3, h * patch, w * patch)


class PatchStatistics(NamedTuple):
    """Mean and standard deviation of each patch's own values, (B,N,1): what ``norm_pix`` takes out of a target."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, patches_BNP: Tensor) -> PatchStatistics:
        """Unbiased variance plus 1e-6, as FAIR has it."""
        var, mean = torch.var_mean(patches_BNP, dim=-1, keepdim=True)
        return cls(mean, (var + TARGET_EPS).sqrt())

    def normalise(self, patches_BNP: Tensor) -> Tensor:
        return (patches_BNP - self.mean) / self.std

    def denormalise(self, patches_BNP: Tensor) -> Tensor:
        return patches_BNP * self.std + self.mean


class Normalise(BaseDataPreprocessor):
    """uint8 RGB batches (B,3,H,W) -> float on the model's device, with the backbone's mean and std."""

    def __init__(self, pixels: Input) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(pixels.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(pixels.std).view(1, 3, 1, 1), persistent=False)

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        data = self.cast_data(data)
        return data | {"inputs": (data["inputs"].float() - self.mean) / self.std}


class MaskedAutoencoder(BaseModel):
    """MAE around one of our encoders; ``forward`` follows mmengine's ``BaseModel``.

    Beside ``encoder.*`` the state has FAIR's names: ``decoder_embed``, ``mask_token``, ``decoder_pos_embed``,
    ``decoder_blocks.i``, ``decoder_norm``, ``decoder_pred``. Both position tables are parameters that need no gradient.
    """

    def __init__(self, encoder: Encoder, pixels: Input, values: PretrainingValues, seed: int) -> None:
        super().__init__(data_preprocessor=Normalise(pixels))
        self.encoder = encoder
        self.norm_pix = values.norm_pix
        self.patches = encoder.grid[0] * encoder.grid[1]
        self.keep = keep_count(self.patches, values.mask_ratio)
        width = values.decoder_width
        self.decoder_embed = nn.Linear(encoder.width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        table = sincos_table(width, encoder.grid, class_token=True)
        self.decoder_pos_embed = nn.Parameter(table, requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            Block(width, values.decoder_heads, DECODER_MLP_RATIO, qkv_bias=True, norm_layer=LAYER_NORM)
            for _ in range(values.decoder_depth)
        )
        self.decoder_norm = LAYER_NORM(width)
        self.decoder_pred = nn.Linear(width, encoder.patch**2 * 3)
        self._initialise_decoder(generator(Stream.INIT, seed))

    def _initialise_decoder(self, random: torch.Generator) -> None:
        """As FAIR: linears xavier-uniform with zero bias, norms 1 and 0, mask token N(0, 0.02)."""
        for part in (self.decoder_embed, self.decoder_blocks, self.decoder_norm, self.decoder_pred):
            initialise_linears_and_norms(part, random)
        nn.init.normal_(self.mask_token, std=0.02, generator=random)

    def masking(self, noise_BN: Tensor) -> Masking:
        """The masks of a batch, at this model's mask ratio."""
        return Masking.from_noise(noise_BN, self.keep)

    def split(self, images_BCHW: Tensor, noise_BN: Tensor) -> tuple[Masking, Tensor, Tensor]:
        """The masks, and the patches (B,K,P) that they show and (B,N-K,P) that they hide, in shuffled order."""
        masking = self.masking(noise_BN)
        patches_BNP = masking.shuffled(patchify(images_BCHW, self.encoder.patch))
        return masking, patches_BNP[:, : masking.keep], patches_BNP[:, masking.keep :]

    def encode(self, visible_BKP: Tensor, masking: Masking) -> Tensor:
        """Visible patches (pixels) in shuffled order -> tokens (B,1+K,D) after the final norm.

        The convolution of the patch embedding is a linear map of a patch, so only visible patches are embedded.
        """
        encoder = self.encoder
        proj = encoder.patch_embed.proj
        weight = proj.weight.permute(0, 2, 3, 1).flatten(1)  # columns in the pixel order of `patchify`
        positions = encoder.pos_embed[0, encoder.position_prefix :][masking.shuffle[:, : masking.keep]]
        return encoder.encode(encoder.with_prefix(F.linear(visible_BKP, weight, proj.bias) + positions))

    def decode(self, tokens_BND: Tensor, masking: Masking) -> Tensor:
        """Encoder tokens (B,1+K,D) -> decoder tokens (B,1+N,D'), before the decoder's norm, in shuffled order."""
        positions = self.decoder_pos_embed[0, 1:][masking.shuffle]
        x: Tensor = self.decoder_embed(tokens_BND)
        x = torch.cat([x, self.mask_token.expand(len(x), self.patches - masking.keep, -1)], dim=1)
        x = x + torch.cat([self.decoder_pos_embed[:, :1].expand(len(x), -1, -1), positions], dim=1)
        for block in self.decoder_blocks:
            x = block(x)
        return x

    def forward(
        self, inputs: Tensor, data_samples: Tensor, mode: Literal["loss", "tensor"] = "tensor"
    ) -> dict[str, Tensor] | Tensor:
        """``inputs``: normalised images (B,3,H,W); ``data_samples``: mask noise (B,N), one row per image.

        ``loss``: {"loss": mean squared error over the pixels of masked patches}, in the units of the target.
        ``tensor``: predictions of all patches (B,N,patch*patch*3) in raster order.
        """
        masking, visible, masked = self.split(inputs, data_samples)
        x = self.decode(self.encode(visible, masking), masking)
        if mode == "tensor":
            return masking.restored(self.decoder_pred(self.decoder_norm(x[:, 1:])))
        if mode != "loss":
            raise ValueError(f"MaskedAutoencoder has modes 'loss' and 'tensor', not {mode!r}")
        # Norm and prediction act on each token alone: the visible ones, which no loss looks at, are left out.
        prediction = self.decoder_pred(self.decoder_norm(x[:, 1 + masking.keep :]))
        # Every image masks the same number of patches, so the flat mean is the mean over patches of patch means.
        return {"loss": F.mse_loss(prediction.float(), self.targets(masked))}

    def targets(self, patches_BNP: Tensor) -> Tensor:
        """What the decoder predicts for these patches: their pixels, or each patch's normalised pixels."""
        return PatchStatistics.of(patches_BNP).normalise(patches_BNP) if self.norm_pix else patches_BNP
