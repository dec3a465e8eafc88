"""What pre-training predicts for a patch: its pixels, its principal components, or a token of an installed tokenizer.

He et al., arXiv 2111.06377, Table 1d. ``Target.of`` maps patches to what the head must give, ``Target.loss`` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_bench.errors import UserError, nearest
from mae_bench.schema import PretrainingValues

TARGET_EPS = 1e-6  # added to a patch's variance
TOKENIZERS = "mae_bench.tokenizers"  # entry point group

# A tokenizer turns RGB images (B,3,H,W) in [0, 1] and the grid (h, w) of the patches into tokens (B, h*w), int64.
Tokenizer = Callable[[Tensor, tuple[int, int]], Tensor]


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


class Pixels(nn.Module):
    """A patch's values, or under ``norm_pix`` those values normalised by the patch's own mean and deviation."""

    def __init__(self, norm_pix: bool, size: int) -> None:
        super().__init__()
        self.norm_pix = norm_pix
        self.width = size  # outputs of the head per patch

    def of(self, patches_BNP: Tensor) -> Tensor:
        return PatchStatistics.of(patches_BNP).normalise(patches_BNP) if self.norm_pix else patches_BNP

    def loss(self, predicted_BNP: Tensor, target_BNP: Tensor) -> Tensor:
        """Mean squared error. Every image hides the same number of patches, so the flat mean is FAIR's mean over
        patches of patch means."""
        return F.mse_loss(predicted_BNP.float(), target_BNP)


class Components(Pixels):
    """The ``count`` largest principal components of patch space, without whitening ("PCA" in Table 1d: 96)."""

    mean: Tensor
    basis: Tensor

    def __init__(self, size: int, count: int) -> None:
        super().__init__(False, count)
        if count > size:
            raise UserError(f"pca = {count}: a patch of {size} values has no more components than that; lower it")
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("basis", torch.zeros(size, count))

    def fit(self, patches_MP: Tensor) -> None:
        """Take the components of some patches (M,P), whose number must not be less than P."""
        if len(patches_MP) < patches_MP.shape[1]:
            raise UserError(
                f"target 'pca': {len(patches_MP)} patches do not determine the components of {patches_MP.shape[1]} "
                "values; give more training pictures"
            )
        centred = patches_MP.double()
        self.mean.copy_(centred.mean(dim=0))
        centred = centred - centred.mean(dim=0)
        _, vectors = torch.linalg.eigh(centred.T @ centred)  # rising eigenvalues
        largest = vectors.flip(1)[:, : self.width]
        # The sign of an eigenvector is nobody's choice: its largest entry shall be positive.
        signs = largest.gather(0, largest.abs().argmax(dim=0, keepdim=True)).sign()
        self.basis.copy_(largest * signs)

    def of(self, patches_BNP: Tensor) -> Tensor:
        return (patches_BNP - self.mean) @ self.basis


class Tokens(nn.Module):
    """Tokens of an external tokenizer (BEiT's dVAE and the like), which is installed as an entry point."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tokenizer, self.width = _tokenizer(name)

    def of_images(self, images_BCHW: Tensor, grid: tuple[int, int]) -> Tensor:
        """RGB images in [0, 1] -> (B,N,1) token numbers."""
        tokens_BN = self.tokenizer(images_BCHW, grid)
        expected = (len(images_BCHW), grid[0] * grid[1])
        whole = tokens_BN.shape == expected and not tokens_BN.is_floating_point()
        if not whole or not 0 <= tokens_BN.min() <= tokens_BN.max() < self.width:
            raise UserError(
                f"the tokenizer must give whole numbers below {self.width} of shape {expected}, not "
                f"{tokens_BN.dtype} of shape {tuple(tokens_BN.shape)}"
            )
        return tokens_BN.long().unsqueeze(-1)

    def loss(self, predicted_BNV: Tensor, target_BN1: Tensor) -> Tensor:
        """Cross entropy in nats per patch."""
        return F.cross_entropy(predicted_BNV.float().flatten(0, 1), target_BN1.flatten())


def _tokenizer(name: str) -> tuple[Tokenizer, int]:
    """The tokenizer that an installed distribution offers under ``name``, and the size of its vocabulary.

    The entry point names an object with ``vocabulary: int`` that is called as `Tokenizer` says.
    """
    found = {entry.name: entry for entry in metadata.entry_points(group=TOKENIZERS)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none is installed"
        raise UserError(
            f"target 'tokens' needs an external tokenizer: '{name}' is no entry point of the group {TOKENIZERS}"
            f"{nearest(name, found)} (known: {known}); docs/pretraining.md says how to offer one"
        )
    tokenizer = found[name].load()
    return tokenizer, int(tokenizer.vocabulary)


Target = Pixels | Tokens


def build_target(values: PretrainingValues, size: int) -> Target:
    """The target of a recipe, for patches of ``size`` values."""
    if values.target == "tokens":
        return Tokens(values.tokenizer)
    if values.target == "pca":
        return Components(size, values.pca)
    return Pixels(values.norm_pix, size)
