"""Sample corpora: writers of the layouts of real corpora. The same settings give the same bytes.

The sentences of translations, commands and meetings are the .tsv files of this package; the other texts are drawn.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write each of `lines` and a line feed to `path`, as UTF-8; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def sample_texts(name: str) -> Iterator[list[str]]:
    """The columns of each line of a .tsv file of this package: "translations", "commands" or "turns"."""
    text = files(__name__).joinpath(f"{name}.tsv").read_text(encoding="utf-8")
    return (line.split("\t") for line in text.splitlines())


def draw_splits(
    items: Iterable[Item],
    sizes: Mapping[str, int],
    text: Callable[[Item], str],
    words: Callable[[Item], Iterable[Any]] = lambda item: (),
) -> dict[str, list[Item]]:
    """Items of each split, the first for training. No `text` occurs twice; later splits have only `words` of the first.

    `sizes` are the numbers of items.
    """
    items, seen = iter(items), set()
    known: set[Any] = set()
    splits: dict[str, list[Item]] = {}
    for split, size in sizes.items():
        chosen: list[Item] = []
        for item in items:
            if text(item) not in seen:
                seen.add(text(item))
                if not splits or known.issuperset(words(item)):
                    chosen.append(item)
            if len(chosen) == size:
                break
        known = known or {word for item in chosen for word in words(item)}
        splits[split] = chosen
    return splits
