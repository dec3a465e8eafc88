"""Odd pictures in the record, counted over all processes."""

from __future__ import annotations

import torch

from mae_bench.data.decode import Oddities
from mae_bench.engine import distributed
from mae_bench.engine.job import Job


def note_oddities(job: Job, **sets: Oddities) -> None:
    """Say how many odd pictures each set (``training``, ``validation``) turned out to have. Every process calls it."""
    for name, oddities in sets.items():
        for flags in distributed.gather_objects(oddities.flags.numpy()):
            oddities.flags |= torch.from_numpy(flags)
        if odd := oddities.text():
            job.note(f"odd {name} pictures: {odd}")
