"""Parameter groups and optimisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_toys import make_backbone, make_values
from torch import nn

from mae_bench.encoders.vit import Encoder
from mae_bench.engine.optim import LARS, build_optimizer, layer_id, parameter_groups, parameter_kind
from mae_bench.errors import UserError


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = {"registers": 2, "mlp": "swiglu", "final_norm": "pooled"}
        self.encoder = Encoder(make_backbone(**features).architecture, rel_pos="bias", layer_scale=0.1)
        self.detector = Encoder(make_backbone().architecture, class_token=False, rel_pos="decomposed")
        self.decoder_pos_embed = nn.Parameter(torch.zeros(1, 4, 16))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(1, 4), nn.BatchNorm2d(4))
        self.head = nn.Linear(16, 3)


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = _Model()
    model.encoder.patch_embed.requires_grad_(False)
    groups = parameter_groups(model, make_values(layer_decay=0.5), encoder_prefix="encoder.", depth=2)
    grouped = [parameter for group in groups for parameter in group["params"]]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(grouped) == len({id(parameter) for parameter in grouped}) == len(trainable)
    assert {id(parameter) for parameter in grouped} == {id(parameter) for parameter in trainable}
    assert len({group["name"] for group in groups}) == len(groups)


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("encoder.cls_token", "tokens", 0),
        ("encoder.reg_token", "tokens", 0),
        ("encoder.pos_embed", "positions", 0),
        ("encoder.patch_embed.proj.weight", "weight", 0),
        ("encoder.patch_embed.proj.bias", "bias", 0),
        ("encoder.blocks.0.norm1.weight", "norm", 1),
        ("encoder.blocks.1.norm2.bias", "norm", 2),
        ("encoder.blocks.1.attn.qkv.bias", "bias", 2),
        ("encoder.blocks.0.attn.relative_position_bias_table", "rel_pos", 1),
        ("encoder.blocks.0.ls1.gamma", "layer_scale", 1),
        ("encoder.blocks.1.ls2.gamma", "layer_scale", 2),
        ("encoder.blocks.1.mlp.fc1.weight", "weight", 2),
        ("encoder.fc_norm.weight", "norm", 3),
        ("detector.blocks.0.attn.rel_pos_h", "rel_pos", 3),
        ("detector.norm.bias", "norm", 3),
        ("decoder_pos_embed", "positions", 3),
        ("mask_token", "tokens", 3),
        ("conv.0.weight", "weight", 3),
        ("conv.1.weight", "norm", 3),
        ("conv.2.bias", "norm", 3),
        ("head.weight", "weight", 3),
    ],
)
def test_kind_and_layer_of_a_parameter(name: str, kind: str, layer: int) -> None:
    parent, _, leaf = name.rpartition(".")
    assert parameter_kind(_Model().get_submodule(parent), leaf) == kind
    assert layer_id(name, "encoder.", 2) == layer


def test_block_ten_is_not_block_one() -> None:
    assert layer_id("blocks.10.attn.qkv.weight", "", 12) == 11
    assert layer_id("blocks.1.attn.qkv.weight", "", 12) == 2
    assert layer_id("blocks.1.attn.qkv.weight", None, 12) == 13


def test_layer_decay_without_an_encoder_is_refused() -> None:
    with pytest.raises(UserError, match="no effect on a model without an encoder"):
        parameter_groups(nn.Linear(2, 2), make_values(layer_decay=0.5), encoder_prefix=None, depth=0)


def test_exemptions_are_the_recipes() -> None:
    model = _Model()
    for exempt in ((), ("norm",), ("bias", "tokens"), ("rel_pos", "layer_scale", "positions")):
        groups = parameter_groups(model, make_values(no_decay=list(exempt)), encoder_prefix="encoder.", depth=2)
        decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            parent, _, leaf = name.rpartition(".")
            kind = parameter_kind(model.get_submodule(parent), leaf)
            assert decay[id(parameter)] == (0.0 if kind in exempt else 0.1), name


def test_optimisers_take_the_recipes_values() -> None:
    model = nn.Linear(2, 2)

    def build(**changes: Any) -> torch.optim.Optimizer:
        values = make_values(**changes)
        return build_optimizer(parameter_groups(model, values, encoder_prefix=None, depth=0), values)

    adamw = build(betas=[0.9, 0.95])
    assert type(adamw) is torch.optim.AdamW
    assert [group["betas"] for group in adamw.param_groups] == [(0.9, 0.95)] * 2
    assert sorted(group["weight_decay"] for group in adamw.param_groups) == [0.0, 0.1]
    assert build(optimizer="sgd", momentum=0.8).param_groups[0]["momentum"] == 0.8
    lars = build(optimizer="lars", momentum=0.7)
    assert type(lars) is LARS
    assert (lars.param_groups[0]["momentum"], lars.param_groups[0]["trust"]) == (0.7, 0.001)


def test_fused_adamw_equals_the_plain_one() -> None:
    """Over ten steps of 200 tensors, to 1e-7, whatever the momentum; and the same bits again."""
    models, ends = [_Stack(), _Stack(), _Stack()], []
    values = make_values(betas=[0.9, 0.95], base_lr=1e-3, weight_decay=0.05)
    for model, fused in zip(models, (True, True, False), strict=True):
        optimizer = build_optimizer(parameter_groups(model, values, encoder_prefix=None, depth=0), values)
        assert optimizer.param_groups[0]["fused"]
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = fused, False
        random = torch.Generator().manual_seed(1)
        for _ in range(10):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=random) * 0.01
            optimizer.step()
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])  # else this compares the plain one with itself
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-7)


class _Stack(nn.Sequential):
    """200 tensors of fixed initial values."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(17, 13) for _ in range(100)))
        random = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05, generator=random)


