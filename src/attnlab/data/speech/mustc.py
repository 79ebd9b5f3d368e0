"""Reader of MuST-C in its published layout (v1.0 and v2).

<root>/en-de/data/<split>/wav/ted_<n>.wav      one recording per talk, any sample rate
<root>/en-de/data/<split>/txt/<split>.yaml     one list item per segment: offset and duration in seconds, wav
<root>/en-de/data/<split>/txt/<split>.en, .de  one line per segment, in the order of the YAML list
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from attnlab.data.corpus import Kind, Reader, Segment, excerpt, inspect_audio, refuse_empty
from attnlab.data.files import contents, read_lines, read_text
from attnlab.errors import DataError

# A segment may end this much after its recording (rounding of published offsets); it is cut at the end.
END_TOLERANCE_SECONDS = 0.010

# The published form, one plain flow mapping per line: PyYAML takes half a minute for MuST-C, this regex two seconds.
_SCALAR = r"-?\w[\w.+-]*"
_PLAIN_ITEM = re.compile(rf"- \{{(\w+: {_SCALAR}(?:, \w+: {_SCALAR})*)\}}[ \r]*")
_Loader: type = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class MustC(Reader):
    """MuST-C.

    Ids are `<wav stem>_<i>`, where i counts the segments of a recording in the order of their offsets, then of lines.

    Args:
        source_language, target_language: the codes in the names of folder and files.
        target: the decoder's text: "translation" or "transcript" (recognition).
    """

    unit = "segments"
    splits = ("train", "dev", "tst-COMMON")

    def __init__(
        self,
        source_language: str = "en",
        target_language: str = "de",
        target: Literal["translation", "transcript"] = "translation",
    ) -> None:
        self.languages, self.target = (source_language, target_language), target
        self.pair = f"{source_language}-{target_language}"
        self.name = f"MuST-C {self.pair}"
        self.layout = (
            f"data_root must be the directory that holds {self.pair}, with data/<split>/txt/<split>.yaml, "
            f".{source_language}, .{target_language} and data/<split>/wav/*.wav for train, dev and tst-COMMON"
        )

    def files(self, root: Path, split: str) -> tuple[Path, Path, Path]:
        """The list of segments, the transcripts and the translations of a split."""
        text = root / self.pair / "data" / split / "txt"
        yaml_path, source, target = (text / f"{split}.{suffix}" for suffix in ("yaml", *self.languages))
        return yaml_path, source, target

    def find(self, root: Path, split: str, kind: Kind) -> None:
        if not (root / self.pair).is_dir():
            root = root.resolve()
            inside = [folder.parent for folder in (root, *root.parents) if folder.name == self.pair]
            below = [folder.parent for folder in sorted(root.glob(f"*/{self.pair}"))]
            hint = "".join(f"; set data_root={folder}" for folder in (inside + below)[:1])
            raise DataError(f"data_root={root}: {self.pair} is missing (there: {contents(root)}){hint}; {self.layout}")
        files = self.files(root, split)
        self.need(*files, folder=files[0].parents[1] / "wav")

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> list[Segment]:
        yaml_path, *paths = self.files(root, split)
        items = _read_items(yaml_path)
        sources, targets = ([line.strip() for line in read_lines(path)] for path in paths)
        if not len(items) == len(sources) == len(targets):
            lines = f"{len(sources)} lines of {paths[0].name}, {len(targets)} lines of {paths[1].name}"
            raise DataError(f"{yaml_path}: {len(items)} segments, but {lines}; expected equal numbers")
        if self.target == "transcript":
            paths, targets = paths[:1], sources
        for number, text in enumerate(targets, 1):
            refuse_empty(text, f"{paths[-1]} line {number}", drop_empty)
        ids = _number_by_offset(items)
        headers: dict[str, tuple[int, int]] = {}
        segments = []
        for i, item in enumerate(items):
            where, audio = f"{yaml_path} line {item.line}", yaml_path.parents[1] / "wav" / item.wav
            if item.wav not in headers:
                headers[item.wav] = inspect_audio(audio, where)
            rate, _ = headers[item.wav]
            start, count = int(item.offset * rate), int(item.duration * rate)  # truncated, as published
            part = excerpt(audio, headers[item.wav], start, start + count, where, END_TOLERANCE_SECONDS)
            segments.append(Segment(id=ids[i], source=sources[i], target=targets[i], **part))
        return segments

    def sample(self, cache_dir: Path) -> Path:
        from attnlab.data.samples.spoken import write_speech_translation

        return write_speech_translation(cache_dir)


@dataclass(frozen=True, slots=True)
class _Item:
    line: int
    wav: str
    offset: float
    duration: float


def _read_items(path: Path) -> list[_Item]:
    items = []
    for line, entry in _parse(path, read_text(path)):
        times = []
        for key in ("offset", "duration"):
            try:
                times.append(float(entry[key]))
            except (KeyError, ValueError):
                times.append(math.nan)
        offset, duration = times
        if "wav" not in entry or not (0 <= offset < math.inf and 0 < duration < math.inf):
            there = ", ".join(f"{key}: {entry[key]}" for key in entry if key in ("wav", "offset", "duration"))
            raise DataError(f"{path} line {line}: expected wav, offset and duration in seconds, not {there or 'none'}")
        items.append(_Item(line, entry["wav"], offset, duration))
    return items


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
