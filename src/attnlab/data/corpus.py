"""Corpora: the examples that readers give, functions that readers share, and files. Imports no torch.

A reader reads one layout on disk.  It checks all that it can before anything is computed.  An error is one line with
the file, the line, and what was expected there.
"""

import csv
import gzip
import io
import json
import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import soxr
from omegaconf import DictConfig

from attnlab.config.batch import counted
from attnlab.config.build import instantiate
from attnlab.data.lengths import lengths
from attnlab.data.report import FILES, Report, apart, left_out, noted, restore
from attnlab.errors import DataError
from attnlab.run.cache import digest, stored_files

Item = TypeVar("Item")
Value = TypeVar("Value", bound=Hashable)
# What the names of files and folders mean, in any case; suffixes of recordings (of libsndfile) and images (of Pillow).
SPLITS = {
    "train": ("train", "training"),
    "dev": ("dev", "devel", "development", "val", "valid", "validation", "eval", "evaluation"),
    "test": ("test", "testing"),
}
AUDIO = (
    ".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aiff", ".aif", ".aifc", ".au", ".snd", ".caf", ".w64", ".rf64",
    ".sph", ".nist", ".voc",
)  # fmt: skip
IMAGES = (
    ".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".ppm",
    ".pgm", ".pbm", ".pnm", ".jp2",
)  # fmt: skip
NO_DATA = (  # folders of systems, beside those that begin with a dot
    "__macosx", "@eadir", "@tmp", "@recycle", "#recycle", "#snapshot", "lost+found", "$recycle.bin",
    "system volume information",
)  # fmt: skip
OTHER_LENGTH = "recording of another length than its file says"
SAMPLES = 1  # increase it when the same settings of a sample corpus give other bytes
Kind = Literal["audio", "stored", "text"]  # what a front end reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """One example.  Of this base class, the input is the text `source`.

    Attributes:
        id: unique in its split.
        source: the transcript, sentence or document; the text of CTC.
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
    """Input: `num_samples` samples of a recording from `start` on, at its `rate` (Hz), `speed` times faster.

    Args:
        num_samples: before the speed is changed.
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


def at_speed(segment: Segment, speed: float) -> Segment:
    """A segment played at another speed, which its id names."""
    return segment if speed == 1.0 else replace(segment, id=f"sp{speed:g}-{segment.id}", speed=speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Utterance):
    """Input: a file of features."""

    path: Path


class Reader(ABC):
    """One layout of a corpus on disk.

    Attributes:
        name: of the corpus, for messages.
        unit: what an example is called.
        splits: the training, validation and test splits.
        layout: what data_root must hold, for messages.
        language: the code of the language of the targets; None: the configuration does not tell it.
    """

    name: str
    unit: str = "utterances"
    splits: tuple[str, str, str] = ("train", "dev", "test")
    kinds: tuple[Kind, ...] = ("audio",)
    layout: str = ""
    language: str | None = None

    @abstractmethod
    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        """The utterances of a split, in the corpus's order; inputs of one of `kinds`.

        Raises DataError: a file is missing or malformed, or a text is empty.  With `drop_empty` empty texts are given,
        and the caller leaves these utterances out.
        """

    def check(self, root: Path, splits: Sequence[str], kind: Kind) -> None:
        """Raise DataError where a file of `splits` is missing."""
        check_folder(root, self.layout)
        with reading(root, "a readable folder"):
            for split in splits:
                self.find(root, split, kind)

    def find(self, root: Path, split: str, kind: Kind) -> None:  # noqa: B027
        """Check that the files of one split exist.  Raises DataError where one is missing."""

    def need(self, *files: Path, folders: Sequence[Path] = ()) -> None:
        """Raise DataError where one of these files or folders is missing."""
        for path in (*files, *folders):
            if not (path.is_dir() if path in folders else path.is_file()):
                self.missing(path)

    def missing(self, path: Path) -> NoReturn:
        """Raise the error of a file or folder that is missing, or that is the other of the two."""
        if path.exists():
            kinds = ("a directory", "a file") if path.is_dir() else ("a file", "a directory")
            raise DataError(f"{path}: {kinds[0]}; expected {kinds[1]}; {self.layout}")
        there = contents(path.parent) if path.parent.is_dir() else "no such folder"
        raise DataError(f"{path} is missing (found {there}); {self.layout}")

    def plain(self, text: str) -> str:
        """A source text that stands in no corpus, as :meth:`read` would give it."""
        return squeeze(text)

    def sample(self, cache_dir: Path) -> Path:
        """The directory of the embedded sample corpus in this layout, which is written if it does not exist."""
        raise DataError(f"there is no sample corpus in the layout of {self.name}: set data_root; {self.layout}")


def check_layout(root: Path, data: DictConfig) -> None:
    """Raise DataError where a file of a reader's corpus is missing.  `data` is the node `task.data`."""
    reader: Reader = instantiate(data.reader, path="task.data.reader")
    kind = instantiate(data.features, path="task.data.features").kind
    if kind in reader.kinds:
        with Report().of(FILES):  # the run reports them when it reads them
            reader.check(root, reader.splits, kind)


