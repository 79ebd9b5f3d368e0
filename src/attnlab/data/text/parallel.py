"""Reader of parallel text: two files with one sentence per line, or two SGML files with numbered segments."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from attnlab.data.corpus import Kind, Reader, Utterance, held_out
from attnlab.data.files import read_text, squeeze
from attnlab.data.text.summaries import pair, read_pairs
from attnlab.errors import DataError

_SEGMENT = re.compile(r"<seg[^>]*\bid=\"?([^\">\s]+)\"?[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Files:
    """The files of a layout: names relative to the root, with `{lang}`, `{side}` (src, ref) and so on to be filled in.

    Attributes:
        train: the training files.
        dev, test: the held-out files; empty: held out of the training files.
        subwords: whether words are split into pieces; every piece but the last of a word ends in `@@`.
    """

    train: tuple[str, ...]
    dev: str = ""
    test: str = ""
    subwords: bool = False


LAYOUTS = {
    "wmt16-google": Files(
        ("train.tok.clean.bpe.32000.{lang}",),
        "newstest2013.tok.bpe.32000.{lang}",
        "newstest2014.tok.bpe.32000.{lang}",
        subwords=True,
    ),
    "wmt": Files(
        (
            "training/europarl-v7.{pair}.{lang}",
            "training/commoncrawl.{pair}.{lang}",
            "training/news-commentary-v11.{pair}.{lang}",
        ),
        "dev/newstest2013.{lang}",
        "test-full/newstest2014-deen-{side}.{lang}.sgm",
    ),
    "opennmt": Files(("{from}-train.txt",), "{from}-val.txt"),
    "plain": Files(("train.{lang}",), "dev.{lang}", "test.{lang}"),
    "multi30k": Files(("train.{lang}",), "val.{lang}", "test_2016_flickr.{lang}"),
}


class Parallel(Reader):
    """Sentence pairs: line i of the source file and line i of the target file.

    Typographic apostrophes become plain ones.  In a layout with `subwords` the pieces of a word are joined; in other
    layouts `@@` is text.

    Args:
        source_language, target_language: the codes in the file names.
        layout: one of LAYOUTS, or "auto": the first one whose files all exist.
        unescape: replace HTML entities by their characters.
        hold_out: for a split without files, every `hold_out`-th pair is taken out of the training pairs; at least 3.
    """

    unit = "pairs"
    kinds = ("text",)

    def __init__(
        self,
        source_language: str = "en",
        target_language: str = "de",
        layout: Literal["auto", "wmt16-google", "wmt", "opennmt", "plain", "multi30k"] = "auto",
        unescape: bool = False,
        hold_out: Annotated[int, Ge(3)] = 100,
    ) -> None:
        self.languages, self.chosen = (source_language, target_language), layout
        self.unescape, self.hold_out = unescape, hold_out
        self.name = f"{source_language}-{target_language} text"
        names = ", ".join(self._fill(files.train[0], 0) for files in LAYOUTS.values())
        self.layout = f"data_root must hold one of the layouts {', '.join(LAYOUTS)} (training files: {names})"

    def _fill(self, name: str, side: int) -> str:
        source, target = self.languages
        words = {"lang": self.languages[side], "pair": f"{target}-{source}", "side": ("src", "ref")[side]}
        return name.format(**words, **{"from": ("src", "tgt")[side]})

    def files(self, root: Path) -> Files:
        """The layout of `root`.  Raises DataError where no layout fits."""
        for name, files in LAYOUTS.items():
            if self.chosen == name or (self.chosen == "auto" and all(p.is_file() for p in self._all(root, files))):
                return files
        nearest = max(LAYOUTS.values(), key=lambda files: sum(path.exists() for path in self._all(root, files)))
        paths = list(self._all(root, nearest))
        if any(path.exists() for path in paths):
            self.missing(min((path for path in paths if not path.is_file()), key=lambda path: not path.exists()))
        raise DataError(f"data_root={root}: unknown layout; {self.layout}")

    def _all(self, root: Path, files: Files) -> list[Path]:
        names = [name for name in (*files.train, files.dev, files.test) if name]
        return [root / self._fill(name, side) for name in names for side in (0, 1)]

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.need(*self._all(root, self.files(root)))

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        files = self.files(root)
        if name := {"dev": files.dev, "test": files.test}.get(split):
            return self._pairs(root, name, split, drop_empty, files.subwords)
        train = [
            pair
            for name in files.train
            for pair in self._pairs(root, name, Path(name).name.split(".")[0], drop_empty, files.subwords)
        ]
        missing = [split for split, name in (("dev", files.dev), ("test", files.test)) if not name]
        return list(held_out(train, split, missing, self.hold_out))

    def _pairs(self, root: Path, name: str, split: str, drop_empty: bool, subwords: bool) -> list[Utterance]:
        source, target = (root / self._fill(name, side) for side in (0, 1))
        pairs = (_sgml if name.endswith(".sgm") else read_pairs)(source, target, split, drop_empty)
        return [
            replace(x, source=self._plain(x.source, subwords), target=self._plain(x.target, subwords)) for x in pairs
        ]

    def plain(self, text: str) -> str:
        return self._plain(super().plain(text), subwords=False)

    def _plain(self, text: str, subwords: bool) -> str:
        if subwords:
            text = text.replace("@@ ", "").removesuffix("@@")
        text = text.replace("’", "'")
        return html.unescape(text) if self.unescape else text

    def sample(self, cache_dir: Path) -> Path:
        from attnlab.data.samples.written import write_translations

        return write_translations(cache_dir)


def _sgml(source: Path, target: Path, name: str, drop_empty: bool) -> list[Utterance]:
    sides = [[squeeze(html.unescape(text)) for _, text in _SEGMENT.findall(read_text(p))] for p in (source, target)]
    if not sides[0] or len(sides[0]) != len(sides[1]):
        raise DataError(f"{source} has {len(sides[0])} segments, {target.name} {len(sides[1])}; expected equal numbers")
    return [
        pair(f"{name}_{i}", left, right, f"{source} segment {i}", f"{target} segment {i}", drop_empty)
        for i, (left, right) in enumerate(zip(*sides, strict=True), 1)
    ]
