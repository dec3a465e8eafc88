"""Runs that would go on without learning, or end with a number of nothing, stop and say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mae_bench.engine import precision
from mae_bench.engine.precision import NonFiniteLossError, StepWrapper, check_parameters, check_scale
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


def _wrapper(monkeypatch: pytest.MonkeyPatch, clip: float, scale: float) -> tuple[nn.Parameter, StepWrapper]:
    """fp16's loss scaling, on the CPU."""
    monkeypatch.setattr(
        StepWrapper, "_new_scaler", lambda self: torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    )
    weight = nn.Parameter(torch.ones(3))
    return weight, StepWrapper(torch.optim.SGD([weight], lr=1.0), torch.device("cpu"), "fp16", 1, clip)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_fp16_leaves_out_a_step_that_overflows_and_goes_on(monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    weight, wrapper = _wrapper(monkeypatch, clip, 2.0**120)
    wrapper.update_params((weight * torch.tensor([1.0, 2.0**10, 2.0**10])).sum())  # gradients beyond float32's range
    gradient = wrapper.measure()
    assert gradient.sound
    wrapper.step()
    assert torch.equal(weight, torch.ones(3))
    assert wrapper.scaler.get_scale() == 2.0**119
    wrapper.update_params((weight * torch.tensor([3.0, 0.0, 4.0])).sum())
    gradient = wrapper.measure()
    assert (gradient.sound, gradient.losses) == (True, [7.0])
    wrapper.step()
    expected = torch.tensor([3.0, 0.0, 4.0]) * (clip / 5 if clip else 1)
    torch.testing.assert_close(weight.data, 1 - expected, rtol=1e-5, atol=1e-6)
    if clip:
        assert gradient.norm == pytest.approx(5.0)


def test_fp16_without_a_usable_scale_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, wrapper = _wrapper(monkeypatch, 0.0, precision.SMALLEST_SCALE / 2)
    wrapper.update_params(weight.sum())
    gradient = wrapper.measure()
    assert (gradient.sound, gradient.fault) == (False, f"loss is {precision.OVERFLOW}")


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_discarded_step_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    weight, wrapper = _wrapper(monkeypatch, clip, 8.0)
    wrapper.update_params((weight * torch.nan).sum())
    gradient = wrapper.measure()
    assert (gradient.sound, gradient.fault) == (False, "loss is nan")
    wrapper.discard()
    assert weight.grad is None
    wrapper.update_params((weight * torch.tensor([0.3, 0.0, 0.4])).sum())
    assert wrapper.measure().sound
    wrapper.step()
    torch.testing.assert_close(weight.data, torch.tensor([0.7, 1.0, 0.6]))
    assert wrapper.scaler.get_scale() == 8.0


def test_requests_are_handed_on() -> None:
    weight = nn.Parameter(torch.ones(1))
    wrapper = StepWrapper(torch.optim.SGD([weight], lr=1.0), torch.device("cpu"), "fp32", 2, 0.0)
    for factor in (2.0, 4.0):
        wrapper.update_params((weight * factor).sum())
    gradient = wrapper.measure([15, True])
    assert (gradient.losses, gradient.norm, gradient.requests) == ([2.0, 4.0], 3.0, [15.0, 1.0])