def inspect_audio(path: Path, where: str) -> tuple[int, int]:
    """(samples per second, samples) of a recording, from its header; `where`: the file and line that name it."""
    if not path.is_file():
        raise DataError(f"{path}: missing recording, named in {where}")
    with reading(path, f"a recording, named in {where}"):
        rate, length, contradiction = lengths(path)
    if contradiction:
        noted(OTHER_LENGTH, f"{path}: {contradiction}")
    return rate, length


def excerpt(
    audio: Path, header: tuple[int, int], first: int, last: int, where: str, tolerance: float = 0
) -> dict[str, Any]:
    """The fields of a Segment of samples `first` to `last` (exclusive) of a recording, cut at its end.

    Args:
        header: rate and samples, see :func:`inspect_audio`.
        where: the file and line of the segment, for the error.
        tolerance: seconds that a segment may end after its recording, because times are rounded.

    Raises:
        DataError: the segment has no samples, or ends later.
    """
    rate, length = header
    if not 0 <= first < min(last, length) or last > length + tolerance * rate:
        times = f"a segment from {first / rate:.3f} to {last / rate:.3f} s"
        raise DataError(f"{where}: {times}; expected a part of the {length / rate:.3f} s of {audio.name}")
    return {"audio": audio, "rate": rate, "start": first, "num_samples": min(last, length) - first}


def recording(audio: Path, where: str) -> dict[str, Any]:
    """The fields of a Segment of a complete recording; `where` names the recording, for the error."""
    rate, length = inspect_audio(audio, where)
    return excerpt(audio, (rate, length), 0, length, where)


START, END, DURATION = "offset, start, begin or onset", "end", "duration"
TIMES = {  # names of columns, also with such an ending -> what they are
    f"{name}{ending}": role
    for role in (START, END, DURATION)
    for name in role.replace(" or ", ", ").split(", ")
    for ending in ("", "_time", "_s", "_sec", "_secs", "_seconds")
}
_LIKE_TIMES = re.compile(
    r"(^|_)(offsets?|(starts?|begins?|onsets?|ends?|stops?)(times?|secs?|seconds|ms|samples?|frames?)?|durations?|dur|"
    r"times?|timestamps?|timecodes?|tc|ts|secs?|seconds|ms|msecs?|milliseconds|tmin|tmax|xmin|xmax|t0|t1|from|to|in|out|"
    r"seek|cue|position|(first|last)_(samples?|frames?))(_|$)"
)
_LIKE_NUMBERS = re.compile(r"[\s\[(]*-?\d[\d.,:;e\s+-]*([hms]|secs?|seconds|ms)?[\s\])]*")
_TWO_NUMBERS = re.compile(r"[\[(]\s*-?[\d.]+\s*,\s*-?[\d.]+\s*[\])]")
ROUNDED = 0.05  # seconds that a segment may end after its recording, where times have two digits


