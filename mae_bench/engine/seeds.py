"""Random numbers as a function of what is being computed, not of what was computed before.

A training step's generators depend on (seed, step, rank) and a sample's on (seed, epoch, index). So a resumed run
draws what the uninterrupted one would have drawn, and neither workers nor their number change a picture.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """Independent sequences that grow from one seed."""

    ORDER = 1  # order of an epoch
    SAMPLE = 2  # augmentation of one image
    STEP = 3  # masks, drop path, mixing in one optimiser step
    INIT = 4  # initial values of new parameters


def derive(stream: Stream, *key: int) -> int:
    """A 63-bit seed for ``key`` in ``stream``, by hashing: neighbouring keys get unrelated seeds."""
    text = ",".join(map(str, (int(stream), *key)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_all(value: int) -> None:
    """Seed Python's, numpy's and torch's global generators, those of all GPUs included."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Put all global generators into the state that belongs to an optimiser step of one process."""
    seed_all(derive(Stream.STEP, seed, step, rank))


@contextmanager
def sample_randomness(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Global CPU generators seeded for one sample; their states come back afterwards."""
    value = derive(Stream.SAMPLE, seed, epoch, index)
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)  # unlike torch.manual_seed, leaves GPUs alone in worker processes
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def generator(stream: Stream, *key: int) -> torch.Generator:
    """A CPU generator of its own for ``key`` in ``stream``."""
    return torch.Generator().manual_seed(derive(stream, *key))
