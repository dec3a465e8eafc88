"""A task recipe: a data set, a protocol, and its values in layers that say where each number comes from."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from mae_bench.schema.backbone import Backbone, Target
from mae_bench.schema.base import NAME, Init, Size, Sparse, Strict


class DataSpec(Sparse):
    """Where a task's pictures and labels lie below the data root, and what they must look like."""

    FEATURES: ClassVar[frozenset[str]] = frozenset(["repository", "image_column", "label_column"])
    # The formats that read a key; the other keys are everybody's.
    READ_BY: ClassVar[dict[str, tuple[str, ...]]] = {
        "made": ("image_folder", "coco", "ade20k"),
        "train_annotations": ("coco", "ade20k"),
        "val_annotations": ("coco", "ade20k"),
        "zero_is_other": ("ade20k",),
        "repository": ("hf",),
        "image_column": ("hf",),
        "label_column": ("hf",),
    }

    format: Literal["image_folder", "tar", "hf", "coco", "ade20k"]
    folder: str = ""  # default root: $MAE_BENCH_DATA/<folder>
    made: Literal["", "shapes"] = ""  # made by code into the cache (`mae_bench.data.synthetic`)
    train: str  # image folder of the training split, below the root; tar: a glob of shards; hf: name of the split
    val: str
    train_annotations: str = ""  # coco: the JSON; ade20k: the folder of index PNGs
    val_annotations: str = ""
    classes: int = Field(0, ge=0)  # 0 = whatever the data has
    zero_is_other: bool = False  # ade20k: label 0 is 'other' and is ignored; labels 1..classes become 0..classes-1
    # Images per split that the protocol's data set has. Empty: the recipe takes any data of the format, and
    # the data fingerprint is part of the protocol id.
    expected: dict[Literal["train", "val"], int] = Field(default_factory=dict)
    repository: str = ""  # hf: owner/name on the Hugging Face Hub, or ./FOLDER for a folder below the root
    image_column: str = Field("image", min_length=1)
    label_column: str = "label"  # empty: the data set has no classes

    @property
    def hub(self) -> bool:
        """Whether the data come from the Hugging Face Hub: then no folder is read."""
        return self.format == "hf" and not self.repository.startswith("./")

    @model_validator(mode="after")
    def _every_key_is_read(self) -> DataSpec:
        for key, formats in self.READ_BY.items():
            # A dump of a spec states all keys but FEATURES, at the default where the recipe did not.
            silent = key not in self.FEATURES and getattr(self, key) == type(self).model_fields[key].default
            if key in self.model_fields_set and self.format not in formats and not silent:
                raise ValueError(f"{key} is read by {' and '.join(formats)}, not by '{self.format}'; leave it out")
        if self.folder and (self.made or self.hub):
            brought = "made by code" if self.made else "brought from the Hugging Face Hub"
            raise ValueError(f"folder is not read where the data are {brought}; leave it out")
        return self

    @model_validator(mode="after")
    def _repository_is_named(self) -> DataSpec:
        # A bare name would be one of the `datasets` package's own modules, such as imagefolder, which read any folder.
        word = r"\w[\w.-]*"
        if self.format == "hf" and not re.fullmatch(rf"{word}/{word}|\.(/{word})+", self.repository):
            raise ValueError(
                f"format 'hf' needs repository, owner/name on the Hugging Face Hub or ./FOLDER, not {self.repository!r}"
            )
        return self

    @model_validator(mode="after")
    def _splits_differ(self) -> DataSpec:
        """A model evaluated on what it was trained on. Of COCO's format the annotations say what a split is."""
        pairs = {"train": "val", "train_annotations": "val_annotations"}
        for first, second in list(pairs.items())[self.format == "coco" :]:
            given: str = getattr(self, first)
            if given and PurePosixPath(given) == PurePosixPath(getattr(self, second)):
                raise ValueError(f"{first} and {second} are both {given!r:.80}; training and validation must differ")
        return self


class When(Strict):
    """The backbones that a layer applies to; an empty list admits all."""

    size: list[Size] = Field(default_factory=list)
    init: list[Init] = Field(default_factory=list)
    target: list[Target] = Field(default_factory=list)  # of published weights
    layer_scale: bool | None = None  # of the architecture

    def admits(self, backbone: Backbone) -> bool:
        weights = backbone.weights
        target = weights.target if weights.kind == "file" else None
        return (
            (not self.size or backbone.size in self.size)
            and (not self.init or backbone.init in self.init)
            and (not self.target or target in self.target)
            and self.layer_scale in (None, backbone.architecture.layer_scale)
        )

    def __str__(self) -> str:
        lists = (("size", self.size), ("init", self.init), ("target", self.target))
        parts = [f"{key} {'/'.join(names)}" for key, names in lists if names]
        if self.layer_scale is not None:
            parts.append("layer scale" if self.layer_scale else "no layer scale")
        return ", ".join(parts) or "all"


class Layer(Strict):
    """Values with one origin. Layers apply in file order, later ones win."""

    when: When = When()
    source: str = Field(min_length=1)  # table, file or commit; "ours" where nobody published the value
    sources: dict[str, str] = Field(default_factory=dict)  # key -> source, for the keys that differ from the layer's
    values: dict[str, Any]

    @model_validator(mode="after")
    def _sources_name_values(self) -> Layer:
        for key in self.sources:
            if key not in self.values:
                raise ValueError(f"sources names '{key}', which this layer does not set")
        return self


class Refusal(Strict):
    """Combinations that cannot be run, and why."""

    when: When
    reason: str


class Task(Strict):
    """A task recipe file, ``tasks/<name>/task.toml``."""

    name: str = Field(pattern=NAME)
    engine: Literal["classification", "detection", "segmentation", "pretraining"]
    protocol: str = Field(pattern=r"^[a-z0-9.-]+@[0-9]+$")  # a bump of @N is another column in every table
    metric: str  # primary metric, as named in the record
    summary: str
    reference: str  # where the protocol is published
    data: DataSpec
    refuse: list[Refusal] = Field(default_factory=list)
    layer: list[Layer] = Field(min_length=1)
