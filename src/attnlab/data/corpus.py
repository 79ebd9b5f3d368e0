"""The examples that readers of corpora give, and functions that readers share.

A reader reads one layout on disk.  It checks all that it can before anything is computed; each error is one line that
names the file and the line.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import soundfile
from omegaconf import DictConfig

from attnlab.config.build import instantiate
from attnlab.errors import DataError

Kind = Literal["audio", "stored", "text"]  # what a front end reads
LOWEST_RATE, HIGHEST_RATE = 1_000, 384_000  # Hz, of a recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """One example.  Of this base class, the input is the text `source`.

    Attributes:
        id: unique in its split.
        source: the transcript, sentence or document; CTC's text, and shown beside the output.
        target: what the decoder writes.
        label: the class that it writes first, as one piece; empty: none.
        others: further references.
    """

    id: str
    source: str
    target: str
    label: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Utterance):
    """Input: `num_samples` samples of a recording from `start` on, at its own `rate` (Hz), `speed` times faster.

    Args:
        audio: the file of the recording.
        rate: its samples per second (Hz).
        start: the first sample.
        num_samples: samples of the recording, before the speed is changed.
        speed: factor of the tempo, above 0.
    """

    audio: Path
    rate: int
    start: int
    num_samples: int
    speed: float = 1.0

    @property
    def seconds(self) -> float:
        return self.num_samples / self.rate / self.speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Utterance):
    """Input: a file of features.

    Args:
        path: the file.
    """

    path: Path


class Reader(ABC):
    """One layout of a corpus on disk.

    Attributes:
        name: of the corpus, for messages.
        unit: what an example is called.
        splits: the names of the training, validation and test splits.
        kinds: the kinds of input that the layout has.
        layout: what data_root must hold, for messages.
    """

    name: str
    unit: str = "utterances"
    splits: tuple[str, str, str] = ("train", "dev", "test")
    kinds: tuple[Kind, ...] = ("audio",)

    @abstractmethod
    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        """The utterances of a split, in the corpus's order; inputs of one of `kinds`.

        Raises DataError: missing or malformed files, and text that is empty, unless `drop_empty`: the caller then
        leaves such utterances out and counts them.
        """

    def check(self, root: Path, splits: Sequence[str], kind: Kind) -> None:
        """Check that the files of `splits` exist.

        Raises:
            DataError: one is missing; the message names the file and what it must hold.
        """
        try:
            if not root.is_dir():
                what = "is a file" if root.exists() else "no such directory"
                raise DataError(f"data_root={root}: {what}; {self.layout}")
            for split in splits:
                self.find(root, split, kind)
        except OSError as error:
            raise DataError(f"data_root={root}: cannot be read ({error.strerror}: {error.filename})") from error

    layout: str = ""  # what data_root must be

    def find(self, root: Path, split: str, kind: Kind) -> None:  # noqa: B027
        """Check that the files of one split exist.  Raises DataError where one is missing."""

    def need(self, *files: Path, folder: Path | None = None) -> None:
        """Raise DataError where one of these files, or the folder, is missing."""
        for path in files:
            if not path.is_file():
                self.missing(path)
        if folder is not None and not folder.is_dir():
            self.missing(folder)

    def missing(self, path: Path) -> NoReturn:
        if path.exists():
            kinds = ("a directory", "a file") if path.is_dir() else ("a file", "a directory")
            raise DataError(f"{path}: {kinds[0]}; expected {kinds[1]}; {self.layout}")
        there = (
            ", ".join(sorted(p.name for p in path.parent.iterdir())[:8]) if path.parent.is_dir() else "no such folder"
        )
        if path.is_dir():
            raise DataError(f"{path}: a directory; expected a file; {self.layout}")
        raise DataError(f"{path} is missing (found {there or 'nothing'}); {self.layout}")

    def plain(self, text: str) -> str:
        """A source text that stands in no corpus, as :meth:`read` would give it."""
        return " ".join(text.split())

    def sample(self, cache_dir: Path) -> Path:
        """The directory of the embedded sample corpus in this layout, which is written if it does not exist."""
        raise DataError(f"there is no sample corpus in the layout of {self.name}: set data_root; {self.layout}")


def check_layout(root: Path, data: DictConfig) -> None:
    """Check that the files of a corpus exist that a :class:`Reader` reads.

    Args:
        root: of the corpus.
        data: the node `task.data`.

    Raises:
        DataError: one is missing.
    """
    reader: Reader = instantiate(data.reader, path="task.data.reader")
    kind = instantiate(data.features, path="task.data.features").kind
    if kind in reader.kinds:
        reader.check(root, reader.splits, kind)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark.  Raises DataError where it is not text.

    Args:
        path: the file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        what = "it is a directory; expected a file" if path.is_dir() else error.strerror
        raise DataError(f"{path}: cannot be read ({what})") from error
    if (zero := data.find(b"\0")) >= 0:
        line = data.count(b"\n", 0, zero) + 1
        raise DataError(f"{path} line {line}: a zero byte; expected UTF-8 text, this is a binary file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line}: not UTF-8 ({error.reason})") from error


def read_lines(path: Path) -> list[str]:
    # Not str.splitlines: it also breaks at U+2028, U+0085 and others that occur inside published lines.
    """The lines of a UTF-8 file, stripped, without an empty last one. Only a line feed ends a line.

    Args:
        path: the file.
    """
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.strip() for line in lines]


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no half of a surrogate pair, as JSON and shells may give.

    Args:
        text: any.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each JSON object of a file, one a line or printed over several.

    Args:
        path: the file.
    """
    text = read_text(path)
    decoder, at, line = json.JSONDecoder(), 0, 1
    while True:
        begin = at
        while at < len(text) and text[at].isspace():
            at += 1
        line += text.count("\n", begin, at)
        if at == len(text):
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            where = line + text.count("\n", at, error.pos)
            raise DataError(f"{path} line {where}: malformed JSON ({error.msg})") from error
        except RecursionError as error:
            raise DataError(f"{path} line {line}: JSON nested too deeply to be read; expected flat objects") from error
        if not isinstance(value, dict):
            raise DataError(f"{path} line {line}: expected a JSON object, found {type(value).__name__}")
        if "\\ud" in text[at:end].lower() and not is_unicode(json.dumps(value, ensure_ascii=False)):
            raise DataError(f"{path} line {line}: half of a surrogate pair (\\ud8..), which is no letter")
        yield line, value
        line += text.count("\n", at, end)
        at = end


