"""Hugging Face data sets through the `datasets` package itself; only the Hub is replaced, by a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_sources import jpeg

from mae_bench.data import huggingface, open_dataset
from mae_bench.data.sources import Source
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

SPEC = DataSpec(format="hf", repository="owner/photos", train="train", val="test")
LOCAL = DataSpec(format="hf", repository="./rows", train="train", val="test")
needs_datasets = pytest.mark.skipif(find_spec("datasets") is None, reason="the datasets package is not installed")


def within(data: bytes | None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": path}


def write_rows(
    folder: Path, pictures: Sequence[Any], labels: Sequence[Any], *, names: str = "", kind: str = "int64", **more: Any
) -> Path:
    """Both splits as Parquet. ``names``: one letter a class; ``more``: further columns and their features."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    features = {"image": datasets.Image(), "label": datasets.Value(kind)}
    if names:
        features["label"] = datasets.ClassLabel(names=list(names))
    features |= more.pop("features", {})
    columns = {"image": list(pictures), "label": list(labels)} | more
    # The package's own writer would bring pictures that are files into the rows, or refuse them.
    rows = pyarrow.Table.from_pydict(columns, datasets.Features(features).arrow_schema)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        parquet.write_table(rows, folder / f"data/{split}-00000-of-00001.parquet")
    return folder


