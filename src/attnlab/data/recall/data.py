"""Generated sequences with answers: a training set and held-out sets over a grid of cells."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt, Le, MinLen
from torch.utils.data import Dataset

from attnlab.config.batch import Share, share_equally
from attnlab.config.bounds import Size, bounded
from attnlab.data.base import Data, Loader, Workers
from attnlab.data.batching import EpochBatches, ordered_batches
from attnlab.data.files import repeated
from attnlab.data.recall.problems import ANYWHERE, POWER, PROBLEMS, AssociativeRecall
from attnlab.data.text.windows import Window
from attnlab.errors import ConfigError

log = logging.getLogger(__name__)

VERSION = 1  # of the generators: the same settings and seeds give the same sequences
Kind = Literal["mqar", "selective_copying", "needle"]
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Cells = Annotated[Sequence[Sequence[float]], MinLen(1)]
NAMES = {"mqar": "MQAR", "selective_copying": "selective copying", "needle": "needle in noise"}


@dataclass(frozen=True)
class Cell:
    """`count` sequences of `length` tokens and one `level`: pairs, tokens to copy, or the depth of the needle."""

    length: int
    level: float
    count: int

    @property
    def name(self) -> str:
        """Length and level, without points: 64x8; a depth in percent, 64x50%."""
        if self.level == ANYWHERE:
            return f"{self.length}xany"
        return f"{self.length}x{self.level:g}" if self.level >= 1 else f"{self.length}x{100 * self.level:g}%"


class Sequences(Dataset[Window]):
    """The sequences of a split, those of one cell after those of another.

    Args:
        cells: of the split.
        drawn: tokens and targets of each cell, (count, length) each.
    """

    def __init__(self, cells: Sequence[Cell], drawn: Sequence[tuple[npt.NDArray[np.int32], ...]]) -> None:
        self.cells, self._drawn = cells, drawn
        self.starts = [sum(cell.count for cell in cells[:i]) for i in range(len(cells) + 1)]

    def __len__(self) -> int:
        return self.starts[-1]

    def cell_of(self, index: int) -> int:
        """The number of the cell that has the sequence `index`."""
        return int(np.searchsorted(self.starts, index, side="right")) - 1

    def __getitem__(self, index: int) -> Window:
        tokens, targets = self.__getitems__([index])
        return tokens[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Window:
        """Tokens and targets (B, T) int64 of sequences of one cell, as torch's loader asks for a batch."""
        cell = self.cell_of(indices[0])
        rows = np.asarray(indices) - self.starts[cell]
        tokens, targets = (torch.from_numpy(part[rows].astype(np.int64)) for part in self._drawn[cell])
        return tokens, targets


class CellUpdates(EpochBatches):
    """Each update takes the next sequences of one cell; the updates of all cells are mixed.

    Sequences that do not fill an update are left out.

    Args:
        share: `share.accumulate` batches of `share.size` sequences on each process.
    """

    def __init__(
        self, sequences: Sequences, share: Share, *, seed: int, epoch: int, world_size: int = 1, **place: int
    ) -> None:
        random = np.random.default_rng([seed, epoch])
        size = share.size * share.accumulate * world_size
        updates = []
        for first, cell in zip(sequences.starts, sequences.cells, strict=False):
            order = first + random.permutation(cell.count)
            updates += [order[i : i + size] for i in range(0, cell.count - size + 1, size)]
        self._order = [updates[i] for i in random.permutation(len(updates))]
        self._size = share.size
        super().__init__(len(updates), share.accumulate, world_size=world_size, **place)

    def batch(self, update: int, part: int) -> list[int]:
        sequences: list[int] = self._order[update][part * self._size : (part + 1) * self._size].tolist()
        return sequences


