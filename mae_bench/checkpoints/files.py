"""Read weight files that come from outside, without running any code that they hold.

A file is recognised by its first bytes, not by its name: safetensors, what ``torch.save`` writes (a zip, or the older
bare pickle), a NumPy archive, or a pickle of arrays (`arrays`). torch's are read with ``weights_only=True``; beside
tensors and plain containers only ``argparse.Namespace`` is allowed, which the training checkpoints of
facebookresearch/mae and dino hold.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mae_bench.checkpoints.arrays import ALONE, TORCH_MAGIC, as_tensors, read_npz, read_pickled_arrays, wants
from mae_bench.checkpoints.namings import NAMINGS
from mae_bench.errors import UserError

SYNTHETIC = "mae_bench_synthetic"  # beside `model`, or in the metadata: random weights that --smoke wrote
METADATA = "mae_bench"  # all our metadata in one JSON object: safetensors writes several entries in any order
MAX_HEADER_BYTES = 100 << 20
# Keys under which code bases put the tensors, the preferred one first: of DINO's networks the teacher is the result.
WRAPPERS = ("model", "state_dict", "teacher", "student", "module")
TYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
TORCH_ALONE = "torch.save(torch.load('FILE', weights_only=False)['{key}'], 'OUT')"


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a weight file, on the CPU, as stored.

    Metadata are what ``save_model`` was given (safetensors' own in a file of others), or for a pickled file
    ``wrapper`` (the key that held the tensors, or "") and ``beside`` (the other keys at the top, comma-separated).
    Every fault is a UserError that names the file.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read the weight file {path}: {error.strerror}") from error
    if not head:
        raise UserError(f"{path} is empty; fetch it again")
    # A safetensors file starts with its header's length, whose bytes may look like the start of any other file.
    header = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and header <= min(size - 8, MAX_HEADER_BYTES):
        return _read_safetensors(path)
    if head.lstrip()[:1] == b"<":
        raise UserError(f"{path} is a web page, not a weight file: the download was answered by a page; fetch it again")
    if head.startswith(b"version https://g"[:16]):
        raise UserError(f"{path} is a Git LFS pointer, not a weight file; run `git lfs pull` where it comes from")
    if head.startswith(b"PK\x03\x04"):
        if _is_npz(path, size):
            return read_npz(path), {}
        return _unwrap(path, _read_torch(path), TORCH_ALONE)
    if head.startswith(TORCH_MAGIC):
        return _unwrap(path, _read_torch(path), TORCH_ALONE)
    if head[:1] == b"\x80":
        return _unwrap(path, read_pickled_arrays(path), ALONE)
    if head[8:9] == b"{":
        raise UserError(f"{path} is a truncated safetensors file ({size} bytes); fetch it again")
    raise UserError(f"{path} is neither a safetensors nor a torch file (it starts with {head[:8]!r})")


def _is_npz(path: Path, size: int) -> bool:
    """Whether a zip is NumPy's, not torch's, which stores its entries uncompressed: others could unpack to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # damaged bytes make zipfile fail with any exception there is
        raise UserError(f"{path} is a truncated or damaged torch file ({size} bytes); fetch it again") from error
    names = [entry.filename for entry in entries]
    if names and all(name.endswith(".npy") for name in names):
        return True
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise UserError(
            f"{path} is a TorchScript archive, a program with its weights, and was not opened; only if you trust it, "
            "save its tensors alone: torch.save(torch.jit.load('FILE').state_dict(), 'OUT')"
        )
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise UserError(f"{path} is a zip that torch did not write (compressed or overlapping entries); fetch it again")
    return False


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            stated = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own, and torch's about shapes
        raise UserError(
            f"{path} is a truncated or damaged safetensors file ({str(error)!r:.120}); fetch it again"
        ) from error
    for key, value in tensors.items():
        if fault := _fault(value):
            raise UserError(f"{path}: {key!r:.80} is {fault}")
    ours = {key: value for key, value in json_metadata(stated, METADATA).items() if isinstance(value, str)}
    # "wrapper" and "beside" are what this module says of pickled files, and no file may say.
    return tensors, {key: value for key, value in (ours or stated).items() if key not in ("wrapper", "beside")}


