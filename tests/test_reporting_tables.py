"""Tables: which runs count, what a cell says, what stands beside it, and that hostile names stay text."""

from __future__ import annotations

import cProfile
import csv
import io
import itertools
import math
import re
import statistics
from typing import Any

import pandas as pd
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from reporting_records import record

from mae_bench.errors import UserError
from mae_bench.reporting.cells import cells, compare, select
from mae_bench.reporting.published import Published
from mae_bench.reporting.record import Record
from mae_bench.reporting.render import render
from mae_bench.reporting.store import frame
from mae_bench.reporting.tables import compared, results

PUBLISHED = Published(
    method="MAE", backbone="ViT-B/16", task="COCO", protocol="vitdet", protocol_id="coco-vitdet-maskrcnn-1024@1",
    metric="box_AP", value=51.6, pretrain_data="IN1K", pretrain_epochs=1600, source="ViTDet paper", verified=True,
    source_locator="Table 5", ours="vit_b_mae",
)  # fmt: skip
PLAIN = {"text", "code_inline", "text_special", "em_open", "em_close", "strong_open", "strong_close"}
SEEDS = {"mae": [48.0, 49.0, 50.5], "supervised": [44.0, 46.0, 45.0], "scratch": [40.0, 41.0, 39.0]}
RUNS = [
    record(init=init, seed=seed, value=value, baseline={"top1": 12.5})
    for init, found in SEEDS.items()
    for seed, value in enumerate(found)
]


def table(runs: pd.DataFrame, form: Any = "markdown", layout: Any = "wide", **options: Any) -> str:
    return render(results(runs, layout="full" if form == "csv" else layout, **options), form)


def comparison(runs: pd.DataFrame, first: str, second: str, form: Any = "markdown", **options: Any) -> str:
    return render(compared(runs, first, second, **options), form)


def rows(text: str) -> list[list[str]]:
    """Cells of a Markdown table, as a Markdown parser sees them: plain text only, or the test fails."""
    found: list[list[str]] = []
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(text.split("\n\n")[0]):
        if token.type == "tr_open":
            found.append([])
        elif token.type == "inline":
            assert {child.type for child in token.children or ()} <= PLAIN
            found[-1].append("".join(child.content for child in token.children or ()))
        else:
            assert re.match(r"(table|thead|tbody|tr|th|td)_(open|close)", token.type)
    return found


def show(*records: Record, **options: Any) -> list[list[str]]:
    return rows(table(frame(records), published=[PUBLISHED], **options))


def test_the_default_table() -> None:
    std = statistics.stdev(SEEDS["mae"])
    assert show(*RUNS) == [
        ["size", "backbone", "tiny_linear top1"],
        ["", "protocol", "tiny-linear@1"],
        ["", "trivial prediction", "12.50"],
        ["t", "vit_t_scratch", "40.00 ± 1.00 (n=3)"],
        ["t", "vit_t_supervised", "45.00 ± 1.00 (n=3)"],
        ["t", "vit_t_mae", f"49.17 ± {std:.2f} (n=3)"],
    ]


def test_one_seed_says_so_and_undefined_is_not_hidden() -> None:
    assert show(RUNS[0])[-1] == ["t", "vit_t_mae", "48.00 (n=1)"]
    assert show(RUNS[0], record(seed=1, value=float("nan")))[-1] == ["t", "vit_t_mae", "undefined (n=2)"]


def test_the_published_number_stands_beside_the_same_protocol_and_weights_only() -> None:
    same = record("coco", size="b", value=51.0)
    assert show(same)[0] == ["size", "backbone", "coco box_AP", "coco published", "coco gap", "coco verdict"]
    assert show(same)[-1] == ["b", "vit_b_mae", "51.00 (n=1)", "51.6", "-0.60", "one seed: -0.6"]
    assert "- published coco vit_b_mae: 51.6, ViTDet paper, Table 5\n" in table(frame([same]), published=[PUBLISHED])
    overridden = record("coco", size="b", overridden=["epochs"], protocol="coco-vitdet-maskrcnn-1024@1+set:1234abcd")
    other_weights = record("coco", size="b", weights={"kind": "given", "sha256": "ab" * 32})
    baseline = record("coco", size="b", init="scratch")
    for lone in (overridden, other_weights, baseline, record("coco")):
        assert show(lone)[0] == ["size", "backbone", "coco box_AP"]
    doubtful = PUBLISHED.model_copy(update={"verified": False})
    assert "51.6" not in table(frame([same]), published=[doubtful])


