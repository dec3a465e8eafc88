"""Bring a backbone's weight file into the weights folder: hashed, and never in place of another file.

A download grows as ``<file>.part`` (`mae_bench.download`) and takes the file's name only after its hash was compared.
Imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mae_bench import places
from mae_bench.download import Download, Show, check_address, copy, discard
from mae_bench.errors import UserError
from mae_bench.hashing import check_hash, file_hash
from mae_bench.schema import Backbone, FileWeights, MadeWeights, NoWeights
from mae_bench.weights import locked


def fetch(backbone: Backbone, *, quiet: bool) -> Path:
    """Path of the backbone's weight file, downloaded if it is not there yet; its hash is compared in any case.

    The licence and what was verified are said on stderr; ``quiet`` shows no progress.

    Raises:
        UserError: there is nothing to fetch, the server cannot be used, or the file is not what the recipe means.
    """
    weights = _published(backbone)
    file = places.weights_root() / weights.file
    print(f"{backbone.name}: {weights.licence}, {weights.url}", file=sys.stderr, flush=True)
    if not os.path.lexists(file):  # looked at before anything is written: a shared folder may be read-only
        with locked(file):
            if not os.path.lexists(file):  # another process may have brought it while this one waited
                _bring(weights, file, quiet)
                return file
    if not file.is_file():
        raise UserError(f"{file} is there, but is no file; move it away and fetch again")
    _verify(file, weights, "delete it and fetch again, or correct the backbone recipe")
    return file


def _published(backbone: Backbone) -> FileWeights:
    """The weights of ``backbone``, if they can be fetched."""
    name, weights = backbone.name, backbone.weights
    if backbone.refused:
        raise UserError(f"backbone '{name}' cannot be run: {backbone.refused}")
    if isinstance(weights, NoWeights):
        raise UserError(f"'{name}' starts from random weights: there is nothing to fetch, run it as it is")
    if isinstance(weights, MadeWeights):
        raise UserError(
            f"the weights of '{name}' are made here, not fetched: `python -m mae_bench pretrain --backbone {name}`"
        )
    return weights


def _bring(weights: FileWeights, file: Path, quiet: bool) -> None:
    """Download ``file`` beside its place, check it, and only then give it its name."""
    part = file.with_name(file.name + ".part")
    with _progress(file.name, quiet) as show:
        if weights.url.startswith("file://"):
            copy(weights.url, part)
        else:
            url, token = _address(weights)
            by_hand = f"put the file at {file} (licence {weights.licence}), or name a copy with --weights FILE"
            Download(url, token, part, by_hand, show).run()
    try:
        _verify(part, weights, "the download is deleted; fetch again, or correct the backbone recipe")
    except UserError:
        discard(part)
        raise
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    if os.path.lexists(file):
        raise UserError(f"{file} was put there meanwhile and is left as it is; delete it or {part}, and fetch again")
    part.rename(file)
    discard(part)


def _verify(path: Path, weights: FileWeights, mend: str) -> None:
    """Compare the hash of what the disk holds, and say on stderr what that proves."""
    how = check_hash(path, weights, mend)
    said = f"verified: {how}"
    if not how:
        said = f"unverified: the publisher states no hash; sha256 {file_hash(path)}, locked when it is first loaded"
    print(said, file=sys.stderr)


@contextmanager
def _progress(label: str, quiet: bool) -> Iterator[Show]:
    """A bar on a terminal, nothing anywhere else."""
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    if quiet or not sys.stderr.isatty():
        yield lambda have, size: None
        return
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(label, total=None)
        yield lambda have, size: bars.update(task, completed=have, total=size)


def _address(weights: FileWeights) -> tuple[str, str]:
    """The http address of a recipe's url, and the bearer token for its host ("" = none).

    ``hf://owner/repository[@revision]/path`` is Hugging Face's ``/resolve/`` address, on $HF_ENDPOINT if that is set.
    """
    url, token = weights.url, ""
    if url.startswith("hf://"):
        parts = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?/(.+)", url)
        if parts is None:
            raise UserError(
                f"{url!r:.200}: expected hf://owner/repository[@revision]/path; correct the backbone recipe"
            )
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise UserError(
                f"{url} is not fetched while $HF_HUB_OFFLINE is set; unset it, or name a copy with --weights FILE"
            )
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        url = f"{endpoint}/{parts[1]}/resolve/{parts[2] or 'main'}/{quote(parts[3])}"
        token = os.environ.get("HF_TOKEN", "").strip()
        if not (token.isascii() and token.isprintable()):
            raise UserError("$HF_TOKEN holds characters that no token has; set it anew")
    check_address(url)
    return url, token
