"""Text for language models: corpus, vocabulary, ids on disk, windows."""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from torch.utils.data import Dataset

from attnlab.config.batch import Share, share_equally
from attnlab.config.bounds import Size
from attnlab.data.base import Data, Loader, Workers, ordered_batches
from attnlab.data.corpus import sample_corpus
from attnlab.data.report import FILES, Report, noted
from attnlab.data.samples.markov import Source
from attnlab.data.text.corpora import SPLITS, Split, TextCorpus
from attnlab.data.text.tokens import Ids, TokenFile, build
from attnlab.data.text.vocabulary import (
    BytePairs,
    PretrainedTokens,
    PretrainedVocabulary,
    Vocabulary,
    Words,
    WordVocabulary,
    count_words,
)
from attnlab.data.text.windows import (
    BegunWindows,
    EvaluationWindows,
    ShuffledBatches,
    TrainingWindows,
    Window,
    WindowsWithFacts,
    unscored,
)
from attnlab.errors import ConfigError, DataError
from attnlab.run.cache import digest, file_digests
from attnlab.run.record import embedded

log = logging.getLogger(__name__)

LAYOUT = "attnlab.data.text.corpora.check_layout"  # checks the files of data_root without torch
VERSION = 2  # to be raised when the same texts and vocabulary give other ids or another folder
BATCH = 512  # texts encoded at a time
UNKNOWN = "<unk>"  # in place of rare words in WikiText and in the Penn Treebank


def write_sample(cache_dir: Path, corpus: TextCorpus) -> Path:
    """The directory of the sample corpus in the layout of `corpus`, written unless it exists."""
    settings = {name: value for name, value in vars(corpus).items() if isinstance(value, str | int | float)}
    name, write = type(corpus).__name__, lambda root: corpus.write_sample(root, Source())
    return sample_corpus(cache_dir / "samples", f"text-{name}", settings, write)


