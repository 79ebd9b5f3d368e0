"""Subword pieces by SentencePiece, and text as input: pieces of the vocabulary that source and target share."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import sentencepiece
from annotated_types import Ge, Le

from attnlab.data.corpus import Kind as InputKind
from attnlab.data.corpus import Utterance, reading
from attnlab.errors import ConfigError
from attnlab.run.cache import stored_files
from attnlab.run.console import progress, waited
from attnlab.run.files import write_bytes

Kind = Literal["unigram", "bpe", "char"]
Normalisation = Literal["nmt_nfkc", "nfkc", "identity"]

BLOCK = 10_000  # texts that are encoded together
LONG = 4192  # bytes; SentencePiece learns nothing from longer texts unless it is told to
RESERVED = str.maketrans("\0\u2585", "  ")  # nor from texts with one of these characters, which become <unk>
Ids = npt.NDArray[np.int64]
VOCABULARY = "vocabulary"  # the file in a stored folder


class Tokenizer:
    """Text to piece ids and back.  Ids 0 to 3 are <s> (the blank of CTC), <pad>, </s>, <unk>: fairseq's order.

    Args:
        model: the bytes of a SentencePiece model.

    Attributes:
        size: the number of pieces, the four specials included.
        fingerprint: SHA-256 of the model.
        labels: ids of the classes, which are pieces that do not occur in texts.
    """

    bos, pad, eos, unk = 0, 1, 2, 3

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.model = model
        self.size: int = self._processor.get_piece_size()
        self.fingerprint = hashlib.sha256(model).hexdigest()
        ids = range(self.unk + 1, self.size)
        self.labels: dict[str, int] = {self.piece(i): i for i in ids if self._processor.is_control(i)}

    def label(self, name: str) -> int:
        """The id of a class; <unk> for a class that training does not have."""
        return self.labels.get(name, self.unk)

    def label_of(self, ids: Sequence[int]) -> str:
        """The class at the beginning of a text, or an empty text."""
        return self.piece(ids[0]) if len(ids) and ids[0] in self.labels.values() else ""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without <s> and </s>."""
        ids: list[list[int]] = []
        with progress("encoding texts", len(texts)) as advance:
            for first in range(0, len(texts), BLOCK):
                some = list(texts[first : first + BLOCK])
                ids += self._processor.encode(some, num_threads=os.cpu_count() or 1)
                advance(len(some))
        return ids

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of `ids`, without <s>, <pad> and </s>."""
        return self.decode_all([ids])[0]

    def decode_all(self, texts: Sequence[Sequence[int] | Ids]) -> list[str]:
        """The text of each of several, without <s>, <pad> and </s>."""
        decoded: list[str] = self._processor.decode([[int(i) for i in ids if int(i) > self.eos] for ids in texts])
        return decoded

    def piece(self, id: int) -> str:
        """The text of one piece."""
        return self._processor.id_to_piece(id)

    def save(self, path: Path) -> None:
        """Write the SentencePiece model (atomically)."""
        write_bytes(path, self.model)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a model.  Raises DataError where `path` is not a SentencePiece model."""
        with reading(path, "a SentencePiece model"):
            model = path.read_bytes()
            if not model:  # the library takes it for a vocabulary of no pieces
                raise ValueError("the file is empty")
            return cls(model)

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        vocab_size: int,
        type: Kind = "unigram",
        *,
        labels: Sequence[str] = (),
        hard_limit: bool = True,
        normalisation: Normalisation = "nmt_nfkc",
    ) -> "Tokenizer":
        """Train a model.  The same lines give the same pieces.  A line may have any length.

        Args:
            vocab_size: the number of pieces, specials and `labels` included.
            labels: the names of classes, which become pieces that do not occur in texts.
            hard_limit: refuse a text that allows fewer pieces; False: take as many as it allows.
            normalisation: of texts before they are split. nfkc: that of Unicode; nmt_nfkc: that of SentencePiece, which
                also changes joiners and control characters; identity: none, and texts come back as they are.

        Raises:
            ConfigError: the text does not allow this size.
        """
        model = io.BytesIO()
        texts = [line.translate(RESERVED) for line in lines]

        def learn() -> None:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                max_sentence_length=max([LONG, *(len(text.encode()) for text in texts)]),
                normalization_rule_name=normalisation,
                model_writer=model,
                vocab_size=vocab_size,
                model_type=type,
                hard_vocab_limit=hard_limit,
                character_coverage=1.0,
                control_symbols=list(labels),
                bos_id=cls.bos,
                pad_id=cls.pad,
                eos_id=cls.eos,
                unk_id=cls.unk,
                num_threads=4,  # fixed: another order of summation gives other pieces
                minloglevel=2,
            )

        try:
            waited("learning the pieces of the vocabulary", learn)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].rpartition("] ")[2]  # after the place in SentencePiece's code
            if "sentences_" in reason or "all_chars_count" in reason:
                reason = f"the texts have no letters that task.data.normalisation={normalisation} leaves"
            raise ConfigError(f"vocab_size={vocab_size}: {reason}") from error
        tokenizer = cls(model.getvalue())
        if hard_limit and tokenizer.size != vocab_size:  # with type="char" SentencePiece raises no error
            raise ConfigError(f"vocab_size={vocab_size}: the text has {tokenizer.size} characters and specials")
        return tokenizer

    @classmethod
    def cached(
        cls,
        lines: Sequence[str],
        folder: Path,
        vocab_size: int,
        type: Kind,
        labels: Sequence[str],
        hard_limit: bool,
        normalisation: Normalisation = "nmt_nfkc",
    ) -> "Tokenizer":
        """As :meth:`train`, once for the same `lines` and settings; the model is stored in `folder`."""
        more: list[Any] = [list(labels)] if labels else []
        more += [normalisation] if normalisation != "nmt_nfkc" else []
        # Of these texts earlier versions learned another vocabulary.
        more += ["all"] * any(len(x.encode()) > LONG or x != x.translate(RESERVED) for x in lines)
        settings = json.dumps([sentencepiece.__version__, vocab_size, type, hard_limit, *more])
        key = hashlib.sha256("\n".join([settings, *lines]).encode()).hexdigest()

        def learn(path: Path) -> None:
            cls.train(lines, vocab_size, type, labels=labels, hard_limit=hard_limit, normalisation=normalisation).save(
                path
            )

        return cls(learned(folder / f"{type}{vocab_size}-{key[:24]}", learn).read_bytes())


