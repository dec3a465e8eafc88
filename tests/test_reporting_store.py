"""Finding records, the frame of runs, and promotion into the repository."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting.record import read_record, write_record
from mae_bench.reporting.store import COLUMNS, frame, load_records, promote


def test_records_are_found_at_any_depth_and_other_json_is_left_alone(tmp_path: Path) -> None:
    write_record(record(seed=0), tmp_path / "runs" / "deep" / "seed0")
    write_record(record(seed=1), tmp_path / "results", "promoted.json")
    (tmp_path / "runs" / "metrics.json").write_text('{"loss": 1}\n{"loss": 2}')
    (tmp_path / "runs" / "predictions.json").write_text("[]")
    (tmp_path / "runs" / ".record-x.tmp").write_text('{"schema_version": 1')
    (tmp_path / "runs" / "loop").symlink_to(tmp_path)
    assert [found.seed for found in load_records([tmp_path])] == [1, 0]
    assert [found.seed for found in load_records([tmp_path / "runs", str(tmp_path / "results/promoted.json")])] == [
        0,
        1,
    ]


def test_a_damaged_record_is_refused_not_skipped(tmp_path: Path) -> None:
    path = write_record(record(), tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match=r"record\.json is not a record"):
        list(load_records([tmp_path]))
    path.rename(tmp_path / "promoted.json")
    with pytest.raises(UserError, match=r"promoted\.json is not a record"):
        list(load_records([tmp_path]))


def test_a_named_file_must_be_a_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=r"x\.json is not a record"):
        list(load_records([tmp_path / "x.json"]))
    with pytest.raises(UserError, match="cannot read"):
        list(load_records([tmp_path / "none"]))


def test_frame_is_one_row_a_run() -> None:
    runs = frame([record(value=48.5, best={"top1": 49.0}, baseline={"top1": 12.5}, ours=["epochs"])])
    assert list(runs.columns) == list(COLUMNS)
    row = runs.iloc[0]
    assert (row["task"], row["backbone"], row["seed"], row["metric"]) == ("tiny_linear", "vit_t_mae", 0, "top1")
    assert (row["value"], row["best"], row["trivial"], row["ours"]) == (48.5, 49.0, 12.5, ("epochs",))
    assert row["created"] == pd.Timestamp("2026-01-01", tz="UTC")


def test_frame_of_another_metric_and_of_nothing() -> None:
    both = [record(), record(metrics={"top1": 1.0})]
    assert list(frame(both, "other")["value"]) == [1.0]
    assert frame(both, "none").empty
    assert frame([]).dtypes.equals(frame(both).dtypes)


def test_undefined_is_nan() -> None:
    assert math.isnan(frame([record(value=float("nan"))])["value"].iloc[0])


MANY = [record(init=init, seed=seed, value=40.0 + seed) for init in ("mae", "scratch") for seed in range(3)]


@settings(max_examples=25, deadline=None)
@given(st.permutations(MANY), st.lists(st.sampled_from(MANY)))
def test_order_and_copies_change_nothing(shuffled: list, copies: list) -> None:
    pd.testing.assert_frame_equal(frame([*shuffled, *copies]), frame(MANY))


def test_given_weights_are_told_apart() -> None:
    own = record(weights={"kind": "given", "sha256": "ab" * 32})
    assert list(frame([own])["given"]) == ["abababab"]
    evaluated = record(weights={"kind": "given", "sha256": "ab" * 32}, eval_only=True)
    assert list(frame([evaluated])["given"]) == [""]


def test_promotion(tmp_path: Path) -> None:
    paths = promote([record(seed=0), record(seed=1)], tmp_path)
    assert paths[0] == tmp_path / "tiny_linear" / "vit_t_mae" / "tiny_linear.vit_t_mae.seed0.json"
    assert [read_record(path) for path in paths] == [record(seed=0), record(seed=1)]
    assert list(load_records([tmp_path])) == [record(seed=0), record(seed=1)]


def test_promotion_is_refused_as_a_whole(tmp_path: Path) -> None:
    promote([record(seed=0)], tmp_path)
    smoke = record(seed=5, smoke=True, protocol="tiny-linear@1+smoke")
    again = record(seed=0, run_id="a-second-run-of-seed-0", value=60.0)
    for refused, message in [
        (smoke, "is a smoke run"),
        (record(seed=0), "already, as 'tiny_linear.vit_t_mae.seed0'"),
        (again, "run 'a-second-run-of-seed-0' is in .* already"),
        (record(seed=5, run_id="../../outside"), "cannot name a file"),
        (record(seed=5, backbone=".."), "cannot name a file"),
    ]:
        with pytest.raises(UserError, match=message):
            promote([record(seed=7), refused], tmp_path)
    with pytest.raises(UserError, match="already"):
        promote([record(seed=7), record(seed=7)], tmp_path)
    assert len(list(load_records([tmp_path]))) == 1


def test_another_recipe_of_the_same_seed_may_be_promoted(tmp_path: Path) -> None:
    promote([record()], tmp_path)
    promote([record(run_id="later", recipe_hash="9" * 64)], tmp_path)
    assert len(list(tmp_path.glob("*/*/*.json"))) == 2


def test_a_record_survives_reformatting(tmp_path: Path) -> None:
    path = write_record(record(), tmp_path, "x.json")
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert list(load_records([tmp_path])) == [record()]
