"""Exports: a model card that the hub's own reader takes; W&B and MLflow for real where installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting import publish as module
from mae_bench.reporting.publish import model_card, publish

HISTORY = [{"step": 1.0, "loss": 2.0, "lr": 0.1}, {"step": 2.0, "loss": 1.5}, {"step": 2.0, "top1": 50.0, "bad": None}]


def test_the_hub_reads_the_model_card() -> None:
    runs = [record(seed=seed, value=value) for seed, value in enumerate((50.0, 52.0))]
    card = ModelCard(model_card([*runs, record("tiny_coco", value=12.345)]))
    assert card.data.model_name == "vit_t_mae"
    detection, linear = sorted(card.data.eval_results, key=lambda result: result.metric_value)
    assert (linear.task_type, linear.metric_type, linear.metric_value) == ("image-classification", "accuracy", 51.0)
    assert linear.dataset_config == "tiny-linear@1"
    assert linear.metric_args == {"seeds": 2, "std": 1.4142, "recipe_values_nobody_published": 0}
    assert (detection.task_type, detection.metric_type, detection.metric_value) == ("object-detection", "mAP", 12.345)
    assert "`tiny-linear@1`   | `top1`   | 51.00 | 1.41 |   2 |" in card.text


def test_a_hostile_name_is_no_markup() -> None:
    text = "x\n---\n<script>alert(1)</script> `| [a](javascript:b)"
    card = ModelCard(
        model_card([record(task="tiny_linear", data={**record().data.model_dump(), "name": text}, backbone=text)])
    )
    assert card.data.model_name == " ".join(text.split())
    changed = record().model_copy(update={"task": text})
    body = ModelCard(model_card([changed])).text
    assert "<script>" not in body and "](" not in body


@pytest.mark.parametrize(
    ("records", "to", "message"),
    [
        ([record()], "wandbb", r"expected wandb, mlflow, model-card \(did you mean 'wandb'\?\)"),
        ([], "model-card", "no records to publish"),
        ([record(smoke=True, protocol="tiny-linear@1+smoke")], "model-card", "smoke run: it measures nothing"),
        ([record(), record(init="scratch")], "model-card", "these records are of vit_t_mae, vit_t_scratch"),
        ([record(value=None)], "model-card", "the result of tiny_linear is undefined"),
    ],
)  # fmt: skip
def test_refusals(records: list[Any], to: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        publish(records, to)


@pytest.mark.parametrize(
    ("to", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("model-card", "huggingface_hub")]
)
def test_a_missing_package_is_one_line(to: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"{package} is not installed; pip install {package}"):
        publish([record()], to)


def test_a_model_card_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    assert publish([record(), record()], "model-card", path) == [f"wrote {path}"]
    assert path.read_text(encoding="utf-8") == model_card([record()])
    with pytest.raises(UserError, match="exists; choose another --out"):
        publish([record()], "model-card", path)


class Calls:
    """A stand-in for a client: keeps what it is asked to send."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any, **options: Any) -> Calls:
            self.made.append((name, values, options))
            return self

        return call

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(values, options) for made, values, options in self.made if made == name]


def test_wandb_gets_one_run_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, summary = Calls(), dict[str, float]()
    run = SimpleNamespace(log=calls.log, summary=summary, finish=calls.finish)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: calls.init(**options) and run))  # type: ignore[arg-type]
    for _ in range(2):
        assert publish([record(history=HISTORY)], "wandb") == ["wandb: tiny_linear.vit_t_mae.seed0"]
    (_, first), (_, second) = calls.of("init")
    assert first == second and first["id"].isalnum()
    assert first["config"]["protocol"] == "tiny-linear@1" and first["config"]["recipe"] == {"values": {"epochs": 1.0}}
    assert calls.of("log")[:2] == [
        (({"loss": 2.0, "lr": 0.1},), {"step": 1}),
        (({"loss": 1.5, "top1": 50.0},), {"step": 2}),
    ]
    assert summary == {"other": 1.0, "top1": 50.0}
    assert len(calls.of("finish")) == 2


def test_mlflow_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "mlflow", calls)  # type: ignore[arg-type]
    many = {"values": {f"key{i}": "x" * 1000 for i in range(150)}}
    publish([record(history=HISTORY, recipe=many, metrics={"top1": 50.0, "a#b:c": 1.0})], "mlflow")
    params = [values[0] for values, _ in calls.of("log_params")]
    assert [len(part) for part in params] == [100, len(params[1])] and sum(map(len, params)) > 150
    assert all(len(str(value)) <= 500 for part in params for value in part.values())
    assert [options for _, options in calls.of("log_metrics")] == [{"step": 1}, {"step": 2}, {}]
    assert calls.of("log_metrics")[-1][0][0] == {"final/a_b_c": 1.0, "final/top1": 50.0}
    ((document, name), _) = calls.of("log_dict")[0]
    assert name == "record.json" and document["run_id"] == record().run_id


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    publish([record(history=HISTORY)], "wandb")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_reads_back_what_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    publish([record(history=HISTORY)], "mlflow")
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.metrics["final/top1"] == 50.0
    assert run.data.params["recipe.epochs"] == "1.0"
