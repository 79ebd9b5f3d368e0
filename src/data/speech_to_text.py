"""Speech with its transcript and translation, ready for training: corpus, features, pieces, batches."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from src.data.batch import Example, Ids, collate
from src.data.batching import FrameBatches
from src.data.cache import FeatureStore, open_features
from src.data.features import FilterBank, SpecAugment
from src.data.mustc import Segment, check_layout, read_split
from src.data.tokenizer import Tokenizer
from src.errors import ConfigError

log = logging.getLogger(__name__)

SPLITS = ("train", "dev", "tst-COMMON")


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


class SpeechToTextData(LightningDataModule):
    """A corpus in MuST-C's layout, or the embedded sample corpus where `root` is None.

    target: "translation" or "transcript" (recognition: the decoder's text is the transcript).
    max_frames: feature frames of a batch, padding included; max_sentences: a second bound, or None.
    min_input_frames, max_input_frames, max_target_tokens (</s> counted): training leaves other utterances out and
    counts them in `filtered`; evaluation leaves out nothing.
    ctc_vocab_size: pieces of the transcript as CTC labels, or None.

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
        target: str = "translation",
        seed: int = 1,
        vocab_size: int = 8000,
        vocab_type: str = "unigram",
        ctc_vocab_size: int | None = None,
        ctc_vocab_type: str = "unigram",
        max_frames: int = 40000,
        max_sentences: int | None = None,
        min_input_frames: int = 5,
        max_input_frames: int = 3000,
        max_target_tokens: int = 1024,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if target not in ("translation", "transcript"):
            raise ConfigError(f"task.target={target}: it is translation or transcript")
        self._root = root
        self.cache_dir = Path(cache_dir).expanduser()
        self.bank, self.augment = features, augment
        self.languages = (source_language, target_language)
        self.target, self.seed = target, seed
        self._vocabularies = ((vocab_size, vocab_type), (ctc_vocab_size, ctc_vocab_type))
        self.max_frames, self.max_sentences = max_frames, max_sentences
        self.min_input_frames, self.max_input_frames = min_input_frames, max_input_frames
        self.max_target_tokens = max_target_tokens
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
        """Checks the whole corpus, then writes what is missing: sample corpus, vocabularies, features."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        self._read()
        wanted = {"fit": ("train", "dev"), "validate": ("dev",), "test": ("tst-COMMON",)}.get(stage or "", SPLITS)
        for split in wanted:
            self._split(split)

    def train_dataloader(self) -> DataLoader[Example]:
        trainer = self.trainer
        epoch = trainer.current_epoch if trainer else 0
        data = self._split("train")
        data = Utterances(**{**vars(data), "augment": self.augment, "seed": self.seed, "epoch": epoch})
        start, self.start_batch = self.start_batch, 0
        return self._loader(data, self.max_frames, shuffle=True, seed=self.seed, epoch=epoch, start=start)

    def val_dataloader(self) -> DataLoader[Example]:
        return self._loader(self._split("dev"), self.max_frames)

    def test_dataloader(self, split: str = "tst-COMMON", max_frames: int | None = None) -> DataLoader[Example]:
        """Longest first; `max_frames`: frames of a decoding batch, by default those of a training batch."""
        return self._loader(self._split(split), max_frames or self.max_frames)

    def _loader(self, data: Utterances, max_frames: int, **order: Any) -> DataLoader[Example]:
        trainer = self.trainer
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        batches = FrameBatches(data.lengths, max_frames, self.max_sentences, rank=rank, world_size=world_size, **order)
        return DataLoader(
            data,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def _read(self) -> None:
        if self._segments:
            return
        if self._root is None:
            from src.data.samples import write_speech_translation

            log.warning("NO data_root: using the embedded SAMPLE corpus (synthetic speech), not MuST-C")
            root = write_speech_translation(self.cache_dir)
        else:
            root = Path(self._root).expanduser()
        check_layout(root, SPLITS, *self.languages)
        self._corpus_root = root
        for split in SPLITS:
            self._segments[split] = self._read_split(split)
        if self.is_sample:
            self.corpus = "sample"
        else:
            sizes = ", ".join(f"{split} {len(self._segments[split])}" for split in SPLITS)
            self.corpus = f"MuST-C {'-'.join(self.languages)} at {root}: {sizes} segments"
        log.info("corpus: %s", self.corpus)
        train = self._segments["train"]
        (size, kind), (ctc_size, ctc_kind) = self._vocabularies
        self.tokenizer = self._vocabulary([self._text(x) for x in train], size, kind)
        if ctc_size is not None:
            self.ctc_tokenizer = self._vocabulary([x.source for x in train], ctc_size, ctc_kind)

    def _read_split(self, split: str) -> list[Segment]:
        required = "target" if self.target == "translation" else "source"
        return read_split(self._corpus_root, split, *self.languages, required)

    def _text(self, segment: Segment) -> str:
        return segment.target if self.target == "translation" else segment.source

    def _vocabulary(self, lines: list[str], size: int, kind: str) -> Tokenizer:
        settings = [sentencepiece.__version__, size, kind]
        key = hashlib.sha256("\n".join([json.dumps(settings), *lines]).encode()).hexdigest()
        prefix = self.cache_dir / "tokenizers" / f"{kind}{size}-{key[:24]}"
        path = Path(f"{prefix}.model")
        return Tokenizer.load(path) if path.exists() else Tokenizer.train(lines, prefix, size, kind)

    def _split(self, split: str) -> Utterances:
        if split in self._splits:
            return self._splits[split]
        self._read()
        if split not in self._segments:
            check_layout(self._corpus_root, [split], *self.languages)
            self._segments[split] = self._read_split(split)
        segments = self._segments[split]
        features = open_features(self.cache_dir, split, segments, self.bank)
        texts = [self._text(x) for x in segments]
        targets = [np.asarray([*x, Tokenizer.eos], dtype=np.int64) for x in self.tokenizer.encode_all(texts)]
        ctc = None
        if self.ctc_tokenizer is not None:
            ctc = [np.asarray(x, dtype=np.int64) for x in self.ctc_tokenizer.encode_all([x.source for x in segments])]
        chosen = np.arange(len(segments))
        if split == "train":
            chosen = self._filter(features.lengths, np.asarray([len(x) for x in targets]))
        self._splits[split] = Utterances(segments, features, targets, ctc, texts, chosen)
        return self._splits[split]

    def _filter(self, frames: Ids, tokens: Ids) -> Ids:
        out = {
            f"fewer than {self.min_input_frames} frames": frames < self.min_input_frames,
            f"more than {self.max_input_frames} frames": frames > self.max_input_frames,
            f"more than {self.max_target_tokens} target tokens": tokens > self.max_target_tokens,
        }
        self.filtered = {reason: int(mask.sum()) for reason, mask in out.items()}
        for reason, count in self.filtered.items():
            if count:
                log.info("train: %d of %d utterances left out: %s", count, len(frames), reason)
        kept: Ids = np.flatnonzero(~np.logical_or.reduce(list(out.values())))
        return kept
