"""The texts on which a conversion is calibrated; text that is scored later is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlab.conversion.settings import Calibration
from attnlab.data.text.corpora import Split
from attnlab.errors import DataError

if TYPE_CHECKING:
    from attnlab.data.text.language_modelling import LanguageModellingData

HELD_OUT: tuple[Split, ...] = ("validation", "test")
LONGEST = 32  # characters of a token at most: bounds how much of a text file is read
COMPARED = 200  # lines of a held-out split that are looked for in the text
SHARED = 0.05  # the largest share of lines that a calibration text may share with a held-out split
LINE = 80  # characters of a line that is too long to be the same by chance


def calibration_tokens(settings: Calibration, data: LanguageModellingData) -> tuple[Tensor, str]:
    """The tokens of the calibration texts (windows, positions), and a name of the text.

    Raises:
        DataError: the text is shorter than one window, or it is held-out text.
    """
    vocabulary = data.vocabulary
    if settings.file is None:
        ids = data.beginning("train", settings.tokens).tolist()
        where, name = "the training split", f"the training split of {data.source.name}"
    else:
        path = Path(settings.file).expanduser()
        where, name = f"convert.calibration.file={path}", path.name
        _refuse_files(path, where, data)
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(LONGEST * settings.tokens)
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: cannot be read as UTF-8 text ({error})") from error
        ids = vocabulary.ids(text)[: settings.tokens]
    windows = len(ids) // settings.window
    if not windows:
        raise DataError(
            f"{where}: the calibration text has {len(ids)} tokens, less than one text of "
            f"convert.calibration.window={settings.window}"
        )
    _refuse_lines(vocabulary.text(ids), where, data)
    tokens = torch.tensor(ids[: windows * settings.window]).view(windows, settings.window)
    return tokens, f"the first {len(ids)} tokens of {name}"


def scale_tokens(data: LanguageModellingData) -> Tensor:
    """The first texts of the training split (windows, positions), on which a teacher's layers are measured."""
    ids = torch.from_numpy(data.beginning("train", 16 * data.window))
    size = min(data.window, len(ids))
    return ids[: len(ids) // size * size].view(-1, size)


def _refuse_files(path: Path, where: str, data: LanguageModellingData) -> None:
    assert data.root is not None
    train = data.source.files(data.root, "train")
    for split in HELD_OUT:
        for file in data.source.files(data.root, split):
            if file.exists() and file.samefile(path) and file not in train:
                raise DataError(f"{where}: that is the {split} split, which is scored")


def _refuse_lines(text: str, where: str, data: LanguageModellingData) -> None:
    """Refuse a text that shares more than a few lines with a held-out split, wherever its lines break."""
    unbroken, lines = " ".join(text.split()), set(_lines(text))
    for split in HELD_OUT:
        scored = list(dict.fromkeys(_lines(data.text(split))))
        compared = scored[:: max(1, len(scored) // COMPARED)]
        inside, shared = sum(line in unbroken for line in compared), len(lines.intersection(scored))
        if inside > SHARED * len(compared) or shared > SHARED * len(lines):
            raise DataError(
                f"{where}: it has text of the {split} split, which is scored ({inside} of {len(compared)} compared "
                f"lines of that split, {shared} of {len(lines)} calibration lines); give another "
                "convert.calibration.file"
            )


def _lines(text: str) -> list[str]:
    """The long lines, with single spaces."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if len(line) > LINE]
