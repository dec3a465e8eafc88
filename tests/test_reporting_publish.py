"""Exports: a model card that the hub's own reader takes; W&B and MLflow for real where installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from huggingface_hub import ModelCard
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting import publish as module
from mae_bench.reporting.publish import model_card, publish
from mae_bench.reporting.record import Record, write_record
from mae_bench.reporting.store import load_frame

HISTORY = [{"step": 1.0, "loss": 2.0, "lr": 0.1}, {"step": 2.0, "loss": 1.5}, {"step": 2.0, "top1": 50.0, "bad": None}]


def frame(folder: Path, *records: Record) -> pd.DataFrame:
    for number, one in enumerate(records):
        write_record(one, folder / "records", f"{number}.json")
    (folder / "records").mkdir(exist_ok=True)
    return load_frame([folder / "records"])


def test_the_hub_reads_the_model_card(tmp_path: Path) -> None:
    runs = [record(seed=seed, value=value) for seed, value in enumerate((50.0, 52.0))]
    card = ModelCard(model_card(frame(tmp_path, *runs, record("tiny_coco", value=12.345))))
    assert card.data.model_name == "vit_t_mae"
    detection, linear = sorted(card.data.eval_results, key=lambda result: result.metric_value)
    assert (linear.task_type, linear.metric_type, linear.metric_value) == ("image-classification", "accuracy", 51.0)
    assert linear.dataset_config == "tiny-linear@1"
    assert linear.metric_args == {"seeds": 2, "std": 1.4142, "recipe_values_nobody_published": 0}
    assert (detection.task_type, detection.metric_type, detection.metric_value) == ("object-detection", "mAP", 12.345)
    assert "`tiny-linear@1`   | `top1`   | 51.00 | 1.41 |   2 |" in card.text


DATA = record().data.model_dump()


def test_a_model_card_counts_what_a_table_counts(tmp_path: Path) -> None:
    """No stale run; the data of the runs that count; and the marks of a table with what they mean."""
    foreign = DATA | {"name": "foreign", "fingerprint": "9" * 64}
    runs = frame(
        tmp_path,
        record(value=50.0, ours=["epochs"]),
        record(seed=1, value=99.0),
        record(run_id="set", overridden=["epochs"], protocol="tiny-linear@1+set:1", data=foreign),
    )
    reasons = runs["seed"].map({0: "", 1: "the task recipe has changed"})
    card = ModelCard(model_card(runs.assign(stale=reasons, other_code=True)))
    named = {result.dataset_config: result.dataset_name for result in card.data.eval_results}
    assert named == {"tiny-linear@1": "shapes", "tiny-linear@1+set:1": "foreign"}
    assert {result.metric_value for result in card.data.eval_results} == {50.0}
    assert r"50.00\*§ |" in card.text and "- § made by other code" in card.text
    assert "1 run left out (stale: the task recipe has changed" in card.text


def test_a_model_card_of_an_evaluated_file_says_so(tmp_path: Path) -> None:
    evaluated = record(eval_only=True, weights={"kind": "given", "sha256": "1" * 64})
    card = ModelCard(model_card(frame(tmp_path, evaluated)))
    assert card.data.model_name == "vit_t_mae given 11111111"
    assert card.data.eval_results[0].metric_args["trained_here"] is False
    assert "50.00† |" in card.text and "- † a trained model evaluated" in card.text


def test_a_hostile_name_is_no_markup(tmp_path: Path) -> None:
    text = "x\n---\n<script>alert(1)</script> `| [a](javascript:b)"
    card = ModelCard(model_card(frame(tmp_path / "a", record(data={**DATA, "name": text}, backbone=text))))
    assert card.data.model_name == " ".join(text.split())
    changed = record().model_copy(update={"task": text})
    body = ModelCard(model_card(frame(tmp_path / "b", changed))).text
    assert "<script>" not in body and "](" not in body


@pytest.mark.parametrize(
    ("records", "to", "message"),
    [
        ([record()], "wandbb", r"expected wandb, mlflow, model-card \(did you mean 'wandb'\?\)"),
        ([], "model-card", "no records to publish"),
        ([record(smoke=True, protocol="tiny-linear@1+smoke")], "model-card", "smoke run: it measures nothing"),
        ([record(), record(init="scratch")], "model-card", "these records are of vit_t_mae, vit_t_scratch"),
        ([record(value=None)], "model-card", "the result of tiny_linear is undefined"),
        ([record(value=950.0)], "model-card", r"the result of tiny_linear is outside \[0, 100\]"),
        ([record(), record(seed=1, data=DATA | {"fingerprint": "9" * 64})], "model-card", "of runs on different data"),
    ],
)  # fmt: skip
def test_refusals(records: list[Any], to: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        publish(frame(tmp_path, *records), to)


@pytest.mark.parametrize(
    ("to", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("model-card", "huggingface_hub")]
)
def test_a_missing_package_is_one_line(to: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"{package} is not installed; pip install {package}"):
        publish(frame(tmp_path, record()), to)


def test_a_model_card_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "card.md"
    runs = frame(tmp_path, record(), record())
    assert publish(runs, "model-card", path) == [f"wrote {path}"]
    assert path.read_text(encoding="utf-8") == model_card(runs)
    with pytest.raises(UserError, match="exists; choose another --out"):
        publish(runs, "model-card", path)


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


def test_wandb_gets_one_run_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, summary = Calls(), dict[str, float]()
    run = SimpleNamespace(log=calls.log, summary=summary, finish=calls.finish)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: calls.init(**options) and run))  # type: ignore[arg-type]
    runs = frame(tmp_path, record(history=HISTORY))
    for _ in range(2):
        assert publish(runs, "wandb") == ["wandb: tiny_linear.vit_t_mae.seed0"]
    (_, first), (_, second) = calls.of("init")
    assert first == second and first["id"].isalnum()
    assert first["config"]["protocol"] == "tiny-linear@1" and first["config"]["recipe"] == {"values": {"epochs": 1.0}}
    assert calls.of("log")[:2] == [
        (({"loss": 2.0, "lr": 0.1},), {"step": 1}),
        (({"loss": 1.5, "top1": 50.0},), {"step": 2}),
    ]
    assert summary == {"other": 1.0, "top1": 50.0}
    assert len(calls.of("finish")) == 2


def test_mlflow_gets_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "mlflow", calls)  # type: ignore[arg-type]
    many = {"values": {f"key{i}": "x" * 1000 for i in range(150)}}
    one = record(history=HISTORY, recipe=many, metrics={"top1": 50.0, "a#b:c": 1.0})
    publish(frame(tmp_path, one), "mlflow")
    params = [values[0] for values, _ in calls.of("log_params")]
    assert [len(part) for part in params] == [100, len(params[1])] and sum(map(len, params)) > 150
    assert all(len(str(value)) <= 500 for part in params for value in part.values())
    assert [options for _, options in calls.of("log_metrics")] == [{"step": 1}, {"step": 2}, {}]
    assert calls.of("log_metrics")[-1][0][0] == {"final/a_b_c": 1.0, "final/top1": 50.0}
    ((document, name), _) = calls.of("log_dict")[0]
    assert name == "record.json" and document["run_id"] == record().run_id


@pytest.mark.parametrize(
    ("to", "call", "fault"), [("wandb", "init", OSError("no network\n")), ("mlflow", "start_run", RuntimeError("403"))]
)
def test_a_clients_own_error_is_one_line(
    to: str, call: str, fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []

    def refuse(*_: object, **options: object) -> Calls:
        if sent:
            raise fault
        sent.append(options)
        return Calls()

    client = Calls()
    client.__dict__[call] = refuse
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(Calls, "summary", {}, raising=False)
    monkeypatch.setitem(sys.modules, to, client)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        publish(frame(tmp_path, *(record(seed=seed) for seed in range(3))), to)
    said = str(caught.value)
    assert said.startswith(
        f"--to {to}: {type(fault).__name__}: {str(fault).strip()}; sent 1 of 3, name the others, from"
    )
    assert "seed1'" in said and said.isprintable()


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    publish(frame(tmp_path, record(history=HISTORY)), "wandb")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_reads_back_what_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    publish(frame(tmp_path, record(history=HISTORY)), "mlflow")
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.metrics["final/top1"] == 50.0
    assert run.data.params["recipe.epochs"] == "1.0"
