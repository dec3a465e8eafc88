"""Class folders: order, counts, fingerprint, and every wrong layout named."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from mae_bench.data import open_dataset
from mae_bench.data.dataset import inside
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

SPEC = DataSpec(format="image_folder", folder="tiny", train="train", val="val")


def fill(root: Path, names: dict[str, bytes]) -> Path:
    """Files whose content no reader looks at when a set is opened."""
    for name, content in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fill(
        tmp_path / "tiny",
        {
            "train/wolf/b.JPEG": b"22",
            "train/wolf/a.jpg": b"1",
            "train/ape/z.png": b"333",
            "train/ape/notes.txt": b"",
            "train/.cache/x.jpg": b"",
            "val/ape/1.jpg": b"4",
            "val/wolf/._1.jpg": b"macOS",
            "val/wolf/1.jpg": b"5",
        },
    )


def test_classes_are_numbered_in_sorted_order(root: Path) -> None:
    dataset = open_dataset(SPEC, root)
    assert dataset.classes == ("ape", "wolf")
    assert dataset.counts == {"train": 3, "val": 2}
    expected = [("ape/z.png", 0), ("wolf/a.jpg", 1), ("wolf/b.JPEG", 1)]
    train, val = dataset.labelled("train"), dataset.source("val")
    found = [(train.name(index), train.labels[index]) for index in range(len(train))]
    assert found == [(str(root / "train" / name), label) for name, label in expected]
    assert [val.name(index) for index in range(len(val))] == [str(root / "val/ape/1.jpg"), str(root / "val/wolf/1.jpg")]


def test_the_default_root_is_below_the_data_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_BENCH_DATA", str(root.parent))
    assert open_dataset(SPEC).root == root


def test_a_dataset_reaches_worker_processes(root: Path) -> None:
    dataset = open_dataset(SPEC, root)
    assert pickle.loads(pickle.dumps(dataset)) == dataset  # noqa: S301  # our own object


@pytest.mark.parametrize(
    ("expected", "matches"), [({}, True), ({"train": 3, "val": 2}, True), ({"train": 4, "val": 2}, False)]
)
def test_matches_compares_the_counts(root: Path, expected: dict[str, int], matches: bool) -> None:
    spec = SPEC.model_copy(update={"expected": expected})
    assert open_dataset(spec, root).matches is matches


def test_the_fingerprint_follows_names_sizes_and_classes(root: Path, tmp_path: Path) -> None:
    first = open_dataset(SPEC, root).fingerprint
    moved = root.rename(tmp_path / "elsewhere")
    assert open_dataset(SPEC, moved).fingerprint == first
    (moved / "train/wolf/c.jpg").write_bytes(b"1")
    larger = open_dataset(SPEC, moved).fingerprint
    (moved / "train/wolf/c.jpg").write_bytes(b"12")
    assert len({first, larger, open_dataset(SPEC, moved).fingerprint}) == 3


def test_a_missing_set_says_where_what_and_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_dataset(SPEC, tmp_path / "nothing")
    message = str(caught.value)
    assert str(tmp_path / "nothing") in message
    assert "train/<class>/*.jpg" in message
    assert "--smoke" in message
    assert "--data" in message
    assert "\n" not in message


@pytest.mark.parametrize("folder", ["tiny", "ILSVRC/Data/CLS-LOC"])
def test_a_set_one_folder_further_in_is_found(root: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "outer" / folder).parent.mkdir(parents=True)
    root.rename(tmp_path / "outer" / folder)
    with pytest.raises(UserError, match=f"--data {tmp_path}/outer/{folder}"):
        open_dataset(SPEC, tmp_path / "outer")


def test_flat_val_is_named(root: Path) -> None:
    for path in list((root / "val").rglob("*")):
        if path.is_file():
            path.rename(root / "val" / f"ILSVRC2012_val_{path.parent.name}_{path.name}")
    for folder in ("ape", "wolf"):
        (root / "val" / folder).rmdir()
    with pytest.raises(UserError, match=r"val is flat: .*no class folders; sort .*valprep"):
        open_dataset(SPEC, root)


WRONG = {
    "beside": ({"train/stray.jpg": b""}, r"pictures beside its class folders \(train/stray\.jpg\)"),
    "only in train": ({"train/zebra/1.jpg": b""}, r"'zebra' is in .*train but not in .*val"),
    "only in val": ({"val/zebra/1.jpg": b""}, r"'zebra' is in .*val but not in .*train"),
    "empty class": (
        {"train/zebra/readme.txt": b"", "val/zebra/1.jpg": b""},
        r"class folder .*train/zebra has no pictures",
    ),
    "nested": ({"train/ape/images/1.jpg": b""}, r"train/ape holds folders \('images'\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layouts_are_named(root: Path, name: str) -> None:
    files, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        open_dataset(SPEC, fill(root, files))


def test_no_class_folders_at_all(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    with pytest.raises(UserError, match=r"train has no class folders; expected .*<class>/<picture>"):
        open_dataset(SPEC, tmp_path)


def test_the_number_of_classes_is_the_recipe_s(root: Path) -> None:
    with pytest.raises(UserError, match=r"has 2 class folders, the task recipe expects 1000"):
        open_dataset(SPEC.model_copy(update={"classes": 1000}), root)


def test_a_broken_link_is_named(root: Path) -> None:
    (root / "val/ape/2.jpg").symlink_to(root / "gone.jpg")
    with pytest.raises(UserError, match=r"cannot read .*2\.jpg.*broken link"):
        open_dataset(SPEC, root)


def test_another_pipeline_is_refused(root: Path) -> None:
    dataset = open_dataset(SPEC, root)
    for ask in (dataset.coco, dataset.masks):
        with pytest.raises(UserError, match=r"holds image_folder data, but this pipeline reads"):
            ask("train")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\\..\\x", "a\0b"])
def test_paths_stay_inside(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="leaves the data folder"):
        inside(tmp_path, path, "recipe")
    with pytest.raises(UserError, match=r"recipe's \[data\] val: path .* leaves the data folder"):
        open_dataset(SPEC.model_copy(update={"val": path}), tmp_path)
