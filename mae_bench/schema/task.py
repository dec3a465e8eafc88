"""A task recipe: a data set, a protocol, and its values in layers that say where each number comes from."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from mae_bench.schema.backbone import Backbone, Target
from mae_bench.schema.base import NAME, Init, Size, Sparse, Strict


class DataSpec(Sparse):
    """Where a task's pictures and labels lie below the data root, and what they must look like."""

    FEATURES: ClassVar[frozenset[str]] = frozenset(["repository", "image_column", "label_column"])

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
    # hf: the data set's name on the Hugging Face Hub, or ./FOLDER for a folder below the root
    repository: str = Field("", pattern=r"^$|^(\./)?\w[\w.-]*(/\w[\w.-]*)*$")
    image_column: str = Field("image", min_length=1)
    label_column: str = "label"  # empty: the data set has no classes

    @model_validator(mode="after")
    def _repository_is_read(self) -> DataSpec:
        if self.format == "hf" and not self.repository:
            raise ValueError("format 'hf' needs repository, the data set's name on the Hugging Face Hub or ./FOLDER")
        if self.format != "hf" and (given := sorted(self.FEATURES & self.model_fields_set)):
            raise ValueError(f"{given[0]} is read by format 'hf' alone, not by '{self.format}'; leave it out")
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
