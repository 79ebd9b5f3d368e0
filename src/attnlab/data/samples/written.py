"""The sample corpora of text: translations (one file for each language) and news articles in XSum's layout.

An article gives the event, its place, its day and the number of people in one sentence each, among other sentences.
The summary joins these facts, so each of its words can be checked against the article.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from attnlab.data.corpus import sample_corpus
from attnlab.data.samples import draw_splits, sample_texts, write_lines

PAIRS = {"train": 6000, "dev": 100, "test": 200}
ARTICLES = {"train": 3000, "validation": 100, "test": 200}

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


def write_translations(cache_dir: Path) -> Path:
    """The directory with {train,dev,test}.en and .de, written unless it exists."""

    def write(root: Path) -> None:
        for split, pairs in draw_splits(sample_texts("translations"), PAIRS, lambda pair: pair[0]).items():
            for column, language in enumerate(("en", "de")):
                write_lines(root / f"{split}.{language}", [pair[column] for pair in pairs])

    return sample_corpus(cache_dir, "translations", 1, write)


def write_articles(cache_dir: Path) -> Path:
    """The directory with {train,validation,test}.source and .target, written unless it exists."""

    def write(root: Path) -> None:
        for split, pairs in draw_splits(articles(random.Random(1)), ARTICLES, lambda pair: pair[1]).items():
            for column, suffix in enumerate(("source", "target")):
                write_lines(root / f"{split}.{suffix}", [pair[column] for pair in pairs])

    return sample_corpus(cache_dir, "articles", 1, write)


def articles(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Documents with one-sentence summaries, without end."""
    seen = set()
    while True:
        event, town, day = rng.choice(list(EVENTS)), rng.choice(TOWNS), rng.choice(DAYS)
        place, number = rng.choice(PLACES), rng.choice(NUMBERS).capitalize()
        scene, fate = EVENTS[event]
        summary = f"{number} people were {fate} after a {event} at a {place} in {town} on {day}."
        if summary in seen:
            continue
        seen.add(summary)
        facts = [
            f"It happened at the {place}.",
            f"The {event} began on {day}.",
            f"{number} people were {fate}.",
            scene,
            *rng.sample(FILLERS, 2),
            f"Help came from {rng.choice([other for other in TOWNS if other != town])}.",
        ]
        rng.shuffle(facts)
        yield " ".join([f"{town} is in the news again.", *facts]), summary
