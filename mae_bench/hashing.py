"""Hashes of files, and whether a weight file is the one that its publisher means. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from mae_bench.errors import UserError

if TYPE_CHECKING:
    from mae_bench.schema import FileWeights


def file_hash(path: Path, algorithm: str = "sha256") -> str:
    """Hex digest of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def check_hash(path: Path, weights: FileWeights, mend: str = "") -> str:
    """Compare a file with what its publisher states, which may be the first digits only, as in torch.hub's file names.

    ``mend`` ends the message of a mismatch. Returns "sha256", "sha256 prefix", "md5 prefix", or "" where the recipe
    states nothing.
    """
    algorithm, stated = ("sha256", weights.sha256) if weights.sha256 else ("md5", weights.md5_prefix)
    if not stated:
        return ""
    found = file_hash(path, algorithm)
    if not found.startswith(stated):
        dots = "…" if len(stated) < len(found) else ""
        mend = mend or f"fetch it again from {weights.url}, or correct the backbone recipe"
        raise UserError(f"{path}: {algorithm} is {found}, the recipe means {stated}{dots}; {mend}")
    return "sha256" if algorithm == "sha256" and stated == found else f"{algorithm} prefix"
