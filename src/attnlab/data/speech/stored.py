"""Features computed by other programs, one file for each utterance: .npy, or Sphinx's .mfc.

An .mfc file has the number of its values, int32, and the values, float32, all big-endian.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le

from attnlab.config.bounds import Layers, Size
from attnlab.data.corpus import Kind, Stored, reading
from attnlab.data.speech.features import Array, utterance_cmvn
from attnlab.errors import ConfigError, DataError


@dataclass(frozen=True)
class StoredFeatures:
    """Reads (T, F) float32 features from the file of each utterance, when they are needed; with `layers` (T, L, F).

    Args:
        width: F, the number of values in a frame of the model's input: 1 + `deltas` times the columns of the files.
        deltas: 1 appends the regression slopes over two frames to either side, 2 also the slopes of these.
        layers: L, the layers of a pretrained model that a frame of the files has; the encoder mixes them
            (`task.model.encoder.mix_layers`), and takes the mean over the utterance off. None: frames are of one layer.

    Raises:
        ConfigError: `width` is not a multiple of 1 + `deltas`, or `layers` stand beside `deltas` or `normalize`.
    """

    width: Size
    deltas: Annotated[int, Ge(0), Le(100)] = 0
    normalize: bool = True
    layers: Layers | None = None

    kind: ClassVar[Kind] = "stored"

    def __post_init__(self) -> None:
        if self.width % (1 + self.deltas):
            settings = f"width={self.width}, deltas={self.deltas}"
            raise ConfigError(f"task.data.features: {settings}: expected width = (1 + deltas) x file columns")
        if self.layers is not None and (self.deltas or self.normalize):
            raise ConfigError(f"task.data.features.layers={self.layers}: expected deltas=0 and normalize=false")

    @property
    def columns(self) -> int:
        """The number of values in a frame of the files."""
        return self.width // (1 + self.deltas)

    def open(self, utterances: Sequence[Stored], *_: object) -> "StoredInputs":
        """The features of utterances, by their number."""
        return StoredInputs(utterances, self)

    def frames(self, path: Path) -> int:
        """The number of frames of a file, from its header and size.

        Raises:
            DataError: the file is missing, unreadable, empty, of another width or of another number of layers.
        """
        return len(self._array(path))

    def __call__(self, source: Path | npt.NDArray[Any]) -> Array:
        """(T, F) or (T, L, F) float32 of a .npy or .mfc file, or of its values.  DataError: see `frames`, or NaN."""
        features = np.array(self._array(source), dtype=np.float32)
        if not np.isfinite(features).all():
            where = source if isinstance(source, Path) else "features"
            raise DataError(f"{where}: contains NaN or infinity; expected finite values")
        parts = [features]
        for _ in range(self.deltas):
            parts.append(slopes(parts[-1]))
        features = np.concatenate(parts, axis=1)
        return utterance_cmvn(features) if self.normalize else features

    def _array(self, source: Path | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values of a file, not read yet."""
        path = Path("features") if isinstance(source, np.ndarray) else source
        with reading(path, "a feature file; delete a damaged one and write it again"):
            if isinstance(source, np.ndarray):
                array = source
            elif path.suffix == ".npy":
                array = np.lib.format.open_memmap(path, mode="r")
            else:
                count = int(np.fromfile(path, ">i4", 1)[0])
                if path.stat().st_size != 4 + 4 * count or count % self.columns:
                    raise ValueError(f"its header says {count} values; expected all values, {self.columns} for a frame")
                array = np.memmap(path, ">f4", "r", offset=4).reshape(-1, self.columns)
            if array.dtype.kind not in "fiu":
                raise ValueError(f"expected an array of numbers, not {array.dtype}")
        wanted = (self.columns,) if self.layers is None else (self.layers, self.columns)
        if not array.size or array.shape[1:] != wanted:
            key = "layers" if array.ndim == 3 or self.layers else "width"
            expected = f"expected ({', '.join(map(str, ('frames', *wanted)))}): see task.data.features.{key}"
            raise DataError(f"{path}: features of shape {array.shape}, {expected}")
        return array


class StoredInputs:
    """The features of utterances.  `lengths` (n,) int64 counts the frames of each, from headers and sizes of the files.

    Raises:
        DataError: as of :meth:`StoredFeatures.frames`.
    """

    def __init__(self, utterances: Sequence[Stored], front: StoredFeatures) -> None:
        self._paths, self._front = [x.path for x in utterances], front
        self.lengths = np.asarray([front.frames(path) for path in self._paths], dtype=np.int64)

    def __getitem__(self, i: int) -> Array:
        return self._front(self._paths[i])


def slopes(x: Array) -> Array:
    """(T, F) to (T, F): regression slopes over frames t - 2 to t + 2, with the ends repeated (HTK book, eq. 5.16)."""
    p = np.pad(x, ((2, 2), (0, 0)), mode="edge")
    return ((p[3:-1] - p[1:-3] + 2 * (p[4:] - p[:-4])) / 10).astype(np.float32)
