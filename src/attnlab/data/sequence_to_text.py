"""A corpus ready for training: inputs of any front end, pieces, batches."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, cast

import numpy as np
from annotated_types import Ge, Le
from torch.utils.data import Dataset

from attnlab.config.batch import FrameShare, share_frames
from attnlab.config.bounds import Size, SizeOrZero
from attnlab.data.base import Data, EpochBatches, Loader, Workers
from attnlab.data.batch import Example, Ids, collate
from attnlab.data.corpus import (
    OTHER_LENGTH,
    Reader,
    Segment,
    Utterance,
    at_speed,
    refuse_empty,
    repeated,
    statistics,
)
from attnlab.data.report import FILES, Report, left_out, noted
from attnlab.data.speech.features import Array, FeatureStore, FilterBank, SpecAugment
from attnlab.data.speech.stored import StoredFeatures, StoredInputs
from attnlab.data.text.tokenizer import Kind, Normalisation, SourceText, TextInputs, Tokenizer
from attnlab.errors import ConfigError, DataError
from attnlab.run.record import embedded

log = logging.getLogger(__name__)

LAYOUT = "attnlab.data.corpus.check_layout"  # checks the files of data_root without torch
# Training sorts by length times a random factor up to this: buckets differ from epoch to epoch, padding stays small.
LENGTH_JITTER = 1.1

Inputs = FeatureStore | StoredInputs | TextInputs  # the model's input of each utterance, and their `lengths`
FRONT_ENDS = {"audio": FilterBank, "stored": StoredFeatures, "text": SourceText}


@dataclass
class Examples(Dataset[Example]):
    """The utterances `chosen` of a split.  With `augment`, masks depend on (seed, epoch, place in the split) alone.

    A negative index is a filler (see :func:`filler`).

    Args:
        utterances, inputs, targets: of the complete split; targets end in </s>.
        sizes: (utterances,), lengths by which batches are formed: of the input, or of a longer target of text.
        chosen: numbers of the utterances that are used, in the order of the indices.
    """

    utterances: Sequence[Utterance]
    inputs: Inputs
    targets: Sequence[Ids]
    ctc_targets: Sequence[Ids] | None
    sizes: Ids
    chosen: Ids
    augment: SpecAugment | None = None
    seed: int = 1
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        i = int(self.chosen[filler(index) if index < 0 else index])
        features = self.inputs[i]
        if self.augment is not None:
            features = self.augment(cast(Array, features), np.random.default_rng([self.seed, self.epoch, i]))
        ctc = None if self.ctc_targets is None else self.ctc_targets[i]
        return Example(self.utterances[i], features, self.targets[i], ctc, index < 0)

    @property
    def lengths(self) -> Ids:
        return self.sizes[self.chosen]


@dataclass(eq=False, repr=False)
class SequenceToTextData(Data):
    """A corpus that `reader` understands, at `root`, or the reader's embedded sample corpus where that is None.

    Everything written lies under `cache_dir`.  Order and masks of an epoch are pure functions of (seed, epoch); what an
    update sees does not depend on the number of processes.  The trainer needs `reload_dataloaders_every_n_epochs=1`
    and `use_distributed_sampler=False`.

    Args:
        features: the front end: FilterBank (recordings), StoredFeatures (files of features) or SourceText.
        vocab_size: pieces of the decoder, specials and classes included; of source and target together for text.
        ctc_vocab_size: pieces of the transcript as CTC labels; "shared": CTC's labels are the decoder's targets without
            </s>, as joint decoding needs; None: no labels.
        normalisation: of texts before they are split into pieces, see :meth:`Tokenizer.train`.
        hard_vocab_limit: refuse a text that allows fewer pieces; False: take as many as the text allows.
        update_frames: input frames or pieces of an update, padding included, on all processes together; a multiple of
            `bucket_frames`.
        bucket_frames: frames of a group of sentences of similar length, padding included; None: `update_frames`.
        split_buckets: whether a bucket may be divided into several batches.  BatchNorm needs False: its statistics are
            then those of a bucket, on any number of processes.
        max_frames: the largest number of frames in a batch of one process, padding included; None: `bucket_frames`.
        min_input_frames, max_input_frames, max_target_tokens: training leaves other utterances out and counts them in
            `report`; </s> counts as a token.  Evaluation leaves out nothing.
        drop_empty: leave out utterances without text rather than refuse the corpus.
        strict: refuse recordings of another length than their file says, which are otherwise reported and read.
        unknown_labels: accept classes in validation and test that training lacks, as errors.
        speeds: training reads each recording once at each of these speeds.

    Raises:
        ConfigError: settings that do not fit, before any feature is computed.
        DataError: the corpus, before any feature is computed.
    """

    root: str | None
    cache_dir: str
    reader: Reader
    features: FilterBank | StoredFeatures | SourceText
    augment: SpecAugment | None = None
    seed: int = 1
    vocab_size: Annotated[int, Ge(5), Le(1_048_576)] = 8000
    vocab_type: Kind = "unigram"
    ctc_vocab_size: Annotated[int, Ge(5), Le(1_048_576)] | Literal["shared"] | None = None
    ctc_vocab_type: Kind = "unigram"
    normalisation: Normalisation = "nmt_nfkc"
    hard_vocab_limit: bool = True
    update_frames: Annotated[int, Ge(1)] = 40000
    bucket_frames: Annotated[int, Ge(1)] | None = None
    split_buckets: bool = True
    max_frames: Annotated[int, Ge(1)] | None = None
    max_sentences: Annotated[int, Ge(1)] | None = None
    min_input_frames: SizeOrZero = 5
    max_input_frames: Size = 3000
    max_target_tokens: Size = 1024
    drop_empty: bool = False
    strict: bool = False
    unknown_labels: bool = False
    speeds: list[Annotated[float, Ge(0.1), Le(10)]] | None = None
    num_workers: Workers = None

    def __post_init__(self) -> None:
        super().__init__()
        kind, kinds = self.features.kind, self.reader.kinds
        if kind not in kinds:
            names = " or ".join(f"attnlab.data.{FRONT_ENDS[kind].__name__}" for kind in kinds)
            raise ConfigError(f"task.data.features: {self.reader.name} gives no {kind} inputs; use {names}")
        if kind == "text" and (self.augment is not None or self.ctc_vocab_size is not None):
            raise ConfigError("task.data: text has neither augment nor ctc_vocab_size; set both to null")
        if kind != "audio" and self.speeds not in (None, [1.0]):
            raise ConfigError(f"task.data.speeds: only recordings can be played faster, not {kind} inputs")
        self.cache = Path(self.cache_dir).expanduser()
        self.bucket: int = self.bucket_frames or self.update_frames
        self.largest: int = self.max_frames or self.bucket
        self.report, self.corpus, self.is_sample = Report(), "", self.root is None
        self.test_max_frames: int | None = None  # set by the task that decodes
        self.longest_target: int | None = None  # pieces of a training text; set by the task: that of a run
        self.tokenizer: Tokenizer
        self.run_vocabularies: dict[str, Tokenizer] = {}  # set by the task: those of a run, not learned again
        self.ctc_tokenizer: Tokenizer | None = None
        self._utterances: dict[str, list[Utterance]] = {}
        self._splits: dict[str, Examples] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read the corpus, and compute the features of the splits of a stage; None: of all."""
        train, dev, test = self.reader.splits
        for name in {"fit": (train, dev), "validate": (dev,), "test": (test,)}.get(stage or "", (train, dev, test)):
            self.split(name)

    def share(self, processes: int) -> FrameShare:
        longest = self.max_input_frames
        if self.features.kind == "text":  # which is batched by the longer of source and target
            longest = max(longest, self.max_target_tokens)
        return share_frames(self.update_frames, self.bucket, self.largest, longest, processes, self.split_buckets)

    def held_out_sizes(self, stage: str | None) -> dict[str, int]:
        splits = self.reader.splits[1:]
        chosen = {"validate": splits[:1], "test": splits[1:]}.get(stage or "", splits)
        return {name: len(self.split(name)) for name in chosen}

    def same_batches(self, processes: int) -> bool:
        return not self.split_buckets

    def divides_batches(self, processes: int) -> bool:
        return not self.split_buckets and self.share(processes).parts > 1

    def train_dataloader(self) -> Loader[Example]:
        data = self.split(self.reader.splits[0])
        longest = int(data.lengths.max())
        for key, most in (("train.batch.bucket", self.bucket), ("data.max_frames", self.largest)):
            if longest > most:
                frames = f"the longest utterance has {longest} frames"
                raise ConfigError(f"task.{key}={most}: {frames}; raise it, or lower task.data.max_input_frames")
        order = self.order()
        data = replace(data, augment=self.augment, seed=self.seed, epoch=order["epoch"])
        share = self.share(order["world_size"])
        batches = FrameUpdates(data.lengths, self.bucket, share, self.max_sentences, **order)
        return self.loader(data, batches, collate)

    def val_dataloader(self) -> Loader[Example]:
        return self._held_out(self.reader.splits[1], self.largest)

    def test_dataloader(self) -> Loader[Example]:
        """The test split, the longest first; inside `trainer.test` the processes share it."""
        return self._held_out(self.reader.splits[2], self.test_max_frames or self.largest, self.testing)

    def texts(self, name: str) -> list[str]:
        """The targets of a split, without its inputs."""
        if not self._utterances:
            self._read()
        return [x.target for x in self._utterances[name]]

    def split(self, name: str) -> Examples:
        """The utterances of a split, read and prepared at the first call."""
        if not self._utterances:
            self._read()
        if name not in self._splits:
            with self.report.of(name) as size:
                self._splits[name] = self._prepare(name, self._utterances[name])
                size.used, size.unit = len(self._splits[name]), self.reader.unit
        return self._splits[name]

    @property
    def held_out(self) -> dict[str, Examples]:
        """The held-out splits that are prepared."""
        return {name: self._splits[name] for name in self.reader.splits[1:] if name in self._splits}

    def _held_out(self, split: str, max_frames: int, shared: bool = True) -> Loader[Example]:
        data = self.split(split)
        batches = frame_batches(data.lengths, max_frames, self.max_sentences, **self.ranks(shared))
        return self.loader(data, batches, collate)

    def _read(self) -> None:
        """All texts, the headers of all recordings, the vocabularies."""
        utterances = self._read_texts()
        train, *others = (utterances[name] for name in self.reader.splits)
        labels = sorted({x.label for x in train if x.label})
        self._check_labels(others, set(labels))
        texts = [x.target for x in train if x.target] or labels
        if self.features.kind == "text":
            texts += [x.source for x in train]
        self.tokenizer = self._vocabulary("", texts, self.vocab_size, self.vocab_type, labels)
        if self.ctc_vocab_size == "shared":
            self.ctc_tokenizer = self.tokenizer
        elif self.ctc_vocab_size is not None:
            texts = [x.source for x in train]
            self.ctc_tokenizer = self._vocabulary("ctc_", texts, self.ctc_vocab_size, self.ctc_vocab_type, [])
        self._utterances = utterances

    def _read_texts(self) -> dict[str, list[Utterance]]:
        """The utterances of each split: all texts, the headers of all recordings."""
        reader, kind = self.reader, self.features.kind
        if self.root is None:
            if kind == "stored":
                raise ConfigError("data_root=null: the sample corpora have no stored features; set data_root")
            log.warning("NO data_root IS SET: this is the %s", embedded(reader.name))
            self.location = reader.sample(self.cache)
        else:
            self.location = Path(self.root).expanduser()
            with self.report.of(FILES):
                reader.check(self.location, reader.splits, kind)
            self.report.splits[FILES].noted.clear()  # of rows, which are read again
        utterances = {name: self._read_split(name, self.location) for name in reader.splits}
        sizes = ", ".join(f"{name} {len(utterances[name])}" for name in reader.splits)
        text = f"{reader.name} at {self.location}: {sizes} {reader.unit}"
        log.info("corpus: %s", text)
        self.corpus = embedded(reader.name) if self.is_sample else text
        return utterances

    def statistics(self) -> dict[str, dict[str, float]]:
        """The size of each split as it is read, see :func:`attnlab.data.corpus.statistics`."""
        return {name: statistics(utterances) for name, utterances in self._read_texts().items()}

    def _check_labels(self, others: Sequence[list[Utterance]], known: set[str]) -> None:
        for name, utterances in zip(self.reader.splits[1:], others, strict=True):
            unknown = [x for x in utterances if x.label and x.label not in known]
            if unknown and not self.unknown_labels:
                first = f"{unknown[0].id} of {name} has the class {unknown[0].label!r}, which training lacks"
                raise DataError(
                    f"{self.location}: {first}; task.data.unknown_labels=true counts such classes as errors"
                )
            if unknown:
                with self.report.of(name):
                    noted("class that training lacks, an error", unknown[0].id, len(unknown))

    def _vocabulary(self, prefix: str, texts: list[str], size: int, kind: Kind, labels: Sequence[str]) -> Tokenizer:
        if prefix in self.run_vocabularies:
            return self.run_vocabularies[prefix]
        try:
            folder, more = self.cache / "tokenizers", (self.hard_vocab_limit, self.normalisation)
            return Tokenizer.cached(texts, folder, size, kind, labels, *more)
        except ConfigError as error:
            raise ConfigError(f"task.data.{prefix}{error}") from error

    def _read_split(self, name: str, root: Path) -> list[Utterance]:
        with self.report.of(name) as size:
            utterances = self.reader.read(root, name, self.features.kind, self.drop_empty)
            if self.strict and (note := size.noted.get(OTHER_LENGTH)):
                raise DataError(f"{note.example} ({note.count} of {name}); task.data.strict=false reads what there is")
            usable = [x for x in utterances if self._has_text(x)]
            if len(usable) < len(utterances):
                first = next(x.id for x in utterances if not self._has_text(x))
                refuse_empty([f"{root}: {first} of {name}"], self.drop_empty)  # where a reader's own rule is weaker
                left_out("empty text", first, len(utterances) - len(usable))
            size.used, size.unit = len(usable), self.reader.unit
        if not usable:
            raise DataError(f"{root}: nothing in {name} has text")
        if (id := repeated(x.id for x in usable)) is not None:
            raise DataError(f"{root}: {name} has the id {id} twice")
        return usable

    def _has_text(self, utterance: Utterance) -> bool:
        """Whether an utterance has a target, and of text a source."""
        return bool((utterance.target or utterance.label) and (utterance.source or self.features.kind != "text"))

    def _prepare(self, name: str, utterances: list[Utterance]) -> Examples:
        training = name == self.reader.splits[0]
        if training and self.speeds:
            utterances = [at_speed(cast(Segment, x), speed) for speed in self.speeds for x in utterances]
        inputs: Inputs = self.features.open(utterances, self.cache / "features" / name, self.tokenizer)  # type: ignore[arg-type]
        if isinstance(inputs, TextInputs) and inputs.truncated:
            noted(f"cut to {inputs.max_tokens} source pieces", count=inputs.truncated)
        targets = [
            np.asarray([*([self.tokenizer.label(x.label)] if x.label else []), *ids, Tokenizer.eos], dtype=np.int64)
            for x, ids in zip(utterances, self.tokenizer.encode_all([x.target for x in utterances]), strict=True)
        ]
        ctc = [x[:-1] for x in targets] if self.ctc_vocab_size == "shared" else None
        if ctc is None and self.ctc_tokenizer is not None:
            labels = self.ctc_tokenizer.encode_all([x.source for x in utterances])
            ctc = [np.asarray(x, dtype=np.int64) for x in labels]
        tokens = np.asarray([len(x) for x in targets])
        sizes = np.maximum(inputs.lengths, tokens) if self.features.kind == "text" else inputs.lengths
        chosen = self._filter(utterances, inputs.lengths, tokens) if training else np.arange(len(utterances))
        if training:
            self.longest_target = int(tokens[chosen].max()) - 1
        for side, lengths in (("source", inputs.lengths), ("target", tokens)):
            if self.features.kind == "text" and (blank := np.flatnonzero(lengths < 2)).size:
                noted(f"{side} in which the vocabulary sees nothing", utterances[blank[0]].id, len(blank))
        return Examples(utterances, inputs, targets, ctc, sizes, chosen)

    def _filter(self, utterances: Sequence[Utterance], lengths: Ids, tokens: Ids) -> Ids:
        """The numbers of the training utterances within the limits of length."""
        unit = "source pieces" if self.features.kind == "text" else "frames"
        reasons = {
            f"fewer than {self.min_input_frames} {unit}": lengths < self.min_input_frames,
            f"more than {self.max_input_frames} {unit}": lengths > self.max_input_frames,
            f"more than {self.max_target_tokens} target pieces": tokens > self.max_target_tokens,
        }
        chosen = np.ones(len(lengths), dtype=bool)
        for reason, matches in reasons.items():  # of several reasons the first counts
            if len(places := np.flatnonzero(chosen & matches)):
                left_out(reason, utterances[places[0]].id, len(places))
            chosen &= ~matches
        if not chosen.any():
            counts = ", ".join(f"{reason}: {int(matches.sum())}" for reason, matches in reasons.items())
            keys = "task.data.min_input_frames, max_input_frames and max_target_tokens"
            raise DataError(f"{self.location}: {keys} leave nothing of the training split ({counts})")
        return np.flatnonzero(chosen)


