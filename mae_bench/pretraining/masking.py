"""Random masking of patches (He et al., arXiv 2111.06377, section 3; the convention of FAIR's ``models_mae.py``).

Every sample has noise of its own, one number per patch. Sorting the noise gives the sample's shuffle; the first
``keep`` patches of the shuffle are visible, the others are removed. Whoever supplies the noise decides the mask, so
a mask can be a function of (seed, epoch, index) and does not depend on batch size, devices or process count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mae_bench.errors import UserError


def keep_count(patches: int, mask_ratio: float) -> int:
    """Visible patches of an image: floor(N (1 - r)), in the floating-point arithmetic of FAIR's code.

    Raises UserError when nothing would stay visible or nothing would be masked.
    """
    keep = int(patches * (1 - mask_ratio))
    if not 0 < keep < patches:
        what = "visible" if keep <= 0 else "masked"
        raise UserError(f"mask_ratio {mask_ratio} leaves none of {patches} patches {what}; give another mask_ratio")
    return keep


@dataclass(frozen=True)
class Masking:
    """One shuffle per sample: ``shuffle[b, i]`` is the raster index of the patch at place i; the first ``keep``
    places are visible."""

    shuffle: Tensor  # (B,N)
    keep: int

    @classmethod
    def from_noise(cls, noise_BN: Tensor, keep: int) -> Masking:
        """Masking of the ``keep`` patches with the lowest noise; ties fall to the lower index on every device."""
        return cls(torch.argsort(noise_BN, dim=1, stable=True), keep)

    @property
    def restore(self) -> Tensor:
        """FAIR's ``ids_restore`` (B,N): the place in the shuffle of each patch in raster order."""
        return torch.argsort(self.shuffle, dim=1)

    @property
    def mask(self) -> Tensor:
        """Float mask (B,N) in raster order: 1 = removed, 0 = visible."""
        return (self.restore >= self.keep).float()

    def shuffled(self, tokens_BND: Tensor) -> Tensor:
        """Tokens in raster order -> tokens in shuffled order, the visible ones first."""
        return _gather(tokens_BND, self.shuffle)

    def restored(self, tokens_BND: Tensor) -> Tensor:
        """Inverse of ``shuffled``."""
        return _gather(tokens_BND, self.restore)


def _gather(tokens_BND: Tensor, index_BN: Tensor) -> Tensor:
    return tokens_BND.gather(1, index_BN.unsqueeze(-1).expand(-1, -1, tokens_BND.shape[-1]))
