"""Log-mel filter bank with Kaldi's conventions, its features on disk, SpecAugment.

Features are stored in one folder per split, `<split>-<key>`: `features.f16`, the frames of all segments one after the
other, and `index.json`, frames and CRC-32 of each segment.  The key hashes the recordings' bytes, the segments' bounds
and the settings of the features, so that nothing changed can be taken for the old.

float16: normalised features lie within a few units of 0, where it is exact to 2**-11 relative, far finer than the noise
of any recording, and MuST-C's 400 hours take 23 GB instead of 46.
"""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import kaldi_native_fbank
import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from annotated_types import Ge, Le

from attnlab.data.corpus import Kind, Segment, reading
from attnlab.errors import DataError
from attnlab.run.cache import Damaged, file_digests, read_index, stored, write_index
from attnlab.run.console import progress

log = logging.getLogger(__name__)

Array = npt.NDArray[np.float32]

FRAME_MS, SHIFT_MS = 25.0, 10.0
STORED = np.dtype("<f2")  # type of the numbers on disk
VERSION = 1  # to be raised when the same audio and settings give other numbers
LARGEST = 2.0**31  # of samples: 32-bit integers that were not divided
CHUNK = 256  # segments that are submitted together


@dataclass(frozen=True)
class FilterBank:
    """Log-mel features as fairseq's speech recipes compute them, normalised per utterance.

    25 ms frames every 10 ms, DC removed, pre-emphasis 0.97, window, power spectrum, triangular filters from 20 Hz to
    the Nyquist frequency, natural logarithm with float32 epsilon as its floor, no dither; samples scaled by 2**15.

    Args:
        sample_rate: in Hz; recordings at another rate are resampled.
        normalize: utterance CMVN: each channel has mean 0 and variance 1 over the utterance.
    """

    sample_rate: Annotated[int, Ge(1000), Le(384_000)] = 16000
    num_mels: Annotated[int, Ge(4), Le(4096)] = 80
    window: Literal["povey", "hamming", "hanning", "rectangular", "blackman"] = "povey"
    normalize: bool = True

    kind: ClassVar[Kind] = "audio"

    def __post_init__(self) -> None:
        kaldi_native_fbank.OnlineFbank(self._options())  # ValueError: too many filters for the sample rate

    @property
    def width(self) -> int:
        """The number of values in a frame."""
        return self.num_mels

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

    def open(self, segments: Sequence[Segment], place: Path, tokenizer: object = None) -> "FeatureStore":
        """The stored features of recordings, which are first computed where they are missing or damaged.

        Args:
            place: the folder to which a hash is added.

        Raises:
            DataError: a recording cannot be read, or the disk is full.
        """
        digests = file_digests({segment.audio for segment in segments}, place.with_name("audio.json"))
        versions = {"kaldi_native_fbank": kaldi_native_fbank.__version__, "soxr": soxr.__version__}
        hashed = hashlib.sha256(json.dumps([VERSION, asdict(self) | versions], sort_keys=True).encode())
        for x in segments:
            speed = "" if x.speed == 1.0 else f" {x.speed}"
            hashed.update(f"{digests[x.audio]} {x.rate} {x.start} {x.num_samples}{speed}\n".encode())
        key = hashed.hexdigest()
        return stored(
            place.with_name(f"{place.name}-{key[:24]}"),
            lambda folder: FeatureStore(folder, key, segments, self),
            lambda folder: _write(folder, place.name, key, segments, self),
        )

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
    """(num_samples,) float32 in [-1, 1), channels averaged.

    DataError: the file has fewer from `start` on, or values as in :func:`usable`.
    """
    with reading(path, f"a recording that is complete from sample {start} on"):
        samples, _ = soundfile.read(path, frames=num_samples, start=start, dtype="float32", always_2d=True)
    if len(samples) < num_samples:
        raise DataError(f"{path}: damaged audio, {len(samples)} of {num_samples} samples from sample {start} on")
    with np.errstate(over="ignore", invalid="ignore"):
        return usable(samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1), path)


def usable(samples: Array, name: object) -> Array:
    """(samples,) as they are.  DataError, with the recording's name: one is NaN, infinite or larger than 2**31."""
    peak = np.abs(samples).max(initial=0)
    if not peak <= LARGEST:
        raise DataError(f"{name}: damaged audio, samples of {peak:g}; expected numbers from -1 to 1")
    return samples


def change_speed(waveform: Array, rate: int, speed: float) -> Array:
    """(samples,) at `rate` Hz -> (samples / speed,): tempo and pitch together, as a tape that runs faster."""
    if speed == 1.0 or not len(waveform):
        return waveform
    return soxr.resample(waveform, rate * speed, rate)


