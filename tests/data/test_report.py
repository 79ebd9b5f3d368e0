"""The report of what a run reads."""

import logging

import pytest

from attnlab.data.report import Report, left_out, noted, restore


def test_notes_go_to_the_split_that_is_being_read(caplog: pytest.LogCaptureFixture) -> None:
    report = Report()
    with report.of("train") as train:
        left_out("empty text", "train.tsv line 3")
        left_out("empty text", "train.tsv line 9", 2)
        with report.of("test") as test:
            noted("cut to 3 pieces", "test_1")
        noted("never", count=0)
        train.used, train.unit, test.used = 5, "pairs", 1
    plain = report.plain()
    assert plain["train"] == {
        "read": 8,
        "used": 5,
        "unit": "pairs",
        "left_out": {"empty text": {"count": 3, "example": "train.tsv line 3"}},
    }
    assert plain["test"]["noted"] == {"cut to 3 pieces": {"count": 1, "example": "test_1"}}
    with Report().of("again") as again:
        restore(plain["train"])
    assert again.left_out == train.left_out
    left_out("hidden file", ".a.wav")  # outside of every split
    with caplog.at_level(logging.INFO):
        report.show()
    shown = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert shown == [
        ("WARNING", "left out: hidden file: 1 (.a.wav)"),
        ("WARNING", "train: 5 of 8 pairs; left out: empty text: 3 (train.tsv line 3)"),
        ("WARNING", "test: 1 examples; cut to 3 pieces: 1 (test_1)"),
    ]


def test_a_split_of_which_all_is_used_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    report = Report()
    with report.of("files"), report.of("train") as train:
        train.used = 7
    with caplog.at_level(logging.INFO):
        report.show()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", "train: 7 examples")]
    assert list(report.plain()) == ["train"]
