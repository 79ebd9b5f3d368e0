"""Generated problems that measure what attention keeps of its past: training and held-out sets over a grid of cells.

Each problem draws all arrays at once, as a pure function of a generator.  Only the positions of answers have targets.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt, Le, MinLen
from torch.utils.data import Dataset

from attnlab.config.batch import Share, counted, share_equally
from attnlab.config.bounds import Size
from attnlab.data.base import Data, EpochBatches, Loader, Workers, ordered_batches
from attnlab.data.corpus import repeated
from attnlab.data.report import Report, noted
from attnlab.data.text.windows import IGNORE, Window
from attnlab.errors import ConfigError

log = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int64]

BLANK = 0  # what stands where there is nothing
MARK = 1  # selective copying: "write the next token here"
POWER = 0.01  # Zoology's exponent a: the weight of gap g is a * g ** (a - 1)


class Problem(ABC):
    """One kind of sequence with answers.

    A cell of the grid has a length, the number of tokens of a sequence, and a level, whose meaning is the class's
    `level`, as the record and messages say it.

    Args:
        vocab_size: V, the tokens are 0 to V - 1.
    """

    level: ClassVar[str]

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @abstractmethod
    def complaint(self, length: int, level: float) -> str | None:
        """The error of a cell of a length in tokens and a level; None: the cell is valid."""

    @abstractmethod
    def draw(self, random: np.random.Generator, count: int, length: int, level: float) -> tuple[Tokens, Tokens]:
        """Sequences (count, length) and targets of the same shape, `IGNORE` at other places."""

    @abstractmethod
    def text(self, tokens: Tokens, targets: Tokens) -> str:
        """A readable form of (length,) tokens and targets: what has to be remembered, and the questions."""


class AssociativeRecall(Problem):
    """Multi-query associative recall (MQAR). Zoology (Arora et al. 2023), section 4 and appendix A.

    n keys, each with its value after it, stand at the beginning.  Then each key stands once more, alone, and the target
    there is its value.  The place of a key's question is one of the (T - 2n) / 2 even ones that follow; the g-th of
    them has the weight a * g ** (a - 1), drawn without replacement, so that the distance of question and pair follows
    a power law.  Keys are the lower half of the vocabulary without 0, values the upper half; no key and no value occurs
    twice in a sequence.

    Pairs begin at even positions. A mechanism that merges positions two by two then has a pair in each slot, and needs
    no layer to bring key and value together; `offset` 1 puts a value and the next key there.

    Args:
        power: a; 1: all places have the same weight.
        offset: blanks before the first pair; 0: as published.
        noise: False: 0 stands at all other places; True: random tokens of the vocabulary, keys among them.
    """

    level = "pairs"

    def __init__(self, vocab_size: int, power: float = POWER, noise: bool = False, offset: int = 0) -> None:
        super().__init__(vocab_size)
        self.power, self.noise, self.offset = power, noise, offset

    def complaint(self, length: int, level: float) -> str | None:
        half = self.vocab_size // 2
        if level % 1 or level < 1:
            return "expected int >= 1, the number of pairs"
        least = int(4 * level) + self.offset + self.offset % 2
        if length % 2 or length < least:
            after = f" after {counted(self.offset, 'blank')}" if self.offset else ""
            return f"{int(level)} pairs and their questions{after} need an even length of at least {least}"
        if half - 1 < level:
            return f"a vocabulary of {self.vocab_size} has {max(half - 1, 0)} keys: expected at least {int(level)}"
        return None

    def draw(self, random: np.random.Generator, count: int, length: int, level: float) -> tuple[Tokens, Tokens]:
        pairs, half = int(level), self.vocab_size // 2
        keys = distinct(random, count, pairs, half - 1) + 1
        values = distinct(random, count, pairs, self.vocab_size - half) + half
        tokens = np.full((count, length), BLANK)
        targets = np.full((count, length), IGNORE)
        start, end = self.offset, self.offset + 2 * pairs
        tokens[:, start:end:2], tokens[:, start + 1 : end : 2] = keys, values
        places = end + 2 * self.gaps(random, count, pairs, (length - end) // 2)
        np.put_along_axis(tokens, places, keys, 1)
        np.put_along_axis(targets, places, values, 1)
        if self.noise:
            tokens = np.where(tokens == BLANK, random.integers(0, self.vocab_size, tokens.shape), tokens)
        return tokens, targets

    def gaps(self, random: np.random.Generator, count: int, pairs: int, space: int) -> Tokens:
        """(count, pairs) different places below `space` for the questions of each sequence, in the order of the pairs.

        Successive draws without replacement are the order of log-weights with Gumbel noise.
        """
        weights = (self.power - 1) * np.log(np.arange(1, space + 1))
        return np.argsort(-(weights + random.gumbel(size=(count, space))), axis=1)[:, :pairs]

    def text(self, tokens: Tokens, targets: Tokens) -> str:
        asked = np.flatnonzero(targets != IGNORE)
        pairs = tokens[self.offset : self.offset + 2 * len(asked)].reshape(-1, 2)
        shown = " ".join(f"{key}={value}" for key, value in pairs)
        return f"{shown} ; " + " ".join(f"{tokens[i]}?" for i in asked)


class SelectiveCopying(Problem):
    """Selective copying. Mamba (Gu and Dao 2023), section 4.1.1, after Jing et al. 2019.

    n tokens stand at random places among blanks; then follow n marks, and the target of the i-th mark is the i-th
    token.  Tokens may repeat.
    """

    level = "tokens"

    def complaint(self, length: int, level: float) -> str | None:
        if level % 1 or level < 1:
            return "expected int >= 1, the number of tokens"
        if length < 2 * level:
            return f"{int(level)} tokens and their copies need a length of at least {int(2 * level)}"
        if self.vocab_size < 4:
            return f"a vocabulary of {self.vocab_size} has fewer than 2 tokens to copy: expected at least 4"
        return None

    def draw(self, random: np.random.Generator, count: int, length: int, level: float) -> tuple[Tokens, Tokens]:
        copies = int(level)
        tokens = np.full((count, length), BLANK)
        targets = np.full((count, length), IGNORE)
        places = np.sort(distinct(random, count, copies, length - copies), axis=1)
        values = random.integers(MARK + 1, self.vocab_size, (count, copies))
        np.put_along_axis(tokens, places, values, 1)
        tokens[:, length - copies :], targets[:, length - copies :] = MARK, values
        return tokens, targets

    def text(self, tokens: Tokens, targets: Tokens) -> str:
        return " ".join(map(str, tokens[tokens > MARK])) + " ; copy"


class NeedleInNoise(Problem):
    """One pair of key and value in a sequence of random tokens, asked for at its end.

    The noise is of keys and values too, without this key, so that nothing but the key's second mention tells which pair
    it is.  The level is the share of the noise that stands before the pair; training draws it for each sequence.
    """

    level = "depth"

    def complaint(self, length: int, level: float) -> str | None:
        if not (0 <= level <= 1 or level == ANYWHERE):
            return f"expected a depth from 0 to 1, or {ANYWHERE:g} for any"
        if length < 4:
            return "a pair, its question and some noise need a length of at least 4"
        if self.vocab_size < 8:
            return f"a vocabulary of {self.vocab_size} is too small: expected at least 8"
        return None

    def draw(self, random: np.random.Generator, count: int, length: int, level: float) -> tuple[Tokens, Tokens]:
        half, noise = self.vocab_size // 2, length - 3
        keys = random.integers(1, half, (count, 1))
        values = random.integers(half, self.vocab_size, (count, 1))
        tokens = random.integers(1, self.vocab_size - 1, (count, length))
        tokens += tokens >= keys  # every token but the key alike
        targets = np.full((count, length), IGNORE)
        depth = random.random((count, 1)) if level == ANYWHERE else np.full((count, 1), level)
        places = np.rint(depth * noise).astype(np.int64)
        np.put_along_axis(tokens, places, keys, 1)
        np.put_along_axis(tokens, places + 1, values, 1)
        tokens[:, -1:], targets[:, -1:] = keys, values
        return tokens, targets

    def text(self, tokens: Tokens, targets: Tokens) -> str:
        key = tokens[-1]
        place = int(np.flatnonzero(tokens[:-1] == key)[0])
        return f"{place} others {key}={tokens[place + 1]} {len(tokens) - 3 - place} others ; {key}?"


ANYWHERE = -1.0  # the level of a needle whose depth is drawn for each sequence

PROBLEMS: Mapping[str, type[Any]] = {
    "mqar": AssociativeRecall,
    "selective_copying": SelectiveCopying,
    "needle": NeedleInNoise,
}


def distinct(random: np.random.Generator, count: int, size: int, below: int) -> Tokens:
    """(count, size) ints below `below`, in each row all different and every such row equally likely.

    Of equal draws the later ones are drawn again, so every ordered choice has the same probability.  Rows of more than
    half of the values are the beginning of a permutation, which is faster.  `size` is at most `below`.
    """
    if 2 * size > below:
        return random.permuted(np.broadcast_to(np.arange(below), (count, below)), axis=1)[:, :size]
    drawn = random.integers(0, below, (count, size))
    rows = np.arange(count)  # those that may have equal values
    while len(rows):
        order = np.argsort(drawn[rows], axis=1, kind="stable")
        ranked = np.take_along_axis(drawn[rows], order, 1)
        again = np.zeros_like(ranked, dtype=bool)
        np.put_along_axis(again, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], 1)
        row, column = np.nonzero(again)
        drawn[rows[row], column] = random.integers(0, below, len(row))
        rows = rows[np.unique(row)]
    return drawn


# --- the sequences of a run ---

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
    """The sequences of a split, cell by cell; `drawn`: tokens and targets of each cell, (count, length) each."""

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
        return self._order[update][part * self._size : (part + 1) * self._size].tolist()


class RecallData(Data):
    """Generated sequences of one problem; nothing is read, and nothing is stored.

    A cell is a list of length, level and number of sequences: [64, 8, 1000]. The level is the number of key-value pairs
    of `mqar`, the number of tokens to copy of `selective_copying`, and of `needle` the share of the noise before the
    pair, or -1 for a share that is drawn for each sequence.

    Args:
        train: cells of the training set, which is drawn once; its order depends on seed and epoch.
        validation: sequences of each cell of the test set that validations score, others than those of the test set.
        update_sequences: sequences of an update, on all processes together, all of one cell.
        batch_size: the largest number of sequences in a batch of one process.
        power, noise, offset: of `mqar`, see :class:`attnlab.data.recall.data.AssociativeRecall`.
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
        self.report = Report()
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
            for split in missing:
                with self.report.of(split) as size:
                    size.used, size.unit = sum(cell.count for cell in self.cells[split]), "sequences"
                    if split == "train":
                        rest = sum(cell.count % self.update_sequences for cell in self.cells[split])
                        noted(
                            "sequence at the end of an epoch, too few for an update (others in each epoch)", count=rest
                        )
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
        return self.loader(sequences, updates, collate=collated)

    def val_dataloader(self) -> Loader[Window]:
        return self._held_out("validation", shared=True)

    def test_dataloader(self) -> Loader[Window]:
        """Inside `trainer.test` the processes share them; elsewhere the loader has all sequences."""
        return self._held_out("test", shared=self.testing)

    def _held_out(self, split: Split, shared: bool) -> Loader[Window]:
        sequences = self._sets[split]
        counts = [cell.count for cell in sequences.cells]
        batches = ordered_batches(counts, self.eval_batch_size, **self.ranks(shared))
        return self.loader(sequences, batches, collate=collated)


def collated(batch: Any) -> Any:
    """The batch, which the dataset has collated."""
    return batch
