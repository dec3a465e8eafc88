"""Learning rates: golden values worked out from the published formulas, and parity with installed references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine_toys import make_values
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mae_bench.classification.adapter import Classifier
from mae_bench.encoders.vit import Encoder
from mae_bench.engine.job import Options
from mae_bench.engine.optim import build_optimizer, parameter_groups
from mae_bench.engine.plan import Plan, make_plan
from mae_bench.engine.schedules import apply_lr, lr_at
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.recipes import load_backbone, resolve_task
from mae_bench.schema import Optimisation, PretrainingValues

FINETUNE_B: dict[str, Any] = {
    "base_lr": 5e-4,
    "lr_per": 256,
    "batch": 1024,
    "layer_decay": 0.65,
    "weight_decay": 0.05,
    "no_decay": ["norm", "bias", "positions", "tokens"],
    "epochs": 100,
    "warmup_epochs": 5,
    "min_lr": 1e-6,
}


def _plan(values: Optimisation) -> Plan:
    return make_plan(values, 1281167, Options(), 1)


def _fair(epoch: float, values: Optimisation) -> float:
    """The published rule, in epochs."""
    if epoch < values.warmup_epochs:
        return values.lr * epoch / values.warmup_epochs
    progress = (epoch - values.warmup_epochs) / (values.epochs - values.warmup_epochs)
    return values.min_lr + (values.lr - values.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


# 1251 steps an epoch: warmup ends at step 6255, the middle is step 62550, the last is 125099. By hand:
# step 1: 2e-3 / 6255; middle: 1e-6 + 1.999e-3 (1 + cos(9π/19)) / 2; last: 1e-6 + 1.999e-3 (π / 118845)^2 / 4.
GOLDEN = {0: 0.0, 1: 3.1974420e-7, 6255: 2e-3, 62550: 1.0830380e-3, 125099: 1.00000035e-6}


@pytest.mark.parametrize(("step", "lr"), GOLDEN.items())
def test_finetune_b_learning_rates(step: int, lr: float) -> None:
    values = make_values(**FINETUNE_B)
    assert lr_at(step, values, _plan(values)) == pytest.approx(lr, rel=1e-7)


def test_finetune_b_values_are_those_of_the_recipe() -> None:
    shipped = resolve_task("imagenet_finetune", load_backbone("vit_b_mae")).values
    assert lr_at(62550, shipped, _plan(shipped)) == pytest.approx(GOLDEN[62550], rel=1e-7)


# The same for 1600 epochs of 312 steps of pre-training, 40 of them warmup, from 2.4e-3 to 0, middle: 19/39 of the
# cosine; and for the 50 epochs of ViT-L's fine-tuning, from 4e-3, middle: 4/9 of it.
GOLDEN_PRETRAIN = {0: 0.0, 1: 1.9230769e-7, 12480: 2.4e-3, 249600: 1.2483191e-3, 499199: 2.499727e-14}
GOLDEN_FINETUNE_L = {0: 0.0, 1: 6.3948841e-7, 6255: 4e-3, 31275: 2.3477095e-3, 62549: 1.0000031e-6}
RUNS = {
    ("imagenet_pretrain", "vit_b_mae"): (GOLDEN_PRETRAIN, 1.0),
    ("imagenet_pretrain", "vit_l_mae"): (GOLDEN_PRETRAIN, 1.0),
    ("imagenet_finetune", "vit_b_mae"): (GOLDEN, 0.65),
    ("imagenet_finetune", "vit_l_mae"): (GOLDEN_FINETUNE_L, 0.75),
}


def _narrow(task: str, backbone: str) -> tuple[nn.Module, Optimisation]:
    """The model that a run trains, as deep as it is, 24 wide."""
    recipe = load_backbone(backbone)
    values = resolve_task(task, recipe).values
    shape = recipe.architecture.model_copy(update={"width": 24, "heads": 2})
    pretrains = task == "imagenet_pretrain"
    encoder = Encoder(shape, final_norm=pretrains, frozen_positions=pretrains)
    if isinstance(values, PretrainingValues):
        values = values.model_copy(update={"decoder_width": 24, "decoder_heads": 2})
        return MaskedAutoencoder(encoder, recipe.input, values, seed=0), values
    return Classifier(encoder, values, 10, recipe.input, seed=0), values


def _published_layer(name: str, depth: int) -> int:
    """In FAIR's fine-tuning (`util/lr_decay.py`): the stem is 0, block i is i + 1, the rest depth + 1."""
    name = name.removeprefix("encoder.")
    if name in ("cls_token", "pos_embed") or name.startswith("patch_embed"):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else depth + 1


