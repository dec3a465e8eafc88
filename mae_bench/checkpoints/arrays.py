"""Read NumPy weight files without running any code: ``.npz`` archives, and detectron2's pickles of arrays.

detectron2's model zoo (and its converters) pickle ``{"model": {name: array}, "__author__": …}`` with the plain
``pickle`` module, whose format can call any function there is. The unpickler here knows five names, and what stands for
them writes down what it is given and does nothing else: NumPy itself never sees a file's idea of a data type. An array
is made of its bytes, once they are as many as its shape and type say.
"""

from __future__ import annotations

import math
import mmap
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from mae_bench.errors import UserError

# A pickle that torch.save wrote before its zip format starts with this number; any other pickle is not torch's.
TORCH_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
MAX_DIMENSIONS = 8  # of an array
MAX_UNPACKED = 4  # times the size of an archive: weights hardly compress, a bomb does
# The types that NumPy and torch share, as NumPy writes them in files.
CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def read_npz(path: Path) -> dict[str, Tensor]:
    """Arrays of an ``.npz`` file as tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            unpacked = sum(entry.file_size for entry in entries)
            if unpacked > MAX_UNPACKED * path.stat().st_size:
                raise UserError(f"{path} would unpack to {unpacked} bytes, far more than weights do; it was not opened")
            arrays: dict[str, Tensor] = {}
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if name in arrays:
                    raise UserError(f"{path} holds {name!r:.80} twice; fetch it again")
                arrays[name] = _read_member(path, name, archive, entry)
            return arrays
    except UserError:
        raise
    except Exception as error:  # damaged bytes make zipfile, zlib and NumPy fail with any exception there is
        raise UserError(f"{path} is a damaged .npz file ({str(error)!r:.120}); fetch it again") from error


def _read_member(path: Path, name: str, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Tensor:
    """One array, whose header is compared with the bytes that follow it before those are read."""
    # Of the others zipfile unpacks a whole member at once, whatever size it states.
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("a compression that NumPy does not write")
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        # A third version is for names of fields, which are no numbers.
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran, dtype = read_header(file)
        _check_code(path, name, dtype.str[1:])
        size = entry.file_size - file.tell()
        _check_size(name, shape, dtype, size)
        return _tensor(shape, dtype, fortran, file.read(size))


def _check_code(path: Path, name: object, code: str) -> None:
    if code not in CODES:
        raise UserError(
            f"{path}: {name!r:.80} is an array of {code!r:.20}, not of numbers that torch has; leave it out"
        )


def _check_size(name: object, shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> None:
    # True and False are integers, too, but no lengths.
    if len(shape) > MAX_DIMENSIONS or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"{name!r:.80} has no sound shape")
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name!r:.80} does not have the {size} bytes that its shape and type say")


def _tensor(shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool, data: bytes) -> Tensor:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data, order="F" if fortran else "C")
    return torch.from_numpy(np.array(array, dtype.newbyteorder("="), order="C"))


class Array:
    """Stands for a ``numpy.ndarray`` in a pickle: the state that it is given."""

    state: Any = None


class _Dtype:
    """Stands for a ``numpy.dtype`` in a pickle: its code, and the state that it is given."""

    state: Any = None

    def __init__(self, code: object, align: object, copy: object) -> None:
        self.code = code


class _RefusedError(Exception):
    """A pickle that is whole, but not of arrays alone."""


def read_pickled_arrays(path: Path) -> dict[Any, Any]:
    """The dictionary that detectron2 pickled; `as_tensors` makes tensors of its arrays."""
    try:
        # A map gives what there is, however much a pickle says comes next: a file would allocate all of it first.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _Unpickler(content, encoding="latin1").load()  # that of strings of Python 2
    except _RefusedError as error:
        raise UserError(f"{path} was not opened: {error}") from error
    except Exception as error:  # damaged bytes make the unpickler fail with any exception there is
        raise UserError(f"{path} is a truncated or damaged pickle; fetch it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, not a dictionary of named arrays")
    return found


def as_tensors(path: Path, named: Mapping[Any, Any]) -> dict[Any, Any]:
    """``named`` with a tensor for every array of `read_pickled_arrays`; what else it holds stays as it is."""
    made: dict[int, Tensor] = {}  # an array under two names is one tensor
    left = path.stat().st_size
    for name, value in named.items():
        if not isinstance(value, Array) or id(value) in made:
            continue
        try:
            _, shape, dtype, fortran, data = value.state
            code, order = dtype.code, dtype.state[1]
            if not isinstance(shape, tuple) or not isinstance(code, str) or order not in ("<", ">", "|"):
                raise ValueError("no array's state")
            _check_code(path, name, code)
            data = data.encode("latin1") if isinstance(data, str) else data
            left -= len(data)
            if left < 0:
                raise ValueError("more arrays than bytes")
            known = np.dtype(code).newbyteorder(order)
            _check_size(name, shape, known, len(data))
            made[id(value)] = _tensor(shape, known, bool(fortran), data)
            value.state = None  # frees the bytes: there is one copy of a model, not two
        except UserError:
            raise
        except Exception as error:  # whatever a pickle gave as an array's state
            raise UserError(f"{path} is a truncated or damaged pickle, at {name!r:.80}; fetch it again") from error
    return {name: made[id(value)] if isinstance(value, Array) else value for name, value in named.items()}


def _reconstruct(kind: object, shape: object, code: object) -> Array:
    """NumPy makes an empty array, to be given its state next."""
    if kind is not Array:
        raise _RefusedError("it has an array of an unknown class")
    return Array()


def _encode(text: object, encoding: object) -> object:
    """How Python 2's pickles write bytes: they stay text until an array needs them."""
    if encoding != "latin1":
        raise _RefusedError("it has bytes in another encoding than latin1")
    return text


