"""Find, read, merge and validate TOML recipes. Imports no torch, and pydantic only when a recipe is validated.

A task recipe is a list of layers; ``resolve_task`` applies those that fit the backbone's size and initialisation, then
``--set key=value``, validates the result against the engine's model and keeps the origin of every value.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mae_bench import places
from mae_bench.errors import UserError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from mae_bench.schema import Backbone, Optimisation, Task

Kind = Literal["backbone", "task"]
MAX_RECIPE_BYTES = 1 << 20  # a recipe is a page of text; anything larger is the wrong file


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: the place that sets it, and who published it."""

    place: str  # "task.toml layer 2 (size l)", "--set", "default"
    source: str  # "MAE Table 9", "ours", …


@dataclass(frozen=True)
class ResolvedTask:
    """A task recipe for one size and initialisation: typed values and the origin of each."""

    task: Task
    values: Any  # the engine's model (`schema.VALUES[task.engine]`)
    origins: dict[str, Origin]
    overridden: tuple[str, ...] = ()  # keys that --set changed
    path: Path = Path()

    @property
    def ours(self) -> tuple[str, ...]:
        """Keys whose value nobody published."""
        return tuple(sorted(key for key, origin in self.origins.items() if origin.source == "ours"))

    @property
    def protocol(self) -> str:
        """Protocol id of a run with these values: overridden values leave the published protocol's column."""
        if not self.overridden:
            return self.task.protocol
        changed = {key: getattr(self.values, key) for key in self.overridden}
        return f"{self.task.protocol}+set:{digest(changed)[:8]}"

    def changed(self, **updates: Any) -> ResolvedTask:
        """The same task with other values (validated), e.g. for a smoke run."""
        merged = self.values.model_dump() | updates
        return replace(self, values=type(self.values).model_validate(merged))


