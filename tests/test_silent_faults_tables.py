"""Silent faults of tables, once found, stay found: a wrong number, or a wrong word beside a right one.

Each test names the fault. What a gate or a model card would have made of it is tested beside these.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from reporting_records import record, sound

from mae_bench import tabulate
from mae_bench.errors import UserError
from mae_bench.reporting import grid, papers, shown
from mae_bench.reporting.agreement import contradictions
from mae_bench.reporting.cells import cells, compare, select
from mae_bench.reporting.matrix import Square, matrices
from mae_bench.reporting.published import Published, headline, load_published, with_spread
from mae_bench.reporting.record import Record, write_record
from mae_bench.reporting.render import render
from mae_bench.reporting.store import frame
from mae_bench.reporting.tables import compared, results

PUBLISHED = Published(
    method="MAE", backbone="ViT-B/16", task="COCO", protocol="vitdet", protocol_id="coco-vitdet-maskrcnn-1024@1",
    metric="box_AP", value=51.6, pretrain_data="IN1K", pretrain_epochs=1600, source="ViTDet paper", verified=True,
    source_locator="Table 5", ours="vit_b_mae",
)  # fmt: skip
OTHER_DATA = record().data.model_dump() | {"fingerprint": "9" * 64}
LATER = {"run_id": "later", "created": "2026-02-01T00:00:00Z"}


def lines(table: grid.Table) -> list[list[str]]:
    return [[cell.text + cell.notes for cell in row.cells] for row in table.rows if row.kind == "data"]


def given(digit: str, **changes: Any) -> Record:
    return record("coco", size="b", run_id=digit, weights={"kind": "given", "sha256": digit * 64}, **changes)


def seeds(values: Sequence[float], **changes: Any) -> list[Record]:
    return [record(seed=seed, value=value, **changes) for seed, value in enumerate(values)]


def test_evaluating_somebodys_model_is_no_number_of_the_backbone() -> None:
    """Weights of anywhere through `--eval-only`: the backbone's own row, the published number and a verdict."""
    evaluated = [given(digit, value=80.0 + int(digit), eval_only=True) for digit in "123"]
    table = results(frame(evaluated), published=[PUBLISHED])
    assert lines(table) == [["b", f"vit_b_mae given {digit * 8}", f"8{digit}.00 (n=1)†"] for digit in "123"]
    assert not any("published" in column.head for column in table.columns)
    assert any(note.startswith("given …: weights that the user named") for note in table.notes)


def test_models_of_several_files_are_marked() -> None:
    """Their spread is none over seeds."""
    files = [record(eval_only=True, run_id=digit, weights={"kind": "file", "sha256": digit * 64}) for digit in "12"]
    assert lines(results(frame(files), published=[]))[0][-1] == "50.00 ± 0.00 (n=2)†‡"


def test_another_metric_brings_no_superseded_run_back() -> None:
    """The newer run does not have it: the older one would have stood there, as if nothing had come after it."""
    older, newer = record(metrics={"top1": 50.0, "val_loss": 1.0}), record(**LATER, metrics={"top1": 40.0})
    with pytest.raises(UserError, match=r"1 run left out \(superseded .*; 1 run left out \(no metric val_loss\)"):
        results(frame([older, newer], "val_loss"), published=[])
    other = record(seed=1, metrics={"top1": 60.0, "val_loss": 2.0})
    table = results(frame([older, newer, other], "val_loss"), published=[])
    assert lines(table)[0][-1] == "2.00 (n=1)"
    assert "1 run left out (no metric val_loss)" in table.notes
    assert "1 run left out (no metric val_loss)" in compared_with_scratch("val_loss", older, newer, other).notes


def compared_with_scratch(metric: str, *runs: Record) -> grid.Table:
    scratch = record(init="scratch", seed=1, metrics={"top1": 1.0, metric: 1.0})
    return compared(frame([*runs, scratch], metric), "mae", "scratch")


def test_a_papers_table_counts_the_same_runs() -> None:
    """Each of its metrics alone would have found a newest run of its own."""
    source, definition = papers.load()["vitdet_5"]
    metrics = papers.metrics(source, definition, load_published())
    assert metrics == ["box_AP", "mask_AP"]
    older = record("coco", size="b", value=50.0, metrics={"box_AP": 50.0, "mask_AP": 45.0})
    newer = record("coco", size="b", **LATER, metrics={"box_AP": 51.0})
    stale = record("tiny_coco", run_id="stale", metrics={"box_AP": 1.0, "mask_AP": 1.0})
    runs = frame([older, newer, stale, record()], *metrics).assign(other_code=False)
    runs["stale"] = ["gone" if run_id == "stale" else "" for run_id in runs["run_id"]]
    table = papers.paper_table(source, definition, runs, load_published())
    text = render(table, "csv")
    assert "51.0000" in text and "45.0000" not in text
    assert "1 run left out (stale: gone; --stale takes them in)" in table.notes  # a run, not its two metrics
    assert "1 run left out (no metric mask_AP)" in table.notes


def test_runs_on_different_data_are_marked_and_not_judged() -> None:
    """One protocol, two data sets: a mean, a spread, a p and a verdict over both."""
    both = [record("coco", size="b", value=40.0), record("coco", size="b", value=41.0, seed=1, data=OTHER_DATA)]
    table = results(frame(both), published=[PUBLISHED])
    assert lines(table)[0][2:] == ["40.50 ± 0.71 (n=2)‖", "51.6", "-11.10", "other data"]
    assert any(note.startswith("‖ the runs had different data") for note in table.notes)
    assert "$\\|$" in render(table, "latex")
    (row,) = csv.DictReader(io.StringIO(render(results(frame(both), layout="full", published=[]), "csv")))
    assert row["mixed_data"] == "True"


