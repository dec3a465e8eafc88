"""What torch's files may hold: plain tensors, of one set of weights; every refusal says how to save what is meant."""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import timm_state
from torch import Tensor

from mae_bench.checkpoints.files import read_tensors
from mae_bench.errors import UserError

KERNEL = torch.ones(2, 3, 4, 4)
ONE = {"patch_embed.proj.weight": KERNEL}
OTHER = {"patch_embed.proj.weight": KERNEL + 1}


def saved(folder: Path, content: Any, **options: Any) -> Path:
    torch.save(content, folder / "file.pth", **options)
    return folder / "file.pth"


def refusal(path: Path) -> str:
    """The line in which a file is refused."""
    with pytest.raises(UserError) as caught:
        read_tensors(path)
    text = str(caught.value)
    assert str(path) in text and text.isprintable() and len(text) < 700 + len(str(path))
    return text


def mended(text: str, path: Path) -> dict[str, Tensor]:
    """The tensors of what the line of Python at the end of a refusal leaves."""
    line = re.search(r": ((?:torch\.save|numpy\.savez)\(.*\))$", text)
    assert line, text
    (path.parent / "mended").mkdir()
    code = line[1].replace("FILE", str(path)).replace("OUT", str(path.parent / "mended" / "out"))
    exec(compile(code, "advice", "exec"), {"torch": torch, "numpy": np})
    (out,) = (path.parent / "mended").iterdir()
    return read_tensors(out)[0]


