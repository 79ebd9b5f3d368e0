"""The sample corpora of commands, meetings, articles and text translation: what they promise, through their readers."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.data import AMI, SLURP, Parallel, XSum
from attnlab.data.corpus import Kind, Reader
from attnlab.data.samples import (
    articles,
    commands,
    meetings,
    translations,
    write_articles,
    write_commands,
    write_meetings,
    write_translations,
)

CORPORA: dict[str, tuple[Callable[..., Path], Reader, Kind]] = {
    "commands": (write_commands, SLURP(), "audio"),
    "meetings": (write_meetings, AMI(), "audio"),
    "articles": (write_articles, XSum(), "text"),
    "translations": (write_translations, Parallel(), "text"),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "SIZES", {"train": 90, "devel": 5, "test": 5})
    monkeypatch.setattr(meetings, "MEETINGS", {"train": 2, "dev": 1, "eval": 1})
    monkeypatch.setattr(meetings, "TURNS", 2)
    monkeypatch.setattr(articles, "SIZES", {"train": 20, "validation": 5, "test": 5})
    monkeypatch.setattr(translations, "SIZES", {"train": 20, "dev": 5, "test": 5})


def contents(root: Path) -> dict[str, str]:
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*.*")}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", CORPORA)
def test_the_reader_of_the_real_corpus_reads_it(name: str, tmp_path: Path) -> None:
    write, reader, kind = CORPORA[name]
    root = write(tmp_path, seed=3)
    reader.check(root, reader.splits, kind)
    ids = []
    for split in reader.splits:
        found = reader.read(root, split, kind, False)
        ids += [f"{split} {x.id}" for x in found]
        assert all(x.source and x.target for x in found)
    sizes = {"commands": 100, "meetings": 4 * 4 * 2, "articles": 30, "translations": 30}
    assert len(ids) == len(set(ids)) == sizes[name]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["articles", "translations"])
def test_the_same_seed_gives_the_same_bytes_and_damage_is_mended(name: str, tmp_path: Path) -> None:
    write = CORPORA[name][0]
    one, two = write(tmp_path / "one", seed=3), write(tmp_path / "two", seed=3)
    assert contents(one) == contents(two)
    assert write(tmp_path / "one", seed=4).name != one.name
    damaged = next(p for p in sorted(two.iterdir()) if p.name.startswith("train"))
    damaged.write_text("x\n")
    assert write(tmp_path / "two", seed=3) == two and contents(one) == contents(two)


@pytest.mark.usefixtures("small")
def test_spoken_samples_are_spoken_again_alike(tmp_path: Path) -> None:
    assert contents(write_meetings(tmp_path / "one", seed=3)) == contents(write_meetings(tmp_path / "two", seed=3))


def test_commands_keep_classes_and_words_of_the_test_in_training() -> None:
    splits = commands.split_prompts(1)
    assert {name: len(prompts) for name, prompts in splits.items()} == commands.SIZES
    sentences = [sentence for prompts in splits.values() for _, sentence in prompts]
    assert len(sentences) == len(set(sentences))
    known = {word for _, sentence in splits["train"] for word in sentence.split()}
    assert all(known.issuperset(sentence.split()) for _, sentence in splits["test"])
    assert {intent for intent, _ in splits["train"]} == set(commands.TEMPLATES) >= {i for i, _ in splits["test"]}


def test_a_summary_can_be_checked_against_its_article() -> None:
    splits = articles.split_articles(1)
    summaries = [a.summary for found in splits.values() for a in found]
    assert len(summaries) == len(set(summaries)) == sum(articles.SIZES.values())
    joints = {"after", "a", "at", "in", "on"}
    for article in splits["test"]:
        words = set(article.document.replace(".", "").split())
        assert set(article.summary.rstrip(".").split()) - joints <= words
        assert article.summary not in article.document
        towns = [town for town in articles.TOWNS if town in article.document]
        assert len(towns) == 2  # one of them is not where it happened


def test_translations_are_the_grammar_s() -> None:
    splits = translations.split_pairs(1)
    assert {name: len(pairs) for name, pairs in splits.items()} == translations.SIZES
    english = [pair.english for pairs in splits.values() for pair in pairs]
    assert len(english) == len(set(english))


def test_turns_name_every_word_sooner_or_later() -> None:
    said = meetings.turns(random.Random(1))
    heard = " ".join(next(said) for _ in range(2000))
    assert all(word in heard for words in meetings.WORDS.values() for word in words)
