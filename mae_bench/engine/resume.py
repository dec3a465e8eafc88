"""Resume files: everything that the rest of a run depends on, written atomically, the last two kept.

They are for the run that wrote them and nobody else; trained models are handed on by `checkpoints.load.save_model`.
Random states are not in them, because nothing depends on one (`engine.seeds`).
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from mae_bench.engine import distributed
from mae_bench.engine.job import Job
from mae_bench.errors import UserError
from mae_bench.recipes import digest

KEPT = 2
FORMAT = 1


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
    """Write the state after ``step`` steps and drop files beyond the last two. Call in the main process only."""
    folder(job).mkdir(exist_ok=True)
    path = folder(job) / f"step_{step:09}.pt"
    unfinished = path.with_suffix(".part")
    try:
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, "identity": identity(job), "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # torch has its own error for a full disk
        unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {str(error)[:200]}; free space and go on with --resume") from error
    for old in _files(job)[:-KEPT]:
        old.unlink()
    return path


def load(job: Job) -> dict[str, Any] | None:
    """The newest state of this run (tensors on the CPU), or None when there is none yet. Every process calls it."""
    files = _files(job)
    newest = distributed.gather_objects(files[-1].name if files else "")
    if len(set(newest)) > 1:
        raise UserError(
            f"the processes see different resume files ({', '.join(sorted(set(newest)))}); put --out on a file system "
            "that all nodes share"
        )
    if not files:
        return None
    path = files[-1]
    try:
        # Mapped, not read: each process takes what it needs, when it copies it.
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise UserError(
            f"{path} is damaged; delete it to resume from the file before it, or run without --resume"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or state.get("identity") != identity(job):
        raise UserError(f"{path} is of a run with other values, data or device; run without --resume to start anew")
    return state
