"""Finding records, the frame of runs, and promotion into the repository."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting.record import Record, write_record
from mae_bench.reporting.store import COLUMNS, PRIMARY, frame, load_frame, load_records


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
    with pytest.raises(UserError, match=r"x\.json is not a record: it states no schema_version"):
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
    """A run without the metric keeps its row: whether a run counts does not depend on the metric."""
    both = [record(), record(seed=1, metrics={"top1": 1.0})]
    other = frame(both, "other")
    assert list(other["measured"]) == [True, False] and list(other["value"].fillna(-1)) == [1.0, -1.0]
    assert not frame(both, "none")["measured"].any()
    assert frame([]).dtypes.equals(frame(both).dtypes)


def test_several_metrics_are_one_pass() -> None:
    both = [record(), record(seed=1, metrics={"top1": 1.0})]
    many = frame(iter(both), PRIMARY, "top1", "other")
    assert list(many["metric"]) == ["other", "top1"] * 2 and list(many["primary"]) == [False, True] * 2
    for metric in ("top1", "other"):
        alone = many[many["metric"] == metric].reset_index(drop=True)
        pd.testing.assert_frame_equal(alone, frame(both, metric))


def test_one_run_id_with_two_contents_is_refused(tmp_path: Path) -> None:
    """Nothing says which of the two is the run: the order of their digests would."""
    first, second = (write_record(record(value=value), tmp_path / str(value)) for value in (50.0, 99.0))
    message = rf"run id 'tiny_linear.vit_t_mae.seed0': {first} and {second}; keep the true one"
    with pytest.raises(UserError, match=message):
        load_frame([tmp_path])
    second.write_text(json.dumps(json.loads(first.read_text())))  # a copy in another layout is no second content
    assert len(load_frame([tmp_path])) == 1


def test_undefined_is_nan() -> None:
    assert math.isnan(frame([record(value=float("nan"))])["value"].iloc[0])


MANY = [record(init=init, seed=seed, value=40.0 + seed) for init in ("mae", "scratch") for seed in range(3)]


@settings(max_examples=25)
@given(st.permutations(MANY), st.lists(st.sampled_from(MANY)))
def test_order_and_copies_change_nothing(shuffled: list, copies: list) -> None:
    pd.testing.assert_frame_equal(frame([*shuffled, *copies]), frame(MANY))


def test_given_weights_are_told_apart() -> None:
    own = record(weights={"kind": "given", "sha256": "ab" * 32})
    assert list(frame([own])["given"]) == ["abababab"]
    evaluated = record(weights={"kind": "given", "sha256": "ab" * 32}, eval_only=True)
    assert list(frame([evaluated])["given"]) == ["abababab"]


def test_a_record_survives_reformatting(tmp_path: Path) -> None:
    path = write_record(record(), tmp_path, "x.json")
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert list(load_records([tmp_path])) == [record()]


def without_files(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns="file")


def test_the_frame_of_files_is_that_of_their_records(tmp_path: Path) -> None:
    for number, run in enumerate(VARIED):
        write_record(run, tmp_path / str(number))
    pd.testing.assert_frame_equal(without_files(load_frame([tmp_path])), without_files(frame(VARIED)))
    pd.testing.assert_frame_equal(without_files(load_frame([tmp_path], "other")), without_files(frame(VARIED, "other")))
    assert set(load_frame([tmp_path])["file"]) == {str(path) for path in tmp_path.glob("*/record.json")}
    assert set(frame(VARIED)["file"]) == {""}


VARIED = [
    *MANY,
    record(seed=7, weights={"kind": "given", "sha256": "a" * 64, "maker": {"run_id": "a run", "git": {}}}),
    record(seed=8, weights={"kind": "given", "sha256": "a" * 64, "maker": {"run_id": ["hostile"]}}),
    record(seed=9, git={"dirty": True}, metrics={"top1": None}),
    record(
        seed=10, protocol="tiny-linear@1+set:x", overridden=["epochs", "randaug"], recipe={"values": {"epochs": 2.0}}
    ),
    record(seed=11, protocol="tiny-linear@1+set:x", overridden=["no_such_value"], recipe={"values": "hostile"}),
]


def test_columns_of_origin() -> None:
    """What tells stale rows and rows of doubtful origin apart."""
    rows = frame(VARIED).set_index("seed")
    assert list(rows.loc[[7, 8, 9], "started_from"]) == ["a run", "", ""]
    assert list(rows.loc[[7, 8, 9], "dirty"]) == [False, False, True]
    assert set(rows["data"]) == {"4" * 64} and set(rows["made_by"]) == {""}
    made = record(weights={"kind": "made", "sha256": "a" * 64, "maker": {"recipe_hash": "b" * 64}})
    assert list(frame([made])["made_by"]) == ["b" * 64]
    assert frame([record(), record(init="scratch")])["untrained"].tolist() == [False, True]
    # The recipe leaves values at the schema's default out.
    assert rows.loc[10, "settings"] == ("epochs=2.0", 'randaug=""')
    assert rows.loc[11, "settings"] == ("no_such_value=null",)


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, len(VARIED) - 1), st.booleans()), max_size=8), st.permutations(list("abcdefgh"))
)
def test_any_order_subset_and_copies_of_files_give_one_frame(picked: list[tuple[int, bool]], names: list[str]) -> None:
    """Copies may have other names and another layout, too."""
    expected = without_files(frame(VARIED[number] for number in sorted({number for number, _ in picked})))
    with tempfile.TemporaryDirectory() as folder:
        for name, (number, reformatted) in zip(names, picked, strict=False):
            text = VARIED[number].model_dump_json(indent=1)
            Path(folder, f"{name}.json").write_text(json.dumps(json.loads(text)) if reformatted else text)
        files = list(Path(folder).iterdir())
        for order in (files, files[::-1], [*files, *files], [folder]):
            found = load_frame(order)
            pd.testing.assert_frame_equal(without_files(found), expected)
            pd.testing.assert_frame_equal(found, load_frame([folder]))


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_refused_by_name_or_changes_nothing(data: st.DataObject) -> None:
    """One byte of a file cut, changed or repeated: the loader names the file, or reads a valid record."""
    text = bytearray(record().model_dump_json(indent=1).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    kind = data.draw(st.sampled_from(["cut", "change", "repeat"]))
    if kind == "cut":
        del text[place:]
    elif kind == "change":
        text[place] = data.draw(st.integers(0, 255))
    else:
        text[place:place] = text[place : place + 1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.json")
        path.write_bytes(text)
        outcome = read(path)
    assert isinstance(outcome, Record) or (str(path) in outcome and "\n" not in outcome)


def read(path: Path) -> Record | str:
    try:
        return next(load_records([path]))
    except UserError as error:
        return str(error)


def test_looking_after_records_imports_no_torch() -> None:
    modules = ", ".join(f"mae_bench.reporting.{name}" for name in ("store", "transfer", "check", "staleness"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
