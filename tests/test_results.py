"""Committed results: every promoted record is whole, and the committed tables are what they give."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mae_bench import api
from mae_bench.reporting import cells, store

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "results" / "runs"
TABLES = ROOT / "results" / "tables"


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("all.md", {"layout": "long"}),
        ("all.csv", {"form": "csv"}),
        ("mae_against_scratch.md", {"compare": ("mae", "scratch")}),
    ],
)
def test_committed_tables_are_what_the_records_give(file: str, options: dict[str, object]) -> None:
    made = api.table(RUNS, **options)  # type: ignore[arg-type]
    assert (TABLES / file).read_text(encoding="utf-8") == made, "run `make tables` and commit what it writes"


def test_the_readme_quotes_the_committed_comparison() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = [line for line in (TABLES / "mae_against_scratch.md").read_text().splitlines() if "`tiny_" in line]
    assert quoted
    for line in quoted[:2]:
        assert line in readme


def test_promoted_records_are_real_runs_without_paths_of_a_machine() -> None:
    for file in sorted(RUNS.rglob("*.json")):
        record = next(iter(store.load_records([file])))
        assert not record.smoke
        assert file.name == f"{record.run_id}.json"
        assert file.parent == RUNS / record.task / record.backbone
        assert not any(word.startswith("/") for word in record.command), f"{file}: an absolute path in the command"


def test_mae_beats_scratch_by_more_than_the_spread_of_five_seeds() -> None:
    """The claim of the README, from the records themselves."""
    pairs = cells.compare(api.results(RUNS), "mae", "scratch").set_index("task")
    for task in ("tiny_linear", "tiny_finetune"):
        pair = pairs.loc[task]
        assert pair["n_1"] >= 5 and pair["n_2"] >= 5
        bound = 2 * math.hypot(pair["std_1"], pair["std_2"])
        assert pair["difference"] > bound > 0
