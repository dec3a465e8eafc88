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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mae_bench.checkpoints.arrays import TORCH_MAGIC, read_npz, read_pickled_arrays
from mae_bench.errors import UserError

SYNTHETIC = "mae_bench_synthetic"  # beside `model`, or in the metadata: random weights that --smoke wrote
METADATA = "mae_bench"  # all our metadata in one JSON object: safetensors writes several entries in any order
MAX_HEADER_BYTES = 100 << 20
# Keys under which code bases put the tensors, the preferred one first: of DINO's networks the teacher is the result.
WRAPPERS = ("model", "state_dict", "teacher", "student", "module")


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
        return _read_torch(path)
    if head.startswith(TORCH_MAGIC):
        return _read_torch(path)
    if head[:1] == b"\x80":
        return _unwrap(path, read_pickled_arrays(path))
    if head[8:9] == b"{":
        raise UserError(f"{path} is a truncated safetensors file ({size} bytes); fetch it again")
    raise UserError(f"{path} is neither a safetensors nor a torch file (it starts with {head[:8]!r})")


def _is_npz(path: Path, size: int) -> bool:
    """Whether a zip is NumPy's, not torch's, which stores its entries uncompressed: others could unpack to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise UserError(f"{path} is a truncated or damaged torch file ({size} bytes); fetch it again") from error
    if entries and all(entry.filename.endswith(".npy") for entry in entries):
        return True
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise UserError(f"{path} is a zip that torch did not write (compressed or overlapping entries); fetch it again")
    return False


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            stated = dict(file.metadata() or {})
            ours = {key: value for key, value in json_metadata(stated, METADATA).items() if isinstance(value, str)}
            return {key: file.get_tensor(key) for key in file.keys()}, ours or stated  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(
            f"{path} is a truncated or damaged safetensors file ({str(error)!r:.120}); fetch it again"
        ) from error


def _read_torch(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd tensor kinds, which are refused below in our own words
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted:
            raise UserError(
                f"{path} wants to run or load {wanted[1]!r:.80}, which a weight file has no need of; it was not opened"
            ) from error
        raise UserError(f"{path} is a damaged or unsafe torch file; it was not opened; fetch it again") from error
    except Exception as error:  # damaged bytes make torch's reader fail with any exception there is
        raise UserError(f"{path} is a truncated or damaged torch file; fetch it again") from error
    return _unwrap(path, content)


def _unwrap(path: Path, content: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dictionary of named tensors")
    wrapper = next((key for key in WRAPPERS if isinstance(content.get(key), dict)), "")
    tensors = content[wrapper] if wrapper else content
    for key, value in tensors.items():
        if (
            not isinstance(key, str)
            or not isinstance(value, Tensor)
            or value.layout != torch.strided
            or value.is_quantized
            or value.is_meta
            or value.is_complex()
        ):
            at = f"'{wrapper}' of {path}" if wrapper else str(path)
            top = "" if wrapper else f"; at the top it has {', '.join(map(repr, list(content)[:6])):.200}"
            raise UserError(f"{at}: {key!r:.80} is no plain tensor but a {type(value).__name__}{top}; unknown layout")
    metadata = {"wrapper": wrapper, "beside": ",".join(key for key in content if wrapper and key != wrapper)}
    if wrapper and content.get(SYNTHETIC) is True:
        metadata[SYNTHETIC] = "true"
    return dict(tensors), metadata


def json_metadata(metadata: dict[str, str], key: str) -> dict[str, Any]:
    """A JSON object kept under ``key`` in a file's metadata; empty where there is none or it is no object."""
    try:
        value = json.loads(metadata.get(key, "{}"))
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
