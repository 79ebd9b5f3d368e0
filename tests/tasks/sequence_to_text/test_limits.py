"""What a score leaves out and cuts: rows of the test set, references that cannot be written, texts at their limit."""

import json
from pathlib import Path
from typing import Any

import pytest

import attnlab
from attnlab.config.check import compose
from attnlab.data.sequence_to_text import SequenceToTextData
from attnlab.errors import DataError
from attnlab.modes import test, train
from attnlab.run.record import new
from attnlab.tasks.base import task_of
from attnlab.tasks.sequence_to_text.task import SequenceToTextTask
from tests.data.layouts import write
from tests.tasks.conftest import TINY, recorded

SPLITS: dict[str, list[tuple[str, str]]] = {
    "train": [("one two", "a b c"), ("three", "a"), ("one", "b a"), ("", "c"), ("two", "")],
    "dev": [("one", "a"), ("three", "c")],
    "test": [("one two", "a b c"), ("", "b"), ("two", "a b c a b c a b c"), ("three", "½ c"), ("one", "")],
}
OWN = ["experiment=own/translation", "task.data.drop_empty=true", "task.data.vocab_type=char"]
SIZES = [word for word in TINY if not any(key in word for key in ("num_heads", "conv_channels", "max_len_b"))]


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    for split, rows in SPLITS.items():
        write(tmp_path / "corpus" / f"{split}.tsv", "source\ttarget", *map("\t".join, rows))
    return [*OWN, *SIZES, f"data_root='{tmp_path / 'corpus'}'", f"cache_dir='{tmp_path / 'cache'}'"]


def run(mode: Any, folder: Path, *words: str) -> dict[str, Any]:
    cfg = compose(*words, "task.train.max_epochs=1")
    return recorded(mode, (cfg, new(cfg, "test")), folder)


def test_the_limit_of_length_follows_from_the_targets_of_the_run(tmp_path: Path, settings: list[str]) -> None:
    record = run(train, tmp_path / "run", *settings)
    assert record["inference"]["max_len_b"] == 12  # twice "_a_b_c"
    assert json.loads((tmp_path / "run" / "limits.json").read_text()) == {"longest_target": 6}
    model: Any = attnlab.load(tmp_path / "run")
    assert model.module.search.max_len_b == 12
    write(tmp_path / "corpus" / "train.tsv", "source\ttarget", "one\ta b c a b c a b c a b c")
    again = run(test, tmp_path / "again", "mode=test", *settings, f"checkpoint='{tmp_path / 'run'}'")
    assert again["inference"]["max_len_b"] == 12 and again["quality"] == record["quality"]
    (tmp_path / "run" / "limits.json").unlink()
    with pytest.raises(DataError, match="limits.json: no such file; expected the length of the longest"):
        attnlab.load(tmp_path / "run")


def test_the_report_counts_what_a_score_leaves_out(
    tmp_path: Path, settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    record = run(train, tmp_path / "run", *settings)
    split = record["data"]["test"]
    assert (split["read"], split["used"]) == (5, 3)
    assert split["left_out"] == {"empty text": {"count": 2, "example": "test_3"}}
    long, changed = split["noted"].values()
    assert (long, changed) == ({"count": 1, "example": "test_4"}, {"count": 1, "example": "test_5"})
    assert (record["quality"]["sentences"], record["quality"]["sentences_left_out"]) == (3, 2)
    cut = run(train, tmp_path / "short", *settings, "task.decode.max_len_b=1", "task.decode.min_len=1")
    assert cut["quality"]["ended_at_limit"] == 3 and "3 of 3 texts ended at the limit of length" in caplog.text
    assert cut["data"]["test"]["noted"]["reference longer than task.decode.max_len_b=1 allows"]["count"] == 3


@pytest.mark.parametrize(
    ("score", "references", "count"),
    [
        ("bleu", ["cafe\u0301 b", "caf\u00e9 b", "a\u00a0b"], 1),  # NFKC composes
        ("wer", ["a, B. c", "\u212b c"], 0),
        ("wer", ["½ c", "c²", "a b"], 2),
        ("rouge", ["a b c", "a… b c"], 0),
        ("rouge", ["ⅷ a", "ﬁ b c"], 2),
    ],
)
def test_references_that_a_perfect_model_cannot_write(
    score: str, references: list[str], count: int, tmp_path: Path, settings: list[str]
) -> None:
    for split in ("train", "test"):
        write(tmp_path / "corpus" / f"{split}.tsv", "source\ttarget", *(f"one\t{text}" for text in references))
    for normalisation, expected in (("nmt_nfkc", count), ("identity", 0)):
        cfg = compose(*settings, f"task.score={score}", f"task.data.normalisation={normalisation}")
        record = new(cfg, "test")
        data, _ = task_of(cfg, SequenceToTextTask).prepare(record, None)
        assert isinstance(data, SequenceToTextData)
        assert sum(note.count for note in data.report.splits["test"].noted.values()) == expected