def _ordered() -> dict[Any, Any]:
    """Stands for ``collections.OrderedDict``."""
    return {}


KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _ordered,
}


# What training code leaves beside the tensors. Nothing bad in itself, but to have it is to call what the file names.
LEFTOVERS = (
    "mmengine.logging.history_buffer.HistoryBuffer",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
)
# How a part of a file is saved alone, in one line of Python.
ALONE = "numpy.savez('OUT.npz', **numpy.load('FILE', allow_pickle=True)['{key}'])"


def wants(name: str, alone: str) -> str:
    """Why a file that names the class or function ``name`` is not opened, and for some what to do about it."""
    told = f"it wants to run or load {name!r:.80}, which a weight file has no need of"
    if name not in LEFTOVERS:
        return told
    way = alone.format(key="state_dict")
    return f"{told}; only if you trust it, save its tensors alone (state_dict or the key that they are under): {way}"


OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
)


def _with_text(opcode: bytes, keys: slice) -> Callable[[Any], None]:
    """The opcode, if what stands at ``keys`` of the stack is text. To hash a tuple of tuples that are shared would take
    time exponential in their number."""
    load = pickle._Unpickler.dispatch[opcode[0]]

    def checked(unpickler: Any) -> None:
        if not all(isinstance(key, str) for key in unpickler.stack[keys]):
            raise _RefusedError("it has a dictionary whose keys are not text")
        load(unpickler)

    return checked


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise _RefusedError(f"it has the opcode {code:#04x}, which a pickle of arrays has no need of")


class _Unpickler(pickle._Unpickler):
    """The pure Python one: its memo is a dictionary, so that a huge memo index costs nothing. It takes the opcodes that
    named arrays need: none that allocates by a stated size, hashes more than text, or calls anything but `KNOWN`."""

    stack: list[Any]  # above the last mark

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in KNOWN:
            raise _RefusedError(wants(f"{module}.{name}", ALONE))
        return KNOWN[module, name]

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Array | _Dtype):
            target.state = state
        elif not isinstance(target, dict):  # a state_dict's attributes (`_metadata`) are left out
            raise _RefusedError("it changes something other than arrays")

    dispatch = _Opcodes(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in OPCODES}
        | {
            pickle.BUILD[0]: load_build,
            pickle.SETITEM[0]: _with_text(pickle.SETITEM, slice(-2, -1)),
            pickle.SETITEMS[0]: _with_text(pickle.SETITEMS, slice(None, None, 2)),
            pickle.DICT[0]: _with_text(pickle.DICT, slice(None, None, 2)),
        }
    )