@pytest.mark.parametrize(("task", "backbone"), RUNS)
def test_lr_and_weight_decay_of_every_parameter_at_every_golden_step(task: str, backbone: str) -> None:
    golden, decay = RUNS[task, backbone]
    model, values = _narrow(task, backbone)
    depth = load_backbone(backbone).architecture.depth
    optimizer = build_optimizer(parameter_groups(model, values, encoder_prefix="encoder.", depth=depth), values)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    exempt = {"encoder.cls_token", "encoder.pos_embed"} if task == "imagenet_finetune" else set()
    for step, lr in golden.items():
        apply_lr(optimizer, step, values, _plan(values))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                factor = decay ** (depth + 1 - _published_layer(name, depth))
                assert group["lr"] == pytest.approx(lr * factor, rel=1e-5, abs=1e-20), (step, name)
                free = parameter.ndim == 1 or name in exempt  # FAIR decays the class and mask tokens in pre-training
                assert group["weight_decay"] == (0.0 if free else 0.05), name
    # The two position tables of pre-training are not trained.
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names) - 2 * (decay == 1)


@given(step=st.integers(0, 125099))
def test_cosine_equals_the_published_rule_in_epochs(step: int) -> None:
    values = make_values(**FINETUNE_B)
    assert lr_at(step, values, _plan(values)) == pytest.approx(_fair(step / 1251, values), rel=1e-9, abs=1e-15)


def test_absolute_min_lr_is_the_same_for_every_group() -> None:
    values = make_values(**(FINETUNE_B | {"min_lr_scaled": False}))
    last = _plan(values).steps - 1
    assert lr_at(last, values, _plan(values), scale=0.01) == pytest.approx(1e-6, rel=1e-4)
    assert lr_at(6255, values, _plan(values), scale=0.01) == pytest.approx(2e-5)


def test_poly_equals_torch_without_warmup() -> None:
    values = make_values(schedule="poly", steps=50, base_lr=0.1, poly_power=0.9)
    plan = make_plan(values, 100, Options(), 1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=0.9)
    for step in range(50):
        assert lr_at(step, values, plan) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()


# 160,000 steps at 1e-4, 1500 of warmup from 1e-6, power 1: by hand (1e-6 + (1 - 1e-6) t / 1500) (1 - t / 160000) 1e-4.
@pytest.mark.parametrize(
    ("step", "lr"), [(0, 1e-10), (750, 4.97656754e-5), (1500, 9.90625e-5), (80000, 5e-5), (159999, 6.25e-10)]
)
def test_upernet_learning_rates(step: int, lr: float) -> None:
    values = make_values(schedule="poly", steps=160000, warmup_steps=1500, warmup_factor=1e-6, base_lr=1e-4, batch=16)
    assert lr_at(step, values, make_plan(values, 20210, Options(), 1)) == pytest.approx(lr, rel=1e-7)


def test_steps_and_warmup_equal_detectron2() -> None:
    solver = pytest.importorskip("detectron2.solver", reason="needs detectron2")
    schedulers = pytest.importorskip("fvcore.common.param_scheduler")
    values = make_values(
        schedule="steps", steps=200, warmup_steps=25, warmup_factor=1e-3, milestones=[8 / 9, 26 / 27], base_lr=1e-4
    )
    plan = make_plan(values, 1000, Options(), 1)
    multi = schedulers.MultiStepParamScheduler([1.0, 0.1, 0.01], milestones=[178, 193], num_updates=200)
    reference = solver.WarmupParamScheduler(multi, 1e-3, 25 / 200, "linear")
    for step in range(200):
        assert lr_at(step, values, plan) == pytest.approx(1e-4 * reference(step / 200), rel=1e-9)


def test_constant_stays_constant() -> None:
    values = make_values(schedule="constant")
    plan = make_plan(values, 20, Options(), 1)
    assert {lr_at(step, values, plan) for step in range(plan.steps)} == {0.01}
