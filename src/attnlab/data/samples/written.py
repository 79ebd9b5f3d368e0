"""The sample corpora of text: translations (one file for each language) and news articles in XSum's layout.

An article gives the event, its place, its day and the number of people in one sentence each, among other sentences.
The summary joins these facts, so each of its words can be checked against the article.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from attnlab.data.samples import draw_splits, sample_corpus, write_lines
from attnlab.data.samples.grammar import Grammar

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


def write_translations(cache_dir: Path, seed: int = 1) -> Path:
    """The directory with {train,dev,test}.en and .de, written unless it exists."""

    def write(root: Path) -> None:
        drawn = Grammar(random.Random(seed)).sentences()
        for split, sentences in draw_splits(drawn, PAIRS, lambda sentence: sentence.english).items():
            write_lines(root / f"{split}.en", [sentence.english for sentence in sentences])
            write_lines(root / f"{split}.de", [sentence.german for sentence in sentences])

    return sample_corpus(cache_dir, "translations", seed, write)


def write_articles(cache_dir: Path, seed: int = 1) -> Path:
    """The directory with {train,validation,test}.source and .target, written unless it exists."""

    def write(root: Path) -> None:
        for split, pairs in draw_splits(articles(random.Random(seed)), ARTICLES, lambda pair: pair[1]).items():
            write_lines(root / f"{split}.source", [document for document, _ in pairs])
            write_lines(root / f"{split}.target", [summary for _, summary in pairs])

    return sample_corpus(cache_dir, "articles", seed, write)


def articles(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Documents with distinct one-sentence summaries, without end."""
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
