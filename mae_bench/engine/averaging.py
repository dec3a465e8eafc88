"""Exponential moving average of the weights (`ema` in a protocol), which is evaluated in their place.

The average starts at the initial weights and moves by (1 - decay) of the way after every optimiser step, without a
warmup of the decay, as in DeiT's recipe that the from-scratch protocols build on (MAE, arXiv 2111.06377, A.2). Buffers
and frozen parameters are not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """Average of a module's trainable parameters. ``decay`` 0 keeps none: every method then does nothing."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._pairs: dict[str, tuple[torch.Tensor, nn.Parameter]] = {}
        if decay:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    self._pairs[name] = (parameter.detach().clone(), parameter)

    @torch.no_grad()
    def update(self) -> None:
        for average, parameter in self._pairs.values():
            average.lerp_(parameter, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module holds the average within, its own weights again afterwards."""
        own = [parameter.detach().clone() for _, parameter in self._pairs.values()]
        self.keep()
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, parameter), value in zip(self._pairs.values(), own, strict=True):
                    parameter.copy_(value)

    @torch.no_grad()
    def keep(self) -> None:
        """Put the average into the module for good."""
        for average, parameter in self._pairs.values():
            parameter.copy_(average)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: average for name, (average, _) in self._pairs.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if set(state) != set(self._pairs):
            raise ValueError("the saved average is of other parameters")
        for name, (average, _) in self._pairs.items():
            average.copy_(state[name])
