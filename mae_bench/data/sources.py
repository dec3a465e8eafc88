"""Where the bytes of pictures come from: files, tar shards, or a Hugging Face data set.

A source gives a picture's bytes by index, in any order. What it keeps per picture lies in numpy arrays, which forked
data workers share; lists of a million strings would be copied into each as their reference counts change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mae_bench.data.images import read_bytes
from mae_bench.errors import UserError


class Source(Protocol):
    """Pictures by index 0 … n-1; another index is an ``IndexError``."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """The encoded picture. Unreadable: ``UserError``."""

    def name(self, index: int) -> str:
        """What messages call the picture."""

    def label(self, index: int) -> int | None:
        """Its class, where the source has one."""


class Files:
    """Pictures that are files of their own."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int] | None = None) -> None:
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=bytes)
        self._labels = None if labels is None else np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> Path:
        return Path(self.name(index))

    def read(self, index: int) -> bytes:
        return read_bytes(self.path(index))

    def name(self, index: int) -> str:
        return os.fsdecode(self._paths[range(len(self))[index]])

    def label(self, index: int) -> int | None:
        return None if self._labels is None else int(self._labels[index])


class HuggingFace:
    """One split of a data set on the Hugging Face Hub or in a local folder, through timm's reader.

    Its pictures stay in the Arrow files that ``datasets`` maps into memory; nothing is decoded on the way.
    """

    def __init__(
        self, name: str, split: str, *, cache: Path | None = None, image: str = "image", label: str = "label"
    ) -> None:
        """``cache`` is where ``datasets`` keeps its files; ``label`` is empty for a set without classes."""
        if find_spec("datasets") is None:
            raise UserError(f"the Hugging Face data set '{name}' needs the datasets package: pip install datasets")
        from timm.data.readers import create_reader

        self._what = f"{name}[{split}]"
        self._labelled = bool(label)
        try:
            self._reader: Any = create_reader(
                f"hfds/{name}",
                root=str(cache) if cache else None,
                split=split,
                input_key=image,
                target_key=label or image,  # the reader wants one that is there
            )
            if len(self._reader):
                self._item(0)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"cannot open the Hugging Face data set {self._what}: {_line(error)}") from error

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, index: int) -> bytes:
        return self._item(index)[0]

    def name(self, index: int) -> str:
        return f"{self._what}[{range(len(self))[index]}]"

    def label(self, index: int) -> int | None:
        return int(self._item(index)[1]) if self._labelled else None

    def _item(self, index: int) -> tuple[bytes, Any]:
        file, label = self._reader[range(len(self))[index]]
        with file:
            return file.read(), label


def _line(error: Exception) -> str:
    """The first line of a message from outside, printable and short."""
    first = (str(error) or type(error).__name__).splitlines()[0]
    return "".join(character if character.isprintable() else "?" for character in first)[:300]
