"""What the tests of the encoder share: random weights everywhere, the tolerance, and a removed function of SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.interpolate import RectBivariateSpline
from torch import Tensor, nn


def randomised(module: nn.Module) -> Any:
    """Every parameter random, so that no zero or one hides a missing term; in eval mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.eval()


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


class Interp2d:
    """What SciPy's transition guide gives for the removed ``interp2d`` on a regular grid, which BEiT and timm call."""

    def __init__(self, x: Any, y: Any, z: Any, kind: str) -> None:
        assert kind == "cubic"
        self.spline = RectBivariateSpline(x, y, z.T)

    def __call__(self, x: Any, y: Any) -> Any:
        return self.spline(np.asarray(x), np.asarray(y)).T