def field(record: dict[str, Any], key: str, kind: type, path: Path, line: int) -> Any:
    """record[key], which must be a `kind`.

    Args:
        record: a JSON object.
        key: of the value.
        kind: its type.
        path: the object's file, for the error.
        line: its line, for the error.
    """
    if not isinstance(record.get(key), kind):
        found = f"is {record[key]!r:.40}" if key in record else f"is missing (found: {', '.join(record) or 'none'})"
        raise DataError(f"{path} line {line}: {key!r} {found}; expected a {kind.__name__}")
    return record[key]


def inspect_audio(path: Path, where: str) -> tuple[int, int]:
    """(sample rate, samples) from the header.

    Args:
        path: of the recording.
        where: the file and line that name it, for the error.
    """
    try:
        if not path.is_file():
            raise DataError(f"{path}: missing recording, named in {where}")
        info = soundfile.info(path)
    except (soundfile.LibsndfileError, RuntimeError, OSError) as error:
        raise DataError(f"{path}: unreadable audio ({error}), named in {where}") from error
    return checked_rate(path, info.samplerate), info.frames


def checked_rate(path: Path, rate: int) -> int:
    """The sample rate of a recording, where speech can have it: at 1 Hz, resampling would take minutes.

    Args:
        path: of the recording, for the error.
        rate: in Hz, from its header.

    Raises:
        DataError: no recording has such a rate; the header is damaged.
    """
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise DataError(f"{path}: its header says {rate} samples a second; expected {LOWEST_RATE} to {HIGHEST_RATE} Hz")
    return rate


def whole(path: Path, where: str) -> dict[str, Any]:
    """What a Segment needs to be all of a recording.

    Args:
        path: of the recording.
        where: the file and line that name it, for the error.
    """
    rate, frames = inspect_audio(path, where)
    if frames < 1:
        raise DataError(f"{path}: a recording of no samples, named in {where}")
    return {"audio": path, "rate": rate, "start": 0, "num_samples": frames}


def refuse_empty(text: str, where: str, drop_empty: bool, what: str = "text") -> None:
    """Raise DataError where a text is empty and may not be left out.

    Args:
        text: what the corpus has.
        where: its file and line, for the error.
        drop_empty: whether such utterances are left out.
        what: what is empty, for the error.
    """
    if not text and not drop_empty:
        raise DataError(f"{where}: empty {what}; task.data.drop_empty=true leaves such utterances out")
