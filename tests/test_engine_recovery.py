"""Losses, gradients and weights that are not finite: what stops a run, and what it goes on without."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import IMAGES, Model, Noise, collate, make_job, make_values, plan_for, same_state, train, weight_sum
from torch import nn

from mae_bench.engine import loop, onednn, recovery
from mae_bench.engine.job import Job
from mae_bench.engine.optim import build_optimizer, parameter_groups
from mae_bench.engine.samplers import SeededDataset, StepSampler
from mae_bench.engine.schedules import apply_lr
from mae_bench.engine.seeds import seed_step
from mae_bench.errors import UserError

BROKEN = 7
# Three epochs of ten steps: a picture is met at most once an epoch, and never in two steps that follow each other.
REWIND: dict[str, Any] = {"on_nonfinite": "rewind", "batch": 2, "clip_grad": 0.5, "ema": 0.9, "warmup_steps": 2}


def steps_with(job: Job, index: int) -> list[int]:
    """Steps that see a picture."""
    plan = plan_for(job)
    sampler = StepSampler(IMAGES, plan, job.seed)
    steps = range(plan.steps)
    return [step for step in steps if any(key[1] == index for key in sampler.keys(step, 0))]


def job_in(folder: Path, name: str, **options: Any) -> Job:
    (folder / name).mkdir(exist_ok=True)
    values = make_values(**(REWIND | options.pop("values", {})))
    return make_job(folder / name, values, **options)


def by_hand(job: Job, skipped: list[int]) -> Model:
    """The same training without mmengine, files or accumulation, on sound pictures."""
    values, plan = job.task.values, plan_for(job)
    torch.manual_seed(0)
    model = Model(noisy=False)
    onednn.accelerate(model)
    optimizer = build_optimizer(parameter_groups(model, values, encoder_prefix="", depth=4), values)
    pictures, sampler = SeededDataset(Noise(), job.seed), StepSampler(IMAGES, plan, job.seed)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(plan.steps):
        if step in skipped:
            continue
        apply_lr(optimizer, step, values, plan)
        seed_step(job.seed, step, 0)
        model(**collate([pictures[key] for key in sampler.keys(step, 0)]), mode="loss")["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), values.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1 - values.ema)
    for mean, parameter in zip(average, model.parameters(), strict=True):
        parameter.data.copy_(mean)
    return model


@pytest.mark.parametrize("checkpoints", [50, 1])
def test_steps_of_a_broken_picture_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: int
) -> None:
    """Wherever the file lies that the run goes back to; the first one is the initial state."""
    monkeypatch.setattr(loop, "CHECKPOINTS", checkpoints)
    job = job_in(tmp_path, "run", workers=1)
    meeting = steps_with(job, BROKEN)
    assert len(meeting) == 3
    model, fitted = train(job, noisy=False, dataset=Noise(BROKEN))
    assert same_state(model, by_hand(job, meeting))
    assert fitted.effective["skipped_steps"] == meeting
    assert [point["step"] for point in fitted.history if "lr" in point] == [
        step + 1 for step in range(30) if step not in meeting
    ]
    (said,) = job.notes
    assert said.startswith(
        f"3 steps left out after a loss that was not finite: step {meeting[0]} (loss is nan, images "
    )
    assert said.count(f"picture {BROKEN}") == 3


def test_a_sound_run_is_the_same_under_both_rules(tmp_path: Path) -> None:
    stop, one = train(job_in(tmp_path, "stop", values={"on_nonfinite": "stop"}))
    rewind, two = train(job_in(tmp_path, "rewind"))
    assert same_state(stop, rewind)
    assert two.effective.pop("skipped_steps") == []
    assert one == two


def test_a_resumed_run_leaves_out_the_same_steps(tmp_path: Path) -> None:
    """And does not look at their pictures again."""
    whole, fitted = train(job_in(tmp_path, "whole", values={"eval_every_steps": 25}), dataset=Noise(BROKEN))
    *_, last = steps_with(job_in(tmp_path, "cut"), BROKEN)

    def cut(model: nn.Module) -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(job_in(tmp_path, "cut", values={"eval_every_steps": 25}), dataset=Noise(BROKEN), evaluate=cut)

    class Watched(Noise):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            assert index != BROKEN or last >= 25
            return super().__getitem__(index)

    job = job_in(tmp_path, "cut", values={"eval_every_steps": 25}, resume=True)
    resumed, rest = train(job, dataset=Watched(BROKEN))
    assert same_state(whole, resumed)
    assert rest == fitted
    assert job.notes[0].startswith("3 steps left out")


class Steep(Model):
    """A finite loss with an infinite gradient, at the picture whose label is 5."""

    def forward(self, inputs: torch.Tensor, data_samples: Any = None, mode: str = "tensor") -> Any:
        if mode != "loss":
            return super().forward(inputs, data_samples, mode)
        steep = (data_samples == 5).any()
        losses = super().forward(inputs, data_samples.clamp(max=2), mode)
        root = (self.blocks[0].bias[:1] * 0).sqrt().sum()  # 0, with the derivative 0 * inf
        return {"loss": losses["loss"] + root} if steep else losses


class Labelled(Noise):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture, label = super().__getitem__(index)
        return picture, 5 if index == BROKEN else label


def test_a_gradient_that_is_not_finite_counts_as_well(tmp_path: Path) -> None:
    job = job_in(tmp_path, "rewind", values={"clip_grad": 0.0})
    _, fitted = train(job, dataset=Labelled(), kind=Steep)
    assert fitted.effective["skipped_steps"] == steps_with(job, BROKEN)
    assert "(gradient norm is nan, images picture " in job.notes[0]
    stop = job_in(tmp_path, "stop", values={"on_nonfinite": "stop"})
    first = steps_with(job, BROKEN)[0]
    with pytest.raises(UserError, match=f"the gradient norm is nan at step {first}, images .*picture {BROKEN}"):
        train(stop, dataset=Labelled(), kind=Steep)


class Rotten(Model):
    """A parameter that no loss sees breaks, once, at a picture whose label is 5."""

    def __init__(self, noisy: bool = True) -> None:
        super().__init__(noisy)
        self.spare = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: torch.Tensor, data_samples: Any = None, mode: str = "tensor") -> Any:
        if mode == "loss" and bool((data_samples == 5).any()):
            self.spare.data[1] = math.inf
        return super().forward(inputs, data_samples.clamp(max=2), mode)


def test_weights_that_are_not_finite_are_neither_saved_nor_evaluated(tmp_path: Path) -> None:
    job = job_in(tmp_path, "rewind")
    model, fitted = train(job, dataset=Labelled(), kind=Rotten)
    assert fitted.effective["skipped_steps"] == steps_with(job, BROKEN)
    assert "(weights of spare are not finite)" in job.notes[0]
    assert torch.isfinite(model.spare).all()
    stop = job_in(tmp_path, "stop", values={"on_nonfinite": "stop"})
    first = steps_with(job, BROKEN)[0]
    with pytest.raises(UserError, match=f"the weights of spare are not finite at step {first}; "):
        train(stop, dataset=Labelled(), kind=Rotten)
    assert not (tmp_path / f"stop/checkpoints/step_{first + 1:09}.pt").exists()


class Overflowing(Noise):
    """From a picture on, nothing is finite: as with weights that have diverged."""

    seen = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture, label = super().__getitem__(index)
        self.seen += 1
        return (picture if self.seen <= 9 else picture * math.nan), label


def test_it_gives_up_where_leaving_out_does_not_help(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"loss is nan at step 5, .*; leaving out step 4 has not helped"):
        train(job_in(tmp_path, "run"), dataset=Overflowing())
    with pytest.raises(UserError, match=r"loss is nan at step 1, .*; leaving out step 0 has not helped"):
        train(job_in(tmp_path, "all"), dataset=type("All", (Overflowing,), {"seen": 99})())


def test_it_gives_up_after_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_REWINDS", 2)
    job = job_in(tmp_path, "run")
    last = steps_with(job, BROKEN)[2]
    with pytest.raises(UserError, match=f"loss is nan at step {last}, .*; 2 steps have been left out before it"):
        train(job, dataset=Noise(BROKEN))


def test_many_images_are_counted_not_named(tmp_path: Path) -> None:
    job = make_job(tmp_path, make_values(batch=20, on_nonfinite="stop"))
    with pytest.raises(UserError, match=r"images picture \d+(, picture \d+){7} and 12 more; lower base_lr"):
        train(job, dataset=Noise(BROKEN))


def test_the_last_step_may_be_left_out(tmp_path: Path) -> None:
    job = job_in(tmp_path, "run", values={"epochs": 0.0, "steps": steps_with(job_in(tmp_path, "run"), BROKEN)[0] + 1})
    _, fitted = train(job, dataset=Noise(BROKEN), evaluate=weight_sum)
    assert fitted.effective["skipped_steps"] == [job.task.values.steps - 1]
    assert fitted.history[-1].keys() == {"step", "sum"}
