from typing import Any

import numpy as np
import pytest

from attnlab.config.batch import FrameShare, share_frames
from attnlab.data.sequence_to_text import FrameUpdates, filler, frame_batches

LENGTHS = np.random.default_rng(0).integers(20, 800, 1000)


def padded(batch: list[int]) -> int:
    return int(LENGTHS[batch].max()) * len(batch)


def epoch_of(buckets: int = 1, parts: int = 1, world_size: int = 1, rank: int = 0, **options: Any) -> FrameUpdates:
    share = FrameShare(buckets, parts, buckets * parts // world_size)
    return FrameUpdates(options.pop("lengths", LENGTHS), 4000, share, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize("training", [True, False])
def test_every_utterance_once_within_the_bounds(training: bool) -> None:
    batches = list(epoch_of(max_sentences=12) if training else frame_batches(LENGTHS, 4000, 12))
    assert sorted(i for batch in batches for i in batch) == list(range(1000))
    assert max(map(padded, batches)) <= 4000
    assert max(map(len, batches)) == 12
    assert sum(map(padded, batches)) < 1.12 * LENGTHS.sum()  # bucketed: little padding


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(**options: int) -> list[list[int]]:
        return list(epoch_of(**options))

    assert order(seed=1, epoch=3) == order(seed=1, epoch=3)
    assert order(seed=1, epoch=3) != order(seed=1, epoch=4)
    assert order(seed=1, epoch=3) != order(seed=2, epoch=3)
    sets = [{frozenset(batch) for batch in order(epoch=epoch)} for epoch in (0, 1)]
    assert len(sets[0] & sets[1]) < 0.5 * len(sets[0])  # not only the order: other neighbours as well
    lengths = [LENGTHS[batch].max() for batch in order()]
    assert abs(np.corrcoef(range(len(lengths)), lengths)[0, 1]) < 0.3


def updates(buckets: int, limit: int, world_size: int, count: int = 1000) -> list[list[int]]:
    """The sentences of each update over all ranks, sorted; fillers are left out."""
    share = share_frames(4000 * buckets, 4000, limit, 800, world_size)
    ranks = [
        list(FrameUpdates(LENGTHS[:count], 4000, share, epoch=2, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1 and not len(ranks[0]) % share.accumulate
    assert all(padded([i for i in batch if i >= 0] or [0]) <= limit for batches in ranks for batch in batches)
    assert all(len(batch) == 1 for batches in ranks for batch in batches if batch[0] < 0)
    updates = []
    for first in range(0, len(ranks[0]), share.accumulate):
        dealt = [batch for batches in ranks for batch in batches[first : first + share.accumulate]]
        updates.append(sorted(i for batch in dealt for i in batch if i >= 0))
    return updates


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("count", [1000, 40])
def test_an_update_does_not_depend_on_processes_or_limit(buckets: int, count: int) -> None:
    """The last, incomplete one neither."""
    alone = updates(buckets, 4000, 1, count)
    assert sorted(i for update in alone for i in update) == list(range(count))
    assert alone[-1]
    for world_size, limit in ((1, 1500), (2, 4000), (2, 2100), (3, 4000), (4, 4000), (4, 1000), (7, 4000)):
        assert updates(buckets, limit, world_size, count) == alone


def test_one_process_reads_whole_buckets_in_order() -> None:
    short, long = list(epoch_of(1)), list(epoch_of(3))
    assert long[: len(short)] == short  # accumulating does not change the order
    assert all(batch == [filler(short[-1 - (-len(short) % 3)][0])] or batch[0] < 0 for batch in long[len(short) :])


def test_start_skips_the_first_batches_of_a_rank() -> None:
    complete, rest = (epoch_of(2, 4, 2, rank=1, start=start) for start in (0, 5))
    assert list(complete)[5:] == list(rest)
    assert len(rest) == len(complete)  # the trainer counts the batches from before, too


@pytest.mark.parametrize(("count", "world_size"), [(1000, 2), (1000, 3), (7, 4), (4, 4), (2, 4)])
def test_evaluation_reads_every_utterance_once_over_all_ranks(count: int, world_size: int) -> None:
    ranks = [frame_batches(LENGTHS[:count], 4000, rank=r, world_size=world_size) for r in range(world_size)]
    assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(count))
    counts = [len(batches) for batches in ranks]
    assert max(counts) - min(counts) <= 1
    assert count < world_size or min(counts) > 0


def test_an_utterance_over_the_bound_stands_alone() -> None:
    assert frame_batches(np.array([10, 900, 10]), 30) == [[1], [0, 2]]
