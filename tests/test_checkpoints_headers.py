"""A safetensors file starts with the length of its header, which may look like the start of another format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mae_bench.checkpoints.files import read_tensors


@pytest.mark.parametrize("length", [0x80, 0x3C20, 0x0A80])  # a pickle's first byte, blank and "<", a pickle's again
def test_any_header_length_is_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "weights.safetensors"
    empty = len(b'{"__metadata__":{"note":""},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}')
    save_file({"w": torch.ones(1)}, path, metadata={"note": "x" * (length - empty)})
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    tensors, metadata = read_tensors(path)
    assert list(tensors) == ["w"]
    assert metadata == {"note": "x" * (length - empty)}