class FeatureStore:
    """Features of `segments`, read from `folder`; `lengths` (int64) counts the frames of each.

    Raises:
        Damaged: the folder does not hold the features of `key`.
    """

    def __init__(self, folder: Path, key: str, segments: Sequence[Segment], bank: FilterBank) -> None:
        self._path, self._width = folder / "features.f16", bank.num_mels
        index = read_index(folder)
        if index["key"] != key or len(index["frames"]) != len(segments):
            raise Damaged("its index does not fit")
        self.lengths = np.asarray(index["frames"], dtype=np.int64)
        self._checks: list[int] = index["crc32"]
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths)]) * bank.num_mels * STORED.itemsize
        if (size := self._path.stat().st_size) != self._offsets[-1]:
            raise Damaged(f"{self._path.name} has {size} bytes, expected {self._offsets[-1]}")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Array:
        """(T, num_mels) float32. DataError: the bytes are damaged."""
        with self._path.open("rb") as file:  # no memory map: a file that is cut short under it kills the process
            file.seek(self._offsets[i])
            data = file.read(int(self._offsets[i + 1] - self._offsets[i]))
        if zlib.crc32(data) != self._checks[i]:
            raise DataError(f"{self._path}: damaged; delete {self._path.parent} and run again")
        return np.frombuffer(data, dtype=STORED).reshape(-1, self._width).astype(np.float32)


def _write(folder: Path, split: str, key: str, segments: Sequence[Segment], bank: FilterBank) -> None:
    hours = sum(segment.seconds for segment in segments) / 3600
    size = hours * 360_000 * bank.num_mels * STORED.itemsize / 2**20
    log.info("features of %s: %d segments, %.2f hours, %.1f MiB", split, len(segments), hours, size)

    def compute(segment: Segment) -> bytes:
        waveform = read_waveform(segment.audio, segment.start, segment.num_samples)
        return bank(change_speed(waveform, segment.rate, segment.speed), segment.rate).astype(STORED).tobytes()

    bar = progress(f"features {split}, segments", len(segments))
    frames, checks = [], []
    with (folder / "features.f16").open("wb") as out, ThreadPoolExecutor(os.cpu_count()) as pool, bar as advance:
        for first in range(0, len(segments), CHUNK):
            for data in pool.map(compute, segments[first : first + CHUNK]):
                out.write(data)
                frames.append(len(data) // (bank.num_mels * STORED.itemsize))
                checks.append(zlib.crc32(data))
                advance(1)
    write_index(folder, {"key": key, "frames": frames, "crc32": checks})


@dataclass(frozen=True)
class SpecAugment:
    """Time warping and masks of frequency and time (Park et al. 2019); the defaults are the LB policy without warping.

    All layers of a frame are warped and masked in the same way.

    Widths are uniform over {0, ..., freq_mask - 1} channels and {0, ..., min(time_mask, probability * T) - 1} frames,
    as the recipe's code draws them.  Masked values become 0, the mean after utterance CMVN.

    Args:
        probability: the largest masked share of time.
        time_warp: W, in frames: a random frame is moved by up to W frames, what lies before and after it is stretched
            or shortened linearly, and the number of frames stays. Shorter inputs than 2 W + 1 are not warped.
    """

    num_freq_masks: Annotated[int, Ge(0), Le(1000)] = 1
    freq_mask: Annotated[int, Ge(0)] = 27
    num_time_masks: Annotated[int, Ge(0), Le(1000)] = 1
    time_mask: Annotated[int, Ge(0)] = 100
    probability: Annotated[float, Ge(0), Le(1)] = 1.0
    time_warp: Annotated[int, Ge(0)] = 0

    def __call__(self, features: Array, random: np.random.Generator) -> Array:
        """(T, F) or (T, L, F), a warped and masked copy of that shape; all randomness comes from `random`."""
        masked, reach = features.copy(), self.time_warp
        if 0 < 2 * reach < len(features):
            centre = int(random.integers(reach, len(features) - reach))
            masked = warped(features, centre, centre + int(random.integers(1 - reach, reach)))
        frames, channels = masked.shape[0], masked.shape[-1]
        for _ in range(self.num_freq_masks):
            first, last = _draw(random, min(self.freq_mask, channels), channels)
            masked[..., first:last] = 0.0
        for _ in range(self.num_time_masks):
            first, last = _draw(random, min(self.time_mask, int(frames * self.probability)), frames)
            masked[first:last] = 0.0
        return masked


def warped(features: Array, centre: int, moved: int) -> Array:
    """(T, F) or (T, L, F) of the same shape: frame `centre` moves to place `moved`; elsewhere, linear interpolation."""
    last = len(features) - 1
    knots = np.unique(np.asarray([[0, 0], [moved, centre], [last, last]], dtype=np.float64), axis=0)
    places = np.interp(np.arange(last + 1), knots[:, 0], knots[:, 1])
    below = np.minimum(places.astype(np.int64), max(last - 1, 0))
    share = (places - below).astype(np.float32).reshape(-1, *[1] * (features.ndim - 1))
    return (1 - share) * features[below] + share * features[np.minimum(below + 1, last)]


def _draw(random: np.random.Generator, widest: int, size: int) -> tuple[int, int]:
    width = int(random.integers(widest)) if widest > 0 else 0
    first = int(random.integers(size - width))
    return first, first + width