def _lars_by_hand(weight: list[list[float]], grads: list[list[list[float]]], lr: float, decay: float) -> Any:
    """Two-dimensional LARS in plain Python."""
    rows, columns = len(weight), len(weight[0])
    momentum = [[0.0] * columns for _ in range(rows)]
    for grad in grads:
        update = [[grad[r][c] + decay * weight[r][c] for c in range(columns)] for r in range(rows)]
        weight_norm = sum(value**2 for row in weight for value in row) ** 0.5
        update_norm = sum(value**2 for row in update for value in row) ** 0.5
        ratio = 0.001 * weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
        for r in range(rows):
            for c in range(columns):
                momentum[r][c] = 0.9 * momentum[r][c] + ratio * update[r][c]
                weight[r][c] -= lr * momentum[r][c]
    return weight


@pytest.mark.parametrize("start", [[[1.0, -2.0], [0.5, 3.0]], [[0.0, 0.0], [0.0, 0.0]]])
def test_lars_equals_a_hand_written_reference(start: list[list[float]]) -> None:
    grads = [[[0.3, -0.1], [0.2, 0.7]], [[-0.5, 0.4], [0.0, 0.1]], [[0.0, 0.0], [0.0, 0.0]]]
    weight = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = LARS([weight], lr=6.4, weight_decay=0.01)
    for grad in grads:
        weight.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    expected = torch.tensor(_lars_by_hand([row[:] for row in start], grads, 6.4, 0.01), dtype=torch.float64)
    torch.testing.assert_close(weight.data, expected, rtol=1e-12, atol=1e-15)


def test_lars_leaves_vectors_to_plain_momentum() -> None:
    bias, reference = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = LARS([bias], lr=0.1, weight_decay=0.5)
    sgd = torch.optim.SGD([reference], lr=0.1, momentum=0.9)
    for grad in ([1.0, -1.0], [0.5, 0.25]):
        bias.grad, reference.grad = torch.tensor(grad), torch.tensor(grad)
        optimizer.step()
        sgd.step()
    torch.testing.assert_close(bias, reference)