# --- batches of sentences of similar length ---


class FrameUpdates(EpochBatches):
    """Batches of sentences of similar length.

    An update's sentences are chosen first, from lengths, seed and epoch alone: sentences of similar length form buckets
    of at most `bucket` frames, the buckets are put into random order, and each `share.buckets` of them are an update.
    Then each bucket is divided into `share.parts` batches, which are dealt out to the processes.

    Every update has `share.accumulate` batches on every process, the last one of an epoch too.  A process without
    enough sentences gets fillers: :func:`filler` of an index, whose loss must not count.

    Args:
        lengths: frames of each sentence, (n,) int64.
        bucket: frames of a bucket, padding included (the longest length times the number of sentences).  A longer
            sentence is a bucket alone.
        max_sentences: the largest number of sentences in a bucket; None: no limit.
        place: arguments of :class:`EpochBatches`.
    """

    def __init__(
        self,
        lengths: Ids,
        bucket: int,
        share: FrameShare,
        max_sentences: int | None = None,
        *,
        seed: int = 1,
        epoch: int = 0,
        **place: int,
    ) -> None:
        random = np.random.default_rng([seed, epoch])
        order = np.argsort(-lengths * random.uniform(1.0, LENGTH_JITTER, len(lengths)), kind="stable")
        buckets = _cut(lengths, order, bucket, max_sentences)
        buckets = [buckets[i] for i in random.permutation(len(buckets))]
        self._buckets = [buckets[i : i + share.buckets] for i in range(0, len(buckets), share.buckets)]
        self._parts = share.parts
        super().__init__(len(self._buckets), share.accumulate, **place)

    def batch(self, update: int, part: int) -> list[int]:
        """A process has a contiguous run of an update's batches, so that BatchNorm's order is that of the ranks."""
        buckets = self._buckets[update]
        batches = [batch for bucket in buckets for k in range(self._parts) if (batch := bucket[k :: self._parts])]
        count, more = divmod(len(batches), self.world_size)
        first, place = self.rank * count + min(self.rank, more), part // self.world_size
        return batches[first + place] if place < count + (self.rank < more) else [filler(buckets[0][0])]


