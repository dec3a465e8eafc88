"""Patch embedding, and resampling its kernel to another patch size.

Source: Dosovitskiy et al. (arXiv 2010.11929, Sec. 3.1); the pseudo-inverse resampling is FlexiViT's (Beyer et al.,
arXiv 2212.08013, Sec. 3.4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_bench.errors import UserError


class PatchEmbed(nn.Module):
    """Linear projection of non-overlapping square patches, written as a convolution."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Patches along the height and the width of (B,3,H,W) images."""
        height, width = images.shape[-2:]
        if height % self.patch or width % self.patch:
            raise UserError(
                f"an image of {height} x {width} pixels cannot be cut into patches of {self.patch}; "
                f"choose an image size that is a multiple of {self.patch}"
            )
        return height // self.patch, width // self.patch

    def forward(self, images: Tensor) -> Tensor:
        """(B,3,H,W) -> (B,h*w,D), row by row."""
        map_BDhw: Tensor = self.proj(images)
        return map_BDhw.flatten(2).transpose(1, 2)


def resample_kernel(kernel: Tensor, size: int) -> Tensor:
    """A (D,3,P,P) patch kernel for patches of ``size`` pixels, so that resized images give (nearly) the same tokens.

    With B the matrix that resizes a patch (bicubic, antialiased), the new kernel w' is the least-squares solution of
    <w', B x> = <w, x> for all patches x.
    """
    old = kernel.shape[-1]
    if old == size:
        return kernel
    basis = torch.eye(old * old, dtype=torch.float32).view(old * old, 1, old, old)
    resize_ON = F.interpolate(basis, size=(size, size), mode="bicubic", antialias=True).flatten(1)  # transpose of B
    inverse_NO = torch.linalg.pinv(resize_ON)
    resampled = kernel.flatten(2).float() @ inverse_NO.T
    out: Tensor = resampled.view(*kernel.shape[:2], size, size).to(kernel.dtype)
    return out
