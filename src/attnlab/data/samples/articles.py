"""The embedded corpus of short news articles with one-sentence summaries, in XSum's layout of parallel files.

An article gives the event, its place, its day and the number of people in one sentence each, among other sentences.
The summary joins these facts, so each of its words can be checked against the article.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnlab.data.samples import keeping
from attnlab.data.samples.keeping import fingerprint, write_lines
from attnlab.run.cache import stored_files

SIZES = {"train": 3000, "validation": 100, "test": 200}

TOWNS = ("Ashford", "Brampton", "Carlow", "Dunmore", "Elgin", "Fenwick", "Granby", "Harlow")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PLACES = ("school", "hotel", "factory", "hospital", "station", "museum")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
EVENTS = {
    "fire": ("Flames and smoke were seen over the roof.", "hurt"),
    "flood": ("Water stood as high as the windows.", "moved to safety"),
    "robbery": ("A masked man asked for money.", "questioned"),
    "strike": ("The workers ask for better pay.", "told to stay at home"),
    "party": ("There was music until midnight.", "given a prize"),
}
FILLERS = (
    "Nobody had expected it.", "The mayor spoke of a long night.", "More is to be said next week.",
    "Neighbours brought tea and blankets.", "Roads nearby were closed for hours.", "Local people came to look.",
)  # fmt: skip


@dataclass(frozen=True)
class Article:
    """A text and its summary.

    Args:
        document: several sentences.
        summary: one sentence.
    """

    document: str
    summary: str


def write_articles(cache_dir: Path, seed: int = 1) -> Path:
    """Write the corpus, unless it exists.

    Args:
        cache_dir: the directory that samples are stored in.
        seed: of the articles.

    Returns:
        The directory with {train,validation,test}.source and .target.

    Raises:
        DataError: the corpus cannot be written.
    """
    version = fingerprint([keeping, __file__], seed, spoken=False)
    return stored_files(Path(cache_dir) / f"articles-{version}", lambda root: _write(root, seed))


def split_articles(seed: int) -> dict[str, list[Article]]:
    """The articles of each split.  No summary occurs twice in all splits together.

    Args:
        seed: of the articles.
    """
    drawn = articles(random.Random(seed))
    return {split: [next(drawn) for _ in range(size)] for split, size in SIZES.items()}


def articles(rng: random.Random) -> Iterator[Article]:
    """Articles with distinct summaries, without end.

    Args:
        rng: what they are drawn with.
    """
    seen = set()
    while True:
        event, town, day = rng.choice(list(EVENTS)), rng.choice(TOWNS), rng.choice(DAYS)
        place, number = rng.choice(PLACES), rng.choice(NUMBERS)
        scene, fate = EVENTS[event]
        summary = f"{number.capitalize()} people were {fate} after a {event} at a {place} in {town} on {day}."
        if summary in seen:
            continue
        seen.add(summary)
        others = [other for other in TOWNS if other != town]
        facts = [
            f"It happened at the {place}.",
            f"The {event} began on {day}.",
            f"{number.capitalize()} people were {fate}.",
            scene,
            *rng.sample(FILLERS, 2),
            f"Help came from {rng.choice(others)}.",
        ]
        rng.shuffle(facts)
        yield Article(" ".join([f"{town} is in the news again.", *facts]), summary)


def _write(root: Path, seed: int) -> None:
    for split, found in split_articles(seed).items():
        write_lines(root / f"{split}.source", [article.document for article in found])
        write_lines(root / f"{split}.target", [article.summary for article in found])
