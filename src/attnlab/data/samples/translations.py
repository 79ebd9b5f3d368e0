"""The embedded corpus of text translation: sentences of `grammar`, one per line, in two files for each split."""

from __future__ import annotations

import random
from pathlib import Path

from attnlab.data.samples import grammar, keeping
from attnlab.data.samples.grammar import Grammar, Sentence
from attnlab.data.samples.keeping import fingerprint, write_lines
from attnlab.run.cache import stored_files

SIZES = {"train": 6000, "dev": 100, "test": 200}


def write_translations(cache_dir: Path, seed: int = 1) -> Path:
    """Write the corpus, unless it exists.

    Args:
        cache_dir: the directory that samples are stored in.
        seed: of the sentences.

    Returns:
        The directory with {train,dev,test}.en and .de.

    Raises:
        DataError: the corpus cannot be written.
    """
    version = fingerprint([grammar, keeping, __file__], seed, spoken=False)
    return stored_files(Path(cache_dir) / f"translations-{version}", lambda root: _write(root, seed))


def split_pairs(seed: int) -> dict[str, list[Sentence]]:
    """The sentence pairs of each split.  No English sentence occurs twice in all splits together.

    Args:
        seed: of the pairs.
    """
    drawn = iter(Grammar(random.Random(seed)).sentences())
    seen: dict[str, Sentence] = {}
    while len(seen) < sum(SIZES.values()):
        sentence = next(drawn)
        seen.setdefault(sentence.english, sentence)
    sentences = iter(seen.values())
    return {split: [next(sentences) for _ in range(size)] for split, size in SIZES.items()}


def _write(root: Path, seed: int) -> None:
    for split, found in split_pairs(seed).items():
        write_lines(root / f"{split}.en", [sentence.english for sentence in found])
        write_lines(root / f"{split}.de", [sentence.german for sentence in found])