def test_two_sides_on_different_data_have_no_p() -> None:
    mae, scratch = seeds([50.0, 51.0, 52.5]), seeds([10.0, 11.0, 12.0], init="scratch", data=OTHER_DATA)
    (pair,) = compare(frame([*mae, *scratch]), "mae", "scratch").to_dict("records")
    assert (pair["pairs"], pair["verdict"]) == (0, "other data") and math.isnan(pair["p"])
    table = compared(frame([*mae, *scratch]), "mae", "scratch")
    assert lines(table)[0][-1] == "other data" and "2·√(s₁² + s₂²)" not in [column.head for column in table.columns]
    square = last_square(*mae, *scratch)
    assert (square.against, square.tone) == ("to scratch, other data", "none")
    marks = {cell.mark for row in results(frame([*mae, *scratch]), published=[]).rows for cell in row.cells}
    assert marks == {""}


def last_square(*runs: Record) -> Square:
    (matrix,) = matrices(shown.beside(cells(select(frame(runs))[0]), []), [], {})
    square = matrix.rows[0].squares[-1]
    assert square is not None
    return square


def test_equal_differences_are_no_noise() -> None:
    """40 points above in each of three pairs: p was that of three sign flips, and the verdict 'within noise'."""
    runs = [*seeds([50.0, 51.0, 52.5]), *seeds([10.0, 11.0, 12.5], init="scratch")]
    (pair,) = compare(frame(runs), "mae", "scratch").to_dict("records")
    assert (pair["difference"], pair["pairs"], pair["verdict"]) == (40.0, 3, "no spread")
    assert all(math.isnan(pair[key]) for key in ("p", "adjusted", "low", "high"))
    assert lines(compared(frame(runs), "mae", "scratch"))[0][-1] == "no spread"
    square = last_square(*runs)
    assert (square.gap, square.against, square.tone) == ("+40.00", "to scratch", "up1")


def test_one_number_has_one_verdict_in_every_table() -> None:
    """A published number without a spread borrowed another source's in one table, and none in the next."""
    rows = load_published()
    found = headline(rows, "in1k-finetune-mae@1", "vit_b_mae", "top1")
    assert found is not None and found.std is not None
    place = {"protocol": found.protocol_id, "recipe_protocol": found.protocol_id}
    runs = frame(seeds([83.0, 83.3, 83.6], size="b", **place))
    table = results(runs, published=rows, layout="long")
    source, definition = papers.load()["table_3"]
    paper = papers.paper_table(source, definition, runs, rows)
    heads = [column.head for column in paper.columns]
    (own,) = [row for row in lines(paper) if row[heads.index("ours")].startswith("83.30")]
    assert own[heads.index("verdict")] == lines(table)[0][-1] != ""
    spread = f"standard deviation {found.std:g} over {found.std_n} runs: {found.spread}"
    assert any(spread in note for note in table.notes) and any(spread in note for note in paper.notes)


def test_a_spread_is_borrowed_within_protocol_weights_and_metric_alone() -> None:
    stated = PUBLISHED.model_copy(update={"std": 0.1, "std_n": 5, "spread": "five runs", "source": "detectron2"})
    assert with_spread(PUBLISHED, [PUBLISHED, stated]).spread == "detectron2, Table 5: five runs"
    assert with_spread(stated, [PUBLISHED]) == stated
    for changes in ({"ours": "vit_l_mae"}, {"metric": "mask_AP"}, {"protocol_id": "x@1"}, {"verified": False}):
        assert with_spread(PUBLISHED, [stated.model_copy(update=changes)]) == PUBLISHED


def test_an_impossible_number_is_named_in_the_table_and_by_the_check() -> None:
    """An mIoU of 950 stood in every table but the page without a word."""
    runs = frame([record(value=950.0)])
    for layout in ("wide", "long", "full"):
        notes = results(runs, layout=layout, published=[]).notes  # type: ignore[arg-type]
        assert "look at this (impossible): tiny_linear vit_t_mae seed 0: top1 is 950, outside [0, 100]" in notes
    assert "metrics.top1 is 950.0, outside [0, 100]" in list(contradictions(sound(value=950.0)))
    losses = {"metrics": {"top1": 50.0, "val_loss": -1.0}, "per_class": {"a": {"top1": 101.0}}}
    told = list(contradictions(sound(**losses)))
    assert "metrics.val_loss is -1.0, outside [0, ∞)" in told
    assert "per_class.a.top1 is 101.0, outside [0, 100]" in told


def test_flags_in_a_table_are_bounded() -> None:
    runs = [record(value=950.0 + i, seed=i) for i in range(30)]
    notes = [note for note in results(frame(runs), published=[]).notes if note.startswith("look at this")]
    assert len(notes) == 21 and notes[-1] == "look at this: 11 more, which `report` lists"


def test_a_judged_frame_of_several_metrics_is_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mae_bench.reporting import store

    write_record(record(), tmp_path)
    read: list[Path] = []
    monkeypatch.setattr(store, "read_record", lambda path: read.append(path) or record())  # type: ignore[func-returns-value]
    runs = tabulate.frame([tmp_path], ["top1", "other", "gone"])
    assert len(read) == 1
    assert list(runs["measured"]) == [False, True, True] and set(runs["stale"]) != {""}
