"""Python functions beside ``runs``: an encoder with its weights proven, and results as a pandas frame."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mae_bench import places
from mae_bench.engine.job import Options
from mae_bench.recipes import load_backbone

if TYPE_CHECKING:
    import pandas as pd

    from mae_bench.encoders import Encoder
    from mae_bench.reporting.render import Form
    from mae_bench.reporting.tables import Layout


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
    """One row per run, from record files or folders of runs (default: the promoted ones, ``results/runs``).

    ``stale`` says what has changed in the recipe since the run, ``other_code`` that the code has.
    """
    from mae_bench import tabulate

    return tabulate.frame(record_paths(paths))


def table(
    paths: Paths = None,
    *,
    form: Form = "markdown",
    layout: Layout | None = None,
    compare: tuple[str, str] | None = None,
    stale: bool = False,
) -> str:
    """The comparison table of `results`, beside the published numbers.

    ``compare`` names two initialisations, e.g. ``("mae", "scratch")``: then their difference in every column, with a
    paired test over the seeds that both have. ``stale`` takes in runs whose recipe has changed since.
    """
    from mae_bench import tabulate

    return tabulate.text(paths=record_paths(paths), form=form, layout=layout, compare=compare, stale=stale)


def record_paths(paths: Paths) -> list[Path]:
    """``paths``, or the promoted records."""
    if paths is None:
        root = places.checkout()
        return [(root or Path()) / "results" / "runs"]
    if isinstance(paths, (str, Path)):
        return [Path(paths)]
    return [Path(path) for path in paths]
