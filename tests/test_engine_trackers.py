"""Curves for TensorBoard and Weights & Biases: written where asked for, read back, and never twice."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_toys import Noise, make_job, make_values, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mae_bench.engine import trackers
from mae_bench.errors import UserError

VALUES: dict[str, Any] = {"eval_every_epochs": 1, "clip_grad": 0.5}


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard itself reads from the folder; no step stands there twice."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    read = {}
    for name in events.Tags()["scalars"]:
        points = events.Scalars(name)
        read[name] = {point.step: point.value for point in points}
        assert len(read[name]) == len(points), name
    return read


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    train(make_job(tmp_path, make_values(**VALUES)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "log.txt"]


def test_tensorboard_reads_the_curves(tmp_path: Path) -> None:
    _, fitted = train(make_job(tmp_path, make_values(**VALUES), log=("tensorboard",)))
    read = curves(tmp_path)
    assert set(read) == {"loss", "lr", "images_per_second", "waiting_share", "gradient_norm", "sum"}
    for name in ("loss", "lr", "sum"):
        history = {int(point["step"]): point[name] for point in fitted.history if name in point}
        assert read[name] == pytest.approx(history, rel=1e-6)
    assert all(rate > 0 for rate in read["images_per_second"].values())
    assert all(0 <= share <= 1 for share in read["waiting_share"].values())


def test_a_resumed_run_goes_on_with_its_curve(tmp_path: Path) -> None:
    """And a step that is gone through again stands there once: cut at step 4, the run goes on from step 3."""
    values = make_values(**VALUES)
    for name in ("straight", "cut"):
        (tmp_path / name).mkdir()
    train(make_job(tmp_path / "straight", values, log=("tensorboard",)))
    calls: list[int] = []

    def failing(model: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"sum": 0.0}

    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path / "cut", values, log=("tensorboard",)), evaluate=failing)
    (tmp_path / "cut/checkpoints/step_000000004.pt").unlink()
    train(make_job(tmp_path / "cut", values, resume=True, log=("tensorboard",)))
    assert len(list((tmp_path / "cut").glob("events.*"))) == 2
    assert curves(tmp_path / "cut")["loss"] == curves(tmp_path / "straight")["loss"]


def test_curves_of_a_run_that_goes_back_hold_what_counts(tmp_path: Path) -> None:
    values = make_values(batch=2, on_nonfinite="rewind")
    _, fitted = train(make_job(tmp_path, values, log=("tensorboard",)), dataset=Noise(broken=7))
    steps = [point["step"] for point in fitted.history if "lr" in point]
    assert len(steps) == 27
    assert list(curves(tmp_path)["loss"]) == steps


@pytest.mark.parametrize(
    ("name", "message"),
    [("tensorbord", r"expected tensorboard or wandb \(did you mean 'tensorboard'\?\)"), ("wandb", "pip install wandb")],
)
def test_a_tracker_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(trackers, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=message):
        train(make_job(tmp_path, make_values(), log=(name,)))


def test_wandb_is_given_one_run_and_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the client, which sends what it is given elsewhere."""
    calls: list[tuple[str, Any]] = []

    def record(name: str) -> Any:
        return lambda *values, **options: calls.append((name, values or options)) or run

    run = SimpleNamespace(log=record("log"), define_metric=record("define_metric"), finish=record("finish"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=record("init"), __spec__=object()))
    for _ in range(2):
        train(make_job(tmp_path, make_values(), resume=True, log=("wandb",)))
    starts = [what for name, what in calls if name == "init"]
    assert starts[0] == starts[1]
    assert starts[0]["resume"] == "allow"
    assert starts[0]["config"]["base_lr"] == 0.01
    points = [what[0] for name, what in calls if name == "log"]
    assert [point["step"] for point in points if "loss" in point] == [1, 2, 3, 4, 5, 6]
    assert [name for name, _ in calls].count("finish") == 2
