"""Tensors that are more than memory should hold, in a file for as long as they are needed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from attnlab.errors import WriteError


class Scratch:
    """Tensors by number, each read anew whenever it is asked for.

    The file has no name, so that nothing of it is left when the process ends, however that happens. It is read and
    written, not mapped: pages of a mapped file count as memory of the process.

    Args:
        folder: where the file is; None: the system's folder for temporary files (TMPDIR).

    Raises:
        WriteError: the file cannot be made, written or read again, as on a full disk.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._places: dict[int, tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115  closed by :meth:`close`
        except OSError as error:
            raise self._failed(error) from error

    def __setitem__(self, number: int, value: Tensor) -> None:
        data = _bytes(value.detach().cpu().contiguous())
        known = self._places.get(number)
        place = known[0] if known is not None and known[1:] == (value.shape, value.dtype) else self._end
        try:
            self._file.seek(place)
            rest = data
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._failed(error) from error
        self._places[number] = place, value.shape, value.dtype
        self._end = max(self._end, place + data.nbytes)

    def __getitem__(self, number: int) -> Tensor:
        place, shape, dtype = self._places[number]
        found = torch.empty(shape, dtype=dtype)
        rest = _bytes(found)
        try:
            self._file.seek(place)
            while rest:
                read = self._file.readinto(rest)
                if not read:
                    raise OSError("what was written is not there any more")
                rest = rest[read:]
        except OSError as error:
            raise self._failed(error) from error
        return found

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def clear(self) -> None:
        """Forget all; the file keeps its size, for the next ones."""
        self._places.clear()
        self._end = 0

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _failed(self, error: OSError) -> WriteError:
        said = error.strerror or str(error)
        return WriteError(error.errno, f"hidden states of the calibration texts: {said}", str(self._folder))


def _bytes(value: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return value.view(-1).view(torch.uint8).numpy().data
