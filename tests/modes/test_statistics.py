"""mode=statistics: the numbers of a corpus by its reader, in the record and in a table."""

from pathlib import Path

import pytest

from attnlab.config.check import compose
from attnlab.modes import statistics
from attnlab.run.record import new
from tests.data.conftest import SEGMENTS
from tests.data.layouts import write as write_lines
from tests.tasks.conftest import Start


def test_the_reader_counts(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, record = start("mode=statistics", "task.data.drop_empty=true", "task.data.speeds=[0.9,1.0,1.1]")
    statistics.run(cfg, record, tmp_path)
    spoken = [x for x in SEGMENTS if x[4]]
    counted = record["statistics"]
    assert list(counted) == ["train", "dev", "tst-COMMON"] and counted["train"] == counted["dev"]
    texts = {"source": [x[3] for x in spoken], "target": [x[4] for x in spoken]}
    words = {f"{side}_words": len(" ".join(lines).split()) for side, lines in texts.items()}
    assert counted["dev"] == {
        "utterances": len(spoken),
        "hours": pytest.approx(sum(x[2] for x in spoken) / 3600, abs=1e-4),
        **words,
        **{f"mean_{key}": pytest.approx(value / len(spoken), abs=0.01) for key, value in words.items()},
    }
    printed = capsys.readouterr().out
    for text in ("mustc: MuST-C en-de", "target words", f"record: {tmp_path / 'record.json'}"):
        assert text in printed
    assert record["identity"]["corpus"].startswith("sha256:")


def test_texts_have_no_hours_and_classes_are_counted(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        write_lines(tmp_path / "xsum" / f"{split}.source", "one two three", "four")
        write_lines(tmp_path / "xsum" / f"{split}.target", "one", "two  three")
    cfg = compose("task=xsum", "mode=statistics", "attention=mha", f"data_root={tmp_path / 'xsum'}")
    record = new(cfg, "test")
    statistics.run(cfg, record, tmp_path)
    assert record["statistics"]["test"] == {
        "utterances": 2, "source_words": 4, "target_words": 3, "mean_source_words": 2, "mean_target_words": 1.5,
    }  # fmt: skip
