"""The sequences of a run: splits that share nothing, batches of one cell, and one order however it is shared."""

from typing import Any

import numpy as np
import pytest
import torch

from attnlab.config.batch import Share
from attnlab.data.base import ordered_batches
from attnlab.data.recall.data import CellUpdates, RecallData
from attnlab.errors import ConfigError

TRAIN = [[16, 4, 40], [32, 4, 25]]
TEST = [[16, 4, 20], [64, 8, 7]]


def make(**settings: Any) -> RecallData:
    defaults: dict[str, Any] = {"problem": "mqar", "vocab_size": 64, "train": TRAIN, "test": TEST, "validation": 10}
    return RecallData(**defaults | {"update_sequences": 8, "batch_size": 4, "eval_batch_size": 6} | settings)


def tokens(data: RecallData, split: Any, cell: int = 0) -> np.ndarray:
    sequences = data.sequences(split)
    return sequences.__getitems__(range(sequences.starts[cell], sequences.starts[cell + 1]))[0].numpy()


def test_splits_share_no_sequence_and_held_out_ones_are_those_of_every_seed() -> None:
    first, second = make(), make(seed=2)
    for data in (first, second):
        data.setup()
    rows = [{row.tobytes() for row in tokens(first, split)} for split in ("train", "validation", "test")]
    assert [len(part) for part in rows] == [40, 10, 20] and not set.intersection(*rows)
    assert not rows[0] & rows[2] and not rows[0] & rows[1]
    assert (tokens(first, "train") != tokens(second, "train")).any()
    assert all((tokens(first, split) == tokens(second, split)).all() for split in ("validation", "test"))
    again = make(test=[[64, 8, 7]])
    again.setup("test")
    assert (tokens(again, "test") == tokens(first, "test", 1)).all()  # the same in every grid that has the cell
    assert "train 65, validation 20, test 27 sequences; vocabulary 64" in first.corpus


def test_an_update_is_of_one_cell_and_every_sequence_comes_at_most_once() -> None:
    data = make()
    data.setup()
    batches = list(data.train_dataloader())
    assert [len(x) for x, _ in batches] == [4] * 16  # five updates of the first cell, three of the second
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        assert first[0].shape == second[0].shape
    seen = [row.numpy().tobytes() for x, _ in batches for row in x]
    assert len(set(seen)) == len(seen)
    assert {x.shape[1] for x, _ in batches} == {16, 32}


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    data = make()
    data.setup()
    sequences = data.sequences("train")

    def order(epoch: int, size: int = 8, accumulate: int = 1, **more: int) -> list[list[int]]:
        return list(CellUpdates(sequences, Share(size, accumulate), seed=1, epoch=epoch, **more))

    alone = order(0)
    assert alone == order(0) != order(1) and len(alone) == 8
    halves = [order(0, 4, 1, rank=rank, world_size=2) for rank in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == alone
    parts = order(0, 4, 2)
    assert [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)] == alone
    assert order(0, 4, 2, start=5) == parts[5:]
    assert len(CellUpdates(sequences, Share(4, 2), seed=1, epoch=0, start=5)) == 16


@pytest.mark.parametrize("world", [1, 2, 3])
def test_held_out_batches_are_of_one_cell_and_cover_all(world: int) -> None:
    data = make()
    data.setup("test")
    sequences = data.sequences("test")
    ranks = [ordered_batches([20, 7], 6, rank=rank, world_size=world) for rank in range(world)]
    assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(27))
    assert all(len({sequences.cell_of(i) for i in batch}) == 1 for batches in ranks for batch in batches)
    sequence, _ = sequences[20]
    assert sequence.dtype == torch.int64 and sequence.shape == (64,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": [[16, 8, 10]]}, r"task.data.train: \[16, 8, 10\]: 8 pairs and their questions need an even length"),
        ({"offset": 1}, r"\[16, 4, 40\]: 4 pairs and their questions after 1 blank need an even length of at least 18"),
        ({"test": [[16, 0, 10]]}, "expected int >= 1, the number of pairs"),
        ({"vocab_size": 8}, "a vocabulary of 8 has 3 keys: expected at least 4"),
        ({"train": [[16, 4]]}, r"task.data.train: \[16, 4\]: expected \[length, pairs, sequences\]"),
        ({"train": [[16, 4, 10], [16, 4, 20]]}, "the cell 16x4 occurs twice"),
        ({"problem": "selective_copying", "test": [[16, 9, 1]]}, "9 tokens and their copies need a length of at least"),
        ({"problem": "needle", "train": [[16, 0.5, 1]], "test": [[16, 1.5, 1]]}, "expected a depth from 0 to 1, or -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)