def test_overridden_runs_have_a_column_of_their_own() -> None:
    changes = {"overridden": ["epochs"], "protocol": "tiny-linear@1+set:1234abcd"}
    overridden = record(value=90.0, run_id="overridden", **changes)
    assert show(*RUNS, overridden)[1:4] == [
        ["", "protocol", "tiny-linear@1", "tiny-linear@1+set:1234abcd"],
        ["", "trivial prediction", "12.50", "–"],
        ["t", "vit_t_scratch", "40.00 ± 1.00 (n=3)", "–"],
    ]
    assert show(*RUNS, overridden)[-1][-1] == "90.00 (n=1)"


def test_given_weights_have_a_row_of_their_own() -> None:
    mine = record(seed=9, value=60.0, weights={"kind": "given", "sha256": "ab" * 32})
    assert show(*RUNS, mine)[-2:] == [
        ["t", "vit_t_mae", "49.17 ± 1.26 (n=3)"],
        ["t", "vit_t_mae given abababab", "60.00 (n=1)"],
    ]


def test_smoke_runs_are_refused_and_counted() -> None:
    smoke = record(value=99.0, smoke=True, protocol="tiny-linear@1+smoke", run_id="smoke")
    text = table(frame([*RUNS, smoke]), published=[])
    assert "99.00" not in text
    assert "- 1 run left out (smoke: two steps on made data measure nothing)\n" in text
    with pytest.raises(UserError, match="no results to show: 1 run left out"):
        table(frame([smoke]), published=[])
    with pytest.raises(UserError, match="no results to show: no records"):
        table(frame([]), published=[])


def test_pretraining_runs_are_no_results() -> None:
    pretrained = record(engine="pretraining", metric="other")
    with pytest.raises(UserError, match="pre-training: no transfer result"):
        table(frame([pretrained]), published=[])


def test_of_a_seed_the_newest_run_counts() -> None:
    again = [record(value=10.0 + day, run_id=f"{day}", created=f"2026-02-0{day}T00:00:00Z") for day in range(1, 7)]
    for older, newer in itertools.combinations(again, 2):
        assert show(newer, older)[-1][-1] == f"{newer.value:.2f} (n=1)"
    assert "5 runs left out (superseded" in table(frame(again), published=[])


def test_two_recipes_never_share_a_cell() -> None:
    old, new = record(seed=0, value=1.0, recipe_hash="a" * 64), record(seed=1, value=2.0, recipe_hash="b" * 64)
    assert show(old, new)[-1][-1] == "2.00 (n=1)"


def test_an_evaluation_stands_in_for_training_only_where_there_is_none() -> None:
    first = record(value=70.0, eval_only=True, weights={"kind": "file", "sha256": "a" * 64}, run_id="e1")
    second = record(value=72.0, eval_only=True, weights={"kind": "file", "sha256": "b" * 64}, run_id="e2")
    assert show(first, second)[-1][-1] == "71.00 ± 1.41 (n=2)†‡"
    assert show(first, RUNS[0])[-1][-1] == "48.00 (n=1)"
    assert "† a trained model evaluated" in table(frame([first]), published=[])


def test_marks() -> None:
    ours = [record(seed=seed, ours=["warmup_epochs", "base_lr"], weights={"kind": "made", "sha256": str(seed) * 64})
            for seed in (1, 2)]  # fmt: skip
    text = table(frame(ours), published=[])
    assert rows(text)[-1][-1] == "50.00 ± 0.00 (n=2)*‡"
    assert "- \\* recipe values that nobody published, in tiny_linear (vit_t_mae): base_lr, warmup_epochs\n" in text
    assert "- ‡ the runs have different weight files\n" in text
    assert "\\*" not in table(frame(RUNS), published=[])


def test_rows_and_columns_are_in_order() -> None:
    many = [record(task, init=init, size=size) for task in ("coco", "tiny_coco", "tiny_linear")
            for init in ("mae", "scratch") for size in ("l", "b", "t")]  # fmt: skip
    found = show(*many)
    assert found[0] == [
        "size", "backbone", "tiny_linear top1",
        "coco box_AP", "coco published", "coco gap", "coco verdict", "tiny_coco box_AP",
    ]  # fmt: skip
    assert [row[1] for row in found[2:]] == [f"vit_{size}_{init}" for size in "tbl" for init in ("scratch", "mae")]


