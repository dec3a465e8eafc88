"""NumPy's weight files, `.npz` and pickles: what they hold is read exactly, and no file costs more than its size."""

from __future__ import annotations

import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.lib import format as npy

from mae_bench.checkpoints.arrays import CODES
from mae_bench.checkpoints.files import read_tensors
from mae_bench.errors import UserError

MOST = 20 << 20  # bytes that reading a small hostile file may allocate


@contextmanager
def refused(path: Path, message: str) -> Iterator[None]:
    """A UserError in one line that names the file and says ``message``, at little cost."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert re.search(message, text), text
    assert str(path) in text and text.isprintable() and len(text) < 700 + len(str(path))


def npz(folder: Path, *members: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive of the members' raw bytes, all of the name ``w.npy``."""
    with zipfile.ZipFile(folder / "file.npz", "w", compression) as archive:
        for member in members:
            archive.writestr("w.npy", member)
    return folder / "file.npz"


def member(header: str, data: bytes = bytes(4), version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header) + 1)
    return npy.magic(version, 0) + length + header.encode() + b"\n" + data


def shaped(shape: str, descr: str = "<f4") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}"


HEADERS = {
    "more than the data": (shaped("(2,)"), "does not have the 4 bytes"),
    "less than the data": (shaped("(0,)"), "does not have the 4 bytes"),
    "absurd": (shaped("(10000000, 10000000)"), "does not have the 4 bytes"),
    "overflow": (shaped("(1" + "0" * 30 + ", 0)"), "does not have the 4 bytes"),
    "negative": (shaped("(-1, -1)"), "no sound shape"),
    "True": (shaped("(True,)"), "no sound shape"),
    "many dimensions": (shaped("(1, 1, 1, 1, 1, 1, 1, 1, 1)"), "no sound shape"),
    "extended precision": (shaped("()", "<f16"), "an array of 'f16', not of numbers that torch has"),
    "complex": (shaped("()", "<c8"), "an array of 'c8'"),
    "objects": (shaped("()", "|O"), "an array of 'O'"),
    "unknown type": (shaped("()", "what"), "damaged .npz file"),
    "nested": ("(" * 5000 + ")" * 5000, "damaged .npz file"),
    "signs": ("-" * 9000 + "1", "damaged .npz file"),
    "cut": (shaped("(1L"), "damaged .npz file"),
    "too long": (shaped("(" + "1, " * 20000 + ")"), "damaged .npz file"),
}


@pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required additional header parsing")
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_believed_only_with_its_data(name: str, compression: int, tmp_path: Path) -> None:
    header, message = HEADERS[name]
    path = npz(tmp_path, member(header), compression=compression)
    repetitive = compression and name in ("nested", "signs", "too long")
    with refused(path, "would unpack to" if repetitive else message):
        read_tensors(path)


def ones(**options: Any) -> bytes:
    return member(shaped("(64,)"), np.random.default_rng(0).bytes(256), **options)


def flipped(path: Path, offset: int) -> Path:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
    return path


def encrypted(path: Path) -> Path:
    """The flag alone, in both headers of the member."""
    content = bytearray(path.read_bytes())
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    return path