def filler(index: int) -> int:
    """The negative index of a filler; of a filler's index, the item's index."""
    return -1 - index


def frame_batches(
    lengths: Ids, max_frames: int, max_sentences: int | None = None, *, rank: int = 0, world_size: int = 1
) -> list[list[int]]:
    """A process's batches of a held-out split: every sentence exactly once over all processes, the longest first.

    The arguments are those of :class:`FrameUpdates`, with `max_frames` for `bucket`.  Each process has a batch if the
    sentences suffice.
    """
    if world_size > 1:  # enough batches for every process
        share = max(1, len(lengths) // world_size)
        max_sentences = min(max_sentences or share, share)
    order = np.argsort(-lengths, kind="stable")
    return _cut(lengths, order, max_frames, max_sentences)[rank::world_size]


def _cut(sizes: Ids, order: Ids, max_frames: int, max_sentences: int | None) -> list[list[int]]:
    batches: list[list[int]] = []
    current: list[int] = []
    longest = 0
    for i in order.tolist():
        grown = max(longest, int(sizes[i]))
        if current and (grown * (len(current) + 1) > max_frames or len(current) == max_sentences):
            batches.append(current)
            current, grown = [], int(sizes[i])
        current.append(i)
        longest = grown
    if current:
        batches.append(current)
    return batches
