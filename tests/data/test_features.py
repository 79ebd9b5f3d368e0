from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from attnlab.data.speech.features import Array, FilterBank, SpecAugment, read_waveform, utterance_cmvn, warped
from attnlab.data.speech.mustc import MustC
from attnlab.errors import ConfigError, DataError


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


def test_filter_bank_of_silence_is_the_floor() -> None:
    features = FilterBank(normalize=False)(np.zeros(8000, np.float32), 16000)
    np.testing.assert_allclose(features, np.log(np.finfo(np.float32).eps), rtol=1e-6)
    assert not FilterBank()(np.zeros(8000, np.float32), 16000).any()  # normalised: no variance, no blow-up


def test_real_speech(corpora: Path) -> None:
    segment = MustC().read(corpora / "st_digits_en_de", "dev", "audio", False)[0]
    waveform = read_waveform(segment.audio, segment.start, segment.num_samples)
    features = FilterBank(sample_rate=8000, normalize=False)(waveform, 8000)
    np.testing.assert_allclose(features, naive_fbank(waveform, 8000, 80), atol=2e-3)


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
def test_short_waveforms_have_at_least_one_frame(samples: int) -> None:
    features = FilterBank(normalize=False)(np.ones(samples, np.float32), 16000)
    assert features.shape == (2 if samples == 560 else 1, 80)
    assert np.isfinite(features).all()


def test_cmvn() -> None:
    x = np.random.default_rng(1).normal(5, 3, (50, 4)).astype(np.float32)
    x[:, 3] = -15.9
    y = utterance_cmvn(x)
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(y.std(0), [1, 1, 1, 0], atol=1e-5)
    assert y.dtype == np.float32


def test_settings_change_the_fingerprint() -> None:
    banks = FilterBank(), FilterBank(8000), FilterBank(num_mels=40), FilterBank(window="hamming")
    assert len({str(bank.fingerprint()) for bank in banks}) == 4
    with pytest.raises(ConfigError, match=r"num_mels=4000: too many for sample_rate=16000 Hz"):
        FilterBank(num_mels=4000)


def test_read_waveform_averages_channels_and_checks_the_end(tmp_path: Path) -> None:
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.array([[0.5, 0.25], [0.0, -0.5], [0.25, 0.25]]), 16000, "PCM_16")
    np.testing.assert_array_equal(read_waveform(path, 1, 2), np.array([-0.25, 0.25], np.float32))
    with pytest.raises(DataError, match="stereo.wav: damaged audio, 2 of 5 samples from sample 1"):
        read_waveform(path, 1, 5)


class TestSpecAugment:
    x = np.ones((300, 80), np.float32)

    def draws(self, augment: SpecAugment, x: Array, count: int = 2000) -> tuple[np.ndarray, np.ndarray]:
        """Masked mel channels and masked frames of many draws."""
        random = np.random.default_rng(0)
        masked = [augment(x, random) == 0 for _ in range(count)]
        return np.array([m.all(0).sum() for m in masked]), np.array([m.all(1).sum() for m in masked])

    def test_widths_are_those_of_the_policy(self) -> None:
        channels, frames = self.draws(SpecAugment(), self.x)
        assert (channels.min(), channels.max()) == (0, 26)
        assert (frames.min(), frames.max()) == (0, 99)
        assert abs(channels.mean() - 13) < 0.6
        assert abs(frames.mean() - 49.5) < 2.5

    def test_bands_are_contiguous_and_the_input_stays(self) -> None:
        x = self.x.copy()
        masked = SpecAugment()(x, np.random.default_rng(5)) == 0
        assert x.all()
        for axis in (0, 1):
            steps = np.flatnonzero(masked.all(axis))
            assert len(steps) and (np.diff(steps) == 1).all()

    def test_probability_bounds_the_share_of_time(self) -> None:
        _, frames = self.draws(SpecAugment(probability=0.2), self.x[:100])
        assert frames.max() == 19
        _, frames = self.draws(SpecAugment(probability=0.0), self.x)
        assert frames.max() == 0

    def test_fewer_frames_than_the_mask(self) -> None:
        _, frames = self.draws(SpecAugment(), self.x[:7])
        assert frames.max() == 6
        assert SpecAugment()(self.x[:1], np.random.default_rng(0)).shape == (1, 80)

    def test_several_masks(self) -> None:
        single, _ = self.draws(SpecAugment(), self.x)
        double, _ = self.draws(SpecAugment(num_freq_masks=2), self.x)
        assert double.mean() > 1.5 * single.mean()

    def test_all_layers_of_a_frame_are_masked_and_warped_alike(self) -> None:
        augment = SpecAugment(freq_mask=9, time_mask=20, num_freq_masks=2, num_time_masks=2, time_warp=6)
        layers = np.random.default_rng(0).normal(size=(50, 3, 20)).astype(np.float32)
        together = augment(layers, np.random.default_rng(1))
        assert together.dtype == np.float32 and (together == 0).any()
        for i in range(3):
            np.testing.assert_array_equal(together[:, i], augment(layers[:, i], np.random.default_rng(1)))

    def test_is_a_pure_function_of_its_generator(self) -> None:
        a, b, c = (SpecAugment()(self.x, np.random.default_rng(seed)) for seed in (7, 7, 8))
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()

    def test_time_warping_moves_one_frame_and_interpolates(self) -> None:
        ramp = np.arange(9, dtype=np.float32)[:, None]
        assert np.allclose(warped(ramp, 4, 2)[:, 0], [0, 2, 4, 4 + 2 / 3, 5 + 1 / 3, 6, 6 + 2 / 3, 7 + 1 / 3, 8])
        assert np.array_equal(warped(ramp, 4, 4), ramp)
        assert np.array_equal(warped(ramp, 0, 0), ramp) and np.array_equal(warped(ramp, 8, 8), ramp)
        assert np.isfinite(warped(ramp, 3, 0)).all() and np.isfinite(warped(ramp, 3, 8)).all()
        assert np.array_equal(warped(ramp[:1], 0, 0), ramp[:1])

    def test_time_warping_keeps_length_ends_and_short_inputs(self) -> None:
        only = SpecAugment(num_freq_masks=0, num_time_masks=0, time_warp=10)
        x = np.arange(60, dtype=np.float32)[:, None].repeat(3, 1)
        moved = only(x, np.random.default_rng(3))
        assert moved.shape == x.shape and not np.array_equal(moved, x)
        assert (moved[0] == x[0]).all() and (moved[-1] == x[-1]).all()
        assert (np.diff(moved[:, 0]) > 0).all() and np.abs(moved - x).max() < 10
        assert np.array_equal(only(x[:20], np.random.default_rng(3)), x[:20])