class Hub:
    """What the Hub holds: ``rows`` gives the set's next folder. ``others``: folders of single splits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.folder = folder
        self.others: dict[str, Path] = {}
        self.rows([within(jpeg(0)), within(jpeg(1))], [4, 2], names="abcde")

    def rows(self, *args: Any, **options: Any) -> None:
        self.folder = write_rows(self._folder / f"{len(list(self._folder.iterdir()))}", *args, **options)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "hub").mkdir()
    hub, load = Hub(tmp_path / "hub"), datasets.load_dataset

    def from_folder(name: str, split: str, cache_dir: str | None) -> Any:
        assert (name, cache_dir) == ("owner/photos", None)
        return load(str(hub.others.get(split, hub.folder)), split=split)

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    return hub


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    for smoke in (False, True):
        with pytest.raises(UserError, match=r"'owner/photos' needs the datasets package: pip install datasets"):
            open_dataset(SPEC, smoke=smoke)


def test_pictures_and_classes(hub: Hub) -> None:
    dataset = open_dataset(SPEC)
    assert (dataset.counts, dataset.classes) == ({"train": 2, "val": 2}, ("a", "b", "c", "d", "e"))
    assert dataset.name == "owner/photos"
    source: Source = dataset.labelled("val")
    assert [source.read(index) for index in range(len(source))] == [jpeg(0), jpeg(1)]
    assert source.labels.tolist() == [4, 2]
    assert source.name(1) == "owner/photos[test][1]"
    with pytest.raises(IndexError):
        source.read(2)


def test_the_fingerprint_is_of_sizes_and_classes(hub: Hub) -> None:
    first = open_dataset(SPEC).fingerprint
    assert open_dataset(SPEC).fingerprint == first
    pictures = [within(jpeg(0)), within(jpeg(1))]
    hub.rows(pictures, [2, 4], names="abcde")
    swapped = open_dataset(SPEC).fingerprint
    hub.rows(pictures, [2, 4], names="abcdz")
    renamed = open_dataset(SPEC).fingerprint
    hub.rows([within(jpeg(0)), within(jpeg(1) + b"\0")], [2, 4], names="abcdz")
    assert len({first, swapped, renamed, open_dataset(SPEC).fingerprint}) == 4


def test_classes_without_names_are_numbers(hub: Hub) -> None:
    hub.rows([within(jpeg(0)), within(jpeg(1))], [4, 2])
    assert open_dataset(SPEC).classes == ("0", "1", "2", "3", "4")
    with pytest.raises(UserError, match=r"owner/photos\[train\]\[0\] has class 4, but classes run from 0 to 2;"):
        open_dataset(SPEC.model_copy(update={"classes": 3}))


@pytest.mark.parametrize("kind", ["int8", "uint8", "int64", "uint64"])
def test_whole_numbers_of_any_width_are_classes_and_null_is_none(hub: Hub, kind: str) -> None:
    hub.rows([within(jpeg(0)), within(jpeg(1))], [2, None], kind=kind)
    source = open_dataset(SPEC).source("train")
    assert source.labels.dtype == np.int64
    assert source.labels.tolist() == [2, -1]


@pytest.mark.parametrize("label", [-100, -2])
def test_a_class_below_none_is_refused(hub: Hub, label: int) -> None:
    hub.rows([within(jpeg(0)), within(jpeg(1))], [0, label])
    with pytest.raises(UserError, match=rf"owner/photos\[train\]\[1\] has class {label}; expected 0 or above, or -1 "):
        open_dataset(SPEC)


def test_a_set_without_labels_pre_trains_and_classifies_nothing(hub: Hub) -> None:
    dataset = open_dataset(SPEC.model_copy(update={"label_column": ""}))
    assert dataset.source("train").read(0) == jpeg(0)
    assert dataset.classes == ()
    with pytest.raises(UserError, match=r"\[train\]\[0\] has no class \(2 of 2 pictures of 'train'\); .*label_column"):
        dataset.labelled("train")


def test_other_columns_are_never_decoded(hub: Hub) -> None:
    """A second picture in the row, which is none, or a bomb, is not this task's."""
    import datasets

    more = {"thumbnail": [within(b"no picture")] * 2, "features": {"thumbnail": datasets.Image()}}
    hub.rows([within(jpeg(0)), within(jpeg(1))], [0, 1], **more)
    source = open_dataset(SPEC).source("train")
    assert [source.read(index) for index in range(2)] == [jpeg(0), jpeg(1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"val": "valid"}, r'cannot open .* owner/photos\[valid\]: Unknown split "valid"\..*$'),
        ({"val": "train[:5]"}, r"val = 'train\[:5\]' is no name of a split"),
        ({"label_column": "class"}, r"owner/photos\[train\]: it has no column 'class', only .*; label_column names"),
        ({"image_column": "photo"}, r"owner/photos\[train\]: it has no column 'photo', only .*; image_column names"),
        ({"label_column": "image"}, r"column 'image' holds struct<.*>, not numbers of classes; label_column names"),
        ({"image_column": "label"}, r"column 'label' holds int64, not pictures; image_column names another"),
        ({"classes": 9}, "owner/photos names 5 classes, the task recipe expects 9"),
        ({"repository": "./photos"}, "no hf data: .*photos does not exist; --data FOLDER"),
    ],
)
def test_faults_are_named(hub: Hub, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(SPEC.model_copy(update=change))
    assert "\n" not in str(caught.value)


@needs_datasets
def test_a_column_of_several_pictures_a_row_is_refused(tmp_path: Path) -> None:
    import datasets

    several = {"features": {"image": datasets.List(datasets.Image())}}
    write_rows(tmp_path / "rows", [[within(jpeg(0))]] * 2, [0, 1], **several)
    with pytest.raises(UserError, match=r"column 'image' holds list<.*>, not pictures"):
        open_dataset(LOCAL, tmp_path)


@needs_datasets
def test_what_the_package_cannot_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    with pytest.raises(UserError, match=r"cannot open .*rows\[train\]: .*doesn't contain any data files"):
        open_dataset(LOCAL, tmp_path)
    (tmp_path / "rows/rows.py").write_text("raise SystemExit(3)\n")  # a loading script is never run
    with pytest.raises(UserError, match=r"cannot open .*rows\[train\]: .*scripts are no longer supported"):
        open_dataset(LOCAL, tmp_path)


def test_splits_of_other_classes_are_refused(hub: Hub) -> None:
    hub.others["train"] = hub.folder
    hub.rows([within(jpeg(0)), within(jpeg(1))], [4, 2], names="abcdz")
    with pytest.raises(UserError, match="the splits train and test name different classes"):
        open_dataset(SPEC)


def test_a_folder_of_the_hubs_name_is_not_taken_instead(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner/photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is also in the folder that you are in"):
        open_dataset(SPEC)


def test_a_folder_is_refused_where_the_hub_is_read(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data .*: the task's data are 'owner/photos' of the .* Hub, .* leave out"):
        open_dataset(SPEC, tmp_path)


@needs_datasets
@pytest.mark.parametrize("place", ["plain", "link", "relative"])
def test_pictures_that_are_files_of_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Class folders, which the package reads as well: its rows name files."""
    for split in ("train", "test"):
        for shade, name in enumerate("ab"):
            file = tmp_path / "real/rows" / split / name / "0.jpg"
            file.parent.mkdir(parents=True)
            file.write_bytes(jpeg(shade))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    root = {"plain": tmp_path / "real", "link": tmp_path / "link", "relative": Path("real")}[place]
    source = open_dataset(LOCAL, root).source("train")
    assert [source.read(index) for index in range(2)] == [jpeg(0), jpeg(1)]
    file = tmp_path / "real/rows/train/b/0.jpg"
    file.write_bytes(jpeg(1) + b"\0")
    with pytest.raises(UserError, match=r"rows\[train\]\[1\] has changed since the run began"):
        source.read(1)
    file.unlink()
    with pytest.raises(UserError, match=r"cannot read picture .*/b/0\.jpg: No such file"):
        source.read(1)


@needs_datasets
def test_pictures_in_an_archive_are_no_files(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "files/0").mkdir(parents=True, exist_ok=True)
        (tmp_path / "files/0/0.jpg").write_bytes(jpeg(0))
        shutil.make_archive(str(tmp_path / f"rows/{split}"), "zip", tmp_path / "files")
    spec = LOCAL.model_copy(update={"label_column": ""})
    with pytest.raises(UserError, match=r"rows\[train\]\[0\] names 'zip://.*'; expected a file of the .*, unpacked"):
        open_dataset(spec, tmp_path)


FILES = {
    "another place": ("/etc/hostname", "expected a file of the data set's own folder"),
    "a device": ("/dev/zero", "expected a file of the data set's own folder"),
    "a way out": ("{own}/../secret.jpg", "expected a file of the data set's own folder"),
    "relative": ("data/0.jpg", "expected a file of the data set's own folder"),
    "a neighbour of the same beginning": ("{own}-more/0.jpg", "expected a file of the data set's own folder"),
    "a pipe": ("{own}/pipe.jpg", "is no regular file"),
    "nothing": ("{own}/nothing.jpg", "is not there"),
    "empty": ("{own}/empty.jpg", "has a picture of 0 bytes"),
}


@needs_datasets
@pytest.mark.parametrize("fault", FILES)
def test_a_row_never_names_a_file_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    path, message = FILES[fault]
    own = tmp_path / "rows"
    for file in ("rows/data/0.jpg", "secret.jpg", "rows-more/0.jpg"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(jpeg(0))
    (own / "empty.jpg").touch()
    os.mkfifo(own / "pipe.jpg")
    write_rows(own, [within(jpeg(0)), within(None, path.format(own=own))], [0, 1])
    monkeypatch.chdir(own)
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(LOCAL, tmp_path)
    assert "rows[train][1] " in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_datasets
@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (within(b""), r"\[1\] has a picture of 0 bytes, expected 1 to 2000"),
        (within(b"", "/etc/hostname"), r"\[1\] has a picture of 0 bytes"),
        (within(bytes(2001)), r"\[1\] has a picture of 2001 bytes, expected 1 to 2000"),
        (within(None), r"\[1\] has no picture in column 'image'"),
        (None, r"\[1\] has no picture in column 'image'"),
    ],
)
def test_pictures_of_no_size_or_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: Any, message: str
) -> None:
    monkeypatch.setattr(huggingface, "MAX_BYTES", 2000)
    write_rows(tmp_path / "rows", [within(jpeg(0)), picture], [0, 1])
    with pytest.raises(UserError, match=message):
        open_dataset(LOCAL, tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"format": "hf"}, "format 'hf' needs repository"),
        ({"format": "hf", "repository": "../photos"}, "needs repository, owner/name"),
        ({"format": "hf", "repository": "/photos"}, "needs repository, owner/name"),
        ({"format": "hf", "repository": "./photos/../.."}, "needs repository, owner/name"),
        ({"format": "hf", "repository": "imagefolder"}, "needs repository, owner/name .* not 'imagefolder'"),
        ({"format": "hf", "repository": "owner/photos/train"}, "needs repository, owner/name"),
        ({"format": "hf", "repository": "owner/photos\n"}, "needs repository, owner/name"),
        ({"format": "hf", "repository": "owner/photos", "folder": "photos"}, "folder is not read where .* Hub"),
    ],
)
def test_recipes_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSpec(train="train", val="val", **given)


def test_a_folder_below_the_root_may_lie_deep() -> None:
    spec = DataSpec(format="hf", repository="./a/b.c/d", folder="photos", train="train", val="val")
    assert not spec.hub
    assert SPEC.hub
