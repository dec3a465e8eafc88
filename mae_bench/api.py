"""Python functions beside ``runs``: an encoder with its weights proven, and results as a pandas frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mae_bench import places
from mae_bench.engine.job import Options
from mae_bench.recipes import load_backbone

if TYPE_CHECKING:
    import pandas as pd

    from mae_bench.encoders import Encoder


def load_encoder(backbone: str, *, weights: str | Path | None = None, seed: int = 0) -> Encoder:
    """The encoder of a backbone recipe as a ``torch.nn.Module`` in eval mode, its weights loaded and proven.

    ``encoder.tokens(images)`` maps (B, 3, H, W) floats, normalised with the recipe's mean and std, to (B, 1 + N, D);
    ``encoder.maps(images, taps)`` gives one (B, D, H / patch, W / patch) map per tapped block.

    Args:
        backbone: name or path of a recipe.
        weights: a weight file instead of the recipe's. Weights that the recipe makes on demand are made.
        seed: initialisation of a from-scratch backbone.

    Raises:
        UserError: unknown name, missing file, or a file whose tensors are not exactly the encoder's.
    """
    from mae_bench import runs
    from mae_bench.checkpoints.load import build_encoder

    recipe = load_backbone(backbone)
    source = runs.find_weights(recipe, Options(weights=Path(weights) if weights else None))
    encoder, _ = build_encoder(recipe, source.file, seed=seed)
    return encoder.eval()


Paths = str | Path | Iterable[str | Path] | None


def results(paths: Paths = None) -> pd.DataFrame:
    """One row per run, from record files or folders of runs (default: the promoted ones, ``results/runs``)."""
    from mae_bench.reporting import store

    return store.frame(store.load_records(_paths(paths)))


def table(
    paths: Paths = None,
    *,
    form: Literal["markdown", "csv"] = "markdown",
    layout: Literal["wide", "long"] = "wide",
    compare: Sequence[str] | None = None,
) -> str:
    """The comparison table of `results`, beside the published numbers.

    ``compare`` names two initialisations, e.g. ``("mae", "scratch")``: then the difference of their means in every
    column stands beside twice its spread over seeds.
    """
    from mae_bench.reporting import tables

    runs = results(paths)
    if compare:
        first, second = compare
        return tables.comparison(runs, first, second, form=form)
    return tables.table(runs, form=form, layout=layout)


def _paths(paths: Paths) -> list[Path]:
    if paths is None:
        root = places.checkout()
        return [(root or Path()) / "results" / "runs"]
    if isinstance(paths, (str, Path)):
        return [Path(paths)]
    return [Path(path) for path in paths]
