"""Tables of papers: every published number exactly once, ours only beside its own protocol, weights and metric."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting import papers
from mae_bench.reporting.grid import Table
from mae_bench.reporting.papers import Paper, members, paper_table
from mae_bench.reporting.published import Published, load_published
from mae_bench.reporting.record import Record
from mae_bench.reporting.render import FORMS, render
from mae_bench.reporting.store import frame

PUBLISHED = load_published()
TABLES = papers.load()
NONE = frame([])
MAE = "MAE paper arXiv:2111.06377v3"
FINETUNE = {"protocol": "in1k-finetune-mae@1", "recipe_protocol": "in1k-finetune-mae@1"}


def made(name: str, *records: Record, metric: str | None = None) -> Table:
    source, definition = TABLES[name]
    return paper_table(source, definition, frame(records, *([metric] if metric else [])), PUBLISHED)


def finetuned(size: str = "b", value: float = 83.5, **changes: Any) -> Record:
    return record(size=size, value=value, **FINETUNE | changes)


def text(table: Table) -> list[list[str]]:
    """Heads and rows as a reader sees them."""
    heads = [" ".join(filter(None, (column.group, column.head))) for column in table.columns]
    return [heads, *([cell.text for cell in row.cells] for row in table.rows if row.kind == "data")]


def test_the_tables_and_figures_of_the_paper() -> None:
    expected = [f"table_1{letter}" for letter in "abcdef"] + [f"table_{n}" for n in (2, 3, 4, 5, 6, 7, 12, 13)]
    own = [name for name, (source, _) in TABLES.items() if source == MAE]
    assert own == [*expected, "figure_5", "figure_7", "figure_9"]
    places = {papers._place(row)[0] for row in PUBLISHED if row.source == MAE and row.verified}
    tables = {place for place in places if place.startswith(("Table", "Fig"))}
    assert tables == {TABLES[name][1].locator for name in own}


@pytest.mark.parametrize("name", TABLES)
def test_every_published_number_stands_exactly_once(name: str) -> None:
    """The numbers of the table are those of the CSV, as often as there, each under its own metric and backbone."""
    source, definition = TABLES[name]
    meant = members(source, definition, PUBLISHED)
    shown = [cell.value for row in made(name).rows for cell in row.cells if cell.value is not None]
    assert Counter(shown) == Counter(row.value for row in meant)
    fields = papers._Table(source, definition, PUBLISHED).fields
    placed = [row for line in fields for row in line if row]
    assert len(placed) == len({id(row) for row in placed}) == len(meant)
    for head, *column in zip(definition.column, *fields, strict=True):
        values = [row for row in column if row]
        assert len({row.metric for row in values}) == 1, f"{name} {head.head}: numbers of two metrics in a column"


@pytest.mark.parametrize("name", TABLES)
def test_no_number_of_ours_without_a_run(name: str) -> None:
    table = made(name)
    ours = [i for i, column in enumerate(table.columns) if column.head in ("ours", "gap", "verdict")]
    assert {row.cells[i].text for row in table.rows if row.kind == "data" for i in ours} <= {"–"}


def test_some_rows_as_the_paper_prints_them() -> None:
    assert text(made("table_1c")) == [
        ["encoder", "fine-tuning", "linear probe", "relative FLOPs"],
        ["with mask tokens", "84.2", "59.6", "3.3"],
        ["without mask tokens", "84.9", "73.5", "1.0"],
    ]
    assert text(made("table_4"))[-1] == ["MAE", "IN1K", "50.3", "53.3", "44.9", "47.2"]
    assert text(made("table_2"))[4] == ["ViT-H with mask tokens", "8", "–", "119.6", "1.0"]
    assert text(made("figure_9"))[2] == ["0.5", "–", "79.1"]
    marks = {cell.text: cell.mark for row in made("table_13").rows for cell in row.cells[2:3]}
    assert (marks["33.8"], marks["36.8"], marks["51.7"]) == ("best", "second", "")  # less is better


def test_ours_the_gap_and_the_verdict() -> None:
    table = made("table_3", *(finetuned(seed=seed, value=83.5 + 0.1 * seed) for seed in range(3)))
    assert text(table)[0][2:6] == ["ViT-B published", "ViT-B ours", "ViT-B gap", "ViT-B verdict"]
    assert text(table)[-1][2:6] == ["83.6", "83.60 ± 0.10 (n=3)", "+0.00", "within noise"]
    assert text(table)[0][6:8] == ["ViT-L published", "ViT-L ours"]  # no run: a place for it, no more
    single = text(made("table_3", finetuned()))[-1]
    assert single[3] == "83.50 (n=1)" and single[5].startswith("one seed")
    scratch = text(made("table_3", finetuned(init="scratch", value=82.0)))
    assert scratch[1][2:5] == ["82.3", "82.00 (n=1)", "-0.30"] and scratch[-1][3] == "–"


@pytest.mark.parametrize(
    "other",
    [
        finetuned(protocol="in1k-finetune-mae@1+set:1234abcd", overridden=["epochs"]),
        finetuned(protocol="in1k-finetune-mae@2", recipe_protocol="in1k-finetune-mae@2"),
        finetuned(weights={"kind": "given", "sha256": "ab" * 32}),
        finetuned(backbone="vit_b_mae_pixel"),
        finetuned(smoke=True, protocol="in1k-finetune-mae@1+smoke"),
        finetuned(metric="top5", metrics={"top5": 97.0}),
    ],
    ids=["values", "protocol", "weights", "backbone", "smoke", "metric"],
)
def test_never_beside_another_protocol_weights_or_metric(other: Record) -> None:
    assert text(made("table_3", other)) == text(made("table_3"))


def test_table_4_is_another_protocol_than_coco() -> None:
    coco = record("coco", size="b", value=51.0)
    assert text(made("table_4", coco)) == text(made("table_4"))
    assert any("another detector and another schedule" in note for note in made("table_4").notes)
    assert text(made("vitdet_5", coco))[1][1:5] == ["51.6", "51.00 (n=1)", "-0.60", "one seed: -0.6"]


def test_a_metric_that_is_not_the_primary_one() -> None:
    source, definition = TABLES["vitdet_5"]
    assert papers.metrics(source, definition, PUBLISHED) == ["box_AP", "mask_AP"]
    coco = record("coco", size="b", metrics={"box_AP": 51.0, "mask_AP": 45.0})
    both = pd.concat([frame([coco], metric) for metric in ("box_AP", "mask_AP")])
    table = paper_table(source, definition, both, PUBLISHED)
    line = dict(zip(text(table)[0], text(table)[1], strict=True))
    assert (line["box AP ViT-B ours"], line["mask AP ViT-B ours"]) == ("51.00 (n=1)", "45.00 (n=1)")


def test_marks_and_remarks() -> None:
    marked = finetuned(ours=["precision"], eval_only=True)
    table = made("table_3", marked)
    cell = next(cell for row in table.rows for cell in row.cells if cell.text == "83.50 (n=1)")
    assert cell.notes == "*†"
    assert any(note.startswith("* recipe values that nobody published") for note in table.notes)
    linear = made("table_12")
    doubtful = next(cell for row in linear.rows for cell in row.cells if cell.text == "72.0")
    assert doubtful.notes.endswith("?") and not doubtful.mark
    assert "published numbers without a letter: printed data labels" in made("figure_5").notes


def test_stale_runs_stand_nowhere() -> None:
    source, definition = TABLES["table_3"]
    judged = frame([finetuned()]).assign(stale="the task recipe has changed", other_code=False)
    table = paper_table(source, definition, judged, PUBLISHED)
    assert text(table) == text(made("table_3"))
    assert any("1 run left out (stale: the task recipe has changed" in note for note in table.notes)
    taken = paper_table(source, definition, judged, PUBLISHED, stale=True)
    assert next(c for row in taken.rows for c in row.cells if c.text == "83.50 (n=1)").notes == "¶"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["table_1a", "table_3", "table_7", "table_13", "figure_9"])
def test_every_format(name: str, form: str) -> None:
    shown = render(made(name, finetuned()), form)
    for row in members(*TABLES[name], PUBLISHED):
        assert f"{row.value:.1f}" in shown


POOL = [
    finetuned(seed=0), finetuned(seed=0, value=80.0, run_id="again"), finetuned(seed=1),
    finetuned(size="l", value=85.0),
    finetuned(init="scratch", value=82.0), finetuned(value=float("nan"), seed=2), record("coco", size="b", value=51.0),
    finetuned(recipe_hash="a" * 64, seed=4), finetuned(eval_only=True, seed=5), finetuned(ours=["batch"], seed=6),
]  # fmt: skip


@settings(max_examples=20)
@given(st.lists(st.sampled_from(POOL), unique_by=id), st.randoms(), st.data())
def test_order_and_copies_never_change_a_table(chosen: list[Record], order: random.Random, data: st.DataObject) -> None:
    copies = [*chosen, *(data.draw(st.lists(st.sampled_from(chosen))) if chosen else [])]
    order.shuffle(copies)
    for name in ("table_3", "table_7"):
        assert render(made(name, *copies), "markdown") == render(made(name, *chosen), "markdown")


# Definitions that are wrong.

HEAD = f'source = "{MAE}"\n[[table]]\nname = "mine"\ntitle = "t"\nlocator = "Table 1a"\nlabels = ["blocks"]\n'
ROW = 'row = [{ labels = ["1"], protocol = ["decoder_depth=1"] }]\n'
COLUMN = 'column = [{ head = "ft", protocol = ["finetune"] }]\n'


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (HEAD + ROW + COLUMN + "rows = 1\n", "rows"),
        (HEAD + ROW.replace("labels", "label") + COLUMN, "label"),
        (HEAD + ROW + COLUMN.replace("head", "metrics = 1, head"), "metrics"),
        (HEAD.replace("mine", "table_3") + ROW + COLUMN, "a table 'table_3' is defined already"),
        (HEAD + ROW.replace('["1"]', '["1", "2"]') + COLUMN, r"has 1 label heads but a row \['1', '2'\]"),
        (HEAD + ROW, "column"),
        ("source = 1", "source"),
        ("[[", "mine.toml"),
    ],
)
def test_definitions_are_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, definition: str, message: str) -> None:
    (tmp_path / "results" / "published").mkdir(parents=True)
    (tmp_path / "results" / "published" / "mine.toml").write_text(definition, encoding="utf-8")
    monkeypatch.setenv("MAE_BENCH_PATH", str(tmp_path))
    with pytest.raises(UserError, match=message) as fault:
        papers.load()
    assert "mine.toml" in str(fault.value)


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({"labels": ["x"], "protocol": ["decoder_depth=3"]}, {"head": "ft", "protocol": ["finetune"]}, "row .*no publ"),
        ({"labels": ["x"], "protocol": ["decoder_depth=1"]}, {"head": "all"}, "column 'all': 2 published numbers fit"),
    ],
)
def test_selectors_that_fit_nothing_or_two_numbers(row: Any, column: Any, message: str) -> None:
    table = {"name": "x", "title": "t", "locator": "Table 1a", "labels": ["a"], "row": [row], "column": [column]}
    (definition,) = Paper.model_validate({"source": MAE, "table": [table]}).table
    with pytest.raises(UserError, match=message):
        paper_table(MAE, definition, NONE, PUBLISHED)


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"unknown table 'table1a' \(did you mean 'table_1a'\?\); known: table_1a, .*mine"
    ):
        papers.find("table1a", ["mine"])


def test_hostile_published_text_is_escaped() -> None:
    source, definition = TABLES["table_12"]
    rows = [row.model_copy(update={"source_locator": "Table 12 (<script>|`x`\\end{table})"}) for row in PUBLISHED
            if row.source == source and row.source_locator == "Table 12"]  # fmt: skip
    others: list[Published] = [row for row in PUBLISHED if row.source == source and row.source_locator != "Table 12"]
    table = paper_table(source, definition, NONE, [*rows, *others])
    assert "<script>" not in render(table, "html") and "<script>" not in render(table, "markdown").replace("\\<", "")
    assert render(table, "latex").count("\\end{table}") == 1
