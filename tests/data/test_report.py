"""The report of what a run reads."""

import logging
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from attnlab.data.report import Report, left_out, noted, restore
from attnlab.data.text.corpora import TextFiles, WikiTextRaw
from attnlab.data.text.language_modelling import LanguageModellingData
from attnlab.data.text.vocabulary import BytePairs, PretrainedTokens, Words
from tests.pretrained.tokens import pretrained


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


def notes(root: Path, **settings: object) -> list[dict[str, int]]:
    """The notes of each split of a language model's data."""
    sizes = {"vocab_size": 300, "window": 4, "update_tokens": 8, "batch_size": 2}
    data = LanguageModellingData(root=str(root), cache_dir=str(root / "cache"), **(sizes | settings))  # type: ignore[arg-type]
    data.setup()
    return [
        {text: note.count for text, note in data.report.splits[split].noted.items()}
        for split in ("train", "validation", "test")
    ]


def test_a_language_model_s_data_notes_what_it_changes_also_from_the_cache(tmp_path: Path) -> None:
    for split, text in {"train": "a b c d a b c d e", "valid": "a b c d a b", "test": "a b\rc x y d"}.items():
        (tmp_path / f"{split}.txt").write_bytes(f"{text}\n".encode())
    unknown = "word outside the vocabulary, read as <unk>"
    for _ in range(2):
        train, validation, test = notes(tmp_path, corpus=TextFiles(), vocabulary=Words(min_count=2), eval_windows=1)
        assert train == {unknown: 1} and unknown not in validation
        assert test == {
            "carriage return inside a line, read as white space": 1,
            unknown: 2,
            "window that is not scored, by task.data.eval_windows=1": 1,
        }
    train, *_ = notes(tmp_path, corpus=TextFiles(), vocabulary=Words(min_count=2), update_tokens=12)
    assert train["window at the end of an epoch, too few for an update (others in each epoch)"] == 2


def test_words_that_the_published_files_lack_are_noted_for_a_pretrained_model(tmp_path: Path) -> None:
    """The corpus is read as running text all the same; a vocabulary of words has this mark itself."""
    source = str(pretrained(tmp_path / "model", "gpt2"))
    for split, text in {"train": "a <unk> c d", "valid": "a b c d", "test": "<unk> b\n<unk> c"}.items():
        (tmp_path / f"wiki.{split}.tokens").write_bytes(f"{text}\n".encode())
    known = [{"<unk>, which stands for a rare word of the raw text": n} if n else {} for n in (1, 0, 2)]
    for _ in range(2):  # also from the cache
        splits = notes(tmp_path, corpus=WikiTextRaw(), vocabulary=PretrainedTokens(source), vocab_size=400)
        assert [{text: n for text, n in split.items() if "rare" in text} for split in splits] == known
    assert not any(
        "rare" in text for split in notes(tmp_path, corpus=WikiTextRaw(), vocabulary=Words()) for text in split
    )


def test_a_null_of_a_parquet_file_is_noted(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        parquet.write_table(pyarrow.table({"text": [None, "a b c d e f g"]}), tmp_path / f"{split}-0.parquet")
    assert notes(tmp_path, corpus=WikiTextRaw(), vocabulary=BytePairs())[2] == {"null, read as an empty text": 1}
