"""The training run: exact resume, accumulation, averages, and nothing left behind."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import Noise, make_job, make_values, same_state, train, weight_sum
from mmengine.logging import MessageHub, MMLogger
from torch import nn

from mae_bench.engine.averaging import WeightAverage
from mae_bench.errors import UserError
from mae_bench.schema import ClassificationValues, Optimisation

FULL: dict[str, Any] = {"ema": 0.9, "clip_grad": 0.5, "eval_every_epochs": 1, "warmup_steps": 1}


def _stop_at(step: int) -> Any:
    """An evaluation that fails the ``step``-th time, like a machine that goes away."""
    calls = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        calls.append(1)
        if len(calls) == step:
            raise KeyboardInterrupt
        return weight_sum(model)

    return evaluate


@pytest.mark.parametrize("optimizer", ["adamw", "lars", "sgd"])
def test_three_steps_and_three_resumed_equal_six(tmp_path: Path, optimizer: str) -> None:
    values = make_values(**(FULL | {"optimizer": optimizer, "eval_every_epochs": 0, "eval_every_steps": 3}))
    for name in ("straight", "cut"):
        (tmp_path / name).mkdir()
    straight, whole = train(make_job(tmp_path / "straight", values, micro_batch=4))
    cut = make_job(tmp_path / "cut", values, micro_batch=4)
    with pytest.raises(KeyboardInterrupt):
        train(cut, evaluate=_stop_at(1))
    assert [path.name for path in sorted((tmp_path / "cut/checkpoints").iterdir())] == [
        "step_000000002.pt",
        "step_000000003.pt",
    ]
    resumed, rest = train(make_job(tmp_path / "cut", values, micro_batch=4, resume=True, workers=2))
    assert same_state(straight, resumed)
    assert rest == whole
    assert [point["step"] for point in whole.history] == [1, 2, 3, 3, 4, 5, 6, 6]


def test_resuming_a_finished_run_only_evaluates(tmp_path: Path) -> None:
    first, fitted = train(make_job(tmp_path, make_values(**FULL)))
    (model, again) = train(make_job(tmp_path, make_values(**FULL), resume=True), dataset=Noise(broken=0))
    assert same_state(first, model)
    assert again == fitted


def test_resume_without_a_file_starts_anew(tmp_path: Path) -> None:
    first, _ = train(make_job(tmp_path, make_values(), resume=True))
    assert same_state(first, train(make_job(tmp_path, make_values()))[0])


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_accumulation_equals_the_whole_batch(tmp_path: Path, limit: int) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    values = make_values(clip_grad=0.1)
    whole, one = train(make_job(tmp_path / "whole", values), noisy=False)
    parts, several = train(make_job(tmp_path / "parts", values, micro_batch=limit), noisy=False)
    assert (one.effective["accumulation"], several.effective["accumulation"]) == (1, 8 // limit)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert several.history[-2]["loss"] == pytest.approx(one.history[-2]["loss"], rel=1e-5)


def test_workers_change_nothing(tmp_path: Path) -> None:
    models = []
    for workers in (0, 2):
        (tmp_path / str(workers)).mkdir()
        models.append(train(make_job(tmp_path / str(workers), make_values(), workers=workers))[0])
        assert not multiprocessing.active_children()
    assert same_state(*models)


def test_one_step_equals_plain_torch(tmp_path: Path) -> None:
    values = make_values(epochs=0.0, steps=1, batch=20, clip_grad=0.1, optimizer="sgd", weight_decay=0.0)
    seen: list[torch.Tensor] = []

    class Constant(Noise):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.linspace(0, index, 4) / 20, index % 3

    model, _ = train(make_job(tmp_path, values), noisy=False, dataset=Constant())
    torch.manual_seed(0)
    reference = type(model)(noisy=False)
    inputs = torch.stack([torch.linspace(0, index, 4) / 20 for index in range(20)])
    reference(inputs, torch.arange(20) % 3, mode="loss")["loss"].backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9).step()
    seen += [*model.parameters()]
    for a, b in zip(seen, reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_average_is_evaluated_and_kept(tmp_path: Path) -> None:
    values = make_values(ema=0.5, eval_every_epochs=1)
    evaluated: list[dict[str, float]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        evaluated.append(weight_sum(model))
        return evaluated[-1]

    model, fitted = train(make_job(tmp_path, values), evaluate=evaluate)
    assert fitted.last == evaluated[-1] == weight_sum(model)
    (tmp_path / "plain").mkdir()
    plain, _ = train(make_job(tmp_path / "plain", make_values(eval_every_epochs=1)))
    assert weight_sum(plain) != weight_sum(model)
    # Training itself does not see the average.
    state = torch.load(tmp_path / "checkpoints/step_000000006.pt", weights_only=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in plain.state_dict().items())


def test_average_by_hand() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(1.0)
    average = WeightAverage(module, 0.75)
    for value, expected in ((2.0, 1.25), (4.0, 1.9375)):
        module.weight.data.fill_(value)
        average.update()
        with average.applied():
            assert module.weight.item() == expected
        assert module.weight.item() == value
    average.keep()
    assert module.weight.item() == 1.9375
    with pytest.raises(ValueError, match="other parameters"):
        WeightAverage(nn.Linear(1, 1), 0.5).load_state_dict(average.state_dict())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss is nan at step [01], images .*picture 7") as caught:
        train(make_job(tmp_path, make_values()), dataset=Noise(broken=7))
    assert "\n" not in str(caught.value)


def test_best_stands_beside_last(tmp_path: Path) -> None:
    scores = iter([{"sum": 1.0, "val_loss": 3.0}, {"sum": 5.0, "val_loss": 2.0}, {"sum": 4.0, "val_loss": 2.5}])
    _, fitted = train(make_job(tmp_path, make_values(eval_every_epochs=1)), evaluate=lambda model: next(scores))
    assert fitted.last == {"sum": 4.0, "val_loss": 2.5}
    assert fitted.best == {"sum": 5.0, "val_loss": 2.0}
    assert [point for point in fitted.history if "sum" in point][1] == {"step": 4, "sum": 5.0, "val_loss": 2.0}


def test_without_an_evaluation_the_loss_is_the_metric(tmp_path: Path) -> None:
    _, fitted = train(make_job(tmp_path, make_values()), evaluate=None)
    assert fitted.last == {"loss": fitted.history[-1]["loss"]}


def test_a_metric_that_is_not_measured_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metric .sum. is none of what is measured"):
        train(make_job(tmp_path, make_values()), evaluate=lambda model: {"top1": 1.0})


def test_runs_leave_nothing_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    instances = [set(kind._instance_dict) for kind in (MMLogger, MessageHub)]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        train(make_job(tmp_path / name, make_values()))
        log = (tmp_path / name / "log.txt").read_text()
        assert "step 6/6  loss" in log
        assert "evaluation after step 6" in log
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["checkpoints", "log.txt"]
    assert [set(kind._instance_dict) for kind in (MMLogger, MessageHub)] == instances
    assert capfd.readouterr() == ("", "")


def test_a_cpu_run_says_that_it_is_in_fp32(tmp_path: Path) -> None:
    job = make_job(tmp_path, make_values(precision="bf16"))
    _, fitted = train(job)
    assert fitted.effective["precision"] == "fp32"
    assert job.notes == ["precision bf16 is the protocol's on a GPU; this run computed in fp32 on a CPU"]


BASE = {"epochs": 3, "eval_every_epochs": 1, "min_lr": 1e-3, "warmup_epochs": 1}
# A change of each value that every engine shares, and what has to go with it.
CHANGES: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 4},
    "steps": {"epochs": 0.0, "steps": 7},
    "eval_every_epochs": {"eval_every_epochs": 2},
    "eval_every_steps": {"eval_every_epochs": 0.0, "eval_every_steps": 3},
    "batch": {"batch": 10},
    "base_lr": {"base_lr": 0.02},
    "lr_per": {"lr_per": 4},
    "optimizer": {"optimizer": "sgd"},
    "betas": {"betas": [0.5, 0.6]},
    "momentum": {"optimizer": "sgd", "momentum": 0.1},
    "weight_decay": {"weight_decay": 0.9},
    "no_decay": {"no_decay": []},
    "layer_decay": {"layer_decay": 0.5},
    "schedule": {"schedule": "poly"},
    "warmup_epochs": {"warmup_epochs": 2},
    "warmup_steps": {"warmup_epochs": 0.0, "warmup_steps": 3},
    "warmup_factor": {"warmup_factor": 0.5},
    "min_lr": {"min_lr": 5e-3},
    "min_lr_scaled": {"layer_decay": 0.5, "min_lr_scaled": False},
    "poly_power": {"schedule": "poly", "poly_power": 3.0},
    "milestones": {"schedule": "steps", "min_lr": 0.0, "milestones": [0.4]},
    "ema": {"ema": 0.3},
    "clip_grad": {"clip_grad": 0.01},
    "precision": {"precision": "fp16"},
}
# What a change is compared with, where it needs company to be read at all.
COMPANY: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd"},
    "min_lr_scaled": {"layer_decay": 0.5},
    "poly_power": {"schedule": "poly"},
    "milestones": {"schedule": "steps", "min_lr": 0.0, "milestones": [0.9]},
}


def test_every_shared_value_is_tried() -> None:
    # drop_path shapes the encoder and is tried with it; on_nonfinite changes no sound run (test_engine_recovery).
    assert set(CHANGES) | {"drop_path", "on_nonfinite"} == set(Optimisation.model_fields)


@pytest.mark.parametrize("key", CHANGES)
def test_every_shared_value_changes_the_run(tmp_path: Path, key: str) -> None:
    results = []
    for number, changes in enumerate((COMPANY.get(key, {}), CHANGES[key])):
        values: ClassificationValues = make_values(**(BASE | changes))
        folder = tmp_path / str(number)
        folder.mkdir()
        job = make_job(folder, values)
        model, fitted = train(job)
        results.append((weight_sum(model), fitted.history, job.notes))
    assert results[0] != results[1]
