"""Where the bytes of pictures come from: files here, tar shards (`tars`), or a Hugging Face data set (`huggingface`).

A source gives a picture's bytes by index, in any order. What it keeps per picture lies in numpy arrays, which forked
data workers share; lists of a million strings would be copied into each as their reference counts change.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mae_bench.data.images import read_bytes
from mae_bench.errors import UserError

NO_LABEL = -1
MAX_CLASSES = 100_000  # that labels alone may claim


class Source(Protocol):
    """Pictures by index 0 … n-1; another index is an ``IndexError``."""

    labels: NDArray[np.int64]  # (n,) class of each picture, or NO_LABEL

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """The encoded picture. Unreadable: ``UserError``."""

    def name(self, index: int) -> str:
        """What messages call the picture."""


class Files:
    """Pictures that are files of their own."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int] | None = None) -> None:
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=bytes)
        self.labels = np.full(len(paths), NO_LABEL) if labels is None else np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> bytes:
        return read_bytes(Path(self.name(index)))

    def name(self, index: int) -> str:
        return os.fsdecode(self._paths[range(len(self))[index]])


def class_names(classes: int, named: tuple[str, ...], sources: Collection[Source], where: str) -> tuple[str, ...]:
    """Names of the classes that labels of ``sources`` number: ``named``, or where that is empty the numbers themselves.

    ``classes`` is the number that the recipe demands, 0 for any; ``where`` is what errors call the list of names.
    """
    if len(set(named)) < len(named):
        raise UserError(f"{where} gives two classes one name; make them differ, since results are told by name")
    if classes and named and len(named) != classes:
        raise UserError(f"{where} names {len(named)} classes, the task recipe expects {classes}; correct one of them")
    largest = max((int(source.labels.max(initial=NO_LABEL)) for source in sources), default=NO_LABEL)
    if not classes and not named and largest >= MAX_CLASSES:
        raise UserError(f"{where}: a label says class {largest}; set classes in the recipe's [data] if it is meant")
    count = classes or len(named) or largest + 1
    for source in sources:
        if len(below := np.flatnonzero(source.labels < NO_LABEL)):  # torch's losses leave -100 out without a word
            first = int(below[0])
            raise UserError(
                f"{source.name(first)} has class {source.labels[first]}; expected 0 or above, or {NO_LABEL} where a "
                "picture has none; correct the label"
            )
        if len(beyond := np.flatnonzero(source.labels >= count)):
            first = int(beyond[0])
            raise UserError(
                f"{source.name(first)} has class {source.labels[first]}, but classes run from 0 to {count - 1}; "
                "correct the label, or the classes in the recipe's [data]"
            )
    return named or tuple(map(str, range(count)))
