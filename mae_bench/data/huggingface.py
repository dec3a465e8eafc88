"""Data sets of the Hugging Face Hub, or of a folder that the ``datasets`` package reads, through timm's reader.

Pictures stay in the Arrow files that ``datasets`` maps into memory; nothing is decoded on the way.
"""

from __future__ import annotations

import hashlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mae_bench import places
from mae_bench.data.dataset import SPLITS, Contents, Split, SplitName, fingerprint, inside
from mae_bench.data.sources import NO_LABEL, class_names
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

BATCH = 10_000  # rows that are looked at together


class HuggingFace:
    """One split (a ``Source``)."""

    def __init__(
        self, name: str, split: str, *, cache: Path | None = None, image: str = "image", label: str = "label"
    ) -> None:
        """``name`` is the Hub's, or a folder; ``cache`` is where ``datasets`` keeps its files, by default its own
        place; ``label`` is empty for a set without classes."""
        require(name)
        from datasets.exceptions import DatasetsError
        from timm.data.readers import create_reader

        self._what = f"{name}[{split}]"
        try:
            self._reader: Any = create_reader(
                f"hfds/{name}",
                root=str(cache) if cache else None,
                split=split,
                input_key=image,
                target_key=label or image,  # the reader wants one that is there
            )
            self.sizes, self.labels = scan(self._reader.dataset, image, label)
        except (OSError, ValueError, KeyError, ImportError, DatasetsError) as error:
            raise UserError(f"cannot open the Hugging Face data set {self._what}: {_line(error)}") from error
        self.classes: tuple[str, ...] = tuple(getattr(self._reader.dataset.features.get(label), "names", None) or ())

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, index: int) -> bytes:
        try:
            file, _ = self._reader[range(len(self))[index]]
            with file:
                return bytes(file.read())
        except OSError as error:
            raise UserError(f"cannot read {self.name(index)}: {_line(error)}") from error

    def name(self, index: int) -> str:
        return f"{self._what}[{range(len(self))[index]}]"

    def digest(self) -> str:
        """sha256 (hex) over bytes and class of the pictures, in order; equal on every machine, whichever release of
        ``datasets`` and revision of the repository gave them."""
        rows = np.stack([self.sizes, self.labels]).astype("<i8")
        return hashlib.sha256(rows.tobytes()).hexdigest()


def require(name: str) -> None:
    if find_spec("datasets") is None:
        raise UserError(f"the Hugging Face data set '{name}' needs the datasets package: pip install datasets")


def scan(dataset: Any, image: str, label: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Encoded bytes and class of every row. Arrow keeps the lengths apart: the pictures are not read.

    Raises:
        ValueError: a column does not hold pictures, or numbers of classes.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if label and not pa.types.is_integer(kind := dataset.data.schema.field(label).type):
        raise ValueError(f"column '{label}' holds {kind}, not numbers of classes; label_column names another")
    sizes, labels = [], []
    for batch in dataset.with_format("arrow").iter(BATCH):
        lengths = pc.binary_length(pc.struct_field(batch.column(image), "bytes")).to_pylist()
        paths = pc.struct_field(batch.column(image), "path").to_pylist()
        sizes += [_size(*row, image) for row in zip(lengths, paths, strict=True)]
        labels.append(
            pc.fill_null(batch.column(label), NO_LABEL).to_numpy() if label else np.full(len(paths), NO_LABEL)
        )
    return np.array(sizes, dtype=np.int64), np.concatenate([*labels, np.empty(0)]).astype(np.int64)


def _size(length: int | None, path: str | None, image: str) -> int:
    """Bytes of a picture that lies in the row, or in a file that the row names."""
    if length is None and path is None:
        raise ValueError(f"a row has no picture in column '{image}'; remove it")
    return length if length is not None else Path(str(path)).stat().st_size


def read(spec: DataSpec, root: Path, *, smoke: bool = False) -> Contents:
    """Open both splits and check their classes. Smoke data lie in ``root`` itself, whatever the repository."""
    name, cache = (str(root), places.cache() / "huggingface") if smoke else (_locate(spec, root), None)
    sources: dict[SplitName, HuggingFace] = {}
    for split in SPLITS:
        given: str = getattr(spec, split)
        if not re.fullmatch(r"\w+(\.\w+)*", given):
            raise UserError(f"the task recipe's [data] {split} = {given!r:.80} is no name of a split, such as 'train'")
        sources[split] = HuggingFace(name, given, cache=cache, image=spec.image_column, label=spec.label_column)
    if sources["train"].classes != sources["val"].classes:
        raise UserError(f"{name}: the splits {spec.train} and {spec.val} name different classes; both need the same")
    classes = class_names(spec.classes, sources["train"].classes, sources.values(), name)
    found: dict[SplitName, Split] = {split: Split(source=source) for split, source in sources.items()}
    return Contents(classes, found, fingerprint((), classes, [sources[split].digest() for split in SPLITS]))


def _locate(spec: DataSpec, root: Path) -> str:
    """What ``datasets`` is asked for: ``./FOLDER`` lies below the root, any other name is the Hub's."""
    if spec.repository.startswith("./"):
        folder = inside(root, spec.repository, "the task recipe's [data] repository")
        if not folder.is_dir():
            raise UserError(f"no hf data: {folder} does not exist; --data FOLDER names another place for {root}")
        return str(folder)
    if Path(spec.repository).exists():
        raise UserError(
            f"'{spec.repository}' names a data set of the Hugging Face Hub, and is also in the folder that you are in, "
            'which the datasets package would take instead; go elsewhere, or write repository = "./FOLDER" and --data'
        )
    return spec.repository


def _line(error: Exception) -> str:
    """The first line of a message from outside, printable and short."""
    first = (str(error) or type(error).__name__).splitlines()[0]
    return "".join(character if character.isprintable() else "?" for character in first)[:300]
