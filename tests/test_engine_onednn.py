"""Linear layers by oneDNN: the same numbers as torch's own, and only where they are meant."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Mlp
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mae_bench.engine import onednn

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def _preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor."""
    monkeypatch.setattr(onednn, "preferred", lambda: True)


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
)
@settings(max_examples=60)
def test_values_and_gradients_are_torchs(shape: list[int], inputs: int, outputs: int, bias: bool) -> None:
    layer = nn.Linear(inputs, outputs, bias=bias)
    x = torch.randn(*shape, inputs, requires_grad=True)
    wanted = [x, *layer.parameters()]
    results = []
    for function in (onednn.linear, nn.functional.linear):
        out = function(x, layer.weight, layer.bias)
        results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), wanted)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_transposed_and_expanded_inputs() -> None:
    layer = nn.Linear(6, 5)
    for x in (torch.randn(4, 6, 3).transpose(1, 2), torch.randn(1, 6).expand(8, 6), torch.randn(8, 12)[:, ::2]):
        torch.testing.assert_close(onednn.linear(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_go_to_torch(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(6, 5).to(dtype), torch.randn(3, 6).to(dtype)
    assert torch.equal(onednn.linear(x, layer.weight, layer.bias), layer(x))


def test_autocast_is_respected() -> None:
    layer = nn.Linear(6, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert onednn.linear(torch.randn(3, 6), layer.weight, layer.bias).dtype == torch.bfloat16


def test_accelerated_models_keep_their_parameters_and_their_subclasses() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Other(4, 4), nn.Sequential(nn.Linear(4, 2)))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    onednn.accelerate(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert [type(module) for module in model.modules() if isinstance(module, nn.Linear)] == [
        onednn.Linear,
        Other,
        onednn.Linear,
    ]


@pytest.mark.parametrize("frozen", [False, True])
def test_an_mlp_keeps_one_activation_and_gives_the_same(frozen: bool) -> None:
    plain = Mlp(6, 20)
    plain.fc2.requires_grad_(not frozen)
    ours = copy.deepcopy(plain)
    onednn.accelerate(ours)
    assert type(ours) is onednn.GeluMlp
    x = torch.randn(3, 7, 6, requires_grad=True)
    results = []
    for mlp in (ours, plain):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            out = mlp(x)
        wanted = [x, *(parameter for parameter in mlp.parameters() if parameter.requires_grad)]
        results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), wanted)])
        assert kept.count(3 * 7 * 20) == (1 if mlp is ours or frozen else 2)
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changed", [{"act_layer": nn.SiLU}, {"drop": 0.1}, {"norm_layer": nn.LayerNorm}])
def test_other_mlps_stay_as_they_are(changed: dict[str, Any]) -> None:
    mlp = Mlp(6, 20, **changed)
    onednn.accelerate(mlp)
    assert type(mlp) is Mlp


class Doubled(nn.Linear):
    """A layer whose forward pass is its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_layer_with_a_forward_pass_of_its_own_is_called() -> None:
    mlp = Mlp(6, 20)
    mlp.fc2 = Doubled(20, 6)
    x = torch.randn(3, 6)
    expected = mlp(x)
    onednn.accelerate(mlp)
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("part", ["act", "drop1", "norm", "fc2", "drop2"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_are_called(part: str, kind: str) -> None:
    mlp, called = Mlp(6, 20), []
    getattr(mlp.get_submodule(part), f"register_{kind}_hook")(lambda *_: called.append(part))
    onednn.accelerate(mlp)
    mlp(torch.randn(3, 6, requires_grad=True)).sum().backward()
    assert called == [part]


def test_the_flop_counter_counts_it() -> None:
    layer, x = nn.Linear(6, 5), torch.randn(3, 7, 6, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        onednn.linear(x, layer.weight, layer.bias).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 21 * 6 * 5
