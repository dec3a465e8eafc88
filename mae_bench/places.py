"""Folders: the checkout, the bundled recipes, the cache, and where users keep data and weights."""

from __future__ import annotations

import os
from functools import cache as once
from importlib import metadata, util
from pathlib import Path

from mae_bench.errors import UserError

PACKAGE = Path(__file__).resolve().parent
BUNDLED = PACKAGE / "_recipes"


def checkout() -> Path | None:
    """Root of the source checkout that this package is imported from, or None for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "backbones").is_dir() and (root / "tasks").is_dir() else None


def recipe_roots() -> list[Path]:
    """Folders that hold ``backbones/``, ``tasks/`` and ``results/``, the first one wins.

    The checkout (or the recipes bundled in the wheel), then ``$MAE_BENCH_PATH`` (folders separated as in ``$PATH``),
    then installed distributions that name a package of recipes under the entry point group ``mae_bench.recipes``.
    """
    roots = [checkout() or BUNDLED]
    for part in os.environ.get("MAE_BENCH_PATH", "").split(os.pathsep):
        if part:
            roots.append(_expand(part))
            if not roots[-1].is_dir():
                raise UserError(f"$MAE_BENCH_PATH names {part}, which is no folder; correct or unset it")
    return roots + _entry_points()


def _expand(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: there is no such user's home; write the folder out") from error


@once
def _entry_points() -> list[Path]:
    """Folders of the packages that installed distributions name under ``mae_bench.recipes``; none is imported."""
    found = []
    for entry in metadata.entry_points(group="mae_bench.recipes"):
        spec = util.find_spec(entry.value)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"the installed distribution '{entry.dist.name if entry.dist else '?'}' names the recipe package "
                f"'{entry.value}', which is not there; reinstall or uninstall it"
            )
        found += [Path(location) for location in spec.submodule_search_locations]
    return found


def cache() -> Path:
    """What can be made again: tiny data, made weights, smoke weights. ``$MAE_BENCH_CACHE`` moves it."""
    default = _expand(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "mae_bench"
    return _expand(os.environ.get("MAE_BENCH_CACHE", default))


def data_root() -> Path:
    """Folder below which data sets are looked for by name. ``$MAE_BENCH_DATA``, default ``./data``."""
    return _expand(os.environ.get("MAE_BENCH_DATA", "data"))


def weights_root() -> Path:
    """Folder of downloaded weight files. ``$MAE_BENCH_WEIGHTS``, default ``weights/`` in the cache."""
    return _expand(os.environ.get("MAE_BENCH_WEIGHTS", cache() / "weights"))
