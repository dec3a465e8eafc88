"""Two runs side by side: everything that differs is found, nothing else, and the text stays readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting_records import record, values

from mae_bench.errors import UserError
from mae_bench.reporting.compare import compare, compare_records, find
from mae_bench.reporting.record import PerImage, Record, record_from, write_record


def seen(correct: list[bool], names: str = "a" * 64, **changes: Any) -> Record:
    """A classifier's record with its images."""
    made = values(value=100 * sum(correct) / len(correct), **changes)
    made["data"] = made["data"] | {"counts": {"train": 8, "val": len(correct)}}
    return record_from(made | {"images": PerImage.of(names, correct)})


def test_a_run_beside_itself() -> None:
    found = compare_records(record(), record())
    assert found.obstacles == ()
    assert not any(found.changes.values())
    assert "Comparable: same data, metric top1 and protocol tiny-linear@1" in found.text()
    for title in ("Recipe", "Environment", "Weights", "Data"):
        assert f"{title}: the same\n" in found.text()


def test_recipe_values_come_with_their_origins() -> None:
    origins = [
        {"epochs": {"place": "tasks/x/task.toml layer 1", "source": "a paper"}},
        {"epochs": {"place": "--set", "source": ""}},
    ]
    a, b = (
        record(recipe={"values": {"epochs": epochs, "batch": 8}, "origins": origin})
        for epochs, origin in zip((90.0, 20.0), origins, strict=True)
    )
    (change,) = compare_records(a, b).changes["recipe"]
    assert (change.key, change.first, change.second) == ("values.epochs", 90.0, 20.0)
    assert (change.first_origin, change.second_origin) == ("tasks/x/task.toml layer 1; a paper", "--set")
    assert "    A  90.0 [tasks/x/task.toml layer 1; a paper]\n    B  20.0 [--set]\n" in compare_records(a, b).text()


def test_every_part_is_compared() -> None:
    weights = {"kind": "given", "sha256": "8" * 64, "maker": {"run_id": "m"}, "load": {"matched": 54}}
    other = record(
        seed=1, code_hash="9" * 64, git={"commit": "6" * 40, "dirty": True}, versions={"python": "3.12", "torch": "2"},
        weights=weights, data={"name": "shapes", "fingerprint": "7" * 64, "counts": {"train": 9}, "matches": True},
        effective={"lr": 0.1},
    )  # fmt: skip
    changes = {
        part: [change.key for change in found] for part, found in compare_records(record(), other).changes.items()
    }
    assert changes == {
        "recipe": ["seed", "effective", "effective.lr"],
        "environment": ["code_hash", "git.commit", "git.dirty", "versions.python", "versions.torch"],
        "weights": ["kind", "load", "load.matched", "maker", "maker.run_id", "sha256"],
        "data": ["counts.train", "counts.val", "fingerprint"],
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": "tiny-linear@1+set:1"}, "protocol differs: tiny-linear@1 and tiny-linear@1+set:1"),
        ({"data": values()["data"] | {"fingerprint": "7" * 64}}, f"data differs: {'4' * 12} and {'7' * 12}"),
        ({"metric": "other"}, "metric differs: top1 and other"),
        ({"eval_only": True}, "only A was trained by its run; the other evaluates a model"),
        ({"smoke": True, "protocol": "tiny-linear@1+smoke"}, "B is a smoke run: two steps on made data"),
    ],
)  # fmt: skip
def test_what_forbids_a_comparison_is_said_first(changes: dict[str, Any], reason: str) -> None:
    found = compare_records(record(), record(**changes))
    assert any(obstacle.startswith(reason) for obstacle in found.obstacles)
    assert "NOT comparable" in found.text().splitlines()[3]
    assert not found.as_dict()["comparable"]


def test_images_decide_whether_a_difference_is_noise() -> None:
    a, b = seen([True] * 70 + [False] * 30), seen([True] * 60 + [False] * 8 + [True] * 2 + [False] * 30, seed=1)
    test = compare_records(a, b).images
    assert test is not None
    assert (test.n, test.only_first, test.only_second) == (100, 8, 0)
    assert test.p == pytest.approx(2 / 2**8)
    assert "of 100 images only A has 8 right, only B 0: +8.00 points" in compare_records(a, b).text()


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (record(), seen([True, False]), "not in the record of A; run again"),
        (record(), record(), "not in the record of A and B"),
        (seen([True, False]), seen([True, False], names="b" * 64), "saw different images"),
        (record("tiny_coco"), record("tiny_coco"), "detection has no image that is simply right or wrong"),
    ],
)
def test_without_images_it_says_what_is_missing(a: Record, b: Record, why: str) -> None:
    found = compare_records(a, b)
    assert found.images is None
    assert why in found.no_images and found.no_images in found.text()


