"""An opened data set: what its splits hold, and a fingerprint that a record can carry."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from mae_bench.data.sources import NO_LABEL, Files, Source
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, SplitName] = ("train", "val")
# Formats that give each picture a class, and where it stands.
CLASSIFIED = {
    "image_folder": "the folder that it lies in",
    "tar": "its number in key.cls beside key.jpg",
    "hf": "its number in the column that label_column in the recipe's [data] names",
}


@dataclass(frozen=True)
class CocoSplit:
    """One split in COCO's format, checked.

    ``ids`` maps the category ids of the file (any integers) to 0..n-1 in ascending order of id; ``names`` are in that
    order. Training may leave images without countable objects out; evaluation must not.
    """

    images: Path  # folder of the pictures
    annotations: Path  # the JSON
    ids: dict[int, int]
    names: tuple[str, ...]
    objects: int  # annotations that are not crowd regions
    crowds: int
    empty: int  # images without an object (a crowd region is not one)
    short_polygons: int  # polygons with fewer than three points, which have no inside and are never drawn


@dataclass(frozen=True)
class Split:
    """What a reader found, paths relative to the data root in posix form, in the order of evaluation."""

    images: tuple[str, ...] = ()
    targets: tuple[int, ...] = ()  # image_folder: class of each image
    masks: tuple[str, ...] = ()  # ade20k: label picture of each image
    coco: CocoSplit | None = None
    source: Source | None = None  # tar, hf: pictures that are no files of their own

    @property
    def count(self) -> int:
        return len(self.images) if self.source is None else len(self.source)


@dataclass(frozen=True)
class Contents:
    """What a reader hands to ``open_dataset``."""

    classes: tuple[str, ...]
    splits: dict[SplitName, Split]
    fingerprint: str


@dataclass(frozen=True)
class Dataset:
    """A data set whose layout has been checked. Nothing is decoded until a pipeline asks for a picture."""

    spec: DataSpec
    root: Path
    classes: tuple[str, ...]
    counts: dict[str, int]  # images of "train" and "val"
    fingerprint: str  # sha256 over names and sizes of the pictures, classes and annotations
    synthetic: bool  # smoke data: the format is right, the content means nothing
    matches: bool  # the counts are those of the protocol's data set, or the protocol takes any data
    _splits: dict[SplitName, Split] = field(repr=False)

    @property
    def name(self) -> str:
        """What a record calls the data set."""
        return self.spec.made or self.spec.repository or self.spec.folder or self.root.name

    def source(self, split: SplitName) -> Source:
        """A split's pictures, whatever the format, with the classes that they have."""
        found = self._splits[split]
        if found.source is not None:
            return found.source
        return Files([self.root / image for image in found.images], found.targets or None)

    def labelled(self, split: SplitName) -> Source:
        """The same, for a task that needs a class for every picture: one without is a ``UserError``."""
        self._require(*CLASSIFIED)
        source = self.source(split)
        lacking = np.flatnonzero(source.labels == NO_LABEL)
        if len(lacking):
            raise UserError(
                f"{source.name(int(lacking[0]))} has no class ({len(lacking)} of {len(source)} pictures of '{split}'); "
                f"this task needs one for every picture: {CLASSIFIED[self.spec.format]}"
            )
        return source

    def masks(self, split: SplitName) -> list[tuple[Path, Path]]:
        """(picture, label picture) pairs of an ``ade20k`` data set."""
        self._require("ade20k")
        found = self._splits[split]
        return [(self.root / image, self.root / mask) for image, mask in zip(found.images, found.masks, strict=True)]

    def coco(self, split: SplitName) -> CocoSplit:
        """Folder, JSON and category map of a ``coco`` split."""
        self._require("coco")
        found = self._splits[split].coco
        assert found is not None, "the coco reader sets it"
        return found

    def _require(self, *forms: str) -> None:
        if self.spec.format not in forms:
            raise UserError(
                f"{self.root} holds {self.spec.format} data, but this pipeline reads {', '.join(forms)}: "
                f'write format = "{forms[0]}" in the task recipe\'s [data]'
            )


def inside(root: Path, relative: str, where: str) -> Path:
    """``root / relative``, refused when the path is absolute or climbs out of ``root``. ``where`` names the source."""
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or "\\" in relative or "\0" in relative or Path(relative).drive:
        raise UserError(f"{where}: path {relative!r} leaves the data folder; give a path below {root} without '..'")
    return root / pure


def locate(spec: DataSpec, root: Path, key: str) -> Path:
    """The folder or file below ``root`` that the recipe's ``[data]`` names under ``key``."""
    relative: str = getattr(spec, key)
    if not relative:
        raise UserError(f"the task recipe's [data] does not set '{key}', which {spec.format} data need; add it")
    return inside(root, relative, f"the task recipe's [data] {key}")


def fingerprint(files: Iterable[tuple[str, int]], labels: Sequence[str], digests: Sequence[str] = ()) -> str:
    """sha256 (hex) over (relative path, bytes) of the files in sorted order, class names and annotation digests."""
    total = hashlib.sha256()
    for path, size in sorted(files):
        total.update(path.encode("utf-8", "surrogatepass") + b"\0%d\n" % size)
    for text in (*labels, *digests):
        total.update(b"\1" + text.encode("utf-8", "surrogatepass"))
    return total.hexdigest()


def missing(spec: DataSpec, root: Path, absent: Path) -> UserError:
    """The error for a data set that is not there: the folder, the layout, and how to go on without it."""
    layout = {
        "image_folder": "{train}/<class>/*.jpg and {val}/<class>/*.jpg",
        "coco": "{train}/*.jpg, {val}/*.jpg, {train_annotations} and {val_annotations}",
        "ade20k": "{train}/*.jpg with {train_annotations}/*.png, and {val}/*.jpg with {val_annotations}/*.png",
    }[spec.format].format_map(spec.model_dump())
    hint = "; --data FOLDER names another place, and --smoke tries the run without data"
    if root.is_dir():
        inner = (*sorted(root.iterdir()), root / "ILSVRC/Data/CLS-LOC", root / "Data/CLS-LOC")
        if deeper := next((child for child in inner if (child / spec.train).is_dir()), None):
            hint = f"; it seems to lie further in: --data {deeper}"
    return UserError(f"no {spec.format} data: {absent} does not exist; expected below {root}: {layout}{hint}")
