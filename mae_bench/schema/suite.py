"""A suite file, ``suites/<name>.toml``: pre-trainings that differ in a value each, and where their encoders go."""

from __future__ import annotations

import itertools
from typing import Literal

from pydantic import Field, model_validator

from mae_bench.schema.base import NAME, Strict

Scalar = bool | int | float | str
Settings = dict[str, Scalar | list[Scalar]]


def in_words(settings: Settings) -> str:
    """``flip true, crop_scale 0.2 to 1.0``"""
    texts = []
    for key, value in settings.items():
        values = value if isinstance(value, list) else [value]
        texts.append(f"{key} {' to '.join(str(one).lower() if isinstance(one, bool) else str(one) for one in values)}")
    return ", ".join(texts)


class Transfer(Strict):
    """A task that every encoder of the suite is taken to."""

    task: str
    settings: Settings = Field(default_factory=dict)
    published: str = ""  # head word of `protocol` in results/published


class Form(Strict):
    """How the cells of a suite are trained; a cell's settings come on top."""

    backbone: str
    task: str  # of the pre-training
    settings: Settings = Field(default_factory=dict)
    transfer: list[Transfer] = Field(default_factory=list)


class Cell(Strict):
    """One pre-training, as it differs from the others."""

    table: str = ""
    cell: str = Field(min_length=1)
    backbone: str = ""  # empty = the form's; the tiny form always takes its own, as it does the task
    task: str = ""
    settings: Settings = Field(default_factory=dict)
    tiny: Settings | Literal[False] | None = None  # instead of `settings`; false = no tiny form
    published: str = ""  # its qualifier in `protocol` of results/published
    published_epochs: int = Field(0, ge=0)  # where the qualifier does not tell the rows apart

    def changes(self, tiny: bool) -> Settings | None:
        """The cell's settings in one form of the suite; None = it has no such form."""
        if not tiny or self.tiny is None:
            return self.settings
        return None if self.tiny is False else self.tiny

    @property
    def label(self) -> str:
        return f"{self.table} {self.cell}".strip()


class Suite(Form):
    """A suite file, ``suites/<name>.toml``: cells one by one (``run``), or the product of lists (``grid``), or both.

    The keys of ``grid`` are protocol values, ``backbone`` and ``task``.
    """

    name: str = Field(pattern=NAME)
    summary: str
    reference: str
    source: str = ""  # `source` of the published numbers
    tiny: Form | None = None
    run: list[Cell] = Field(default_factory=list)
    grid: dict[str, list[Scalar | list[Scalar]]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_cells(self) -> Suite:
        if not self.run and not self.grid:
            raise ValueError("a suite needs [[run]] entries or a [grid]")
        for key, choices in self.grid.items():
            if not choices:
                raise ValueError(f"grid.{key} is an empty list")
        labels = [cell.label for cell in self.cells]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two cells are '{label}'; give each a name of its own")
        return self

    @property
    def cells(self) -> list[Cell]:
        return self.run + [self._of_grid(choice) for choice in itertools.product(*self.grid.values()) if choice]

    def _of_grid(self, choice: tuple[Scalar | list[Scalar], ...]) -> Cell:
        settings = dict(zip(self.grid, choice, strict=True))
        own = {key: settings[key] for key in ("backbone", "task") if key in settings}
        rest = {key: value for key, value in settings.items() if key not in own}
        return Cell.model_validate({"cell": in_words(settings), "settings": rest, **own})