# Kinds of tensors


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*[sS]parse", "ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.eye(2).to_sparse(), r"a sparse tensor \(torch.sparse_coo\).*to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "a quantised tensor.*dequantize"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "a nested tensor"),
        (lambda: torch.ones(2, dtype=torch.complex64), r"a complex tensor \(torch.complex64\)"),
        (lambda: torch.ones(2, device="meta"), "a tensor without data"),
        (lambda: torch.ones(2).to(torch.float8_e4m3fn), "of type torch.float8_e4m3fn.*float32"),
        (lambda: torch.ones(1).expand(10**9), "a view of less data than its shape says.*clone"),
        (lambda: torch.ones(200).as_strided((99, 99), (1, 1)), "a view of less data than its shape says"),
        (lambda: torch.ones(100).as_strided((1 << 20, 1 << 20), (0, 0)), "a view of less data than its shape says"),
        (lambda: 1, "no plain tensor but a int; unknown layout"),
        (lambda: {"b": torch.ones(1)}, "no plain tensor but a dict; unknown layout"),
    ],
)
def test_what_is_no_plain_tensor_is_named(make: Any, said: str, tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": {"a": make()}})
    assert re.search(f"^'model' of .*: 'a' is {said}", refusal(path))


@pytest.mark.parametrize("legacy", [False, True])
def test_views_of_one_storage_are_read(legacy: bool, tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    content = {
        "whole": whole,
        "tied": whole,
        "rows": whole[1:3],
        "columns": whole[:, 2:4],
        "turned": whole.T,
        "overlapping": whole.flatten().as_strided((3, 8), (4, 1)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "none": torch.ones(0, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "count": torch.tensor(3),
    }
    path = saved(tmp_path, {"model": content}, _use_new_zipfile_serialization=not legacy)
    tensors = read_tensors(path)[0]
    assert tensors.keys() == content.keys()
    assert all(tensors[key].equal(content[key]) and tensors[key].dtype == content[key].dtype for key in content)


def test_names_that_are_not_text_are_refused(tmp_path: Path) -> None:
    assert "has names that are not text" in refusal(saved(tmp_path, {"model": {1: KERNEL}}))
    assert "holds a dict, not a dictionary of named tensors" in refusal(saved(tmp_path, {1: KERNEL}))


class WithAttributes:
    """Pickles to an OrderedDict whose methods are hidden by attributes."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"items": 1, "get": 2, "keys": 3, "values": 4}, None, iter(self.content.items())


def test_attributes_of_a_dictionary_change_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, WithAttributes({"model": WithAttributes(ONE), "epoch": 3}))
    tensors, metadata = read_tensors(path)
    assert tensors["patch_embed.proj.weight"].equal(KERNEL)
    assert metadata == {"wrapper": "model", "beside": "epoch"}


# Two sets of weights


MMENGINE = {
    "state_dict": ONE,
    "ema_state_dict": {"steps": torch.tensor(3), "module.patch_embed.proj.weight": KERNEL + 1},
}


@pytest.mark.parametrize(
    ("content", "first", "second"),
    [
        ({"state_dict": ONE, "state_dict_ema": OTHER, "optimizer": {}}, "state_dict", "state_dict_ema"),  # timm
        ({"model_ema": OTHER, "model": ONE}, "model", "model_ema"),
        (MMENGINE, "state_dict", "ema_state_dict"),
        ({"model": ONE, "teacher": OTHER}, "model", "teacher"),
        ({"student": ONE, "ema": OTHER}, "student", "ema"),
        ({"teacher": ONE, "student": OTHER, "teacher_ema": OTHER}, "teacher", "teacher_ema"),
        ({"model": ONE, "ema": {"module": OTHER, "updates": 3}}, "model", "ema"),
        ({"model": ONE, "hf": {"vit.embeddings.patch_embeddings.projection.weight": KERNEL}}, "model", "hf"),
        ({"model": ONE, "model\x1b[2J": OTHER}, "model", r"model\x1b[2J"),
    ],
)
def test_a_second_set_of_weights_is_refused(content: dict[str, Any], first: str, second: str, tmp_path: Path) -> None:
    path = saved(tmp_path, content | {"args": argparse.Namespace(epochs=3)})
    text = refusal(path)
    assert f"holds two sets of weights, '{first}' and '{second}'" in text
    assert mended(text, path)["patch_embed.proj.weight"].equal(KERNEL)


def test_a_second_set_in_a_pickle_of_arrays_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pkl"
    arrays = {key: value.numpy() for key, value in ONE.items()}
    path.write_bytes(pickle.dumps({"model": arrays, "model_ema": arrays}))
    text = refusal(path)
    assert "holds two sets of weights, 'model' and 'model_ema'" in text
    assert mended(text, path)["patch_embed.proj.weight"].equal(KERNEL)


@pytest.mark.parametrize(
    ("content", "wrapper"),
    [
        ({"student": OTHER, "teacher": ONE, "optimizer": {}, "dino_loss": {"center": torch.ones(3)}}, "teacher"),
        ({"model": ONE, "optimizer": {"state": {0: {"exp_avg": KERNEL}}, "param_groups": [{"lr": 1.0}]}}, "model"),
        ({"model": ONE, "model_ema": None, "scaler": {"scale": 1.0}, "epoch": 3}, "model"),
        ({"model": ONE, "head": {"head.weight": KERNEL}}, "model"),
        ({"model": {"head.weight": KERNEL}, "model_ema": {"head.weight": KERNEL}}, "model"),
    ],
)
def test_what_else_a_training_checkpoint_holds_is_no_second_set(
    content: dict[str, Any], wrapper: str, tmp_path: Path
) -> None:
    tensors, metadata = read_tensors(saved(tmp_path, content))
    assert metadata["wrapper"] == wrapper
    assert all(value.equal(KERNEL) for value in tensors.values())


# What must be saved anew


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_torchscript_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.jit.script(torch.nn.Linear(2, 3)).save(path)
    text = refusal(path)
    assert "is a TorchScript archive, a program with its weights" in text and "only if you trust it" in text
    assert mended(text, path).keys() == {"weight", "bias"}


def test_torchscript_without_code_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr("file/constants.pkl", b"\x80\x02).")
    assert "is a TorchScript archive" in refusal(tmp_path / "file")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("what", ["history", "scalar", "array"])
def test_leftovers_of_training_are_named_with_a_way_out(what: str, legacy: bool, tmp_path: Path) -> None:
    from mmengine.logging import HistoryBuffer

    beside, name = {
        "history": (HistoryBuffer(), r"mmengine\.logging\.history_buffer\.HistoryBuffer"),
        "scalar": (np.float64(3), r"numpy\._?core\.multiarray\.scalar"),
        "array": (np.ones(3), r"numpy\._?core\.multiarray\._reconstruct"),
    }[what]
    content = {"state_dict": timm_state(), "meta": beside}
    path = saved(tmp_path, content, _use_new_zipfile_serialization=not legacy)
    text = refusal(path)
    assert re.search(
        f"not opened: it wants to run or load '{name}'.*; only if you trust it, save its tensors alone", text
    )
    assert mended(text, path).keys() == timm_state().keys()


def test_other_classes_have_no_way_out(tmp_path: Path) -> None:
    text = refusal(saved(tmp_path, {"state_dict": ONE, "meta": Path("/tmp")}))
    assert "PosixPath" in text and "weights_only" not in text
