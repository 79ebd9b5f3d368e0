"""The data module over other readers and front ends: classes, speeds, text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.data import AMI, SLURP, Parallel, SourceText, SpecAugment, StoredFeatures, XSum
from attnlab.data.sequence_to_text import SequenceToTextData
from attnlab.errors import ConfigError, DataError
from tests.data.conftest import BANK
from tests.data.layouts import audio, prompt, write


@pytest.fixture
def slurp(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus" / "dataset" / "slurp"
    for split, names in {"train": "abcd", "train_synthetic": "", "devel": "e", "test": "a"}.items():
        lines = []
        for i, name in enumerate(names):
            audio(tmp_path / "corpus" / "audio" / "slurp_real" / f"{split}{name}.flac", 0.5 + 0.2 * i)
            lines.append(prompt(i, f"wake me {name}", f"{split}{name}.flac", action=("on", "off")[i % 2]))
        write(folder / f"{split}.jsonl", *lines)
    return tmp_path / "corpus"


def make(root: Path, tmp_path: Path, **settings: Any) -> SequenceToTextData:
    defaults = {"vocab_size": 40, "hard_vocab_limit": False, "update_frames": 3000}
    return SequenceToTextData(str(root), str(tmp_path / "cache"), **{**defaults, **settings})


def test_the_class_is_one_piece_before_the_text(slurp: Path, tmp_path: Path) -> None:
    data = make(slurp, tmp_path, reader=SLURP(), features=BANK, ctc_vocab_size=40)
    data.setup()
    assert sorted(data.tokenizer.labels) == ["alarm_off", "alarm_on"]
    (batch,) = list(data.test_dataloader())
    (x,) = batch.utterances
    assert (x.label, x.target, x.source) == ("alarm_on", "wake me a", "wake me a")
    ids = batch.targets[0].tolist()
    assert data.tokenizer.label_of(ids) == "alarm_on" and data.tokenizer.label_of(ids[1:]) == ""
    assert data.tokenizer.decode(ids) == data.tokenizer.decode(ids[1:]) == "wake me a"
    assert data.ctc_tokenizer is not None and not data.ctc_tokenizer.labels
    assert batch.ctc_targets is not None and data.ctc_tokenizer.decode(batch.ctc_targets[0].tolist()) == "wake me a"
    assert data.tokenizer.encode_all(["alarm_on"])[0] != [data.tokenizer.label("alarm_on")]  # no text contains it


def test_an_unknown_class_in_the_test_set(slurp: Path, tmp_path: Path) -> None:
    write(slurp / "dataset" / "slurp" / "test.jsonl", prompt(9, "bye", "testa.flac", scenario="music", action="stop"))
    with pytest.raises(DataError, match=r"slurp_unknown_testa of test has the class 'music_stop', which"):
        make(slurp, tmp_path, reader=SLURP(), features=BANK).setup()
    data = make(slurp, tmp_path, reader=SLURP(), features=BANK, unknown_labels=True)
    data.setup()
    assert [note.count for note in data.report.splits["test"].noted.values()] == [1]
    (batch,) = list(data.test_dataloader())
    assert batch.targets[0, 0] == data.tokenizer.unk and batch.utterances[0].label == "music_stop"


def test_training_has_each_recording_at_every_speed(slurp: Path, tmp_path: Path) -> None:
    data = make(slurp, tmp_path, reader=SLURP(), features=BANK, speeds=[0.5, 1.0, 2.0])
    data.setup()
    pairs = (pair for b in data.train_dataloader() for pair in zip(b.utterances, b.feature_lengths, strict=True))
    lengths = {x.id: int(n) for x, n in pairs}
    assert len(lengths) == 12
    assert lengths["slurp_unknown_traina"] == 48  # of half a second
    assert abs(lengths["sp0.5-slurp_unknown_traina"] - 98) <= 1 and abs(lengths["sp2-slurp_unknown_traina"] - 23) <= 1
    assert sum(len(b.utterances) for b in data.test_dataloader()) == 1
    assert make(slurp, tmp_path, reader=SLURP(), features=BANK).split("train").lengths.sum() < sum(lengths.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reader": XSum(), "features": BANK}, r"XSum gives no audio inputs; use attnlab\.data\.SourceText"),
        ({"reader": SLURP(), "features": StoredFeatures(3)}, "SLURP gives no stored inputs"),
        ({"reader": XSum(), "features": SourceText(), "augment": SpecAugment()}, "text has neither augment nor"),
        ({"reader": XSum(), "features": SourceText(), "ctc_vocab_size": 9}, "text has neither augment nor"),
        ({"reader": AMI(), "features": StoredFeatures(3), "speeds": [0.9]}, "only recordings can be played faster"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, tmp_path, **settings)


def test_text_batches_count_the_longer_side(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write(tmp_path / "t" / f"{split}.en", "a b", "a")
        write(tmp_path / "t" / f"{split}.de", "a", "a b c d e f")
    data = make(tmp_path / "t", tmp_path, reader=Parallel(), features=SourceText(), vocab_type="char")
    data.setup()
    (batch,) = list(data.test_dataloader())
    longer = torch.maximum(batch.feature_lengths, (batch.targets != data.tokenizer.pad).sum(1))
    assert data.split("test").lengths.tolist() == longer.flip(0).tolist()
    assert batch.features.dtype == batch.targets.dtype
    row = [x.id for x in batch.utterances].index("test_2")
    assert batch.features[row, batch.feature_lengths[row] :].eq(data.tokenizer.pad).all()


def test_the_same_id_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x" / "train.json", '{"document": "a", "summary": "b", "id": "7"}' * 2)
    for split in ("validation", "test"):
        write(tmp_path / "x" / f"{split}.json", '{"document": "a", "summary": "b"}')
    with pytest.raises(DataError, match="train has the id 7 twice"):
        make(tmp_path / "x", tmp_path, reader=XSum(), features=SourceText()).split("train")