@bounded
class RecallData(Data):
    """Generated sequences of one problem; nothing is read, and nothing is stored.

    A cell is a list of length, level and number of sequences: [64, 8, 1000]. The level is the number of key-value pairs
    of `mqar`, the number of tokens to copy of `selective_copying`, and of `needle` the share of the noise before the
    pair, or -1 for a share that is drawn for each sequence.

    Args:
        vocab_size: V.
        train: cells of the training set, which is drawn once; its order depends on seed and epoch.
        test: cells of the test set.
        validation: sequences of each cell of the test set that validations score, others than those of the test set.
        update_sequences: sequences of an update, on all processes together, all of one cell.
        batch_size: the largest number of sequences in a batch of one process.
        eval_batch_size: of a held-out batch.
        power, noise, offset: of `mqar`, see :class:`attnlab.data.recall.problems.AssociativeRecall`.
        seed: of the training set and its order; held-out sequences are the same for all seeds.

    Raises:
        ConfigError: a cell that the problem cannot have.
    """

    def __init__(
        self,
        problem: Kind,
        vocab_size: Annotated[int, Ge(2), Le(1_048_576)],
        train: Cells,
        test: Cells,
        update_sequences: Size,
        batch_size: Size,
        validation: Size = 64,
        eval_batch_size: Size = 256,
        power: Annotated[float, Gt(0)] = POWER,
        noise: bool = False,
        offset: Annotated[int, Ge(0)] = 0,
        seed: Annotated[int, Ge(0)] = 1,
        num_workers: Workers = None,
    ) -> None:
        super().__init__()
        mqar = {"power": power, "noise": noise, "offset": offset} if PROBLEMS[problem] is AssociativeRecall else {}
        self.kind, self.problem = problem, PROBLEMS[problem](vocab_size, **mqar)
        self.cells = {"train": self._read("train", train), "test": self._read("test", test)}
        self.cells["validation"] = [Cell(cell.length, cell.level, validation) for cell in self.cells["test"]]
        self.vocab_size, self.update_sequences, self.batch_size = vocab_size, update_sequences, batch_size
        self.eval_batch_size, self.seed, self.num_workers = eval_batch_size, seed, num_workers
        self.filtered: dict[str, int] = {}
        self.corpus, self.location = "", None
        self._sets: dict[Split, Sequences] = {}

    def _read(self, split: Split, values: Cells) -> list[Cell]:
        """The cells of a split, each checked."""
        cells = []
        for value in values:
            key = f"task.data.{split}: {value}"
            if len(value) != 3 or not (value[0] % 1 == value[2] % 1 == 0 < min(value[0], value[2])):
                raise ConfigError(f"{key}: expected [length, {self.problem.level}, sequences], such as [64, 8, 1000]")
            cell = Cell(int(value[0]), float(value[1]), int(value[2]))
            if wrong := self.problem.complaint(cell.length, cell.level):
                raise ConfigError(f"{key}: {wrong}")
            cells.append(cell)
        if (name := repeated(cell.name for cell in cells)) is not None:
            raise ConfigError(f"task.data.{split}: the cell {name} occurs twice")
        return cells

    @property
    def longest(self) -> int:
        """The length of the longest sequences."""
        return max(cell.length for cells in self.cells.values() for cell in cells)

    def setup(self, stage: str | None = None) -> None:
        """Draw all splits, or with `stage` "test" the test set."""
        splits: Sequence[Split] = ("test",) if stage == "test" else SPLITS
        missing = [split for split in splits if split not in self._sets]
        for split in missing:
            self._sets[split] = Sequences(self.cells[split], [self._drawn(split, cell) for cell in self.cells[split]])
        if missing:
            sizes = ", ".join(f"{split} {sum(cell.count for cell in self.cells[split])}" for split in SPLITS)
            name = f"{NAMES[self.kind]}, generated, version {VERSION}"
            self.corpus = f"{name}: {sizes} sequences; vocabulary {self.vocab_size}"
            log.info("sequences: %s", self.corpus)

    def _drawn(self, split: Split, cell: Cell) -> tuple[npt.NDArray[np.int32], ...]:
        """Tokens and targets of a cell, the same for every grid that has it."""
        key = SPLITS.index(split), self.seed if split == "train" else 0, cell.length, round(1000 * cell.level) + 1000
        random = np.random.default_rng([*key, self.vocab_size])
        drawn = self.problem.draw(random, cell.count, cell.length, cell.level)
        return tuple(part.astype(np.int32) for part in drawn)

    def sequences(self, split: Split) -> Sequences:
        """The sequences of a split that `setup` has drawn."""
        return self._sets[split]

    def share(self, processes: int) -> Share:
        return share_equally("sequences", self.update_sequences, self.batch_size, processes)

    def held_out_sizes(self, stage: str | None) -> dict[str, int]:
        splits = {"validate": SPLITS[1:2], "test": SPLITS[2:]}.get(stage or "", SPLITS[1:])
        return {split: sum(cell.count for cell in self.cells[split]) for split in splits}

    def train_dataloader(self) -> Loader[Window]:
        order = self.order()
        sequences = self._sets["train"]
        updates = CellUpdates(sequences, self.share(order["world_size"]), **order)
        if not len(updates):
            most = max(cell.count for cell in self.cells["train"])
            key = f"task.train.batch.sequences={self.update_sequences}"
            raise ConfigError(f"{key}: expected at most {most}, the sequences of a cell of task.data.train")
        return self.loader(sequences, updates, collate=as_it_is)

    def val_dataloader(self) -> Loader[Window]:
        return self._held_out("validation", shared=True)

    def test_dataloader(self) -> Loader[Window]:
        """Inside `trainer.test` the processes share them; elsewhere the loader has all sequences."""
        return self._held_out("test", shared=self.testing)

    def _held_out(self, split: Split, shared: bool) -> Loader[Window]:
        rank, world_size = self._ranks() if shared else (0, 1)
        sequences = self._sets[split]
        counts = [cell.count for cell in sequences.cells]
        batches = ordered_batches(counts, self.eval_batch_size, rank=rank, world_size=world_size)
        return self.loader(sequences, batches, collate=as_it_is)


def as_it_is(batch: Any) -> Any:
    """The batch, which the dataset has collated."""
    return batch
