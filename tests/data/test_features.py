from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from attnlab.data.speech.features import Array, FilterBank, SpecAugment, read_waveform, utterance_cmvn, warped
from attnlab.errors import DataError


def povey(n: int) -> np.ndarray:
    return np.hanning(n) ** 0.85


def naive_fbank(
    waveform: Array, rate: int, num_mels: int, window_of: Callable[[int], np.ndarray] = povey
) -> np.ndarray:
    """Kaldi's log-mel filter bank in float64, step by step from its definition."""
    x = waveform.astype(np.float64) * 2**15
    size, shift = rate * 25 // 1000, rate * 10 // 1000
    padded = 1 << (size - 1).bit_length()
    window = window_of(size)
    edges = np.linspace(mel(20.0), mel(rate / 2), num_mels + 2)
    bins = mel(np.arange(padded // 2) * rate / padded)  # Kaldi leaves out the Nyquist bin
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    weights = np.maximum(0.0, np.minimum((bins - left) / (centre - left), (right - bins) / (right - centre)))
    rows = []
    for start in range(0, len(x) - size + 1, shift):
        frame = x[start : start + size]
        frame = frame - frame.mean()
        frame = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
        power = np.abs(np.fft.rfft(frame * window, padded)) ** 2
        rows.append(np.log(np.maximum(weights @ power[:-1], np.finfo(np.float32).eps)))
    return np.array(rows)


def mel(hertz: float | np.ndarray) -> np.ndarray:
    return 1127.0 * np.log(1.0 + np.asarray(hertz) / 700.0)


def speech_like(seconds: float, rate: int) -> Array:
    random = np.random.default_rng(3)
    time = np.arange(int(seconds * rate)) / rate
    voice = sum(np.sin(2 * np.pi * k * 120 * time) / k for k in range(1, 20)) * (time % 0.4 < 0.3)
    return (0.2 * voice + random.normal(0, 0.003, len(time))).astype(np.float32)


@pytest.mark.parametrize(
    ("rate", "num_mels", "window"),
    [(16000, 80, "povey"), (8000, 40, "povey"), (22050, 80, "povey"), (16000, 80, "hamming")],
)
def test_filter_bank_is_kaldis(rate: int, num_mels: int, window: Any) -> None:
    waveform = speech_like(1.23, rate)
    features = FilterBank(rate, num_mels, window, normalize=False)(waveform, rate)
    expected = naive_fbank(waveform, rate, num_mels, povey if window == "povey" else np.hamming)
    assert features.shape == expected.shape
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected, atol=2e-3)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate: int) -> None:
    """A tone and its harmonic give nearly the same features however they were sampled."""

    def tone(at: int) -> Array:
        time = np.arange(at) / at
        return (0.3 * np.sin(2 * np.pi * 440 * time) + 0.2 * np.sin(2 * np.pi * 2500 * time)).astype(np.float32)

    bank = FilterBank(num_mels=40, normalize=False)
    features, reference = bank(tone(rate), rate), bank(tone(16000), 16000)
    assert len(features) == len(reference) == 98
    loud = reference[5:-5] > reference.max() - 8
    np.testing.assert_allclose(features[5:-5][loud], reference[5:-5][loud], atol=0.02)


@pytest.mark.parametrize("samples", [1, 399, 400, 559, 560])
def test_short_and_silent_waveforms(samples: int) -> None:
    features = FilterBank(normalize=False)(np.zeros(samples, np.float32), 16000)
    assert features.shape == (2 if samples == 560 else 1, 80)
    np.testing.assert_allclose(features, np.log(np.finfo(np.float32).eps), rtol=1e-6)
    assert not FilterBank()(np.zeros(8000, np.float32), 16000).any()  # normalised: no variance, no blow-up


def test_cmvn() -> None:
    x = np.random.default_rng(1).normal(5, 3, (50, 4)).astype(np.float32)
    x[:, 3] = -15.9
    y = utterance_cmvn(x)
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(y.std(0), [1, 1, 1, 0], atol=1e-5)
    assert y.dtype == np.float32


