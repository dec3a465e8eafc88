"""Runs that would go on without learning, or end with a number of nothing, stop and say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mae_bench.engine.precision import NonFiniteLossError, check_parameters, check_scale
from mae_bench.errors import UserError


def test_a_scaler_that_has_halved_itself_away_stops_the_run() -> None:
    """Finite losses and gradients that always overflow: every step would be skipped, silently and for ever."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-8)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    check_scale(scaler)
    for _ in range(3):
        weight.grad = torch.full((1,), torch.inf)
        scaler.scale(torch.ones(1))  # the scaler must have been used
        scaler.step(optimizer)
        scaler.update()
    assert weight.item() == 1
    with pytest.raises(NonFiniteLossError, match="overflow"):
        check_scale(scaler)
    check_scale(torch.amp.GradScaler("cpu", enabled=False))


def test_weights_that_are_not_finite_are_not_evaluated() -> None:
    """Detection drops non-finite boxes: a model of NaN would be recorded as AP 0."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_parameters(model, 3)
    model[1].bias.data[0] = torch.nan
    with pytest.raises(UserError, match=r"after step 3 the weights of 1\.bias"):
        check_parameters(model, 3)
