"""The record of one run: its schema, and how it is written and read. Imports no torch and no pandas.

A record is one JSON file that is written once and never changed. It holds the number and everything that the number
depends on (the practice of lm-evaluation-harness, which puts versions and hashes into every result).
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from mae_bench.errors import UserError
from mae_bench.recipes import explain
from mae_bench.reporting import migrate
from mae_bench.reporting.files import read_bounded, write_whole
from mae_bench.schema import Init, Size, Strict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Model = TypeVar("Model", bound=Strict)

MAX_RECORD_BYTES = 16 << 20  # a record with 1000 classes and 1000 points of history takes well under 1 MB
CURRENT = re.compile(rb'\s*\{\s*"schema_version"\s*:\s*%d\b' % migrate.CURRENT)  # the start of a record of this version


def _undefined(value: object) -> object:
    """JSON has no nan: a value that is not defined (AP of a class without objects) is stored as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Python's parser takes NaN, Infinity and 1e999; JSON has none of them, and they have no canonical form."""
    if not _all_finite(value):
        raise ValueError("a number in it is not finite")
    return value


def _all_finite(value: JsonValue) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_all_finite, inner))


Value = Annotated[float | None, BeforeValidator(_undefined)]
Values = dict[str, Value]
Json = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
Sha256 = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]  # empty = there is no file


class WeightsUsed(Strict):
    """What the encoder started from; for an evaluation only, the trained model that was evaluated."""

    # file: the recipe's; made: trained by the recipe's task; given: named by --weights; synthetic: random, for a smoke
    kind: Literal["file", "made", "given", "none", "synthetic"]
    sha256: Sha256 = ""
    maker: Json = Field(default_factory=dict)  # run id, recipe, code, protocol and data of what made them
    load: Json = Field(default_factory=dict)  # `LoadReport.as_dict()`: the proof that every tensor arrived


class DataUsed(Strict):
    """The data set as it was found on disk."""

    name: str  # folder, or the maker's name
    fingerprint: Sha256
    counts: dict[str, int]  # images per split
    synthetic: bool = False  # made for a smoke run
    matches: bool  # the data are those that the protocol names


class Git(Strict):
    """Commit of the checkout that ran; empty for an installed wheel."""

    commit: str = ""
    dirty: bool = False


class Hardware(Strict):
    """The computer that ran, as far as it matters for speed and rounding."""

    cpu: str
    cores: int
    gpu: str = ""  # count and name; empty = none seen
    memory_gib: float
    platform: str


class Times(Strict):
    """Start in UTC (ISO 8601) and duration of the whole run."""

    started: str
    seconds: float = Field(ge=0)


