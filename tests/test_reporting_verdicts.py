"""Verdicts beside published numbers: by hand, and held to their error rate; and what looks wrong by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from reporting_records import record

from mae_bench.reporting.published import Published
from mae_bench.reporting.statistics import Summary, summarise
from mae_bench.reporting.store import frame
from mae_bench.reporting.verdicts import Flag, against, flags


def published(value: float = 83.6, **changes: Any) -> Published:
    row = {
        "method": "MAE", "backbone": "ViT-B/16", "task": "ImageNet-1K", "protocol": "finetune",
        "protocol_id": "in1k-finetune-mae@1", "metric": "top1", "value": value, "pretrain_data": "IN1K",
        "source": "a paper", "source_locator": "Table 3", "verified": True, "ours": "vit_b_mae",
    }  # fmt: skip
    return Published.model_validate(row | changes)


def spread(mean: float, std: float, n: int) -> Summary:
    return Summary(n, mean, std, math.nan, math.nan)


@pytest.mark.parametrize(
    ("ours", "kind", "text"),
    [
        (spread(83.5, 0.1, 3), "within", "within noise"),
        (spread(83.0, 0.1, 3), "low", "low by 5.0σ"),  # 0.6 / sqrt(0.1^2 (1/3 + 1) + 0.1^2 / 12)
        (spread(83.2, 0.1, 3), "within", "within noise"),  # 3.4 standard errors, and 3 seeds need 4.3
        (spread(83.2, 0.1, 5), "low", "low by 3.5σ"),
        (spread(84.0, 0.1, 5), "above", "above by 3.5σ: check"),
        (spread(83.2, math.nan, 1), "one seed", "one seed: -0.4"),
        (spread(83.2, 0.0, 3), "no spread", "no spread over seeds: -0.4"),
        (spread(math.nan, math.nan, 3), "undefined", "undefined"),
    ],
)
def test_a_published_number_is_one_draw(ours: Summary, kind: str, text: str) -> None:
    found = against(ours, published())
    assert (found.kind, found.text) == (kind, text)
    assert math.isnan(found.sigmas) == (kind in ("one seed", "no spread", "undefined"))


def test_a_published_spread_is_used() -> None:
    known = published(83.57, std=0.09, std_n=4, n=4, spread="4 trials")
    found = against(spread(83.2, 0.12, 4), known)
    assert found.sigmas == pytest.approx(-0.37 / math.sqrt(0.12**2 / 4 + 0.09**2 / 4 + 0.01**2 / 12))
    assert found.text == "low by 4.9σ"
    assert against(spread(83.2, 0.0, 3), known).kind == "low"  # then it is the only one


def test_a_rounded_number_is_no_exact_one() -> None:
    """0.04 from a number printed with one decimal says nothing, however little the seeds spread."""
    assert against(spread(83.64, 0.001, 5), published(83.6)).kind == "within"
    assert against(spread(83.64, 0.001, 5), published(83.602)).kind == "above"


def test_a_higher_loss_is_worse() -> None:
    loss = published(0.731, metric="val_loss")
    assert against(spread(0.80, 0.01, 5), loss).text == "low by 6.3σ"
    assert against(spread(0.66, 0.01, 5), loss).text == "above by 6.5σ: check"


@pytest.mark.parametrize(
    ("row", "protocol"),
    [
        (published(protocol_id="none"), None),
        (published(verified=False), None),
        (published(), "in1k-finetune-mae@2"),
        (published(), "in1k-finetune-mae@1+set:0123abcd"),
    ],
)
def test_no_verdict_across_protocols(row: Published, protocol: str | None) -> None:
    with pytest.raises(ValueError, match="no verdict"):
        against(spread(83.5, 0.1, 3), row, protocol)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_one_in_twenty_equal_recipes_is_judged_different(n: int) -> None:
    """The promise of the 5 %: our seeds and the published run drawn from one distribution, 1500 times."""
    rng = np.random.default_rng(n)
    kinds = [
        against(summarise(rng.normal(50, 1, n).tolist()), published(round(float(rng.normal(50, 1)), 4))).kind
        for _ in range(2000)
    ]
    assert 0.035 < 1 - kinds.count("within") / len(kinds) < 0.065


def found(*records: Any) -> list[Flag]:
    return flags(frame(records))


BASE = {"top1": 12.5}


def seeds(*values: float, **changes: Any) -> list[Any]:
    name = changes.pop("name", "a")
    return [
        record(seed=seed, value=value, run_id=f"{name}{seed}", **({"baseline": BASE} | changes))
        for seed, value in enumerate(values)
    ]


def test_sound_runs_have_no_flags() -> None:
    assert found(*seeds(50.0, 51.0, 50.4), *seeds(61.0, 60.4, 61.8, name="b", init="supervised")) == []
    assert found() == []


def test_undefined_and_impossible_values() -> None:
    runs = [
        *seeds(None),
        *seeds(0, 101.0, name="b", init="dino"),
        *seeds(0, 0, 50.0, name="c", size="s", best={"top1": 49.0}),
    ]
    kinds = {(flag.kind, flag.runs[0]) for flag in found(*runs) if flag.kind in ("undefined", "impossible")}
    assert kinds == {("undefined", "a0"), ("impossible", "b1"), ("impossible", "c2")}


def test_a_best_loss_is_the_lowest() -> None:
    loss = {"metric": "loss", "metrics": {"loss": 0.5}}
    assert (
        found(
            record(**loss, best={"loss": 0.5}), record(seed=1, **loss | {"metrics": {"loss": 0.6}}, best={"loss": 0.4})
        )
        == []
    )
    (flag,) = found(record(**loss, best={"loss": 0.7}))
    assert flag.kind == "impossible" and "the best of all is 0.7" in flag.text


def test_chance() -> None:
    (flag,) = found(*seeds(12.4, 13.1, 12.9))
    assert (flag.kind, flag.runs) == ("chance", ("a0", "a1", "a2"))
    assert "12.8 is no better than a trivial prediction's 12.5" in flag.text
    assert [flag.kind for flag in found(*seeds(10.0, 20.0, 30.0))] == ["chance", "spread"]
    assert found(*seeds(13.5)) == []
    assert found(*seeds(12.5, baseline={})) == []


def test_identical_metrics_of_different_recipes() -> None:
    same = seeds(50.1, 51.3)
    other = seeds(50.1, 51.3, name="b", recipe_hash="9" * 64)
    (flag,) = found(*same, *other)
    assert (flag.kind, flag.runs) == ("identical", ("a0", "a1", "b0", "b1"))
    assert "identical at all 2 shared seeds" in flag.text
    assert found(*same, *seeds(50.1, 51.4, name="b", recipe_hash="9" * 64)) == []  # one seed differs: an accident
    assert found(*same, *seeds(50.1, 51.3, name="b", task="tiny_coco")) == []  # another task
    assert [flag.kind for flag in found(*same, *seeds(50.1, name="b", init="dino"))] == ["identical"]
    assert found(*seeds(100.0), *seeds(100.0, name="b", init="dino")) == []  # everything right may be shared


def test_a_rerun_of_a_seed_is_not_a_second_seed() -> None:
    assert found(record(value=50.0), record(value=50.0, created="2026-01-02T00:00:00+00:00", run_id="again")) == []


def test_dead_seed_and_wide_spread() -> None:
    assert [(flag.kind, len(flag.runs)) for flag in found(*seeds(50.0, 50.0, 50.0))] == [("dead seed", 3)]
    (flag,) = found(*seeds(40.0, 50.0, 60.0))
    assert flag.kind == "spread" and "wide for any task" in flag.text
    usual = [
        run
        for i, init in enumerate(("scratch", "supervised", "dino"))
        for run in seeds(60.0 + i, 60.2 + i, 60.4 + i, name=init, init=init)
    ]
    (flag,) = found(*usual, *seeds(70.0, 72.0, 74.0))
    assert (flag.kind, flag.runs) == ("spread", ("a0", "a1", "a2"))
    assert "usual is 0.2" in flag.text


def test_smoke_runs_are_passed_over_and_names_stay_on_one_line() -> None:
    assert found(record(value=None, smoke=True, protocol="tiny-linear@1+smoke")) == []
    (flag,) = found(record(value=None, backbone="a\nb\x1b[31m"))
    assert flag.text.isprintable()