class LanguageModellingData(Data):
    """A corpus in its published layout, or the embedded sample corpus in that layout where `root` is None.

    Token ids are stored under `cache_dir` and are memory-mapped.  The trainer needs
    `reload_dataloaders_every_n_epochs=1` and `use_distributed_sampler=False`.

    Args:
        vocab_size: of the model.  Words: the largest number of them.  Byte pairs: the exact number; ids beyond the
            tokenizer's are padding.
        window: tokens of a training window.  Windows are adjacent; their offset and order depend on seed and epoch.
            Where the tokenizer of a pretrained model puts a token before a text, every window begins with it, in place
            of the window's first token.
        update_tokens: tokens of an update, on all processes together; a multiple of `window`.
        batch_size: the largest number of windows in a batch of one process.
        eval_window: tokens of a held-out window, disjoint; None: `window`.
        eval_batch_size: windows of a held-out batch; None: `batch_size`.
        eval_windows: the largest number of held-out windows, evenly spread; None: all.

    Raises:
        ConfigError: settings that do not fit.
        DataError: the corpus.
    """

    def __init__(
        self,
        root: str | None,
        cache_dir: str,
        corpus: TextCorpus,
        vocabulary: Words | BytePairs | PretrainedTokens,
        vocab_size: Annotated[int, Ge(2), Le(1_048_576)],
        window: Size,
        update_tokens: Annotated[int, Ge(1)],
        batch_size: Annotated[int, Ge(1)],
        eval_window: Size | None = None,
        eval_batch_size: Annotated[int, Ge(1)] | None = None,
        eval_windows: Annotated[int, Ge(1)] | None = None,
        seed: int = 1,
        num_workers: Workers = None,
    ) -> None:
        super().__init__()
        self.root = None if root is None else Path(root).expanduser()
        self.cache_dir = Path(cache_dir).expanduser()
        self.source, self.settings, self.vocab_size = corpus, vocabulary, vocab_size
        self.window, self.update_tokens, self.batch_size = window, update_tokens, batch_size
        self.eval_window = eval_window or window
        self.eval_batch_size, self.eval_windows = eval_batch_size or batch_size, eval_windows
        self.seed, self.num_workers = seed, num_workers
        self.report = Report()
        self.is_sample = root is None
        self.corpus = ""
        self.sliding_stride: int | None = None  # set by the task that scores
        self.facts = 0.0  # share of the training windows with facts; set by the task that heals a conversion
        self.vocabulary: Vocabulary
        self.run_vocabulary: Vocabulary | None = None  # set by the task: that of a run, not learned again
        self._files: dict[Split, list[TokenFile]] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read all splits, or with `stage` "test" the vocabulary and the test set.  Raises DataError."""
        if self._files:
            return
        if self.root is None:
            log.warning("NO data_root IS SET: this is the %s", embedded(self.source.name))
            self.root = write_sample(self.cache_dir, self.source)
        splits: Sequence[Split] = ("test",) if stage == "test" else SPLITS
        if not self.is_sample:
            with self.report.of(FILES):
                self.source.check(self.root)  # a missing file is named before the others are encoded
        with Report().of("train"):  # texts that the vocabulary is learned from are read again, and counted then
            self.vocabulary = self.run_vocabulary or self.settings.build(
                self.source, self.root, self.cache_dir, self.vocab_size
            )
        files = {split: self._read(split) for split in splits}
        unit = self.vocabulary.unit
        sizes = ", ".join(f"{split} {sum(map(len, parts))}" for split, parts in files.items())
        about = f"{self.source.name} at {self.root}: {sizes} {unit}s; vocabulary {self.vocabulary.size}"
        log.info("corpus: %s; %s", about, "generated splits" if self.is_sample else self.source.held_out)
        self.corpus = embedded(self.source.name) if self.is_sample else about
        self.location = self.root
        for split, parts in files.items():
            if sum(map(len, parts)) < 2:
                raise DataError(f"{self.root}: {split} has fewer than 2 {unit}s")
        self._files = files
        self._note_windows()

    def _note_windows(self) -> None:
        """Note the windows that an epoch, or a score, leaves out."""
        for split in self._files:
            with self.report.of(split):
                if split == "train":
                    windows = sum((len(file) - 1) // self.window for file in self._files[split])
                    fills = windows % max(1, self.update_tokens // self.window)
                    noted("window at the end of an epoch, too few for an update (others in each epoch)", count=fills)
                else:
                    every = EvaluationWindows(self.tokens(split), self.eval_window, self.eval_window)
                    less = len(every) - len(self._evaluation(split, None))
                    noted(f"window that is not scored, by task.data.eval_windows={self.eval_windows}", count=less)

    def _read(self, split: Split) -> list[TokenFile]:
        """The ids of a split: shards of the corpus, or ids encoded from its texts."""
        with self.report.of(split) as size:
            files = self._ids(split)
            size.used, size.unit = sum(map(len, files)), f"{self.vocabulary.unit}s"
        return files

    def _ids(self, split: Split) -> list[TokenFile]:
        assert self.root is not None
        shards = self.source.shards(self.root, split, self.vocabulary.num_ids)
        if shards:
            for file in shards:
                file.read(0, min(len(file), 1 << 20))  # find the ids of another tokenizer early
            return shards
        files = self.source.files(self.root, split)
        digests = file_digests(files, self.cache_dir / "tokens" / "files.json")
        layout, contents = self.source.layout(self.root), [digests[path] for path in files]
        key = digest([VERSION, split, layout, self.vocabulary.fingerprint, contents])
        name = "".join(c if c.isalnum() else "-" for c in self.source.name.lower())
        folder = self.cache_dir / "tokens" / f"{name}-{split}-{key[:24]}"
        return [build(folder, self._encoded(split), self.vocabulary.size)]

    def _encoded(self, split: Split) -> Iterator[tuple[list[list[int]], int]]:
        assert self.root is not None
        texts = self.source.texts(self.root, split)
        unknown = self.vocabulary.unknown_id
        while batch := list(islice(texts, BATCH)):
            ids = self.vocabulary.marked(batch)
            if isinstance(self.vocabulary, WordVocabulary) and unknown is not None:
                mark = self.vocabulary.unknown
                others = sum(x.count(unknown) for x in ids) - sum(x.split().count(mark) for x in batch)
                noted(f"word outside the vocabulary, read as {mark}", count=others)
            elif isinstance(self.vocabulary, PretrainedVocabulary):
                marks = sum(text.count(UNKNOWN) for text in batch)
                noted(f"{UNKNOWN}, which stands for a rare word of the raw text", count=marks)
            yield ids, sum(map(count_words, batch))

    def tokens(self, split: Split) -> TokenFile:
        """The ids of a split as one file; of one that `setup` has not read they are read now."""
        if split not in self._files:
            self._files[split] = self._read(split)
        files = self._files[split]
        if len(files) == 1:
            return files[0]
        ids = np.concatenate([file.read(0, len(file)) for file in files])  # the few held-out shards
        return TokenFile(files[0].path, ids, int(ids.max()) + 1)

    def beginning(self, split: Split, count: int) -> Ids:
        """The first `count` ids of a split, int64; all of them where there are less."""
        ids = np.empty(0, dtype=np.int64)
        for file in self._files[split]:  # a training split may have more shards than memory
            ids = np.concatenate([ids, file.read(0, min(count - len(ids), len(file)))])
        return ids

    def floor(self, split: Split) -> float | None:
        """The sample corpus's entropy in nats per id of a split; None for a real corpus."""
        if not self.is_sample:
            return None
        return Source().entropy * self.words_per_id(split)

    def words_per_id(self, split: Split) -> float:
        """Words of a split by its ids, without those before a text that are never predicted; 0: not known."""
        file = self.tokens(split)
        return file.words / (len(file) - len(unscored(self.vocabulary)) * file.texts)

    def share(self, processes: int) -> Share:
        return share_equally("tokens", self.update_tokens, self.batch_size, processes, self.window)

    def held_out_sizes(self, stage: str | None) -> dict[str, int]:
        chosen = {"validate": SPLITS[1:2], "test": SPLITS[2:]}.get(stage or "", SPLITS[1:])
        return {split: len(self._evaluation(split, None)) for split in chosen}

    def train_dataloader(self) -> Loader[Window]:
        order = self.order()
        windows = TrainingWindows(self._files["train"], self.window, self.seed, order["epoch"])
        batches = ShuffledBatches(len(windows), self.share(order["world_size"]), **order)
        if not len(batches):
            most = f"expected at most {len(windows) * self.window}, the {len(windows)} windows of the training text"
            raise ConfigError(f"task.train.batch.tokens={self.update_tokens}: {most}")
        if not self.facts:
            return self._loader(windows, batches)
        return self._loader(WindowsWithFacts(windows, self.facts, self.vocabulary, self.seed, order["epoch"]), batches)

    def _loader(self, windows: Dataset[Window], batches: Any) -> Loader[Window]:
        return self.loader(BegunWindows(windows, self.vocabulary) if self.vocabulary.before else windows, batches)

    def val_dataloader(self) -> Loader[Window]:
        return self.held_out("validation", shared=True)

    def test_dataloader(self) -> list[Loader[Window]]:
        """Disjoint windows of the test set; with `sliding_stride`, then also windows every `sliding_stride` tokens.

        Inside `trainer.test` the processes share them; elsewhere each loader has all windows.
        """
        strides = [None, *([self.sliding_stride] if self.sliding_stride else [])]
        return [self.held_out("test", stride, self.testing) for stride in strides]

    def test_windows(self, stride: int | None = None) -> int:
        """The number of windows of the test set, one every `stride` tokens (None: disjoint)."""
        return len(self._evaluation("test", stride))

    def _evaluation(self, split: Split, stride: int | None) -> EvaluationWindows:
        return EvaluationWindows(self.tokens(split), self.eval_window, stride or self.eval_window, self.eval_windows)

    def held_out(self, split: Split, stride: int | None = None, shared: bool = False) -> Loader[Window]:
        """Windows of `eval_window` every `stride` tokens (None: disjoint); `shared`: only those of this process."""
        windows = self._evaluation(split, stride)
        batches = ordered_batches([len(windows)], self.eval_batch_size, **self.ranks(shared))
        return self._loader(windows, batches)