def test_the_long_form_and_another_metric() -> None:
    run = record("coco", size="b", value=51.0, metrics={"box_AP": 51.0, "mask_AP": 45.0}, best={"box_AP": 52.0},
                 baseline={"box_AP": 0.0})  # fmt: skip
    assert show(run, layout="long")[1][4:] == [
        "vit_b_mae", "51.00", "1", "52.00", "0.00", "51.6", "-0.60", "one seed: -0.6",
    ]  # fmt: skip
    assert rows(table(frame([run], "mask_AP"), published=[]))[-1] == ["b", "vit_b_mae", "45.00 (n=1)"]


def test_csv() -> None:
    text = table(frame([*RUNS, record("coco", size="b", value=51.0)]), form="csv", published=[PUBLISHED])
    found = list(csv.DictReader(io.StringIO(text)))
    assert [row["backbone"] for row in found] == ["vit_t_scratch", "vit_t_supervised", "vit_t_mae", "vit_b_mae"]
    assert (found[0]["mean"], found[0]["std"], found[0]["n"], found[0]["seeds"]) == ("40.0000", "1.0000", "3", "0 1 2")
    assert (found[0]["trivial"], found[0]["published"], found[0]["gap"]) == ("12.5000", "", "")
    assert (found[3]["std"], found[3]["published"], found[3]["gap"]) == ("", "51.6000", "-0.6000")


RUN_POOL = [
    *RUNS,
    record(seed=0, value=10.0, run_id="again", created="2026-02-01T00:00:00+00:00"),
    record(seed=1, value=11.0, run_id="same-time"),
    record(seed=1, value=12.0, recipe_hash="a" * 64, run_id="recipe"),
    record(seed=4, value=70.0, eval_only=True),
    record(seed=2, ours=["epochs"], overridden=["epochs"], protocol="tiny-linear@1+set:1234abcd", run_id="set"),
    record("tiny_coco", value=0.1, baseline={"box_AP": 0.0}),
    record("coco", size="b", value=51.0),
    record("coco", size="b", value=float("nan"), seed=1),
    record(smoke=True, protocol="tiny-linear@1+smoke", run_id="smoke"),
]


@settings(max_examples=15)  # a table takes some 20 ms, more on a busy computer
@given(st.lists(st.sampled_from(RUN_POOL), min_size=1, unique_by=id), st.randoms(), st.data())
def test_order_and_copies_never_change_a_table(chosen: list[Record], random: Any, data: st.DataObject) -> None:
    copies = [*chosen, *data.draw(st.lists(st.sampled_from(chosen)))]
    random.shuffle(copies)

    def outcome(records: list[Record]) -> list[str]:
        runs, texts = frame(records), []
        for make in (
            lambda: table(runs, published=[PUBLISHED]),
            lambda: table(runs, form="csv", published=[PUBLISHED]),
            lambda: comparison(runs, "mae", "scratch"),
        ):
            try:
                texts.append(make())
            except UserError as error:
                texts.append(f"refused: {error}")
        return texts

    assert outcome(copies) == outcome(chosen)


@settings(max_examples=40)
@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
@example("a|b\\|c", "`x`")
@example("<script>alert(1)</script>", "[x](javascript:1)")
@example("*a* _b_ ~~c~~ &amp;", "line\nbreak | - |")
@example("![x](http://a)", "<http://a>")
def test_hostile_names_stay_text(name: str, key: str) -> None:
    hostile = record(backbone=name, metric=key, metrics={key: 1.0}, ours=[key])
    text = table(frame([hostile]), published=[])
    found = rows(text)
    assert {len(row) for row in found} == {3}
    assert len(found) == 3
    assert "".join(found[-1][1].split()) == "".join(c for c in name if c.isprintable() and not c.isspace())
    notes = MarkdownIt("commonmark").parse(text.partition("\n\n")[2])
    assert {token.type for token in notes} <= {
        "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close", "paragraph_open",
        "paragraph_close", "inline",
    }  # fmt: skip
    inline = {child.type for token in notes for child in token.children or ()}
    assert inline <= {"text", "code_inline", "text_special"}


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@x", '"', "a,b", "a\nb"])
def test_hostile_names_in_csv(name: str) -> None:
    text = table(frame([record(backbone=name)]), form="csv", published=[])
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["backbone"].lstrip("'") == name.replace("\n", " ")
    assert row["backbone"][0] not in "=+-@"


