"""Read NumPy weight files without running any code: ``.npz`` archives, and detectron2's pickles of arrays.

detectron2's model zoo (and its converters) pickle ``{"model": {name: array}, "__author__": …}`` with the plain
``pickle`` module, whose format can call any function there is. The unpickler here knows four names, and what stands for
them allocates nothing and calls nothing.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mae_bench.errors import UserError

# A pickle that torch.save wrote before its zip format starts with this number; any other pickle is not torch's.
TORCH_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
MAX_UNPACKED = 4  # times the size of an archive: weights hardly compress, a bomb does


def read_npz(path: Path) -> dict[str, Tensor]:
    """Arrays of an ``.npz`` file as tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > MAX_UNPACKED * path.stat().st_size:
            raise UserError(f"{path} would unpack to {unpacked} bytes, far more than weights do; it was not opened")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _tensor(path, name, arrays[name]) for name in arrays.files}
    except (ValueError, OSError, KeyError, NotImplementedError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{path} is a damaged .npz file ({str(error)!r:.120}); fetch it again") from error


def read_pickled_arrays(path: Path) -> dict[str, Any]:
    """The dictionary that detectron2 pickled, its arrays as tensors."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file).load()
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: {error}; it was not opened") from error
    except Exception as error:  # damaged bytes make the unpickler fail with any exception there is
        raise UserError(f"{path} is a truncated or damaged pickle; fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dictionary of named arrays")
    return _as_tensors(path, content)


def _as_tensors(path: Path, content: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: _tensor(path, key, value)
        if isinstance(value, np.ndarray)
        else _as_tensors(path, value)
        if isinstance(value, dict)
        else value
        for key, value in content.items()
    }


def _tensor(path: Path, name: object, array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise UserError(f"{path}: {name!r:.80} is an array of {array.dtype}, not of numbers")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W", "O"]))


class _Array:
    """Stands for the class ``numpy.ndarray`` in a pickle, where it may only be named."""


def _reconstruct(kind: object, shape: object, code: object) -> np.ndarray[Any, Any]:
    """An empty array, which the pickle then fills; NumPy checks the data against the shape."""
    if kind is not _Array:
        raise pickle.UnpicklingError("an array of an unknown class")
    return np.empty(0, dtype=np.int8)


def _encode(text: str, encoding: str) -> bytes:
    """How Python 2's pickles write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r:.40}")
    return text.encode("latin1")


KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle._Unpickler):
    """The pure Python one: its memo is a dictionary, so that a huge memo index costs nothing."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in KNOWN:
            wanted = f"{module}.{name}"
            raise pickle.UnpicklingError(f"it wants to run or load {wanted!r:.80}, which a weight file has no need of")
        return KNOWN[module, name]

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("it refers to things outside the file")
