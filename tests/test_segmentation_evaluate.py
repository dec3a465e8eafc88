"""Scores of segmentation against hand-computed cases and mmseg's IoUMetric."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.logging import MMLogger
from mmseg.evaluation import IoUMetric
from torch import Tensor

from mae_bench.errors import UserError
from mae_bench.segmentation.evaluate import count_areas, majority, score


def maps(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


def test_iou_by_hand_with_ignored_pixels() -> None:
    labels = maps([[0, 0, 1, 1], [0, 255, 1, 2], [255, 255, 2, 2]])
    predicted = maps([[0, 1, 1, 1], [0, 0, 2, 2], [1, 2, 2, 0]])
    areas = count_areas(predicted, labels, 3)
    # intersection, union, predicted, labelled over the nine labelled pixels
    assert areas.tolist() == [[2, 2, 2], [4, 4, 4], [3, 3, 3], [3, 3, 3]]
    result = score(areas, ["a", "b", "c"])
    assert result.metrics == pytest.approx({"mIoU": 50.0, "mAcc": 100 * 2 / 3, "aAcc": 100 * 6 / 9})
    assert result.per_class["c"] == pytest.approx({"IoU": 50.0, "Acc": 100 * 2 / 3})
    assert result.absent == 0


def test_classes_without_a_label() -> None:
    """``b`` is neither labelled nor predicted: left out. ``c`` is predicted where it is not: IoU 0 counts, Acc is
    undefined."""
    areas = count_areas(maps([[0, 0, 0, 2]]), maps([[0, 0, 0, 0]]), 3)
    result = score(areas, ["a", "b", "c"])
    assert result.absent == 1
    assert result.per_class == {"a": {"IoU": 75.0, "Acc": 75.0}, "b": {}, "c": {"IoU": 0.0}}
    assert result.metrics == {"mIoU": 37.5, "mAcc": 75.0, "aAcc": 75.0}


def test_classes_of_one_name_stay_apart() -> None:
    result = score(count_areas(maps([[0, 1, 2]]), maps([[0, 1, 1]]), 3), ["car", "bus", "car"])
    assert result.per_class == {
        "car (0)": {"IoU": 100.0, "Acc": 100.0},
        "bus": {"IoU": 50.0, "Acc": 50.0},
        "car (2)": {"IoU": 0.0},
    }


def test_scores_come_from_summed_counts_not_from_means_over_pictures() -> None:
    labels = [maps([[0, 1]]), maps([[0] * 8 + [1]])]
    predicted = [maps([[0, 0]]), maps([[0] * 8 + [1]])]
    one, two = count_areas(predicted[0], labels[0], 2), count_areas(predicted[1], labels[1], 2)
    together = score(one + two, ["a", "b"])
    assert together.per_class["b"]["IoU"] == pytest.approx(50.0)
    assert together.per_class["a"]["IoU"] == pytest.approx(90.0)
    assert torch.equal(one + two, count_areas(torch.cat(predicted, 1), torch.cat(labels, 1), 2))


def test_majority_baseline_by_hand() -> None:
    labels = maps([[2, 2, 2, 2, 2, 0, 0, 1, 255, 255]])
    base = majority(count_areas(torch.zeros_like(labels), labels, 4), ["a", "b", "c", "d"])
    # 5 of 8 labelled pixels are c; three classes occur, d does not
    assert base == pytest.approx({"mIoU": 100 * (5 / 8) / 3, "mAcc": 100 / 3, "aAcc": 100 * 5 / 8})


def test_no_labelled_pixel_is_told() -> None:
    with pytest.raises(UserError, match="no labelled pixel"):
        score(count_areas(maps([[0, 1]]), maps([[255, 255]]), 2), ["a", "b"])


def test_counts_are_exact_above_what_float32_can_count() -> None:
    """mmseg's histogram of one picture with 2^24 + 6 pixels of a class loses the last ones."""
    pixels = torch.zeros(2, (1 << 23) + 3, dtype=torch.uint8)
    assert count_areas(pixels, pixels, 2)[:, 0].tolist() == [pixels.numel()] * 4


@given(seed=st.integers(0, 2**31), classes=st.integers(2, 150), pictures=st.integers(1, 4))
@settings(max_examples=25)
def test_scores_equal_mmsegs_metric(seed: int, classes: int, pictures: int) -> None:
    random = np.random.default_rng(seed)
    MMLogger.get_current_instance().setLevel("ERROR")
    metric = IoUMetric()
    metric.dataset_meta = {"classes": [f"class {number}" for number in range(classes)]}
    areas = torch.zeros(4, classes, dtype=torch.long)
    for _ in range(pictures):
        labels = torch.from_numpy(random.integers(0, classes, (13, 17), np.uint8))
        predicted = torch.from_numpy(random.integers(0, classes, (13, 17), np.uint8))
        predicted[:7] = labels[:7]
        labels[torch.from_numpy(random.random((13, 17)) < 0.2)] = 255
        areas += count_areas(predicted, labels, classes)
        metric.process({}, [{"pred_sem_seg": {"data": predicted[None]}, "gt_sem_seg": {"data": labels[None]}}])
    result = score(areas, metric.dataset_meta["classes"])
    for name, value in metric.compute_metrics(metric.results).items():
        assert result.metrics[name] == pytest.approx(value, abs=0.006)  # theirs is rounded to two digits