def part_of_recording(row: "Row", audio: Path, others: Collection[str | None]) -> dict[str, Any]:
    """The fields of a Segment of the part that a row's times name, or of the complete recording if it has no times.

    Args:
        others: columns that are no times.

    Raises:
        DataError: times are not understood, contradict each other, or lie outside the recording; or a start, an end or
            a duration that cuts is alone beside other numbers.
    """
    times: dict[str, float] = {}
    unread: list[str] = []
    for column, value in row.values.items():
        if column in others:
            continue
        name = _plain_name(column)
        if (role := TIMES.get(name)) is None:
            if isinstance(value, dict | list) or _LIKE_NUMBERS.fullmatch(str(value)):
                unread.append(column)
                if _names_a_part(name, value):
                    _refuse_column(row, column)
            continue
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if role in times or not 0 <= seconds < math.inf:
            why = "a second column of this meaning" if role in times else f"{value!r:.40}, expected a number of seconds"
            raise DataError(f"{row.where}: {column!r}: {why}")
        times[role] = seconds
    rate, length = header = inspect_audio(audio, row.where)
    start, whole = times.get(START, 0.0), length / rate
    end = times.get(END, start + times[DURATION] if DURATION in times else whole)
    if DURATION in times and abs(start + times[DURATION] - end) > ROUNDED:
        raise DataError(f"{row.where}: {start:g} s and duration {times[DURATION]:g} s do not end at {end:g} s")
    describes = [*times] == [DURATION] and abs(end - whole) <= ROUNDED  # the recording
    if len(times) == 1 and unread and not describes:
        _refuse_column(row, unread[0])  # it may be the other end
    for column in unread:
        noted(f"numbers in the column {column!r}, which is not read", row.where)
    if describes:
        end = whole
    elif [*times] == [DURATION]:
        noted("cut to the column `duration`, without a start", row.where)
    return excerpt(
        audio, header, round(start * rate), length if end == whole else round(end * rate), row.where, ROUNDED
    )