def _read_torch(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd tensor kinds, which are refused below in our own words
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted:
            raise UserError(f"{path} was not opened: {wants(wanted[1], TORCH_ALONE)}") from error
        raise UserError(f"{path} is a damaged or unsafe torch file and was not opened; fetch it again") from error
    except Exception as error:  # damaged bytes make torch's reader fail with any exception there is
        raise UserError(f"{path} is a truncated or damaged torch file; fetch it again") from error


def _unwrap(path: Path, content: Any, alone: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of what a file holds, and the reader's metadata. ``alone``: Python that saves one key alone."""
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dictionary of named tensors")
    content = _plain(content)
    wrapper = next((key for key in WRAPPERS if isinstance(content.get(key), dict)), "")
    tensors = _plain(content[wrapper]) if wrapper else content
    at = f"'{wrapper}' of {path}" if wrapper else str(path)
    if not all(isinstance(key, str) for key in tensors):
        raise UserError(f"{at} has names that are not text; unknown layout")
    tensors = as_tensors(path, tensors)
    for key, value in tensors.items():
        if fault := _fault(value):
            beside = not wrapper and not isinstance(value, Tensor)
            top = f"; at the top it has {', '.join(map(repr, list(content)[:6])):.200}" if beside else ""
            raise UserError(f"{at}: {key!r:.80} is {fault}{top}")
    if wrapper and _has_encoder(tensors):
        _check_siblings(path, content, wrapper, alone)
    metadata = {"wrapper": wrapper, "beside": ",".join(key for key in content if wrapper and key != wrapper)}
    if wrapper and content.get(SYNTHETIC) is True:
        metadata[SYNTHETIC] = "true"
    return tensors, metadata


def _plain(content: dict[Any, Any]) -> dict[Any, Any]:
    """A copy without attributes: a file may give an OrderedDict an ``items`` that is no method."""
    return {key: content[key] for key in content}


def _fault(value: object) -> str:
    """Why a value is no plain tensor of numbers; "" where it is one."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        return f"no plain tensor but a {type(value).__name__}; unknown layout"
    assert isinstance(value, Tensor)
    if value.is_nested:
        return "a nested tensor, not a plain one; save it as a plain one"
    if value.layout != torch.strided:
        return f"a sparse tensor ({value.layout}), not a plain one; save it as a dense one: tensor.to_dense()"
    if value.is_quantized:
        return "a quantised tensor, not a plain one; save it as plain numbers: tensor.dequantize()"
    if value.is_meta:
        return "a tensor without data (on the device 'meta'); save it with its values"
    if value.is_complex():
        return f"a complex tensor ({value.dtype}); weights are real numbers"
    if value.dtype not in TYPES:
        return f"of type {value.dtype}, from which no weights are read; save it as torch.float32: tensor.float()"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return "a view of less data than its shape says; save a copy: tensor.clone()"
    return ""


def _has_encoder(tensors: Any) -> bool:
    """Whether a dictionary has the kernel of a patch embedding, under whatever prefix."""
    anchors = tuple(naming.anchor for naming in NAMINGS)
    return isinstance(tensors, dict) and any(isinstance(key, str) and key.endswith(anchors) for key in tensors)


def _check_siblings(path: Path, content: dict[str, Any], wrapper: str, alone: str) -> None:
    """Refuse a second set of weights, e.g. their moving average: nothing says which is meant.

    Only of DINO's two networks the teacher is the published result, which ``metadata["wrapper"]`` says.
    """
    for key, value in content.items():
        if key == wrapper or (wrapper, key) == ("teacher", "student") or not isinstance(value, dict):
            continue
        if _has_encoder(value) or any(_has_encoder(value[inner]) for inner in value):
            raise UserError(
                f"{path} holds two sets of weights, '{wrapper}' and {key!r:.80}, and nothing says which is meant; save "
                f"the wanted one alone (it holds no code): {alone.format(key=wrapper)}"
            )


def json_metadata(metadata: dict[str, str], key: str) -> dict[str, Any]:
    """A JSON object kept under ``key`` in a file's metadata; empty where there is none or it is no object."""
    try:
        value = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):  # no JSON; numbers of too many digits; nested too deep
        return {}
    return value if isinstance(value, dict) else {}
