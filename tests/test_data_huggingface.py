"""Hugging Face data sets: through a stand-in of the `datasets` package here, through the package where it is installed
(`test_data_formats`)."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_sources import jpeg

from mae_bench.data import huggingface, open_dataset
from mae_bench.data.sources import NO_LABEL, Source
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

SPEC = DataSpec(format="hf", repository="owner/photos", train="train", val="test")


class Rows:
    """As much of `datasets.Dataset` as timm's reader asks for; `scan` has its own answer."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        (folder / "1.jpg").write_bytes(jpeg(1))
        self.rows: list[dict[str, Any]] = [
            {"image": {"bytes": jpeg(0), "path": None}, "label": 4},
            {"image": {"bytes": None, "path": str(folder / "1.jpg")}, "label": 2},
        ]
        self.features = {"image": None, "label": types.SimpleNamespace(names=list(names)) if names else None}
        self.info = types.SimpleNamespace(features=self.features, splits={})

    def cast_column(self, name: str, kind: Any) -> Rows:
        assert (name, kind) == ("image", "encoded")
        return self

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


class Hub:
    """What the stand-in brings: class names of each split, and the rows' labels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, tuple[str, ...]] = {"train": tuple("abcde"), "test": tuple("abcde")}
        self.labels = [4, 2]

    def load(self, name: str, split: str, cache_dir: str | None) -> Rows:
        assert (name, cache_dir) == ("owner/photos", None)
        if split not in self.names:
            raise ValueError(f'Unknown split "{split}".\nShould be one of ["train", "test"].')
        return Rows(self.folder, self.names[split])

    def scan(self, rows: Rows, image: str, label: str) -> tuple[Any, Any]:
        labels = [rows.rows[0][label] and given for given in self.labels] if label else [NO_LABEL] * 2
        return np.array([len(jpeg(0)), len(jpeg(1))]), np.array(labels)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    package, faults = types.ModuleType("datasets"), types.ModuleType("datasets.exceptions")
    package.load_dataset, package.Image = hub.load, lambda decode: "decoded" if decode else "encoded"  # type: ignore[attr-defined]
    faults.DatasetsError = type("DatasetsError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", faults)
    monkeypatch.setattr(huggingface, "find_spec", lambda name: package)
    monkeypatch.setattr(huggingface, "scan", hub.scan)
    # timm's reader keeps the `datasets` that it was imported with: none is left behind.
    monkeypatch.setitem(sys.modules, "timm.data.readers.reader_hfds", types.ModuleType("none"))
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds")
    return hub


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    for smoke in (False, True):
        with pytest.raises(UserError, match=r"'owner/photos' needs the datasets package: pip install datasets"):
            open_dataset(SPEC, smoke=smoke)


def test_pictures_and_classes_through_timms_reader(hub: Hub) -> None:
    dataset = open_dataset(SPEC)
    assert (dataset.counts, dataset.classes) == ({"train": 2, "val": 2}, ("a", "b", "c", "d", "e"))
    assert dataset.name == "owner/photos"
    source: Source = dataset.labelled("val")
    assert [source.read(index) for index in range(len(source))] == [jpeg(0), jpeg(1)]
    assert source.labels.tolist() == [4, 2]
    assert source.name(1) == "owner/photos[test][1]"
    with pytest.raises(IndexError):
        source.read(2)
    (hub.folder / "1.jpg").unlink()
    with pytest.raises(UserError, match=r"cannot read owner/photos\[test\]\[1\]: .*No such file"):
        source.read(1)


def test_the_fingerprint_is_of_sizes_and_classes(hub: Hub) -> None:
    first = open_dataset(SPEC).fingerprint
    assert open_dataset(SPEC).fingerprint == first
    hub.labels = [2, 4]
    swapped = open_dataset(SPEC).fingerprint
    hub.names = dict.fromkeys(hub.names, tuple("abcdz"))
    assert len({first, swapped, open_dataset(SPEC).fingerprint}) == 3


def test_classes_without_names_are_numbers(hub: Hub) -> None:
    hub.names = dict.fromkeys(hub.names, ())
    assert open_dataset(SPEC).classes == ("0", "1", "2", "3", "4")
    with pytest.raises(UserError, match=r"owner/photos\[train\]\[0\] has class 4, but classes run from 0 to 2;"):
        open_dataset(SPEC.model_copy(update={"classes": 3}))


def test_a_set_without_labels_pre_trains_and_classifies_nothing(hub: Hub) -> None:
    dataset = open_dataset(SPEC.model_copy(update={"label_column": ""}))
    assert dataset.source("train").read(0) == jpeg(0)
    assert dataset.classes == ()
    with pytest.raises(UserError, match=r"\[train\]\[0\] has no class \(2 of 2 pictures of 'train'\); .*label_column"):
        dataset.labelled("train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"val": "valid"}, r'cannot open .* owner/photos\[valid\]: Unknown split "valid"\.$'),
        ({"val": "train[:5]"}, r"val = 'train\[:5\]' is no name of a split"),
        ({"label_column": "class"}, r"owner/photos\[train\]: 'class'"),
        ({"classes": 9}, "owner/photos names 5 classes, the task recipe expects 9"),
        ({"repository": "./photos"}, "no hf data: .*photos does not exist; --data FOLDER"),
    ],
)
def test_faults_are_named(hub: Hub, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(SPEC.model_copy(update=change))
    assert "\n" not in str(caught.value)


def test_splits_of_other_classes_are_refused(hub: Hub) -> None:
    hub.names["test"] = tuple("abcdz")
    with pytest.raises(UserError, match="the splits train and test name different classes"):
        open_dataset(SPEC)


def test_a_folder_of_the_hubs_name_is_not_taken_instead(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub.folder / "owner/photos").mkdir(parents=True)
    monkeypatch.chdir(hub.folder)
    with pytest.raises(UserError, match="is also in the folder that you are in"):
        open_dataset(SPEC)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"format": "hf"}, "format 'hf' needs repository"),
        ({"format": "hf", "repository": "../photos"}, "repository"),
        ({"format": "hf", "repository": "/photos"}, "repository"),
        ({"format": "tar", "repository": "owner/photos"}, "repository is read by format 'hf' alone"),
        ({"format": "image_folder", "label_column": "class"}, "label_column is read by format 'hf' alone"),
    ],
)
def test_recipes_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSpec(train="train", val="val", **given)