def test_comparison_by_seed_pairs() -> None:
    """A paired t test over three seeds; the bound on the means is not shown where it decides nothing."""
    pairs = compare(frame(RUNS), "mae", "scratch")
    differences = [a - b for a, b in zip(SEEDS["mae"], SEEDS["scratch"], strict=True)]
    bound = 2 * (statistics.stdev(SEEDS["mae"]) ** 2 + statistics.stdev(SEEDS["scratch"]) ** 2) ** 0.5
    assert pairs["difference"].iloc[0] == pytest.approx(statistics.mean(SEEDS["mae"]) - 40.0)
    assert pairs["bound"].iloc[0] == pytest.approx(bound)
    reference = scipy.stats.ttest_1samp(differences, 0.0)
    assert pairs["p"].iloc[0] == pytest.approx(reference.pvalue)
    low, high = reference.confidence_interval()
    assert rows(comparison(frame(RUNS), "mae", "scratch"))[1] == [
        "tiny_linear", "tiny-linear@1", "top1", "vit_t_mae", "49.17 ± 1.26 (n=3)", "vit_t_scratch",
        "40.00 ± 1.00 (n=3)", "+9.17", f"{low:+.2f}", f"{high:+.2f}", f"{reference.pvalue:.2g}", "3",
        "mae above",
    ]  # fmt: skip
    assert rows(comparison(frame(RUNS), "scratch", "mae"))[1][-1] == "scratch below"


def test_comparison_without_seed_pairs_shows_its_bound() -> None:
    apart = [run for run in RUNS if run.init == "scratch"]
    apart += [record(init="mae", seed=seed, value=value) for seed, value in enumerate(SEEDS["mae"], start=10)]
    head, row = rows(comparison(frame(apart), "mae", "scratch"))[:2]
    assert (row[head.index("2·√(s₁² + s₂²)")], row[-1]) == ("3.21", "mae above")


@pytest.mark.parametrize(
    ("mae", "scratch", "verdict"),
    [
        ([50.0], [10.0], "n = 1"),
        ([50.0, 60.0], [54.0, 56.0], "within noise"),
        ([50.0, float("nan")], [1.0], "undefined"),
    ],
)
def test_verdicts(mae: list[float], scratch: list[float], verdict: str) -> None:
    runs = [record(init=init, seed=seed, value=value) for init, found in (("mae", mae), ("scratch", scratch))
            for seed, value in enumerate(found)]  # fmt: skip
    assert rows(comparison(frame(runs), "mae", "scratch"))[1][-1] == verdict


def test_comparison_keeps_sizes_and_protocols_apart() -> None:
    runs = [record(init="mae", size="t"), record(init="scratch", size="b"), record("tiny_coco", init="scratch")]
    with pytest.raises(UserError, match="nothing to compare"):
        comparison(frame(runs), "mae", "scratch")
    with pytest.raises(UserError, match=r"unknown initialisation 'scrach' \(did you mean 'scratch'\?\)"):
        comparison(frame(runs), "mae", "scrach")


def test_several_backbones_of_one_initialisation_are_pairs_of_their_own() -> None:
    """Each backbone against each; the p of a row counts how often the question was asked."""
    other = [
        record(seed=seed, value=value + 0.1, backbone="vit_t_mae_pixel", run_id=f"pixel{seed}")
        for seed, value in enumerate(SEEDS["mae"])
    ]
    pairs = compare(frame([*RUNS, *other]), "mae", "scratch")
    assert list(pairs["backbone_1"]) == ["vit_t_mae", "vit_t_mae_pixel"]
    assert list(pairs["adjusted"]) == pytest.approx([2 * min(pairs["p"])] * 2, rel=0.1)
    assert "Holm's method over the 2 rows" in comparison(frame([*RUNS, *other]), "mae", "scratch")


