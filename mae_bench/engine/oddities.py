"""Odd pictures in the record, counted over all processes."""

from __future__ import annotations

import torch

from mae_bench.data.decode import Oddities
from mae_bench.engine import distributed
from mae_bench.engine.job import Job


def gather_oddities(oddities: Oddities) -> None:
    """Flag in every process what one of them has found. Collective."""
    for flags in distributed.gather_objects(oddities.flags.numpy()):
        oddities.flags |= torch.from_numpy(flags)


def note_oddities(job: Job, **sets: Oddities) -> None:
    """Say how many odd pictures each set (``training``, ``validation``) turned out to have. Every process calls it."""
    for name, oddities in sets.items():
        gather_oddities(oddities)
        if odd := oddities.text():
            job.note(f"odd {name} pictures: {odd}")
