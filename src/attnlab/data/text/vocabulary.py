"""Text to token ids and back, by words or by byte pairs."""

import base64
import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from attnlab.config.rules import SAMPLE
from attnlab.data.corpus import read_lines, reading, repeated
from attnlab.data.text.corpora import Split, TextCorpus
from attnlab.data.text.tokenizer import learned
from attnlab.errors import ConfigError, DataError
from attnlab.run.cache import digest, file_digests
from attnlab.run.console import each, waited
from attnlab.run.files import write_bytes, write_text

log = logging.getLogger(__name__)

Ends = Literal["after", "before", "around"]  # the place of the mark that separates texts

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = re.compile(r"(additional_chat_templates/)?\w[\w.-]*\.(json|txt|model|jinja)")


class Vocabulary(ABC):
    """Text to token ids and back.

    Attributes:
        size: the number of ids in the model's table.
        num_ids: the number of ids that occur in texts; the others are padding.
        end: the id of the mark between texts.
        ends: the place of that mark.
        unknown_id: of words that are not in the vocabulary; None: they are an error.
        before: ids that the tokenizer of a pretrained model puts before every text. Windows of a running text begin
            with them too, and they are never predicted.
        stops: ids that end a continuation; empty: it goes on after the mark between texts.
        prefix: the id from which the first token of a text is predicted, if nothing stands before it.
        beginning: the text of `prefix` in a pretrained model's tokenizer.
    """

    unit: Literal["word", "token"]
    size: int
    num_ids: int
    end: int
    ends: Ends
    unknown_id: int | None = None
    before: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    beginning = ""

    @property
    def prefix(self) -> int:
        return self.end

    @abstractmethod
    def ids(self, text: str) -> list[int]:
        """The ids of a text, without marks.  Raises DataError where the vocabulary lacks a word."""

    @abstractmethod
    def text(self, ids: Sequence[int]) -> str:
        """The text of ids; marks become line breaks."""

    @abstractmethod
    def plain(self) -> dict[str, Any]:
        """Plain values from which :func:`read_vocabulary` makes the same vocabulary."""

    @property
    def fingerprint(self) -> str:
        """A digest of what decides the ids of a text."""
        return digest(self.plain())

    def warn_left_out(self) -> dict[str, Any]:
        """Settings of a pretrained model's generation config that are not applied; they are named in the log."""
        return {}

    @property
    def begins(self) -> str:
        """How windows of a running text begin, as the end of a description; empty: as they are cut."""
        return ""

    def given(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text as a model is given it; `special`: with those that its tokenizer adds."""
        return self.ids(text)

    def begun(self, ids: Sequence[int]) -> list[int]:
        """The ids that a model reads to continue those of :meth:`given`: the mark between texts stands first."""
        return [self.end, *ids]

    def continuation(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """The text of new `ids` that stand `after` others."""
        return self.text(ids)

    def marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts with their marks."""
        before, after = self.ends in ("before", "around"), self.ends in ("after", "around")
        return [[self.end] * before + ids + [self.end] * after for ids in self._all(texts)]

    def _all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.ids(text) for text in texts]

    def save(self, path: Path) -> None:
        """Write :meth:`plain` as JSON (atomically)."""
        write_bytes(path, json.dumps(self.plain(), ensure_ascii=False).encode())


class WordVocabulary(Vocabulary):
    """Words, split at white space.

    Args:
        words: the most frequent first; ids are their indices.
        end: the mark between texts, one of `words`.
        unknown: the word for words that are not in `words`; without it in `words`, these are an error.
    """

    unit = "word"

    def __init__(self, words: Sequence[str], end: str, unknown: str, ends: Ends, lower: bool = False) -> None:
        self.words, self.ends, self.lower, self.unknown = list(words), ends, lower, unknown
        self._numbers = {word: i for i, word in enumerate(self.words)}
        self.size = self.num_ids = len(self.words)
        self.end = self._numbers[end]
        self.unknown_id = self._numbers.get(unknown)

    def ids(self, text: str) -> list[int]:
        words = (text.lower() if self.lower else text).split()
        if self.unknown_id is not None:
            return [self._numbers.get(word, self.unknown_id) for word in words]
        try:
            return [self._numbers[word] for word in words]
        except KeyError as error:
            advice = f"train with task.data.vocabulary.min_count=2 to have {self.unknown} for rare words"
            raise DataError(f"the word {error.args[0]!r} is not in the vocabulary of {self.size}; {advice}") from error

    def text(self, ids: Sequence[int]) -> str:
        lines = " ".join("\n" if i == self.end else self.words[i] for i in ids)
        return lines.replace(" \n ", "\n").replace("\n ", "\n").replace(" \n", "\n")

    def plain(self) -> dict[str, Any]:
        marks = {"end": self.words[self.end], "unknown": self.unknown, "ends": self.ends, "lower": self.lower}
        return {"kind": "words", "words": self.words} | marks


