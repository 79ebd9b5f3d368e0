"""Features of a split on disk: computed once, named by their content, checked whenever they are read.

One folder per split, `<split>-<key>`: `features.f16`, the frames of all segments one after the other, and `index.json`,
frames and CRC-32 of each segment.  The key hashes the recordings' bytes, the segments' bounds and the settings of the
features, so that nothing changed can be taken for the old.

float16: normalised features lie within a few units of 0, where it is exact to 2**-11 relative, far finer than the noise
of any recording, and MuST-C's 400 hours take 23 GB instead of 46.  Plain reads rather than a memory map: the page cache
serves both alike, and a file cut short under a map kills the process.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from attnlab.data.corpus import Segment
from attnlab.data.speech.features import Array, FilterBank, change_speed, read_waveform
from attnlab.errors import DataError
from attnlab.run.cache import Damaged, read_index, stored, write_index
from attnlab.run.fingerprint import file_digests
from attnlab.run.progress import progress

log = logging.getLogger(__name__)

VERSION = 1  # to be raised when the same audio and settings give other numbers
_DTYPE = np.dtype("<f2")
_CHUNK = 256  # segments that are submitted together


class FeatureStore:
    """Features of `segments`, read from `folder`; `lengths` (int64) counts the frames of each.

    Raises:
        Damaged: the folder does not hold the features of `key`.
    """

    def __init__(self, folder: Path, key: str, segments: Sequence[Segment], bank: FilterBank) -> None:
        self._path, self._bank = folder / "features.f16", bank
        index = read_index(folder)
        if index["key"] != key or len(index["frames"]) != len(segments):
            raise Damaged("its index does not fit")
        self.lengths = np.asarray(index["frames"], dtype=np.int64)
        self._checks: list[int] = index["crc32"]
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths)]) * bank.num_mels * _DTYPE.itemsize
        size = self._path.stat().st_size if self._path.is_file() else 0
        if size != self._offsets[-1]:
            raise Damaged(f"{self._path.name} has {size} bytes, expected {self._offsets[-1]}")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Array:
        """(T, num_mels) float32. DataError: the bytes are damaged."""
        with self._path.open("rb") as file:
            file.seek(self._offsets[i])
            data = file.read(int(self._offsets[i + 1] - self._offsets[i]))
        if zlib.crc32(data) != self._checks[i]:
            raise DataError(f"{self._path}: damaged; delete {self._path.parent} and run again")
        return np.frombuffer(data, dtype=_DTYPE).reshape(-1, self._bank.num_mels).astype(np.float32)


def open_features(
    cache_dir: Path, split: str, segments: Sequence[Segment], bank: FilterBank, workers: int | None = None
) -> FeatureStore:
    """The stored features of `segments`, which are first computed where they are missing or damaged.

    Args:
        split: the beginning of the folder's name.
        workers: the number of threads; None: one per CPU.

    Raises:
        DataError: a recording cannot be read, or there is no space to write.
    """
    key = content_key(cache_dir, segments, bank)
    folder = cache_dir / "features" / f"{split}-{key[:24]}"
    return stored(
        folder,
        lambda path: FeatureStore(path, key, segments, bank),
        lambda partial: _build(partial, folder, key, segments, bank, workers or os.cpu_count() or 1),
    )


def content_key(cache_dir: Path, segments: Sequence[Segment], bank: FilterBank) -> str:
    """SHA-256 of all that the features depend on: bytes of the recordings, bounds of the segments, settings."""
    digests = file_digests({segment.audio for segment in segments}, cache_dir / "features" / "audio.json")
    key = hashlib.sha256(json.dumps([VERSION, bank.fingerprint()], sort_keys=True).encode())
    for segment in segments:
        speed = "" if segment.speed == 1.0 else f" {segment.speed}"
        key.update(f"{digests[segment.audio]} {segment.rate} {segment.start} {segment.num_samples}{speed}\n".encode())
    return key.hexdigest()


def _compute(segment: Segment, bank: FilterBank) -> bytes:
    waveform = read_waveform(segment.audio, segment.start, segment.num_samples)
    if not np.isfinite(waveform).all():
        raise DataError(f"{segment.audio}: {segment.id} has samples that are not finite numbers")
    return bank(change_speed(waveform, segment.rate, segment.speed), segment.rate).astype(_DTYPE).tobytes()


def _build(partial: Path, folder: Path, key: str, segments: Sequence[Segment], bank: FilterBank, workers: int) -> None:
    hours = sum(segment.seconds for segment in segments) / 3600
    expected = int(hours * 3600 * 100) * bank.num_mels * _DTYPE.itemsize
    size = f"{expected / 2**20:.1f} MiB"
    log.info("%s: computing features of %d segments, %.2f hours", folder.name, len(segments), hours)
    began = time.monotonic()
    bar = progress(f"features {folder.name}, segments", len(segments))
    frames, checks = [], []
    try:
        free = shutil.disk_usage(partial).free
        if free < expected:
            raise DataError(f"{folder.parent}: features need {size}, {free / 2**20:.1f} MiB are free; set cache_dir")
        with (partial / "features.f16").open("wb") as out, ThreadPoolExecutor(workers) as pool, bar as advance:
            for first in range(0, len(segments), _CHUNK):
                for data in pool.map(lambda x: _compute(x, bank), segments[first : first + _CHUNK]):
                    out.write(data)
                    frames.append(len(data) // (bank.num_mels * _DTYPE.itemsize))
                    checks.append(zlib.crc32(data))
                    advance(1)
        write_index(partial, {"key": key, "frames": frames, "crc32": checks})
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}; features need {size})") from error
    seconds = time.monotonic() - began
    log.info("%s: %.1f s, %.0f times real time", folder.name, seconds, hours * 3600 / seconds)
