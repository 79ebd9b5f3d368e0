"""Features on disk: computed once, named by their content, checked whenever they are read."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from attnlab.data.corpus import Segment
from attnlab.data.speech import features
from attnlab.data.speech.features import FeatureStore, FilterBank, read_waveform
from attnlab.data.speech.mustc import MustC
from attnlab.errors import DataError
from tests.data.conftest import BANK


@pytest.fixture
def segments(corpus: Path) -> list[Segment]:
    return MustC().read(corpus, "train", "audio", False)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The recordings that were read to compute features."""
    paths: list[Path] = []

    def counted(path: Path, *place: int) -> Any:
        paths.append(path)
        return read_waveform(path, *place)

    monkeypatch.setattr(features, "read_waveform", counted)
    return paths


def folder_of(root: Path) -> Path:
    (folder,) = (path for path in (root / "features").iterdir() if path.is_dir())
    return folder


def check(store: FeatureStore, segments: list[Segment]) -> None:
    """What the store gives is what the filter bank gives, to half precision."""
    assert len(store) == len(segments)
    for i, segment in enumerate(segments):
        expected = BANK(read_waveform(segment.audio, segment.start, segment.num_samples), segment.rate)
        assert store[i].dtype == np.float32 and len(store[i]) == store.lengths[i]
        np.testing.assert_allclose(store[i], expected, rtol=2**-11, atol=1e-6)


def test_computed_once_by_content(tmp_path: Path, segments: list[Segment], computed: list[Path], corpus: Path) -> None:
    for _ in range(2):
        check(BANK.open(segments, tmp_path / "features" / "train"), segments)
        assert len(computed) == 5
    store = BANK.open(segments, tmp_path / "features" / "train")
    path = folder_of(tmp_path) / "features.f16"
    data = bytearray(path.read_bytes())
    assert len(data) == sum(store.lengths) * 20 * 2
    data[int(store.lengths[0]) * 40 + 7] ^= 64  # in the second segment
    path.write_bytes(data)
    assert len(store[0])
    with pytest.raises(DataError, match=r"features\.f16: damaged; delete .* and run again"):
        store[1]
    moved = shutil.copytree(corpus, tmp_path / "elsewhere")
    BANK.open(MustC().read(moved, "train", "audio", False), tmp_path / "features" / "train")
    assert len(computed) == 5  # the place does not matter
    FilterBank(sample_rate=8000, num_mels=21).open(segments, tmp_path / "features" / "train")
    assert len(computed) == 10  # the settings do
    BANK.open(segments[:4], tmp_path / "features" / "train")
    assert len(computed) == 14  # the segments do
    samples, rate = soundfile.read(segments[0].audio, dtype="int16")
    samples[5] += 1
    soundfile.write(segments[0].audio, samples, rate)
    BANK.open(segments, tmp_path / "features" / "train")
    assert len(computed) == 19  # the audio does


def test_a_shorter_file_is_computed_again(tmp_path: Path, segments: list[Segment], computed: list[Path]) -> None:
    BANK.open(segments, tmp_path / "features" / "train")
    path = folder_of(tmp_path) / "features.f16"
    os.truncate(path, path.stat().st_size - 1)
    check(BANK.open(segments, tmp_path / "features" / "train"), segments)
    assert len(computed) == 10


def test_samples_that_are_not_numbers_are_refused(tmp_path: Path, segments: list[Segment]) -> None:
    wav = segments[2].audio
    samples, rate = soundfile.read(wav)
    soundfile.write(wav, np.where(np.arange(len(samples)) == 9, np.nan, samples), rate, "FLOAT")
    with pytest.raises(DataError, match=r"ted_2.wav: damaged audio, samples of nan; expected numbers from -1 to 1"):
        BANK.open(segments, tmp_path / "features" / "train")