class PerImage(Strict):
    """Which validation pictures a classifier got right, one bit a picture, in the data set's order.

    Two runs with the same ``names`` saw the same pictures in the same order, and can be compared picture by picture.
    """

    names: str = Field(pattern=r"^[0-9a-f]{64}$")  # sha256 of the pictures' names below the data root, joined by NUL
    count: int = Field(gt=0)
    correct: str = Field(repr=False)  # base64 of `numpy.packbits`: first picture = highest bit, zeros at the end

    @classmethod
    def of(cls, names_digest: str, correct: Sequence[bool] | NDArray[np.bool_]) -> PerImage:
        """Pack whether each picture was right. Anything but a flat, filled sequence of bool is a ``UserError``."""
        import numpy as np

        flags = np.asarray(correct)
        if flags.dtype != np.bool_ or flags.ndim != 1:
            raise UserError(f"images: correct must be (n,) bool, not {flags.shape} {flags.dtype}")
        packed = base64.b64encode(np.packbits(flags).tobytes()).decode()
        return _validated(cls, {"names": names_digest, "count": len(flags), "correct": packed}, "images")

    def array(self) -> NDArray[np.bool_]:
        """(count,) bool: whether the top prediction was right."""
        import numpy as np

        return np.unpackbits(np.frombuffer(self._bits(), np.uint8), count=self.count).astype(np.bool_)

    @property
    def hits(self) -> int:
        """How many pictures were right."""
        return int.from_bytes(self._bits()).bit_count()

    def _bits(self) -> bytes:
        return base64.b64decode(self.correct, validate=True)

    @model_validator(mode="after")
    def _packed(self) -> PerImage:
        try:
            bits = self._bits()
        except ValueError as error:
            raise ValueError("correct is not base64") from error
        if base64.b64encode(bits).decode() != self.correct:
            raise ValueError("correct is not base64 as it is written: its last characters hold stray bits")
        if len(bits) != -(-self.count // 8):
            raise ValueError(f"correct holds {len(bits)} bytes, and {self.count} pictures take {-(-self.count // 8)}")
        if bits[-1] & ((1 << -self.count % 8) - 1):
            raise ValueError(f"correct has bits set after the last of {self.count} pictures")
        return self


class Record(Strict):
    """One run: task x backbone x seed. Percentages are in [0, 100]; null = undefined."""

    schema_version: Literal[2] = 2  # stays the first key: files are recognised by it
    run_id: str = Field(min_length=1, max_length=300)
    created: str  # UTC, ISO 8601
    task: str
    engine: Literal["classification", "detection", "segmentation", "pretraining"]
    metric: str  # the primary one; a key of `metrics`
    # The column in every table: `recipe_protocol`, and what sets this run apart from it (+set:…, +data:…, +smoke).
    protocol: str
    recipe_protocol: str = Field(pattern=r"^[a-z0-9.-]+@[0-9]+$")
    backbone: str
    size: Size
    init: Init
    seed: int = Field(ge=0, lt=2**63)
    smoke: bool = False  # two steps on made data: shows that the graph runs, measures nothing
    eval_only: bool = False
    metrics: Values  # after the last step: the result
    best: Values = Field(default_factory=dict)  # of all evaluations; stands beside the result, never replaces it
    baseline: Values = Field(default_factory=dict)  # a trivial prediction (majority class, no objects)
    per_class: dict[str, Values] = Field(default_factory=dict)
    images: PerImage | None = None  # classification; null in records from before schema 2
    history: list[Values] = Field(default_factory=list)
    recipe: Json  # {"task": resolved values, "backbone": …, "origins": key -> {"place", "source"}}
    recipe_hash: Sha256
    ours: list[str] = Field(default_factory=list)  # keys whose value nobody published
    overridden: list[str] = Field(default_factory=list)  # keys that --set changed
    code_hash: Sha256
    weights: WeightsUsed
    data: DataUsed
    effective: Json = Field(default_factory=dict)  # what the recipe came to here: lr, steps, precision, device, …
    parameters: dict[str, int] = Field(default_factory=dict)
    git: Git
    versions: dict[str, str]
    hardware: Hardware
    times: Times
    command: list[str]
    notes: list[str] = Field(default_factory=list)  # what a reader of the number must know

    @field_validator("created")
    @classmethod
    def _utc(cls, value: str) -> str:
        # What tables take: microseconds at most, and years that a 64-bit count of nanoseconds reaches.
        form = r"(19[7-9]|2[01]\d)\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)"
        if not re.fullmatch(form, value, re.ASCII):
            raise ValueError("expected a time in UTC from 1970 on, such as 2026-01-31T12:00:00+00:00")
        datetime.fromisoformat(value)  # ValueError: no such day or hour
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        if self.metric not in self.metrics:
            raise ValueError(f"metrics lacks the primary metric '{self.metric}'")
        if self.protocol != self.recipe_protocol and not self.protocol.startswith(self.recipe_protocol + "+"):
            raise ValueError(f"protocol '{self.protocol}' does not start with recipe_protocol '{self.recipe_protocol}'")
        reasons = {"smoke": self.smoke, "overridden values": bool(self.overridden), "other data": not self.data.matches}
        if self.protocol == self.recipe_protocol and any(reasons.values()):
            why = ", ".join(reason for reason, holds in reasons.items() if holds)
            raise ValueError(f"protocol '{self.protocol}' must say what sets the run apart from it ({why})")
        return self

    @model_validator(mode="after")
    def _images_agree(self) -> Record:
        """The bits give the number: one of both that was edited is found."""
        if self.images is None:
            return self
        if self.engine != "classification":
            raise ValueError(f"images are a classifier's, and engine is '{self.engine}'")
        if self.images.count != self.data.counts.get("val"):
            raise ValueError(f"images.count is {self.images.count}, data.counts.val {self.data.counts.get('val')}")
        stated, top1 = self.metrics.get("top1"), 100 * self.images.hits / self.images.count
        if stated is None or not math.isclose(stated, top1, rel_tol=1e-9):
            raise ValueError(f"metrics.top1 is {stated}, but of images {top1} % are right: one of them was changed")
        return self

    @property
    def value(self) -> float | None:
        """The primary metric after the last step."""
        return self.metrics[self.metric]


def one_line(text: object, limit: int = 300) -> str:
    """``text`` for a message or a table: one printable line of at most ``limit`` characters."""
    line = "".join(char if char.isprintable() else " " for char in str(text)[: 4 * limit])
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def flat(value: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Nested values under dotted keys; an empty dictionary is a value."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from flat(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner


def write_record(record: Record, folder: Path, name: str = "record.json") -> Path:
    """Write ``folder/name``, whole or not at all, and never over another file.

    Safe when several processes write at once: exactly one of them gets the name.

    Raises:
        UserError: the file exists already, or cannot be written (disk full, read-only folder).
    """
    target = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = write_whole(target, record.model_dump_json(indent=1) + "\n", exclusive=True)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; free space or choose another --out") from error
    if not written:
        raise UserError(f"{target} exists and records are never overwritten; choose another --out or seed")
    return target


def read_record(path: Path) -> Record:
    """Read and validate one record; one of an earlier schema version is brought to this one (`migrate`).

    Raises:
        UserError: unreadable, too large, no JSON, not the schema, or of a newer version; one line that names the file
            and the key.
    """
    text = read_bounded(path, MAX_RECORD_BYTES, "not a record")
    try:
        if CURRENT.match(text):
            return Record.model_validate_json(text)  # the way of ten thousand files: parsed and checked in one go
        return Record.model_validate(migrate.to_current(from_json(text)))
    except ValidationError as error:
        raise UserError(one_line(explain(error, Record, f"{path} is not a record"))) from error
    except UserError as error:  # of a newer version
        raise UserError(one_line(f"cannot read {path}: {error}")) from error
    except ValueError as error:
        raise UserError(one_line(f"{path} is not a record: {error}")) from error


def record_from(values: Mapping[str, Any]) -> Record:
    """Validate a new record's values; a fault names the key (`UserError`)."""
    return _validated(Record, dict(values), "record")


def _validated(model: type[Model], values: dict[str, Any], where: str) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(one_line(explain(error, model, where))) from error
