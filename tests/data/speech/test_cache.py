import json
import os
import resource
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from attnlab.data.corpus import Segment
from attnlab.data.speech import cache
from attnlab.data.speech.cache import FeatureStore, open_features
from attnlab.data.speech.features import FilterBank, read_waveform
from attnlab.data.speech.mustc import MustC
from attnlab.errors import DataError

BANK = FilterBank(sample_rate=8000, num_mels=20)


@pytest.fixture
def segments(corpus: Path) -> list[Segment]:
    return MustC().read(corpus, "train", "audio", False)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the segments whose features were computed."""
    ids: list[str] = []
    compute = cache._compute

    def counted(segment: Segment, bank: FilterBank) -> bytes:
        ids.append(segment.id)
        return compute(segment, bank)

    monkeypatch.setattr(cache, "_compute", counted)
    return ids


def folder_of(root: Path) -> Path:
    (folder,) = (path for path in (root / "features").iterdir() if path.is_dir())
    return folder


def check(store: FeatureStore, segments: list[Segment]) -> None:
    """What the store gives is what the filter bank gives, to half precision."""
    assert len(store) == len(segments)
    for i, segment in enumerate(segments):
        expected = BANK(read_waveform(segment.audio, segment.start, segment.num_samples), segment.rate)
        assert store[i].dtype == np.float32
        assert len(store[i]) == store.lengths[i]
        np.testing.assert_allclose(store[i], expected, rtol=2**-11, atol=1e-6)


def test_computed_once_then_read(tmp_path: Path, segments: list[Segment], computed: list[str]) -> None:
    check(open_features(tmp_path, "train", segments, BANK), segments)
    assert sorted(computed) == sorted(s.id for s in segments)
    check(open_features(tmp_path, "train", segments, BANK), segments)
    assert len(computed) == len(segments)
    frames = sum(open_features(tmp_path, "train", segments, BANK).lengths)
    assert (folder_of(tmp_path) / "features.f16").stat().st_size == frames * 20 * 2


def test_key_is_the_content(tmp_path: Path, segments: list[Segment], computed: list[str], corpus: Path) -> None:
    open_features(tmp_path, "train", segments, BANK)
    moved = shutil.copytree(corpus, tmp_path / "elsewhere")
    open_features(tmp_path, "train", MustC().read(moved, "train", "audio", False), BANK)
    assert len(computed) == 5  # the place does not matter
    open_features(tmp_path, "train", segments, FilterBank(sample_rate=8000, num_mels=21))
    assert len(computed) == 10  # the settings do
    open_features(tmp_path, "train", segments[:4], BANK)
    assert len(computed) == 14  # the segments do
    samples, rate = soundfile.read(segments[0].audio, dtype="int16")
    samples[5] += 1
    soundfile.write(segments[0].audio, samples, rate)
    open_features(tmp_path, "train", segments, BANK)
    assert len(computed) == 19  # the audio does


def test_a_damaged_segment_is_refused(tmp_path: Path, segments: list[Segment]) -> None:
    store = open_features(tmp_path, "train", segments, BANK)
    path = folder_of(tmp_path) / "features.f16"
    data = bytearray(path.read_bytes())
    data[int(store.lengths[0]) * 40 + 7] ^= 64  # in the second segment
    path.write_bytes(data)
    assert len(store[0])
    with pytest.raises(DataError, match=r"features\.f16: damaged; delete .* and run again"):
        store[1]


@pytest.mark.parametrize("damage", ["truncated", "no index", "changed index"])
def test_a_damaged_folder_is_rebuilt(
    tmp_path: Path, segments: list[Segment], computed: list[str], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    open_features(tmp_path, "train", segments, BANK)
    features, index = (folder_of(tmp_path) / name for name in ("features.f16", "index.json"))
    if damage == "truncated":
        os.truncate(features, features.stat().st_size - 1)
    elif damage == "no index":
        index.unlink()
    else:
        content = json.loads(index.read_text())
        content["frames"][0], content["frames"][1] = content["frames"][1], content["frames"][0]
        index.write_text(json.dumps(content))
    check(open_features(tmp_path, "train", segments, BANK), segments)
    assert "computing it again" in caplog.text and len(computed) == 10


def test_features_of_something_else_under_this_name_are_stale(
    tmp_path: Path, segments: list[Segment], computed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    open_features(tmp_path, "train", segments, BANK)
    folder = folder_of(tmp_path)
    folder.rename(folder.with_name("aside"))
    open_features(tmp_path, "other", segments[::-1], BANK)
    (other,) = (tmp_path / "features").glob("other-*")
    other.rename(folder)
    check(open_features(tmp_path, "train", segments, BANK), segments)
    assert "its index does not fit" in caplog.text
    assert len(computed) == 15


def leftovers(root: Path) -> list[str]:
    return [name for name in os.listdir(root / "features") if not name.endswith(".lock") and name != "audio.json"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, segments: list[Segment]) -> None:
    """A real failing write: the system refuses the file its size, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(
            DataError, match=r"features/train-\w+: cannot be written \(File too large; features need"
        ) as error:
            open_features(tmp_path, "train", segments, BANK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert leftovers(tmp_path) == []
    check(open_features(tmp_path, "train", segments, BANK), segments)


def test_too_little_space_is_known_before_anything_is_computed(
    tmp_path: Path, segments: list[Segment], computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(DataError, match="features need 0.0 MiB, 0.0 MiB are free; set cache_dir"):
        open_features(tmp_path, "train", segments, BANK)
    assert not computed
    assert leftovers(tmp_path) == []


def test_damaged_audio_is_named(tmp_path: Path, corpus: Path) -> None:
    wav = corpus / "en-de/data/train/wav/ted_2.wav"
    samples, rate = soundfile.read(wav)
    soundfile.write(wav, np.where(np.arange(len(samples)) == 9, np.nan, samples), rate, "FLOAT")
    with pytest.raises(DataError, match=r"ted_2.wav: ted_2_0 has samples that are not finite"):
        open_features(tmp_path, "train", MustC().read(corpus, "train", "audio", False), BANK)
    assert leftovers(tmp_path) == []


def test_several_at_once_compute_once(tmp_path: Path, segments: list[Segment], computed: list[str]) -> None:
    stores: list[FeatureStore] = []
    threads = [
        threading.Thread(target=lambda: stores.append(open_features(tmp_path, "train", segments, BANK)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(computed) == 5
    assert len(stores) == 4
    check(stores[-1], segments)
