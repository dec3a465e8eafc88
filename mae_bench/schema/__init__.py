"""Typed, strict models of everything that stands in a TOML recipe. Imports no torch."""

from mae_bench.schema.backbone import (
    Architecture,
    Backbone,
    FileWeights,
    Input,
    Layout,
    MadeWeights,
    NoWeights,
    PublishedUse,
    Resize,
)
from mae_bench.schema.base import Init, Size, Strict
from mae_bench.schema.optimisation import Optimisation
from mae_bench.schema.task import DataSpec, Layer, Task
from mae_bench.schema.values import (
    VALUES,
    ClassificationValues,
    DetectionValues,
    PretrainingValues,
    SegmentationValues,
)

__all__ = [
    "VALUES",
    "Architecture",
    "Backbone",
    "ClassificationValues",
    "DataSpec",
    "DetectionValues",
    "FileWeights",
    "Init",
    "Input",
    "Layer",
    "Layout",
    "MadeWeights",
    "NoWeights",
    "Optimisation",
    "PretrainingValues",
    "PublishedUse",
    "Resize",
    "SegmentationValues",
    "Size",
    "Strict",
    "Task",
]
