"""The written corpus: layout, disjoint splits, the same bytes twice, damage noticed."""

import shutil
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from attnlab.data.samples import speech_translation, write_speech_translation
from attnlab.data.samples.speech_translation import split_sentences
from attnlab.errors import DataError

SMALL = {"train": 30, "dev": 4, "tst-COMMON": 6}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_translation, "SIZES", SMALL)
    monkeypatch.setattr(speech_translation, "TALK_SIZE", {"train": 15, "dev": 4, "tst-COMMON": 3})


def contents(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def test_splits_share_no_sentence_and_every_word_is_in_train() -> None:
    splits = split_sentences(1)
    assert {split: len(sentences) for split, sentences in splits.items()} == speech_translation.SIZES
    english = [sentence.english for sentences in splits.values() for sentence in sentences]
    assert len(set(english)) == len(english)
    for language in ("english_words", "german_words"):
        words = {
            split: {word for sentence in sentences for word in getattr(sentence, language)}
            for split, sentences in splits.items()
        }
        assert words["dev"] | words["tst-COMMON"] <= words["train"]
    assert 80 <= len({word for sentence in splits["train"] for word in sentence.english_words}) <= 120
    assert splits != split_sentences(2)


@pytest.mark.usefixtures("small")
def test_layout_is_that_of_must_c(tmp_path: Path) -> None:
    root = write_speech_translation(tmp_path, seed=3) / "en-de" / "data"
    for split, count in SMALL.items():
        text = root / split / "txt" / split
        lines = text.with_suffix(".yaml").read_text(encoding="utf-8").splitlines()
        segments = yaml.safe_load("\n".join(lines))
        english = text.with_suffix(".en").read_text(encoding="utf-8").splitlines()
        german = text.with_suffix(".de").read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(segments) == len(english) == len(german) == count
        assert list(segments[0]) == ["duration", "offset", "speaker_id", "wav"]
        assert len({segment["wav"] for segment in segments}) == len(list((root / split / "wav").iterdir())) > 0
        for segment in segments:
            with wave.open(str(root / split / "wav" / segment["wav"])) as file:
                assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16000)
                samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            first = round(segment["offset"] * 16000)
            last = first + round(segment["duration"] * 16000)
            assert 0 < first < last < len(samples)
            assert 0.4 < segment["duration"] < 4
            assert np.abs(samples[first:last]).max() > 5000  # speech inside,
            assert np.abs(samples[first - 800 : first + 320]).max() < 100  # silence around
            assert np.abs(samples[last - 320 : last + 800]).max() < 100


@pytest.mark.usefixtures("small")
def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    one = write_speech_translation(tmp_path / "one", seed=3)
    two = write_speech_translation(tmp_path / "two", seed=3)
    assert one.name == two.name
    assert contents(one) == contents(two)
    assert write_speech_translation(tmp_path / "one", seed=4).name != one.name


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "damage",
    [
        lambda root: (root / "en-de/data/dev/wav/ted_3.wav").unlink(),
        lambda root: (root / "en-de/data/dev/wav/ted_3.wav").write_bytes(b"RIFF"),
        lambda root: (root / "en-de/data/train/txt/train.de").write_text(
            (root / "en-de/data/train/txt/train.de").read_text(encoding="utf-8").replace("e", "a"), encoding="utf-8"
        ),
        lambda root: (root / ".manifest.json").unlink(),
        lambda root: (root / ".manifest.json").write_text("[]"),
        lambda root: shutil.rmtree(root / "en-de"),
    ],
    ids=["missing audio", "short audio", "other text", "no manifest", "empty manifest", "no files"],
)
def test_damage_is_found_and_repaired(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    root = write_speech_translation(tmp_path, seed=3)
    before = contents(root)
    damage(root)
    assert contents(root) != before
    assert write_speech_translation(tmp_path, seed=3) == root
    assert contents(root) == before
    assert [path.name for path in tmp_path.glob("[!.]*")] == [root.name]  # nothing else remains


@pytest.mark.usefixtures("small")
def test_intact_corpus_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_speech_translation(tmp_path, seed=3)
    monkeypatch.setattr(speech_translation, "_write", lambda *_: pytest.fail("written again"))
    assert write_speech_translation(tmp_path, seed=3) == root


@pytest.mark.usefixtures("small")
def test_failed_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(speech_translation, "write_wav", full_disk)
    with pytest.raises(DataError, match=r"speech-translation-\w+: cannot be written \(No space left on device\)"):
        write_speech_translation(tmp_path, seed=3)
    assert not list(tmp_path.glob("[!.]*")) and not list(tmp_path.glob("*.partial"))