def test_seeds_that_one_side_lacks_are_no_pairs() -> None:
    shifted = [record(init="scratch", seed=seed + 2, value=value) for seed, value in enumerate([40.0, 41.0, 39.0])]
    (pair,) = compare(frame([*RUNS[:3], *shifted]), "mae", "scratch").to_dict("records")
    assert (pair["pairs"], math.isnan(pair["p"]), pair["verdict"]) == (1, True, "above")
    evaluated = [record(seed=0, eval_only=True, run_id=f"e{i}", weights={"kind": "file", "sha256": str(i) * 64})
                 for i in (1, 2)]  # fmt: skip
    (pair,) = compare(frame([*evaluated, *RUNS[6:]]), "mae", "scratch").to_dict("records")
    assert pair["pairs"] == 0


def test_comparison_as_csv() -> None:
    (row,) = csv.DictReader(io.StringIO(comparison(frame(RUNS), "mae", "scratch", form="csv")))
    assert (row["mae backbone"], row["mae mean"], row["mae mean n"]) == ("vit_t_mae", "49.1667", "3")
    assert (row["difference"], row["seed pairs"], row["verdict"]) == ("9.1667", "3", "mae above")


def judged(*runs: Record, stale: dict[int, str], other: tuple[int, ...] = ()) -> pd.DataFrame:
    """Runs with what `staleness.judge` says, by seed."""
    found = frame(runs)
    return found.assign(
        stale=[stale.get(seed, "") for seed in found["seed"]], other_code=[seed in other for seed in found["seed"]]
    )


def test_stale_runs_are_left_out_and_counted_by_reason() -> None:
    runs = judged(*RUNS[:3], stale={0: "protocol a@1 is now a@2", 2: "the task recipe has changed"})
    text = table(runs, published=[])
    assert rows(text)[-1][-1] == "49.00 (n=1)"
    assert "- 1 run left out (stale: protocol a@1 is now a@2; --stale takes them in)\n" in text
    assert "- 1 run left out (stale: the task recipe has changed; --stale takes them in)\n" in text
    taken = table(runs, published=[], stale=True)
    assert rows(taken)[-1][-1] == "49.17 ± 1.26 (n=3)¶"
    assert "- ¶ stale: protocol a@1 is now a@2; the task recipe has changed\n" in taken
    with pytest.raises(UserError, match=r"no results to show: 3 runs left out \(stale: old;"):
        table(judged(*RUNS[:3], stale=dict.fromkeys(range(3), "old")), published=[])


def test_a_stale_run_never_hides_a_current_one() -> None:
    """The newest run's recipe counts in a cell: of the runs that count at all."""
    new = record(seed=1, value=9.0, recipe_hash="a" * 64)
    assert rows(table(judged(record(seed=0, value=1.0), new, stale={1: "old"}), published=[]))[-1][-1] == "1.00 (n=1)"


def test_other_code_is_marked() -> None:
    text = table(judged(*RUNS[:3], stale={}, other=(1,)), published=[])
    assert rows(text)[-1][-1] == "49.17 ± 1.26 (n=3)§"
    assert "- § made by other code than this tree's\n" in text


def test_best_and_second_best_of_one_protocol_and_size() -> None:
    larger = record(init="mae", size="b", value=90.0)
    lines = table(frame([*RUNS, larger]), published=[]).splitlines()
    assert "**49.17 ± 1.26 (n=3)**" in next(line for line in lines if "vit_t_mae" in line)
    assert "*45.00 ± 1.00 (n=3)*" in next(line for line in lines if "vit_t_supervised" in line)
    assert "*" not in next(line for line in lines if "vit_b_mae" in line)


def test_cells_of_nothing_and_a_filtered_frame() -> None:
    assert cells(select(frame([]))[0]).empty
    runs = frame(RUNS)
    assert len(rows(table(runs[runs["init"] == "mae"], published=[]))) == 4


def test_work_grows_with_the_number_of_runs_alone() -> None:
    """Counted, not timed: calls of Python functions for 200 and for 800 cells."""

    def calls(cells: int) -> int:
        whole = record()
        runs = frame([whole.model_copy(update={"backbone": f"b{i}", "run_id": f"r{i}"}) for i in range(cells)])
        profile = cProfile.Profile()
        profile.runcall(table, runs, published=[PUBLISHED])
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(800) < 5 * calls(200)