def learned(folder: Path, learn: Callable[[Path], None]) -> Path:
    """The file of a learned vocabulary in its stored folder; `learn` writes it."""
    return stored_files(folder, lambda partial: learn(partial / VOCABULARY)) / VOCABULARY


@dataclass(frozen=True)
class SourceText:
    """The source text as piece ids that end in </s>.

    Args:
        max_tokens: the largest number of ids.  A longer text is cut to its first `max_tokens` - 1 pieces and </s>.
    """

    max_tokens: Annotated[int, Ge(2), Le(1_048_576)] = 1024

    kind: ClassVar[InputKind] = "text"

    def open(self, utterances: Sequence[Utterance], _: Path, tokenizer: Tokenizer) -> "TextInputs":
        """The ids of the source texts."""
        return self.texts([x.source for x in utterances], tokenizer)

    def texts(self, texts: Sequence[str], tokenizer: Tokenizer) -> "TextInputs":
        return TextInputs(tokenizer.encode_all(texts), self.max_tokens)


class TextInputs:
    """(T,) int64 ids of each text.

    Args:
        pieces: the ids of each text, without </s>.

    Attributes:
        truncated: the number of texts that were cut.
        lengths: (n,) int64, the number of ids of each text.
    """

    def __init__(self, pieces: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._ids = [np.asarray([*x[: max_tokens - 1], Tokenizer.eos], dtype=np.int64) for x in pieces]
        self.max_tokens = max_tokens
        self.truncated = sum(len(x) > max_tokens - 1 for x in pieces)
        self.lengths = np.asarray([len(x) for x in self._ids], dtype=np.int64)

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        return self._ids[i]
