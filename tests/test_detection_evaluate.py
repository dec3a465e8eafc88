"""Average precision: against pycocotools, at the edges, and through the category ids of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import detectron2.evaluation.coco_evaluation as detectron_coco
import numpy as np
import pytest
import torch
from detection_cases import IDS, SPEC, Oracle, annotation, values, write_data
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator
from torch import nn

from mae_bench.data import CocoSplit, Dataset, open_dataset
from mae_bench.detection.data import evaluation_examples, read_split
from mae_bench.detection.evaluate import Evaluation, evaluate
from mae_bench.detection.logs import logged


def measure(model: nn.Module, split: CocoSplit, folder: Path) -> Evaluation:
    examples = evaluation_examples(read_split(split), values())
    with logged(folder / "log.txt"):
        return evaluate(model, examples, split, shard=range(len(examples)), batch=2, workers=0)


def test_right_answers_score_100_per_class_and_for_masks(tmp_path: Path) -> None:
    split = write_data(tmp_path / "data").coco("val")
    found = measure(Oracle(split), split, tmp_path)
    assert found.metrics["box_AP"] == pytest.approx(100)
    assert found.metrics["mask_AP75"] == pytest.approx(100)
    assert found.per_class == {
        f"colour {id}": {"box_AP": pytest.approx(100), "mask_AP": pytest.approx(100)} for id in IDS
    }
    # All objects are small: medium and large are undefined, and left out.
    assert set(found.metrics) == {f"{kind}_AP{part}" for kind in ("box", "mask") for part in ("", "50", "75", "s")}
    assert found.baseline == dict.fromkeys(found.metrics, 0.0)


def test_answers_of_another_class_score_0(tmp_path: Path) -> None:
    split = write_data(tmp_path / "data").coco("val")

    def shifted(rows: Any) -> Any:
        rows[:, 4] = (rows[:, 4] + 1) % 3
        return rows

    assert measure(Oracle(split, shifted), split, tmp_path).metrics["box_AP"] == 0


def test_finding_nothing_is_legal(tmp_path: Path) -> None:
    split = write_data(tmp_path / "data").coco("val")
    found = measure(Oracle(split, lambda rows: rows[:0]), split, tmp_path)
    assert found.metrics == found.baseline == dict.fromkeys(found.metrics, 0.0)
    assert found.per_class == {f"colour {id}": {"box_AP": 0.0, "mask_AP": 0.0} for id in IDS}


def test_pictures_without_objects_are_evaluated(tmp_path: Path) -> None:
    split = write_data(tmp_path / "data", empty=2).coco("val")

    def everywhere(rows: Any) -> Any:
        return rows if len(rows) else torch.tensor([[5.0, 5, 9, 10, 0, 0.95]], dtype=torch.float64)

    found = measure(Oracle(split, everywhere), split, tmp_path)
    assert found.per_class["colour 3"]["box_AP"] < 90  # two false alarms above three right answers
    assert found.per_class["colour 7"]["box_AP"] == pytest.approx(100)


def test_classes_without_objects_are_undefined_not_minus_one(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    file = dataset.coco("val").annotations
    content = json.loads(file.read_text())
    content["annotations"] = [one for one in content["annotations"] if one["category_id"] != IDS[2]]
    file.write_text(json.dumps(content))
    split = open_dataset(SPEC, dataset.root).coco("val")
    for model in (Oracle(split), Oracle(split, lambda rows: rows[:0])):
        found = measure(model, split, tmp_path)
        assert set(found.per_class) == {"colour 3", "colour 7"}
        assert 0 <= found.metrics["box_AP"] <= 100


def test_a_single_class_has_its_ap(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    for name in ("train", "val"):
        file = dataset.coco(name).annotations  # type: ignore[arg-type]
        content = json.loads(file.read_text())
        content["categories"] = [{"id": IDS[0], "name": "AP-1"}]
        content["annotations"] = [one for one in content["annotations"] if one["category_id"] == IDS[0]]
        file.write_text(json.dumps(content))
    split = open_dataset(SPEC, dataset.root).coco("val")
    assert measure(Oracle(split), split, tmp_path).per_class == {
        "AP-1": {"box_AP": pytest.approx(100), "mask_AP": pytest.approx(100)}
    }


def random_data(root: Path) -> Dataset:
    """Forty pictures of 40 x 30 with random rectangles of all sizes; the crowd region stays."""
    dataset = write_data(root, empty=37)
    file = dataset.coco("val").annotations
    content = json.loads(file.read_text())
    rng = np.random.default_rng(0)
    for number in range(200):
        x, y = rng.integers(0, 30), rng.integers(0, 20)
        w, h = rng.integers(2, 41 - x), rng.integers(2, 31 - y)
        numbers = [int(value) for value in (x, y, w, h)]
        image = 10 * int(rng.integers(0, 38))
        made = annotation(1000 + number, image, IDS[int(rng.integers(0, 3))], *numbers)
        content["annotations"].append(made | {"area": made["area"] * int(rng.integers(1, 20))})  # also medium and large
    file.write_text(json.dumps(content))
    return open_dataset(SPEC, root)


def noisy(rows: Any) -> Any:
    """Moved, dropped, doubled and mislabelled answers with tied scores; the same for equal rows."""
    rng = np.random.default_rng(int(rows.sum().item() * 7) % 1000)
    rows = rows.repeat(2, 1)[rng.random(2 * len(rows)) < 0.8]
    rows[:, :4] += torch.from_numpy(rng.integers(-2, 3, (len(rows), 4)))
    rows[:, 2:4] = rows[:, 2:4].clamp(min=1)
    wrong = torch.from_numpy(rng.random(len(rows)) < 0.2)
    rows[wrong, 4] = (rows[wrong, 4] + 1) % 3
    rows[:, 5] = torch.from_numpy(rng.integers(1, 8, len(rows)) / 10)
    return rows


def test_counting_equals_pycocotools(tmp_path: Path) -> None:
    split = random_data(tmp_path / "data").coco("val")
    fast = measure(Oracle(split, noisy), split, tmp_path)
    assert detectron_coco.COCO.__module__ == "pycocotools.coco", "detectron2's module is left as it was"
    MetadataCatalog.get("by_hand").set(
        json_file=str(split.annotations),
        thing_classes=list(split.names),
        thing_dataset_id_to_contiguous_id=dict(split.ids),
    )
    try:
        with logged(tmp_path / "log.txt"):
            evaluator = COCOEvaluator("by_hand", tasks=("bbox", "segm"), use_fast_impl=False)
            evaluator.reset()
            oracle = Oracle(split, noisy)
            for record in read_split(split).records:
                evaluator.process([record], oracle([record]))
            slow = evaluator.evaluate()
    finally:
        MetadataCatalog.remove("by_hand")
    assert 5 < fast.metrics["box_AP"] < 95
    for kind, prefix in (("bbox", "box_"), ("segm", "mask_")):
        for name in ("AP", "AP50", "AP75", "APs", "APm", "APl"):
            assert fast.metrics[prefix + name] == pytest.approx(slow[kind][name], abs=1e-9)
        for name in split.names:
            assert fast.per_class[name][prefix + "AP"] == pytest.approx(slow[kind][f"AP-{name}"], abs=1e-9)


def test_nothing_is_printed_and_nothing_is_left_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    split = write_data(tmp_path / "data").coco("val")
    before = set(MetadataCatalog.list())
    measure(Oracle(split), split, tmp_path)
    assert capfd.readouterr() == ("", "")
    assert set(MetadataCatalog.list()) == before
    assert "Average Precision" in (tmp_path / "log.txt").read_text()
