"""The size of a split."""

from pathlib import Path

from attnlab.data.corpus import Segment, Utterance
from attnlab.data.statistics import statistics


def spoken(id: str, target: str, samples: int, speed: float = 1.0) -> Segment:
    return Segment(
        id=id, source=target.upper(), target=target, label="a_b", audio=Path("x.wav"), rate=8000, start=0,
        num_samples=samples, speed=speed,
    )  # fmt: skip


def test_hours_words_and_classes() -> None:
    assert statistics([spoken("a", "one two", 8000 * 1800), spoken("b", "", 8000 * 3600, 2.0)]) == {
        "utterances": 2, "hours": 1.0, "source_words": 2, "target_words": 2, "mean_source_words": 1.0,
        "mean_target_words": 1.0, "classes": 1,
    }  # fmt: skip


def test_texts_have_neither_hours_nor_classes() -> None:
    found = statistics([Utterance(id="a", source="three words here", target="one")])
    assert found == {
        "utterances": 1, "source_words": 3, "target_words": 1, "mean_source_words": 3.0, "mean_target_words": 1.0,
    }  # fmt: skip
