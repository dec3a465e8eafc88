"""Made pictures: deterministic, the same content in three layouts, written atomically, verified when opened."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from mae_bench.data import Dataset, open_dataset, shapes, synthetic
from mae_bench.data.ade20k import read_label
from mae_bench.data.images import read_rgb
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

FOLDERS = DataSpec(
    format="image_folder", made="shapes", train="classification/train", val="classification/val", classes=8
)
COCO_SHAPES = DataSpec(
    format="coco",
    made="shapes",
    train="coco/train",
    val="coco/val",
    train_annotations="coco/annotations/train.json",
    val_annotations="coco/annotations/val.json",
    classes=8,
)
ADE_SHAPES = DataSpec(
    format="ade20k",
    made="shapes",
    train="ade20k/images/training",
    val="ade20k/images/validation",
    train_annotations="ade20k/annotations/training",
    val_annotations="ade20k/annotations/validation",
    classes=8,
    zero_is_other=True,
)


@pytest.fixture(scope="module")
def layouts() -> dict[str, Dataset]:
    return {spec.format: open_dataset(spec) for spec in (FOLDERS, COCO_SHAPES, ADE_SHAPES)}


def test_the_first_pictures_never_change() -> None:
    """A change here is a change of every published row on the made data: raise ``synthetic.VERSION`` with it."""
    total = hashlib.sha256()
    for seed in (0, 1, 2):
        for index in range(40):
            picture = shapes.draw(seed, index)
            total.update(picture.pixels.tobytes() + picture.labels().tobytes())
    assert total.hexdigest() == "9f3ae7727f6884c3737bf5f19db5c89a8075b0f945d91357c626d8fc5b6aa3eb"
    assert synthetic.VERSION == 3


@given(seed=st.integers(0, 2**32), index=st.integers(0, 2**32))
@settings(max_examples=60)
def test_a_picture_depends_on_seed_and_index_alone(seed: int, index: int) -> None:
    picture, again = shapes.draw(seed, index), shapes.draw(seed, index)
    assert np.array_equal(picture.pixels, again.pixels)
    main, *others = picture.shapes
    assert main.label == index % 8
    assert min(main.box[2:]) >= 30
    assert all(max(other.box[2:]) < min(main.box[2:]) for other in others)
    assert len(picture.shapes) <= 4
    x, y, width, height = main.box
    assert abs(x + width / 2 - 32) <= 12
    assert abs(y + height / 2 - 32) <= 12
    overlap = sum(shape.mask.astype(int) for shape in picture.shapes)
    assert np.max(overlap) == 1


def test_an_empty_picture_keeps_its_background() -> None:
    full, empty = shapes.draw(5, 3), shapes.draw(5, 3, empty=True)
    assert not empty.shapes
    outside = full.labels() == 0
    assert np.array_equal(full.pixels[outside], empty.pixels[outside])


def test_colour_and_position_do_not_give_the_class_away() -> None:
    """A nearest-mean classifier on the mean colour and the centre of the main shape stays near chance (1/8)."""
    pictures = [shapes.draw(9, index) for index in range(1600)]
    mains = [picture.shapes[0] for picture in pictures]
    colours = [picture.pixels[main.mask].mean(0) for picture, main in zip(pictures, mains, strict=True)]
    centres = [(main.box[0] + main.box[2] / 2, main.box[1] + main.box[3] / 2) for main in mains]
    features = np.hstack([colours, np.array(centres) * 4])  # to about the same spread
    labels = np.arange(1600) % 8
    means = np.stack([features[:800][labels[:800] == label].mean(0) for label in range(8)])
    guess = np.linalg.norm(features[800:, None] - means, axis=2).argmin(1)
    assert (guess == labels[800:]).mean() < 0.2


@pytest.mark.parametrize("name", shapes.CLASSES)
def test_masks_agree_with_pycocotools(name: str) -> None:
    polygons = shapes.place(name, 12, 9, 30)
    ours = shapes.rasterise(polygons, 64, 64)
    flat = [[value for point in polygon for value in point] for polygon in polygons]
    theirs = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(flat, 64, 64))).astype(bool)
    assert (ours & theirs).sum() / (ours | theirs).sum() > 0.9


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=9))
def test_run_lengths_agree_with_pycocotools(rows: list[list[bool]]) -> None:
    mask = np.array(rows)
    counts = synthetic.run_lengths(mask)
    packed = coco_mask.frPyObjects({"size": list(mask.shape), "counts": counts}, *mask.shape)
    assert np.array_equal(coco_mask.decode(packed), mask)


def test_counts_and_balance(layouts: dict[str, Dataset]) -> None:
    folders = layouts["image_folder"]
    assert folders.counts == {"train": 1000, "val": 1000}
    assert folders.classes == shapes.CLASSES
    assert np.bincount(folders.labelled("train").labels).tolist() == [125] * 8
    pretrain = open_dataset(FOLDERS.model_copy(update={"train": "classification/pretrain"}))
    assert pretrain.counts == {"train": 8000, "val": 1000}
    assert layouts["coco"].counts == layouts["ade20k"].counts == {"train": 200, "val": 60}
    assert layouts["ade20k"].classes == layouts["coco"].classes == shapes.CLASSES
    assert len({dataset.fingerprint for dataset in (*layouts.values(), pretrain)}) == 4
    assert folders.matches
    assert not folders.synthetic


def test_the_three_layouts_hold_the_same_pictures(layouts: dict[str, Dataset]) -> None:
    root = layouts["image_folder"].root
    for index in (0, 1, 2, 58):
        (folder,) = (root / "classification/val").glob(f"*/{index:05d}.png")
        coco = root / f"coco/val/{index + 1:012d}.png"
        ade = root / f"ade20k/images/validation/{index:05d}.png"
        first, *others = (np.asarray(read_rgb(path)) for path in (folder, coco, ade))
        assert first.shape == (64, 64, 3)
        assert all(np.array_equal(first, other) for other in others)


def test_coco_and_ade_labels_agree(layouts: dict[str, Dataset]) -> None:
    """Index PNGs rebuilt from the COCO JSON by pycocotools cover the same pixels with the same classes."""
    split = layouts["coco"].coco("val")
    api = COCO(split.annotations)
    shared = total = 0
    for number, (_, label) in enumerate(layouts["ade20k"].masks("val"), 1):
        indices = read_label(label)
        rebuilt = np.zeros_like(indices)
        for annotation in api.loadAnns(api.getAnnIds(number)):
            rebuilt[api.annToMask(annotation).astype(bool)] = 1 + split.ids[annotation["category_id"]]
        shared += int(((indices == rebuilt) & (indices > 0)).sum())
        total += int(((indices > 0) | (rebuilt > 0)).sum())
    assert shared / total > 0.93


def test_coco_has_the_awkward_parts(layouts: dict[str, Dataset]) -> None:
    split = layouts["coco"].coco("train")
    assert split.crowds >= 5
    assert split.empty >= 10
    assert list(split.ids) == list(synthetic.CATEGORY_IDS)
    assert list(split.ids.values()) == list(range(8))
    entries = json.loads(split.annotations.read_text())["annotations"]
    assert {type(entry["segmentation"]) for entry in entries if entry["iscrowd"]} == {dict}
    assert {type(entry["segmentation"]) for entry in entries if not entry["iscrowd"]} == {list}


def test_detectron2_maps_the_ids_alike(layouts: dict[str, Dataset]) -> None:
    data = pytest.importorskip("detectron2.data", reason="detectron2 is not installed")
    datasets = pytest.importorskip("detectron2.data.datasets")
    split = layouts["coco"].coco("train")
    records = datasets.load_coco_json(str(split.annotations), str(split.images), "mae_bench_shapes")
    metadata = data.MetadataCatalog.get("mae_bench_shapes")
    assert metadata.thing_dataset_id_to_contiguous_id == split.ids
    assert tuple(metadata.thing_classes) == split.names
    empty = [record for record in records if all(entry["iscrowd"] for entry in record["annotations"])]
    assert (len(records), len(empty)) == (200, split.empty)


def test_a_damaged_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_BENCH_CACHE", str(tmp_path))
    spec = FOLDERS.model_copy(update={"made": ""})
    dataset = open_dataset(spec, smoke=True)
    assert synthetic.check(dataset.root)
    Path(dataset.source("val").name(0)).write_bytes(b"")
    with pytest.raises(UserError, match=r"differs from its manifest\.json .*delete the folder"):
        open_dataset(spec, smoke=True)
    (dataset.root / synthetic.MANIFEST).write_text("[]")
    with pytest.raises(UserError, match=r"no usable manifest\.json"):
        open_dataset(spec, smoke=True)


def _make(root: Path) -> None:
    synthetic.make_smoke(ADE_SHAPES, root)


def test_processes_that_make_the_same_set_do_not_collide(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_make, args=(tmp_path / "set",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert synthetic.check(tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_an_interrupted_set_leaves_nothing(tmp_path: Path) -> None:
    spec = ADE_SHAPES.model_copy(update={"val": "../elsewhere"})
    with pytest.raises(UserError, match=r"\.\./elsewhere' leaves the data folder"):
        synthetic.make_smoke(spec, tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make .*MAE_BENCH_CACHE"):
        synthetic.make_smoke(ADE_SHAPES, tmp_path / "file" / "set")


SMOKES = {
    "imagenet": DataSpec(format="image_folder", folder="imagenet", train="train", val="val", classes=1000),
    "imagenet shards": DataSpec(format="tar", train="train/imagenet-*.tar", val="val-????.tar", classes=1000),
    "coco": DataSpec(
        format="coco",
        train="train2017",
        val="val2017",
        train_annotations="annotations/instances_train2017.json",
        val_annotations="annotations/instances_val2017.json",
        classes=80,
        expected={"train": 118287, "val": 5000},
    ),
    "coco in one folder": COCO_SHAPES.model_copy(update={"made": "", "train": "images", "val": "./images"}),
    "ade20k": DataSpec(
        format="ade20k",
        train="images/training",
        val="images/validation",
        train_annotations="annotations/training",
        val_annotations="annotations/validation",
        classes=150,
        zero_is_other=True,
    ),
    "shapes": ADE_SHAPES,
    "without other": ADE_SHAPES.model_copy(update={"zero_is_other": False, "classes": 3}),
    "any number": COCO_SHAPES.model_copy(update={"classes": 0}),
}


@pytest.mark.parametrize("pattern", ["", ".", "train/**.tar", "train/[a].tar", "/train/*.tar", "../*.tar"])
def test_a_pattern_that_names_no_shard_is_refused(pattern: str) -> None:
    with pytest.raises(UserError) as caught:
        open_dataset(DataSpec(format="tar", train=pattern, val="val.tar"), smoke=True)
    assert repr(pattern) in str(caught.value) or "leaves the data folder" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SMOKES)
def test_smoke_data_have_the_task_s_layout(name: str) -> None:
    spec = SMOKES[name]
    dataset = open_dataset(spec, Path("/nowhere"), smoke=True)
    assert dataset.counts == {"train": 8, "val": 4}
    assert dataset.synthetic
    assert not dataset.matches
    assert len(dataset.classes) == (spec.classes or 8)
    train, val = dataset.source("train"), dataset.source("val")
    assert {read_rgb(train.read(index)).size for index in range(8)} == {(96, 80)}
    assert {Path(val.name(index)).suffix for index in range(4)} == {".jpg"}
    if spec.format in ("image_folder", "tar"):
        assert dataset.labelled("train").labels.tolist() == [0, 125, 250, 375, 500, 625, 750, 875]
    if spec.format == "coco":
        split = dataset.coco("train")
        assert (split.empty, split.objects > 8) == (1, True)
        assert list(split.ids) != list(range(min(split.ids), max(split.ids) + 1))
    if spec.format == "ade20k":
        values = set(np.unique([read_label(label) for _, label in dataset.masks("train")]).tolist())
        assert values <= set(range(spec.classes + spec.zero_is_other))
        assert len(values) == min(9, spec.classes + spec.zero_is_other)
