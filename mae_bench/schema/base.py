"""Strict pydantic base and the words that every recipe shares."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

NAME = r"^\w[\w.+-]*$"  # of a recipe: it names folders and files
Size = Literal["t", "s", "b", "l", "h"]
Init = Literal["mae", "supervised", "scratch", "moco_v3", "dino", "dinov2", "beit", "beit_v2"]


class Strict(BaseModel):
    """A recipe section: unknown keys are errors, types are not coerced, instances do not change.

    ``strict`` still admits an int where a float is meant (``epochs = 90``); it refuses ``"90"`` and ``true``.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Sparse(Strict):
    """A section whose optional features are left out of the dump at their default.

    A new feature so changes no hash of the recipes that do not use it.
    """

    FEATURES: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        dumped: dict[str, Any] = handler(self)
        return {
            key: value
            for key, value in dumped.items()
            if key not in self.FEATURES or getattr(self, key) != fields[key].get_default(call_default_factory=True)
        }
