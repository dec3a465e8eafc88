"""Which runs stand in a suite's table."""

from __future__ import annotations

from typing import Any

import pytest
from reporting_records import values

from mae_bench.reporting import ablations
from mae_bench.reporting.record import record_from


def test_the_newest_run_of_a_seed_counts_and_smoke_never() -> None:
    row = ablations.Row("", "cell", "", "", 0, "1" * 64, ("2" * 64,))
    weights = {"kind": "given", "sha256": "3" * 64, "maker": {"recipe_hash": "1" * 64}}
    common = values(recipe_hash="2" * 64, weights=weights)
    newer = common | {"created": "2026-02-01T00:00:00+00:00", "metrics": {"top1": 60.0, "other": 1.0}}
    smoke = common | {"smoke": True, "seed": 1, "protocol": "tiny-linear@1+smoke"}
    foreign = common | {"seed": 2, "weights": weights | {"maker": {"recipe_hash": "9" * 64}}}
    records = [record_from(one) for one in (newer, common, smoke, foreign)]
    columns = [ablations.Column("tiny_linear", "")]
    (line,) = ablations.suite_table("t", [row], columns, records, source="", comparable=True).rows
    assert line.cells[-1].text == "60.00 (n=1)"


OWN = {"protocol": "tiny-linear@1", "data": values()["data"]}
ELSEWHERE = {"protocol": "tiny-linear@1+data:44444444", "data": values()["data"] | {"matches": False}}
MADE_ON = "left out (of weights that were pre-trained on other data than the recipe names)"


@pytest.mark.parametrize(
    ("pretraining", "transfer", "any_data", "note"),
    [
        (OWN, OWN, (), ""),
        (OWN | {"protocol": "tiny-linear@1+set:deadbeef", "overridden": ["steps"]}, OWN, (), ""),
        (OWN, ELSEWHERE, (), "1 run left out (on other data than the recipe names)"),
        (OWN, OWN | {"protocol": ELSEWHERE["protocol"]}, (), "1 run left out (on other data than the recipe names)"),
        (ELSEWHERE, OWN, (), f"1 run {MADE_ON}"),
        (ELSEWHERE, OWN, "1" * 64, ""),
    ],
    ids=["own", "set", "data", "protocol", "pre-training", "any"],
)  # fmt: skip
def test_a_run_on_other_data_is_left_out_of_the_table(
    pretraining: dict[str, Any], transfer: dict[str, Any], any_data: str, note: str
) -> None:
    row = ablations.Row("", "cell", "", "", 0, "1" * 64, ("2" * 64,))
    made = {"engine": "pretraining", "metric": "loss", "metrics": {"loss": 0.5}, "task": "tiny_pretrain"}
    maker = record_from(values(run_id="maker", recipe_hash="1" * 64) | made | pretraining)
    weights = {"kind": "given", "maker": {"recipe_hash": "1" * 64, "run_id": "maker"}}
    run = record_from(values(recipe_hash="2" * 64, weights=weights) | transfer)
    columns = [ablations.Column("tiny_linear", "")]
    table = ablations.suite_table(
        "t", [row], columns, [maker, run], source="", comparable=True, any_data=[any_data] if any_data else ()
    )
    assert table.rows[0].cells[-1].text == ("–" if note else "50.00 (n=1)")
    assert [one for one in table.notes if "left out" in one] == ([note] if note else [])