def _plain_name(column: str) -> str:
    """The name of a column in lower case, with an underscore between its words."""
    return re.sub(r"\W+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column).lower()).strip("_")


def _names_a_part(name: str, value: Any) -> bool:
    """Whether a column looks like a part of a recording by its name, two numbers or the keys of an object."""
    keys = [_plain_name(str(key)) for key in value] if isinstance(value, dict) else []
    return any(map(_LIKE_TIMES.search, [name, *keys])) or _TWO_NUMBERS.fullmatch(str(value)) is not None


def _refuse_column(row: "Row", column: str) -> NoReturn:
    columns = f"{START}, {DURATION} and {END}, in seconds"
    wrong = f"the column {column!r} looks like a time, which is read from {columns}"
    raise DataError(f"{row.where}: {wrong}; rename it, or remove it")


def refuse_empty(places: Iterable[str], drop_empty: bool) -> None:
    """Raise DataError where texts are empty and may not be left out; `places`: the file and line of each of them."""
    if not drop_empty and (empty := list(places)):
        more = f" (and {len(empty) - 1} more)" * (len(empty) > 1)
        raise DataError(f"{empty[0]}: empty text{more}; task.data.drop_empty=true leaves such utterances out")


def held_out(items: Iterable[Item], split: str, missing: Sequence[str], every: int) -> Iterator[Item]:
    """The training items of `split`: each of `missing`, the splits without files, takes every `every`-th item.

    What is noted while an item is read counts for the split that has it.
    """
    for i, (item, notes) in enumerate(apart(items)):
        place = i % every
        if (missing[place] if place < len(missing) else None) == (split if split in missing else None):
            restore(notes.plain())
            yield item


def statistics(utterances: Sequence[Utterance]) -> dict[str, float]:
    """The size of a split: utterances, words of both sides with their means, hours of recordings, number of classes."""
    count = len(utterances)
    words = {
        "source_words": sum(len(x.source.split()) for x in utterances),
        "target_words": sum(len(x.target.split()) for x in utterances),
    }
    sizes: dict[str, float] = {"utterances": count}
    segments = [x for x in utterances if isinstance(x, Segment)]
    if segments and len(segments) == count:
        sizes["hours"] = round(sum(x.seconds for x in segments) / 3600, 4)
    sizes |= words | {f"mean_{key}": round(value / count, 2) for key, value in words.items()}
    classes = {x.label for x in utterances} - {""}
    return sizes | ({"classes": len(classes)} if classes else {})


def sample_corpus(cache_dir: Path, name: str, settings: Any, write: Callable[[Path], None]) -> Path:
    """The directory of a sample corpus, which `write` fills where it is missing or damaged.

    `settings` are plain values: everything but the code that the bytes depend on.  DataError: it cannot be written.
    """
    return stored_files(Path(cache_dir) / f"{name}-{digest([SAMPLES, settings])[:16]}", write)


SEED = 1  # of the voices, pauses and noise of synthetic speech


def spoken_sample(cache_dir: Path, name: str) -> Path:
    """The directory of a sample corpus of synthetic speech, one of WRITERS in `attnlab.data.samples.spoken`.

    Raises:
        DataError: the synthesizer is missing or fails, or the corpus cannot be written.
    """
    try:
        import espeakng_loader  # noqa: F401
    except ImportError as error:
        install = "pip install 'attnlab[samples]', or give data_root=<the directory of a corpus>"
        raise DataError(f"espeak-ng, which speaks the sample corpus, cannot be loaded: {install}") from error

    def write(root: Path) -> None:
        from attnlab.data.samples.spoken import WRITERS

        WRITERS[name](root)

    return sample_corpus(cache_dir, name, [SEED, [version("espeakng-loader"), np.__version__, soxr.__version__]], write)


# --- folders of images ---

IMAGE_SPLITS = {"train": "train", "val": "dev"}  # names in messages, and those of SPLITS


def check_images(root: Path, data: DictConfig) -> None:
    """Raise DataError unless both splits have a folder of images for each class."""
    with Report().of(FILES):  # the run reports them when it reads them
        for split in IMAGE_SPLITS:
            image_folder(root, split)


def image_folder(root: Path, split: str) -> tuple[Path, list[Path]]:
    """The folder of a split and its images.  DataError: it is missing, or a class has no folder with images."""
    expected = f"expected {split}/<class>/*.jpg"
    check_folder(root, f"{expected} below it")
    place = by_split(path for path in entries(root) if path.is_dir()).get(IMAGE_SPLITS[split])
    if place is None:
        raise DataError(f"{root}: there is no folder {split}; {expected} below it")
    images = [path for path in files_below(place, IMAGES, "image") if path.parent != place]
    folders = [path for path in entries(place) if path.is_dir()]
    if not folders:
        raise DataError(f"{place}: no class folders; {expected} (ImageNet's val is shipped flat)")
    classes = {path.relative_to(place).parts[0] for path in images}
    if empty := [folder for folder in folders if folder.name not in classes]:
        raise DataError(f"{empty[0]}: a class folder without images; add images, or remove it from train and val")
    if flat := [path for path in entries(place) if path.suffix.lower() in IMAGES and path.is_file()]:
        left_out("image outside the folders of classes", str(flat[0]), len(flat))
    return place, images


# --- files ---


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Turns errors of reading a file into a DataError that names it; `expected` is such as "a Parquet file"."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # libraries raise many classes for damaged files
        if isinstance(error, OSError) and error.strerror:
            what = "a directory" if path.is_dir() else f"cannot be read ({error.strerror})"
            raise DataError(f"{path}: {what}; expected {expected}") from error
        raise DataError(f"{path}: expected {expected} ({' '.join(str(error).split())[:160]})") from error


def check_folder(root: Path, layout: str) -> None:
    """Raise DataError where `data_root` is not a folder; `layout` says what belongs there."""
    if not root.is_dir():
        raise DataError(f"data_root={root}: {'is a file' if root.exists() else 'no such directory'}; {layout}")


def is_data(name: str) -> bool:
    """Whether a file or folder of this name may be data: no hidden one, no trash, thumbnails or resource fork."""
    return not name.startswith(".") and name.lower() not in NO_DATA


def entries(folder: Path) -> list[Path]:
    """The files and folders in a folder that may be data, sorted."""
    with reading(folder, "a readable folder"):
        return sorted(path for path in folder.iterdir() if is_data(path.name))


def files_below(
    folder: Path, suffixes: Sequence[str] | None = None, what: str | None = None, beside: str = ""
) -> list[Path]:
    """The files with one of these suffixes in a folder and all folders below it, links too, sorted.

    Args:
        suffixes: None: all files.
        what: such a file is called; the other files are then reported as left out.
        beside: suffix of other files that are read.

    Raises:
        DataError: a folder cannot be read.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    paths: list[Path] = []
    places: set[Path] = set()
    with reading(folder, "a readable folder"):
        for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
            if (real := Path(place).resolve()) in places:
                if what:
                    left_out("link to a folder that is read already", place)
                folders.clear()
                continue
            places.add(real)
            hidden = [name for name in folders + names if not is_data(name)]
            for name in filter(is_data, names):
                suffix = Path(name).suffix.lower()
                if suffixes is None or suffix in suffixes:
                    paths.append(Path(place, name))
                elif what and suffix != beside:
                    left_out(f"file that is no {what} ({suffix or 'no suffix'})", str(Path(place, name)))
            if what and hidden:
                left_out("hidden file or folder", str(Path(place, hidden[0])), len(hidden))
            folders[:] = sorted(filter(is_data, folders))
    return sorted(paths)


def split_of(name: str) -> str | None:
    """The key of SPLITS that a name has as a word between signs or digits: train of news-train.  DataError: several."""
    words = re.split(r"[\W\d_]+", name.lower())
    splits = [split for split, names in SPLITS.items() if not set(names).isdisjoint(words)]
    if len(splits) > 1:
        raise DataError(f"{name}: the name is that of {' and of '.join(splits)}; rename it to one of them")
    return splits[0] if splits else None


def by_split(paths: Iterable[Path], words: bool = False) -> dict[str, Path]:
    """The file or folder of each split of SPLITS that has one.  DataError: two are of one split.

    Args:
        words: without a file `train`, among several files those whose names have the split as a word count too.
    """
    places: dict[str, list[Path]] = {}
    others: list[Path] = []
    for path in sorted(paths):
        name = (path.name if path.is_dir() else path.stem).lower()
        split = next((split for split, names in SPLITS.items() if name in names), None)
        (places.setdefault(split, []) if split else others).append(path)
    if words and "train" not in places and len(places) + len(others) > 1:
        named: dict[str, list[Path]] = {}
        for path in others:
            if (part := split_of(path.stem)) and part not in places:
                named.setdefault(part, []).append(path)
        places |= named
    return {split: same[0] for split, same in places.items() if only(same)}


def contents(folder: Path) -> str:
    """The first names in a folder, for errors."""
    return ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"


def first_of(root: Path, names: Iterable[str], what: str) -> Path:
    """The first of the files `names` that exists under `root`, plain or gzipped; `what` they hold, for the error."""
    paths = [root / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path}: a directory; expected a file ({what})")
        if path.is_file():
            return path
    raise DataError(f"{paths[0]}: no such file ({what}); data_root names the directory that holds it")


def only(paths: Sequence[Path]) -> Path | None:
    """The path, if there is one.  DataError: there are several."""
    if len(paths) > 1:
        raise DataError(f"data_root={paths[0].parent}: both {paths[0].name} and {paths[1].name}; keep one of them")
    return paths[0] if paths else None


def trimmed(lines: list[str], count: int) -> list[str]:
    """The lines without blank ones at their end, of which at least `count` remain."""
    while len(lines) > count and not lines[-1].strip():
        lines.pop()
    return lines


def repeated(values: Iterable[Value]) -> Value | None:
    """The first value that occurs again; None: all differ."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON and shells may give lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def squeeze(text: str) -> str:
    """`text` with each run of white space as one space."""
    return " ".join(text.split())


# --- text and JSON -------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    with reading(path, "a text file"):
        data = path.read_bytes()
    return _decoded(data, path, 1)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends; a `.gz` file is decompressed. An empty file is an error.

    Only a line feed ends a line: published lines hold U+2028, U+0085 and others, at which str.splitlines breaks.
    """
    number = 0
    with reading(path, "a text file"), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = _decoded(line, path, number).rstrip("\r\n")
            if "\r" in text:
                noted("carriage return inside a line, read as white space", f"{path} line {number}")
            yield text
    if not number:
        raise DataError(f"{path}: an empty file; expected a text in every line")


def _decoded(data: bytes, path: Path, line: int) -> str:
    """The text of bytes that begin at a line."""
    try:
        text = data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise DataError(f"{path} line {line}: {error.reason}; expected UTF-8 text") from error
    if (place := data.find(b"\0")) >= 0:
        line += data.count(b"\n", 0, place)
        raise DataError(f"{path} line {line}: a zero byte; expected UTF-8 text (UTF-16 has them: convert the file)")
    return text


def read_json(path: Path) -> Any:
    """The one JSON value of a file."""
    values = [value for _, value in _json(path)]
    if len(values) != 1:
        raise DataError(f"{path}: {len(values)} JSON values; expected one")
    return values[0]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (key := repeated(key for key, _ in pairs)) is not None:
        raise ValueError(f"the key {key!r} occurs twice in one object")
    return dict(pairs)


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, value) of each JSON value of a file; a value may extend over several lines."""
    text = read_text(path)
    decoder, at, line = json.JSONDecoder(object_pairs_hook=_object), 0, 1
    while begin := re.compile(r"\S").search(text, at):
        line += text.count("\n", at, begin.start())
        at = begin.start()
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line += text.count("\n", at, min(getattr(error, "pos", at), len(text.rstrip())))
            raise DataError(f"{path} line {line}: malformed JSON ({error})") from error
        if "\\ud" in text[at:end].lower() and not is_unicode(json.dumps(value, ensure_ascii=False)):
            raise DataError(f"{path} line {line}: invalid Unicode: lone surrogate (\\ud8..)")
        yield line, value
        line += text.count("\n", at, end)
        at = end


_QUOTED = re.compile(r'"([^"]|"")*"')  # a cell as programs write it that quote


# --- tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table or one JSON object, with its place for errors: the `number` of a line, item or row, from 1."""

    values: dict[str, Any]
    path: Path
    number: int
    unit: str = "line"

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.path} {self.unit} {self.number}"

    def value(self, key: str, *types: type) -> Any:
        """The value of a column. DataError: it is missing or not of these types."""
        value = self.values.get(key)
        if isinstance(value, str) and "\0" in value:
            raise DataError(f"{self.where}: {key!r} has a zero character; expected text")
        if isinstance(value, types) and (not isinstance(value, bool) or bool in types):
            return value
        there = f"is {value!r:.40}" if key in self.values else f"is missing (found: {', '.join(map(str, self.values))})"
        raise DataError(f"{self.where}: {key!r} {there}; expected {' or '.join(t.__name__ for t in types)}")

    def text(self, key: str, optional: bool = False) -> str:
        """A text column, with each run of white space as one space; `optional`: empty where it is null or missing."""
        return "" if optional and self.values.get(key) is None else squeeze(self.value(key, str))


