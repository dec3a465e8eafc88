"""Headers of safetensors files: their length may look like the start of another format; what they say is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mae_bench.checkpoints.files import METADATA, json_metadata, read_tensors
from mae_bench.errors import UserError


@pytest.mark.parametrize("length", [0x80, 0x3C20, 0x0A80])  # a pickle's first byte, blank and "<", a pickle's again
def test_any_header_length_is_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "weights.safetensors"
    empty = len(b'{"__metadata__":{"note":""},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}')
    save_file({"w": torch.ones(1)}, path, metadata={"note": "x" * (length - empty)})
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    tensors, metadata = read_tensors(path)
    assert list(tensors) == ["w"]
    assert metadata == {"note": "x" * (length - empty)}


def test_our_metadata_are_read_from_one_object(tmp_path: Path) -> None:
    stated = {METADATA: json.dumps({"task": "tiny", "beside": "x", "number": 3}), "format": "pt"}
    save_file({"w": torch.ones(1)}, tmp_path / "file", metadata=stated)
    assert read_tensors(tmp_path / "file")[1] == {"task": "tiny"}


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 10, '{"a": ' + "1" * 10_000 + "}", "[1]", "null", ""])
def test_metadata_that_are_no_object_are_none(text: str, tmp_path: Path) -> None:
    assert json_metadata({METADATA: text}, METADATA) == {}
    save_file({"w": torch.ones(1)}, tmp_path / "file", metadata={METADATA: text})
    assert read_tensors(tmp_path / "file")[1] == {METADATA: text}


def test_a_file_cannot_speak_for_the_reader(tmp_path: Path) -> None:
    """What was beside the tensors, and which key held them, is told of pickled files alone."""
    stated = {"wrapper": "teacher", "beside": "\x1b[2J", "note": "kept"}
    save_file({"w": torch.ones(1)}, tmp_path / "file", metadata=stated)
    assert read_tensors(tmp_path / "file")[1] == {"note": "kept"}


def written(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("F8_E4M3", "of type torch.float8_e4m3fn"),
        ("F8_E5M2", "of type torch.float8_e5m2"),
        ("C64", r"a complex tensor \(torch.complex64\)"),
    ],
)
def test_types_that_hold_no_weights_are_refused(dtype: str, said: str, tmp_path: Path) -> None:
    size = 2 * (8 if dtype == "C64" else 1)
    path = written(tmp_path / "file", {"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, size]}}, bytes(size))
    with pytest.raises(UserError, match=f"file: 'w' is {said}"):
        read_tensors(path)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64", "BOOL", "I64", "U8"])
def test_other_types_are_read(dtype: str, tmp_path: Path) -> None:
    size = {"F16": 2, "BF16": 2, "F32": 4, "BOOL": 1, "U8": 1}.get(dtype, 8)
    path = written(tmp_path / "file", {"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}, bytes(size))
    assert read_tensors(path)[0]["w"].tolist() == [0]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 1 << 63], "data_offsets": [0, 0]},
        {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        {"dtype": "what", "shape": [1], "data_offsets": [0, 4]},
        [],
    ],
)
def test_headers_that_do_not_fit_their_data_are_refused(entry: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "file", {"w": entry}, bytes(4 if not entry else entry["data_offsets"][1]))
    with pytest.raises(UserError, match="truncated or damaged safetensors file"):
        read_tensors(path)
