"""Take records to where a team keeps its results: a W&B run, an MLflow run, or a model card for the Hugging Face hub.

A record stays the one source: what is sent here holds its run id, protocol and hashes, so that it can be traced back.
Project, account and whether anything goes over the network are their own settings: ``WANDB_PROJECT``,
``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from pydantic import JsonValue

from mae_bench.errors import UserError, nearest
from mae_bench.reporting import shown
from mae_bench.reporting.cells import cells, rows, select
from mae_bench.reporting.files import write_whole
from mae_bench.reporting.grid import DASH, Cell, Column, Row, Table
from mae_bench.reporting.record import Record, flat, one_line, read_record
from mae_bench.reporting.render import render
from mae_bench.reporting.shown import Shown
from mae_bench.reporting.statistics import impossible

Sink = Literal["wandb", "mlflow", "model-card"]
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "model-card": "huggingface_hub"}
# The hub's names of the pipelines' tasks and of their primary metrics.
HUB_TASKS = {
    "classification": "image-classification",
    "detection": "object-detection",
    "segmentation": "image-segmentation",
}
HUB_METRICS = {"top1": "accuracy", "mIoU": "mean_iou", "box_AP": "mAP"}
MLFLOW_BATCH, MLFLOW_TEXT = 100, 500  # MLflow's limits: values a call, characters a parameter


def publish(runs: pd.DataFrame, to: str, out: Path | None = None) -> list[str]:
    """Send records to a sink; one line per thing that was made.

    Args:
        runs: from `store.load_frame`, judged by `staleness.judge`. A model card counts those that a table counts.
        to: a `Sink`.
        out: the model card's file, which must not exist (default: ``MODEL_CARD.md``).

    Raises:
        UserError: an unknown sink, one whose package is missing, no record, a smoke run, or records of several models
            for one model card.
    """
    if to not in get_args(Sink):
        raise UserError(f"--to {to}: expected {', '.join(get_args(Sink))}{nearest(to, get_args(Sink))}")
    if find_spec(PACKAGES[to]) is None:
        raise UserError(f"--to {to}: {PACKAGES[to]} is not installed; pip install {PACKAGES[to]}")
    if runs.empty:
        raise UserError("no records to publish: name record files or folders of runs")
    for run_id in runs.loc[runs["smoke"], "run_id"]:
        raise UserError(one_line(f"run '{run_id}' is a smoke run: it measures nothing and is not published"))
    if to == "model-card":
        return [_write_card(runs, out or Path("MODEL_CARD.md"))]
    if out is not None:
        raise UserError(f"--out names the file of a model card; --to {to} has its own settings for the place")
    return _send([read_record(Path(file)) for file in runs["file"]], to)


def _send(records: Sequence[Record], to: str) -> list[str]:
    send, lines = _to_wandb if to == "wandb" else _to_mlflow, list[str]()
    for record in records:
        try:
            lines.append(send(record))
        except Exception as error:  # the client's own, or its network's
            fault = one_line(f"{type(error).__name__}: {error}")
            rest = one_line(f"name the others, from run '{record.run_id}' on")
            raise UserError(f"--to {to}: {fault}; sent {len(lines)} of {len(records)}, {rest}") from error
    return lines


def _to_wandb(record: Record) -> str:
    """One W&B run: the recipe as its config, the curve as its history, the metrics as its summary.

    Its id is made of the run id, so that publishing a record twice gives one run.
    API: docs.wandb.ai, ``wandb.init``, ``Run.log``, ``Run.summary``.
    """
    wandb: Any = import_module("wandb")
    run = wandb.init(
        id=hashlib.sha256(record.run_id.encode()).hexdigest()[:16],
        name=one_line(record.run_id, 128),
        group=one_line(f"{record.task} {record.backbone}", 128),
        tags=[one_line(tag, 64) for tag in (record.task, record.backbone, record.init)],
        config=_labels(record) | {"recipe": record.recipe},
        resume="allow",
    )
    try:
        for step, values in _curve(record):
            run.log(values, step=step)
        run.summary.update(_numbers(record))
    finally:
        run.finish()
    return one_line(f"wandb: {record.run_id}")


def _to_mlflow(record: Record) -> str:
    """One MLflow run, a new one each time; the record itself is its artifact ``record.json``.

    API: mlflow.org, ``mlflow.start_run``, ``log_params``, ``log_metrics``, ``log_dict``.
    """
    mlflow: Any = import_module("mlflow")
    params = {
        _plain(key): one_line(value, MLFLOW_TEXT)
        for key, value in flat(_labels(record) | {"recipe": _values(record)})
        if value != {}
    }
    with mlflow.start_run(run_name=one_line(record.run_id, 250)):
        mlflow.set_tags({"mae_bench.run_id": record.run_id, "mae_bench.protocol": record.protocol})
        for start in range(0, len(params), MLFLOW_BATCH):
            mlflow.log_params(dict(list(params.items())[start : start + MLFLOW_BATCH]))
        for step, values in _curve(record):
            mlflow.log_metrics({_plain(key): value for key, value in values.items()}, step=step)
        mlflow.log_metrics({_plain(f"final/{key}"): value for key, value in _numbers(record).items()})
        mlflow.log_dict(record.model_dump(mode="json"), "record.json")
    return one_line(f"mlflow: {record.run_id}")


def _labels(record: Record) -> dict[str, JsonValue]:
    """What identifies the run and made its number."""
    names = (
        "run_id",
        "task",
        "engine",
        "protocol",
        "backbone",
        "size",
        "init",
        "seed",
        "eval_only",
        "recipe_hash",
        "code_hash",
    )
    return {name: getattr(record, name) for name in names} | {
        "weights": record.weights.sha256,
        "data": record.data.fingerprint,
        "commit": record.git.commit,
        "dirty": record.git.dirty,
    }


def _values(record: Record) -> JsonValue:
    return record.recipe.get("values", {})


def _numbers(record: Record) -> dict[str, float]:
    return {name: value for name, value in sorted(record.metrics.items()) if value is not None}


def _curve(record: Record) -> Iterator[tuple[int, dict[str, float]]]:
    """Points of the history by step, in order; several of one step are one point."""
    points: dict[int, dict[str, float]] = {}
    for point in record.history:
        if (step := point.get("step")) is not None:
            values = {key: value for key, value in point.items() if key != "step" and value is not None}
            points.setdefault(int(step), {}).update(values)
    yield from sorted(points.items())


def _plain(name: object) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r"[^\w./ -]", "_", str(name), flags=re.ASCII)[:250]


def _write_card(runs: pd.DataFrame, path: Path) -> str:
    text = model_card(runs)
    try:
        written = write_whole(path, text, exclusive=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --out") from error
    if not written:
        raise UserError(f"{path} exists; choose another --out, and merge the two by hand")
    return f"wrote {path}"


def model_card(runs: pd.DataFrame) -> str:
    """Metadata (``model-index``) and a table of the results of one backbone's runs (as of `publish`), as a model card.

    A value is the mean over seeds, in percent, as in our tables; n and the spread stand beside it. The protocol is the
    data set's ``config``, so that two protocols never look like one.
    Source: huggingface/hub-docs ``modelcard.md``; ``huggingface_hub.EvalResult`` and ``ModelCardData``.
    """
    from huggingface_hub import EvalResult, ModelCardData

    chosen, left_out = select(runs)
    found = rows(cells(chosen))
    if not found:
        raise UserError(f"no results for a model card: {'; '.join(left_out)}")
    models = sorted(set(map(shown.label, found)))
    if len(models) > 1:
        raise UserError(one_line(f"a model card is about one model, and these records are of {', '.join(models)}"))
    for row in found:
        if fault := _fault(row):
            raise UserError(one_line(f"the result of {row['task']} {fault}; leave its records out"))
    results = [EvalResult(**_result(row, read_record(Path(row["files"][0])).data.name)) for row in found]
    name = one_line(models[0], 100)
    front = ModelCardData(model_name=name, eval_results=results, tags=["mae_bench", "masked-autoencoder"])
    return f"---\n{front.to_yaml()}\n---\n\n{render(_table(name, found, left_out), 'markdown')}"


def _fault(row: Shown) -> str:
    """Why a cell is no number to give away."""
    if row["mean"] != row["mean"]:
        return "is undefined"
    if outside := next(filter(None, (impossible(row["metric"], value) for value in row["values"].values())), ""):
        return f"is outside {outside}"
    return "is of runs on different data" if len(row["data"]) > 1 else ""


def _result(row: Shown, data: str) -> dict[str, Any]:
    """Arguments of ``EvalResult`` for one cell."""
    spread = {} if row["n"] < 2 else {"std": round(row["std"], 4)}
    return {
        "task_type": HUB_TASKS[row["engine"]],
        "dataset_type": _plain(data),
        "dataset_name": one_line(data, 100),
        "dataset_config": one_line(row["protocol"], 300),
        "dataset_split": "validation",
        "metric_type": HUB_METRICS.get(row["metric"], row["metric"]),
        "metric_name": one_line(f"{row['metric']} (%), mean of {row['n']}", 100),
        "metric_value": round(row["mean"], 4),
        "metric_args": {"seeds": row["n"], "recipe_values_nobody_published": len(row["ours"])}
        | spread
        | ({"trained_here": False} if row["eval_only"] else {}),
    }


def _table(name: str, found: list[Shown], left_out: Sequence[str]) -> Table:
    columns = (
        *(Column(head, "left") for head in ("task", "protocol", "metric")),
        *(Column(head) for head in ("mean", "std", "n")),
    )
    lines = tuple(
        Row(
            (
                *(Cell(row[key], code=True) for key in ("task", "protocol", "metric")),
                Cell(f"{row['mean']:.2f}", row["mean"], notes=shown.marks(row)),
                Cell(DASH if row["n"] < 2 else f"{row['std']:.2f}"),
                Cell(str(row["n"])),
            )
        )
        for row in found
    )
    notes = ("percent; std: sample standard deviation over n seeds", *shown.footnotes(found), *left_out)
    return Table("model-card", name, columns, lines, notes)
