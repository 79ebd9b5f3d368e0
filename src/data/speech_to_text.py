"""Speech with its transcript and translation, ready for training: corpus, features, pieces, batches."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from src.data.batch import Example, Ids, collate
from src.data.batching import FrameBatches
from src.data.cache import FeatureStore, open_features
from src.data.features import FilterBank, SpecAugment
from src.data.mustc import Segment, check_layout, read_split
from src.data.task_data import TaskData
from src.data.tokenizer import Kind, Tokenizer
from src.errors import ConfigError, DataError

log = logging.getLogger(__name__)

SPLITS = ("train", "dev", "tst-COMMON")

Target = Literal["translation", "transcript"]


@dataclass
class Utterances(Dataset[Example]):
    """The utterances `chosen` of a split.  With `augment`, masks depend on (seed, epoch, place in the split) alone."""

    segments: Sequence[Segment]
    features: FeatureStore
    targets: Sequence[Ids]
    ctc_targets: Sequence[Ids] | None
    texts: Sequence[str]
    chosen: Ids
    augment: SpecAugment | None = None
    seed: int = 1
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        i = int(self.chosen[index])
        features = self.features[i]
        if self.augment is not None:
            features = self.augment(features, np.random.default_rng([self.seed, self.epoch, i]))
        segment = self.segments[i]
        ctc = None if self.ctc_targets is None else self.ctc_targets[i]
        return Example(segment.id, features, self.targets[i], ctc, segment.source, self.texts[i])

    @property
    def lengths(self) -> Ids:
        return self.features.lengths[self.chosen]


class SpeechToTextData(TaskData):
    """A corpus in MuST-C's layout, or the embedded sample corpus where `root` is None.

    target: "translation" or "transcript" (recognition: the decoder's text is the transcript).
    max_frames: feature frames of a batch, padding included; max_sentences: a second bound, or None.
    min_input_frames, max_input_frames, max_target_tokens (</s> counted): training leaves other utterances out and
    counts them in `filtered`; evaluation leaves out nothing.
    ctc_vocab_size: pieces of the transcript as CTC labels, or None.
    hard_vocab_limit: a text that allows fewer pieces is refused; without it, such a text gets what it allows.
    drop_empty: leave out utterances without text, as the published preparation does, rather than refuse the corpus.

    Everything written lies under `cache_dir`. Order and masks of an epoch are pure functions of (seed, epoch, rank,
    world size); the trainer needs `reload_dataloaders_every_n_epochs=1` and `use_distributed_sampler=False`.
    `start_batch`, used once, is where the next training epoch begins.

    Raises ConfigError (settings that do not fit) and DataError (the corpus), before any feature is computed.
    """

    def __init__(
        self,
        root: str | None,
        cache_dir: str,
        features: FilterBank,
        augment: SpecAugment | None = None,
        source_language: str = "en",
        target_language: str = "de",
        target: Target = "translation",
        seed: int = 1,
        vocab_size: int = 8000,
        vocab_type: Kind = "unigram",
        ctc_vocab_size: int | None = None,
        ctc_vocab_type: Kind = "unigram",
        hard_vocab_limit: bool = True,
        max_frames: int = 40000,
        max_sentences: int | None = None,
        min_input_frames: int = 5,
        max_input_frames: int = 3000,
        max_target_tokens: int = 1024,
        drop_empty: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if target not in get_args(Target):
            raise ConfigError(f"task.target={target}: it is {' or '.join(get_args(Target))}")
        if max_frames < 1 or (max_sentences is not None and max_sentences < 1):
            raise ConfigError(f"task.data: max_frames={max_frames}, max_sentences={max_sentences}: at least 1 each")
        self.root = None if root is None else Path(root).expanduser()
        self.cache_dir = Path(cache_dir).expanduser()
        self.bank, self.augment = features, augment
        self.languages = (source_language, target_language)
        self.target, self.seed = target, seed
        self.vocab_size, self.vocab_type = vocab_size, vocab_type
        self.ctc_vocab_size, self.ctc_vocab_type = ctc_vocab_size, ctc_vocab_type
        self.hard_vocab_limit = hard_vocab_limit
        self.max_frames, self.max_sentences = max_frames, max_sentences
        self.min_input_frames, self.max_input_frames = min_input_frames, max_input_frames
        self.max_target_tokens = max_target_tokens
        self.drop_empty = drop_empty
        self.num_workers = num_workers
        self.start_batch = 0
        self.filtered: dict[str, int] = {}
        self.is_sample = root is None
        self.corpus = ""
        self.tokenizer: Tokenizer
        self.ctc_tokenizer: Tokenizer | None = None
        self._segments: dict[str, list[Segment]] = {}
        self._splits: dict[str, Utterances] = {}

    def prepare_data(self) -> None:
        """Checks the whole corpus, then writes what is missing: sample corpus, vocabularies, features.

        Training computes the features of all splits, so that damaged test audio shows before it, not after it.
        """
        running = self.trainer.state.fn if self.trainer else None
        self.setup(running.value if running in ("validate", "test") else None)

    def setup(self, stage: str | None = None) -> None:
        self._read()
        wanted = {"fit": ("train", "dev"), "validate": ("dev",), "test": ("tst-COMMON",)}.get(stage or "", SPLITS)
        for split in wanted:
            self.split(split)

    def train_dataloader(self) -> DataLoader[Example]:
        data = self.split("train")
        if (longest := int(data.lengths.max())) > self.max_frames:
            raise ConfigError(
                f"task.data.max_frames={self.max_frames} is less than the longest utterance ({longest} frames): "
                f"raise it, or lower max_input_frames ({self.max_input_frames})"
            )
        epoch = self.trainer.current_epoch if self.trainer else 0
        data = replace(data, augment=self.augment, seed=self.seed, epoch=epoch)
        start, self.start_batch = self.start_batch, 0
        return self._loader(data, self.max_frames, shuffle=True, seed=self.seed, epoch=epoch, start=start)

    def val_dataloader(self) -> DataLoader[Example]:
        return self._loader(self.split("dev"), self.max_frames)

    def test_dataloader(self, split: str = "tst-COMMON", max_frames: int | None = None) -> DataLoader[Example]:
        """Longest first; `max_frames`: frames of a decoding batch, by default those of a training batch.

        The ranks share the split inside `trainer.test`; elsewhere the caller gets all of it.
        """
        shared = self.trainer is not None and self.trainer.testing
        return self._loader(self.split(split), max_frames or self.max_frames, shared)

    def split(self, name: str) -> Utterances:
        """The utterances of a split, read and prepared when first asked for."""
        if name not in self._splits:
            self._read()
            if name not in self._segments:
                self._segments[name] = self._read_split(name)
            self._splits[name] = self._prepare(name, self._segments[name])
        return self._splits[name]

    def _loader(self, data: Utterances, max_frames: int, shared: bool = True, **order: Any) -> DataLoader[Example]:
        trainer = self.trainer
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer and shared else (0, 1)
        return DataLoader(
            data,
            batch_sampler=FrameBatches(
                data.lengths, max_frames, self.max_sentences, rank=rank, world_size=world_size, **order
            ),
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
            generator=torch.Generator(),  # its own: making an iterator must not move the global one
        )

    def _read(self) -> None:
        """All texts, the headers of all recordings, the vocabularies."""
        if self._segments:
            return
        if self.root is None:
            from src.data.samples import write_speech_translation

            log.warning("NO data_root IS SET: this is the embedded SAMPLE corpus of synthetic speech, not MuST-C")
            self.root = write_speech_translation(self.cache_dir)
        segments = {name: self._read_split(name) for name in SPLITS}
        sizes = ", ".join(f"{name} {len(segments[name])}" for name in SPLITS)
        found = f"MuST-C {'-'.join(self.languages)} at {self.root}: {sizes} segments"
        log.info("corpus: %s", found)
        self.corpus = "sample" if self.is_sample else found
        train = segments["train"]
        self.tokenizer = self._vocabulary("", [self._text(x) for x in train], self.vocab_size, self.vocab_type)
        if self.ctc_vocab_size is not None:
            texts = [x.source for x in train]
            self.ctc_tokenizer = self._vocabulary("ctc_", texts, self.ctc_vocab_size, self.ctc_vocab_type)
        self._segments = segments

    def _vocabulary(self, prefix: str, texts: list[str], size: int, kind: Kind) -> Tokenizer:
        try:
            folder = self.cache_dir / "tokenizers"
            tokenizer = Tokenizer.cached(texts, folder, size, kind, hard_limit=self.hard_vocab_limit)
        except ConfigError as error:
            raise ConfigError(f"task.data.{prefix}{error}") from error
        if tokenizer.size < size:
            log.info("%svocab_size: %d pieces, all that this text allows", prefix, tokenizer.size)
        return tokenizer

    def _read_split(self, name: str) -> list[Segment]:
        assert self.root is not None
        check_layout(self.root, SPLITS if name in SPLITS else (name,), *self.languages)
        text = "target" if self.target == "translation" else "source"
        segments = read_split(self.root, name, *self.languages, required=None if self.drop_empty else text)
        kept = [x for x in segments if self._text(x)]
        if len(kept) < len(segments):
            log.warning("%s: %d of %d segments left out: no text", name, len(segments) - len(kept), len(segments))
            self.filtered[f"no text in {name}"] = len(segments) - len(kept)
        if not kept:
            raise DataError(f"{self.root}: no segment of {name} has text")
        return kept

    def _text(self, segment: Segment) -> str:
        return segment.target if self.target == "translation" else segment.source

    def _prepare(self, name: str, segments: list[Segment]) -> Utterances:
        features = open_features(self.cache_dir, name, segments, self.bank)
        texts = [self._text(x) for x in segments]
        targets = [np.asarray([*x, Tokenizer.eos], dtype=np.int64) for x in self.tokenizer.encode_all(texts)]
        ctc = None
        if self.ctc_tokenizer is not None:
            labels = self.ctc_tokenizer.encode_all([x.source for x in segments])
            ctc = [np.asarray(x, dtype=np.int64) for x in labels]
        chosen = np.arange(len(segments))
        if name == "train":
            chosen = self._filter(features.lengths, np.asarray([len(x) for x in targets]))
        return Utterances(segments, features, targets, ctc, texts, chosen)

    def _filter(self, frames: Ids, tokens: Ids) -> Ids:
        out = {
            f"fewer than {self.min_input_frames} frames": frames < self.min_input_frames,
            f"more than {self.max_input_frames} frames": frames > self.max_input_frames,
            f"more than {self.max_target_tokens} target tokens": tokens > self.max_target_tokens,
        }
        for reason, mask in out.items():
            self.filtered[reason] = int(mask.sum())
            if mask.any():
                log.info("train: %d of %d utterances left out: %s", mask.sum(), len(frames), reason)
        kept: Ids = np.flatnonzero(~np.logical_or.reduce(list(out.values())))
        if not len(kept):
            raise DataError(f"{self.root}: the length filters leave nothing of train ({self.filtered})")
        return kept
