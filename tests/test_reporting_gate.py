"""The gate closes on what falls, on what is missing and on what is unclear, and never lowers a baseline unsaid."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.recipes import load_task
from mae_bench.reporting.gate import (
    BASELINES,
    Baseline,
    Result,
    annotation,
    check,
    failed,
    gate,
    read_baselines,
    renewed,
    report,
)
from mae_bench.reporting.record import write_record
from mae_bench.reporting.store import PRIMARY, frame, load_frame

BASE: dict[str, Any] = {
    "task": "tiny_linear", "protocol": "tiny-linear@1", "backbone": "vit_t_mae", "metric": "top1", "value": 50.0,
    "tolerance": 0.5,
}  # fmt: skip


def baseline(**changes: Any) -> Baseline:
    return Baseline.model_validate(BASE | changes)


def result(*records: Any, **changes: Any) -> Result:
    one = baseline(**changes)
    (found,) = check([one], frame(records, one.metric))
    return found


def status(*records: Any, **changes: Any) -> str:
    return result(*records, **changes).status


@pytest.mark.parametrize(
    ("value", "expected"),
    [(50.0, "ok"), (49.5, "ok"), (49.49, "fell"), (50.5, "ok"), (50.51, "rose"), (None, "unclear")],
)
def test_a_run_against_its_tolerance(value: float | None, expected: str) -> None:
    assert status(record(value=value)) == expected


def test_a_loss_falls_when_it_rises() -> None:
    worse = record(metrics={"top1": 50.0, "val_loss": 1.2})
    assert status(worse, metric="val_loss", value=1.0, tolerance=0.1, higher_is_better=False) == "fell"
    assert status(worse, metric="val_loss", value=1.4, tolerance=0.1, higher_is_better=False) == "rose"
    assert status(worse, metric="val_loss", value=0.3, tolerance=0.1) == "fell"  # four times the loss, by hand
    assert status(worse, metric="val_loss", value=1.4, tolerance=0.1) == "rose"


@pytest.mark.parametrize("value", [950.0, -1.0])
def test_an_impossible_value_is_unclear(value: float) -> None:
    assert status(record(value=value)) == "unclear"
    assert "in a run, outside [0, 100]" in result(record(value=value)).text
    assert renewed([], frame([record(value=value)])) == (
        [], ["left out tiny_linear vit_t_mae top1 (tiny-linear@1): impossible"]
    )  # fmt: skip


def test_a_stale_run_is_missing_with_its_reason() -> None:
    runs = frame([record(), record(seed=1)]).assign(stale=["the task recipe has changed", ""], other_code=False)
    (found,) = check([baseline(seeds=[0, 1])], runs)
    assert found.status == "missing"
    assert found.text.endswith("no run of seed 0 that counts (stale: the task recipe has changed)")
    (found,) = check([baseline()], runs.iloc[:1])
    assert found.text.endswith("no run that counts (stale: the task recipe has changed)")
    assert renewed([baseline()], runs.iloc[:1])[0] == [baseline()]


def test_a_newer_run_without_the_metric_gives_no_place_to_an_older_one() -> None:
    newer = record(run_id="newer", created="2026-02-01T00:00:00Z", metrics={"top1": 50.0})
    found = result(record(), newer, metric="other", value=1.0)
    assert found.status == "missing" and found.text.endswith("that counts (runs without this metric)")


def test_an_evaluation_of_a_given_model_is_no_training_run() -> None:
    """``--eval-only`` with anybody's weights would have kept any baseline without seeds."""
    given = {"kind": "given", "sha256": "1" * 64}
    evaluated = record(eval_only=True, weights=given)
    assert status(evaluated) == "missing"
    assert result(evaluated).text.endswith("that counts (evaluations of trained models)")
    assert status(evaluated, record(run_id="trained")) == "ok"
    assert status(evaluated, eval_only=True) == "ok" and "given 11111111" in result(evaluated, eval_only=True).text
    other = record(eval_only=True, run_id="other", weights=given | {"sha256": "2" * 64})
    assert status(evaluated, other, eval_only=True) == "unclear"
    (one,), _ = renewed([], frame([evaluated]))
    assert one.eval_only and one.seeds == []


def test_runs_on_different_data_are_unclear() -> None:
    other = record(seed=1, data=record().data.model_dump() | {"fingerprint": "9" * 64})
    assert "runs on different data" in result(record(), other).text
    assert renewed([], frame([record(), other]))[0] == []


def test_the_mean_over_the_baselines_seeds_counts() -> None:
    runs = [record(seed=seed, value=value) for seed, value in enumerate((50.0, 50.4, 40.0))]
    assert status(*runs) == "fell"
    assert status(*runs, seeds=[0, 1]) == "ok"
    assert status(*runs, seeds=[0, 7]) == "missing"


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": "tiny-linear@1+set:1", "overridden": ["epochs"]},
        {"task": "tiny_coco"},
        {"init": "scratch"},
        {"smoke": True, "protocol": "tiny-linear@1+smoke"},
    ],
)
def test_only_the_same_protocol_task_and_backbone_count(changes: dict[str, Any]) -> None:
    assert status(record(**changes)) == "missing"


def test_runs_of_two_weight_files_are_unclear() -> None:
    given = [record(run_id=digit, weights={"kind": "given", "sha256": digit * 64}) for digit in "67"]
    assert status(given[0]) == "ok"
    assert status(*given) == "unclear"