class BytePairVocabulary(Vocabulary):
    """Byte-pair encoding.

    Args:
        tokenizer: the content of a tokenizer.json.
        size: the number of ids in the model's table, at least that of the tokenizer without added tokens. An added
            token beyond the table, as the padding of a fine-tuned model, is refused where a text has it.

    Raises:
        ValueError: not a tokenizer, without the mark, or with more pieces than `size`.
    """

    unit = "token"

    def __init__(self, tokenizer: str, size: int, ends: Ends, end: str = END_OF_TEXT) -> None:
        try:
            self.tokenizer = Tokenizer.from_str(tokenizer)
        except Exception as error:  # the library raises this class itself
            raise ValueError(f"not a tokenizer.json ({' '.join(str(error).split())[:120]})") from error
        pieces, mark = self.tokenizer.get_vocab_size(with_added_tokens=False), self.tokenizer.token_to_id(end)
        if mark is None:
            raise ValueError(f"the tokenizer has no {end}")
        if max(pieces, mark + 1) > size:
            table = f"the {size} ids of the model's table (task.data.vocab_size, or a pretrained model's vocab_size)"
            raise ValueError(f"the tokenizer has {max(pieces, mark + 1)} pieces, more than {table}")
        if ends not in get_args(Ends):
            raise ValueError(f"ends: expected {', '.join(get_args(Ends))}, got {ends!r:.40}")
        total = self.tokenizer.get_vocab_size()
        self.json, self.size, self.num_ids, self.ends, self.end = tokenizer, size, min(total, size), ends, mark
        self.mark = end
        self.tokenizer.no_truncation()  # a tokenizer.json may ask for both, which transformers ignores too
        self.tokenizer.no_padding()

    def ids(self, text: str) -> list[int]:
        return self.in_table(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def in_table(self, ids: list[int]) -> list[int]:
        """`ids` of a text. DataError: one of them is beyond the model's table."""
        if max(ids, default=0) >= self.size:
            token = self.tokenizer.id_to_token(max(ids))
            raise DataError(f"a text has {token}, id {max(ids)}, and the model's table {self.size} ids; remove it")
        return ids

    def _all(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [self.in_table(encoding.ids) for encoding in encodings]

    def text(self, ids: Sequence[int]) -> str:
        parts: list[list[int]] = [[]]
        for i in ids:
            if i == self.end:
                parts.append([])
            elif i < self.num_ids:
                parts[-1].append(i)
        return "\n".join(self.tokenizer.decode(part) for part in parts)

    def plain(self) -> dict[str, Any]:
        plain = {"kind": "byte pairs", "tokenizer": self.json, "size": self.size, "ends": self.ends}
        return plain if self.mark == END_OF_TEXT else plain | {"end": self.mark}


class PretrainedVocabulary(BytePairVocabulary):
    """The tokens of a pretrained model, which is given a text as its own tokenizer gives it.

    Args:
        bos: id of the tokenizer's token for the beginning of a text; None: it has none.
        stops: ids at which the model's generation config ends a text.
        left_out: its further settings, which are not applied: `task.sampling` chooses tokens.
        config: the model's config, as :func:`attnlab.pretrained.huggingface.config_of` gives it.
        files: the files of the tokenizer, the chat template and the generation config, by name; text, or an object
            with the key `base64`.
        split_special: special tokens that are written in a text are read as its letters.

    Attributes:
        after: ids that the tokenizer puts after every text.

    Raises:
        ValueError: as for the base class, a value is of another type, or a name is not that of a tokenizer's file.
    """

    def __init__(
        self,
        tokenizer: str,
        size: int,
        ends: Ends,
        end: str,
        bos: int | None,
        stops: Sequence[int],
        left_out: Mapping[str, Any],
        config: Mapping[str, Any],
        files: Mapping[str, str | Mapping[str, str]],
        split_special: bool = False,
    ) -> None:
        super().__init__(tokenizer, size, ends, end)
        if not isinstance(stops, list | tuple):
            raise ValueError(f"stops: expected ids, got {stops!r:.40}")
        for key, value in [("stops", i) for i in stops] + [("bos", bos)] * (bos is not None):
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise ValueError(f"{key}: expected ids, got {value!r:.40}")
        kinds = {"left_out": (left_out, Mapping), "config": (config, Mapping), "files": (files, Mapping)}
        for key, (given, kind) in (kinds | {"split_special": (split_special, bool)}).items():
            if not isinstance(given, kind):
                raise ValueError(f"{key}: expected {kind.__name__}, got {given!r:.40}")
        self.tokenizer.encode_special_tokens = self.split_special = split_special  # no part of a tokenizer.json
        self.num_ids = size  # as transformers, which chooses among all ids of the table
        self.bos, self.stops, self.left_out = bos, tuple(stops), dict(left_out)
        if wrong := [name for name in files if name == "config.json" or not TOKENIZER_FILE.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is no file of a tokenizer")
        self.config, self.files = dict(config), {name: content_of(text) for name, text in files.items()}
        encoding = self.tokenizer.encode("a")
        added = "".join(map(str, encoding.special_tokens_mask))
        self.before = tuple(encoding.ids[: len(added) - len(added.lstrip("1"))])
        self.after = tuple(encoding.ids[max(len(self.before), len(added.rstrip("1"))) :])

    @property
    def prefix(self) -> int:
        return self.end if self.bos is None else self.bos

    @property
    def beginning(self) -> str:  # type: ignore[override]
        return str(self.tokenizer.id_to_token(self.prefix))

    @property
    def begins(self) -> str:
        tokens = " ".join(str(self.tokenizer.id_to_token(i)) for i in self.before)
        return f", each begins with {tokens}" if tokens else ""

    def warn_left_out(self) -> dict[str, Any]:
        warn_left_out(self.left_out, "task.sampling or the task chooses tokens")
        return self.left_out

    def given(self, text: str, special: bool = True) -> list[int]:
        return self.in_table(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def begun(self, ids: Sequence[int]) -> list[int]:
        return list(ids) or self.in_table([self.prefix])

    def continuation(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """As transformers' pipeline: special tokens are no text, and a space between the two belongs to it."""
        return self.tokenizer.decode([*after, *ids])[len(self.tokenizer.decode(list(after))) :]

    def marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts with what the tokenizer adds, and with the mark between texts unless it adds that."""
        if self.end not in self.before + self.after:
            return super().marked(texts)
        return self._all(texts)

    def _all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.in_table(encoding.ids) for encoding in self.tokenizer.encode_batch(list(texts))]

    @property
    def fingerprint(self) -> str:
        added = {"before": self.before, "after": self.after} if self.before + self.after else {}
        return digest(super().plain() | added | self._split())

    def _split(self) -> dict[str, bool]:
        """The setting where it is not the usual one: earlier records lack it."""
        return {"split_special": True} if self.split_special else {}

    def plain(self) -> dict[str, Any]:
        values: dict[str, Any] = {"end": self.mark, "bos": self.bos, "stops": self.stops, "left_out": self.left_out}
        files = {name: stored_text(content) for name, content in self.files.items()}
        values |= {"config": self.config, "files": files} | self._split()
        return super().plain() | {"kind": "pretrained"} | values


def warn_left_out(settings: Mapping[str, Any], why: str) -> None:
    """Name the settings of a generation config that are not applied in one line of the log."""
    if settings:
        named = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        log.warning("generation_config.json: %s: not applied, %s", named, why)


def stored_text(content: bytes) -> str | dict[str, str]:
    """The content of a file as a value of JSON: its text, or an object with the key `base64`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def content_of(text: str | Mapping[str, str]) -> bytes:
    """The bytes of :func:`stored_text`."""
    return text.encode("utf-8") if isinstance(text, str) else base64.b64decode(text["base64"], validate=True)


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary that `Vocabulary.save` wrote.  Raises DataError where it is missing or damaged."""
    with reading(path, "a vocabulary of a language model"):
        plain = json.loads(path.read_bytes())
        kinds = {"words": WordVocabulary, "byte pairs": BytePairVocabulary, "pretrained": PretrainedVocabulary}
        return kinds[plain.pop("kind")](**plain)


class Words:
    """A vocabulary of the words of a corpus, or of a file.

    Args:
        ends: the place of the mark `end` between texts; "around": both, as in the published LM1B code.
        of: the splits whose words count; None: training.
        min_count: words with fewer occurrences are left out.
        file: a file with one word per line, in place of the words of the corpus.
    """

    def __init__(
        self,
        end: str = "<eos>",
        unknown: str = "<unk>",
        ends: Ends = "after",
        of: list[str] | None = None,
        min_count: int = 1,
        lower: bool = False,
        file: str | None = None,
    ) -> None:
        self.end, self.unknown, self.ends, self.lower = end, unknown, ends, lower
        self.of: list[Split] = list(of or ["train"])  # type: ignore[arg-type]
        self.min_count, self.file = min_count, None if file is None else Path(file).expanduser()

    def build(self, corpus: TextCorpus, root: Path, cache_dir: Path, vocab_size: int) -> WordVocabulary:
        """The vocabulary of the corpus at `root`, of at most `vocab_size` words, marks included.

        Raises:
            DataError: a file is missing or unreadable, or has no words.
        """
        sources = [self.file] if self.file else [path for split in self.of for path in corpus.files(root, split)]
        digests = file_digests(sources, cache_dir / "tokens" / "files.json")
        settings = [2, vocab_size, self.end, self.unknown, self.ends, self.min_count, self.lower, bool(self.file)]
        layout = [] if self.file else [self.of, corpus.layout(root)]
        key = digest([settings, layout, [digests[path] for path in sources]])

        def learn(path: Path) -> None:
            words = self._cut(*(self._from_file() if self.file else self._counted(corpus, root)), vocab_size)
            WordVocabulary(words, self.end, self.unknown, self.ends, self.lower).save(path)

        vocabulary = read_vocabulary(learned(cache_dir / "vocabularies" / f"words-{key[:24]}", learn))
        assert isinstance(vocabulary, WordVocabulary)
        return vocabulary

    def _cut(self, words: list[str], left_out: bool, vocab_size: int) -> list[str]:
        """At most `vocab_size` words, the marks included; `unknown` only where words are left out."""
        cut = len(words) > vocab_size
        marks = [self.end, self.unknown] if cut or left_out else [self.end]
        missing = [mark for mark in marks if mark not in words[: vocab_size - len(marks)]]
        if len(words) + len(missing) > vocab_size:
            log.warning(
                "vocabulary: the %d most frequent of %d words; others: %s", vocab_size, len(words), self.unknown
            )
            words = [word for word in words if word not in missing][: vocab_size - len(missing)]
        return words + [mark for mark in missing if mark not in words]

    def _counted(self, corpus: TextCorpus, root: Path) -> tuple[list[str], bool]:
        """The frequent words, the most frequent first; whether there are others."""
        counts: Counter[str] = Counter()
        for split in self.of:
            for text in each(f"counting the words of {split}, texts", corpus.texts(root, split)):
                counts.update((text.lower() if self.lower else text).split())
                counts[self.end] += 2 if self.ends == "around" else 1
        if counts.keys() <= {self.end}:
            raise DataError(f"{root}: {' and '.join(self.of)} of {corpus.name} have no words, only blank lines")
        words = [word for word, count in counts.most_common() if count >= self.min_count]
        return words, len(words) < len(counts)

    def _from_file(self) -> tuple[list[str], bool]:
        assert self.file is not None
        words = [line.split()[0] for line in read_lines(self.file) if line.strip()]
        if (word := repeated(words)) is not None:
            raise DataError(f"{self.file}: {word!r} occurs twice; expected each word on one line")
        return words, True


class BytePairs:
    """A vocabulary of byte pairs.

    Args:
        file: a tokenizer.json; None: train one on at most `sample_texts` of the training texts.
    """

    def __init__(self, file: str | None = None, ends: Ends = "before", sample_texts: int = 200_000) -> None:
        self.file, self.ends, self.sample = None if file is None else Path(file).expanduser(), ends, sample_texts

    def build(self, corpus: TextCorpus, root: Path, cache_dir: Path, vocab_size: int) -> BytePairVocabulary:
        """The vocabulary of the corpus at `root`, for a table of `vocab_size` ids.

        Raises:
            ConfigError: the corpus has token shards and no `file`, or `vocab_size` is less than 257.
            DataError: a file is missing or unreadable, or has more pieces than `vocab_size`.
        """
        if self.file is not None:
            with reading(self.file, "a tokenizer.json"):
                return BytePairVocabulary(self.file.read_text(encoding="utf-8"), vocab_size, self.ends)
        files = corpus.files(root, "train")
        if files[0].suffix == ".bin":
            key = "task.data.vocabulary.file=<GPT-2's tokenizer.json>"
            raise ConfigError(f"{files[0]}: token shards need the tokenizer that encoded them; set {key}")
        digests = file_digests(files, cache_dir / "tokens" / "files.json")
        key = digest([1, vocab_size, self.sample, corpus.layout(root), [digests[path] for path in files]])
        folder = cache_dir / "vocabularies" / f"bytes-{key[:24]}"
        path = learned(folder, lambda path: write_text(path, self.learn(corpus.texts(root, "train"), vocab_size)))
        return BytePairVocabulary(path.read_text(encoding="utf-8"), vocab_size, self.ends)

    def learn(self, texts: Iterable[str], vocab_size: int) -> str:
        """The tokenizer.json of byte pairs of texts.  ConfigError: `vocab_size` is less than 257."""
        if vocab_size < 257:
            raise ConfigError(f"task.data.vocab_size={vocab_size}: expected at least 257, the bytes and the end mark")
        few = islice(texts, self.sample)
        return str(waited("learning byte pairs", lambda: byte_pairs(few, vocab_size, [END_OF_TEXT])).to_str())


def byte_pairs(texts: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    """The byte pairs of texts, as GPT-2 and RoBERTa have them; `special` tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class PretrainedTokens:
    """The tokens of a pretrained model.

    Args:
        source: a local folder or a name of the hub, or "sample": bytes.
        ends: the place of the mark between texts, which is the tokenizer's end token.
    """

    def __init__(self, source: str, ends: Ends = "after") -> None:
        self.source, self.ends = source, ends

    def build(self, corpus: TextCorpus, root: Path, cache_dir: Path, vocab_size: int) -> BytePairVocabulary:
        """:meth:`vocabulary`, which does not depend on the corpus."""
        return self.vocabulary(vocab_size)

    def vocabulary(self, vocab_size: int) -> BytePairVocabulary:
        """The vocabulary of a model with `vocab_size` ids in its table.

        Raises:
            DataError: the tokenizer or the generation config cannot be read.
            ConfigError: it has another size, or no end token.
        """
        if self.source == SAMPLE:
            return BytePairVocabulary(byte_tokenizer().to_str(), vocab_size, self.ends)
        from attnlab.pretrained import huggingface

        words: Any = huggingface.tokenizer(self.source)
        if words.eos_token is None:
            raise ConfigError(f"model={self.source}: its tokenizer has no end token, which stands between texts")
        backend = getattr(words, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"model={self.source}: its tokenizer has no fast form; save it with tokenizer.json")
        try:
            return PretrainedVocabulary(
                backend.to_str(),
                vocab_size,
                self.ends,
                words.eos_token,
                words.bos_token_id,
                *huggingface.generation(self.source),
                huggingface.config_of(self.source),
                {name: stored_text(text) for name, text in huggingface.tokenizer_files(self.source).items()},
                backend.encode_special_tokens,
            )
        except ValueError as error:
            raise ConfigError(f"model={self.source}: the tokenizer does not belong to the model: {error}") from error


def byte_tokenizer() -> Tokenizer:
    """Bytes as tokens 0 to 255, and the mark between texts as 256."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that byte-level tokenizers write as they are
    others = count(256)
    letters = {chr(byte if byte in shown else next(others)): byte for byte in range(256)}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return plain


def count_words(text: str) -> int:
    """The number of words and line ends of a text, the end of the last line included."""
    return len(text.split()) + text.count("\n") + 1
