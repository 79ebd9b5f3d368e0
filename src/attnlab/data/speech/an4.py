"""Reader of CMU's AN4, and of other corpora laid out for CMU Sphinx.

<root>/etc/an4_{train,test}.fileids          one path per line, without suffix
<root>/etc/an4_{train,test}.transcription    WORDS (utterance), in the same order; <s> WORDS </s> is allowed
<root>/wav/<path>.sph                        or another suffix of AUDIO; .raw is not read
<root>/feat/<path>.mfc                       stored features
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from attnlab.data.corpus import (
    AUDIO,
    Kind,
    Reader,
    Segment,
    Stored,
    Utterance,
    read_lines,
    recording,
    refuse_empty,
    trimmed,
)
from attnlab.errors import DataError

_LINE = re.compile(r"(?P<text>.*?)\s*\((?P<id>[^()]+)\)")


class AN4(Reader):
    """AN4.  It has no validation split: every `dev_every`-th training speaker, sorted by name, is held out for it.

    Args:
        stem: the name in the names of the files in etc/.
        dev_every: at least 2.
    """

    kinds = ("audio", "stored")
    layout = "data_root must hold etc/<name>_{train,test}.fileids and .transcription, and wav/ or feat/"

    def __init__(self, stem: str = "an4", dev_every: Annotated[int, Ge(2)] = 12) -> None:
        self.name, self.stem, self.dev_every = stem.upper(), stem, dev_every

    def files(self, root: Path, split: str) -> tuple[Path, Path]:
        """The .fileids and the .transcription of a split; dev is in those of train."""
        stem = root / "etc" / f"{self.stem}_{'test' if split == 'test' else 'train'}"
        return stem.with_name(stem.name + ".fileids"), stem.with_name(stem.name + ".transcription")

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.need(*self.files(root, split), folders=[root / ("wav" if kind == "audio" else "feat")])

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        ids_path, text_path = self.files(root, split)
        ids, lines = (trimmed([line.strip() for line in read_lines(path)], 0) for path in (ids_path, text_path))
        if len(ids) != len(lines):
            raise DataError(f"{text_path} has {len(lines)} lines; expected {len(ids)} as in {ids_path.name}")
        utterances: list[Utterance] = []
        for number, (id, line) in enumerate(zip(ids, lines, strict=True), 1):
            match = _LINE.fullmatch(line)
            if not match or match["id"] != Path(id).name:
                raise DataError(f"{text_path} line {number}: expected 'WORDS ({Path(id).name})', not {line!r:.60}")
            text = " ".join(word for word in match["text"].split() if word not in ("<s>", "</s>"))
            utterances.append(self._utterance(root, id, text, kind, f"{ids_path} line {number}"))
        empty = (f"{text_path} line {number}" for number, x in enumerate(utterances, 1) if not x.target)
        refuse_empty(empty, drop_empty)
        if split == "test":
            return utterances
        speakers = sorted({Path(id).parent.name for id in ids})
        dev = set(speakers[self.dev_every - 1 :: self.dev_every]) or {speakers[-1]}
        return [x for x, id in zip(utterances, ids, strict=True) if (Path(id).parent.name in dev) == (split == "dev")]

    def _utterance(self, root: Path, id: str, text: str, kind: Kind, where: str) -> Utterance:
        name = Path(id).name
        if kind == "stored":
            path = root / "feat" / f"{id}.mfc"
            if not path.is_file():
                raise DataError(f"{path}: missing features, named in {where}")
            return Stored(id=name, source=text, target=text, path=path)
        paths = [root / "wav" / f"{id}{suffix}" for suffix in (".sph", *AUDIO)]
        audio = next((path for path in paths if path.is_file()), paths[0])
        return Segment(id=name, source=text, target=text, **recording(audio, where))
