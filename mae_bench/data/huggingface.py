"""Data sets of the Hugging Face Hub, or of a folder, as the ``datasets`` package reads them.

Pictures stay in the Arrow files that ``datasets`` maps into memory, and of a row nothing but the picture is read; it is
decoded elsewhere, by the policy of every format.
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
from mae_bench.data.images import MAX_BYTES, read_bytes
from mae_bench.data.sources import NO_LABEL, class_names
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

BATCH = 10_000  # rows that are looked at together


class HuggingFace:
    """One split (a ``Source``)."""

    def __init__(
        self, name: str, split: str, *, cache: Path | None = None, image: str = "image", label: str = "label"
    ) -> None:
        """``name`` is the Hub's, or an absolute folder; ``cache`` is where ``datasets`` keeps its files, by default its
        own place; ``label`` is empty for a set without classes.

        Raises:
            UserError: the set does not open, a column does not hold pictures or numbers of classes, or a picture is
                missing, empty, larger than ``MAX_BYTES``, or a file that is not the data set's own.
        """
        require(name)
        self._what = f"{name}[{split}]"
        self._image = image
        self._folders = _own_folders(name, cache)
        try:
            rows = _load(name, split, cache, image, label)
            self.labels = _labels(rows, label) if label else np.full(len(rows), NO_LABEL)
            self._rows = rows.select_columns([image])
            self.sizes = self._sizes()
        except UserError:
            raise
        # A data set is anybody's, and what datasets, pyarrow and the Hub's client raise at one has no common base.
        except Exception as error:
            raise UserError(f"cannot open the Hugging Face data set {self._what}: {_line(error)}") from error
        self.classes: tuple[str, ...] = tuple(getattr(rows.features.get(label), "names", None) or ())

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, index: int) -> bytes:
        index = range(len(self))[index]
        try:
            cell = self._rows[index][self._image]
            data: bytes = read_bytes(Path(cell["path"])) if cell["bytes"] is None else cell["bytes"]
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.name(index)}: {_line(error)}") from error
        if len(data) != self.sizes[index]:
            raise UserError(f"{self.name(index)} has changed since the run began; start it again with the data at rest")
        return data

    def name(self, index: int) -> str:
        return f"{self._what}[{range(len(self))[index]}]"

    def digest(self) -> str:
        """sha256 (hex) over bytes and class of the pictures, in order; equal on every machine, whichever release of
        ``datasets`` and revision of the repository gave them."""
        rows = np.stack([self.sizes, self.labels]).astype("<i8")
        return hashlib.sha256(rows.tobytes()).hexdigest()

    def _sizes(self) -> NDArray[np.int64]:
        """(n,) encoded bytes of every picture. Arrow keeps the lengths apart: the pictures are not read."""
        import pyarrow.compute as pc

        sizes: list[int] = []
        for batch in self._rows.with_format("arrow").iter(BATCH):
            cells = batch.column(self._image)
            lengths, paths = pc.binary_length(pc.struct_field(cells, "bytes")), pc.struct_field(cells, "path")
            for length, path in zip(lengths.to_pylist(), paths.to_pylist(), strict=True):
                sizes.append(self._size(f"{self._what}[{len(sizes)}]", length, path))
        return np.array(sizes, dtype=np.int64)

    def _size(self, name: str, length: int | None, path: str | None) -> int:
        """Bytes of a picture that lies in the row, or in a file that the row names."""
        if length is None and path is None:
            raise UserError(f"{name} has no picture in column '{self._image}'; remove the row")
        if length is None:
            if not str(path).startswith(self._folders) or ".." in Path(str(path)).parts:
                raise UserError(f"{name} names {path!r:.200}; expected a file of the data set's own folder, unpacked")
            if not Path(str(path)).is_file():
                raise UserError(f"{name} names {path!r:.200}, which is not there, or is no regular file")
            length = Path(str(path)).stat().st_size
        if not 0 < length <= MAX_BYTES:
            raise UserError(f"{name} has a picture of {length} bytes, expected 1 to {MAX_BYTES}; remove the row")
        return length


def require(name: str) -> None:
    if find_spec("datasets") is None:
        raise UserError(f"the Hugging Face data set '{name}' needs the datasets package: pip install datasets")


def _load(name: str, split: str, cache: Path | None, image: str, label: str) -> Any:
    """The two columns of a split, as a ``datasets.Dataset``. With every row that is read, ``datasets`` decodes each
    other column that holds pictures, by a policy of its own and at any size: those are left out."""
    import datasets
    import pyarrow as pa

    rows = datasets.load_dataset(name, split=split, cache_dir=str(cache) if cache else None)
    for key, column in (("image_column", image), ("label_column", label)):
        if column and column not in rows.column_names:
            raise ValueError(f"it has no column '{column}', only {rows.column_names}; {key} names one of them")
    rows = rows.select_columns(sorted({image, label} - {""}))
    kind = rows.data.schema.field(image).type
    texts = pa.types.is_string, pa.types.is_large_string
    if not any(fits(kind) for fits in (pa.types.is_struct, pa.types.is_binary, pa.types.is_large_binary, *texts)):
        raise ValueError(f"column '{image}' holds {kind}, not pictures; image_column names another")
    return rows.cast_column(image, datasets.Image(decode=False))


def _labels(rows: Any, label: str) -> NDArray[np.int64]:
    """(n,) class of every row, or ``NO_LABEL``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = rows.select_columns([label]).with_format("arrow")[:].column(label)
    if not pa.types.is_integer(column.type):
        raise ValueError(f"column '{label}' holds {column.type}, not numbers of classes; label_column names another")
    labels: NDArray[np.int64] = pc.fill_null(pc.cast(column, pa.int64()), NO_LABEL).to_numpy()
    return labels


def _own_folders(name: str, cache: Path | None) -> tuple[str, ...]:
    """Beginnings of the paths that a row may name: the set's folder, and where ``datasets`` and the Hub's client keep
    what they fetched. A row of somebody else's could name any file of this machine."""
    from datasets import config
    from huggingface_hub import constants

    own = [config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE]
    own += [cache] if cache else []
    own += [name] if Path(name).is_absolute() else []
    return tuple(f"{place}/" for folder in own for place in {Path(folder).absolute(), Path(folder).resolve()})


def read(spec: DataSpec, root: Path, *, smoke: bool = False) -> Contents:
    """Open both splits and check their classes. Smoke data lie in ``root`` itself, whatever the repository."""
    name, cache = (str(root.absolute()), places.cache() / "huggingface") if smoke else (_locate(spec, root), None)
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
    if not spec.hub:
        folder = inside(root, spec.repository, "the task recipe's [data] repository").absolute()
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