def digest(value: Any) -> str:
    """sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")


@cache
def _index(kind: Kind, roots: tuple[Path, ...]) -> dict[str, Path]:
    pattern = "backbones/*/*.toml" if kind == "backbone" else "tasks/*/task.toml"
    found: dict[str, Path] = {}
    for root in roots:
        for path in sorted(root.glob(pattern)):
            name = path.stem if kind == "backbone" else path.parent.name
            if name in found and path.is_relative_to(root) and found[name].is_relative_to(root):
                raise UserError(f"two {kind} recipes are named '{name}': {found[name]} and {path}; rename one")
            found.setdefault(name, path)
    return found


def index(kind: Kind) -> dict[str, Path]:
    """Name -> file of every recipe on the search path (`places.recipe_roots`); the first root wins."""
    return _index(kind, tuple(places.recipe_roots()))


def find(kind: Kind, name: str) -> Path:
    """File of a recipe, by name or by path to a ``.toml`` file (a task's folder will do too)."""
    if name.endswith(".toml") or "/" in name:
        path = Path(name).expanduser()
        if path.is_dir():
            path = path / "task.toml"
        if not path.is_file():
            raise UserError(f"no {kind} recipe at {name}; give a name from `python -m mae_bench list` or a .toml file")
        return path
    known = index(kind)
    if name not in known:
        raise UserError(f"unknown {kind} '{name}'{nearest(name, known)}; `python -m mae_bench list` shows all")
    return known[name]


def read_toml(path: Path) -> dict[str, Any]:
    """Parse one recipe file; every fault is one line that names the file."""
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise UserError(f"{path} is larger than {MAX_RECIPE_BYTES} bytes: not a recipe")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number or nesting beyond reason
        raise UserError(f"{path} is not valid TOML: {str(error)[:200]}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _fields(model: type[BaseModel], location: tuple[int | str, ...]) -> set[str]:
    """Names that the (sub)model at ``location`` knows, for the nearest-name hint."""
    fields = model.model_fields
    for part in location:
        inner = getattr(fields.get(str(part)), "annotation", None)
        options = [inner, *getattr(inner, "__args__", ())]
        nested = [option for option in options if hasattr(option, "model_fields")]
        if nested:
            fields = {name: field for option in nested for name, field in option.model_fields.items()}
    return set(fields)


def explain(error: ValidationError, model: type[BaseModel], where: str) -> UserError:
    """One line from pydantic's complaints: the file, the key, what was expected, the nearest known key.

    An unknown key goes first: it is often the misspelt one that another complaint misses.
    """
    complaints = error.errors(include_url=False, include_context=False)
    first = min(complaints, key=lambda complaint: complaint["type"] != "extra_forbidden")
    location = first["loc"]
    if location[:1] == ("weights",):  # a union: then comes the kind that it chose, which is no key of the file
        location = location[:1] + location[2:]
    key = ".".join(str(part) for part in location)
    if first["type"] == "extra_forbidden":
        hint = nearest(str(location[-1]), _fields(model, location[:-1]))
        return UserError(f"{where}: unknown key '{key}'{hint}")
    if first["type"] == "missing":
        return UserError(f"{where}: key '{key}' is missing")
    given = f", not {first['input']!r}" if isinstance(first["input"], (str, int, float, bool)) else ""
    message = re.sub(r"^Value error, ", "", first["msg"])
    return UserError(f"{where}: {key + ': ' if key else ''}{message}{given}")


def _validate(model: type[BaseModel], raw: dict[str, Any], where: str) -> Any:
    from pydantic import ValidationError

    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise explain(error, model, where) from error


def load_backbone(name: str) -> Backbone:
    """Read and validate a backbone recipe, by name or path."""
    from mae_bench.schema import Backbone

    path = find("backbone", name)
    backbone: Backbone = _validate(Backbone, read_toml(path), str(path))
    if backbone.name != path.stem:
        raise UserError(f"{path}: name '{backbone.name}' differs from the file's name '{path.stem}'; make them equal")
    return backbone


def load_task(name: str) -> Task:
    """Read and validate a task recipe, by name or path, including every layer's keys."""
    from mae_bench.schema import VALUES, Task

    path = find("task", name)
    task: Task = _validate(Task, read_toml(path), str(path))
    if task.name != path.parent.name:
        raise UserError(f"{path}: name '{task.name}' differs from its folder's name '{path.parent.name}'")
    known = VALUES[task.engine].model_fields
    for number, layer in enumerate(task.layer, 1):
        for key in layer.values:
            if key not in known:
                raise UserError(f"{path}: unknown key '{key}' in layer {number}{nearest(key, known)}")
    return task


def resolve_task(name: str, backbone: Backbone, settings: list[str] | None = None) -> ResolvedTask:
    """Values of a task for one backbone. ``settings`` are ``key=value`` strings, the value in TOML's notation."""
    from mae_bench.schema import VALUES

    task = load_task(name)
    path = find("task", name)
    for refusal in task.refuse:
        if refusal.when.admits(backbone):
            raise UserError(f"task '{task.name}' cannot run with '{backbone.name}': {refusal.reason}")
    model = VALUES[task.engine]
    raw: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for number, layer in enumerate(task.layer, 1):
        if layer.when.admits(backbone):
            for key, value in layer.values.items():
                raw[key] = value
                place = f"tasks/{task.name}/task.toml layer {number} ({layer.when})"
                origins[key] = Origin(place, layer.sources.get(key, layer.source))
    where = f"task '{task.name}' for '{backbone.name}'"
    values: Optimisation = _validate(model, raw, where)
    overridden: tuple[str, ...] = ()
    if settings:
        published = values
        keys = _apply_settings(raw, origins, settings, model)
        values = _validate(model, raw, f"{where} with --set")
        overridden = tuple(key for key in keys if getattr(values, key) != getattr(published, key))
    for key in model.model_fields:
        origins.setdefault(key, Origin("default", "schema"))
    return ResolvedTask(task, values, origins, overridden, path)


def _apply_settings(
    raw: dict[str, Any], origins: dict[str, Origin], settings: list[str], model: type[BaseModel]
) -> tuple[str, ...]:
    keys: list[str] = []
    for setting in settings:
        key, sign, text = setting.partition("=")
        key = key.strip()
        if not sign:
            raise UserError(f"--set {setting}: expected key=value, e.g. --set epochs=10")
        if key not in model.model_fields:
            raise UserError(f"--set {setting}: unknown key '{key}'{nearest(key, model.model_fields)}")
        if key in keys:
            raise UserError(f"--set {setting}: '{key}' is set twice; keep one")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()  # a bare word is a string: --set mode=linear
        except (ValueError, RecursionError) as error:
            raise UserError(f"--set {key}: the value is beyond reason: {str(error)[:100]}") from error
        keys.append(key)
        raw[key] = value
        origins[key] = Origin("--set", "command line")
    return tuple(sorted(keys))
