"""Reader of MuST-C in its published layout (v1.0 and v2).

    <root>/en-de/data/<split>/wav/ted_<n>.wav      one recording per talk, any sample rate
    <root>/en-de/data/<split>/txt/<split>.yaml     one list item per segment: offset and duration in seconds, wav
    <root>/en-de/data/<split>/txt/<split>.en, .de  one line per segment, in the order of the YAML list

Everything is checked before anything is computed; each error is one line that names the file and the line.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import yaml

from attnlab.data.corpus import Kind, Reader, Segment, inspect_audio, read_lines, read_text
from attnlab.errors import ConfigError, DataError

# A segment may end this much after its recording (rounding of published offsets); it is cut at the end.
END_TOLERANCE_SECONDS = 0.010

# The published form, one plain flow mapping per line: PyYAML takes half a minute for MuST-C, this regex two seconds.
_SCALAR = r"-?\w[\w.+-]*"
_PLAIN_ITEM = re.compile(rf"- \{{(\w+: {_SCALAR}(?:, \w+: {_SCALAR})*)\}}[ \r]*")
_Loader: type = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


Target = Literal["translation", "transcript"]


class MustC(Reader):
    """MuST-C.

    Args:
        source_language, target_language: the codes in the names of folder and files.
        target: the decoder's text: "translation" or "transcript" (recognition).

    Raises:
        ConfigError: `target` is neither.
    """

    unit = "segments"
    splits = ("train", "dev", "tst-COMMON")

    def __init__(
        self, source_language: str = "en", target_language: str = "de", target: Target = "translation"
    ) -> None:
        if target not in get_args(Target):
            raise ConfigError(f"task.target={target}: expected {' or '.join(get_args(Target))}")
        self.languages, self.target = (source_language, target_language), target
        self.name = f"MuST-C {source_language}-{target_language}"

    def check(self, root: Path, splits: Sequence[str], kind: Kind) -> None:
        check_layout(root, splits, *self.languages)

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> list[Segment]:
        required = "target" if self.target == "translation" else "source"
        segments = read_split(root, split, *self.languages, required=None if drop_empty else required)
        return segments if self.target == "translation" else [replace(x, target=x.source) for x in segments]

    def sample(self, cache_dir: Path) -> Path:
        from attnlab.data.samples import write_speech_translation

        return write_speech_translation(cache_dir)


@dataclass(frozen=True, slots=True)
class _Item:
    line: int
    wav: str
    offset: float
    duration: float


def read_split(
    root: Path, split: str, source_language: str, target_language: str, required: str | None = "target"
) -> list[Segment]:
    """The segments of `<root>/<source>-<target>/data/<split>`, in the order of the files.

    Ids are `<wav stem>_<i>`, where i counts the segments of a recording in the order of their offsets, then of lines.

    Args:
        root: the directory that holds `<source>-<target>`.
        split: the name of the split.
        source_language, target_language: the codes in the names of folder and files.
        required: the text that must not be empty: "target", "source", or None.

    Raises:
        DataError: missing or malformed files, unequal numbers of lines, segments outside their recording, unreadable
            audio, empty text.
    """
    folder = split_folder(root, split, source_language, target_language)
    yaml_path = folder / "txt" / f"{split}.yaml"
    source_path, target_path = (folder / "txt" / f"{split}.{x}" for x in (source_language, target_language))
    items = _read_items(yaml_path)
    sources, targets = read_lines(source_path), read_lines(target_path)
    if not len(items) == len(sources) == len(targets):
        raise DataError(
            f"{yaml_path.parent}: {yaml_path.name} has {len(items)} segments, {source_path.name} {len(sources)} lines, "
            f"{target_path.name} {len(targets)} lines; expected one of each per utterance"
        )
    if not items:
        raise DataError(f"{yaml_path}: no segments")
    if required:
        _refuse_empty(*((source_path, sources) if required == "source" else (target_path, targets)))
    ids = _number_by_offset(items)
    recordings: dict[str, tuple[int, int]] = {}
    segments = []
    for i, item in enumerate(items):
        if item.wav not in recordings:
            recordings[item.wav] = inspect_audio(folder / "wav" / item.wav, f"{yaml_path} line {item.line}")
        rate, length = recordings[item.wav]
        # The published preparation truncates both to whole samples.
        start, count = int(item.offset * rate), int(item.duration * rate)
        if count < 1:
            raise DataError(
                f"{yaml_path} line {item.line}: duration {item.duration} s is less than one sample at {rate} Hz"
            )
        if start + count > length + END_TOLERANCE_SECONDS * rate or start >= length:
            raise DataError(
                f"{yaml_path} line {item.line}: the segment ends at {item.offset + item.duration:.3f} s, "
                f"but {item.wav} is {length / rate:.3f} s long"
            )
        segments.append(
            Segment(
                id=ids[i],
                source=sources[i],
                target=targets[i],
                audio=folder / "wav" / item.wav,
                rate=rate,
                start=start,
                num_samples=min(count, length - start),
            )
        )
    return segments


def check_layout(root: Path, splits: Sequence[str], source_language: str, target_language: str) -> None:
    """Raise DataError where a file or folder of `splits` is missing; the message names it.

    Args:
        root: of the corpus.
        splits: names of the splits.
        source_language: of the speech, for instance en.
        target_language: of the translation, for instance de.
    """
    try:
        _check_layout(root, splits, source_language, target_language)
    except OSError as error:
        raise DataError(f"data_root={root}: cannot be read ({error.strerror}: {error.filename})") from error


def _check_layout(root: Path, splits: Sequence[str], source_language: str, target_language: str) -> None:
    pair = f"{source_language}-{target_language}"
    belongs = f"data_root must be the directory that holds {pair} (with {pair}/data/train/txt/train.yaml and so on)"
    if not root.exists():
        raise DataError(f"data_root={root}: no such directory; {belongs}")
    if not root.is_dir():
        raise DataError(f"data_root={root} is a file; {belongs}")
    if not (root / pair).is_dir():
        resolved = root.resolve()
        for folder in (resolved, *resolved.parents):
            if folder.name == pair:
                raise DataError(f"data_root={root} is inside {pair}; set data_root={folder.parent}")
        for folder in sorted(root.glob(f"*/{pair}")):
            raise DataError(f"data_root={root} does not hold {pair}, but {folder.parent} does: set data_root to that")
        there = sorted(path.name for path in root.iterdir())[:8]
        found = ", ".join(there) or "nothing"
        raise DataError(f"data_root={root}: {root / pair} is missing (found {found}); {belongs}")
    missing = []
    for split in splits:
        folder = root / pair / "data" / split
        names = [f"txt/{split}.{x}" for x in ("yaml", source_language, target_language)]
        missing += [folder / name for name in names if not (folder / name).is_file()]
        if not (folder / "wav").is_dir():
            missing.append(folder / "wav")
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise DataError(f"data_root={root} is incomplete: {missing[0]} is missing{more}; MuST-C has {_HINT}")


_HINT = "data/<split>/txt/<split>.yaml, .en, .de and data/<split>/wav/*.wav for train, dev and tst-COMMON"


def split_folder(root: Path, split: str, source_language: str, target_language: str) -> Path:
    """The folder of a split in the layout of MuST-C.

    Args:
        root: of the corpus.
        split: its name, for instance tst-COMMON.
        source_language: of the speech, for instance en.
        target_language: of the translation, for instance de.
    """
    return root / f"{source_language}-{target_language}" / "data" / split


def _refuse_empty(path: Path, lines: list[str]) -> None:
    empty = [i for i, line in enumerate(lines, 1) if not line]
    if empty:
        more = f" (and {len(empty) - 1} more lines)" if len(empty) > 1 else ""
        raise DataError(f"{path} line {empty[0]}: empty text{more}; task.data.drop_empty=true leaves such segments out")


def _read_items(path: Path) -> list[_Item]:
    items = []
    for line, entry in _parse(path, read_text(path)):
        for key in ("wav", "offset", "duration"):
            if key not in entry:
                raise DataError(f"{path} line {line}: no key {key!r} (found: {', '.join(entry) or 'none'})")
        offset, duration = (_number(entry[key], key, path, line) for key in ("offset", "duration"))
        if offset < 0:
            raise DataError(f"{path} line {line}: negative offset {entry['offset']}")
        if duration <= 0:
            raise DataError(f"{path} line {line}: duration {entry['duration']} is not positive")
        items.append(_Item(line, entry["wav"], offset, duration))
    return items


def _number(text: str, key: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path} line {line}: {key} is {text!r}, not a number of seconds")
    return value


def _parse(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, mapping) of each list item; every scalar stays a string."""
    lines = text.removesuffix("\n").split("\n")
    if all(map(_PLAIN_ITEM.fullmatch, lines)):
        for number, line in enumerate(lines, 1):
            yield number, dict(pair.split(": ") for pair in line.strip()[3:-1].split(", "))
        return
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise DataError(f"{path}{where}: malformed YAML ({problem})") from error
    if root is None:
        return
    if not isinstance(root, yaml.SequenceNode):
        raise DataError(f"{path} line {root.start_mark.line + 1}: expected a list of segments, '- {{duration: ...}}'")
    for node in root.value:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise DataError(f"{path} line {line}: expected a mapping with duration, offset and wav")
        entry = {}
        for key, value in node.value:
            if not (isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)):
                raise DataError(f"{path} line {value.start_mark.line + 1}: expected plain 'key: value' pairs")
            entry[key.value] = value.value
        yield line, entry


def _number_by_offset(items: list[_Item]) -> list[str]:
    stems = {wav: Path(wav).stem for wav in {item.wav for item in items}}
    by_stem = defaultdict(list)
    for i, item in enumerate(items):
        by_stem[stems[item.wav]].append(i)
    ids = [""] * len(items)
    for stem, members in by_stem.items():
        for n, i in enumerate(sorted(members, key=lambda i: items[i].offset)):
            ids[i] = f"{stem}_{n}"
    return ids
