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
    with unfinished.open("wb") as file:
        torch.save({"format": FORMAT, "identity": identity(job), "step": step, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    for old in _files(job)[:-KEPT]:
        old.unlink()
    return path


def load(job: Job) -> dict[str, Any] | None:
    """The newest state of this run (tensors on the CPU), or None when there is none yet."""
    files = _files(job)
    if not files:
        return None
    path = files[-1]
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise UserError(
            f"{path} is damaged; delete it to resume from the file before it, or run without --resume"
        ) from error
    if state.get("format") != FORMAT or state.get("identity") != identity(job):
        raise UserError(f"{path} belongs to a run with other values, data or code; run without --resume to start anew")
    return state
