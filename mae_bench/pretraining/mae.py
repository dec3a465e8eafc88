"""The Masked Autoencoder and its relatives: encoder, decoder, and a loss on what the decoder predicts.

He et al., arXiv 2111.06377, section 3 and appendix A.1; names and initialisation follow FAIR's ``models_mae.py``. The
variants are the axes of the paper's Table 1; `objectives` has the autoencoders that see the whole image.

Tokens stay in shuffled order (`masking.Masking`): transformer blocks treat tokens as a set once positions are added,
so visible patches are a slice, hidden ones are another, and no activation is gathered or un-shuffled.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from mmengine.model import BaseDataPreprocessor, BaseModel
from torch import Tensor, nn

from mae_bench.encoders.positions import sincos_table
from mae_bench.encoders.vit import Encoder, initialise_linears_and_norms
from mae_bench.engine.onednn import linear
from mae_bench.engine.seeds import Stream, generator
from mae_bench.pretraining.decoder import LAYER_NORM, CrossBlock, decode, self_block
from mae_bench.pretraining.masking import Masking, keep_count
from mae_bench.pretraining.targets import Tokens, build_target
from mae_bench.schema import Input, PretrainingValues


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
    With ``mask_tokens = "encoder"`` (Table 1c) the encoder sees every place, hidden ones as mask tokens of its own
    width, and the decoder adds none.
    """

    def __init__(self, encoder: Encoder, pixels: Input, values: PretrainingValues, seed: int) -> None:
        super().__init__(data_preprocessor=Normalise(pixels))
        self.encoder = encoder
        self.patches = encoder.grid[0] * encoder.grid[1]
        self.keep = self._keep(values.mask_ratio)
        self.in_encoder = values.mask_tokens == "encoder"
        self.loss_on_all = values.loss_on == "all"
        self.cross = values.decoder == "cross"
        # Hidden patches that the training loss looks at.
        self.predicted = max(1, round(values.predict * (self.patches - self.keep)))
        self.target = build_target(values, encoder.patch**2 * 3)
        width = values.decoder_width
        self.decoder_embed = nn.Linear(self.code_width(values), width)
        if self.keep < self.patches:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.width if self.in_encoder else width))
        table = sincos_table(width, encoder.grid, class_token=True)
        self.decoder_pos_embed = nn.Parameter(table, requires_grad=False)
        block = CrossBlock if self.cross else self_block
        self.decoder_blocks = nn.ModuleList(block(width, values.decoder_heads) for _ in range(values.decoder_depth))
        self.decoder_norm = LAYER_NORM(width)
        self.decoder_pred = nn.Linear(width, self.target.width)
        self._initialise_decoder(generator(Stream.INIT, seed))

    def _keep(self, mask_ratio: float) -> int:
        """Patches that the encoder sees."""
        return keep_count(self.patches, mask_ratio)

    def code_width(self, values: PretrainingValues) -> int:
        """Channels of what the decoder is given for a patch."""
        return self.encoder.width

    @property
    def norm_pix(self) -> bool:
        """Whether predictions are pixels normalised per patch."""
        return bool(getattr(self.target, "norm_pix", False))

    def _initialise_decoder(self, random: torch.Generator) -> None:
        """As FAIR: linears xavier-uniform with zero bias, norms 1 and 0, mask token N(0, 0.02)."""
        for part in (self.decoder_embed, self.decoder_blocks, self.decoder_norm, self.decoder_pred):
            initialise_linears_and_norms(part, random)
        if self.keep < self.patches:
            nn.init.normal_(self.mask_token, std=0.02, generator=random)

    def masking(self, noise_BN: Tensor) -> Masking:
        """The masks of a batch, at this model's mask ratio."""
        return Masking.from_noise(noise_BN, self.keep)

    def encode(self, visible_BKP: Tensor, masking: Masking) -> Tensor:
        """Visible patches (pixels) in shuffled order -> tokens (B,1+K,D) after the final norm; (B,1+N,D) where mask
        tokens stand in the encoder.

        The convolution of the patch embedding is a linear map of a patch, so only visible patches are embedded.
        """
        encoder = self.encoder
        proj = encoder.patch_embed.proj
        weight = proj.weight.permute(0, 2, 3, 1).flatten(1)  # columns in the pixel order of `patchify`
        tokens = linear(visible_BKP, weight, proj.bias)
        if self.in_encoder:
            hidden = self.mask_token.expand(len(tokens), self.patches - masking.keep, -1)
            tokens = torch.cat([tokens, hidden.to(tokens.dtype)], dim=1)
        positions = encoder.pos_embed[0, encoder.position_prefix :][masking.shuffle[:, : tokens.shape[1]]]
        return encoder.encode(encoder.with_prefix(tokens + positions))

    def decode(self, tokens_BND: Tensor, masking: Masking, start: int, stop: int | None = None) -> Tensor:
        """Encoder tokens -> decoder tokens (B,M,D'), before the decoder's norm, of the places from ``start`` on in the
        shuffle; a cross decoder can end before ``stop``. Tokens without a place (the class token) come first."""
        table_ND = self.decoder_pos_embed[0, 1:]
        x: Tensor = self.decoder_embed(tokens_BND)
        blocks: Any = self.decoder_blocks
        if self.cross:
            x_BMD: Tensor = self.mask_token + F.embedding(masking.shuffle[:, start:stop], table_ND)
            for block in blocks:
                x_BMD = block(x_BMD, x)
            return x_BMD
        placed = self.patches if self.in_encoder else masking.keep  # patches that the encoder hands over
        lead = x.shape[1] - placed
        first = self.decoder_pos_embed[:, :lead].expand(len(x), -1, -1)
        known_BKD = x + torch.cat([first, F.embedding(masking.shuffle[:, :placed], table_ND)], dim=1)
        if placed < self.patches:
            table_ND = self.mask_token[0] + table_ND
        return decode(blocks, known_BKD, table_ND, masking.shuffle[:, placed:], lead + start)

    def forward(
        self,
        inputs: Tensor,
        data_samples: Tensor,
        extra: Tensor | None = None,
        mode: Literal["loss", "tensor"] = "tensor",
    ) -> dict[str, Tensor] | Tensor:
        """``inputs``: normalised images (B,3,H,W); ``data_samples``: mask noise (B,N), one row per image; ``extra``:
        what else is random in the objective (`images.TrainingSamples`).

        ``loss``: {"loss": the target's loss, a squared error in its units or nats, over the hidden patches, or over all
        with ``loss_on = "all"``}. ``tensor``: predictions of all patches (B,N,outputs) in raster order; a cross decoder
        predicts none for visible ones, which are zeros.
        """
        masking = self.masking(data_samples)
        patches, seen = self._patches(inputs, masking), self.seen(inputs, extra)
        shown = patches if seen is inputs else self._patches(seen, masking)
        tokens, cost = self.code(self.encode(shown[:, : masking.keep], masking), extra)
        start, stop = self.wanted if mode == "loss" else (masking.keep if self.cross else 0, None)
        # Norm and prediction act on each token alone: the places that no loss looks at are left out.
        predicted: Tensor = self.decoder_pred(self.decoder_norm(self.decode(tokens, masking, start, stop)))
        if mode == "loss":
            return {"loss": self.target.loss(predicted, self.targets(inputs, patches, masking)) + cost}
        if mode == "tensor":
            return masking.restored(F.pad(predicted, (0, 0, start, 0)))
        raise ValueError(f"{type(self).__name__} has modes 'loss' and 'tensor', not {mode!r}")

    def _patches(self, images_BCHW: Tensor, masking: Masking) -> Tensor:
        """(B,N,P) in shuffled order."""
        return masking.shuffled(patchify(images_BCHW, self.encoder.patch))

    def seen(self, inputs: Tensor, extra: Tensor | None) -> Tensor:
        """The images as the encoder sees them."""
        return inputs

    def code(self, tokens_BND: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """What the decoder is given, and what that costs by itself."""
        return tokens_BND, 0.0

    @property
    def wanted(self) -> tuple[int, int | None]:
        """The places of the shuffle, from and to, whose predictions the loss compares."""
        start = 0 if self.loss_on_all else self.keep
        return start, self.keep + self.predicted if self.cross else None

    def targets(self, inputs: Tensor, patches_BNP: Tensor, masking: Masking) -> Tensor:
        """What is to be predicted for the `wanted` places of the shuffle, (B,M,outputs) or tokens (B,M,1), from the
        images and from their patches in shuffled order."""
        start, stop = self.wanted
        if isinstance(self.target, Tokens):
            statistics: Any = self.data_preprocessor
            images = ((inputs * statistics.std + statistics.mean) / 255).clamp(0, 1)
            return masking.shuffled(self.target.of_images(images, self.encoder.grid))[:, start:stop]
        return self.target.of(patches_BNP[:, start:stop])

    def blank_loss(self, inputs: Tensor, data_samples: Tensor, extra: Tensor | None = None) -> Tensor:
        """The loss of predicting zeros: the mean colour (of each patch under ``norm_pix``), or every token alike."""
        masking = self.masking(data_samples)
        target = self.targets(inputs, self._patches(inputs, masking), masking)
        return self.target.loss(target.new_zeros(*target.shape[:2], self.target.width, dtype=torch.float32), target)