def understated(folder: Path) -> Path:
    """50 MB behind a directory that states 128 bytes."""
    path = npz(folder, member(shaped("(12500000,)"), bytes(50_000_000)), compression=zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    start = content.index(b"PK\x01\x02")
    content[start + 24 : start + 28] = struct.pack("<I", 128)
    path.write_bytes(content)
    return path


ARCHIVES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no array": (lambda f: npz(f, b"plain text"), "damaged .npz file"),
    "empty member": (lambda f: npz(f, b""), "damaged .npz file"),
    "names of fields": (lambda f: npz(f, ones(version=3)), "damaged .npz file"),
    "one name twice": (lambda f: npz(f, ones(), ones()), "holds 'w' twice"),
    "damaged stream": (lambda f: flipped(npz(f, ones(), compression=zipfile.ZIP_DEFLATED), 50), "damaged .npz file"),
    "damaged values": (lambda f: flipped(npz(f, ones()), 200), "damaged .npz file.*CRC"),
    "LZMA": (lambda f: npz(f, ones(), compression=zipfile.ZIP_LZMA), "a compression that NumPy does not write"),
    "BZIP2": (lambda f: npz(f, ones(), compression=zipfile.ZIP_BZIP2), "a compression that NumPy does not write"),
    "encrypted": (lambda f: encrypted(npz(f, ones())), "damaged .npz file.*encrypted"),
    "understated size": (understated, "damaged .npz file"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_damaged_archive_is_refused(name: str, tmp_path: Path) -> None:
    make, message = ARCHIVES[name]
    path = make(tmp_path)
    with refused(path, message):
        read_tensors(path)


ANY_ARRAY = arrays.arrays(
    st.sampled_from([order + code for code in CODES for order in "<>"]).map(np.dtype),
    arrays.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=3),
)


@given(array=ANY_ARRAY, how=st.sampled_from(["npz", "compressed", 2, 3, 4]), fortran=st.booleans())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_array_is_read_exactly(array: np.ndarray[Any, Any], how: Any, fortran: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    array = np.asfortranarray(array) if fortran and array.ndim else array
    if isinstance(how, int):
        path.write_bytes(pickle.dumps({"model": {"w": array, "again": array}, "__author__": "me"}, protocol=how))
    else:
        with path.open("wb") as file:
            (np.savez if how == "npz" else np.savez_compressed)(file, w=array)
    tensors, _ = read_tensors(path)
    found = tensors["w"].numpy()
    assert found.dtype == array.dtype.newbyteorder("=") and found.shape == array.shape and found.flags.writeable
    assert found.tobytes() == array.astype(found.dtype).tobytes()
    assert isinstance(how, str) or tensors["again"] is tensors["w"]


def test_a_pickle_of_python_2_is_read(tmp_path: Path) -> None:
    """Its strings are bytes."""
    path = tmp_path / "file.pkl"
    path.write_bytes(
        b"\x80\x02}U\x05model}U\x01wcnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR(K\x01K\x02"
        b"\x85cnumpy\ndtype\n(U\x02f4K\x00K\x01tR(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08"
        + np.array([1.5, -3e38], "<f4").tobytes()
        + b"tbss."
    )
    assert read_tensors(path)[0]["w"].tolist() == np.array([1.5, -3e38], "<f4").tolist()


def test_an_ordered_state_is_read_without_its_attributes(tmp_path: Path) -> None:
    state = OrderedDict(w=np.ones(2, "f4"))
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    (tmp_path / "file.pkl").write_bytes(pickle.dumps({"model": state}, protocol=2))
    assert read_tensors(tmp_path / "file.pkl")[0]["w"].equal(torch.ones(2))


# Pickles


def shared(depth: int, pair: Callable[[Any, Any], Any], end: Any) -> Any:
    """``pair`` of ``pair`` of …, both halves one object: small in a file, and of 2^depth leaves for who walks it."""
    for _ in range(depth):
        end = pair(end, end)
    return end


def body(value: Any) -> bytes:
    """The opcodes that leave ``value`` on the stack."""
    return pickle.dumps(value, protocol=2)[2:-1]


SHARED_DICTS = shared(60, lambda a, b: {"a": a, "b": b}, {})
SHARED_TUPLES = body(shared(60, lambda a, b: (a, b), ()))
ITSELF: dict[str, Any] = {}
ITSELF["itself"] = ITSELF
DEEP = b"}X\x01\x00\x00\x00a" * 100_000 + b"}" + b"s" * 100_000
NUMPY = b"cnumpy._core.multiarray\n_reconstruct\n"
STATED = struct.pack("<Q", 1 << 31)


class Same:
    """An array in a pickle, made of bytes that others share."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        make, arguments, _ = np.zeros(1).__reduce__()
        return make, arguments, (1, (len(self.data),), np.dtype("u1"), False, self.data)


def stated(shape: Any = (1,), code: Any = "f4", order: Any = "<", data: Any = bytes(4)) -> bytes:
    """The opcodes of a dictionary with one array of such a state."""
    dtype = b"cnumpy\ndtype\n" + body((code, False, True)) + b"R" + body((3, order, None)) + b"b"
    made = NUMPY + b"cnumpy\nndarray\n" + body((0,)) + body("b") + b"\x87R"
    return b"}" + body("w") + made + b"(K\x01" + body(shape) + dtype + b"\x89" + body(data) + b"tbs"


PICKLES: dict[str, tuple[Any, str]] = {
    "objects": ({"a": np.array([{}, None], dtype=object)}, "'a' is an array of 'O8', not of numbers"),
    "text": ({"a": np.array(["text"])}, "'a' is an array of 'U4', not of numbers"),
    "fields": ({"a": np.zeros(2, [("x", "f4")])}, "'a' is an array of 'V4', not of numbers"),
    "extended precision": ({"a": np.zeros(2, np.longdouble)}, "'a' is an array of 'f16', not of numbers"),
    "list": ([1, 2], "holds a list, not a dictionary"),
    "number": ({"model": {"a": 1}}, "'a' is no plain tensor but a int"),
    "masked array": ({"a": np.ma.masked_array([1.0])}, "wants to run or load 'numpy.ma"),
    "scalar": ({"a": np.float32(1)}, "wants to run or load 'numpy._?core.multiarray.scalar'.* save its tensors alone"),
    "set": ({"model": {"a": {1}}}, "wants to run or load '(builtins|__builtin__).set'"),
    "keys of numbers": ({"model": {1: np.zeros(1)}}, "keys are not text"),
    "itself": ({"model": ITSELF}, "'itself' is no plain tensor but a dict"),
    "shared dictionaries": ({"model": {"a": SHARED_DICTS}}, "'a' is no plain tensor but a dict"),
    "deep": (b"\x80\x02" + DEEP + b".", "'a' is no plain tensor but a dict"),
    "shared tuples as a key": (b"\x80\x02}" + SHARED_TUPLES + b"K\x01s.", "keys are not text"),
    "shared tuples as keys": (b"\x80\x02}(" + SHARED_TUPLES + b"K\x01u.", "keys are not text"),
    "shared tuples in DICT": (b"\x80\x02(" + SHARED_TUPLES + b"K\x01d.", "keys are not text"),
    "shared tuples in a set": (b"\x80\x04\x8f(" + SHARED_TUPLES + b"\x90.", "the opcode 0x8f"),
    "shared tuples as an encoding": (
        b"\x80\x02c_codecs\nencode\n" + body("a") + SHARED_TUPLES + b"\x86R.",
        "another encoding than latin1",
    ),
    "shared tuples as a type": (
        stated().replace(body(("f4", False, True)), b"(" + SHARED_TUPLES + b"\x89\x88t"),
        "damaged pickle, at 'w'",
    ),
    "bytearray of 2 GB": (b"\x80\x05\x96" + STATED + b".", "the opcode 0x96"),
    "bytes of 2 GB": (b"\x80\x04\x8e" + STATED + b".", "truncated or damaged pickle"),
    "text of 2 GB": (b"\x80\x04\x8d" + STATED + b".", "truncated or damaged pickle"),
    "frame of 2 GB": (b"\x80\x04\x95" + STATED, "truncated or damaged pickle"),
    "one block of bytes in many arrays": (
        lambda: (lambda data: {str(i): Same(data) for i in range(100)})(bytes(100_000)),
        "truncated or damaged pickle",
    ),
    "attributes of a function": (b"\x80\x02" + NUMPY + body({"x": 1}) + b"b.", "changes something other than arrays"),
    "array without state": (b"\x80\x02}" + body("w") + b"cnumpy\nndarray\n)Rs.", "truncated or damaged pickle, at 'w'"),
    "called array": (b"\x80\x02cnumpy\nndarray\n\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85\x85R.", "damaged pickle"),
    "many lengths": (stated((1,) * 9), "damaged pickle, at 'w'"),
    "True as a length": (stated((True,)), "damaged pickle, at 'w'"),
    "more than the data": (stated((2,)), "damaged pickle, at 'w'"),
    "less than the data": (stated((0,)), "damaged pickle, at 'w'"),
    "list for a shape": (stated([1]), "damaged pickle, at 'w'"),
    "list for data": (stated(data=[0, 0, 0, 0]), "damaged pickle, at 'w'"),
    "data beyond latin1": (stated(data="\u20ac\u20ac\u20ac\u20ac"), "damaged pickle, at 'w'"),
    "swapped order": (stated(order="S"), "damaged pickle, at 'w'"),
    "pointers": (stated(code="O8", data=b"\x10" * 8), "'w' is an array of 'O8'"),
    "outside the file": (b"\x80\x02N\x51.", "the opcode 0x51"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_refused(name: str, tmp_path: Path) -> None:
    content, message = PICKLES[name]
    content = content() if callable(content) else content
    path = tmp_path / "file.pkl"
    if not isinstance(content, bytes):
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        path.write_bytes(content if content.startswith(b"\x80") else b"\x80\x02" + content + b".")
    with refused(path, message):
        read_tensors(path)


@pytest.mark.parametrize("beside", [SHARED_DICTS, ITSELF, {"a": [1, "b", None, 0.5, True, (1, 2), {}]}])
def test_what_stands_beside_the_tensors_costs_nothing(beside: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.pkl"
    path.write_bytes(pickle.dumps({"model": {"w": np.ones(3)}, "beside": beside}, protocol=4))
    tensors, metadata = read_tensors(path)
    assert tensors["w"].equal(torch.ones(3, dtype=torch.float64))
    assert metadata == {"wrapper": "model", "beside": "beside"}


def test_no_pickle_changes_how_the_next_is_read(tmp_path: Path) -> None:
    """Attributes of a function, set by the opcode for states as pairs (None, attributes)."""
    path = tmp_path / "file.pkl"
    path.write_bytes(b"\x80\x02c_codecs\nencode\n" + body((None, {"__defaults__": ("latin1",)})) + b"b.")
    with refused(path, "changes something other than arrays"):
        read_tensors(path)
    path.write_bytes(b"\x80\x02c_codecs\nencode\n" + body("a") + b"\x85R.")  # lacks its encoding
    with refused(path, "truncated or damaged pickle"):
        read_tensors(path)


@given(content=st.binary(max_size=60).map(lambda tail: b"\x80\x02" + tail))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_end_in_a_user_error_or_in_tensors(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / os.urandom(4).hex()
    path.write_bytes(content)
    try:
        message = str(list(read_tensors(path)[0]))
    except UserError as error:
        message = str(error)
    assert message.isprintable()