def test_what_closes_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    entries = [
        baseline(),
        baseline(task="gone"),
        baseline(metric="other", value=5.0),
        baseline(metric="other", value=0.0, backbone="b"),
    ]
    results = check(entries, frame([record(value=51.0), record(backbone="b", run_id="b")], "top1", "other"))
    assert [result.status for result in results] == ["rose", "missing", "fell", "rose"]
    assert [result.status for result in failed(results)] == ["missing", "fell"]
    assert [result.status for result in failed(results, allow_missing=True)] == ["fell"]
    *lines, summary = report(results).splitlines()
    assert len(lines) == 4 and "raise the baseline with --write" in lines[0]
    assert summary == "FAILED: 4 baselines, 2 rose, 1 fell, 1 missing"
    assert report(results[:1]).splitlines()[-1] == "passed: 1 baselines, 1 rose"


def test_annotations_of_github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    text = report(check([baseline(), baseline(task="gone")], frame([record(value=60.0)])))
    assert "::error title=mae_bench gate::missing: gone vit_t_mae top1 (tiny-linear@1): no run\n" in text
    assert "::notice title=mae_bench gate::rose: tiny_linear" in text
    assert annotation("error", "50 %\r\n::warning::x") == "::error title=mae_bench gate::50 %25%0D%0A::warning::x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "valid array"),
        ("[", "JSON"),
        ("[]", "lists no baseline, so nothing could ever fail"),
        (json.dumps([BASE, BASE]), "stands there twice"),
        (json.dumps([{**BASE, "tolerence": 1}]), "unknown key '0.tolerence'"),
        (json.dumps([{**BASE, "tolerance": -1}]), "0.tolerance: "),
        (json.dumps([{**BASE, "higher_is_better": False}]), "higher is better for top1; leave the key out"),
        (json.dumps([{**BASE, "metric": "val_loss", "higher_is_better": True}]), "lower is better for val_loss"),
        (json.dumps([{**BASE, "value": "50"}]), "0.value: "),
        (json.dumps([{**BASE, "task": "a\n::error::b"}]), "0.task: "),
        (json.dumps([{key: value for key, value in BASE.items() if key != "value"}]), "key '0.value' is missing"),
        (json.dumps([BASE]).replace("50.0", "NaN"), "0.value: "),
    ],
)
def test_a_faulty_file_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_baselines(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`gate --write` makes it"):
        read_baselines(tmp_path / "none.json")


def test_write_says_what_it_changes() -> None:
    runs = [record(seed=seed, value=value) for seed, value in enumerate((48.0, 49.0, 50.0))]
    runs += [record(init="scratch", seed=seed, value=value) for seed, value in enumerate((30.0, 30.2))]
    new, lines = renewed([baseline(tolerance=3.0), baseline(task="gone")], frame(runs, PRIMARY, "top1"))
    assert lines == [
        "LOWERED  tiny_linear vit_t_mae top1 (tiny-linear@1): 50 -> 49",
        "kept     gone vit_t_mae top1 (tiny-linear@1): no run",
        "new      tiny_linear vit_t_scratch top1 (tiny-linear@1): 30.1 ± 0.5 (n=2)",
    ]
    assert new[0] == baseline(value=49.0, tolerance=3.0)
    assert new[1] == baseline(task="gone")
    assert (new[2].value, new[2].tolerance, new[2].seeds) == (30.1, 0.5, [0, 1])
    assert renewed(new, frame(runs))[1] == ["kept     gone vit_t_mae top1 (tiny-linear@1): no run"]


def test_a_new_tolerance_is_twice_the_spread() -> None:
    runs = [record(seed=seed, value=value) for seed, value in enumerate((48.0, 49.0, 50.0))]
    ((one,), _) = renewed([], frame(runs))
    assert (one.value, one.tolerance, one.higher_is_better) == (49.0, 2.0, True)


def runs_below(folder: Path) -> Callable[[Sequence[str]], pd.DataFrame]:
    return lambda metrics: load_frame([folder], *metrics)


def test_write_then_check_then_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    path, records = tmp_path / "results" / "baselines.json", tmp_path / "runs"
    write_record(record(), records)
    text, code = gate(path, runs_below(records), write=True)
    assert code == 0 and f"wrote {path}: 1 baselines" in text
    line = "ok       tiny_linear vit_t_mae top1 (tiny-linear@1): 50.00 (n=1), baseline 50 ± 0.5, change +0.00"
    assert gate(path, runs_below(records)) == (f"{line}\npassed: 1 baselines, 1 ok\n", 0)
    write_record(record(value=40.0), tmp_path / "worse")
    assert gate(path, runs_below(tmp_path / "worse"))[1] == 1
    (tmp_path / "nothing").mkdir()
    nothing = runs_below(tmp_path / "nothing")
    assert gate(path, nothing)[1] == 1
    assert gate(path, nothing, allow_missing=True)[1] == 0
    with pytest.raises(UserError, match="no baseline to write"):
        gate(tmp_path / "new.json", nothing, write=True)


def test_the_examples_of_the_guide() -> None:
    guide = (Path(__file__).resolve().parent.parent / "docs" / "gate.md").read_text(encoding="utf-8")
    ((_, example),) = re.findall(r"```(json)\n(.*?)```", guide, re.DOTALL)
    (one,) = BASELINES.validate_json(example)
    task = load_task(one.task)
    assert (one.protocol, one.metric) == (task.protocol, task.metric)
    ((_, workflow),) = re.findall(r"```(yaml)\n(.*?)```", guide, re.DOTALL)
    steps = yaml.safe_load(workflow)["jobs"]["gate"]["steps"]
    commands = [shlex.split(step["run"]) for step in steps if "run" in step]
    assert [words[:4] for words in commands[1:]] == [["python", "-m", "mae_bench", verb] for verb in ("run", "gate")]
