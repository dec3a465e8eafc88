"""Turn label pictures with colours into index PNGs: ``python -m mae_bench.data.masks SOURCE OUT [--colours FILE]``.

Without ``--colours`` the channels must be equal, as when an index picture was saved as RGB. With it, line *i* of the
file (from 0) holds the red, green and blue value of class index *i*. Nothing is guessed: another colour is an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mae_bench.data.images import read_rgb
from mae_bench.errors import UserError


def read_colours(file: Path) -> NDArray[np.uint8]:
    """(n, 3) colours, one a line: ``R G B``."""
    try:
        rows = [[int(value) for value in line.replace(",", " ").split()] for line in file.read_text().splitlines()]
        colours = np.array(rows, dtype=np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"cannot read colours {file}: {error}; expected a line `R G B` for each class index") from error
    if colours.ndim != 2 or colours.shape[1] != 3 or not 0 < len(colours) <= 255:
        raise UserError(f"colours {file} has shape {colours.shape}; expected 1 to 255 lines `R G B`")
    if len(np.unique(colours, axis=0)) != len(colours):
        raise UserError(f"colours {file} names a colour twice; every class index needs its own")
    return colours


def to_indices(path: Path, colours: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """(H, W) class indices of one colour label picture."""
    rgb = np.asarray(read_rgb(path), np.uint8)
    if colours is None:
        if not (rgb == rgb[:, :, :1]).all():
            raise UserError(f"label {path} has true colours; --colours FILE must name the colour of each class index")
        return np.asarray(rgb[:, :, 0], np.uint8)
    codes, table = (array.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32) for array in (rgb, colours))
    order = np.argsort(table)
    nearest: NDArray[np.intp] = order[np.searchsorted(table[order], codes).clip(max=len(table) - 1)]
    if (wrong := table[nearest] != codes).any():
        red, green, blue = rgb[wrong][0]
        raise UserError(f"label {path} has colour {red} {green} {blue}, which the colours file does not name; add it")
    return nearest.astype(np.uint8)


def convert(source: Path, out: Path, colours: Path | None = None) -> int:
    """Convert every PNG of a folder; the number of pictures written. Existing files are never overwritten."""
    table = read_colours(colours) if colours else None
    paths = sorted(source.glob("*.png"))
    if not paths:
        raise UserError(f"no *.png label pictures in {source}")
    out.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if (out / path.name).exists():
            raise UserError(f"{out / path.name} exists; give an empty folder")
        Image.fromarray(to_indices(path, table)).save(out / path.name)
    return len(paths)


def main(arguments: list[str] | None = None) -> int:
    """The command; exit code 2 and one line for a fault in what was given."""
    parser = argparse.ArgumentParser(prog="python -m mae_bench.data.masks", description=(__doc__ or "").split(":")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--colours", type=Path)
    given = parser.parse_args(arguments)
    try:
        print(f"{convert(given.source, given.out, given.colours)} label pictures written to {given.out}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
