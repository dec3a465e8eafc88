"""Resume files: everything that the rest of a run depends on, written atomically, the last two kept.

They are for the run that wrote them and nobody else; trained models are handed on by `checkpoints.load.save_model`.
Random states are not in them, because nothing depends on one (`engine.seeds`).
"""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from mae_bench.engine import distributed
from mae_bench.engine.job import Job
from mae_bench.errors import UserError
from mae_bench.recipes import digest

KEPT = 2  # the newest, and the one before it, should the newest be damaged: each is three times the model
SECONDS = 600.0  # a run saves at least this often: what a whole cluster may lose
FORMAT = 3  # raised with what `engine.state` keeps: a file without it would go on from less
MISSING = "missing"


def identity(job: Job) -> str:
    """Hash of what a run computes: another one must not continue from its files."""
    parts = {
        "protocol": job.task.protocol,
        "values": job.task.values,
        "backbone": job.backbone,
        "seed": job.seed,
        "data": job.dataset.fingerprint,
        "device": distributed.device(job.options).type,  # with it the precision
    }
    return digest(parts)


def folder(job: Job) -> Path:
    return job.folder / "checkpoints"


def _files(job: Job) -> list[Path]:
    return sorted(folder(job).glob("step_*.pt"))


def save(job: Job, step: int, state: dict[str, Any]) -> Path:
    """Write the state after ``step`` steps and drop files beyond the last two. Call in the main process only.

    Under every name stands a whole file at any time, whenever the process or the computer dies: the bytes are on the
    disk before the name, and the name is before an older file goes.
    """
    path = folder(job) / f"step_{step:09}.pt"
    unfinished = folder(job) / "unfinished.part"
    try:
        folder(job).mkdir(exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, "identity": identity(job), "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_names(folder(job))
    except (OSError, RuntimeError) as error:  # torch has its own error for a full disk
        unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {str(error)[:200]}; free space and go on with --resume") from error
    files = _files(job)
    now = files.index(path)
    for other in (*files[: max(0, now + 1 - KEPT)], *files[now + 1 :]):  # a later one is damaged or was gone back from
        other.unlink()
    return path


def _sync_names(place: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(job: Job) -> dict[str, Any] | None:
    """The newest sound state of this run (tensors on the CPU), or None when there is none yet. Every process calls it.

    A damaged file is named on stderr and the one before it taken, by all processes alike.

    Raises:
        UserError: the newest file is another run's, all are damaged, or a process does not see the first one's.
    """
    paths = distributed.gather_objects(list(reversed(_files(job))))[0]
    for path in paths:
        state, fault = _read(path)
        faults = distributed.gather_objects(fault)
        if MISSING in faults:
            raise UserError(f"not every process sees {path}; put --out on a file system that all nodes share")
        if not any(faults):
            return _checked(job, path, state)
        if distributed.main_process():
            reason = next(fault for fault in faults if fault)
            print(f"{path} is damaged ({reason:.100}); going on from the file before it", file=sys.stderr, flush=True)
    if paths:
        raise UserError(f"every resume file in {folder(job)} is damaged; run without --resume to start anew")
    return None


def _read(path: Path) -> tuple[Any, str]:
    """Content and "", or None and what is wrong. Checksums are compared by the main process, for all."""
    try:
        if distributed.main_process():
            with zipfile.ZipFile(path) as archive:
                if (name := archive.testzip()) is not None:
                    return None, f"the checksum of {name} is wrong"
        # Mapped, not read: each process takes what it needs, when it copies it.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True), ""
    except FileNotFoundError:
        return None, MISSING
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, OSError) as error:
        return None, " ".join(str(error).split()) or type(error).__name__


def _checked(job: Job, path: Path, state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("format") != FORMAT or state.get("identity") != identity(job):
        raise UserError(
            f"{path} is of a run with other values, data or device, or of another version of mae_bench; "
            "run without --resume to start anew"
        )
    return state
