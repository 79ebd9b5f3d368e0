"""Features that were computed elsewhere, one file for each utterance: .npy, or HTK's and Sphinx's .mfc."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from annotated_types import Ge

from attnlab.data.corpus import Kind, Stored
from attnlab.data.speech.features import Array, utterance_cmvn
from attnlab.errors import ConfigError, DataError

HTK_HEADER = 12  # int32 frames, int32 period, int16 bytes of a frame, int16 kind; all big-endian


@dataclass(frozen=True)
class StoredFeatures:
    """(T, F) float32 from each utterance's file, read when it is needed.

    Args:
        width: the number of values in a frame that the model sees: 1 + `deltas` times the columns of the files.
        deltas: 1 adds the regression slopes over two frames to either side, 2 also the slopes of the slopes.
        normalize: utterance CMVN.
    """

    width: Annotated[int, Ge(1)]
    deltas: Annotated[int, Ge(0)] = 0
    normalize: bool = True

    kind: ClassVar[Kind] = "stored"

    def __post_init__(self) -> None:
        if self.width < 1 or self.deltas < 0 or self.width % (1 + self.deltas):
            raise ConfigError(
                f"features: width={self.width}, deltas={self.deltas}: width is the files' columns times 1 + deltas"
            )

    @property
    def columns(self) -> int:
        return self.width // (1 + self.deltas)

    def open(self, utterances: Sequence[Stored]) -> "StoredInputs":
        return StoredInputs(utterances, self)

    def __call__(self, path: Path) -> Array:
        features = read_features(path, self.columns)
        if not np.isfinite(features).all():
            raise DataError(f"{path}: holds numbers that are not finite")
        parts = [features]
        for _ in range(self.deltas):
            parts.append(slopes(parts[-1]))
        features = np.concatenate(parts, axis=1)
        return utterance_cmvn(features) if self.normalize else features


class StoredInputs:
    """The features of `utterances`; `lengths` come from sizes and headers."""

    def __init__(self, utterances: Sequence[Stored], front: StoredFeatures) -> None:
        self._paths, self._front = [x.path for x in utterances], front
        self.lengths = np.asarray([frames(path, front.columns) for path in self._paths], dtype=np.int64)

    def __getitem__(self, i: int) -> Array:
        return self._front(self._paths[i])


def slopes(x: Array) -> Array:
    """(T, F): regression slopes over frames t - 2 ... t + 2, the ends repeated (HTK book, eq. 5.16)."""
    p = np.pad(x, ((2, 2), (0, 0)), mode="edge")
    return ((p[3:-1] - p[1:-3] + 2 * (p[4:] - p[:-4])) / 10).astype(np.float32)


def frames(path: Path, columns: int) -> int:
    """Frames of a file, from its header and size.  DataError: no such file, not such a file, another width."""
    try:
        if path.suffix == ".npy":
            shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
        else:
            shape = _layout(path, columns)[0]
    except OSError as error:
        raise DataError(f"{path}: missing or unreadable features ({error.strerror or error})") from error
    except ValueError as error:
        raise DataError(f"{path}: not a readable feature file ({error})") from error
    if len(shape) != 2 or shape[1] != columns:
        raise DataError(
            f"{path}: features of shape {tuple(shape)}, expected (frames, {columns}): see task.data.features"
        )
    if shape[0] < 1:
        raise DataError(f"{path}: no frames")
    return int(shape[0])


def read_features(path: Path, columns: int) -> Array:
    """(T, columns) float32."""
    frames(path, columns)
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False).astype(np.float32)
    shape, kind, offset = _layout(path, columns)
    values: Array = np.fromfile(path, dtype=kind, offset=offset).reshape(shape).astype(np.float32)
    return values


def _layout(path: Path, columns: int) -> tuple[tuple[int, int], npt.DTypeLike, int]:
    """Shape, type and first byte of an .mfc file: its size tells Sphinx's header (a count of numbers) from HTK's."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HTK_HEADER)
    if len(header) >= 4:
        for order in (">", "<"):
            count = int(np.frombuffer(header, f"{order}i4", 1)[0])
            if count > 0 and size == 4 + 4 * count:
                if count % columns:
                    raise ValueError(f"its {count} numbers are not a multiple of {columns}, the numbers of a frame")
                return (count // columns, columns), f"{order}f4", 4
    if len(header) == HTK_HEADER:
        count, width = int(np.frombuffer(header, ">i4", 1)[0]), int(np.frombuffer(header, ">i2", 1, 8)[0])
        if count > 0 and width > 0 and width % 4 == 0 and size == HTK_HEADER + count * width:
            return (count, width // 4), ">f4", HTK_HEADER
    raise ValueError("its size fits neither a Sphinx nor an uncompressed HTK header")
