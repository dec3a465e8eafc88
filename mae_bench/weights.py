"""Which weight file a run starts from: given, downloaded, made on demand, random for a smoke run, or none."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mae_bench import places
from mae_bench.engine.job import Options
from mae_bench.errors import UserError
from mae_bench.hashing import file_hash
from mae_bench.recipes import digest
from mae_bench.schema import Backbone, MadeWeights, NoWeights

Kind = Literal["none", "file", "made", "given", "synthetic"]
MAX_STATED = 500  # characters of what a file may say of its maker


@dataclass(frozen=True)
class Source:
    """The encoder file of a run. ``file`` is None for a from-scratch baseline only. ``stated`` is what a file of ours
    says of its maker: ``protocol``, and ``data`` with name, fingerprint and matches; empty where it says nothing."""

    kind: Kind
    file: Path | None
    sha256: str = ""
    stated: dict[str, Any] = field(default_factory=dict)


def find(backbone: Backbone, options: Options, make: Callable[[Backbone], Path]) -> Source:
    """The encoder file that ``backbone`` starts from under ``options``.

    ``make`` trains the weights of a backbone whose recipe says ``kind = "made"`` and returns the file, from its cache
    where it can. A smoke run never trains: it takes a random file in the declared layout where there is no real one.
    """
    kind, file = locate(backbone, options)
    if kind == "none":
        return Source(kind, None)
    if kind == "made":
        file = make(backbone)
    if kind == "synthetic":
        file = _synthetic(backbone)
    assert file is not None
    metadata = _metadata(file)
    if not options.smoke and not options.eval_only:
        _refuse_synthetic(file, metadata)
    return Source(kind, file, file_hash(file), _stated(metadata))


def _metadata(file: Path) -> dict[str, str]:
    from mae_bench.checkpoints.files import read_tensors

    return read_tensors(file)[1]


def _refuse_synthetic(file: Path, metadata: dict[str, str]) -> None:
    """Random weights that a smoke run wrote must never stand behind a number."""
    from mae_bench.checkpoints.files import SYNTHETIC

    if metadata.get(SYNTHETIC) == "true":
        raise UserError(f"{file} holds random weights that a smoke run wrote; give real ones, or add --smoke")


def _stated(metadata: dict[str, str]) -> dict[str, Any]:
    """What `Job.origin` wrote of protocol and data; a file that says it in any other form says nothing."""
    from mae_bench.checkpoints.files import json_metadata

    data = json_metadata(metadata, "data")
    form = {key: type(value) for key, value in data.items()}
    if "protocol" not in metadata or form != {"name": str, "fingerprint": str, "matches": bool}:
        return {}
    texts = (metadata["protocol"], data["name"], data["fingerprint"])
    if not all(text.isprintable() and len(text) <= MAX_STATED for text in texts):
        return {}  # a record must hold them, and anybody can write such a file
    return {"protocol": metadata["protocol"], "data": data}


def locate(backbone: Backbone, options: Options) -> tuple[Kind, Path | None]:
    """What kind of weights a run starts from, and the file if it must be there already. Costs nothing.

    Raises:
        UserError: the file is missing; names it, its place and the command that brings it.
    """
    recipe = backbone.weights
    if options.weights is not None:
        if isinstance(recipe, NoWeights) and not options.eval_only:
            raise UserError(
                f"--weights {options.weights}: '{backbone.name}' is a from-scratch baseline; "
                f"name a backbone with weights, e.g. {backbone.name.replace('scratch', 'mae')}"
            )
        return "given", _existing(options.weights)
    if isinstance(recipe, NoWeights):
        return "none", None
    if isinstance(recipe, MadeWeights):
        return ("synthetic" if options.smoke else "made"), None
    file = places.weights_root() / recipe.file
    if file.is_file():
        return "file", file
    if options.smoke:
        return "synthetic", None
    raise UserError(
        f"the weights of '{backbone.name}' are not at {file}; bring them with `python -m mae_bench fetch "
        f"{backbone.name}` (from {recipe.url}, licence {recipe.licence}), "
        "name another copy with --weights FILE, or try the pipeline without them: --smoke"
    )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"--weights {path}: no such file")
    return path


def _synthetic(backbone: Backbone) -> Path:
    """A seeded random file in the layout that the recipe declares; it goes through the real loader."""
    from mae_bench.checkpoints.load import write_synthetic

    recipe = backbone.weights
    key = digest({"architecture": backbone.architecture, "weights": recipe})[:16]
    file = places.cache() / "smoke" / f"{backbone.name}-{key}.weights"
    with locked(file):
        if not file.is_file():
            write_synthetic(file, backbone, seed=0)
    return file


def made_folder(backbone: Backbone, key: str) -> Path:
    """Cache folder of made weights: the pre-training run's folder, named after everything that goes into it."""
    assert isinstance(backbone.weights, MadeWeights)
    return places.cache() / "made" / f"{backbone.name}-{key[:16]}"


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold ``path``'s lock file, so that two processes never make the same thing twice or at once.

    Without ``wait`` a lock that another process holds is a UserError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Neither truncated nor followed: what lies there may be a link to a file of somebody else's.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path.with_name(path.name + ".lock"), flags, 0o666), "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(f"another process works in {path.parent}; wait for it, or choose another --out") from None
        try:
            yield
        finally:
            # Closing is not enough: a data loading process forked meanwhile holds the file open, and so the lock.
            fcntl.flock(stream, fcntl.LOCK_UN)
