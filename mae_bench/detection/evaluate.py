"""COCO average precision of boxes and masks: detectron2's ``COCOEvaluator``, with faster-coco-eval doing the counting.

The two differ by less than 1e-9 AP (a test compares them). Precision is in percent. A metric for which a split has no
ground truth (COCO says -1 there, detectron2 nan) is left out; no detection at all is legal and scores 0.
"""

from __future__ import annotations

import contextlib
import copy
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import detectron2.evaluation.coco_evaluation as detectron_coco
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator
from faster_coco_eval import COCO, COCOeval_faster
from torch import nn
from torch.utils.data import DataLoader, Subset

from mae_bench.data import CocoSplit
from mae_bench.detection.data import Examples, together
from mae_bench.detection.logs import printed_to_log
from mae_bench.engine import distributed
from mae_bench.engine.progress import Progress

PREFIXES = {"bbox": "box_", "segm": "mask_"}  # of the metrics, per kind of overlap


@dataclass(frozen=True)
class Evaluation:
    """``metrics``: box_AP, box_AP50, box_AP75, box_APs, box_APm, box_APl and the same for masks; ``per_class``: class
    name -> box_AP, mask_AP; ``baseline``: the metrics of an empty prediction."""

    metrics: dict[str, float] = field(default_factory=dict)
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)


class _Coco(COCO):
    """Ground truth whose ``loadRes`` leaves the caller's detections as they are: boxes and masks share one list."""

    def loadRes(self, results: list[dict[str, Any]], min_score: float = 0.0) -> COCO:  # noqa: N802  # COCO's own name
        return super().loadRes(copy.deepcopy(results), min_score)


@contextlib.contextmanager
def counting_fast() -> Iterator[None]:
    """While open, detectron2's evaluator counts with faster-coco-eval instead of pycocotools."""
    replaced = {"COCO": _Coco, "COCOeval": COCOeval_faster, "COCOeval_opt": COCOeval_faster}
    before = {name: getattr(detectron_coco, name) for name in replaced}
    for name, value in replaced.items():
        setattr(detectron_coco, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(detectron_coco, name, value)


@contextlib.contextmanager
def _evaluator(split: CocoSplit) -> Iterator[COCOEvaluator]:
    """detectron2's evaluator for a split; it takes its metadata from a global catalogue, which is left as it was."""
    name = f"mae_bench-{uuid.uuid4().hex}"
    MetadataCatalog.get(name).set(
        json_file=str(split.annotations),
        thing_classes=list(split.names),
        thing_dataset_id_to_contiguous_id=dict(split.ids),
    )
    try:
        with printed_to_log():
            evaluator = COCOEvaluator(name, tasks=tuple(PREFIXES), max_dets_per_image=None)
        evaluator.reset()
        yield evaluator
    finally:
        MetadataCatalog.remove(name)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Examples,
    split: CocoSplit,
    *,
    shard: Sequence[int],
    batch: int,
    workers: int = 0,
    quiet: bool = True,
) -> Evaluation:
    """Detect on the images ``shard`` of ``examples`` (this process's share) and score all processes' detections.

    Runs in fp32, as detectron2's ViTDet evaluation does. Every process gets the result. The model is left in the mode
    that it came in.
    """
    loader = DataLoader(Subset(examples, list(shard)), batch_size=batch, num_workers=workers, collate_fn=together)
    training = model.training
    model.eval()
    try:
        with counting_fast(), _evaluator(split) as evaluator:
            with Progress(len(loader), "detecting", quiet) as progress:
                for number, inputs in enumerate(loader, 1):
                    evaluator.process(inputs, model(inputs))
                    progress.update(number)
            return _score(evaluator, split)
    finally:
        model.train(training)


def _score(evaluator: COCOEvaluator, split: CocoSplit) -> Evaluation:
    with printed_to_log():
        results = evaluator.evaluate()
        if not results:  # only the main process has all detections; it tells the others
            return _from_main(Evaluation())
        empty = {task: _empty_prediction(evaluator, task) for task in PREFIXES}
    nothing_found = all(math.isnan(value) for value in results["bbox"].values())
    results = empty if nothing_found else results
    return _from_main(Evaluation(_metrics(results), _per_class(results, split.names), _metrics(empty)))


def _from_main(evaluation: Evaluation) -> Evaluation:
    first: Evaluation = distributed.gather_objects(evaluation)[0]
    return first


def _empty_prediction(evaluator: COCOEvaluator, task: str) -> dict[str, float]:
    """Scores of no detection at all: 0, or nan where there is no ground truth. detectron2 itself says nan for both."""
    truth = evaluator._coco_api
    counted = COCOeval_faster(truth, truth.loadRes([]), task)
    counted.evaluate()
    counted.accumulate()
    counted.summarize()
    scores: dict[str, float] = evaluator._derive_coco_results(counted, task, evaluator._metadata.thing_classes)
    return scores


def _metrics(results: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        PREFIXES[task] + name: value
        for task, scores in results.items()
        for name, value in scores.items()
        if not name.startswith("AP-") and not math.isnan(value)
    }


def _per_class(results: dict[str, dict[str, float]], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Class name -> AP of the kinds of overlap for which the class has ground truth."""
    by_class: dict[str, dict[str, float]] = {}
    for name in names:
        for task, scores in results.items():
            # With a single class detectron2 gives no AP per class: it is the AP.
            value = scores["AP"] if len(names) == 1 else scores[f"AP-{name}"]
            if not math.isnan(value):
                by_class.setdefault(name, {})[PREFIXES[task] + "AP"] = value
    return by_class