def rows(path: Path, columns: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a table.

    .csv: a header and rows, with quoted texts. .tsv: a header and rows; a quotation mark is text, and a text has
    neither tabs nor line ends. .jsonl and .json: JSON objects; .json also a list of objects or an object whose
    `examples` is such a list (BIG-bench). .parquet: those of `columns` that it has.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        yield from _separated(path, *(_cells(path) if suffix == ".csv" else _fields(path)))
    elif suffix == ".parquet":
        yield from (Row(values, path, number, "row") for number, values in enumerate(read_parquet(path, columns), 1))
    else:
        for line, value in _json(path):
            if suffix == ".json" and isinstance(value, dict):
                value = value.get("examples", value)
            listed = suffix == ".json" and isinstance(value, list)
            for number, item in enumerate(value, 1) if listed else ((line, value),):
                row = Row(item, path, number, "item" if listed else "line")
                if not isinstance(item, dict):
                    raise DataError(f"{row.where}: expected a JSON object, not {type(item).__name__}")
                yield row


def _separated(path: Path, lines: Iterator[tuple[int, list[str]]], advice: str) -> Iterator[Row]:
    """The rows of a table; `lines`: the last line of each row, from 1, and its cells."""
    _, header = next(lines, (0, []))
    if not any(header):
        what = "a blank first line" if header else "an empty file"
        raise DataError(f"{path}: {what}; expected a header with the names of the columns")
    if (name := repeated(header)) is not None:
        raise DataError(f"{path}: the header has the column {name!r} twice; rename one of them")
    blank: list[str] = []
    for number, cells in lines:
        row = Row(dict(zip(header, cells, strict=False)), path, number)
        if not any(cells) and len(cells) < 2:
            blank.append(row.where)  # at the end of a file it is no row
            continue
        noted("blank line, which is no row", blank[0] if blank else "", len(blank))
        blank = []
        if len(cells) != len(header):
            expected = f"expected {counted(len(header), 'column')} as in the header"
            raise DataError(f"{row.where}: {expected}, not {len(cells)}; {advice}")
        yield row


def _cells(path: Path) -> tuple[Iterator[tuple[int, list[str]]], str]:
    """The rows of a .csv file, and what to do where one is broken."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a document may be long; the library's limit is 131,072
    advice = 'a text with a comma, a quotation mark or a line end stands in quotation marks, each of its own as ""'

    def read() -> Iterator[tuple[int, list[str]]]:
        table = csv.reader(io.StringIO(read_text(path), newline=""), strict=True, skipinitialspace=True)
        before = 0
        try:
            for cells in table:
                if table.line_num > before + 1:
                    noted("row of several lines, whose texts are joined", f"{path} line {before + 1}")
                before = table.line_num
                yield before, cells
        except csv.Error as error:
            raise DataError(f"{path} line {before + 1}: {error}; {advice}") from error

    return read(), advice


def _fields(path: Path) -> tuple[Iterator[tuple[int, list[str]]], str]:
    """The rows of a .tsv file, and what to do where one is broken."""

    def read() -> Iterator[tuple[int, list[str]]]:
        for number, line in enumerate(read_lines(path), 1):
            cells = line.split("\t")
            if quoted := sum(_QUOTED.fullmatch(cell) is not None for cell in cells):
                noted("text in quotation marks, which are part of it", f"{path} line {number}", quoted)
            yield number, cells

    return read(), "a text with tabs or line ends belongs into a .csv or .jsonl file"


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, with those of `columns` that it has. DataError: it has none of them."""
    from pyarrow import parquet

    with reading(path, "a Parquet file"), parquet.ParquetFile(path) as table:
        there = table.schema_arrow.names
        chosen = [name for name in columns if name in there]
        if not chosen:
            raise DataError(f"{path}: no column {' or '.join(columns)} (found: {', '.join(there)})")
        for batch in table.iter_batches(batch_size=256, columns=chosen):
            yield from batch.to_pylist()
