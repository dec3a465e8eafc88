"""Which images a step sees, and with which random numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_toys import make_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from mae_bench.engine.job import Options
from mae_bench.engine.plan import Plan, make_plan
from mae_bench.engine.samplers import ExactShard, SeededDataset, StepSampler
from mae_bench.engine.seeds import Stream, derive, sample_randomness, seed_step


def _plan(images: int = 20, world: int = 1, limit: int = 0, **changes: object) -> Plan:
    return make_plan(make_values(**changes), images, Options(micro_batch=limit), world)


def test_an_epoch_shows_each_image_at_most_once_and_epochs_differ() -> None:
    keys = [key for batch in StepSampler(20, _plan(epochs=5), seed=0) for key in batch]
    orders = []
    for epoch in range(5):
        seen = [index for number, index in keys if number == epoch]
        assert len(seen) == len(set(seen)) == 16  # two steps of eight; four images are left out
        orders.append(seen)
    assert len({tuple(order) for order in orders}) == 5
    assert {index for _, index in keys} == set(range(20))


def test_a_stream_drops_nothing_and_may_be_shorter_than_a_batch() -> None:
    keys = [key for batch in StepSampler(5, _plan(5, steps=10), seed=0) for key in batch]
    assert len(keys) == 80
    for epoch in range(16):
        assert sorted(index for number, index in keys if number == epoch) == list(range(5))


def test_the_order_depends_on_the_seed() -> None:
    first = [list(StepSampler(20, _plan(), seed)) for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


@given(start=st.integers(0, 6), limit=st.integers(0, 8))
@settings(max_examples=20)
def test_starting_at_a_step_is_the_rest_of_the_run(start: int, limit: int) -> None:
    plan = _plan(limit=limit)
    rest = StepSampler(20, plan, seed=1, start_step=start)
    assert list(rest) == list(StepSampler(20, plan, seed=1))[start * plan.accumulation :]
    assert len(rest) == len(list(rest))


@pytest.mark.parametrize("limit", [0, 4])
def test_skipped_steps_are_left_out_and_the_others_keep_their_images(limit: int) -> None:
    plan = _plan(limit=limit)
    sampler = StepSampler(20, plan, seed=1, start_step=1)
    sampler.skipped = {0, 3}
    assert list(sampler) == [sampler.keys(step, micro) for step in (1, 2, 4, 5) for micro in range(plan.accumulation)]
    assert len(sampler) == len(list(sampler))


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_same_batch(world: int) -> None:
    alone = list(StepSampler(20, _plan(), seed=0))
    shared = [list(StepSampler(20, _plan(world=world, limit=2), seed=0, rank=rank)) for rank in range(world)]
    accumulation = _plan(world=world, limit=2).accumulation
    for step, batch in enumerate(alone):
        parts = [key for lists in shared for keys in lists[step * accumulation :][:accumulation] for key in keys]
        assert sorted(parts) == sorted(batch)
        assert len(set(parts)) == 8


@given(n=st.integers(0, 50), world=st.integers(1, 7))
def test_shards_cover_every_image_once(n: int, world: int) -> None:
    shards = [list(ExactShard(n, rank, world)) for rank in range(world)]
    assert sorted(index for shard in shards for index in shard) == list(range(n))
    assert all(len(ExactShard(n, rank, world)) == len(shards[rank]) for rank in range(world))


class _Draws:
    """Numbers from all three global generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(1, dtype=torch.float64))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_a_sample(workers: int) -> None:
    keys = [[(0, 0), (0, 1), (0, 2)], [(0, 3), (1, 0), (1, 1)]]

    def load(workers: int) -> list[list[tuple[int, float, float, float]]]:
        data = SeededDataset(_Draws(), seed=5)
        return list(DataLoader(data, batch_sampler=keys, num_workers=workers, collate_fn=list))

    alone = load(0)
    assert load(workers) == alone
    flat = [sample for batch in alone for sample in batch]
    assert len({value for sample in flat for value in sample[1:]}) == 3 * len(flat)  # epochs and images all differ


def test_a_sample_leaves_the_global_generators_as_they_were() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    SeededDataset(_Draws(), seed=0)[(3, 2)]
    with pytest.raises(KeyError), sample_randomness(0, 0, 0):
        raise KeyError
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_step_seeds_differ_by_seed_step_and_rank() -> None:
    drawn = set()
    for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        seed_step(*key)
        drawn.add((random.random(), np.random.rand(), float(torch.rand(1))))
    assert len(drawn) == 4
    assert derive(Stream.ORDER, 1, 2) != derive(Stream.INIT, 1, 2)
    assert derive(Stream.ORDER, 1, 2) == derive(Stream.ORDER, 1, 2) < 2**63


def test_repeats_of_a_picture_stay_together_and_an_epoch_has_them_all() -> None:
    """A picture is decoded once for all of its crops."""
    plan = _plan(epochs=2)
    keys = [key for batch in StepSampler(20, plan, seed=0, repeats=4) for key in batch]
    for epoch in (0, 1):
        order = [index for number, index in keys if number == epoch]
        assert len(set(order)) == len(order) == plan.epoch_images
        assert all(order[at : at + 4] == list(range(order[at], order[at] + 4)) for at in range(0, len(order), 4))
    assert [key for batch in StepSampler(20, plan, seed=0) for key in batch] != keys