def test_read_waveform_averages_channels_and_checks_the_end(tmp_path: Path) -> None:
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.array([[0.5, 0.25], [0.0, -0.5], [0.25, 0.25]]), 16000, "PCM_16")
    np.testing.assert_array_equal(read_waveform(path, 1, 2), np.array([-0.25, 0.25], np.float32))
    with pytest.raises(DataError, match="stereo.wav: damaged audio, 2 of 5 samples from sample 1"):
        read_waveform(path, 1, 5)


X = np.ones((300, 80), np.float32)


@pytest.mark.parametrize(
    ("settings", "frames", "channels", "widest"),
    [({}, 300, 26, 99), ({"probability": 0.2}, 100, 26, 19), ({"probability": 0.0}, 300, 26, 0), ({}, 7, 26, 6)],
)
def test_masks_have_the_widths_of_the_policy(
    settings: dict[str, float], frames: int, channels: int, widest: int
) -> None:
    """Widths are uniform over {0, ..., widest}."""
    random, x = np.random.default_rng(0), X[:frames]
    masked = [SpecAugment(**settings)(x, random) == 0 for _ in range(1000)]  # type: ignore[arg-type]
    assert x.all()
    for axis, most in ((0, channels), (1, widest)):
        steps = [np.flatnonzero(m.all(axis)) for m in masked]
        assert all((np.diff(places) == 1).all() for places in steps)
        counts = np.array([len(places) for places in steps])
        assert (counts.min(), counts.max()) == (0, most)
        assert abs(counts.mean() - most / 2) <= 0.06 * most


def test_masks_begin_at_any_place_where_they_fit() -> None:
    """As fairseq's `randint(0, size - width)`: for each width every place but the last is equally likely."""
    random, draws = np.random.default_rng(1), 8000
    augment, x = SpecAugment(freq_mask=4, time_mask=3), np.ones((9, 7), np.float32)
    masked = [augment(x, random) == 0 for _ in range(draws)]
    for axis, size, widths in ((0, 7, 4), (1, 9, 3)):
        places = [np.flatnonzero(mask.all(axis)) for mask in masked]
        for width in range(1, widths):
            counts = np.bincount([place[0] for place in places if len(place) == width], minlength=size)
            expected = draws / widths / (size - width)
            assert not counts[size - width :].any()
            assert np.abs(counts[: size - width] - expected).max() < 5 * expected**0.5


def test_all_layers_of_a_frame_are_masked_and_warped_alike() -> None:
    augment = SpecAugment(freq_mask=9, time_mask=20, num_freq_masks=2, num_time_masks=2, time_warp=6)
    layers = np.random.default_rng(0).normal(size=(50, 3, 20)).astype(np.float32)
    together = augment(layers, np.random.default_rng(1))
    assert together.dtype == np.float32 and (together == 0).any()
    for i in range(3):
        np.testing.assert_array_equal(together[:, i], augment(layers[:, i], np.random.default_rng(1)))
    assert (augment(layers, np.random.default_rng(2)) != together).any()


def test_time_warping_moves_one_frame_and_interpolates() -> None:
    ramp = np.arange(9, dtype=np.float32)[:, None]
    assert np.allclose(warped(ramp, 4, 2)[:, 0], [0, 2, 4, 4 + 2 / 3, 5 + 1 / 3, 6, 6 + 2 / 3, 7 + 1 / 3, 8])
    for centre, moved in ((4, 4), (0, 0), (8, 8)):
        assert np.array_equal(warped(ramp, centre, moved), ramp)
    only = SpecAugment(num_freq_masks=0, num_time_masks=0, time_warp=10)
    x = np.arange(60, dtype=np.float32)[:, None].repeat(3, 1)
    result = only(x, np.random.default_rng(3))
    assert not np.array_equal(result, x) and (result[[0, -1]] == x[[0, -1]]).all()
    assert (np.diff(result[:, 0]) > 0).all() and np.abs(result - x).max() < 10
    assert np.array_equal(only(x[:20], np.random.default_rng(3)), x[:20])  # too short
