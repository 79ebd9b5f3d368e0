import numpy as np
import pytest

from attnlab.data.batching import FrameBatches

LENGTHS = np.random.default_rng(0).integers(20, 800, 1000)


def padded(batch: list[int]) -> int:
    return int(LENGTHS[batch].max()) * len(batch)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_utterance_once_within_the_bounds(shuffle: bool) -> None:
    batches = list(FrameBatches(LENGTHS, 4000, 12, shuffle=shuffle))
    assert sorted(i for batch in batches for i in batch) == list(range(1000))
    assert max(map(padded, batches)) <= 4000
    assert max(map(len, batches)) == 12
    assert sum(map(padded, batches)) < 1.12 * LENGTHS.sum()  # bucketed: little padding


def test_batches_are_filled() -> None:
    assert len(FrameBatches(LENGTHS, 4000, shuffle=True)) < 1.15 * LENGTHS.sum() / 4000


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(**options: int) -> list[list[int]]:
        return list(FrameBatches(LENGTHS, 4000, shuffle=True, **options))

    assert order(seed=1, epoch=3) == order(seed=1, epoch=3)
    assert order(seed=1, epoch=3) != order(seed=1, epoch=4)
    assert order(seed=1, epoch=3) != order(seed=2, epoch=3)
    sets = [{frozenset(batch) for batch in order(epoch=epoch)} for epoch in (0, 1)]
    assert len(sets[0] & sets[1]) < 0.5 * len(sets[0])  # not only the order: other neighbours as well
    lengths = [LENGTHS[batch].max() for batch in order()]
    assert abs(np.corrcoef(range(len(lengths)), lengths)[0, 1]) < 0.3


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_an_epoch_evenly(world_size: int) -> None:
    whole = list(FrameBatches(LENGTHS, 4000, shuffle=True, epoch=2))
    ranks = [
        list(FrameBatches(LENGTHS, 4000, shuffle=True, epoch=2, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {-(-len(whole) // world_size)}
    together = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert together[: len(whole)] == whole
    assert together[len(whole) :] == whole[: len(together) - len(whole)]


def test_more_ranks_than_batches() -> None:
    counts = {len(FrameBatches(LENGTHS[:3], 10**6, shuffle=True, rank=r, world_size=4)) for r in range(4)}
    assert counts == {1}


def test_start_skips_the_first_batches_of_a_rank() -> None:
    whole, rest = (FrameBatches(LENGTHS, 4000, shuffle=True, rank=1, world_size=2, start=start) for start in (0, 5))
    assert list(whole)[5:] == list(rest)
    assert len(rest) == len(whole)  # the trainer counts the batches from before, too


@pytest.mark.parametrize(("count", "world_size"), [(1000, 2), (1000, 3), (7, 4), (4, 4), (2, 4)])
def test_evaluation_reads_every_utterance_once_over_all_ranks(count: int, world_size: int) -> None:
    ranks = [list(FrameBatches(LENGTHS[:count], 4000, rank=r, world_size=world_size)) for r in range(world_size)]
    assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(count))
    counts = [len(batches) for batches in ranks]
    assert max(counts) - min(counts) <= 1
    assert count < world_size or min(counts) > 0


def test_evaluation_goes_from_long_to_short() -> None:
    order = [i for batch in FrameBatches(LENGTHS, 4000) for i in batch]
    assert (np.diff(LENGTHS[order]) <= 0).all()


def test_an_utterance_over_the_bound_stands_alone() -> None:
    assert list(FrameBatches(np.array([10, 900, 10]), 30)) == [[1], [0, 2]]
