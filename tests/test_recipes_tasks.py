"""Every task recipe with every backbone: it resolves, fits the encoder and names its sources, or is refused and why."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import get_args

import pytest

from mae_bench import runs
from mae_bench.classification.adapter import check_pooling
from mae_bench.detection import adapter as detection
from mae_bench.engine.job import Options
from mae_bench.engine.plan import make_plan
from mae_bench.errors import UserError
from mae_bench.recipes import ResolvedTask, digest, index, load_backbone, load_task, resolve_task
from mae_bench.reporting import store
from mae_bench.schema import Backbone, ClassificationValues, DetectionValues, SegmentationValues
from mae_bench.schema.base import Init, Size
from mae_bench.segmentation import adapter as segmentation

ROOT = Path(__file__).resolve().parent.parent
TASKS, BACKBONES = sorted(index("task")), sorted(index("backbone"))
FULL = {"imagenet_pretrain", "imagenet_linear", "imagenet_finetune", "coco", "ade20k"}
TINY = {f"tiny_{name}" for name in ("pretrain", "supervised", "linear", "finetune", "coco", "ade20k")}
PHOTOS = {"coco_small", "camvid", "cifar10_pretrain", "cifar10_linear", "cifar10_finetune"}
SIZES, INITS = get_args(Size), get_args(Init)
# One backbone of everything that a layer can ask for.
FIRST = list(
    {
        (b.size, b.init, getattr(b.weights, "target", ""), b.architecture.layer_scale): name
        for name in reversed(BACKBONES)
        for b in (load_backbone(name),)
    }.values()
)


def _of(size: str, init: str) -> Backbone:
    """A backbone of a size and initialisation of which none need be shipped, as a user may bring one."""
    return load_backbone("vit_b_mae").model_copy(update={"name": f"vit_{size}_{init}", "size": size, "init": init})


def _refuses(task: str, init: str) -> bool:
    """Pre-training makes MAE's weights alone; windows have no place for BEiT's table."""
    pretrains = task.endswith("_pretrain") and init != "mae"
    return pretrains or (task in ("coco", "coco_small", "tiny_coco") and init.startswith("beit"))


REFUSED = [(t, b) for t in TASKS for b in FIRST if _refuses(t, load_backbone(b).init)]
RUNNABLE = [(t, b) for t in TASKS for b in FIRST if (t, b) not in REFUSED]


def _resolved(task: str) -> list[ResolvedTask]:
    combinations = itertools.product(SIZES, [init for init in INITS if not _refuses(task, init)])
    return [resolve_task(task, _of(size, init)) for size, init in combinations]


def test_the_tasks_are_these() -> None:
    assert set(TASKS) == FULL | TINY | PHOTOS


@pytest.mark.parametrize(("task", "backbone"), REFUSED)
def test_what_cannot_run_is_refused_by_name_and_with_what_can(task: str, backbone: str) -> None:
    why = "pre-training makes .*; name one, e.g. vit_" if task.endswith("_pretrain") else "windows .*; use a .* vit_"
    with pytest.raises(UserError, match=f"task '{task}' cannot run with '{backbone}': .*{why}"):
        resolve_task(task, load_backbone(backbone))


# Nothing else that is shipped is refused by the four full transfers.
UNRUNNABLE = {(task, name) for task in FULL for name in BACKBONES if load_backbone(name).refused} | {
    ("coco", f"vit_{size}_{kind}") for size in "bl" for kind in ("beit", "beit_v2")
}


@pytest.mark.parametrize("task", sorted(FULL - {"imagenet_pretrain"}))
def test_every_backbone_meets_every_full_protocol_or_is_refused_by_name(task: str) -> None:
    """By the checks that the pipelines themselves make before a run."""
    refused = set()
    for name in BACKBONES:
        try:
            backbone = runs._runnable(load_backbone(name))
            values = resolve_task(task, backbone).values
            if isinstance(values, ClassificationValues):
                check_pooling(values, backbone)
                assert values.image_size % backbone.architecture.patch == 0
            elif isinstance(values, DetectionValues):
                detection.check(values, backbone)
            else:
                segmentation.check_values(values, backbone, classes=150)
        except UserError as refusal:
            message = str(refusal)
            assert f"'{name}'" in message and "\n" not in message
            assert re.search(r"use (a backbone .*, e\.g\. )?vit_\w+", message), f"{message}: no mending edit"
            refused.add((task, name))
    assert refused == {pair for pair in UNRUNNABLE if pair[0] == task}


@pytest.mark.parametrize(("task", "backbone"), RUNNABLE)
def test_every_other_combination_resolves(task: str, backbone: str) -> None:
    resolved = resolve_task(task, load_backbone(backbone))
    assert resolved.protocol == resolved.task.protocol
    assert set(resolved.origins) == set(type(resolved.values).model_fields)
    assert all(origin.place and origin.source for origin in resolved.origins.values())
    # What the engine would refuse at the start of a run: idle values, a too long warmup, a batch without steps.
    images = resolved.task.data.expected.get("train", 20000)
    plan = make_plan(resolved.values, images, Options(), world_size=1)
    assert plan.steps > plan.warmup_steps
    assert plan.batch == resolved.values.batch


@pytest.mark.parametrize(("task", "backbone"), RUNNABLE)
def test_sizes_fit_the_encoder(task: str, backbone: str) -> None:
    shape = load_backbone(backbone).architecture
    values = resolve_task(task, load_backbone(backbone)).values
    patch = getattr(values, "patch", 0) or shape.patch
    if hasattr(values, "image_size"):
        assert values.image_size % patch == 0
    if isinstance(values, DetectionValues):
        assert patch % 4 == 0, "the pyramid's finest stride is a quarter of the patch"
        assert list(values.global_blocks) == sorted(set(values.global_blocks))
        assert values.global_blocks[-1] == shape.depth - 1
        if shape.depth > 4:  # the paper: four, one after each quarter of the depth
            assert values.global_blocks == tuple(shape.depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4))
    if isinstance(values, SegmentationValues):
        assert list(values.taps) == sorted(set(values.taps))
        assert values.taps[-1] == shape.depth - 1
        if values.test_mode == "whole":  # the relative bias has no entries beyond image_size
            assert max(values.resize) <= values.image_size and not values.stride
        else:
            assert 0 < values.stride <= values.image_size <= values.resize[1] <= values.resize[0]


@pytest.mark.parametrize("task", TASKS)
def test_every_layer_reaches_a_run(task: str) -> None:
    """A layer that no backbone takes is a slip in its `when`; so is one whose every value is set again later."""
    recipe = load_task(task)
    shipped = [load_backbone(name) for name in index("backbone")]
    admitted = [one for one in shipped if not any(refusal.when.admits(one) for refusal in recipe.refuse)]
    taken = [*_resolved(task), *(resolve_task(task, backbone) for backbone in admitted)]
    places = {origin.place for resolved in taken for origin in resolved.origins.values()}
    for number, _ in enumerate(recipe.layer, 1):
        assert any(place.startswith(f"tasks/{task}/task.toml layer {number} ") for place in places), number


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("init", INITS)
def test_an_initialisation_resolves_at_every_size_or_at_none(task: str, init: str) -> None:
    """Also where no backbone is shipped: a user may bring one, and no combination falls through the layers."""
    for size in SIZES:
        if _refuses(task, init):
            with pytest.raises(UserError, match="cannot run with"):
                resolve_task(task, _of(size, init))
        else:
            assert resolve_task(task, _of(size, init)).protocol == load_task(task).protocol


@pytest.mark.parametrize("task", sorted(FULL))
@pytest.mark.parametrize("size", ["s", "t"])
def test_nothing_is_published_of_the_small_sizes(task: str, size: str) -> None:
    for resolved in (resolve_task(task, _of(size, init)) for init in INITS if not _refuses(task, init)):
        lr = "epochs" if (task, size) == ("imagenet_pretrain", "t") else "base_lr"
        assert lr in resolved.ours


@pytest.mark.parametrize("task", TASKS)
def test_sources_are_public(task: str) -> None:
    """A source is "ours", a paper by its number, or a repository at a commit."""
    known = re.compile(r"^(ours|.*(arXiv \d{4}\.\d{5}|[\w-]+/[\w-]+@[0-9a-f]{7}).*)$")
    for layer in load_task(task).layer:
        for source in (layer.source, *layer.sources.values()):
            assert known.match(source), source


def test_protocol_ids_are_unique() -> None:
    ids = [load_task(task).protocol for task in TASKS]
    assert len(set(ids)) == len(ids)


def test_published_numbers_name_protocols_that_exist() -> None:
    known = {load_task(task).protocol for task in TASKS} | {"none"}
    metrics = {load_task(task).protocol: load_task(task).metric for task in FULL}
    primary: dict[str, set[str]] = {}
    for path in sorted((ROOT / "results" / "published").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                assert row["protocol_id"] in known, f"{path.name}: {row['protocol_id']}"
                primary.setdefault(row["protocol_id"], set()).add(row["metric"])
    for protocol, metric in metrics.items():
        if not protocol.startswith("in1k-mae"):
            assert metric in primary[protocol], f"{protocol} has no published {metric}"


@pytest.mark.parametrize("task", TASKS)
def test_data_and_documentation(task: str) -> None:
    recipe = load_task(task)
    assert bool(recipe.data.made) == (task in TINY)
    assert bool(recipe.data.expected) == (task in FULL)
    readme = (ROOT / "tasks" / task / "README.md").read_text(encoding="utf-8")
    assert recipe.protocol in readme
    assert re.search(
        rf"-m mae_bench (run|pretrain) .*--task {task}\b|-m mae_bench pretrain --backbone vit_t_mae", readme
    )
    for heading in ("## Protocol", "## Deviations", "## Expected", "## Command", "## Cost"):
        assert heading in readme, f"tasks/{task}/README.md has no {heading}"


@pytest.mark.parametrize("task", sorted(TINY - {"tiny_pretrain"}))
def test_baselines_are_treated_fairly(task: str) -> None:
    """A from-scratch row trains at least as long as the pre-trained ones, and without layer decay."""
    mae, supervised, scratch = (
        resolve_task(task, load_backbone(f"vit_t_{init}")).values for init in ("mae", "supervised", "scratch")
    )
    assert scratch.layer_decay == 1.0
    assert (scratch.epochs, scratch.steps) >= (mae.epochs, mae.steps)
    assert (supervised.epochs, supervised.steps) == (mae.epochs, mae.steps)


def test_committed_records_are_of_todays_recipes() -> None:
    """A recipe that changed since a record was promoted would leave its row without an experiment that can be run."""
    files = sorted((ROOT / "results" / "runs").rglob("*.json"))
    assert files
    for record in store.load_records(files):
        backbone = load_backbone(record.backbone)
        if record.engine == "pretraining":
            backbone = runs.untrained(backbone)
        assert not record.overridden
        assert digest(runs.recipe_of(resolve_task(record.task, backbone), backbone)) == record.recipe_hash, (
            record.run_id
        )