def test_classes_by_their_difference() -> None:
    a = record(per_class={"cat": {"top1": 90.0}, "dog": {"top1": 50.0}, "elk": {"top1": None}, "ox": {"top1": 10.0}})
    b = record(per_class={"cat": {"top1": 80.0}, "dog": {"top1": 75.0}, "elk": {"top1": 30.0}})
    found = compare_records(a, b)
    assert [(one.name, one.difference) for one in found.classes[:2]] == [("dog", -25.0), ("cat", 10.0)]
    assert [one.name for one in found.classes[2:]] == ["elk", "ox"]
    assert found.over_classes is not None
    assert (found.over_classes.n, found.over_classes.above, found.over_classes.below) == (2, 1, 1)
    many = {f"class {i:04}": {"top1": float(i % 7)} for i in range(1000)}
    assert "… and 988 more with smaller differences" in compare_records(record(per_class=many), record()).text()


def test_a_class_is_scored_by_what_the_metric_is_the_mean_of() -> None:
    scores = {"metric": "mIoU", "metrics": {"mIoU": 50.0}, "engine": "segmentation"}
    found = compare_records(record(**scores, per_class={"sky": {"Acc": 70.0, "IoU": 60.0}}), record(**scores))
    assert (found.class_metric, found.classes[0].first) == ("IoU", 60.0)
    assert "\nClasses: IoU " in found.text()


def curve(*losses: float | None) -> list[dict[str, float | None]]:
    return [{"step": float(step), "loss": loss, "lr": 0.1} for step, loss in enumerate(losses, 1)] + [
        {"step": 9.0, "top1": 1.0}
    ]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (curve(2.5, 2.25), curve(2.5, 2.25), "equal at all 2 steps that both noted, up to 2"),
        (curve(2.5, 2.25), curve(2.5, 2.125), "equal up to step 1, first different at step 2: 2.25 and 2.125"),
        (curve(2.5), curve(None), "first different at step 1: 2.5 and undefined"),
        (curve(), curve(2.5), "no step at which both runs noted a loss"),
        (curve(2.5), [{"loss": 1.0}, {"step": None, "loss": 1.0}], "no step at which both runs noted a loss"),
    ],
)  # fmt: skip
def test_the_first_step_at_which_losses_part(first: Any, second: Any, text: str) -> None:
    assert compare_records(record(history=first), record(history=second)).history == text


hostile = st.text(max_size=300)


@given(hostile, hostile, st.dictionaries(hostile, st.floats(allow_nan=False, allow_infinity=False), max_size=4))
def test_any_text_stays_within_its_line(name: str, value: str, metrics: dict[str, float]) -> None:
    a = record(
        run_id=name[:300] or "x",
        metrics={"top1": 1.0} | metrics,
        recipe={"values": {name: value}},
        versions={value: name},
    )
    b = record(per_class={name: {"top1": 2.0}}, data=values()["data"] | {"name": name})
    found = compare_records(a, b)
    assert found.text() == compare_records(a, b).text()
    assert all(len(line) <= 100 and (line.isprintable() or not line) for line in found.text().split("\n"))
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_run_is_found_by_file_folder_and_id(tmp_path: Path) -> None:
    file = write_record(record(), tmp_path / "runs" / "seed0")
    run_id = record().run_id
    for name in (file, file.parent, str(file), run_id):
        assert find(name, [tmp_path]) == record()
    found = compare(file, run_id, [tmp_path])
    assert found.first == found.second == run_id
    write_record(record(), tmp_path / "copy")  # a copy is the same run
    assert find(run_id, [tmp_path]) == record()


def test_a_run_that_cannot_be_found_is_named(tmp_path: Path) -> None:
    write_record(record(), tmp_path / "one")
    with pytest.raises(UserError, match=r"no run id below .*did you mean 'tiny_linear.vit_t_mae.seed0'"):
        find("tiny_linear.vit_t_mae.seed1", [tmp_path])
    with pytest.raises(UserError, match=r"holds no record\.json"):
        find(tmp_path, [tmp_path])
    write_record(record(value=51.0), tmp_path / "two")
    with pytest.raises(UserError, match="2 different records call themselves"):
        find(record().run_id, [tmp_path])
