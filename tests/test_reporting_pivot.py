"""Free tables: any properties as rows and columns; what would mix is refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting.grid import Table
from mae_bench.reporting.pivot import DIMENSIONS
from mae_bench.reporting.record import Record
from mae_bench.reporting.render import render
from mae_bench.reporting.store import frame, load_frame
from mae_bench.reporting.tables import results

RUNS = [
    record(task, init=init, seed=seed, value=10.0 * i + seed)
    for task in ("tiny_linear", "tiny_coco")
    for i, init in enumerate(["mae", "scratch", "supervised"])
    for seed in range(2)
]


def made(by: tuple[list[str], list[str]], *runs: Record, **options: Any) -> Table:
    return results(frame(runs), by=by, published=[], **options)


def text(table: Table) -> list[list[str]]:
    heads = [" ".join(filter(None, (column.group, column.head))) for column in table.columns]
    return [heads, *([cell.text for cell in row.cells] for row in table.rows)]


def test_initialisations_by_task() -> None:
    assert text(made((["init"], ["task"]), *RUNS)) == [
        ["init", "tiny_linear", "tiny_coco"],
        ["protocol", "tiny-linear@1", "tiny-maskrcnn@1"],
        ["metric", "top1", "box_AP"],
        ["scratch", "10.50 ± 0.71 (n=2)", "10.50 ± 0.71 (n=2)"],
        ["supervised", "20.50 ± 0.71 (n=2)", "20.50 ± 0.71 (n=2)"],
        ["mae", "0.50 ± 0.71 (n=2)", "0.50 ± 0.71 (n=2)"],
    ]


def test_tasks_as_rows_have_their_protocols_beside_them() -> None:
    assert text(made((["task"], ["init"]), *RUNS))[:2] == [
        ["task", "protocol", "metric", "scratch", "supervised", "mae"],
        ["tiny_linear", "tiny-linear@1", "top1", "10.50 ± 0.71 (n=2)", "20.50 ± 0.71 (n=2)", "0.50 ± 0.71 (n=2)"],
    ]


def test_seeds() -> None:
    table = made((["seed"], ["backbone", "task"]), *RUNS[:2], *(record(seed=s, value=s) for s in (10, 9)))
    assert text(table)[-4:] == [["0", "0.00 (n=1)"], ["1", "1.00 (n=1)"], ["9", "9.00 (n=1)"], ["10", "10.00 (n=1)"]]


@pytest.mark.parametrize(
    ("by", "runs", "message"),
    [
        ((["init"], ["init"]), RUNS, "'init' is named twice"),
        ((["colour"], ["task"]), RUNS, "--rows colour: no such property"),
        ((["backbone"], ["tasks"]), RUNS, r"--cols tasks: no such property \(did you mean 'task'\?\)"),
        (([], ["task"]), RUNS, "--rows is missing"),
        ((["init"], ["backbone"]), RUNS, "mix the tasks 'tiny_coco' and 'tiny_linear': add 'task' to --rows or --cols"),
        ((["init"], ["task"]), [*RUNS, record(size="b")], "mix the sizes 'b' and 't': add 'size'"),
        ((["init"], ["task"]), [*RUNS, record(backbone="x", run_id="x")], "mix the backbones 'vit_t_mae' and 'x'"),
        (
            (["backbone"], ["task"]),
            [*RUNS, record(overridden=["epochs"], protocol="tiny-linear@1+set:1234abcd", run_id="set")],
            "mix the protocols 'tiny-linear@1' and 'tiny-linear@1.set:1234abcd'",
        ),
        (
            (["backbone"], ["seed", "task"]),
            [record(eval_only=True, run_id=f"e{i}", weights={"kind": "file", "sha256": str(i) * 64}) for i in (1, 2)],
            "two evaluations of vit_t_mae on tiny_linear with one seed",
        ),
    ],
)
def test_what_would_mix_is_refused(by: Any, runs: list[Record], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(by, *runs)


def test_two_protocols_never_share_a_column_unsaid() -> None:
    """Also where no field would hold both."""
    other = record(init="scratch", overridden=["epochs"], protocol="tiny-linear@1+set:1234abcd")
    assert text(made((["init"], ["task"]), RUNS[0], other))[0] == ["init", "protocol", "tiny_linear"]
    larger = other.model_copy(update={"init": "mae", "size": "b"})
    with pytest.raises(UserError, match="do not tell the protocols apart: add 'protocol'"):
        made((["init"], ["size"]), RUNS[0], larger, record(init="scratch", size="b"))


def test_links_are_relative_to_where_the_table_lies(tmp_path: Path) -> None:
    from mae_bench.reporting.record import write_record

    for run in RUNS[:3]:
        write_record(run, tmp_path / "runs" / run.task / run.backbone, f"{run.run_id}.json")
    table = results(load_frame([tmp_path / "runs"]), published=[], links=tmp_path / "tables")
    assert [row.cells[-1].href for row in table.rows if row.kind == "data"] == [
        "../runs/tiny_linear/vit_t_scratch/tiny_linear.vit_t_scratch.seed0.json",
        "../runs/tiny_linear/vit_t_mae",
    ]
    assert str(tmp_path) not in render(table, "html")


POOL = [
    *RUNS,
    record(size="b"),
    record(seed=7, backbone="x", value=float("nan")),
    record(overridden=["epochs"], protocol="tiny-linear@1+set:1234abcd"),
    record(seed=3, weights={"kind": "given", "sha256": "ab" * 32}),
    record(eval_only=True, weights={"kind": "file", "sha256": "c" * 64}),
    record("coco", size="b", recipe_hash="a" * 64),
    record(smoke=True, protocol="tiny-linear@1+smoke"),
]
NAMES = st.lists(st.sampled_from(DIMENSIONS), min_size=1, max_size=3, unique=True)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(POOL), min_size=1, unique_by=id), NAMES, NAMES, st.randoms(), st.data())
def test_the_same_table_or_refusal_for_any_order_and_copies(
    chosen: list[Record], rows: list[str], columns: list[str], order: random.Random, data: st.DataObject
) -> None:
    copies = [*chosen, *data.draw(st.lists(st.sampled_from(chosen)))]
    order.shuffle(copies)

    def outcome(runs: list[Record]) -> str:
        try:
            return render(made((rows, columns), *runs), "markdown")
        except UserError as error:
            return f"refused: {error}"

    first = outcome(chosen)
    assert outcome(copies) == first
    assert len(first.splitlines()) == 1 if first.startswith("refused") else first.startswith("| ")
    if first.startswith("| "):
        # Every run that counts is in exactly one field: the n of all fields add up.
        table = made((rows, columns), *chosen)
        counted = sum(cell.n or 0 for row in table.rows for cell in row.cells)
        left_out = sum(int(note.split()[0]) for note in table.notes if "left out" in note)
        assert counted + left_out == len(chosen)
