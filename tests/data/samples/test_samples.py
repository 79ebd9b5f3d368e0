"""The sample corpora: their bytes, which committed records name, and what they promise, through their readers."""

import hashlib
import math
import re
from pathlib import Path

import numpy as np
import pytest

from attnlab.data import AMI, SLURP, MustC, Parallel, PennTreebank, XSum
from attnlab.data.corpus import Reader
from attnlab.data.samples import sample_texts, spoken, written
from attnlab.data.samples.markov import CHOICES, Source
from attnlab.data.samples.spoken import sentences
from attnlab.data.samples.world import write_world
from attnlab.data.samples.written import write_articles, write_translations

SIZES = [(MustC(), 40), (SLURP(), 100), (AMI(), 4 * 4 * 2), (XSum(), 30), (Parallel(), 30)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoken, "SEGMENTS", {"train": 30, "dev": 4, "tst-COMMON": 6})
    monkeypatch.setattr(spoken, "TALK", {"train": 15, "dev": 4, "tst-COMMON": 3})
    monkeypatch.setattr(spoken, "PROMPTS", {"train": 90, "devel": 5, "test": 5})
    monkeypatch.setattr(spoken, "MEETINGS", {"train": 2, "dev": 1, "eval": 1})
    monkeypatch.setattr(spoken, "TURNS", 2)
    monkeypatch.setattr(written, "ARTICLES", {"train": 20, "validation": 5, "test": 5})
    monkeypatch.setattr(written, "PAIRS", {"train": 20, "dev": 5, "test": 5})


def contents(root: Path) -> str:
    """A digest of all names and bytes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.name[0] != "."):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def test_bytes_are_those_of_the_committed_records(tmp_path: Path) -> None:
    PennTreebank().write_sample(tmp_path / "ptb", Source())
    spoken_texts = {name: "\n".join("\t".join(row) for row in sample_texts(name)) for name in ("commands", "turns")}
    spoken_texts["segments"] = repr(sentences())
    assert {
        "articles": contents(write_articles(tmp_path)),
        "translations": contents(write_translations(tmp_path)),
        "world": contents(write_world(tmp_path)),
        "ptb": contents(tmp_path / "ptb"),
    } | {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in spoken_texts.items()} == {
        "articles": "5e4b2c5a2c40bf47",
        "translations": "15d90f581a1da0a3",
        "world": "c154a511799eb1d9",
        "ptb": "c4c81bbd8ae53000",
        "commands": "1bd758156241febe",
        "turns": "64147c4b52b17b77",
        "segments": "dd32730782213664",
    }


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("reader", "size"), SIZES)
def test_the_reader_of_the_real_corpus_reads_it(reader: Reader, size: int, tmp_path: Path) -> None:
    root, kind = reader.sample(tmp_path), reader.kinds[0]
    reader.check(root, reader.splits, kind)
    examples = [(split, x) for split in reader.splits for x in reader.read(root, split, kind, False)]
    assert all(x.source and x.target for _, x in examples)
    assert len(examples) == len({(split, x.id) for split, x in examples}) == size


def test_splits_share_no_sentence_and_every_word_is_in_training() -> None:
    commands = iter([[sentence, intent] for intent, sentence in sample_texts("commands")])
    corpora = [sentences(), {split: [next(commands) for _ in range(n)] for split, n in spoken.PROMPTS.items()}]
    for splits, sizes in zip(corpora, (spoken.SEGMENTS, spoken.PROMPTS), strict=True):
        assert {split: len(items) for split, items in splits.items()} == sizes
        every = [item[0] for items in splits.values() for item in items]
        assert len(set(every)) == len(every)
        words = [{word for x in items for word in re.findall(r"\w+", " ".join(x).lower())} for items in splits.values()]
        assert words[1] | words[2] <= words[0]


def nats(source: Source, line: str) -> float:
    """The negative log-likelihood of a line and its end, in nats."""
    ids = [source.words.index(word) for word in line.split()]
    cost = -math.log(source.stop) - (len(ids) - 1) * math.log1p(-source.stop)
    for i, word in enumerate(ids):
        cost -= math.log(CHOICES[source.following[*source.context(ids, i)].tolist().index(word)])
    return cost


def test_the_entropy_is_that_of_the_texts() -> None:
    """-log p of the texts by the source itself, per word or line end; the closed form is its mean."""
    source = Source()
    lines = list(source.lines("train", 4000))
    costs = np.array([nats(source, line) for line in lines])
    sizes = np.array([len(line.split()) + 1 for line in lines])
    spread = (costs - source.entropy * sizes).std() / len(lines) ** 0.5 / sizes.mean()
    assert abs(costs.sum() / sizes.sum() - source.entropy) < 4 * spread < 0.03
