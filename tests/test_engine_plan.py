"""Numbers of steps and batches that follow from a protocol."""

from __future__ import annotations

import pytest
from engine_toys import make_values
from hypothesis import given
from hypothesis import strategies as st

from mae_bench.engine.job import Options
from mae_bench.engine.plan import make_plan
from mae_bench.errors import UserError
from mae_bench.recipes import index, load_backbone, load_task, resolve_task

IMAGENET = 1281167


@pytest.mark.parametrize(("batch", "steps_per_epoch"), [(4096, 312), (1024, 1251), (16384, 78)])
def test_epoch_lengths_are_those_of_the_published_loaders(batch: int, steps_per_epoch: int) -> None:
    plan = make_plan(make_values(epochs=100, warmup_epochs=5, batch=batch), IMAGENET, Options(), 1)
    assert plan.steps_per_epoch == steps_per_epoch
    assert plan.steps == 100 * steps_per_epoch
    assert plan.warmup_steps == 5 * steps_per_epoch
    assert plan.eval_at == (plan.steps,)


@given(
    parts=st.integers(1, 64), world=st.sampled_from([1, 2, 3, 8]), limit=st.integers(0, 80), steps=st.integers(1, 50)
)
def test_the_batch_is_kept_exactly(parts: int, world: int, limit: int, steps: int) -> None:
    plan = make_plan(make_values(steps=steps, batch=parts * world), 1000, Options(micro_batch=limit), world)
    assert plan.micro_batch * plan.accumulation * world == parts * world
    assert not limit or plan.micro_batch <= limit
    larger = [size for size in range(plan.micro_batch + 1, min(limit or parts, parts) + 1) if parts % size == 0]
    assert not larger


def test_evaluations_are_at_whole_epochs_and_at_the_end() -> None:
    plan = make_plan(make_values(epochs=2.5, batch=10, eval_every_epochs=1), 45, Options(), 1)
    assert (plan.steps, plan.eval_at) == (10, (4, 8, 10))
    assert make_plan(make_values(steps=7, eval_every_steps=3), 45, Options(), 1).eval_at == (3, 6, 7)


def test_protocols_in_steps_stream_over_epochs() -> None:
    plan = make_plan(make_values(steps=100, batch=16), 8, Options(), 1)
    assert (plan.steps, plan.steps_per_epoch, plan.epoch_images) == (100, 0.5, 8)
    assert plan.epoch(4) == 8


@pytest.mark.parametrize(
    ("changes", "images", "world", "message"),
    [
        ({"batch": 8}, 0, 1, "no image"),
        ({"batch": 8}, 7, 1, "larger than the 7 training images"),
        ({"batch": 8}, 100, 3, "cannot be shared equally by 3"),
        ({"epochs": 1, "warmup_epochs": 1}, 100, 1, "warmup takes 12 of 12 steps"),
        ({"milestones": [0.5]}, 100, 1, "schedule 'cosine' does not read milestones"),
        ({"poly_power": 0.9}, 100, 1, "does not read poly_power"),
        ({"schedule": "constant", "min_lr": 1e-6}, 100, 1, "does not read min_lr"),
        ({"optimizer": "lars", "betas": [0.9, 0.95]}, 100, 1, "optimizer 'lars' does not read betas"),
        ({"momentum": 0.5}, 100, 1, "optimizer 'adamw' does not read momentum"),
        ({"schedule": "steps"}, 100, 1, "needs milestones"),
        ({"schedule": "steps", "milestones": [50.0]}, 100, 1, "fractions of the length"),
        ({"warmup_factor": 0.1}, 100, 1, "warmup_factor needs"),
    ],
)
def test_what_would_change_the_protocol_in_silence_is_refused(
    changes: dict[str, object], images: int, world: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(make_values(**changes), images, Options(), world)


@pytest.mark.parametrize("task", sorted(index("task")))
def test_every_shipped_recipe_can_be_planned(task: str) -> None:
    images = load_task(task).data.expected.get("train", 50000)
    for name in index("backbone"):
        backbone = load_backbone(name)
        if not any(refusal.when.admits(backbone) for refusal in load_task(task).refuse):
            values = resolve_task(task, backbone).values
            assert make_plan(values, images, Options(), 1).batch == values.batch
