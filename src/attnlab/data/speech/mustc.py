"""Reader of MuST-C in its published layout (v1.0 and v2).

<root>/en-de/data/<split>/wav/ted_<n>.wav      one recording per talk, any sample rate
<root>/en-de/data/<split>/txt/<split>.yaml     one list item per segment: offset and duration in seconds, wav
<root>/en-de/data/<split>/txt/<split>.en, .de  one line per segment, in the order of the YAML list
"""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import yaml

from attnlab.data.corpus import Kind, Reader, Segment, excerpt, inspect_audio, refuse_empty
from attnlab.data.files import read_lines, read_text, squeeze
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

    def files(self, root: Path, split: str) -> list[Path]:
        """The list of segments, the transcripts and the translations of a split."""
        text = root / self.pair / "data" / split / "txt"
        return [text / f"{split}.{suffix}" for suffix in ("yaml", *self.languages)]

    def find(self, root: Path, split: str, kind: Kind) -> None:
        if not (root / self.pair).is_dir():
            self.missing(root / self.pair)
        files = self.files(root, split)
        self.need(*files, folder=files[0].parents[1] / "wav")

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> list[Segment]:
        yaml_path, *paths = self.files(root, split)
        items = read_items(yaml_path)
        sources, targets = ([line.strip() for line in read_lines(path)] for path in paths)
        if not len(items) == len(sources) == len(targets):
            lines = f"{len(sources)} lines of {paths[0].name}, {len(targets)} lines of {paths[1].name}"
            raise DataError(f"{yaml_path}: {len(items)} segments, but {lines}; expected equal numbers")
        if self.target == "transcript":
            paths, targets = paths[:1], sources
        for number, text in enumerate(targets, 1):
            refuse_empty(text, f"{paths[-1]} line {number}", drop_empty)
        headers: dict[Path, tuple[int, int]] = {}
        places: list[tuple[str, float, dict[str, Any]]] = []  # of each segment: stem, offset, samples
        for where, item in items.items():
            try:
                audio = yaml_path.parents[1] / "wav" / item["wav"]
                offset, duration = float(item["offset"]), float(item["duration"])
            except (LookupError, TypeError, ValueError):
                offset = math.nan
            if not (0 <= offset < math.inf and 0 < duration < math.inf):
                raise DataError(f"{where}: expected wav, offset and duration in seconds, not {item!r:.160}")
            if audio not in headers:
                headers[audio] = inspect_audio(audio, where)
            rate, _ = headers[audio]
            start, count = int(offset * rate), int(duration * rate)  # truncated, as published
            part = excerpt(audio, headers[audio], start, start + count, where, END_TOLERANCE_SECONDS)
            places.append((audio.stem, offset, part))
        seen: Counter[str] = Counter()
        segments: dict[int, Segment] = {}
        for i in sorted(range(len(places)), key=lambda i: places[i][1]):
            stem, _, part = places[i]
            segments[i] = Segment(id=f"{stem}_{seen[stem]}", source=sources[i], target=targets[i], **part)
            seen[stem] += 1
        return [segments[i] for i in range(len(places))]

    def sample(self, cache_dir: Path) -> Path:
        from attnlab.data.samples.spoken import write_speech_translation

        return write_speech_translation(cache_dir)


def read_items(path: Path) -> dict[str, Any]:
    """The items of a list of segments by file and line; every scalar stays a string."""
    text = read_text(path)
    lines = text.removesuffix("\n").split("\n")
    if all(map(_PLAIN_ITEM.fullmatch, lines)):
        pairs = (line.strip()[3:-1].split(", ") for line in lines)
        return {f"{path} line {i}": dict(pair.split(": ") for pair in item) for i, item in enumerate(pairs, 1)}
    try:
        items = yaml.load(text, Loader=_Loader) or []
    except yaml.YAMLError as error:
        raise DataError(f"{path}: malformed YAML ({squeeze(str(error))[:160]})") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: expected a list of segments, '- {{duration: ...}}'")
    return {f"{path} item {i}": item for i, item in enumerate(items, 1)}
