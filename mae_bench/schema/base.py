"""Strict pydantic base and the words that every recipe shares."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

NAME = r"^\w[\w.+-]*$"  # of a recipe: it names folders and files
Size = Literal["t", "s", "b", "l", "h"]
Init = Literal["mae", "supervised", "scratch", "moco_v3", "dino", "dinov2", "beit", "beit_v2"]


class Strict(BaseModel):
    """A recipe section: unknown keys are errors, types are not coerced, instances do not change.

    ``strict`` still admits an int where a float is meant (``epochs = 90``); it refuses ``"90"`` and ``true``.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
