"""Log-mel filter bank with Kaldi's conventions, utterance CMVN, SpecAugment."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import kaldi_native_fbank
import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from annotated_types import Ge, Le

from attnlab.data.corpus import Kind
from attnlab.data.files import reading
from attnlab.errors import ConfigError, DataError

Array = npt.NDArray[np.float32]

FRAME_MS, SHIFT_MS = 25.0, 10.0


@dataclass(frozen=True)
class FilterBank:
    """Log-mel features as fairseq's speech recipes compute them, normalised per utterance.

    25 ms frames every 10 ms, DC removed, pre-emphasis 0.97, window, power spectrum, triangular filters from 20 Hz to
    the Nyquist frequency, natural logarithm with float32 epsilon as its floor, no dither; samples scaled by 2**15.

    Args:
        sample_rate: in Hz; recordings at another rate are resampled.
        num_mels: the number of filters.
        window: the window of a frame.
        normalize: utterance CMVN: each channel has mean 0 and variance 1 over the utterance.
    """

    sample_rate: Annotated[int, Ge(1000), Le(384_000)] = 16000
    num_mels: Annotated[int, Ge(4), Le(4096)] = 80
    window: Literal["povey", "hamming", "hanning", "rectangular", "blackman"] = "povey"
    normalize: bool = True

    kind: ClassVar[Kind] = "audio"

    def __post_init__(self) -> None:
        try:
            kaldi_native_fbank.OnlineFbank(self._options())
        except ValueError as error:
            key = f"task.data.features.num_mels={self.num_mels}"
            raise ConfigError(f"{key}: too many for sample_rate={self.sample_rate} Hz; the recipes take 80") from error

    @property
    def width(self) -> int:
        """The number of values in a frame."""
        return self.num_mels

    def fingerprint(self) -> dict[str, object]:
        """Everything but the audio that the features depend on."""
        versions = {"kaldi_native_fbank": kaldi_native_fbank.__version__, "soxr": soxr.__version__}
        return {**asdict(self), **versions}

    def __call__(self, waveform: Array, rate: int) -> Array:
        """(samples,) in [-1, 1) at `rate` Hz -> (frames, num_mels).  Less than a frame is zero-padded to one."""
        if rate != self.sample_rate:
            waveform = soxr.resample(waveform, rate, self.sample_rate)
        frame = int(self.sample_rate * FRAME_MS / 1000)
        if len(waveform) < frame:
            waveform = np.pad(waveform, (0, frame - len(waveform)))
        bank = kaldi_native_fbank.OnlineFbank(self._options())
        bank.accept_waveform(self.sample_rate, waveform * np.float32(2**15))
        bank.input_finished()
        features: Array = np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)])
        return utterance_cmvn(features) if self.normalize else features

    def _options(self) -> kaldi_native_fbank.FbankOptions:
        options = kaldi_native_fbank.FbankOptions()
        options.frame_opts.samp_freq = self.sample_rate
        options.frame_opts.frame_length_ms = FRAME_MS
        options.frame_opts.frame_shift_ms = SHIFT_MS
        options.frame_opts.window_type = self.window
        options.frame_opts.dither = 0.0
        options.mel_opts.num_bins = self.num_mels
        return options


def utterance_cmvn(features: Array) -> Array:
    """(T, F) -> (T, F), each column with mean 0 and variance 1 (a constant column: 0)."""
    centred = features - features.mean(axis=0, dtype=np.float64)
    deviation = np.sqrt(np.maximum(np.square(centred).mean(axis=0), 1e-10))
    return (centred / deviation).astype(np.float32)


def read_waveform(path: Path, start: int, num_samples: int) -> Array:
    """(num_samples,) float32 in [-1, 1), channels averaged.  DataError: the file has fewer from `start` on."""
    with reading(path, f"a recording with sample {start}"):
        samples, _ = soundfile.read(path, frames=num_samples, start=start, dtype="float32", always_2d=True)
    if len(samples) < num_samples:
        raise DataError(f"{path}: damaged audio, {len(samples)} of {num_samples} samples from sample {start} on")
    mono: Array = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)
    return mono


def change_speed(waveform: Array, rate: int, speed: float) -> Array:
    """(samples,) at `rate` Hz -> (samples / speed,): tempo and pitch together, as a tape that runs faster."""
    if speed == 1.0 or not len(waveform):
        return waveform
    faster: Array = soxr.resample(waveform, rate * speed, rate)
    return faster


@dataclass(frozen=True)
class SpecAugment:
    """Time warping and masks of frequency and time (Park et al. 2019); the defaults are the LB policy without warping.

    All layers of a frame, where it has several, are warped and masked alike.

    Widths are uniform over {0, ..., freq_mask - 1} and {0, ..., min(time_mask, probability * T) - 1}, as the recipe's
    code draws them.  Masked values become 0, the mean after utterance CMVN.

    Args:
        num_freq_masks, freq_mask: the number of frequency masks and the bound of their width, in channels.
        num_time_masks, time_mask: the number of time masks and the bound of their width, in frames.
        probability: the largest masked share of time, 0 to 1.
        time_warp: W, in frames: a random frame is moved by up to W frames, what lies before and after it is stretched
            or shortened linearly, and the number of frames stays. 0: none. Shorter inputs than 2 W + 1 are not warped.
    """

    num_freq_masks: Annotated[int, Ge(0), Le(1000)] = 1
    freq_mask: Annotated[int, Ge(0)] = 27
    num_time_masks: Annotated[int, Ge(0), Le(1000)] = 1
    time_mask: Annotated[int, Ge(0)] = 100
    probability: Annotated[float, Ge(0), Le(1)] = 1.0
    time_warp: Annotated[int, Ge(0)] = 0

    def __call__(self, features: Array, random: np.random.Generator) -> Array:
        """(T, F) or (T, L, F), a warped and masked copy of that shape; all randomness comes from `random`."""
        masked = self._warped(features, random)
        frames, channels = masked.shape[0], masked.shape[-1]
        for _ in range(self.num_freq_masks):
            first, last = _draw(random, min(self.freq_mask, channels), channels)
            masked[..., first:last] = 0.0
        for _ in range(self.num_time_masks):
            first, last = _draw(random, min(self.time_mask, int(frames * self.probability)), frames)
            masked[first:last] = 0.0
        return masked

    def _warped(self, features: Array, random: np.random.Generator) -> Array:
        frames, widest = len(features), self.time_warp
        if not widest or frames < 2 * widest + 1:
            return features.copy()
        centre = int(random.integers(widest, frames - widest))
        moved = centre + int(random.integers(1 - widest, widest))
        return warped(features, centre, moved)


def warped(features: Array, centre: int, moved: int) -> Array:
    """(T, F) or (T, L, F) of the same shape: frame `centre` moves to place `moved`; elsewhere, linear interpolation."""
    last = len(features) - 1
    knots = np.unique(np.asarray([[0, 0], [moved, centre], [last, last]], dtype=np.float64), axis=0)
    places = np.interp(np.arange(last + 1), knots[:, 0], knots[:, 1])
    below = np.minimum(places.astype(np.int64), max(last - 1, 0))
    share = (places - below).astype(np.float32).reshape(-1, *[1] * (features.ndim - 1))
    mixed: Array = (1 - share) * features[below] + share * features[np.minimum(below + 1, last)]
    return mixed


def _draw(random: np.random.Generator, widest: int, size: int) -> tuple[int, int]:
    width = int(random.integers(widest)) if widest > 0 else 0
    first = int(random.integers(size - width))
    return first, first + width
