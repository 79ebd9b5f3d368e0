"""Reader of MuST-C in its published layout (v1.0 and v2).

<root>/en-de/data/<split>/wav/ted_<n>.wav      one recording per talk, any sample rate
<root>/en-de/data/<split>/txt/<split>.yaml     the list of segments, `- {duration: 3.5, offset: 16.08, ..., wav: ...}`
<root>/en-de/data/<split>/txt/<split>.en, .de  one line per segment, in the order of the YAML list
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from attnlab.data.corpus import (
    Kind,
    Reader,
    Segment,
    excerpt,
    inspect_audio,
    read_lines,
    read_text,
    reading,
    refuse_empty,
    repeated,
    spoken_sample,
    trimmed,
)
from attnlab.errors import DataError

# A segment may end this much after its recording (rounding of published offsets); it is cut at the end.
END_TOLERANCE_SECONDS = 0.010
PUBLISHED = re.compile(r"- \{(\w+: [\w.+-]+(?:, \w+: [\w.+-]+)*)\}\s*")  # a line of the lists of segments


@dataclass(eq=False)
class MustC(Reader):
    """MuST-C.

    Ids are `<wav stem>_<i>`, where i counts the segments of a recording in the order of their offsets, then of lines.

    Args:
        source_language, target_language: the codes in the names of folder and files.
        target: the decoder's text: "translation" or "transcript" (recognition).
    """

    source_language: str = "en"
    target_language: str = "de"
    target: Literal["translation", "transcript"] = "translation"

    unit = "segments"
    splits = ("train", "dev", "tst-COMMON")

    def __post_init__(self) -> None:
        self.pair = f"{self.source_language}-{self.target_language}"
        self.name = f"MuST-C {self.pair}"
        self.language = self.target_language if self.target == "translation" else self.source_language
        self.layout = (
            f"data_root must be the directory that holds {self.pair}, with data/<split>/txt/<split>.yaml, "
            f".{self.source_language}, .{self.target_language} and data/<split>/wav/*.wav for {', '.join(self.splits)}"
        )

    def files(self, root: Path, split: str) -> list[Path]:
        """The list of segments, the transcripts and the translations of a split."""
        text = root / self.pair / "data" / split / "txt"
        return [text / f"{split}.{suffix}" for suffix in ("yaml", self.source_language, self.target_language)]

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.need(folders=[root / self.pair])
        files = self.files(root, split)
        self.need(*files, folders=[files[0].parents[1] / "wav"])

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> list[Segment]:
        yaml_path, *paths = self.files(root, split)
        items = _listed(yaml_path)
        sources, targets = (trimmed([line.strip() for line in read_lines(path)], len(items)) for path in paths)
        if not len(items) == len(sources) == len(targets):
            lines = f"{len(sources)} lines of {paths[0].name}, {len(targets)} lines of {paths[1].name}"
            raise DataError(f"{yaml_path}: {len(items)} segments, but {lines}; expected equal numbers")
        if self.target == "transcript":
            paths, targets = paths[:1], sources
        refuse_empty((f"{paths[-1]} line {i}" for i, target in enumerate(targets, 1) if not target), drop_empty)
        headers: dict[Path, tuple[int, int]] = {}
        segments, offsets = [], []
        for (line, item), source, target in zip(items, sources, targets, strict=True):
            where = f"{yaml_path} line {line}"
            try:
                audio = yaml_path.parents[1] / "wav" / item["wav"]
                offset, duration = float(item["offset"]), float(item["duration"])
            except (LookupError, ValueError, TypeError):
                offset = math.nan
            if not (0 <= offset < math.inf and 0 < duration < math.inf):
                raise DataError(f"{where}: expected wav, offset and duration in seconds, not {item!r:.160}")
            if audio not in headers:
                headers[audio] = inspect_audio(audio, where)
            rate, _ = headers[audio]
            start, count = int(offset * rate), int(duration * rate)  # truncated, as published
            part = excerpt(audio, headers[audio], start, start + count, where, END_TOLERANCE_SECONDS)
            segments.append(Segment(id=audio.stem, source=source, target=target, **part))
            offsets.append(offset)
        counts: Counter[str] = Counter()
        for i in sorted(range(len(segments)), key=offsets.__getitem__):
            stem = segments[i].id
            segments[i] = replace(segments[i], id=f"{stem}_{counts[stem]}")
            counts[stem] += 1
        return segments

    def sample(self, cache_dir: Path) -> Path:
        return spoken_sample(cache_dir, "speech-translation")


def _listed(path: Path) -> list[tuple[int, Any]]:
    """Line and fields of each segment.  A list that is not written as the published ones takes a YAML parser."""
    lines = trimmed([*read_lines(path)], 0)
    if all(matches := [PUBLISHED.fullmatch(line) for line in lines]):
        fields = [match[1].replace(": ", ", ").split(", ") for match in matches if match]
        return [(i, _fields(path, i, values)) for i, values in enumerate(fields, 1)]
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    segments: list[tuple[int, list[Any]]] = []
    depth = 0
    with reading(path, "a YAML list of segments, each with wav, offset and duration"):
        for event in yaml.parse(read_text(path), loader):  # events alone: composing them is recursive
            if isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.NodeEvent):
                line = event.start_mark.line + 1  # type: ignore[union-attr]
                if depth == 1 and isinstance(event, yaml.MappingStartEvent):
                    segments.append((line, []))
                elif depth == 2:
                    if isinstance(event, yaml.AliasEvent):
                        raise ValueError(f"line {line}: a reference, *{event.anchor}; write its value in its place")
                    segments[-1][1].append(getattr(event, "value", None))  # None: a list
                elif depth == 1 or (depth == 0 and not isinstance(event, yaml.SequenceStartEvent)):
                    raise ValueError(f"line {line}")
                depth += isinstance(event, yaml.CollectionStartEvent)
    return [(line, _fields(path, line, values)) for line, values in segments]


def _fields(path: Path, line: int, values: list[Any]) -> dict[Any, Any]:
    """The fields of a segment, from keys and values in turn.  DataError: a key occurs twice."""
    if (key := repeated(values[::2])) is not None:
        raise DataError(f"{path} line {line}: the key {key!r} occurs twice")
    return dict(zip(values[::2], values[1::2], strict=True))
