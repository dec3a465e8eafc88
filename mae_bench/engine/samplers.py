"""Which images a step and a process see: a function of (seed, step), so that resuming starts anywhere at no cost."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, Sampler

from mae_bench.engine.plan import Plan
from mae_bench.engine.seeds import Stream, generator, sample_randomness

Key = tuple[int, int]  # (epoch, index of the image in the data set)


class Indexed(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class StepSampler(Sampler[list[Key]]):
    """Batch sampler of a whole run: for each step from ``start_step`` on, ``plan.accumulation`` lists of
    ``plan.micro_batch`` keys for this process.

    An epoch is a random order of the images that depends on (seed, epoch) alone. All processes together consume the
    same ``plan.batch`` images in a step, however many processes there are. The steps in ``skipped`` are left out.
    With ``repeats`` the indices of a picture, of which that many follow each other, stay together in the order.
    """

    def __init__(self, n: int, plan: Plan, seed: int, start_step: int = 0, rank: int = 0, *, repeats: int = 1) -> None:
        if not 0 < plan.epoch_images <= n:
            raise ValueError(f"a plan with {plan.epoch_images} images per epoch does not fit a data set of {n}")
        self.n = n
        self.plan = plan
        self.seed = seed
        self.start_step = start_step
        self.rank = rank
        self.repeats = repeats
        self.skipped: Collection[int] = ()
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self._steps()) * self.plan.accumulation

    def __iter__(self) -> Iterator[list[Key]]:
        for step in self._steps():
            for micro in range(self.plan.accumulation):
                yield self.keys(step, micro)

    def _steps(self) -> list[int]:
        return [step for step in range(self.start_step, self.plan.steps) if step not in self.skipped]

    def keys(self, step: int, micro: int) -> list[Key]:
        """Keys of one forward pass of this process."""
        plan = self.plan
        first = step * plan.batch + (micro * plan.world_size + self.rank) * plan.micro_batch
        return [self._key(position) for position in range(first, first + plan.micro_batch)]

    def _key(self, position: int) -> Key:
        epoch, offset = divmod(position, self.plan.epoch_images)
        if self._order[0] != epoch:
            order = torch.randperm(self.n // self.repeats, generator=generator(Stream.ORDER, self.seed, epoch))
            order = (order[:, None] * self.repeats + torch.arange(self.repeats)).flatten()
            self._order = (epoch, order.tolist())
        return epoch, self._order[1][offset]


class SeededDataset(Dataset[Any]):
    """``inner`` under keys (epoch, index): the augmentation of a sample is a function of (seed, epoch, index)."""

    def __init__(self, inner: Indexed, seed: int) -> None:
        self.inner = inner
        self.seed = seed

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        with sample_randomness(self.seed, epoch, index):
            return self.inner[index]


class ExactShard(Sampler[int]):
    """Every ``world_size``-th index of ``n`` from ``rank`` on: each image is evaluated once, shards may be uneven."""

    def __init__(self, n: int, rank: int, world_size: int) -> None:
        self._indices = range(rank, n, world_size)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)
