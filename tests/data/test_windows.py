"""Which tokens are seen when: every one, once, in an order that nothing but seed, epoch and rank decide."""

from pathlib import Path

import numpy as np
import pytest
import torch

from attnlab.config.batch import Share, share_equally
from attnlab.data.text.tokens import TokenFile
from attnlab.data.text.windows import IGNORE, EvaluationWindows, Permutation, ShuffledBatches, TrainingWindows


def tokens(count: int, first: int = 0) -> TokenFile:
    """Each id is its own position."""
    return TokenFile(Path("ids"), np.arange(first, first + count, dtype=np.int32), first + count)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 5000])
def test_a_permutation_gives_each_place_once_and_is_the_key_s(size: int) -> None:
    first, again, other = (Permutation(size, *key)[np.arange(size)] for key in ((1, 0), (1, 0), (1, 1)))
    assert sorted(first.tolist()) == list(range(size)) and np.array_equal(first, again)
    if size == 5000:
        assert (first == other).mean() < 0.01 and abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_training_windows_lie_side_by_side(epoch: int) -> None:
    length, files = 8, [tokens(50), tokens(9, 1000), tokens(33, 2000), tokens(5, 3000)]
    windows = TrainingWindows(files, length, seed=1, epoch=epoch)
    seen = []
    for inputs, targets in (windows[i] for i in range(len(windows))):
        assert inputs.shape == targets.shape == (length,)
        assert torch.equal(targets, inputs + 1)  # of one file
        seen += inputs.tolist()
    assert len(seen) == len(set(seen))
    assert sum(1000 <= i < 2000 for i in seen) == length  # exactly one window fits, so no offset moves it out
    assert not any(i >= 3000 for i in seen)
    assert len(windows) in (5 + 1 + 3, 5 + 1 + 4, 6 + 1 + 4, 6 + 1 + 3)


@pytest.mark.parametrize(("world_size", "limit"), [(1, 12), (1, 5), (2, 6), (3, 4), (3, 2), (4, 2)])
def test_an_update_does_not_depend_on_processes_or_limit(world_size: int, limit: int) -> None:
    share = share_equally("tokens", 12 * 8, limit, world_size, 8)

    def batches(rank: int, start: int = 0) -> list[list[int]]:
        order = ShuffledBatches(103, share, seed=5, epoch=2, rank=rank, world_size=world_size, start=start)
        assert len(order) == len(list(order)) + start == 8 * share.accumulate  # 8 updates; 7 windows are left out
        return list(order)

    every = [batches(rank) for rank in range(world_size)]
    assert all(len(batch) == share.size <= limit for order in every for batch in order)
    for rank in range(world_size):
        assert batches(rank, 3) == every[rank][3:]
    together = [i for group in zip(*every, strict=True) for batch in group for i in batch]
    alone = [i for batch in ShuffledBatches(103, Share(12, 1), seed=5, epoch=2) for i in batch]
    assert together == alone and len(set(alone)) == 96 and max(alone) < 103


@pytest.mark.parametrize("count", [2, 7, 8, 9, 10, 16, 17, 40])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_each_token_but_the_first_is_predicted_once(count: int, stride: int) -> None:
    length = 8
    windows = EvaluationWindows(tokens(count, 100), length, stride)
    predicted = []
    for number, (inputs, targets) in enumerate(windows[i] for i in range(len(windows))):
        real = targets != IGNORE
        assert torch.equal(targets[real], inputs[real] + 1)
        predicted += targets[real].tolist()
        if number and stride < length:
            assert int(real.nonzero()[0]) == length - stride  # so much past has every one at least
    assert sorted(predicted) == list(range(101, 100 + count))


def test_a_limit_spreads_the_windows() -> None:
    windows = EvaluationWindows(tokens(1001), 10, 10, limit=4)
    assert [int(windows[i][0][0]) for i in range(len(windows))] == [0, 250, 500, 750]
    assert len(EvaluationWindows(tokens(1001), 10, 10, limit=1000)) == 100
